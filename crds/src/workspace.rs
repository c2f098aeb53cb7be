//! Workspace: a microVM with a disk that outlives it.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Bytes, CommandId, CommandRecord, CpuQuantity, Epoch, Import, Incarnation, InstanceId, MemoryQuantity, MilliCpu,
    MoveRequest, MoveStatus, NodeId, PoolId, SequenceNumber, SizeQuantity, Term, TransferStatus, WorkspaceId,
    condition::conditions_schema,
    moving::ONE_MOVE_AT_A_TIME,
    node::{Holder, PreviousHolder},
    refusals,
};

/// A microVM made from a Template, with a writable layer and perhaps a Volume.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kibotos.dev",
    version = "v1alpha1",
    kind = "Workspace",
    plural = "workspaces",
    namespaced,
    shortname = "ws",
    category = "kibo",
    status = "WorkspaceStatus",
    derive = "PartialEq",
    selectable = ".status.id",
    selectable = ".status.phase",
    selectable = ".status.execution.node",
    selectable = ".status.execution.instanceId",
    selectable = ".status.holder.node",
    printcolumn(name = "State", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.reason"),
    printcolumn(name = "Template", type_ = "string", json_path = ".spec.template"),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.execution.node"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "ID", type_ = "string", json_path = ".status.id", priority = 1),
    printcolumn(name = "Instance", type_ = "string", json_path = ".status.execution.instanceId", priority = 1),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.execution.address", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message", priority = 1),
    validation = Rule::new("size(self.metadata.name) <= 63")
        .message("the name of a Workspace must be at most 63 characters")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("(has(self.spec.resources) == has(oldSelf.spec.resources) && (!has(self.spec.resources) || self.spec.resources == oldSelf.spec.resources)) || !(has(self.status) && has(self.status.execution))")
        .message("resources can change only while the Workspace holds no execution: stop it first")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.resources"),
    validation = Rule::new("(has(self.spec.writableLayer) == has(oldSelf.spec.writableLayer) && (!has(self.spec.writableLayer) || self.spec.writableLayer == oldSelf.spec.writableLayer)) || !(has(self.status) && has(self.status.execution))")
        .message("writableLayer can change only while the Workspace holds no execution: stop it first")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.writableLayer"),
    validation = Rule::new(LAYER_GROWS)
        .message("writableLayer.size can only grow: it is absolute, and not smaller than the layer that there is")
        .reason(Reason::FieldValueInvalid)
        .field_path(".spec.writableLayer.size"),
    validation = Rule::new("(has(self.spec.volume) == has(oldSelf.spec.volume) && (!has(self.spec.volume) || self.spec.volume == oldSelf.spec.volume)) || (!(has(self.status) && has(self.status.execution)) && (!has(self.spec.__import__) || (has(self.status) && has(self.status.imported) && self.status.imported)))")
        .message("volume can change only while the Workspace holds no execution, and not before its import is complete: stop it first")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.volume"),
    validation = Rule::new("(has(self.spec.network) == has(oldSelf.spec.network) && (!has(self.spec.network) || self.spec.network == oldSelf.spec.network)) || !(has(self.status) && has(self.status.execution))")
        .message("network can change only while the Workspace holds no execution: stop it first")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.network"),
    validation = Rule::new(POWER_REQUEST_ORDER)
        .message(refusals::POWER_REQUEST_PENDING)
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.power"),
    validation = Rule::new("(has(self.spec.move) == has(oldSelf.spec.move) && (!has(self.spec.move) || self.spec.move == oldSelf.spec.move)) || !has(self.spec.move) || !(has(self.status) && has(self.status.execution))")
        .message("a writable layer moves only while the Workspace holds no execution: stop it first")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.move"),
    validation = Rule::new(ONE_MOVE_AT_A_TIME)
        .message("the move before is not finished: wait for status.move.state Finished, or take spec.move away, which cancels it while it is Copying")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.move"),
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.volume) || !has(self.volume.new) || (has(oldSelf.volume) && has(oldSelf.volume.new) && self.volume.new == oldSelf.volume.new)")
        .message("volume.new is for the creation of a Workspace: name an existing Volume in volume.claim")
        .reason(Reason::FieldValueInvalid),
    // A reserved word of CEL, as it is written there.
    validation = Rule::new("has(self.__import__) == has(oldSelf.__import__) && (!has(self.__import__) || self.__import__ == oldSelf.__import__)")
        .message("import is for the creation of a Workspace, and never changes: import into a new one")
        .reason(Reason::FieldValueForbidden),
    validation = Rule::new("!has(self.power) || !has(oldSelf.power) || self.power.state == oldSelf.power.state || !has(oldSelf.power.requestId) || !has(self.power.requestId) || self.power.requestId != oldSelf.power.requestId")
        .message("power.requestId was already used with another state: choose a new requestId")
        .reason(Reason::FieldValueForbidden),
)]
pub struct WorkspaceSpec {
    /// Name of the Template; what a Workspace is made from never changes.
    #[schemars(regex(pattern = "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"), length(max = 63))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.template is immutable").reason(Reason::FieldValueForbidden))]
    pub template: String,
    /// What the next execution gets; absent: what the Template says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writable_layer: Option<WritableLayer>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<VolumeBinding>,
    /// A request to start or stop; absent: started once, at creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<PowerRequest>,
    /// Labels that a node must carry.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "node_selector_schema")]
    pub node_selector: BTreeMap<String, String>,
    /// What the guest's network allows; absent: everything to the outside of its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<WorkspaceNetwork>,
    /// A request to move the writable layer to another storage pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub r#move: Option<MoveRequest>,
    /// Its disks come from an archive; at creation only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub import: Option<Import>,
    /// Free text for the Workspace's owner, with a revision of its own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "annotations_schema")]
    pub annotations: BTreeMap<String, String>,
}

