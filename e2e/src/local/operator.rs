//! The operator of a local cluster: it runs with its own ServiceAccount's rights, never as the
//! administrator, so that a right that the chart forgets fails here first.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use http::Request;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, TypeMeta};
use kube::{Client, Config};
use serde::Deserialize as _;

use super::cluster::{ClusterError, LocalCluster, kube_failed};
use super::pki;
use super::process::Launch;

/// Where the operator and what it needs live.
pub const NAMESPACE: &str = "kibotos-system";

/// The operator's ServiceAccount, and the name of its program.
const OPERATOR: &str = "kibotos-operator";

/// The aggregated API that the operator serves.
const SUBRESOURCES: &str = "v1alpha1.subresources.kibotos.dev";

const FIELD_MANAGER: &str = "kibo-local";

/// `up` makes a new token whenever it starts the operator, so this bounds one uninterrupted run.
const TOKEN_VALID: Duration = Duration::from_secs(365 * 24 * 3600);

impl LocalCluster {
    /// From its next start on the operator gets these arguments after its usual ones, instead of any before.
    pub fn set_operator_args(&self, args: &[&str]) -> Result<(), ClusterError> {
        self.change_record(|record| record.operator_args = args.iter().map(ToString::to_string).collect())
    }

    /// Gives the operator its rights and its kubeconfig, and says how it is started.
    pub(super) async fn operator_launch(&self) -> Result<Launch, ClusterError> {
        let admin = self.client().await?;
        apply(&admin, namespace()).await?;
        for object in self.rbac()? {
            apply(&admin, object).await?;
        }
        let token = operator_token(&admin).await?;
        let kubeconfig = self.pki().token_kubeconfig(OPERATOR, &token, &self.server())?;
        pki::write(&self.layout().operator_kubeconfig(), kubeconfig.as_bytes())?;

        let ports = self.ports();
        let listen = |port: u16| format!("127.0.0.1:{port}");
        let log = self.layout().root().join("operator.log");
        let hint = "build it with cargo build --bins";
        let launch = Launch::new(self.programs().operator(), log, hint)
            .env(kibo_failpoint::DIRECTORY_VARIABLE, self.layout().operator_failpoints())
            .arg("run")
            .flag("kubeconfig", self.layout().operator_kubeconfig())
            .flag("namespace", NAMESPACE)
            .flag("session-listen", listen(ports.session))
            .flag("api-listen", listen(ports.api))
            .flag("health-listen", listen(ports.health))
            .flag("session-name", "127.0.0.1,localhost")
            // This cluster runs one at a time, so one that was killed need not be waited for.
            .flag("identity", "local")
            // Nor does another one wait to take over; so an API server that is away for long does not end it.
            .flag("lease-seconds", "60")
            // No kube-proxy here: the API server resolves the aggregated API by this name instead.
            .flag("api-service-external-name", "localhost");
        Ok(self.recorded().operator_args.iter().fold(launch, Launch::arg))
    }

    /// The manifests that the Helm chart installs too.
    fn rbac(&self) -> Result<Vec<DynamicObject>, ClusterError> {
        let dir = self.programs().repository.join("charts/kibotos/rbac");
        let failed = |path: PathBuf| move |source: std::io::Error| ClusterError::Manifest { path, source };
        let mut files: Vec<PathBuf> = fs::read_dir(&dir)
            .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
            .map_err(failed(dir.clone()))?;
        files.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
        files.sort();
        let mut objects = Vec::new();
        for path in files {
            let text = fs::read_to_string(&path).map_err(failed(path.clone()))?;
            for document in serde_yaml::Deserializer::from_str(&text) {
                let object = Option::<DynamicObject>::deserialize(document)
                    .map_err(|error| failed(path.clone())(std::io::Error::other(error)))?;
                objects.extend(object);
            }
        }
        Ok(objects)
    }

    /// Whether the operator is ready, and its API is reachable through the API server.
    pub(super) async fn operator_serves(&self, admin: &Client) -> bool {
        let address = format!("http://127.0.0.1:{}", self.ports().health);
        let Ok(health) = Client::try_from(Config::new(address.parse().expect("an address"))) else {
            return false;
        };
        let request = Request::get("/readyz").body(Vec::new()).expect("a constant path");
        health.request_text(request).await.is_ok() && api_is_available(admin).await
    }
}

async fn api_is_available(admin: &Client) -> bool {
    let services: Api<APIService> = Api::all(admin.clone());
    let Ok(Some(service)) = services.get_opt(SUBRESOURCES).await else {
        return false;
    };
    let conditions = service.status.and_then(|status| status.conditions).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Available" && condition.status == "True")
}

fn namespace() -> DynamicObject {
    let resource = ApiResource::erase::<Namespace>(&());
    DynamicObject::new(NAMESPACE, &resource)
}

/// Server-side apply. The kinds of the manifests have regular plurals.
async fn apply(admin: &Client, mut object: DynamicObject) -> Result<(), ClusterError> {
    let types = object.types.get_or_insert_with(TypeMeta::resource::<Namespace>);
    let (group, version) = types.api_version.split_once('/').unwrap_or(("", &types.api_version));
    let resource = ApiResource::from_gvk(&kube::core::GroupVersionKind::gvk(group, version, &types.kind));
    let name = object.metadata.name.clone().unwrap_or_default();
    let what = format!("apply {} {name}", types.kind);
    let api: Api<DynamicObject> = match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(admin.clone(), namespace, &resource),
        None => Api::all_with(admin.clone(), &resource),
    };
    api.patch(&name, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&object))
        .await
        .map(drop)
        .map_err(kube_failed(what))
}

async fn operator_token(admin: &Client) -> Result<String, ClusterError> {
    let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), NAMESPACE);
    let request = TokenRequest {
        spec: TokenRequestSpec {
            expiration_seconds: i64::try_from(TOKEN_VALID.as_secs()).ok(),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let what = || format!("request a token for ServiceAccount {NAMESPACE}/{OPERATOR}");
    let answer =
        accounts.create_token_request(OPERATOR, &PostParams::default(), &request).await.map_err(kube_failed(what()))?;
    Ok(answer.status.map(|status| status.token).unwrap_or_default())
}
