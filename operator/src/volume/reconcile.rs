//! Carries the decisions about Volumes out.

use std::{sync::Arc, time::Duration};

use kibo_crds::{
    InstanceId, MoveState, MoveStatus, TransferState, VOLUME_FINALIZER, Volume, node::Holder, volume::VolumeStatus,
};
use kibo_protocol::v1::{self, to_node::Message};
use kube::ResourceExt as _;
use serde_json::json;

use super::decide::{self, Action, Decision, Owner, Sight};
use crate::{
    cache::Key,
    clock::now,
    guarded::{self, WriteError},
    moving,
    session::ObjectCommand,
    space::{self, ByPool},
    workspace::{
        draft::Notice,
        event::{ObjectFact, volume_fact},
        launch,
        reconcile::{RETRY, Step, StepError, await_others, command_id, delete_volume, write_volume},
        sight::{CREATED_FOR, Cluster as _},
        world::World,
    },
};

const MAX_STEPS: usize = 16;

/// One Volume, until there is nothing to do.
#[tracing::instrument(skip_all, fields(volume = %key))]
pub async fn reconcile(world: Arc<World>, key: Key) -> Option<Duration> {
    for _ in 0..MAX_STEPS {
        match step(&world, &key).await {
            Ok(Step::Again) => {}
            Ok(Step::Rest) => return None,
            Ok(Step::After(delay)) => return Some(delay),
            Err(error) => {
                if !matches!(error, StepError::Write(WriteError::Conflict { .. } | WriteError::Gone { .. })) {
                    tracing::warn!(%error, "a step failed and is tried again");
                }
                let refreshed = world.refresh_volume(&key).await;
                if refreshed.is_err() || matches!(error, StepError::Api(..)) {
                    return Some(RETRY);
                }
            }
        }
    }
    tracing::error!("no end of steps: look at this Volume again later");
    Some(RETRY * 10)
}

/// What this leader knows of the Workspace with that uid. Its index is complete, so what is not there is gone.
fn owner(world: &World, uid: Option<&str>, instance: Option<InstanceId>) -> Owner {
    let Some(workspace) = uid.and_then(|uid| world.workspaces.by_uid(uid)) else { return Owner::Gone };
    let starting = instance.filter(|instance| world.ledger.is_starting(*instance));
    let executing = workspace.status.as_ref().and_then(|status| status.execution.as_ref()).map(|e| e.instance_id);
    let transferring = workspace.status.as_ref().and_then(|status| status.transfer.as_ref());
    let transferring = transferring.filter(|it| it.state == TransferState::Running).map(|it| it.id);
    Owner::Present { instance: starting.or(executing).or(transferring) }
}

