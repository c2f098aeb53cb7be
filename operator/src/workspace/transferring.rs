//! Carries out what the decision about a transfer says.

use std::sync::Arc;

use kibo_crds::{Bytes, InstanceId, NodeId, TransferKind, Volume, Workspace, volume::GrantedFor};
use kibo_protocol::v1;
use kube::ResourceExt as _;

use super::{
    decide::transfer::{Step as Transfer, begun, new_layer},
    draft::Draft,
    launch,
    reconcile::{RETRY, Step, StepError, write_volume},
    sight::Cluster as _,
    start,
    world::World,
};
use crate::{
    cache::Key,
    clock::now,
    placement::Demand,
    right::HasRight as _,
    transfer::{Order, Refusal, Sizes, Wish, stream},
};

pub(super) async fn act(
    world: &Arc<World>,
    workspace: &Workspace,
    volume: Option<&Volume>,
    id: InstanceId,
    step: Transfer,
) -> Result<Step, StepError> {
    let uid = workspace.uid().unwrap_or_default();
    // Whoever asked may have gone since: then the next decision says so.
    let Some(wish) = world.transfers.of(&uid).filter(|wish| wish.id == id) else { return Ok(Step::Again) };
    match step {
        Transfer::Refuse(refusal) => {
            tracing::info!(user = wish.user, kind = ?wish.kind, reason = refusal.reason, "a transfer is refused");
            world.transfers.refuse(&uid, id, refusal);
            Ok(Step::Rest)
        }
        Transfer::Tell(result) => {
            world.transfers.over(&uid, id, result);
            Ok(Step::Rest)
        }
        Transfer::Place(demand) => Box::pin(place(world, workspace, volume, &wish, *demand)).await,
        Transfer::GrantVolume => match volume {
            Some(volume) => grant_volume(world, workspace, volume, &wish).await,
            None => Ok(Step::Again),
        },
        Transfer::Order(sizes) => {
            kibo_failpoint::reach("transfer-granted").await;
            order(world, workspace, volume, &wish, sizes);
            Ok(Step::Rest)
        }
        Transfer::MakeVolume(size) => {
            let Some(volume) = volume else { return Ok(Step::Again) };
            kibo_failpoint::reach("import-received").await;
            let mut status = volume.status.clone().unwrap_or_default();
            status.size = Some(size);
            let step = write_volume(world, volume, status).await;
            kibo_failpoint::reach("import-volume-made").await;
            step
        }
    }
}

/// Where a Workspace with these disks could run, and the grant of its layer there: one write.
async fn place(
    world: &Arc<World>,
    workspace: &Workspace,
    volume: Option<&Volume>,
    wish: &Wish,
    demand: Demand,
) -> Result<Step, StepError> {
    let uid = workspace.uid().unwrap_or_default();
    let refuse = |reason, message| {
        world.transfers.refuse(&uid, wish.id, Refusal { reason, message });
        Ok(Step::Rest)
    };
    // What an earlier try has kept must not be in the way of this one.
    world.transfers.placed(&uid, wish.id, None, None);
    let placed = match start::place(world, workspace, &demand).await {
        Some(Ok(placed)) => placed,
        Some(Err(_)) if world.is_settling() && world.expects_nodes() => return Ok(Step::After(RETRY)),
        Some(Err(answer)) => return refuse("ResourceExhausted", answer.to_string()),
        None => return Ok(Step::Rest),
    };
    let mut pools = placed.assignment.pools.iter().cloned();
    let size = workspace.spec.writable_layer.as_ref().and_then(|layer| layer.size.as_ref()?.amount().ok());
    let (Some(pool), Some(size)) = (pools.next(), size) else {
        return refuse("NoSize", "an import needs spec.writableLayer.size".to_owned());
    };
    let volume_pool = pools.next();
    let coming = volume_pool.clone().zip(volume.filter(|volume| makes(workspace, volume))).zip(demand.disks.get(1));
    let room = coming.map(|((pool, volume), disk)| {
        world.ledger.keep_for(volume.uid().unwrap_or_default(), pool, disk.to_allocate())
    });
    world.transfers.placed(&uid, wish.id, volume_pool, room);
    let mut draft = Draft::new(workspace, now());
    draft.status.writable_layer = Some(new_layer(pool, size));
    let void = |node: &NodeId, incarnation| world.void(node, incarnation);
    if let Err(refusal) = begun(&mut draft, wish, &placed.assignment.node, placed.incarnation, void, now()) {
        return refuse(refusal.reason, refusal.message);
    }
    if let Some(status) = draft.finish().status {
        world.write_workspace(workspace, *status).await?;
    }
    // From here on the layer speaks for its room, and the wish for that of the Volume.
    drop(placed.reservation);
    kibo_failpoint::reach("import-placed").await;
    Ok(Step::Again)
}

