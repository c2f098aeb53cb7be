//! What is true of a Node, computed from everything that the leader knows. Pure.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::SignedDuration};
use kibo_crds::{
    ConditionType, Node, PoolId, condition,
    node::{
        Admission, Amounts, HostUsage, NodeClock, NodePhase, NodePool, NodeReport, NodeSession, NodeStatus, Quarantine,
        UnknownInstances,
    },
    set_condition,
};

use super::{
    isolation::{self, Fence},
    settings::overcommit,
};
use crate::{
    session::{Capacity, DeclaredPool, Settings, hooks::NodeUsage},
    watchdog::{Periods, Reach},
};

/// A report may be as old as this before the status is written for its time alone.
const REPORT_REFRESH: SignedDuration = SignedDuration::from_secs(55);
/// A clock that moved by less, in milliseconds, waits for that too.
const CLOCK_STEP: u64 = 1000;

/// A live session, as the registry has it.
#[derive(Clone, Debug)]
pub struct Live {
    /// With `alive`.
    pub session: NodeSession,
    pub capacity: Capacity,
    pub pools: Vec<DeclaredPool>,
    /// What the host says of itself, without what the Node carries.
    pub host_labels: BTreeMap<String, String>,
    pub settings: Settings,
    pub settings_confirmed: bool,
    /// Absent: not measured yet in this session.
    pub clock: Option<NodeClock>,
    pub report: Option<Reported>,
}

/// The newest report of a session.
#[derive(Clone, Debug)]
pub struct Reported {
    pub time: Time,
    pub instances: u32,
    /// The settings in force had been confirmed before.
    pub after_confirmation: bool,
    /// Absent: the node has taken no sample yet.
    pub host: Option<HostUsage>,
}

/// A Hello with the right key that was refused.
#[derive(Clone, Debug)]
pub struct Refused {
    /// CamelCase.
    pub reason: &'static str,
    pub message: String,
    pub duplicate: bool,
    /// The node is ahead of this control plane.
    pub quarantine: Option<Quarantine>,
}

/// Everything that the status follows from.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    pub node: &'a Node,
    pub live: Option<Live>,
    /// The newest refusal, while it is fresh.
    pub refused: Option<Refused>,
    /// This leader holds no session of the node and has waited long enough for its return: a session that
    /// an earlier leader left as alive is over.
    pub orphaned: bool,
    /// By the node's last word to this leader.
    pub reach: Reach,
    pub periods: Periods,
    /// Settings that the spec and the policy ask for.
    pub wanted: Settings,
    pub usage: NodeUsage,
    /// The node's default pool, while the operator has yet to write down the marker of it.
    pub unregistered: Option<PoolId>,
    pub now: Time,
}

/// The status as it should be. Equal to the old one when nothing is new.
pub fn compute(observed: &Observed<'_>) -> NodeStatus {
    let node = observed.node;
    let mut status = node.status.clone().unwrap_or_default();
    status.observed_generation = node.metadata.generation;
    status.admission = Some(admission(node));
    session(&mut status, observed);
    quarantine(&mut status, observed);
    amounts(&mut status, observed);
    readings(&mut status, observed);
    let isolated = match isolation::fence(node) {
        Fence::Undecided(isolated) | Fence::Closed(isolated) => status.incarnation <= Some(isolated),
        Fence::Open => false,
    };
    let drain = drain(observed);
    let phase = phase(&status, isolated, observed, drain);
    status.phase = Some(phase);
    conditions(&mut status, observed, phase, drain);
    status.commands = super::commands::records(node, &status, &observed.now);
    status
}

fn admission(node: &Node) -> Admission {
    let stored = node.status.as_ref().and_then(|status| status.admission);
    match stored {
        _ if node.spec.retirement.is_some() => Admission::Retired,
        _ if node.spec.revocation.is_some() => Admission::Revoked,
        Some(stored) => stored,
        None => Admission::Pending,
    }
}

fn session(status: &mut NodeStatus, observed: &Observed<'_>) {
    match (&observed.live, &mut status.session) {
        (Some(live), _) => status.session = Some(live.session.clone()),
        (None, Some(session)) if session.alive && observed.orphaned => {
            session.alive = false;
            session.ended_at = Some(observed.now.clone());
        }
        (None, _) => {}
    }
}

