//! The random id of the cluster, made once. A node that has seen another one is not steered.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kibo_crds::CLUSTER_ID_CONFIG_MAP;
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};

const KEY: &str = "id";

#[derive(Debug, thiserror::Error)]
pub enum ClusterIdError {
    #[error("failed to {what} config map {CLUSTER_ID_CONFIG_MAP}: {source}")]
    Api { what: &'static str, source: Box<kube::Error> },
    #[error("config map {CLUSTER_ID_CONFIG_MAP} has no {KEY}: restore it; every node knows the cluster by it")]
    Missing,
}

fn api_error(what: &'static str) -> impl FnOnce(kube::Error) -> ClusterIdError {
    move |source| ClusterIdError::Api { what, source: Box::new(source) }
}

/// The stored id, or a new one that is stored now.
pub async fn ensure(client: &Client, namespace: &str) -> Result<String, ClusterIdError> {
    let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    if let Some(stored) = api.get_opt(CLUSTER_ID_CONFIG_MAP).await.map_err(api_error("read"))? {
        return id_in(stored);
    }
    let id = ulid::Ulid::new().to_string().to_ascii_lowercase();
    let wanted = ConfigMap {
        metadata: ObjectMeta { name: Some(CLUSTER_ID_CONFIG_MAP.to_owned()), ..ObjectMeta::default() },
        data: Some(BTreeMap::from([(KEY.to_owned(), id)])),
        immutable: Some(true),
        ..ConfigMap::default()
    };
    match api.create(&PostParams::default(), &wanted).await {
        Ok(stored) => id_in(stored),
        Err(kube::Error::Api(status)) if status.is_already_exists() => {
            id_in(api.get(CLUSTER_ID_CONFIG_MAP).await.map_err(api_error("read"))?)
        }
        Err(error) => Err(api_error("create")(error)),
    }
}

fn id_in(config_map: ConfigMap) -> Result<String, ClusterIdError> {
    config_map.data.and_then(|mut data| data.remove(KEY)).filter(|id| !id.is_empty()).ok_or(ClusterIdError::Missing)
}
