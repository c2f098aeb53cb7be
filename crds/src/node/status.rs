//! What is true of a Node.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{AdoptionAction, UnknownInstances};
use crate::{
    Bytes, CommandId, CommandRecord, Epoch, Incarnation, MilliCpu, Percent, PoolId, Ratio, Term,
    condition::conditions_schema, refusals,
};

/// What is true of the node; written by the operator alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(oldSelf.term) || (has(self.term) && self.term >= oldSelf.term)")
        .message(refusals::TERM_FELL)
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
    /// Hashes of the keys of hosts that were this node before, the newest last: one that comes back hears that it was isolated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 64)))]
    pub former_key_hashes: Vec<String>,
    /// Hash of the enrollment secret that made this node; the same token does not work twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub used_secret_hash: Option<String>,
    /// The newest life of this node; absent before its first session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<Incarnation>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<NodeSession>,
    /// What came of the last isolation.
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
    /// The ratios that placement uses here, and where they are set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overcommit: Option<EffectiveOvercommit>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100_000))]
    pub slots: Option<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub pools: Vec<NodePool>,
    /// The node's last full report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<NodeReport>,
    /// How the host was used when the node looked last, while its session lives. For people: nothing is decided by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_usage: Option<HostUsage>,
    /// The node's clock, as measured in its current session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<NodeClock>,
    /// What came of the newest commands that carried an id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub commands: Vec<CommandRecord>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

impl NodeStatus {
    /// Whether a control session is stored as alive; an earlier leader may have left it so.
    pub fn has_live_session(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.alive)
    }
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
    /// Revision of the source that the node's binary was built from; absent: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub source_revision: Option<String>,
    pub started_at: Time,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Time>,
}

/// How far an isolation has come, and what it did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct IsolationResult {
    pub incarnation: Incarnation,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
    pub state: IsolationState,
    /// What other members of its storage pools saw of the host: with Refused, who has seen it write, where and when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub evidence: Option<String>,
    /// Volumes whose use right the node lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_volumes: Option<u32>,
    /// Writable layers, of running and of stopped Workspaces, whose use right the node lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_layers: Option<u32>,
    /// Workspaces that failed because they ran there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_workspaces: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Time>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum IsolationState {
    InProgress,
    /// Another member of a shared pool saw that the host still writes: nothing was released.
    Refused,
    Finished,
}

/// The clock of a host against the operator's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeClock {
    /// Node minus operator, in milliseconds.
    pub offset_millis: i64,
    /// The offset may be wrong by so much: half of the probe's round trip, in milliseconds.
    pub uncertainty_millis: u64,
    /// Whether the host's kernel says that its clock is synchronized; absent when it could not be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_synchronized: Option<bool>,
    /// The offset less its uncertainty is beyond what is allowed: no new Workspace is placed there.
    pub over: bool,
    /// The offset as people read it: `+1.2s`, `-40.0s (over)`.
    #[schemars(length(max = 40))]
    pub shown: String,
    pub measured_at: Time,
}

impl NodeClock {
    /// How an offset is shown: in seconds with one decimal place and its sign.
    pub fn show(offset_millis: i64, over: bool) -> String {
        let tenths = (offset_millis.unsigned_abs() + 50) / 100;
        let sign = if offset_millis < 0 && tenths > 0 { '-' } else { '+' };
        let mark = if over { " (over)" } else { "" };
        format!("{sign}{}.{}s{mark}", tenths / 10, tenths % 10)
    }
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

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EffectiveOvercommit {
    pub cpu: Ratio,
    pub cpu_source: RatioSource,
    pub memory: Ratio,
    pub memory_source: RatioSource,
}

/// Where a ratio is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RatioSource {
    /// The default OvercommitPolicy.
    Default,
    /// `spec.overcommit` of this node.
    Node,
}

/// One sample of a host. What could not be read is absent, and so is what VMs use where none was ever started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct HostUsage {
    pub sampled_at: Time,
    /// What all VMs of the host used of its CPUs, in the time between two samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_cpu_milli: Option<MilliCpu>,
    /// What all VMs of the host have in its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_memory_bytes: Option<Bytes>,
    /// Without swapping, cache that can be given up included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_available_bytes: Option<Bytes>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_total_bytes: Option<Bytes>,
    /// Since when the node takes no new Workspace because its host is short of memory; absent: it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_tight_since: Option<Time>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_idle: Option<Percent>,
    /// Share of the last 60 s in which at least one task waited for a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_pressure_some: Option<Percent>,
    /// Share of the last 60 s in which all tasks waited for a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_pressure_full: Option<Percent>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_pressure_some: Option<Percent>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_pressure_full: Option<Percent>,
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Bytes>,
    /// Guests on this node that wait for space in the pool.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub waiting_guests: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    pub time: Time,
    pub instances: u32,
    /// Volumes and retained layers whose use right the node holds.
    pub held_objects: u32,
    /// Revision of the settings (drain, slots, ratios) that the node's admission used when it reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings_revision: Option<u64>,
}

/// Who may use one object, and since which grant.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, KubeSchema)]
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
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PreviousHolder {
    pub node: crate::NodeId,
    pub incarnation: Incarnation,
    pub epoch: Epoch,
    pub ended: HolderEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum HolderEnd {
    /// The node recorded the release in the pool.
    Released,
    /// The node confirmed that it never took the object.
    Refused,
    /// The node's incarnation was isolated.
    Isolated,
    /// The node came back and proved that nothing of that incarnation runs.
    IncarnationEnded,
    /// The pool was declared lost, and with it the object.
    PoolLost,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_is_shown_with_its_sign_and_one_decimal_place() {
        for (millis, over, shown) in [
            (1_234, false, "+1.2s"),
            (-49, false, "+0.0s"),
            (-50, false, "-0.1s"),
            (40_012, true, "+40.0s (over)"),
            (i64::MIN, true, "-9223372036854775.8s (over)"),
        ] {
            assert_eq!(NodeClock::show(millis, over), shown);
        }
    }
}