/// From the Hello that showed it to the session that ends it.
fn quarantine(status: &mut NodeStatus, observed: &Observed<'_>) {
    let seen = observed.refused.as_ref().and_then(|refused| refused.quarantine.clone());
    match (&observed.live, seen) {
        (Some(_), _) => status.quarantine = None,
        (None, Some(mut seen)) => {
            if let Some(known) = status.quarantine.as_ref().filter(|known| known.id == seen.id) {
                seen.since = known.since.clone();
            }
            status.quarantine = Some(seen);
        }
        (None, None) => {}
    }
    // What an admin ordered since the adoption.
    let ordered = observed.node.spec.adoption.as_ref();
    if let (Some(adoption), Some(ordered)) = (&mut status.adoption, ordered)
        && ordered.quarantine == adoption.quarantine
    {
        (adoption.unknown, adoption.request_id) = (ordered.unknown, ordered.request_id.clone());
    }
}

fn amounts(status: &mut NodeStatus, observed: &Observed<'_>) {
    let usage = observed.usage;
    status.allocated = Some(Amounts::new(Some(usage.cpu), Some(usage.memory)));
    let Some(live) = &observed.live else { return };
    status.host_labels.clone_from(&live.host_labels);
    let capacity = live.capacity;
    status.capacity = Some(Amounts::new(capacity.cpu, capacity.memory));
    status.schedulable = Some(Amounts::new(
        capacity.cpu.map(|cpu| observed.wanted.cpu.of_cpu(cpu)),
        capacity.memory.map(|memory| observed.wanted.memory.of_memory(memory)),
    ));
    status.overcommit = Some(overcommit(&observed.node.spec, &observed.wanted));
    status.slots = observed.wanted.slots.or(capacity.max_instances);
    status.pools = live.pools.iter().map(node_pool).collect();
    if let Some(report) = &live.report {
        status.report = Some(NodeReport {
            time: report.time.clone(),
            instances: report.instances,
            held_objects: usage.held_objects,
        });
    }
}

/// Of the session that lives: without one nothing is known of the clock and of the host.
fn readings(status: &mut NodeStatus, observed: &Observed<'_>) {
    let is_awaited = observed.live.is_none() && status.has_live_session();
    if !is_awaited {
        status.clock = observed.live.as_ref().and_then(|live| live.clock.clone());
        status.host_usage = observed.live.as_ref().and_then(|live| live.report.as_ref()?.host.clone());
    }
}

