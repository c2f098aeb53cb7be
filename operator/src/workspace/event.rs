//! What a node's word about an Instance changes in the Workspace. Pure.
//!
//! The effect and the number of the event that had it are one write, so an event that comes again, to
//! this leader or the next, changes nothing. What an event says about objects counts also when its
//! Instance is not current any more: it goes by node and epoch.

use std::net::Ipv4Addr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{
    Bytes, ConditionType, Epoch, NodeId, SequenceNumber, Workspace,
    volume::VolumeStatus,
    workspace::{PowerState, StopMode, WorkspacePhase, WorkspaceStatus},
};
use kibo_protocol::v1::{self, instance_event::Kind};

use super::draft::{Draft, Notice, Outcome};
use crate::right::HasRight as _;

/// One object as the node has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectFact {
    pub epoch: Epoch,
    pub used: v1::ObjectUse,
    /// Absent: no image.
    pub size: Option<Bytes>,
}

impl From<&v1::ObjectState> for ObjectFact {
    fn from(state: &v1::ObjectState) -> Self {
        Self { epoch: Epoch(state.epoch), used: state.r#use(), size: state.size_bytes.map(Bytes) }
    }
}

/// What an event says about objects, by uid.
pub fn object_states(event: &v1::InstanceEvent) -> &[v1::ObjectState] {
    match &event.kind {
        Some(Kind::ObjectsTaken(taken)) => &taken.objects,
        Some(Kind::Ended(ended)) => &ended.objects,
        _ => &[],
    }
}

/// Takes a fact about the writable layer in. The pool is chosen anew when the image was never made.
pub fn layer_fact(status: &mut WorkspaceStatus, node: &NodeId, fact: ObjectFact, others_reach_it: bool) {
    let is_current = status.holder.as_ref().is_some_and(|held| held.node == *node && held.epoch == fact.epoch);
    if !is_current {
        return;
    }
    if let Some(right) = status.right().after(node, fact.epoch, fact.used, others_reach_it) {
        status.set_right(right);
    }
    if let Some(layer) = &mut status.writable_layer
        && let Some(size) = fact.size
    {
        (layer.created, layer.size) = (true, size);
        layer.grow_to = layer.grow_to.filter(|wanted| *wanted > size);
    }
    let was_made = status.writable_layer.as_ref().is_some_and(|layer| layer.created);
    if fact.used == v1::ObjectUse::Refused && !was_made && !may_have_been_written(status.previous_holder.as_ref()) {
        status.writable_layer = None;
    }
}

/// The same for a Volume; `own_pool` is the pool that its spec names.
pub fn volume_fact(status: &mut VolumeStatus, node: &NodeId, fact: ObjectFact, others_reach_it: bool) {
    let is_current = status.holder.as_ref().is_some_and(|held| held.node == *node && held.epoch == fact.epoch);
    if !is_current {
        return;
    }
    if let Some(right) = status.right().after(node, fact.epoch, fact.used, others_reach_it) {
        status.set_right(right);
        status.granted_for = None;
    }
    if let Some(size) = fact.size {
        status.size = Some(size);
        status.grow_to = status.grow_to.filter(|wanted| *wanted > size);
    }
    if fact.used == v1::ObjectUse::Refused
        && status.size.is_none()
        && !may_have_been_written(status.previous_holder.as_ref())
    {
        status.pool = None;
    }
}

/// An earlier holder may have made and written the image without anybody hearing of it.
fn may_have_been_written(previous: Option<&kibo_crds::node::PreviousHolder>) -> bool {
    previous.is_some_and(|previous| previous.ended != kibo_crds::node::HolderEnd::Refused)
}

/// The effect of one event of the current Instance.
pub fn apply(
    workspace: &Workspace,
    node: &NodeId,
    event: &v1::InstanceEvent,
    others_reach_layer: bool,
    now: Time,
) -> Outcome {
    let mut draft = Draft::new(workspace, now);
    let before = draft.status.clone();
    let uid = workspace.metadata.uid.as_deref();
    for state in object_states(event).iter().filter(|state| Some(state.uid.as_str()) == uid) {
        layer_fact(&mut draft.status, node, state.into(), others_reach_layer);
    }
    let is_current = draft.status.execution.as_ref().is_some_and(|execution| {
        execution.instance_id.to_string() == event.instance_id
            && execution.node == *node
            && execution.last_seq.0 < event.seq
    });
    if is_current {
        draft.node_is_reachable(true);
        take_in(&mut draft, event);
    } else if let Some(Kind::Ended(ended)) = &event.kind {
        ended_late(&mut draft, node, event, ended);
    }
    // A number alone is no reason for a write: without an effect the event may come again.
    if draft.status == before {
        return Outcome::default();
    }
    if is_current && let Some(execution) = &mut draft.status.execution {
        execution.last_seq = SequenceNumber(event.seq);
    }
    draft.finish()
}

fn take_in(draft: &mut Draft<'_>, event: &v1::InstanceEvent) {
    match &event.kind {
        Some(Kind::Available(event)) => available(draft, event),
        Some(Kind::GuestUnresponsive(_)) => {
            let message = "the agent in the guest does not answer; the guest may be overloaded or hung";
            draft.set(ConditionType::GuestResponsive, false, "NoAnswer", message);
            draft.notices.push(Notice::warning("GuestUnresponsive", message));
        }
        Some(Kind::GuestResponsive(_)) => draft.set(ConditionType::GuestResponsive, true, "Answers", ""),
        Some(Kind::EntrypointExited(exited)) => entrypoint_exited(draft, exited),
        Some(Kind::Blocked(blocked)) => {
            draft.set(ConditionType::Blocked, true, "NodeNeedsHelp", &blocked.message);
            draft.notices.push(Notice::warning("NodeNeedsHelp", &blocked.message));
        }
        Some(Kind::Paused(paused)) => self::paused(draft, paused),
        Some(Kind::Resumed(_)) => {
            if draft.forget(ConditionType::Paused) {
                draft.notices.push(Notice::normal("Resumed", "the guest runs again"));
            }
        }
        Some(Kind::Ended(ended)) => self::ended(draft, ended),
        Some(Kind::ObjectsTaken(_)) | None => {}
    }
}

fn paused(draft: &mut Draft<'_>, paused: &v1::Paused) {
    let reason = match paused.reason() {
        v1::PauseReason::PoolUnreadable => "PoolUnreadable",
        v1::PauseReason::DiskFull => "DiskFull",
        v1::PauseReason::DiskFailed => "DiskFailed",
        v1::PauseReason::Unspecified => "Paused",
    };
    draft.set(ConditionType::Paused, true, reason, &paused.message);
    draft.notices.push(Notice::warning(reason, &paused.message));
}

fn available(draft: &mut Draft<'_>, event: &v1::Available) {
    if let Some(execution) = &mut draft.status.execution {
        // A node may say anything; what is no address is not shown.
        execution.address = event.address.parse::<Ipv4Addr>().ok().map(|address| address.to_string());
    }
    draft.set(ConditionType::GuestResponsive, true, "Answers", "");
    // A stop or a deletion may have overtaken the start.
    if draft.phase() != WorkspacePhase::Starting {
        return;
    }
    draft.enter(WorkspacePhase::Available);
    draft.finish_commands(None);
    if draft.status.last_execution.is_none()
        && let Some(execution) = &draft.status.execution
    {
        let message = format!("runs on node {} for the first time", execution.node);
        draft.notices.push(Notice::normal("Available", &message));
    }
}

fn entrypoint_exited(draft: &mut Draft<'_>, exited: &v1::EntrypointExited) {
    if exited.will_restart || draft.phase() != WorkspacePhase::Available {
        return;
    }
    let how = match (exited.code, exited.signal) {
        (Some(code), _) => format!("with exit status {code}"),
        (None, Some(signal)) => format!("by signal {signal}"),
        (None, None) => "without a status".to_owned(),
    };
    let message = format!("the entrypoint ended {how} and is not started again; the guest runs on");
    draft.explain("EntrypointExited", &message);
    if exited.code != Some(0) {
        draft.notices.push(Notice::warning("EntrypointExited", &message));
    }
}

/// What an end means for the Workspace.
struct Meaning {
    phase: WorkspacePhase,
    reason: &'static str,
    /// The phase says it all.
    is_plain: bool,
}

fn meaning(reason: v1::EndReason) -> Meaning {
    use v1::EndReason as End;
    let failed = |reason| Meaning { phase: WorkspacePhase::Failed, reason, is_plain: false };
    let stopped = |reason, is_plain| Meaning { phase: WorkspacePhase::Stopped, reason, is_plain };
    match reason {
        End::Stopped => stopped("Stopped", true),
        End::ForceStopped => stopped("ForceStopped", true),
        End::OutOfMemory => stopped("OutOfMemory", false),
        End::GuestShutdown => stopped("GuestShutdown", false),
        End::NotStarted => failed("NotStarted"),
        End::HolderConflict => failed("HolderConflict"),
        End::StorageFailed => failed("StorageFailed"),
        End::VmmFailed => failed("VmmFailed"),
        End::NetworkFailed => failed("NetworkFailed"),
        End::GuestConfigureFailed => failed("GuestConfigureFailed"),
        End::GuestBootTimeout => failed("GuestBootTimeout"),
        End::VmmExited => failed("VmmExited"),
        // The same as when the new life of the node is seen before the node has told it.
        End::HostRestarted => failed("NodeRestarted"),
        End::GuestPanicked => failed("GuestPanicked"),
        End::GuestAgentDied => failed("GuestAgentDied"),
        End::TornDown => failed("TornDown"),
        End::Isolated => failed("Unavailable"),
        End::Fenced | End::FencedWhileStill => failed("Fenced"),
        End::Unspecified => failed("Ended"),
    }
}

fn ended(draft: &mut Draft<'_>, ended: &v1::Ended) {
    let phase = draft.phase();
    if ended.reason() == v1::EndReason::NotStarted && phase == WorkspacePhase::Starting {
        return not_started(draft, &ended.message);
    }
    let mut meaning = meaning(ended.reason());
    if meaning.is_plain && !matches!(phase, WorkspacePhase::Stopping | WorkspacePhase::Deleting) {
        // Nobody asked for it: the node has found nothing where something was to run.
        meaning = Meaning { phase: WorkspacePhase::Failed, reason: "ExecutionLost", is_plain: false };
    }
    draft.end_execution(meaning.reason);
    if phase == WorkspacePhase::Deleting {
        return;
    }
    let message = if ended.message.is_empty() { sentence(ended.reason()) } else { &ended.message };
    let was_stopping = phase == WorkspacePhase::Stopping;
    // Whoever forces an end, or asks for one before anything started, gets it whatever it was that ended.
    if was_stopping && (is_forced(draft) || ended.reason() == v1::EndReason::NotStarted) {
        draft.enter(WorkspacePhase::Stopped);
        return draft.finish_commands(None);
    }
    if meaning.is_plain {
        draft.enter(meaning.phase);
    } else {
        draft.enter_because(meaning.phase, meaning.reason, message);
        draft.notices.push(Notice::warning(meaning.reason, message));
    }
    let is_as_asked = was_stopping && meaning.phase == WorkspacePhase::Stopped;
    draft.finish_commands((!is_as_asked).then_some((meaning.reason, message)));
}

/// The end of an Instance that is not the Workspace's any more: its node was taken for dead. Where it says that the guest
/// ran until the pool told it, people must hear that two guests may have written.
fn ended_late(draft: &mut Draft<'_>, node: &NodeId, event: &v1::InstanceEvent, ended: &v1::Ended) {
    if ended.reason() != v1::EndReason::Fenced {
        return;
    }
    let id = &event.instance_id;
    let uid = draft.workspace.metadata.uid.as_deref();
    let own = ended.objects.iter().find(|object| Some(object.uid.as_str()) == uid).map(|object| Epoch(object.epoch));
    let was_granted_since = own < draft.status.epoch;
    if !was_granted_since {
        return;
    }
    if draft.condition(ConditionType::TwoWriters).is_some_and(|told| told.message.contains(id)) {
        return;
    }
    let message = format!(
        "{id} was declared dead with node {node}, and ran on: {}. The disk was given away by then, and both may have \
         written: look at its file systems",
        ended.message
    );
    draft.set(ConditionType::TwoWriters, true, "WrongIsolation", &message);
    draft.notices.push(Notice::warning("TwoWriters", &message));
}

fn is_forced(draft: &Draft<'_>) -> bool {
    let consumed = draft.status.power.as_ref().map(|power| &power.consumed);
    consumed.is_some_and(|request| request.state == PowerState::Stopped && request.stop_mode == Some(StopMode::Force))
}

/// The Go came too late, or the node had changed its mind: nothing was taken, and the request stands again.
fn not_started(draft: &mut Draft<'_>, message: &str) {
    draft.status.execution = None;
    draft.status.power = None;
    let has_run = draft.status.last_execution.is_some();
    let phase = if has_run { WorkspacePhase::Stopped } else { WorkspacePhase::Creating };
    draft.enter_because(phase, "NotStarted", message);
}

fn sentence(reason: v1::EndReason) -> &'static str {
    use v1::EndReason as End;
    match reason {
        End::OutOfMemory => "the guest was killed because its memory ran out: start it again, perhaps with more memory",
        End::GuestShutdown => "the guest shut itself down: start it again when it is needed",
        End::HolderConflict => "a record in the storage pool says that somebody else uses the disk",
        End::StorageFailed => "a disk image could not be made or opened on the node",
        End::VmmFailed => "the virtual machine could not be started on the node",
        End::NetworkFailed => "the network of the guest could not be made on the node",
        End::GuestConfigureFailed => "the guest could not be configured",
        End::GuestBootTimeout => "the guest did not come up in time",
        End::HostRestarted => "its host was booted anew while it ran: start it again",
        End::VmmExited => "the virtual machine ended by a fault or was killed: start it again",
        End::GuestPanicked => "the kernel of the guest panicked",
        End::GuestAgentDied => "the agent in the guest died, and the guest with it",
        End::TornDown => "the node tore it down because the control plane did not hold it",
        End::Isolated => "the node was isolated and destroyed it",
        End::Fenced | End::FencedWhileStill => {
            "the node lost the right to a disk while the guest ran, and killed it: start it again"
        }
        End::NotStarted => "the node did not start it",
        End::Stopped | End::ForceStopped | End::Unspecified => "it ended without having been asked: start it again",
    }
}
