//! Node: a host that runs Workspaces. A registration is never deleted nor reused.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Bytes, CommandId, Epoch, Incarnation, MilliCpu, PoolId, Ratio, Term, condition::conditions_schema};

/// A host that runs Workspaces.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kibotos.dev",
    version = "v1alpha1",
    kind = "Node",
    plural = "nodes",
    shortname = "knode",
    category = "kibo",
    status = "NodeStatus",
    derive = "PartialEq",
    selectable = ".status.admission",
    printcolumn(name = "Status", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Release", type_ = "string", json_path = ".status.session.version"),
    printcolumn(name = "Instances", type_ = "integer", json_path = ".status.report.instances"),
    printcolumn(name = "CPU-Alloc", type_ = "string", json_path = ".status.allocated.cpu"),
    printcolumn(name = "CPU-Sched", type_ = "string", json_path = ".status.schedulable.cpu"),
    printcolumn(name = "Mem-Alloc", type_ = "string", json_path = ".status.allocated.memory"),
    printcolumn(name = "Mem-Sched", type_ = "string", json_path = ".status.schedulable.memory"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].message", priority = 1),
    validation = Rule::new("self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$') && size(self.metadata.name) <= 63")
        .message("a node id must be at most 63 characters of a-z, 0-9, '-' and '.'")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("(has(self.spec.isolation) && has(oldSelf.spec.isolation) && self.spec.isolation == oldSelf.spec.isolation) || !has(self.spec.isolation) || !(has(self.status) && has(self.status.session) && self.status.session.alive)")
        .message("the node has a live control session, so it is not down: power the host off, or wait until its session ends, before you isolate it")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.isolation"),
    validation = Rule::new("(has(self.spec.isolation) && has(oldSelf.spec.isolation) && self.spec.isolation == oldSelf.spec.isolation) || !has(self.spec.isolation) || (has(self.status) && has(self.status.incarnation) && self.spec.isolation.incarnation == self.status.incarnation)")
        .message("isolation.incarnation must be the node's current status.incarnation: read the node again")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.isolation"),
    validation = Rule::new("!has(self.spec.retirement) || has(oldSelf.spec.retirement) || (has(self.status) && ((has(self.status.conditions) && self.status.conditions.exists(c, c.type == 'Drained' && c.status == 'True')) || (has(self.status.isolation) && has(self.status.incarnation) && self.status.isolation.incarnation >= self.status.incarnation)))")
        .message("only a node that is drained (condition Drained) or whose current incarnation is isolated can be retired: drain it, or isolate it when its host is down")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.retirement"),
    validation = Rule::new("!has(self.spec.adoption) || (has(oldSelf.spec.adoption) && self.spec.adoption == oldSelf.spec.adoption) || (has(self.status) && has(self.status.quarantine) && self.status.quarantine.id == self.spec.adoption.quarantine) || (has(self.status) && has(self.status.adoption) && self.status.adoption.quarantine == self.spec.adoption.quarantine)")
        .message("adoption.quarantine must be the id of the quarantine that the node is in (status.quarantine.id): read the node again")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.adoption"),
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(oldSelf.retirement) || self == oldSelf")
        .message("the node is retired, which is final: use a new node id for a new host")
        .reason(Reason::FieldValueForbidden),
    validation = Rule::new("!has(oldSelf.isolation) || has(self.isolation)")
        .message("an isolation is not taken back: it ends by itself when the node returns with a new incarnation")
        .reason(Reason::FieldValueForbidden),
)]
pub struct NodeSpec {
    /// A pending grant: the host that shows the secret with this hash becomes this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enrollment: Option<Enrollment>,
    /// Asks that no new Workspace comes to this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<Drain>,
    /// Asserts that the host is off or can no longer write to any of its storage pools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolation: Option<Isolation>,
    /// Ends a quarantine: the control plane was put back to an older state, and this is what becomes of what
    /// the node runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adoption: Option<Adoption>,
    /// Ends the registration for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retirement: Option<Retirement>,
    /// Ratios of this node in place of those of the default OvercommitPolicy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overcommit: Option<NodeOvercommit>,
    /// How many Instances the node may run at once; absent: what the node's own configuration says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100_000))]
    pub slots: Option<u32>,
}

