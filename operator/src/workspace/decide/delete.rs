//! A Workspace on its way out: nothing runs, then the layer goes, then the Volume is let go, then the rest.
//!
//! It goes on without anything that the start needed: Template, Volume and request may be gone.

use kibo_crds::workspace::{Execution, WorkspacePhase};
use kibo_protocol::v1;
use kube::ResourceExt as _;

use super::{Action, Decision, can_ask, idle::bound_to, lost, running::stop};
use crate::{
    moving,
    right::{HasRight as _, Standing, waits_for},
    workspace::{
        draft::{Draft, Wait},
        sight::{CREATED_FOR, Sight},
    },
};

pub(super) fn decide(sight: &Sight<'_>, mut draft: Draft<'_>, execution: Option<Execution>) -> Decision {
    if draft.phase() != WorkspacePhase::Deleting {
        let superseded = "the Workspace is being deleted";
        draft.finish_commands(Some(("Deleting", superseded)));
    }
    draft.enter(WorkspacePhase::Deleting);
    if let Some(execution) = execution {
        return stop(sight, draft, &execution, v1::StopMode::Force);
    }
    if moving::is_open(draft.status.r#move.as_ref()) {
        if let Some(message) = draft.status.r#move.as_ref().and_then(|moving| moving.message.clone()) {
            draft.wait_for(Wait::node("MoveNotOver", message));
        }
        return draft.then(Action::Rest);
    }
    if crate::transfer::is_open(draft.status.transfer.as_ref()) {
        if let Some(message) = super::transfer::out_of_reach(sight, &draft) {
            draft.wait_for(Wait::node("TransferNotOver", message));
        }
        return draft.then(Action::Rest);
    }
    if lost::layer_pool(sight, &draft).is_some() {
        // There is nothing to remove, and nobody to do it.
        draft.status.writable_layer = None;
    }
    if draft.status.writable_layer.is_some() {
        return delete_layer(sight, draft);
    }
    let uid = sight.workspace.uid();
    if let Some(volume) = sight.volume {
        let is_bound = bound_to(volume).is_some_and(|bound| Some(&bound.uid) == uid.as_ref());
        // Made for this Workspace, and the binding did not come about any more.
        let is_made_for = bound_to(volume).is_none() && volume.labels().get(CREATED_FOR) == uid.as_ref();
        // Of an import that did not complete nothing is left.
        let is_half = super::transfer::unfinished(&draft).is_some() && volume.labels().get(CREATED_FOR) == uid.as_ref();
        let is_asked = sight.workspace.spec.volume.as_ref().is_some_and(|binding| binding.delete_with_workspace);
        let goes_too = is_half || is_asked;
        // First the Volume's deletion, then its release: after that nobody would remember it.
        if goes_too && volume.metadata.deletion_timestamp.is_none() && (is_bound || is_made_for) {
            return draft.then(Action::DeleteVolume);
        }
        if is_bound {
            return draft.then(Action::UnbindVolume);
        }
    }
    // One that its spec does not name any more, or that took the place of one that was refused.
    if let Some(other) = sight.others_bound.first() {
        return draft.then(Action::ReleaseVolume(other.clone()));
    }
    draft.status.volume = None;
    draft.then(Action::Bury)
}

/// The layer is removed by a member of its pool, under a grant of its own.
fn delete_layer(sight: &Sight<'_>, mut draft: Draft<'_>) -> Decision {
    let right = draft.status.right();
    let void = |node: &_, incarnation| sight.cluster.void(node, incarnation);
    if let Standing::Held(holder) = right.standing(void) {
        if can_ask(sight, &holder) {
            return draft.then(Action::DeleteLayer { holder });
        }
        if !sight.cluster.is_settling() {
            draft.wait_for(Wait::node("HolderUnreachable", waits_for("the writable layer", &holder.node)));
        }
        return draft.then(Action::Rest);
    }
    let Some(pool) = draft.status.writable_layer.as_ref().map(|layer| layer.pool.clone()) else {
        return draft.then(Action::Rest);
    };
    let members = sight.cluster.reachable_members(&pool);
    // The last holder first: its own records are the freshest for it.
    let last = right.holder.as_ref().map(|holder| &holder.node);
    let member = members.iter().find(|(node, _)| Some(node) == last).or(members.first());
    match member {
        Some((node, incarnation)) => match right.granted(node, *incarnation, void) {
            Ok(right) => draft.status.set_right(right),
            Err(error) => draft.wait_for(Wait::node(error.reason(), error.to_string())),
        },
        None if sight.cluster.is_settling() => {}
        None => {
            let nodes: Vec<_> = sight.cluster.members(&pool).iter().map(ToString::to_string).collect();
            let who =
                if nodes.is_empty() { "it has none".to_owned() } else { format!("members: {}", nodes.join(", ")) };
            let message = format!(
                "waits for a node of storage pool {pool} with a control session, since only that can remove the writable layer ({who})"
            );
            draft.wait_for(Wait::node("NoPoolMember", message));
        }
    }
    draft.then(Action::Rest)
}
