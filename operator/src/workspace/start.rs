//! A start: place, offer, grant, commit, go.
//!
//! Until the commit nothing of it is stored but the grant of a Volume, which names the Instance and is
//! taken back when that does not come to be. The commit is guarded by the version of the Workspace that
//! the decision was made on, so a deletion or a stop that came in between wins, and the offer is revoked.

use std::{sync::Arc, time::Duration};

use kibo_crds::{Template, Volume, Workspace};
use kibo_protocol::v1::{self, to_node::Message};
use kube::ResourceExt as _;
use tokio::sync::oneshot;

use super::{
    commit::{self, Place},
    decide::{self, Start},
    event::{ObjectFact, volume_fact},
    launch,
    placer::{self, Placed},
    reconcile::{RETRY, Step, StepError, go, sight, write_volume},
    sight::Cluster as _,
    stopwatch::Lap,
    world::World,
};
use crate::{
    cache::Key,
    clock::now,
    guarded::WriteError,
    placement::Unplaceable,
    session::{Accepted, OfferFailure, Registry},
};

/// A start with its prospective objects.
struct Prospect {
    place: Place,
    workspace: Workspace,
    volume: Option<Volume>,
}

pub(super) async fn start(
    world: &Arc<World>,
    workspace: &Workspace,
    template: Option<&Template>,
    volume: Option<&Volume>,
    start: Start,
) -> Result<Step, StepError> {
    let uid = workspace.uid().unwrap_or_default();
    let mut demand = start.demand.clone();
    demand.refusals = world.avoided(&uid);
    let mut lap = Lap::begin();
    loop {
        let placed = match place(world, workspace, &demand).await {
            Some(Ok(placed)) => placed,
            // A node that only came too late is asked again when its pause is over; that is no lack of room.
            Some(Err(_)) if !world.avoided(&uid).is_empty() => return Ok(Step::After(RETRY)),
            Some(Err(answer)) => return unplaced(world, workspace, template, volume, &start, &answer).await,
            None => return Ok(Step::Rest),
        };
        let Some(prospect) = prospect(world, workspace, template, volume, &start, &placed) else {
            tracing::error!("the start could not be worked out");
            return Ok(Step::After(RETRY));
        };
        lap.end("place");
        let offered = offer(world, template, &prospect).await;
        lap.end("offer");
        match offered {
            Ok(accepted) => {
                kibo_failpoint::reach("offer-accepted").await;
                if world.ctx.registry.lives(&prospect.place.node, &accepted) {
                    let committed = commit(world, workspace, template, volume, prospect, placed, &accepted).await;
                    if committed.is_ok() {
                        lap.end("commit");
                    }
                    return committed;
                }
                tracing::info!(node = %prospect.place.node, "the session of the offer ended: placing it elsewhere");
            }
            Err(words) => {
                tracing::info!(node = %prospect.place.node, words, "the offer came to nothing: placing it elsewhere");
                demand.refusals.insert(prospect.place.node.clone(), words);
            }
        }
    }
}

pub(super) async fn place(
    world: &World,
    workspace: &Workspace,
    demand: &crate::placement::Demand,
) -> Option<Result<Placed, Unplaceable>> {
    let created = workspace.metadata.creation_timestamp.as_ref().map(|at| at.0.to_string()).unwrap_or_default();
    let (answer, answered) = oneshot::channel();
    let order = (created, Key::of(workspace).to_string());
    world.placements.send(placer::Request { demand: demand.clone(), order, answer }).ok()?;
    answered.await.ok()
}

fn prospect(
    world: &World,
    workspace: &Workspace,
    template: Option<&Template>,
    volume: Option<&Volume>,
    start: &Start,
    placed: &Placed,
) -> Option<Prospect> {
    let place = Place {
        node: placed.assignment.node.clone(),
        incarnation: placed.incarnation,
        instance: placed.reservation.instance,
        pools: placed.assignment.pools.clone(),
    };
    let amounts = launch::amounts(workspace, template?).ok()?;
    let status = commit::workspace_status(workspace, start, &place, amounts, world, now()).ok()?;
    let workspace = Workspace { status: Some(status), ..workspace.clone() };
    let volume = match volume {
        Some(volume) => {
            let status = commit::volume_status(volume, &workspace, &place, world).ok()?;
            Some(Volume { status: Some(status), ..volume.clone() })
        }
        None => None,
    };
    Some(Prospect { place, workspace, volume })
}

/// Asks the node; in words why not.
async fn offer(world: &World, template: Option<&Template>, prospect: &Prospect) -> Result<Accepted, String> {
    let place = &prospect.place;
    let launch = launch::launch(&prospect.workspace, template, prospect.volume.as_ref()).ok_or("nothing to launch")?;
    let offer = v1::Offer { offer_id: place.instance.to_string(), launch: Some(launch::without_grants(launch)) };
    match world.ctx.registry.offer(&place.node, offer).await {
        Ok(accepted) if accepted.incarnation == place.incarnation => Ok(accepted),
        Ok(accepted) => {
            revoke(&world.ctx.registry, place, accepted.incarnation);
            Err("the node came back in between".to_owned())
        }
        Err(OfferFailure::Refused { message, .. }) => Err(message),
        Err(failure) => Err(failure.to_string()),
    }
}