/// A single-use grant for one host to become this node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Enrollment {
    /// SHA-256 of the secret in the token, in lower-case hexadecimal.
    #[schemars(regex(pattern = "^[0-9a-f]{64}$"), length(max = 64))]
    pub secret_hash: String,
    /// When the token stops to work.
    pub expires_at: Time,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.requestId) || !has(oldSelf.requestId) || self.requestId != oldSelf.requestId || self == oldSelf")
    .message("requestId was already used with another content: choose a new requestId")
    .reason(Reason::FieldValueForbidden))]
pub struct Drain {
    pub requested: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.incarnation >= oldSelf.incarnation")
        .message("isolation.incarnation never falls")
        .reason(Reason::FieldValueForbidden),
    validation = Rule::new("!has(self.requestId) || !has(oldSelf.requestId) || self.requestId != oldSelf.requestId || self == oldSelf")
        .message("requestId was already used with another content: choose a new requestId")
        .reason(Reason::FieldValueForbidden),
)]
pub struct Isolation {
    /// The incarnation that is declared dead: the node's current `status.incarnation`.
    pub incarnation: Incarnation,
    /// The operator's word that the host is off or cannot write; a wrong one corrupts disks.
    #[x_kube(validation = Rule::new("self").message("confirmHostCannotWrite must be true: isolate only a host that is off or can no longer write to its storage pools").reason(Reason::FieldValueInvalid))]
    pub confirm_host_cannot_write: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
}

/// What becomes of a node that is ahead of its control plane.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.requestId) || !has(oldSelf.requestId) || self.requestId != oldSelf.requestId || self == oldSelf")
    .message("requestId was already used with another content: choose a new requestId")
    .reason(Reason::FieldValueForbidden))]
pub struct Adoption {
    /// The accident that this ends: `status.quarantine.id`. A later one has another id.
    #[schemars(length(max = 32))]
    pub quarantine: String,
    pub action: AdoptionAction,
    /// What becomes of Instances whose Workspaces this control plane does not know, made after its backup.
    #[serde(default)]
    pub unknown: UnknownInstances,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AdoptionAction {
    /// What runs there becomes what its Workspaces run.
    Adopt,
    /// Everything that runs there is destroyed; disks stay.
    Destroy,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UnknownInstances {
    /// They go on running, and the node says which they are.
    #[default]
    Keep,
    Destroy,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Retirement {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeOvercommit {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Ratio>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Ratio>,
}

/// What is true of the node; written by the operator alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(oldSelf.term) || (has(self.term) && self.term >= oldSelf.term)")
        .message("status.term never falls: a newer leader has written this object")
        .reason(Reason::FieldValueForbidden),
    validation = Rule::new("!has(oldSelf.incarnation) || (has(self.incarnation) && self.incarnation >= oldSelf.incarnation)")
        .message("status.incarnation never falls")
        .reason(Reason::FieldValueForbidden),
)]
pub struct NodeStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// Leader term of the last write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub term: Option<Term>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<NodePhase>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admission: Option<Admission>,
    /// SHA-256 of the node key in lower-case hexadecimal; kept for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub key_hash: Option<String>,
    /// Hash of the enrollment secret that made this node; the same token does not work twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub used_secret_hash: Option<String>,
    /// The newest life of this node; absent before its first session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<Incarnation>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<NodeSession>,
    /// The highest incarnation whose isolation was carried out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolation: Option<IsolationResult>,
    /// The node is ahead of this control plane, which was put back to an older state: nothing is done with it
    /// until `spec.adoption` says what.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantine: Option<Quarantine>,
    /// What came of the last adoption.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adoption: Option<AdoptionResult>,
    /// Labels that the host gives itself in its configuration; those of the Node itself go before them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "host_labels_schema")]
    pub host_labels: BTreeMap<String, String>,
    /// What the host gives to VMs, as it reported; what could not be measured is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Amounts>,
    /// Capacity times ratio: what placement uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedulable: Option<Amounts>,
    /// What the executions on this node hold, from the operator's records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated: Option<Amounts>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100_000))]
    pub slots: Option<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub pools: Vec<NodePool>,
    /// The node's last full report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<NodeReport>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

fn host_labels_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": { "type": "string", "maxLength": 63 },
    })
}

