//! What Workspaces use of their hosts. Served by the operator from its memory and stored nowhere: it is old after a minute.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta, Time};
use kube::core::TypeMeta;
use serde::{Deserialize, Serialize};

use crate::{Bytes, InstanceId, MilliCpu, NodeId};

/// `workspaceusages`, as RBAC and paths name them.
pub const PLURAL: &str = "workspaceusages";
pub const KIND: &str = "WorkspaceUsage";

/// What one running Workspace has been given, and what its VM used in the newest sample of its node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkspaceUsage {
    #[serde(flatten)]
    pub types: TypeMeta,
    /// Name, namespace and uid of the Workspace.
    pub metadata: ObjectMeta,
    pub instance_id: InstanceId,
    pub node: NodeId,
    pub sampled_at: Time,
    pub allocated: Allocation,
    pub used: Usage,
}

/// What a node keeps for an Instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Allocation {
    pub cpu_milli: MilliCpu,
    /// Guest memory and the VMM's own.
    pub memory_bytes: Bytes,
}

/// What could not be measured is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Over the time between two samples, 10 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_milli: Option<MilliCpu>,
    /// What of the guest's memory lies in the host's, and the VMM's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<Bytes>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkspaceUsageList {
    #[serde(flatten)]
    pub types: TypeMeta,
    pub metadata: ListMeta,
    pub items: Vec<WorkspaceUsage>,
}
