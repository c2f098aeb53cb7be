//! What becomes of Workspaces and Volumes when a node comes back that is ahead of a control plane which was put back to
//! an older state. Pure.
//!
//! What runs and by right holds its disk is the Workspace's execution again, whatever the stored status takes for it;
//! what the status takes for running there and does not run has ended. Requests are not repeated: the one that the
//! status has not consumed was consumed in the time that is lost, if something newer runs.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{
    ConditionType, Volume, Workspace,
    volume::{BoundTo, GrantedFor, VolumeStatus},
    workspace::{BoundVolume, Execution, LayerStatus, WorkspacePhase},
};
use kibo_protocol::v1;
use kube::ResourceExt as _;

use super::draft::{Draft, Notice, Outcome};
use crate::{
    evidence::{Evidence, InstanceEvidence},
    right::HasRight as _,
};

/// Reason of a Workspace whose execution had ended when the control plane was put back.
const ENDED: &str = "EndedAfterBackup";

/// What became of a Workspace's execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The node has nothing to say about it.
    None,
    Adopted,
    Ended,
}

/// Whether the evidence bears on this Workspace.
pub fn concerns_workspace(workspace: &Workspace, evidence: &Evidence) -> bool {
    let uid = workspace.metadata.uid.as_deref().unwrap_or_default();
    let names = super::index::nodes_of(workspace).contains(&evidence.node);
    names || evidence.running.contains_key(uid) || evidence.objects.contains_key(uid)
}

pub fn concerns_volume(volume: &Volume, evidence: &Evidence) -> bool {
    let uid = volume.metadata.uid.as_deref().unwrap_or_default();
    let holder = volume.status.as_ref().and_then(|status| status.holder.as_ref());
    holder.is_some_and(|holder| holder.node == evidence.node) || evidence.objects.contains_key(uid)
}

