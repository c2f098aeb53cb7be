//! Gathers the starts that wait for a place and decides them together, over one view of the nodes.

use std::sync::Arc;

use kibo_crds::{Incarnation, InstanceId};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Duration, Instant},
};

use super::{
    ledger::{Promise, Reservation},
    sums::{self, Left},
    world::World,
};
use crate::{
    placement::{self, Assignment, CandidateNode, CandidatePool, Demand, Exclusion, Unplaceable, Used},
    session::NodeSnapshot,
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
    let since_oldest = |at: std::time::Instant| oldest.map_or(0, |oldest| (at - oldest).as_micros());
    sums::with_sums(world, |sums| {
        let candidate = |snapshot: &NodeSnapshot| {
            let pools = snapshot.pools.iter().map(|pool| {
                let Left { free, unallocated } = sums.left(pool);
                let access = sums::access(&world.ctx.pools, pool);
                CandidatePool { id: pool.id.clone(), default: pool.default, access, free, unallocated }
            });
            CandidateNode {
                id: snapshot.id.clone(),
                labels: snapshot.labels.clone(),
                closed: closed(snapshot),
                schedulable_cpu: snapshot.schedulable_cpu(),
                schedulable_memory: snapshot.schedulable_memory(),
                slots: snapshot.slots(),
                used: sums.used(&snapshot.id),
                pools: pools.collect(),
                last_assigned: snapshot
                    .last_assigned
                    .map_or(0, |at| u64::try_from(since_oldest(at)).unwrap_or(u64::MAX - 1).saturating_add(1)),
            }
        };
        snapshots.iter().map(candidate).collect()
    })
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
