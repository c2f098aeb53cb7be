//! Gathers the starts that wait for a place and decides them together, over one view of the nodes.

use std::{collections::BTreeMap, sync::Arc};

use kibo_crds::{Bytes, Incarnation, InstanceId, NodeId, PoolId, Volume};
use kube::ResourceExt as _;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Duration, Instant},
};

use super::{
    index::add_all,
    ledger::{Promise, Reservation},
    world::World,
};
use crate::{
    placement::{self, Assignment, CandidateNode, CandidatePool, Demand, Exclusion, PoolAccess, Unplaceable, Used},
    session::{DeclaredPool, NodeSnapshot},
    space::{self, ByPool},
    storage_pool::Marker,
    volume::Volumes,
};

/// Requests that came within this time are one batch.
const GATHER: Duration = Duration::from_millis(2);
const LARGEST_BATCH: usize = 8192;
/// A decision goes through all nodes, however few starts it is for. While they keep coming, so many times what the last
/// one took passes until the next one, so that a large fleet costs a fifth of a core; more where one takes so long that the
/// longest rest cuts it short.
const REST: u32 = 4;
const LONGEST_REST: Duration = Duration::from_millis(100);

/// A place with its room held.
pub struct Placed {
    pub assignment: Assignment,
    pub incarnation: Incarnation,
    pub reservation: Reservation,
}

pub struct Request {
    pub demand: Demand,
    /// Who came first is served first: creation time, then name.
    pub order: (String, String),
    pub answer: oneshot::Sender<Result<Placed, Unplaceable>>,
}

/// Decides batches until the leadership ends.
pub async fn run(world: Arc<World>, mut requests: mpsc::UnboundedReceiver<Request>) {
    let mut batch = Vec::new();
    let mut rested = Instant::now();
    while let Some(first) = requests.recv().await {
        tokio::time::sleep_until(rested.max(Instant::now() + GATHER)).await;
        batch.push(first);
        while batch.len() < LARGEST_BATCH
            && let Ok(more) = requests.try_recv()
        {
            batch.push(more);
        }
        batch.sort_by(|a, b| a.order.cmp(&b.order));
        let begun = Instant::now();
        decide(&world, std::mem::take(&mut batch));
        rested = Instant::now() + (begun.elapsed() * REST).min(LONGEST_REST);
    }
}

fn decide(world: &World, batch: Vec<Request>) {
    let snapshots = world.ctx.registry.snapshot();
    let _turn = world.ledger.turn();
    let nodes = candidates(world, &snapshots);
    let (demands, answers): (Vec<_>, Vec<_>) = batch.into_iter().map(|r| (r.demand, r.answer)).unzip();
    let decided = placement::decide(nodes, &demands, world.settings.strategy);
    for ((decision, answer), demand) in decided.into_iter().zip(answers).zip(&demands) {
        let placed = decision.map(|assignment| reserve(world, &snapshots, assignment, demand));
        // Who asked has gone, and drops the reservation with the answer.
        let _ = answer.send(placed);
    }
}

fn reserve(world: &World, snapshots: &[NodeSnapshot], assignment: Assignment, demand: &Demand) -> Placed {
    let promise = Promise {
        node: assignment.node.clone(),
        used: Used { cpu: demand.cpu, memory: demand.memory, instances: 1 },
        pools: assignment.pools.iter().cloned().zip(demand.disks.iter().map(placement::Disk::to_allocate)).collect(),
    };
    let incarnation = snapshots
        .iter()
        .find(|snapshot| snapshot.id == assignment.node)
        .map_or(Incarnation::default(), |snapshot| snapshot.incarnation);
    let reservation = world.ledger.promise(InstanceId::generate(), promise);
    Placed { assignment, incarnation, reservation }
}

fn candidates(world: &World, snapshots: &[NodeSnapshot]) -> Vec<CandidateNode> {
    let oldest = snapshots.iter().filter_map(|snapshot| snapshot.last_assigned).min();
    let mut nodes = Vec::with_capacity(snapshots.len());
    world.workspaces.project_with(|index, workspace| {
        // Under the lock of the index: a promise that turns into an execution is counted once, never twice or not at all.
        let starts = || world.ledger.sums(|instance| index.key_of(instance).is_some());
        let ((promised_nodes, mut in_flight), volumes) = with_volumes(starts, &world.volumes, |volume| {
            let version = |uid: &str| {
                let workspace = workspace(uid).and_then(|it| it.resource_version());
                workspace.or_else(|| volume(uid).and_then(|it| it.resource_version()))
            };
            world.ledger.claimed(version)
        });
        space::add_all(&mut in_flight, volumes.claimed);
        // Of space a little may be counted twice for a moment.
        let mut promised: BTreeMap<_, _> =
            in_flight.iter().map(|(pool, taken)| (pool.clone(), taken.promised)).collect();
        add_all(&mut promised, index.promised());
        add_all(&mut promised, volumes.promised.iter().map(|(pool, bytes)| (pool, *bytes)));
        for snapshot in snapshots {
            let mut used = index.used(&snapshot.id);
            if let Some(in_flight) = promised_nodes.get(&snapshot.id) {
                used.cpu.0 = used.cpu.0.saturating_add(in_flight.cpu.0);
                used.memory.0 = used.memory.0.saturating_add(in_flight.memory.0);
                used.instances = used.instances.saturating_add(in_flight.instances);
            }
            let pools = snapshot.pools.iter().map(|pool| CandidatePool {
                id: pool.id.clone(),
                default: pool.default,
                access: access(world, pool),
                free: pool.free.map(|free| free.saturating_sub(promised.get(&pool.id).copied().unwrap_or_default())),
                unallocated: world.ctx.pools.limit(&pool.id).or(pool.capacity).map(|capacity| {
                    let layers = index.pool(&pool.id).allocated;
                    let volumes = volumes.allocated.get(&pool.id).copied().unwrap_or_default();
                    let starts = in_flight.get(&pool.id).copied().unwrap_or_default().allocated;
                    capacity.saturating_sub(layers).saturating_sub(volumes).saturating_sub(starts)
                }),
            });
            let since_oldest = |at: std::time::Instant| oldest.map_or(0, |oldest| (at - oldest).as_micros());
            nodes.push(CandidateNode {
                id: snapshot.id.clone(),
                labels: snapshot.labels.clone(),
                closed: closed(snapshot),
                schedulable_cpu: snapshot.schedulable_cpu(),
                schedulable_memory: snapshot.schedulable_memory(),
                slots: snapshot.slots(),
                used,
                pools: pools.collect(),
                last_assigned: snapshot
                    .last_assigned
                    .map_or(0, |at| u64::try_from(since_oldest(at)).unwrap_or(u64::MAX - 1).saturating_add(1)),
            });
        }
    });
    nodes
}