async fn step(world: &Arc<World>, key: &Key) -> Result<Step, StepError> {
    let Some(volume) = world.volumes.get(key) else { return Ok(Step::Rest) };
    let status = volume.status.clone().unwrap_or_default();
    let granted = status.granted_for.as_ref();
    let sight = Sight {
        volume: &volume,
        bound_to: owner(world, status.bound_to.as_ref().map(|bound| bound.uid.as_str()), None),
        granted_for: owner(world, granted.map(|g| g.workspace_uid.as_str()), granted.map(|g| g.instance_id)),
        created_for: owner(world, volume.labels().get(CREATED_FOR).map(String::as_str), None),
        cluster: &**world,
        now: now(),
    };
    let more = |decided: &Decision| more(&volume, decided.status.as_deref());
    let (decided, claim) = world.ledger.in_turn(&*volume, || decide::decide(&sight), more);
    let Decision { status, action, moving, is_undecided } = decided;
    if is_undecided {
        return Ok(await_others().await);
    }
    let mut wrote = false;
    if let Some(status) = status {
        tracing::debug!(phase = ?status.phase, ?action, "status");
        let stored = volume.status.as_ref().and_then(|status| status.r#move.as_ref());
        let (before, after) = moving::points(stored, status.r#move.as_ref());
        moving::reach(before).await;
        if !moving::is_open(status.r#move.as_ref()) {
            world.hearsay.forget(volume.metadata.uid.as_deref().unwrap_or_default());
        }
        let failed = failed_move(stored, status.r#move.as_ref());
        let lets_go = status.holder.is_none() && volume.status.as_ref().is_some_and(|it| it.holder.is_some());
        if claim.is_some() {
            kibo_failpoint::reach("space-claimed").await;
        }
        world.write_volume(&volume, *status).await?;
        drop(claim);
        if lets_go {
            kibo_failpoint::reach("volume-voided").await;
        }
        moving::reach(after).await;
        world.publish(&*volume, failed.into_iter().collect()).await;
        wrote = true;
    }
    let Some(volume) = world.volumes.get(key) else { return Ok(Step::Rest) };
    let moves = match moving {
        Some(action) => {
            moving::act(world, moving::Whose::Volume(key.clone()), launch::volume_object(&volume), action).await
        }
        None => Step::Rest,
    };
    match act(world, &volume, action).await? {
        Step::Rest if wrote => Ok(Step::Again),
        Step::Rest => Ok(moves),
        step => Ok(step),
    }
}

/// What the Volume is about to take of pools beside what is stored.
fn more(volume: &Volume, status: Option<&VolumeStatus>) -> ByPool {
    let Some(status) = status else { return ByPool::new() };
    let before = volume.status.clone().unwrap_or_default();
    let size = launch::volume_size(volume);
    space::more(space::of_volume(&before, size), space::of_volume(status, size))
}

/// What people are told when a move has just failed.
fn failed_move(old: Option<&MoveStatus>, new: Option<&MoveStatus>) -> Option<Notice> {
    let new =
        new.filter(|new| new.state == MoveState::Failed && old.is_none_or(|old| old.state != MoveState::Failed))?;
    Some(Notice::warning("MoveFailed", new.message.as_deref().unwrap_or_default()))
}

async fn act(world: &Arc<World>, volume: &Volume, action: Action) -> Result<Step, StepError> {
    match action {
        Action::Rest => Ok(Step::Rest),
        Action::AddFinalizer => {
            let mut finalizers = volume.finalizers().to_vec();
            finalizers.push(VOLUME_FINALIZER.to_owned());
            patch_finalizers(world, volume, &finalizers).await
        }
        Action::Settle { holder } => {
            let step = settle(world, volume, &holder).await?;
            kibo_failpoint::reach("grant-settled").await;
            Ok(step)
        }
        Action::Delete { holder } => delete(world, volume, &holder).await,
        Action::RemoveFinalizer => remove_finalizer(world, volume).await,
        // A Workspace that comes to bind it after all writes it first.
        Action::Withdraw => delete_volume(world, volume, volume.resource_version()).await,
    }
}

async fn patch_finalizers(world: &World, volume: &Volume, finalizers: &[String]) -> Result<Step, StepError> {
    let _turn = world.turn().await;
    let api = world.volume_api(&Key::of(volume).namespace);
    let patched = guarded::patch_metadata(&api, volume, json!({ "finalizers": finalizers })).await;
    world.noted(patched, |patched| world.volumes.observe(patched))?;
    Ok(Step::Again)
}

async fn remove_finalizer(world: &World, volume: &Volume) -> Result<Step, StepError> {
    let others: Vec<_> = volume.finalizers().iter().filter(|name| *name != VOLUME_FINALIZER).cloned().collect();
    patch_finalizers(world, volume, &others).await?;
    Ok(Step::Rest)
}

/// Asks the holder's node what became of a grant that nobody uses.
pub(crate) async fn settle(world: &Arc<World>, volume: &Volume, holder: &Holder) -> Result<Step, StepError> {
    let Some(object) = launch::volume_object(volume) else { return Ok(Step::After(RETRY)) };
    let command = v1::ConfirmNotTaken { command_id: command_id(), object: Some(object.clone()) };
    let command = ObjectCommand::ConfirmNotTaken(command);
    let result = match world.ctx.registry.object_command(&holder.node, holder.incarnation, command).await {
        Ok(result) => result,
        Err(error) => {
            tracing::warn!(%error, "the holder of the Volume did not answer");
            return Ok(Step::After(RETRY));
        }
    };
    let mut status = volume.status.clone().unwrap_or_default();
    let others = status.pool.as_ref().is_some_and(|pool| world.others_reach(pool, &holder.node));
    let fact = ObjectFact { epoch: holder.epoch, used: result.r#use(), size: None };
    volume_fact(&mut status, &holder.node, fact, others);
    if Some(&status) != volume.status.as_ref() {
        return write_volume(world, volume, status).await;
    }
    tracing::warn!(node = %holder.node, message = result.message, "the Volume is still held: asking for its release");
    if let Some(granted) = &status.granted_for {
        let mode = v1::StopMode::Force.into();
        let stop = v1::Stop { instance_id: granted.instance_id.to_string(), mode, objects: vec![object] };
        let _ = world.ctx.registry.send(&holder.node, holder.incarnation, Message::Stop(stop));
    }
    Ok(Step::After(RETRY * 2))
}

async fn delete(world: &Arc<World>, volume: &Volume, holder: &Holder) -> Result<Step, StepError> {
    let Some(object) = launch::volume_object(volume) else { return remove_finalizer(world, volume).await };
    kibo_failpoint::reach("before-delete-volume-image").await;
    let command = v1::DeleteObject { command_id: command_id(), object: Some(object) };
    match world.ctx.registry.object_command(&holder.node, holder.incarnation, ObjectCommand::Delete(command)).await {
        Ok(result) if result.ok => {
            kibo_failpoint::reach("volume-image-removed").await;
            remove_finalizer(world, volume).await
        }
        Ok(result) => {
            tracing::warn!(node = %holder.node, message = result.message, failure = ?result.failure(), "the Volume could not be removed");
            let message = format!("node {}: {}", holder.node, result.message);
            world.publish(volume, vec![Notice::warning("VolumeNotRemoved", &message)]).await;
            match result.failure() {
                // This grant may be closed for good; the node's word on it makes way for the next one.
                v1::ObjectFailure::HolderConflict | v1::ObjectFailure::InUse => settle(world, volume, holder).await,
                _ => Ok(Step::After(RETRY * 5)),
            }
        }
        Err(error) => {
            tracing::warn!(%error, "the removal of the Volume was not answered");
            Ok(Step::After(RETRY))
        }
    }
}