fn node_selector_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "maxProperties": 16,
        "additionalProperties": { "type": "string", "maxLength": 63 },
    })
}

fn annotations_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": { "type": "string", "maxLength": 1024 },
    })
}

/// A new power request is taken when the previous one is consumed; a Force stop may replace a normal
/// stop, and a stop a start that still waits for a place (nothing of it exists, and the commit of a
/// placement is guarded by the version of this object, so that one of the two wins).
const POWER_REQUEST_ORDER: &str = "\
(has(self.spec.power) == has(oldSelf.spec.power) && (!has(self.spec.power) || self.spec.power == oldSelf.spec.power)) \
|| !has(self.spec.power) \
|| (has(oldSelf.status) && has(oldSelf.status.power) && has(oldSelf.status.power.consumed) \
&& (!has(oldSelf.spec.power) || (oldSelf.status.power.consumed.state == oldSelf.spec.power.state \
&& has(oldSelf.status.power.consumed.requestId) == has(oldSelf.spec.power.requestId) \
&& (!has(oldSelf.spec.power.requestId) || oldSelf.status.power.consumed.requestId == oldSelf.spec.power.requestId)))) \
|| (self.spec.power.state == 'Stopped' && (!has(oldSelf.spec.power) || oldSelf.spec.power.state == 'Running' \
|| (has(self.spec.power.stopMode) && !has(oldSelf.spec.power.stopMode))))";

/// What exists does not shrink. While nothing does, the size that was asked for counts; a size that was refused because
/// its pool cannot hold it may be lowered again. A quantity of a number in the status would be of unbounded cost to the
/// API server's estimate; as a float every size in bounds is exact.
const LAYER_GROWS: &str = "\
!has(self.spec.writableLayer) || !has(self.spec.writableLayer.size) || !isQuantity(string(self.spec.writableLayer.size)) \
|| (has(oldSelf.spec.writableLayer) && has(oldSelf.spec.writableLayer.size) \
&& self.spec.writableLayer.size == oldSelf.spec.writableLayer.size) \
|| (has(oldSelf.status) && has(oldSelf.status.writableLayer) \
? quantity(string(self.spec.writableLayer.size)).asApproximateFloat() >= double(oldSelf.status.writableLayer.size) \
: !has(oldSelf.spec.writableLayer) || !has(oldSelf.spec.writableLayer.size) \
|| !isQuantity(string(oldSelf.spec.writableLayer.size)) \
|| quantity(string(self.spec.writableLayer.size)).compareTo(quantity(string(oldSelf.spec.writableLayer.size))) >= 0)";

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuQuantity>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryQuantity>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.pool) == has(oldSelf.pool) && (!has(self.pool) || self.pool == oldSelf.pool)")
        .message("writableLayer.pool is immutable: move the layer instead")
        .reason(Reason::FieldValueForbidden),
    validation = Rule::new("!has(self.requestId) || !has(oldSelf.requestId) || self.requestId != oldSelf.requestId || (has(self.size) == has(oldSelf.size) && (!has(self.size) || self.size == oldSelf.size))")
        .message("writableLayer.requestId was already used with another size: choose a new one, or take it away")
        .reason(Reason::FieldValueForbidden),
)]
pub struct WritableLayer {
    /// Absolute; absent: what the Template says, or what the layer has. A layer that exists grows at the next start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<SizeQuantity>,
    /// Absent: the default pool of the node of the first start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolId>,
    /// Names this one change of the size; what came of it stands in `status.commands`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
}

