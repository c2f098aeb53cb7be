//! Node: a host that runs Workspaces. A registration is never deleted nor reused.

mod command;
mod rules;
mod status;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{CommandId, Incarnation, Ratio, refusals};

pub use command::NodeCommand;
pub use status::{
    Admission, AdoptionResult, Amounts, EffectiveOvercommit, Holder, HolderEnd, HostUsage, IsolationResult,
    IsolationState, NodeClock, NodePhase, NodePool, NodeReport, NodeSession, NodeStatus, PreviousHolder, Quarantine,
    RatioSource,
};

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
    printcolumn(name = "Clock", type_ = "string", json_path = ".status.clock.shown"),
    printcolumn(name = "Instances", type_ = "integer", json_path = ".status.report.instances"),
    printcolumn(name = "CPU-Alloc", type_ = "string", json_path = ".status.allocated.cpu"),
    printcolumn(name = "CPU-Sched", type_ = "string", json_path = ".status.schedulable.cpu"),
    printcolumn(name = "Mem-Alloc", type_ = "string", json_path = ".status.allocated.memory"),
    printcolumn(name = "Mem-Sched", type_ = "string", json_path = ".status.schedulable.memory"),
    printcolumn(name = "Mem-Tight", type_ = "string", json_path = ".status.conditions[?(@.type==\"MemoryTight\")].status"),
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
    validation = Rule::new(rules::CAN_BE_RETIRED)
        .message(refusals::CANNOT_BE_RETIRED)
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.retirement"),
    validation = Rule::new("!has(oldSelf.spec.revocation) || has(self.spec.revocation) || (has(self.status) && has(self.status.admission) && self.status.admission == 'Revoked')")
        .message("the revocation is not carried out yet: it can be replaced by a new enrollment when status.admission is Revoked")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.revocation"),
    validation = Rule::new("!has(self.spec.adoption) || (has(oldSelf.spec.adoption) && self.spec.adoption == oldSelf.spec.adoption) || (has(self.status) && has(self.status.quarantine) && self.status.quarantine.id == self.spec.adoption.quarantine) || (has(self.status) && has(self.status.adoption) && self.status.adoption.quarantine == self.spec.adoption.quarantine)")
        .message("adoption.quarantine must be the id of the quarantine that the node is in (status.quarantine.id): read the node again")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec.adoption"),
    validation = Rule::new(rules::COMMANDS_ARE_RECORDED)
        .message(refusals::NOT_ON_RECORD)
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec"),
    validation = Rule::new(rules::COMMAND_IDS_ARE_FRESH)
        .message("the requestId was already used by another command of this node (status.commands): choose a new requestId")
        .reason(Reason::FieldValueForbidden)
        .field_path(".spec"),
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(rules::COMMAND_IDS_DIFFER)
        .message("two parts of the spec have the same requestId: give each command an id of its own")
        .reason(Reason::FieldValueInvalid),
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
    /// Takes the host's right to be this node away: no session, no member of any pool, until a new enrollment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revocation: Option<Revocation>,
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
    /// The command that set `slots` last, for a replay of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots_request: Option<ChangeRequest>,
    /// The command that changed `metadata.labels` last, for a replay of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_request: Option<ChangeRequest>,
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
    validation = Rule::new("self.confirmHostCannotWrite")
        .message("confirmHostCannotWrite must be true: isolate only a host that is off or can no longer write to its storage pools")
        .reason(Reason::FieldValueInvalid)
        .field_path(".confirmHostCannotWrite"),
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
    #[serde(default)]
    pub confirm_host_cannot_write: bool,
    /// Carries it out although another member of a shared pool has seen the host write lately.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force_despite_evidence: bool,
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

/// What takes the identity of a host back.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Revocation {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
}

/// A command that changes a part of the object that has no room for an id of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.requestId != oldSelf.requestId || self == oldSelf")
    .message("requestId was already used with another content: choose a new requestId")
    .reason(Reason::FieldValueForbidden))]
pub struct ChangeRequest {
    pub request_id: CommandId,
    /// First 16 hexadecimal digits of the SHA-256 of the input.
    #[schemars(regex(pattern = "^[0-9a-f]{16}$"), length(max = 16))]
    pub digest: String,
}

/// What is absent is as the default OvercommitPolicy says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.requestId) || !has(oldSelf.requestId) || self.requestId != oldSelf.requestId || self == oldSelf")
    .message("requestId was already used with another content: choose a new requestId")
    .reason(Reason::FieldValueForbidden))]
pub struct NodeOvercommit {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Ratio>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Ratio>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
}