fn revoke(registry: &Registry, place: &Place, incarnation: kibo_crds::Incarnation) {
    let revoke = v1::Revoke { offer_id: place.instance.to_string() };
    // Without a session the reservation ends by the node's own clock.
    let _ = registry.send(&place.node, incarnation, Message::Revoke(revoke));
}

/// Writes the grant of the Volume, then the execution; then the node may go.
async fn commit(
    world: &Arc<World>,
    workspace: &Workspace,
    template: Option<&Template>,
    volume: Option<&Volume>,
    prospect: Prospect,
    placed: Placed,
    accepted: &Accepted,
) -> Result<Step, StepError> {
    let Prospect { place, workspace: wanted, volume: wanted_volume } = prospect;
    if let (Some(volume), Some(wanted)) = (volume, wanted_volume.and_then(|volume| volume.status)) {
        let granted = write_volume(world, volume, wanted).await;
        let current = world.volumes.get(&Key::of(volume));
        let is_granted = current
            .as_ref()
            .and_then(|volume| volume.status.as_ref()?.granted_for.as_ref())
            .is_some_and(|granted| granted.instance_id == place.instance);
        if granted.is_err() || !is_granted {
            tracing::info!("the grant of the Volume was overtaken");
            revoke(&world.ctx.registry, &place, place.incarnation);
            return granted;
        }
        kibo_failpoint::reach("volume-granted").await;
        if let Some(granted) = current.filter(|_| !world.ctx.registry.lives(&place.node, accepted)) {
            tracing::info!(node = %place.node, "the session of the offer ended: the grant is taken back");
            return take_back_at_once(world, &granted, &place).await;
        }
    }
    let status = wanted.status.unwrap_or_default();
    match world.write_workspace(workspace, status).await {
        Ok(()) => {}
        // It may yet be stored: the node's own clock ends the reservation, or the next look sends the Go.
        Err(error @ WriteError::Unknown { .. }) => {
            drop(placed.reservation);
            take_back(world, volume, RETRY * 2);
            return Err(error.into());
        }
        Err(error) => {
            revoke(&world.ctx.registry, &place, place.incarnation);
            drop(placed.reservation);
            take_back(world, volume, Duration::ZERO);
            return Err(error.into());
        }
    }
    world.stopwatch.committed(place.instance);
    kibo_failpoint::reach("committed").await;
    let key = Key::of(workspace);
    tracing::info!(node = %place.node, instance = %place.instance, "placed");
    if let Some(committed) = world.workspaces.get(&key) {
        let is_current = committed
            .status
            .as_ref()
            .and_then(|status| status.execution.as_ref())
            .is_some_and(|execution| execution.instance_id == place.instance);
        if is_current {
            go(world, &committed, template, world.volume_of(&committed).as_deref()).await;
        }
    }
    drop(placed.reservation);
    Ok(Step::Again)
}

/// A Volume whose grant came to nothing is looked at again, once the reservation does not speak for it any
/// more; nothing else would ring for it.
fn take_back(world: &World, volume: Option<&Volume>, delay: Duration) {
    if let Some(volume) = volume {
        world.bells.volumes.push_after(Key::of(volume), delay);
    }
}

/// The grant of a Volume for an execution that is not committed, whose node can be asked no more. That it was never
/// taken needs nobody's word: only this leader knows of the Instance, and it tells no node.
async fn take_back_at_once(world: &World, volume: &Volume, place: &Place) -> Result<Step, StepError> {
    let mut status = volume.status.clone().unwrap_or_default();
    let epoch = status.epoch.unwrap_or_default();
    let fact = ObjectFact { epoch, used: v1::ObjectUse::Refused, size: None };
    volume_fact(&mut status, &place.node, fact, false);
    write_volume(world, volume, status).await
}

async fn unplaced(
    world: &World,
    workspace: &Workspace,
    template: Option<&Template>,
    volume: Option<&Volume>,
    start: &Start,
    answer: &Unplaceable,
) -> Result<Step, StepError> {
    // The nodes of a new leader may just be on their way, and what a node lacks in a session that has just begun comes
    // in a moment; whoever sees it Ready may ask for it by its name.
    if (world.is_settling() && world.expects_nodes())
        || (answer.awaits_setup() && world.has_new_session(start.request.node.as_ref()))
    {
        return Ok(Step::After(RETRY));
    }
    let sight = sight(world, workspace, template, volume);
    let outcome = decide::unplaced(&sight, &start.request, &answer.to_string());
    let Some(status) = outcome.status else { return Ok(Step::Rest) };
    let key = Key::of(workspace);
    let only_words =
        workspace.status.as_ref().is_some_and(|stored| super::draft::differ_in_words_only(stored, &status));
    if only_words && world.words_rest(&key, super::reconcile::WORDS_PAUSE).is_some() {
        return Ok(Step::Rest);
    }
    tracing::info!(%answer, "no node takes it");
    world.write_workspace(workspace, *status).await?;
    world.worded(key);
    world.publish(workspace, outcome.notices).await;
    Ok(Step::Rest)
}