/// The network of the guest. It never reaches its host, other guests or link-local addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkspaceNetwork {
    /// Absent: Allow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Egress {
    /// The guest reaches the outside of its host.
    #[default]
    Allow,
    /// It reaches nothing: no default route, no DNS, and nothing of it is forwarded.
    Deny,
}

/// Which Volume is mounted where: an existing one (`claim`), or one made with the Workspace (`new`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.claim) != has(self.new)")
    .message("exactly one of volume.claim and volume.new must be given")
    .reason(Reason::FieldValueInvalid))]
pub struct VolumeBinding {
    /// Name of a Volume in the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"), length(max = 253))]
    pub claim: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new: Option<NewVolume>,
    /// Absolute path in the guest.
    #[schemars(length(max = 255))]
    #[x_kube(validation = Rule::new("self.matches('^(/[A-Za-z0-9._-]+)+$') && !self.matches('/[.][.]?(/|$)')").message("volume.mountPath must be an absolute path of letters, digits, '.', '_' and '-', without . and .. and not /").reason(Reason::FieldValueInvalid))]
    pub mount_path: String,
    /// Deleting the Workspace deletes the Volume too.
    #[serde(default)]
    pub delete_with_workspace: bool,
}

/// A Volume that is made with the Workspace and carries its name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewVolume {
    pub size: SizeQuantity,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolId>,
}

/// One request to start or to stop. The operator acts once on each; a new `requestId`, or without
/// ids another `state`, makes a new request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.stopMode) || self.state == 'Stopped'")
        .message("power.stopMode goes with state Stopped only")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("(!has(self.node) && !has(self.whenUnplaceable)) || self.state == 'Running'")
        .message("power.node and power.whenUnplaceable go with state Running only")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("!has(self.node) || !has(self.whenUnplaceable) || self.whenUnplaceable == 'Fail'")
        .message("power.node implies whenUnplaceable Fail: a pinned start does not wait")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("!has(self.requestId) || !has(oldSelf.requestId) || self.requestId != oldSelf.requestId || self == oldSelf")
        .message("power.requestId was already used with another content: choose a new requestId")
        .reason(Reason::FieldValueForbidden),
    validation = Rule::new("(has(self.stopMode) == has(oldSelf.stopMode) && (!has(self.stopMode) || self.stopMode == oldSelf.stopMode) && has(self.node) == has(oldSelf.node) && (!has(self.node) || self.node == oldSelf.node) && has(self.whenUnplaceable) == has(oldSelf.whenUnplaceable) && (!has(self.whenUnplaceable) || self.whenUnplaceable == oldSelf.whenUnplaceable)) || (has(self.requestId) && (!has(oldSelf.requestId) || self.requestId != oldSelf.requestId)) || (!has(self.requestId) && self.state != oldSelf.state)")
        .message("a change of power.stopMode, node or whenUnplaceable is a new request: give it a new requestId")
        .reason(Reason::FieldValueForbidden),
)]
pub struct PowerRequest {
    pub state: PowerState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
    /// Absent: a normal stop, which ends when the guest has confirmed its writeback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_mode: Option<StopMode>,
    /// The only candidate of this one placement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// Absent: Wait, or Fail with `node`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when_unplaceable: Option<WhenUnplaceable>,
}

impl PowerRequest {
    /// The request that a Workspace without `spec.power` makes by being created.
    pub fn at_creation() -> Self {
        Self { state: PowerState::Running, request_id: None, stop_mode: None, node: None, when_unplaceable: None }
    }

    /// Two requests are the same when state and id are; everything else needs a new id to change.
    pub fn is_same_request(&self, other: &Self) -> bool {
        self.state == other.state && self.request_id == other.request_id
    }

