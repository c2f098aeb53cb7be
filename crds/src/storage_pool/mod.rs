//! StoragePool: a directory on a file system that one or more nodes reach.

mod command;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Bytes, CapacityQuantity, CommandId, CommandRecord, NodeId, Term,
    condition::conditions_schema,
    node::ChangeRequest,
    refusals,
    rules::{fresh, recorded},
};

pub use command::PoolCommand;

/// Commands are recorded one after the other: what replaces one that is not on record yet would make it be forgotten.
const COMMANDS_ARE_RECORDED: &str = recorded!("capacityRequest");
/// An id names one command for as long as it is on record.
const COMMAND_IDS_ARE_FRESH: &str = concat!(fresh!("capacityRequest"), " && ", fresh!("lost"));
/// What a member reaches is not lost; who declared it first has decided it.
const NO_MEMBER_REACHES_IT: &str = "\
!has(self.spec.lost) || has(oldSelf.spec.lost) || !has(self.status) || !has(self.status.members) \
|| !self.status.members.exists(m, m.available)";

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
    printcolumn(name = "Used", type_ = "string", json_path = ".status.used"),
    printcolumn(name = "Free", type_ = "string", json_path = ".status.free"),
    printcolumn(name = "Objects", type_ = "integer", json_path = ".status.objects"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].message", priority = 1),
    validation = Rule::new("self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 63")
        .message("a pool id must be at most 63 characters of a-z, 0-9 and '-'")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new(NO_MEMBER_REACHES_IT)
        .message("a member node reaches the pool (status.members), so its data is not lost: detach it from that node first, or repair it")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.lost"),
    validation = Rule::new(COMMANDS_ARE_RECORDED)
        .message(refusals::NOT_ON_RECORD)
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec"),
    validation = Rule::new(COMMAND_IDS_ARE_FRESH)
        .message("the requestId was already used by another command of this pool (status.commands): choose a new requestId")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec"),
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.capacityRequest) || !has(self.lost) || !has(self.lost.requestId) || self.capacityRequest.requestId != self.lost.requestId")
        .message("two parts of the spec have the same requestId: give each command an id of its own")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("!has(oldSelf.lost) || (has(self.lost) && self.lost == oldSelf.lost)")
        .message("the pool is declared lost, which is final: initialise a new pool under another id")
        .reason(Reason::FieldValueForbidden),
)]
pub struct StoragePoolSpec {
    /// What may be allocated here: the sum of the sizes of all disks. Disks are thin, so it may be more than the file
    /// system has; absent: the size of the file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<CapacityQuantity>,
    /// The command that set `capacity` last, for a replay of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_request: Option<ChangeRequest>,
    /// Declares everything in the pool lost, for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<PoolLoss>,
}

/// An admin's word that the data of a pool is gone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.confirmDataIsGone")
    .message("confirmDataIsGone must be true: what is in the pool is given up for ever")
    .reason(Reason::FieldValueInvalid)
    .field_path(".confirmDataIsGone"))]
pub struct PoolLoss {
    #[serde(default)]
    pub confirm_data_is_gone: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(oldSelf.term) || (has(self.term) && self.term >= oldSelf.term)")
        .message(refusals::TERM_FELL)
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
    /// What may be allocated: `spec.capacity`, or the size of the file system. Quantity, for people, rounded down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub capacity: Option<String>,
    /// What is in use on the file system, by whatever is there. Quantity, for people, rounded down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub used: Option<String>,
    /// What is free on the file system. Quantity, for people, rounded down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub free: Option<String>,
    /// Sum of the sizes of the objects in this pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated: Option<Bytes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objects: Option<u32>,
    /// What a member found in the pool that belongs to no Workspace and no Volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unowned: Option<UnownedObjects>,
    /// What came of the newest commands that carried an id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub commands: Vec<CommandRecord>,
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

/// Entries of the pool's object directory that nobody owns. They stay until it is proven that their owner was deleted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnownedObjects {
    pub count: u32,
    /// What they occupy on the file system.
    pub bytes: Bytes,
    /// The first of them, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub entries: Vec<UnownedObject>,
    /// The member that looked.
    pub seen_by: NodeId,
    pub seen_at: Time,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnownedObject {
    /// Of the directory: the uid of the Workspace or Volume that it was made for.
    #[schemars(length(max = 255))]
    pub name: String,
    pub bytes: Bytes,
    pub owner: UnownedReason,
}

/// What is known of who owned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UnownedReason {
    /// This control plane has no record of it: it is kept. A control plane that was put back to an older state does not
    /// know what was made since.
    Unknown,
    /// Its deletion is on record, and it is being removed.
    Deleted,
    /// It is no object of Kibotos: it is kept.
    Foreign,
}
