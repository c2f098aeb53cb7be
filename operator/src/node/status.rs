//! What is true of a Node, computed from everything that the leader knows. Pure.

use std::collections::BTreeMap;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::SignedDuration};
use kibo_crds::{
    ConditionType, Node, PoolId,
    node::{
        Admission, Amounts, HostUsage, NodeClock, NodePhase, NodePool, NodeReport, NodeSession, NodeStatus, Quarantine,
    },
};

use super::{
    conditions,
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
    /// Of the settings that the node's admission used.
    pub settings_revision: u64,
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
    conditions::set(&mut status, observed, phase, drain);
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
            settings_revision: Some(report.settings_revision),
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
        used: pool.used,
        waiting_guests: pool.waiting_guests,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainState {
    NotRequested,
    Draining,
    Drained,
}

/// Drained: the node confirmed the drain in this session, nothing names it, and a report that it sent
/// afterwards shows nothing. With the session that does not end: whose drain stands gets nothing while it is away, and
/// its daemon is stopped after a drain.
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
    let known = confirmed || (observed.live.is_none() && was_drained(observed));
    if known && empty { DrainState::Drained } else { DrainState::Draining }
}

/// By what is stored. Of a node that is ahead of this control plane nothing that is stored is true.
fn was_drained(observed: &Observed<'_>) -> bool {
    let is_ahead = observed.refused.as_ref().is_some_and(|refused| refused.quarantine.is_some());
    let stored = observed.node.status.as_ref().filter(|status| !is_ahead && status.quarantine.is_none());
    let drained = ConditionType::Drained.to_string();
    stored.is_some_and(|status| status.conditions.iter().any(|it| it.type_ == drained && it.status == "True"))
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
            report.settings_revision = old.settings_revision;
        }
        for pool in &mut status.pools {
            (pool.free, pool.used) = (None, None);
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