/// The next status of a Workspace. `volume` is the one that its spec names.
pub fn workspace(
    workspace: &Workspace,
    volume: Option<&Volume>,
    evidence: &Evidence,
    others_reach_layer: bool,
    now: &Time,
) -> (Fate, Outcome) {
    let mut draft = Draft::new(workspace, now.clone());
    let uid = workspace.metadata.uid.clone().unwrap_or_default();
    let stored = draft.status.right();
    let stored_for = draft.status.execution.as_ref().map(|execution| execution.instance_id);
    let rightful = evidence.rightful(&uid, stored.epoch, stored_for);
    let records = evidence.objects.get(&uid);
    let highest = records.map(|records| records.highest).unwrap_or_default();
    let taking = rightful.map(|instance| instance.layer_epoch).filter(|epoch| *epoch > highest);
    draft.status.set_right(evidence.right(&uid, &stored, taking, others_reach_layer));
    if let Some(records) = records
        && let Some(size) = records.size
    {
        let found = LayerStatus { pool: records.pool.clone(), size, grow_to: None, created: true };
        let layer = draft.status.writable_layer.get_or_insert(found);
        (layer.created, layer.size) = (true, size);
        layer.grow_to = layer.grow_to.filter(|wanted| *wanted > size);
        if records.has_moved_here(stored.epoch) {
            layer.pool = records.pool.clone();
            crate::moving::adopted(draft.status.r#move.as_mut(), &records.pool);
        }
    }
    let fate = match rightful {
        Some(instance) => {
            adopt(&mut draft, evidence, instance, now);
            if let Some(volume) = volume.filter(|volume| instance.volumes.contains_key(&uid_of(volume))) {
                draft.status.volume = Some(BoundVolume { name: volume.name_any(), uid: uid_of(volume) });
            }
            Fate::Adopted
        }
        None => end(&mut draft, evidence),
    };
    (fate, draft.finish())
}

fn uid_of(volume: &Volume) -> String {
    volume.metadata.uid.clone().unwrap_or_default()
}

fn adopt(draft: &mut Draft<'_>, evidence: &Evidence, instance: &InstanceEvidence, now: &Time) {
    let is_known = draft
        .status
        .execution
        .as_ref()
        .is_some_and(|execution| execution.instance_id == instance.instance && execution.node == evidence.node);
    if !is_known {
        draft.end_execution(ENDED);
        draft.finish_commands(Some((ENDED, "the control plane was put back to an older state")));
        let request = draft.workspace.power_request();
        if !draft.workspace.is_power_request_consumed() {
            draft.consume(&request);
            draft.finish_commands(Some((ENDED, "something newer runs: it was acted upon in the time that is lost")));
        }
    }
    let stored = draft.status.execution.clone();
    draft.status.execution = Some(Execution {
        instance_id: instance.instance,
        node: evidence.node.clone(),
        incarnation: evidence.incarnation,
        cpu_milli: instance.cpu,
        memory_bytes: instance.memory,
        last_seq: stored.as_ref().map(|execution| execution.last_seq).max(Some(instance.acked)).unwrap_or_default(),
        address: stored.as_ref().and_then(|execution| execution.address.clone()),
        started_at: stored.map_or_else(|| now.clone(), |execution| execution.started_at),
    });
    draft.node_is_reachable(true);
    if draft.phase() == WorkspacePhase::Deleting {
        return;
    }
    let phase = match instance.state {
        // A stop that is asked for goes on; one that nobody remembers is finished all the same.
        v1::InstanceState::Stopping => WorkspacePhase::Stopping,
        _ if is_known && draft.phase() == WorkspacePhase::Stopping => WorkspacePhase::Stopping,
        _ if instance.available => WorkspacePhase::Available,
        _ => WorkspacePhase::Starting,
    };
    if phase == draft.phase() {
        return;
    }
    draft.enter(phase);
    if phase == WorkspacePhase::Available {
        draft.set(ConditionType::GuestResponsive, true, "Answers", "");
        draft.finish_commands(None);
    }
}

/// What does not run on the node has ended, unless its last events are on their way.
fn end(draft: &mut Draft<'_>, evidence: &Evidence) -> Fate {
    let Some(execution) = draft.status.execution.as_ref().filter(|execution| execution.node == evidence.node) else {
        return Fate::None;
    };
    // Of a life that is over they would come too late: it is void with the session.
    if evidence.ended.contains(&execution.instance_id) && execution.incarnation == evidence.incarnation {
        return Fate::None;
    }
    draft.end_execution(ENDED);
    if draft.phase() != WorkspacePhase::Deleting {
        let message =
            "its execution ended after the backup was made that the control plane was put back to: start it again";
        draft.enter_because(WorkspacePhase::Stopped, ENDED, message);
        draft.finish_commands(Some((ENDED, message)));
        draft.notices.push(Notice::warning(ENDED, message));
    }
    Fate::Ended
}

/// The next status of a Volume.
pub fn volume(volume: &Volume, evidence: &Evidence, others_reach_it: bool, now: &Time) -> VolumeStatus {
    let uid = uid_of(volume);
    let mut status = volume.status.clone().unwrap_or_default();
    let stored = status.right();
    let records = evidence.objects.get(&uid);
    let highest = records.map(|records| records.highest).unwrap_or_default();
    let stored_for = status.granted_for.as_ref().map(|granted| granted.instance_id);
    let user = evidence.running.values().find(|instance| {
        let epoch = instance.volumes.get(&uid).copied();
        epoch.is_some_and(|epoch| evidence.uses(&uid, instance, epoch, stored.epoch, stored_for))
    });
    let taking = user.and_then(|instance| instance.volumes.get(&uid).copied()).filter(|epoch| *epoch > highest);
    let right = evidence.right(&uid, &stored, taking, others_reach_it);
    let other = || {
        let last = records.and_then(|records| records.last.as_ref()).filter(|last| last.holds)?;
        let workspace_uid = status.bound_to.as_ref().map(|bound| bound.uid.clone()).unwrap_or_default();
        Some(GrantedFor { workspace_uid, instance_id: last.instance? })
    };
    let granted_for = match user {
        Some(instance) => {
            Some(GrantedFor { workspace_uid: instance.workspace_uid.clone(), instance_id: instance.instance })
        }
        None if right.holder.as_ref().is_none_or(|holder| holder.idle) => None,
        None if right.holder == stored.holder => status.granted_for.clone(),
        None => other(),
    };
    status.set_right(right);
    status.granted_for = granted_for;
    if let Some(records) = records
        && records.size.is_some()
    {
        status.pool.get_or_insert(records.pool.clone());
        status.size = records.size;
        if records.has_moved_here(stored.epoch) {
            status.pool = Some(records.pool.clone());
            crate::moving::adopted(status.r#move.as_mut(), &records.pool);
        }
    }
    if let Some(instance) = user {
        status
            .bound_to
            .get_or_insert(BoundTo { name: instance.workspace_name.clone(), uid: instance.workspace_uid.clone() });
    }
    crate::volume::decide::complete(volume, &mut status, None, now);
    status
}

#[cfg(test)]
#[path = "adopt_tests.rs"]
mod tests;