/// What the Volumes that are stored take of the pools.
#[derive(Default)]
struct OfVolumes {
    promised: BTreeMap<PoolId, Bytes>,
    allocated: BTreeMap<PoolId, Bytes>,
    /// By those in which something is about to take more.
    claimed: ByPool,
}

/// The promises first: a start stores its Volumes before its execution, for which its promise is left out. So what is
/// stored meanwhile may count twice, and never not at all.
fn with_volumes<T>(
    starts: impl FnOnce() -> T,
    volumes: &Volumes,
    claimed: impl FnOnce(&dyn Fn(&str) -> Option<Arc<Volume>>) -> ByPool,
) -> (T, OfVolumes) {
    let starts = starts();
    let mut sums = OfVolumes::default();
    volumes.project_with(|index, volume| {
        sums.claimed = claimed(volume);
        add_all(&mut sums.promised, index.promised());
        add_all(&mut sums.allocated, index.allocated());
    });
    (starts, sums)
}

fn access(world: &World, pool: &DeclaredPool) -> PoolAccess {
    match world.ctx.pools.marker(&pool.id, &pool.uid) {
        Marker::Same if pool.available => PoolAccess::Reached,
        Marker::Unregistered if pool.available => PoolAccess::BeingRegistered,
        _ => PoolAccess::OutOfReach,
    }
}

/// What may still be allocated in a pool, as the nodes say that reach it now; `None` when none of them can say.
pub(super) fn room_in(world: &World, pool: &PoolId) -> Option<Bytes> {
    let mut snapshots = world.ctx.registry.snapshot();
    snapshots.retain(|node| node.pools.iter().any(|declared| declared.id == *pool));
    let pools = candidates(world, &snapshots).into_iter().flat_map(|node| node.pools);
    let reached = pools.filter(|candidate| candidate.id == *pool && candidate.access == PoolAccess::Reached);
    reached.filter_map(|pool| pool.room()).max()
}

/// The same as one node says.
pub(super) fn room_of(world: &World, node: &NodeId, pool: &PoolId) -> Option<Bytes> {
    let snapshot = world.ctx.registry.snapshot_of(node)?;
    let pools = candidates(world, &[snapshot]).into_iter().flat_map(|node| node.pools);
    pools.filter(|candidate| candidate.id == *pool).find_map(|pool| pool.room())
}

fn closed(snapshot: &NodeSnapshot) -> Option<Exclusion> {
    if snapshot.settings.drain {
        Some(Exclusion::Draining)
    } else if !snapshot.is_settled() {
        Some(Exclusion::NotReady)
    } else if snapshot.clock_over == Some(true) {
        Some(Exclusion::ClockSkewed)
    } else if snapshot.memory_tight {
        Some(Exclusion::MemoryTight)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use kibo_crds::volume::VolumeStatus;

    use super::*;

    /// A start whose Volume and execution are both stored while the sums are taken.
    #[test]
    fn a_volume_that_is_stored_meanwhile_never_counts_nowhere() {
        let volumes = Volumes::new(Box::new(|_, _, _| ()));
        let pool: PoolId = "p".parse().unwrap();
        let spec = serde_json::from_value(serde_json::json!({ "size": "64Mi" })).unwrap();
        let mut volume = Volume::new("data", spec);
        volume.metadata.uid = Some("u".to_owned());
        volume.metadata.resource_version = Some("1".to_owned());
        volume.status = Some(VolumeStatus { pool: Some(pool.clone()), ..VolumeStatus::default() });
        let nothing_is_promised = || assert!(volumes.observe(volume));
        let ((), sums) = with_volumes(nothing_is_promised, &volumes, |_| ByPool::new());
        assert_eq!(sums.allocated.get(&pool), Some(&Bytes::mib(64)));
        assert_eq!(sums.promised.get(&pool), Some(&Bytes::mib(64)));
    }
}
