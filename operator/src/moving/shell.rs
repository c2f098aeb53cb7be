//! Carries out what a decision about a move says, and takes in what nodes say of moves. Nothing here waits for a copy or
//! a removal: the object's own task goes on meanwhile, and is rung for when there is news.

use std::{sync::Arc, time::Duration};

use kibo_crds::{Epoch, MoveStatus, NodeId};
use kibo_protocol::v1::{self, to_node::Message};

use super::{Action, Discarded, Removal, Word};
use crate::{
    cache::Key,
    right::HasRight as _,
    session::ObjectCommand,
    workspace::{
        reconcile::{Step, command_id},
        world::World,
    },
};

/// An order is looked after when nothing was heard for so long.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// Which object.
#[derive(Clone, Debug)]
pub(crate) enum Whose {
    Workspace(Key),
    Volume(Key),
}

impl Whose {
    fn ring(&self, world: &World) {
        match self {
            Self::Workspace(key) => world.bells.workspaces.push(key.clone()),
            Self::Volume(key) => world.bells.volumes.push(key.clone()),
        }
    }
}

/// `object` is the object with its current grant.
pub(crate) async fn act(world: &Arc<World>, whose: Whose, object: Option<v1::Object>, action: Action) -> Step {
    let Some(object) = object else { return Step::Rest };
    match action {
        // Its own room does it.
        Action::Settle { .. } => Step::Rest,
        Action::Copy { node, incarnation, to } => {
            let Some(session) = world.ctx.registry.snapshot_of(&node).map(|it| it.session_id) else {
                return Step::Rest;
            };
            let epoch = Epoch(object.grant.as_ref().map(|grant| grant.epoch).unwrap_or_default());
            if let Err(rest) = world.hearsay.may_order(&object.uid, &session, epoch) {
                return Step::After(rest);
            }
            tracing::info!(%node, object = object.uid, from = object.pool, %to, %epoch, "a move is ordered");
            let order = v1::MoveObject { object: Some(object), to_pool: to.to_string() };
            // A session that is gone is heard of by its own bell.
            let _ = world.ctx.registry.send(&node, incarnation, Message::MoveObject(order));
            kibo_failpoint::reach("move-ordered").await;
            Step::After(LOOK_AGAIN)
        }
        Action::Discard { node, incarnation, pool, epoch } => {
            if let Err(rest) = world.hearsay.begin_discard(&object.uid) {
                return rest.map_or(Step::Rest, Step::After);
            }
            // Only its epoch counts; what came before it is settled.
            let predecessor_end = v1::PredecessorEnd::None.into();
            let grant = v1::Grant { epoch: epoch.0, predecessor_epoch: 0, predecessor_end };
            let object = v1::Object { pool: pool.to_string(), grant: Some(grant), ..object };
            let world = world.clone();
            let (tasks, stop) = (world.ctx.tasks.clone(), world.ctx.stop.clone());
            tasks.spawn(stop.run_until_cancelled_owned(async move {
                let uid = object.uid.clone();
                let command = v1::DiscardCopy { command_id: command_id(), object: Some(object) };
                let asked = world.ctx.registry.object_command(&node, incarnation, ObjectCommand::Discard(command));
                let outcome = match asked.await {
                    Ok(result) if result.ok => Removal::Removed,
                    Ok(result) if result.failure() == v1::ObjectFailure::HolderConflict => {
                        Removal::NotOurs(format!("node {node}: {}", result.message))
                    }
                    Ok(result) => Removal::Failed(format!("node {node}: {}", result.message)),
                    Err(error) => Removal::Failed(error.to_string()),
                };
                if let Removal::NotOurs(problem) | Removal::Failed(problem) = &outcome {
                    tracing::warn!(object = uid, %pool, problem, "what a move left over is not removed yet");
                }
                world.hearsay.end_discard(&uid, Discarded { node, pool, epoch, outcome });
                whose.ring(&world);
            }));
            Step::Rest
        }
    }
}

/// A node says how far a move is. What it says of objects that it does not hold for a move is its own affair.
pub fn progress(world: &World, node: &NodeId, progress: &v1::MoveProgress) {
    let epoch = Epoch(progress.epoch);
    let is_its_own = |right: crate::right::Right, moving: Option<&MoveStatus>| {
        let holds = right.holder.is_some_and(|holder| holder.node == *node && holder.epoch == epoch && !holder.idle);
        holds && moving.is_some_and(|moving| moving.state.holds() && moving.epoch == Some(epoch))
    };
    let volume = world.volumes.by_uid(&progress.uid);
    let workspace = world.workspaces.by_uid(&progress.uid);
    let whose = match (&volume, &workspace) {
        (Some(volume), _) if volume.status.as_ref().is_some_and(|it| is_its_own(it.right(), it.r#move.as_ref())) => {
            Whose::Volume(Key::of(&**volume))
        }
        (_, Some(workspace))
            if workspace.status.as_ref().is_some_and(|it| is_its_own(it.right(), it.r#move.as_ref())) =>
        {
            Whose::Workspace(Key::of(&**workspace))
        }
        _ => {
            tracing::debug!(%node, object = progress.uid, "news of a move that is not under way there");
            return;
        }
    };
    let word = Word {
        node: node.clone(),
        epoch,
        state: progress.state(),
        copied: progress.copied_bytes,
        total: progress.total_bytes,
        failure: progress.failure(),
        message: progress.message.clone(),
    };
    if world.hearsay.hear(&progress.uid, word) {
        whose.ring(world);
    }
}

/// Points between the steps of a move, for tests: before and after the write that takes it from one state to the next.
pub fn points(old: Option<&MoveStatus>, new: Option<&MoveStatus>) -> (Option<&'static str>, Option<&'static str>) {
    use kibo_crds::MoveState::{Cancelling, Copying, Removing};
    let state = |status: Option<&MoveStatus>| status.map(|status| status.state);
    let leftover = |status: Option<&MoveStatus>| status.and_then(|status| status.leftover.as_ref()).is_some();
    match (state(old), state(new)) {
        (Some(Copying), Some(Removing)) => (Some("move-copied"), Some("move-committed")),
        (Some(Copying), Some(Cancelling)) => (None, Some("move-given-up")),
        (from, Some(Copying)) if from != Some(Copying) => (None, Some("move-granted")),
        _ if leftover(old) && !leftover(new) => (Some("copy-discarded"), Some("leftover-forgotten")),
        _ => (None, None),
    }
}

/// The same as a step of the object's task.
pub async fn reach(point: Option<&'static str>) {
    if let Some(point) = point {
        kibo_failpoint::reach(point).await;
    }
}
