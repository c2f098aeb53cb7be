//! StoragePool: a directory on a file system that one or more nodes reach.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::{Bytes, NodeId, SizeQuantity, Term, condition::conditions_schema};

/// A place for the disks of Workspaces, known to all nodes that declare its id.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kibotos.dev",
    version = "v1alpha1",
    kind = "StoragePool",
    plural = "storagepools",
    shortname = "kpool",
    category = "kibo",
    status = "StoragePoolStatus",
    derive = "PartialEq",
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Capacity", type_ = "string", json_path = ".status.capacity"),
    printcolumn(name = "Free", type_ = "string", json_path = ".status.free"),
    printcolumn(name = "Objects", type_ = "integer", json_path = ".status.objects"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].message", priority = 1),
    validation = Rule::new("self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 63")
        .message("a pool id must be at most 63 characters of a-z, 0-9 and '-'")
        .reason(Reason::FieldValueInvalid),
)]
#[serde(rename_all = "camelCase")]
pub struct StoragePoolSpec {
    /// What may be allocated here; absent: the size of the file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<SizeQuantity>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(oldSelf.term) || (has(self.term) && self.term >= oldSelf.term)")
        .message("status.term never falls: a newer leader has written this object")
        .reason(Reason::FieldValueForbidden),
    validation = Rule::new("!has(oldSelf.uid) || (has(self.uid) && self.uid == oldSelf.uid)")
        .message("status.uid is the pool's marker and never changes")
        .reason(Reason::FieldValueForbidden),
)]
pub struct StoragePoolStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub term: Option<Term>,
    /// The random uid of the pool's marker file, from the first node that declared it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 36))]
    pub uid: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 5000))]
    pub members: Vec<PoolMember>,
    /// Quantity, for people, rounded down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub capacity: Option<String>,
    /// Quantity, for people, rounded down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub free: Option<String>,
    /// Sum of the sizes of the objects in this pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated: Option<Bytes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objects: Option<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

/// An admitted node that declares the pool with the right marker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolMember {
    pub node: NodeId,
    /// The node reached the pool at its last report.
    pub available: bool,
}