    pub fn when_unplaceable(&self) -> WhenUnplaceable {
        match (self.when_unplaceable, &self.node) {
            (Some(choice), _) => choice,
            (None, Some(_)) => WhenUnplaceable::Fail,
            (None, None) => WhenUnplaceable::Wait,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PowerState {
    Running,
    Stopped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum StopMode {
    /// Does not wait for the guest's writers; one short sync, and the newest writes may be lost.
    Force,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WhenUnplaceable {
    /// Start when room appears.
    Wait,
    /// Fail the request at once.
    Fail,
}

impl Workspace {
    /// The request in force: what the spec says, or the one that creation implies.
    pub fn power_request(&self) -> PowerRequest {
        self.spec.power.clone().unwrap_or_else(PowerRequest::at_creation)
    }

    /// Whether the request in force has been acted upon.
    pub fn is_power_request_consumed(&self) -> bool {
        let consumed = self.status.as_ref().and_then(|s| s.power.as_ref()).map(|power| &power.consumed);
        match (consumed, &self.spec.power) {
            (Some(consumed), Some(request)) => consumed.is_same_request(request),
            (Some(_), None) => true,
            (None, _) => false,
        }
    }
}

/// What is true of the Workspace; written by the operator alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(oldSelf.term) || (has(self.term) && self.term >= oldSelf.term)")
        .message(refusals::TERM_FELL)
        .reason(Reason::FieldValueForbidden),
    validation = Rule::new("!has(oldSelf.epoch) || (has(self.epoch) && self.epoch >= oldSelf.epoch)")
        .message("status.epoch never falls")
        .reason(Reason::FieldValueForbidden),
    validation = Rule::new("!has(oldSelf.id) || (has(self.id) && self.id == oldSelf.id)")
        .message("status.id never changes")
        .reason(Reason::FieldValueForbidden),
)]
pub struct WorkspaceStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<WorkspaceId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// Leader term of the last write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub term: Option<Term>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<WorkspacePhase>,
    /// Why the Workspace is in this phase, where that is not plain: CamelCase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub reason: Option<String>,
    /// The same for people, with what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub message: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revisions: Option<Revisions>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<PowerStatus>,
    /// Present exactly while the Workspace holds an execution.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution: Option<Execution>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_execution: Option<LastExecution>,
    /// The newest grant of the writable layer that was ever given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_holder: Option<PreviousHolder>,
    /// The writable layer; absent until its first grant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writable_layer: Option<LayerStatus>,
    /// What became of the newest request to move the writable layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub r#move: Option<MoveStatus>,
    /// Its disks on their way into an archive or out of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<TransferStatus>,
    /// The disks that `spec.import` speaks of are complete.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub imported: bool,
    /// The bound Volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<BoundVolume>,
    /// The `requestId` of the last change of the layer's size that was judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resize_request_id: Option<CommandId>,
    /// The last 16 commands with an id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub commands: Vec<CommandRecord>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WorkspacePhase {
    Creating,
    Starting,
    Available,
    Stopping,
    Stopped,
    Failed,
    Deleting,
}

/// Counters that grow when the content of their part really changed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Revisions {
    pub labels: Revision,
    pub annotations: Revision,
    pub resources: Revision,
    pub binding: Revision,
}

/// A counter with a digest of the content that it stands for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Revision {
    #[schemars(range(max = 9_007_199_254_740_992_u64))]
    pub revision: u64,
    /// First 16 hexadecimal digits of the SHA-256 of the content.
    #[schemars(length(max = 16))]
    pub digest: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PowerStatus {
    /// The last request that was acted upon.
    pub consumed: PowerRequest,
    pub consumed_at: Time,
}

/// One run of the Workspace on one node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Execution {
    pub instance_id: InstanceId,
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub cpu_milli: MilliCpu,
    /// Guest memory and the VMM's own.
    pub memory_bytes: Bytes,
    /// Number of the last event of this Instance whose effect is in this object.
    pub last_seq: SequenceNumber,
    pub started_at: Time,
    /// Of the guest, in the range of its node; absent until the guest runs, and where guests have no network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 15))]
    pub address: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastExecution {
    pub instance_id: InstanceId,
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub ended_at: Time,
    #[schemars(length(max = 128))]
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LayerStatus {
    pub pool: PoolId,
    /// Of the image, or of the one that is to be made.
    pub size: Bytes,
    /// What the next start makes it, when that is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grow_to: Option<Bytes>,
    /// A node has confirmed that the image exists.
    pub created: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct BoundVolume {
    #[schemars(length(max = 253))]
    pub name: String,
    #[schemars(length(max = 36))]
    pub uid: String,
}
