//! What the running Workspaces use of their hosts: `workspaceusages`, from the nodes' newest reports.

use std::collections::HashMap;

use axum::{
    Extension, Json,
    extract::{Path, RawQuery, State},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta};
use kibo_crds::{
    InstanceId, NodeId, Workspace,
    usage::{Allocation, KIND, PLURAL, WorkspaceUsage, WorkspaceUsageList},
    workspace::Execution,
};
use kube::{ResourceExt as _, core::TypeMeta};

use super::{
    Server,
    authorization::{self, Right},
    discovery::group_version,
    front_proxy::User,
    status::ApiError,
};
use crate::{cache::Key, node::InstanceUsage};

type Answer<T> = Result<Json<T>, ApiError>;

/// `workspaceusages` of all namespaces.
pub async fn everywhere(
    State(server): State<Server>,
    Extension(user): Extension<User>,
    RawQuery(query): RawQuery,
) -> Answer<WorkspaceUsageList> {
    server.may_see_usages(&user, None, None).await?;
    check_whole(query.as_deref())?;
    Ok(list(server.usages(server.workspaces.keys())))
}

/// `namespaces/NAMESPACE/workspaceusages`
pub async fn in_namespace(
    State(server): State<Server>,
    Extension(user): Extension<User>,
    Path(namespace): Path<String>,
    RawQuery(query): RawQuery,
) -> Answer<WorkspaceUsageList> {
    server.may_see_usages(&user, Some(&namespace), None).await?;
    check_whole(query.as_deref())?;
    let wanted = server.workspaces.keys().into_iter().filter(|key| key.namespace == namespace).collect();
    Ok(list(server.usages(wanted)))
}

/// `namespaces/NAMESPACE/workspaceusages/NAME`
pub async fn of_one(
    State(server): State<Server>,
    Extension(user): Extension<User>,
    Path((namespace, name)): Path<(String, String)>,
) -> Answer<WorkspaceUsage> {
    server.may_see_usages(&user, Some(&namespace), Some(&name)).await?;
    let found = server.usages(vec![Key::new(&namespace, &name)]).into_iter().next();
    found.map(Json).ok_or(ApiError::NoUsage { namespace, name })
}

impl Server {
    async fn may_see_usages(&self, user: &User, namespace: Option<&str>, name: Option<&str>) -> Result<(), ApiError> {
        let right = Right {
            verb: if name.is_some() { "get" } else { "list" },
            resource: PLURAL,
            subresource: None,
            namespace: namespace.map(str::to_owned),
            name: name.map(str::to_owned),
        };
        authorization::authorize(&self.ctx.client, user, &right).await
    }

    /// Of the Workspaces with these names that run, in this order.
    fn usages(&self, mut wanted: Vec<Key>) -> Vec<WorkspaceUsage> {
        wanted.sort_unstable();
        let mut told: HashMap<NodeId, HashMap<InstanceId, InstanceUsage>> = HashMap::new();
        let of = |key: Key| {
            let workspace = self.workspaces.get(&key)?;
            let execution = workspace.status.as_ref()?.execution.as_ref()?;
            let on_node = told.entry(execution.node.clone()).or_insert_with(|| {
                let usages = self.ctx.registry.usages_of(&execution.node);
                usages.into_iter().map(|usage| (usage.instance, usage)).collect()
            });
            Some(usage(&workspace, execution, on_node.get(&execution.instance_id)?))
        };
        wanted.into_iter().filter_map(of).collect()
    }
}

fn usage(workspace: &Workspace, execution: &Execution, told: &InstanceUsage) -> WorkspaceUsage {
    WorkspaceUsage {
        types: types(KIND),
        metadata: ObjectMeta {
            name: Some(workspace.name_any()),
            namespace: workspace.namespace(),
            uid: workspace.uid(),
            ..ObjectMeta::default()
        },
        instance_id: told.instance,
        node: execution.node.clone(),
        sampled_at: told.sampled_at.clone(),
        allocated: Allocation { cpu_milli: execution.cpu_milli, memory_bytes: execution.memory_bytes },
        used: told.used,
    }
}

/// A list that is not narrowed though it was asked to be would be taken for the narrowed one.
fn check_whole(query: Option<&str>) -> Result<(), ApiError> {
    let pairs = form_urlencoded::parse(query.unwrap_or_default().as_bytes());
    let narrows = |name: &str| matches!(name, "labelSelector" | "fieldSelector" | "continue" | "watch");
    match pairs.into_iter().find(|(name, value)| narrows(name) && !value.is_empty()) {
        Some((name, value)) => {
            Err(ApiError::BadRequest(format!("{name}={value}: {PLURAL} are only listed as a whole, or read by name")))
        }
        None => Ok(()),
    }
}

fn list(items: Vec<WorkspaceUsage>) -> Json<WorkspaceUsageList> {
    Json(WorkspaceUsageList { types: types(&format!("{KIND}List")), metadata: ListMeta::default(), items })
}

fn types(kind: &str) -> TypeMeta {
    TypeMeta { api_version: group_version(), kind: kind.to_owned() }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
    use kibo_crds::{Bytes, InstanceId, usage::Usage};
    use serde_json::json;

    use super::*;

    #[test]
    fn what_was_not_measured_is_left_out() {
        let instance = InstanceId::generate();
        let workspace: Workspace = serde_json::from_value(json!({
            "metadata": { "name": "dev", "namespace": "team" },
            "spec": { "template": "debian-12" },
            "status": { "execution": {
                "instanceId": instance, "node": "node-1", "incarnation": 1, "cpuMilli": 500, "memoryBytes": 100,
                "lastSeq": 0, "startedAt": "1970-01-01T00:00:00Z",
            }},
        }))
        .unwrap();
        let execution = workspace.status.as_ref().unwrap().execution.as_ref().unwrap();
        let told = InstanceUsage {
            instance,
            sampled_at: Time(Timestamp::UNIX_EPOCH),
            used: Usage { cpu_milli: None, memory_bytes: Some(Bytes(70)) },
        };
        let expected = json!({
            "apiVersion": "subresources.kibotos.dev/v1alpha1", "kind": "WorkspaceUsage",
            "metadata": { "name": "dev", "namespace": "team" },
            "instanceId": instance, "node": "node-1", "sampledAt": "1970-01-01T00:00:00Z",
            "allocated": { "cpuMilli": 500, "memoryBytes": 100 }, "used": { "memoryBytes": 70 },
        });
        assert_eq!(serde_json::to_value(usage(&workspace, execution, &told)).unwrap(), expected);
    }

    #[test]
    fn a_list_is_not_narrowed_in_silence() {
        for whole in [None, Some(""), Some("limit=500&resourceVersion=0"), Some("labelSelector=")] {
            assert!(check_whole(whole).is_ok(), "{whole:?}");
        }
        for narrowed in ["labelSelector=app%3Dweb", "limit=5&fieldSelector=metadata.name%3Da", "watch=true"] {
            assert!(check_whole(Some(narrowed)).is_err(), "{narrowed}");
        }
    }
}
