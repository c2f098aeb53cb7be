//! Applies the custom resource definitions and admission policies that this binary was built with.

use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kibo_crds::{FIELD_MANAGER, overcommit_policy};
use kibo_crds::{
    Node, OvercommitPolicy, StoragePool, Template, Volume, Workspace, WorkspaceTombstone,
    policy::{self, Optional},
    yaml,
};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
    runtime::wait::{await_condition, conditions},
};
use serde::{Serialize, de::DeserializeOwned};

const ESTABLISHED_WITHIN: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("failed to apply {kind} {name}: {source}")]
    Apply { kind: String, name: String, source: Box<kube::Error> },
    #[error("custom resource definition {0} was not established within {ESTABLISHED_WITHIN:?}: see its conditions")]
    NotEstablished(String),
    #[error("failed to wait for custom resource definition {name}: {source}")]
    Wait { name: String, source: Box<kube::runtime::wait::Error> },
    #[error("{kind} is not served: {source}")]
    NotServed { kind: String, source: Box<kube::Error> },
    #[error("failed to create the default OvercommitPolicy: {0}")]
    DefaultPolicy(Box<kube::Error>),
}

/// Everything that the other rooms stand on. Idempotent.
pub async fn apply(client: &Client) -> Result<(), ApplyError> {
    let crds = yaml::crds();
    for crd in &crds {
        server_side_apply(&Api::all(client.clone()), crd).await?;
    }
    for crd in &crds {
        established(client, &crd.name_any()).await?;
    }
    for policy in policy::all() {
        server_side_apply(&Api::all(client.clone()), &policy.policy).await?;
        server_side_apply(&Api::all(client.clone()), &policy.binding).await?;
    }
    own_new_workspaces(client).await?;
    served::<Node>(client).await?;
    served::<StoragePool>(client).await?;
    served::<OvercommitPolicy>(client).await?;
    served::<Template>(client).await?;
    served::<Workspace>(client).await?;
    served::<Volume>(client).await?;
    served::<WorkspaceTombstone>(client).await?;
    default_overcommit_policy(client).await?;
    tracing::info!(definitions = crds.len(), "custom resource definitions and policies are applied");
    Ok(())
}

/// Where the API server has such policies; elsewhere the operator gives each Workspace its finalizer by a write of its own.
async fn own_new_workspaces(client: &Client) -> Result<(), ApplyError> {
    for Optional { resource, object } in policy::own_new_workspaces() {
        let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
        match apply_object(&api, &object).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => {
                // Before Kubernetes 1.36 there is no such kind; with an older role the operator may not apply it.
                tracing::warn!(
                    kind = resource.kind,
                    error = status.message,
                    "not applied: each new Workspace costs one write more"
                );
                return Ok(());
            }
            applied => applied.map_err(|error| failed(&resource.kind, &object.name_any(), error))?,
        }
    }
    Ok(())
}

async fn server_side_apply<K>(api: &Api<K>, object: &K) -> Result<(), ApplyError>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let applied = apply_object(api, object).await;
    applied.map_err(|error| failed(&K::kind(&()), &object.name_any(), error))
}

fn failed(kind: &str, name: &str, error: kube::Error) -> ApplyError {
    ApplyError::Apply { kind: kind.to_owned(), name: name.to_owned(), source: Box::new(error) }
}

async fn apply_object<K>(api: &Api<K>, object: &K) -> Result<(), kube::Error>
where
    K: Resource + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let name = object.name_any();
    let params = PatchParams::apply(FIELD_MANAGER).force();
    let mut last = None;
    // Two replicas of different versions may apply at once: the apply of one then meets a conflict of versions.
    for _ in 0..3 {
        match api.patch(&name, &params, &Patch::Apply(object)).await {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(status)) if status.is_conflict() => last = Some(kube::Error::Api(status)),
            Err(error) => return Err(error),
        }
    }
    Err(last.unwrap_or_else(|| kube::Error::Service("no answer".into())))
}

async fn established(client: &Client, name: &str) -> Result<(), ApplyError> {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    let wait = await_condition(api, name, conditions::is_crd_established());
    match tokio::time::timeout(ESTABLISHED_WITHIN, wait).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(source)) => Err(ApplyError::Wait { name: name.to_owned(), source: Box::new(source) }),
        Err(_) => Err(ApplyError::NotEstablished(name.to_owned())),
    }
}

/// An established definition is served a moment later; lists before that are answered with 404.
async fn served<K>(client: &Client) -> Result<(), ApplyError>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned,
{
    let api = Api::<K>::all(client.clone());
    let asked_until = tokio::time::Instant::now() + ESTABLISHED_WITHIN;
    loop {
        match api.list_metadata(&ListParams::default().limit(1)).await {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 && tokio::time::Instant::now() < asked_until => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(source) => {
                return Err(ApplyError::NotServed { kind: K::kind(&()).into_owned(), source: Box::new(source) });
            }
        }
    }
}

/// Made when it is missing; afterwards it belongs to the people who change it.
async fn default_overcommit_policy(client: &Client) -> Result<(), ApplyError> {
    let api = Api::<OvercommitPolicy>::all(client.clone());
    let wanted = OvercommitPolicy::new(overcommit_policy::DEFAULT, overcommit_policy::OvercommitPolicySpec::default());
    if api.get_opt(overcommit_policy::DEFAULT).await.map_err(|e| ApplyError::DefaultPolicy(Box::new(e)))?.is_some() {
        return Ok(());
    }
    match api.create(&PostParams::default(), &wanted).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => Err(ApplyError::DefaultPolicy(Box::new(error))),
    }
}