/// Where a node stands, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NodePhase {
    Pending,
    Ready,
    NotReady,
    Unreachable,
    Offline,
    Draining,
    Drained,
    Isolated,
    Revoked,
    Retired,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Admission {
    Pending,
    Admitted,
    Revoked,
    Retired,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeSession {
    #[schemars(length(max = 64))]
    pub id: String,
    pub alive: bool,
    pub incarnation: Incarnation,
    /// The kernel's random id of this boot of the host.
    #[schemars(length(max = 64))]
    pub boot_id: String,
    /// Release of the node's binary; `unreleased` for a build that is none.
    #[schemars(length(max = 64))]
    pub version: String,
    pub started_at: Time,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Time>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct IsolationResult {
    pub incarnation: Incarnation,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_volumes: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_layers: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_workspaces: Option<u32>,
}

/// A node that is ahead of its control plane.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Quarantine {
    /// Names this one accident.
    #[schemars(length(max = 32))]
    pub id: String,
    /// How it shows that the node has seen more than this control plane.
    #[schemars(length(max = 1024))]
    pub message: String,
    /// Instances that run there.
    pub instances: u32,
    pub since: Time,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct AdoptionResult {
    #[schemars(length(max = 32))]
    pub quarantine: String,
    /// The life of the node that was adopted.
    pub incarnation: Incarnation,
    pub action: AdoptionAction,
    pub unknown: UnknownInstances,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
    /// Workspaces whose executions are those that run on the node.
    pub adopted: u32,
    /// Workspaces that this control plane took for running there, and that had ended.
    pub ended: u32,
    /// How many Instances belong to no Workspace that this control plane knows.
    pub unknown_count: u32,
    /// The first of these: Instance id, namespace and name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 200)))]
    pub unknown_instances: Vec<String>,
    pub finished_at: Time,
}

/// An amount of CPU and memory, in the form that people read; absent: not measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Amounts {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub cpu: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub memory: Option<String>,
}

impl Amounts {
    pub fn new(cpu: Option<MilliCpu>, memory: Option<Bytes>) -> Self {
        Self { cpu: cpu.map(|cpu| cpu.to_string()), memory: memory.map(|memory| memory.to_string()) }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodePool {
    pub id: PoolId,
    /// The random uid in the pool's marker file.
    #[schemars(length(max = 36))]
    pub uid: String,
    pub default: bool,
    pub available: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Bytes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free: Option<Bytes>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    pub time: Time,
    pub instances: u32,
    /// Volumes and retained layers whose use right the node holds.
    pub held_objects: u32,
}

/// Who may use one object, and since which grant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    pub node: crate::NodeId,
    pub incarnation: Incarnation,
    pub epoch: Epoch,
    /// The node has recorded the end of its use in the pool; the right stays with it because nobody
    /// else is attached there. An idle holder does not stand in the way of the next grant.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub idle: bool,
}

/// Who held an object before, and how that ended: the next grant names it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PreviousHolder {
    pub node: crate::NodeId,
    pub incarnation: Incarnation,
    pub epoch: Epoch,
    pub ended: HolderEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum HolderEnd {
    /// The node recorded the release in the pool.
    Released,
    /// The node confirmed that it never took the object.
    Refused,
    /// The node's incarnation was isolated.
    Isolated,
    /// The node came back and proved that nothing of that incarnation runs.
    IncarnationEnded,
}
