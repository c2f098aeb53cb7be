//! The conditions of a Node: each with its reason, and what a person can do. Pure.

use std::time::Duration;

use kibo_crds::{
    ConditionType, condition,
    node::{HostUsage, NodePhase, NodeStatus, UnknownInstances},
    set_condition,
};

use super::{
    isolation,
    status::{DrainState, Observed},
};
use crate::{session::hooks::NodeUsage, watchdog::Periods};

/// Sets every condition that follows from what was observed and from the rest of the status.
pub(super) fn set(status: &mut NodeStatus, observed: &Observed<'_>, phase: NodePhase, drain: DrainState) {
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
