//! What the running Workspaces use of their hosts: `workspaceusages`, from the nodes' newest reports.

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta};
use kibo_crds::{
    NodeId, Workspace,
    usage::{Allocation, KIND, PLURAL, WorkspaceUsage, WorkspaceUsageList},
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
pub async fn everywhere(State(server): State<Server>, Extension(user): Extension<User>) -> Answer<WorkspaceUsageList> {
    server.may_see_usages(&user, None, None).await?;
    Ok(list(server.usages(|_| true)))
}

/// `namespaces/NAMESPACE/workspaceusages`
pub async fn in_namespace(
    State(server): State<Server>,
    Extension(user): Extension<User>,
    Path(namespace): Path<String>,
) -> Answer<WorkspaceUsageList> {
    server.may_see_usages(&user, Some(&namespace), None).await?;
    Ok(list(server.usages(|key| key.namespace == namespace)))
}

/// `namespaces/NAMESPACE/workspaceusages/NAME`
pub async fn of_one(
    State(server): State<Server>,
    Extension(user): Extension<User>,
    Path((namespace, name)): Path<(String, String)>,
) -> Answer<WorkspaceUsage> {
    server.may_see_usages(&user, Some(&namespace), Some(&name)).await?;
    let wanted = Key::new(&namespace, &name);
    let found = server.usages(|key| *key == wanted).into_iter().next();
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

    /// Of the Workspaces that are wanted, by namespace and name.
    fn usages(&self, is_wanted: impl Fn(&Key) -> bool) -> Vec<WorkspaceUsage> {
        let reported = self.ctx.registry.usages();
        let of = |(node, told): (NodeId, InstanceUsage)| {
            let key = self.workspaces.project(|index| index.key_of(told.instance))?;
            let workspace = is_wanted(&key).then(|| self.workspaces.get(&key))??;
            usage(&workspace, &node, told)
        };
        let mut usages: Vec<_> = reported.into_iter().filter_map(of).collect();
        let place = |usage: &WorkspaceUsage| (usage.metadata.namespace.clone(), usage.metadata.name.clone());
        usages.sort_by_cached_key(place);
        usages
    }
}

/// `None` when that node does not run this Workspace: it may tell of what it has not ended yet.
fn usage(workspace: &Workspace, node: &NodeId, told: InstanceUsage) -> Option<WorkspaceUsage> {
    let execution = workspace.status.as_ref()?.execution.as_ref()?;
    (execution.instance_id == told.instance && execution.node == *node).then(|| WorkspaceUsage {
        types: types(KIND),
        metadata: ObjectMeta {
            name: Some(workspace.name_any()),
            namespace: workspace.namespace(),
            uid: workspace.uid(),
            ..ObjectMeta::default()
        },
        instance_id: told.instance,
        node: node.clone(),
        sampled_at: told.sampled_at,
        allocated: Allocation { cpu_milli: execution.cpu_milli, memory_bytes: execution.memory_bytes },
        used: told.used,
    })
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
    fn only_the_node_that_runs_a_workspace_tells_what_it_uses() {
        let (runs, ended) = (InstanceId::generate(), InstanceId::generate());
        let workspace: Workspace = serde_json::from_value(json!({
            "metadata": { "name": "dev", "namespace": "team" },
            "spec": { "template": "debian-12" },
            "status": { "execution": {
                "instanceId": runs, "node": "node-1", "incarnation": 1, "cpuMilli": 500, "memoryBytes": 100,
                "lastSeq": 0, "startedAt": "1970-01-01T00:00:00Z",
            }},
        }))
        .unwrap();
        let told = |instance| InstanceUsage {
            instance,
            sampled_at: Time(Timestamp::UNIX_EPOCH),
            used: Usage { cpu_milli: None, memory_bytes: Some(Bytes(70)) },
        };
        let [node, other]: [NodeId; 2] = ["node-1", "node-2"].map(|id| id.parse().unwrap());
        assert_eq!(usage(&workspace, &node, told(ended)), None);
        assert_eq!(usage(&workspace, &other, told(runs)), None);
        let shown = serde_json::to_value(usage(&workspace, &node, told(runs)).unwrap()).unwrap();
        let expected = json!({
            "apiVersion": "subresources.kibotos.dev/v1alpha1", "kind": "WorkspaceUsage",
            "metadata": { "name": "dev", "namespace": "team" },
            "instanceId": runs, "node": "node-1", "sampledAt": "1970-01-01T00:00:00Z",
            "allocated": { "cpuMilli": 500, "memoryBytes": 100 }, "used": { "memoryBytes": 70 },
        });
        assert_eq!(shown, expected);
    }
}