fn node_pool(pool: &DeclaredPool) -> NodePool {
    NodePool {
        id: pool.id.clone(),
        uid: pool.uid.clone(),
        default: pool.default,
        available: pool.available,
        capacity: pool.capacity,
        free: pool.free,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DrainState {
    NotRequested,
    Draining,
    Drained,
}

/// Drained: the node confirmed the drain in this session, nothing names it, and a report that it sent
/// afterwards shows nothing.
fn drain(observed: &Observed<'_>) -> DrainState {
    if !observed.wanted.drain {
        return DrainState::NotRequested;
    }
    let confirmed = observed.live.as_ref().is_some_and(|live| {
        live.settings.drain
            && live.settings_confirmed
            && live.report.as_ref().is_some_and(|report| report.after_confirmation && report.instances == 0)
    });
    let usage = observed.usage;
    let empty = usage.executions == 0 && usage.held_objects == 0 && usage.in_flight == 0;
    if confirmed && empty { DrainState::Drained } else { DrainState::Draining }
}

fn phase(status: &NodeStatus, isolated: bool, observed: &Observed<'_>, drain: DrainState) -> NodePhase {
    match status.admission {
        Some(Admission::Retired) => return NodePhase::Retired,
        Some(Admission::Revoked) => return NodePhase::Revoked,
        Some(Admission::Pending) | None => return NodePhase::Pending,
        Some(Admission::Admitted) => {}
    }
    if isolated {
        return NodePhase::Isolated;
    }
    // A session of an earlier leader still counts until its node had the time to return.
    let alive = status.has_live_session();
    match (alive || observed.live.is_some(), drain) {
        // Who is refused is not silent; a second host's word is not the node's.
        (false, _) if observed.refused.as_ref().is_some_and(|refused| !refused.duplicate) => NodePhase::NotReady,
        (false, _) => silent(status.phase, observed.reach),
        (true, DrainState::NotRequested) => NodePhase::Ready,
        (true, DrainState::Draining) => NodePhase::Draining,
        (true, DrainState::Drained) => NodePhase::Drained,
    }
}

/// A node without a session. What an earlier leader found stands until the node says something.
fn silent(stored: Option<NodePhase>, reach: Reach) -> NodePhase {
    match (stored, reach) {
        (_, Reach::Offline) | (Some(NodePhase::Offline), _) => NodePhase::Offline,
        (_, Reach::Unreachable) | (Some(NodePhase::Unreachable), _) => NodePhase::Unreachable,
        (_, Reach::Reachable) => NodePhase::NotReady,
    }
}

fn conditions(status: &mut NodeStatus, observed: &Observed<'_>, phase: NodePhase, drain: DrainState) {
    let generation = observed.node.metadata.generation;
    let synchronized = synchronized(status, observed);
    let tight = memory_tight(status.host_usage.as_ref(), observed);
    let mut set = |kind, value, reason: &str, message: &str| {
        set_condition(&mut status.conditions, condition(kind, value, reason, message, generation, &observed.now));
    };
    let (ready, reason, message) = ready(observed, phase);
    set(ConditionType::Ready, Some(ready), reason, &message);
    let (schedulable, reason, message) = schedulable(observed, phase, ready);
    set(ConditionType::Schedulable, Some(schedulable), reason, &message);
    if let Some((synchronized, reason, message)) = synchronized {
        set(ConditionType::ClockSynchronized, synchronized, reason, message);
    }
    if let Some((tight, reason, message)) = tight {
        set(ConditionType::MemoryTight, tight, reason, message);
    }
    let (drained, reason, message) = match phase {
        NodePhase::Retired => (true, "Retired", "the node is retired: nothing of it counts any more".to_owned()),
        _ => drained(observed, drain),
    };
    set(ConditionType::Drained, Some(drained), reason, &message);
    let was_duplicate = observed
        .node
        .status
        .iter()
        .flat_map(|s| &s.conditions)
        .any(|c| c.type_ == ConditionType::DuplicateHost.to_string());
    match observed.refused.as_ref().filter(|refused| refused.duplicate) {
        Some(refused) => set(ConditionType::DuplicateHost, Some(true), refused.reason, &refused.message),
        None if was_duplicate => {
            set(ConditionType::DuplicateHost, Some(false), "OneHost", "one host speaks with this identity");
        }
        None => {}
    }
    if let Some((value, reason, message)) = isolation::verdict(observed.node) {
        set(ConditionType::Isolated, value, reason, &message);
    }
    adoption_conditions(status, observed);
}

/// Conditions that a node has only since its control plane was put back.
fn adoption_conditions(status: &mut NodeStatus, observed: &Observed<'_>) {
    let generation = observed.node.metadata.generation;
    let (quarantine, adoption) = (status.quarantine.clone(), status.adoption.clone());
    let name = observed.node.metadata.name.as_deref().unwrap_or_default();
    let mut set = |kind, value, reason: &str, message: &str| {
        set_condition(&mut status.conditions, condition(kind, Some(value), reason, message, generation, &observed.now));
    };
    match (&quarantine, &adoption) {
        (Some(quarantine), _) => {
            let message = format!(
                "{}; Instances that run there: {}. `kibo node adopt {name}` makes them their Workspaces' executions again, `kibo node adopt {name} --destroy` destroys them",
                quarantine.message, quarantine.instances
            );
            set(ConditionType::Quarantined, true, "ControlPlaneWentBack", &message);
        }
        (None, Some(adoption)) => {
            let message = format!(
                "adopted with quarantine {}: executions taken back: {}, ended since the backup: {}",
                adoption.quarantine, adoption.adopted, adoption.ended
            );
            set(ConditionType::Quarantined, false, "Adopted", &message);
        }
        (None, None) => {}
    }
    let Some(adoption) = adoption.filter(|adoption| adoption.unknown_count > 0) else { return };
    let is_over = Some(adoption.incarnation) != status.incarnation;
    let mut set = |value, reason: &str, message: &str| {
        let new = condition(ConditionType::UnknownInstances, Some(value), reason, message, generation, &observed.now);
        set_condition(&mut status.conditions, new);
    };
    match adoption.unknown {
        _ if is_over => set(false, "NodeRestarted", "they ended with the life of the node that was adopted"),
        UnknownInstances::Destroy => set(false, "Destroyed", "an admin ordered that they are destroyed"),
        UnknownInstances::Keep => {
            let message = format!(
                "{} Instances belong to Workspaces that this control plane does not know, made after its backup; they run on, and nobody can reach them: {}. `kibo node adopt {name} --destroy-unknown` destroys them; their disks stay in the pools",
                adoption.unknown_count,
                adoption.unknown_instances.join(", ")
            );
            set(true, "NotInControlPlane", &message);
        }
    }
}

type Verdict = (bool, &'static str, String);

fn ready(observed: &Observed<'_>, phase: NodePhase) -> Verdict {
    let name = observed.node.metadata.name.as_deref().unwrap_or_default();
    match phase {
        NodePhase::Retired => (false, "Retired", "the node is retired, which is final".to_owned()),
        NodePhase::Revoked => (
            false,
            "Revoked",
            format!(
                "the enrollment of the node was revoked; what runs there goes on, and is released by {}; `kibo enrollment issue {name}` lets a host in again after that",
                isolation::command(name)
            ),
        ),
        NodePhase::Pending => (
            false,
            "NotEnrolled",
            "no host has become this node yet: start kibo-node-daemon there with an enrollment token".to_owned(),
        ),
        NodePhase::Isolated => (
            false,
            "Isolated",
            "the current incarnation is isolated; that ends by itself when the node comes back with a new one"
                .to_owned(),
        ),
        NodePhase::Ready | NodePhase::Draining | NodePhase::Drained => {
            (true, "SessionLive", "the node has a live control session".to_owned())
        }
        NodePhase::NotReady | NodePhase::Unreachable | NodePhase::Offline => match &observed.refused {
            Some(refused) => (false, refused.reason, refused.message.clone()),
            None if observed.node.status.as_ref().is_none_or(|status| status.session.is_none()) => (
                false,
                "NoSessionYet",
                format!(
                    "the node is enrolled and has not opened a control session yet: see the log of kibo-node-daemon on {name}"
                ),
            ),
            None => (
                false,
                silence(phase),
                format!(
                    "{}; what runs there goes on: see whether {name} is up, reaches the operator, and kibo-node-daemon runs there",
                    silence_in_words(phase, observed.periods)
                ),
            ),
        },
    }
}

fn silence(phase: NodePhase) -> &'static str {
    match phase {
        NodePhase::Offline => "Offline",
        NodePhase::Unreachable => "Unreachable",
        _ => "NoSession",
    }
}

fn silence_in_words(phase: NodePhase, periods: Periods) -> String {
    let nothing_for = |period: Duration| format!("nothing was heard of the node for {} s", period.as_secs());
    match phase {
        NodePhase::Offline => nothing_for(periods.offline),
        NodePhase::Unreachable => nothing_for(periods.unreachable),
        _ => "the node has no control session".to_owned(),
    }
}

/// `None`: nothing new is known.
fn synchronized(status: &NodeStatus, observed: &Observed<'_>) -> Option<(Option<bool>, &'static str, &'static str)> {
    Some(match (&observed.live, &status.clock) {
        (_, Some(clock)) if clock.over => (
            Some(false),
            "ClockOff",
            "the node's clock is more than 30 s off the operator's (status.clock), so no new Workspace is placed here: mend the time synchronization of the host",
        ),
        (_, Some(_)) => (Some(true), "WithinBounds", "the node's clock is within 30 s of the operator's"),
        (Some(_), None) => (None, "NotMeasured", "the node's clock was not measured yet in this session"),
        (None, None) if status.session.is_some() => (None, "NoSession", "the node has no control session"),
        (None, None) => return None,
    })
}

/// `None`: nothing new is known.
fn memory_tight(
    usage: Option<&HostUsage>,
    observed: &Observed<'_>,
) -> Option<(Option<bool>, &'static str, &'static str)> {
    Some(match (&observed.live, usage) {
        (_, Some(usage)) if usage.memory_tight_since.is_some() => (
            Some(true),
            "LittleAvailable",
            "the host is short of free memory (status.hostUsage), so no new Workspace is placed here; those that run go on",
        ),
        (_, Some(usage)) if usage.memory_available_bytes.is_some() => {
            (Some(false), "EnoughAvailable", "the host has memory for new Workspaces")
        }
        (Some(_), _) => (None, "NotMeasured", "the node cannot tell how much of its host's memory is available"),
        (None, _) => return None,
    })
}

fn schedulable(observed: &Observed<'_>, phase: NodePhase, ready: bool) -> Verdict {
    if !ready {
        return (false, "NotReady", "the node is not ready: see the condition Ready".to_owned());
    }
    if matches!(phase, NodePhase::Draining | NodePhase::Drained) {
        return (
            false,
            "Draining",
            "a drain is requested: cancel it (spec.drain) to place Workspaces here again".to_owned(),
        );
    }
    let Some(live) = &observed.live else {
        return (false, "NoSession", "the node has to open its control session anew with the new leader".to_owned());
    };
    if !live.settings_confirmed {
        let message = "the node has not confirmed its settings yet: usually it does within a second";
        return (false, "SettingsUnconfirmed", message.to_owned());
    }
    match &live.clock {
        None => {
            let message = "the node's clock is being measured: usually that takes less than a second";
            return (false, "ClockNotMeasured", message.to_owned());
        }
        Some(clock) if clock.over => {
            return (false, "ClockOff", "the node's clock is off: see the condition ClockSynchronized".to_owned());
        }
        Some(_) => {}
    }
    if let Some(pool) = &observed.unregistered {
        let message =
            format!("the node's storage pool {pool} is being registered: usually that takes less than a second");
        return (false, "PoolBeingRegistered", message);
    }
    if live.report.as_ref().and_then(|report| report.host.as_ref()?.memory_tight_since.as_ref()).is_some() {
        let message = "the host is short of free memory: see the condition MemoryTight";
        return (false, "MemoryTight", message.to_owned());
    }
    match live.pools.iter().find(|pool| pool.default) {
        None => (
            true,
            "NoDefaultPool",
            "new objects are not placed here: the node declares no default storage pool".to_owned(),
        ),
        Some(pool) if !pool.available => (
            true,
            "DefaultPoolUnavailable",
            format!("new objects are not placed here: the node does not reach its default storage pool {}", pool.id),
        ),
        Some(_) => (true, "Schedulable", "Workspaces are placed here".to_owned()),
    }
}

fn drained(observed: &Observed<'_>, drain: DrainState) -> Verdict {
    let usage = observed.usage;
    match drain {
        DrainState::NotRequested => (false, "NotRequested", "no drain is requested".to_owned()),
        DrainState::Drained => (true, "Drained", "nothing runs here and nothing is held here".to_owned()),
        DrainState::Draining if usage == NodeUsage::default() => (
            false,
            "WaitingForNode",
            "nothing names this node any more; its confirmation and next report are awaited".to_owned(),
        ),
        DrainState::Draining => (false, "Draining", what_is_left(usage)),
    }
}

/// What keeps a node from being drained, with what to do about it.
fn what_is_left(usage: NodeUsage) -> String {
    let in_use = usage.held_objects.saturating_sub(usage.idle_objects);
    let mut left = Vec::new();
    if usage.executions > 0 || in_use > 0 || usage.in_flight > 0 {
        let coming =
            if usage.in_flight > 0 { format!(", being placed here: {}", usage.in_flight) } else { String::new() };
        left.push(format!(
            "running here: {}{coming}, Volumes and layers in use here: {in_use}: stop or delete these Workspaces",
            usage.executions
        ));
    }
    if usage.idle_objects > 0 {
        left.push(format!(
            "held here though not in use: {} Volumes and layers in storage pools that no other node is attached to: delete these Volumes and Workspaces, or attach another node to the pools",
            usage.idle_objects
        ));
    }
    left.join("; ")
}

/// Whether the difference is worth a write: not for a few bytes of free space, nor for a report's time
/// that is younger than a reconciliation period.
pub fn is_worth_a_write(old: Option<&NodeStatus>, new: &NodeStatus) -> bool {
    let Some(old) = old else { return true };
    let report_is_due = match (&old.report, &new.report) {
        (Some(old), Some(new)) => new.time.0.duration_since(old.time.0) >= REPORT_REFRESH,
        (old, new) => old != new,
    };
    if report_is_due {
        return old != new;
    }
    let without_readings = |status: &NodeStatus| {
        let mut status = status.clone();
        if let (Some(report), Some(old)) = (&mut status.report, &old.report) {
            report.time = old.time.clone();
        }
        for pool in &mut status.pools {
            pool.free = None;
        }
        if status.host_usage.is_some() == old.host_usage.is_some() {
            status.host_usage = None;
        }
        if let (Some(clock), Some(old)) = (&mut status.clock, &old.clock)
            && (clock.over, clock.kernel_synchronized) == (old.over, old.kernel_synchronized)
            && clock.offset_millis.abs_diff(old.offset_millis) < CLOCK_STEP
        {
            clock.clone_from(old);
        }
        status
    };
    without_readings(old) != without_readings(new)
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
