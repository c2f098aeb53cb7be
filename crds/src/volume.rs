//! Volume: a disk with a life of its own, bound by at most one Workspace.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Bytes, Epoch, InstanceId, MoveRequest, MoveStatus, PoolId, SizeQuantity, Term,
    condition::conditions_schema,
    moving::ONE_MOVE_AT_A_TIME,
    node::{Holder, PreviousHolder},
    refusals,
};

/// A disk that Workspaces bind, and that outlives them.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kibotos.dev",
    version = "v1alpha1",
    kind = "Volume",
    plural = "volumes",
    namespaced,
    shortname = "kvol",
    category = "kibo",
    status = "VolumeStatus",
    derive = "PartialEq",
    selectable = ".status.phase",
    selectable = ".status.holder.node",
    printcolumn(name = "Status", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Size", type_ = "string", json_path = ".spec.size"),
    printcolumn(name = "Pool", type_ = "string", json_path = ".status.pool"),
    printcolumn(name = "Workspace", type_ = "string", json_path = ".status.boundTo.name"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Held-By", type_ = "string", json_path = ".status.holder.node", priority = 1),
    validation = Rule::new("(has(self.spec.move) == has(oldSelf.spec.move) && (!has(self.spec.move) || self.spec.move == oldSelf.spec.move)) || !has(self.spec.move) || !(has(self.status) && has(self.status.grantedFor))")
        .message("a Volume moves only while no Workspace uses it: stop the Workspace that it is bound to first")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.move"),
    validation = Rule::new(ONE_MOVE_AT_A_TIME)
        .message("the move before is not finished: wait for status.move.state Finished, or take spec.move away, which cancels it while it is Copying")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.move"),
    validation = Rule::new(SIZE_GROWS)
        .message("spec.size can only grow: it is absolute, and not smaller than the image that there is")
        .reason(Reason::FieldValueInvalid)
        .field_path(".spec.size"),
    validation = Rule::new("self.spec.size == oldSelf.spec.size || !(has(oldSelf.status) && has(oldSelf.status.grantedFor))")
        .message("size can change only while no Workspace runs with the Volume: stop it first")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.size"),
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.pool) == has(oldSelf.pool) && (!has(self.pool) || self.pool == oldSelf.pool)")
        .message("spec.pool is immutable: move the Volume instead")
        .reason(Reason::FieldValueForbidden),
)]
pub struct VolumeSpec {
    /// Absolute. An image that exists grows at the next start of a Workspace that binds it.
    pub size: SizeQuantity,
    /// Where its bytes live; absent: the default pool of the node that makes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolId>,
    /// A request to move it to another storage pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub r#move: Option<MoveRequest>,
}

/// What exists does not shrink. While nothing does, the size that was asked for counts; a size that was refused because
/// its pool cannot hold it may be lowered again. A quantity of a number in the status would be of unbounded cost to the
/// API server's estimate; as a float every size in bounds is exact.
const SIZE_GROWS: &str = "\
!isQuantity(string(self.spec.size)) || self.spec.size == oldSelf.spec.size \
|| (has(oldSelf.status) && has(oldSelf.status.size) \
? quantity(string(self.spec.size)).asApproximateFloat() >= double(oldSelf.status.size) \
: !isQuantity(string(oldSelf.spec.size)) \
|| quantity(string(self.spec.size)).compareTo(quantity(string(oldSelf.spec.size))) >= 0)";

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(oldSelf.term) || (has(self.term) && self.term >= oldSelf.term)")
        .message(refusals::TERM_FELL)
        .reason(Reason::FieldValueForbidden),
    validation = Rule::new("!has(oldSelf.epoch) || (has(self.epoch) && self.epoch >= oldSelf.epoch)")
        .message("status.epoch never falls")
        .reason(Reason::FieldValueForbidden),
)]
pub struct VolumeStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub term: Option<Term>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<VolumePhase>,
    /// Where the image is, or will be; set with the first grant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolId>,
    /// Size of the image; absent until a node has made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
    /// What the next start makes it, when that is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grow_to: Option<Bytes>,
    /// The newest grant that was ever given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_holder: Option<PreviousHolder>,
    /// For whom the newest grant was given; decides between two Workspaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granted_for: Option<GrantedFor>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_to: Option<BoundTo>,
    /// What became of the newest request to move it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub r#move: Option<MoveStatus>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum VolumePhase {
    /// No image exists yet; it is made at the first start.
    Pending,
    /// Bound by no Workspace.
    Available,
    Bound,
    Deleting,
    Lost,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GrantedFor {
    #[schemars(length(max = 36))]
    pub workspace_uid: String,
    pub instance_id: InstanceId,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct BoundTo {
    #[schemars(length(max = 253))]
    pub name: String,
    #[schemars(length(max = 36))]
    pub uid: String,
}