/// Whether the import makes this Volume, which is stored in no pool yet.
fn makes(workspace: &Workspace, volume: &Volume) -> bool {
    let is_in_none = volume.status.as_ref().is_none_or(|status| status.pool.is_none());
    is_in_none && workspace.spec.import.as_ref().is_some_and(|import| import.volume)
}

/// As a start does: the grant names the transfer in place of an Instance.
async fn grant_volume(world: &World, workspace: &Workspace, volume: &Volume, wish: &Wish) -> Result<Step, StepError> {
    let Some(transfer) = workspace.status.as_ref().and_then(|status| status.transfer.as_ref()) else {
        return Ok(Step::Again);
    };
    let mut status = volume.status.clone().unwrap_or_default();
    let granted = status.right().granted(&transfer.node, transfer.incarnation, |node, inc| world.void(node, inc));
    let Ok(right) = granted else { return Ok(Step::After(RETRY)) };
    status.set_right(right);
    if status.pool.is_none() {
        status.pool.clone_from(&wish.volume_pool);
    }
    let workspace_uid = workspace.uid().unwrap_or_default();
    status.granted_for = Some(GrantedFor { workspace_uid, instance_id: transfer.id });
    let step = write_volume(world, volume, status).await;
    kibo_failpoint::reach("transfer-volume-granted").await;
    step
}

/// Tells whoever asked where to get the stream.
fn order(world: &World, workspace: &Workspace, volume: Option<&Volume>, wish: &Wish, sizes: Sizes) {
    let Some(transfer) = workspace.status.as_ref().and_then(|status| status.transfer.as_ref()) else { return };
    let ready = |object: v1::Object, size: Bytes| v1::Object {
        size_bytes: size.0,
        must_exist: wish.kind == TransferKind::Export,
        grows_from_bytes: 0,
        ..object
    };
    let Some(layer) = launch::layer(workspace).map(|layer| ready(layer, sizes.layer)) else { return };
    let volume = sizes.volume.zip(volume.and_then(launch::volume_object)).map(|(size, volume)| ready(volume, size));
    let (uid, node) = (workspace.uid().unwrap_or_default(), transfer.node.clone());
    tracing::info!(user = wish.user, kind = ?wish.kind, %node, id = %wish.id, "a transfer begins");
    let stream = stream(wish.kind, workspace, world.template_of(workspace).as_deref(), layer, volume);
    world.transfers.order(&uid, wish.id, sizes, Order { node, incarnation: transfer.incarnation, stream });
}

impl super::hooks::Hooks {
    /// Asks for a transfer of the disks of this Workspace, and waits until they are granted for it.
    pub async fn transfer(
        &self,
        workspace: &Workspace,
        kind: TransferKind,
        user: &str,
    ) -> Result<(crate::transfer::Transfer, Order), Refusal> {
        let (key, uid) = (Key::of(workspace), workspace.uid().unwrap_or_default());
        // It was read afresh, perhaps before the watch brought it.
        self.0.workspaces.observe(workspace.clone());
        crate::transfer::Transfer::begin(self.0.clone(), key, uid, kind, user.to_owned()).await
    }

    /// Ends the transfer that somebody else has asked for, and waits until the disks are free.
    pub async fn cancel_transfer(&self, workspace: &Workspace, kind: TransferKind, user: &str) -> Result<(), Refusal> {
        let uid = workspace.uid().unwrap_or_default();
        crate::transfer::cancel(&self.0, Key::of(workspace), &uid, kind, user).await
    }
}
