//! What is taken of nodes and pools, stored or about to be, and what that leaves.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use kibo_crds::{Bytes, NodeId, PoolId, Volume};
use kube::ResourceExt as _;

use super::{
    index::{ByNode, add_all},
    world::World,
};
use crate::{
    placement::{PoolAccess, Used},
    session::DeclaredPool,
    space::{self, ByPool, Room},
    storage_pool::{Marker, PoolIndex},
    volume::Volumes,
};

/// All of it at one moment.
pub(super) struct Sums<'a> {
    index: &'a ByNode,
    pools: &'a PoolIndex,
    /// Of nodes, by starts that are on their way.
    nodes: HashMap<NodeId, Used>,
    /// Of pools, by starts and imports that are on their way.
    starting: ByPool,
    volumes: OfVolumes,
    /// Space that is promised to images that are not made, or not grown, yet.
    promised: BTreeMap<PoolId, Bytes>,
}

/// What is left of a pool; absent: not known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    /// Of its file system.
    pub free: Option<Bytes>,
    /// Of its capacity.
    pub unallocated: Option<Bytes>,
}

impl Left {
    fn least(self) -> Option<Bytes> {
        self.free.into_iter().chain(self.unallocated).min()
    }

    fn less(self, taken: Option<&space::Taken>) -> Self {
        let taken = taken.copied().unwrap_or_default();
        Self {
            free: self.free.map(|free| free.saturating_sub(taken.promised)),
            unallocated: self.unallocated.map(|left| left.saturating_sub(taken.allocated)),
        }
    }
}

/// Looks at the sums; keep it short, writers wait.
pub(super) fn with_sums<T>(world: &World, look: impl FnOnce(&Sums<'_>) -> T) -> T {
    world.workspaces.project_with(|index, workspace| {
        // Under the lock of the index: a promise that turns into an execution is counted once, never twice or not at all.
        let starts = || world.ledger.sums(|instance| index.key_of(instance).is_some());
        let ((nodes, mut starting), volumes) = with_volumes(starts, &world.volumes, |volume| {
            let version = |uid: &str| {
                let workspace = workspace(uid).and_then(|it| it.resource_version());
                workspace.or_else(|| volume(uid).and_then(|it| it.resource_version()))
            };
            let is_in_none = |volume: &Volume| volume.status.as_ref().is_none_or(|status| status.pool.is_none());
            let kept = world.ledger.kept(|uid| !volume(uid).is_some_and(|it| is_in_none(&it)));
            (world.ledger.claimed(version), kept)
        });
        space::add_all(&mut starting, volumes.kept.clone());
        // Of space a little may be counted twice for a moment.
        let mut promised = BTreeMap::new();
        add_all(&mut promised, index.promised());
        add_all(&mut promised, volumes.promised.iter().map(|(pool, bytes)| (pool, *bytes)));
        look(&Sums { index, pools: &world.ctx.pools, nodes, starting, volumes, promised })
    })
}

impl Sums<'_> {
    pub fn used(&self, node: &NodeId) -> Used {
        let mut used = self.index.used(node);
        if let Some(starting) = self.nodes.get(node) {
            used.cpu.0 = used.cpu.0.saturating_add(starting.cpu.0);
            used.memory.0 = used.memory.0.saturating_add(starting.memory.0);
            used.instances = used.instances.saturating_add(starting.instances);
        }
        used
    }

    /// Without the growths and moves that are about to be stored.
    fn left_by_stored(&self, pool: &DeclaredPool) -> Left {
        let of = |sums: &BTreeMap<PoolId, Bytes>| sums.get(&pool.id).copied().unwrap_or_default();
        let capacity = self.pools.limit(&pool.id).or(pool.capacity);
        let (layers, volumes) = (self.index.pool(&pool.id).allocated, of(&self.volumes.allocated));
        let left = Left {
            free: pool.free.map(|free| free.saturating_sub(of(&self.promised))),
            unallocated: capacity.map(|capacity| capacity.saturating_sub(layers).saturating_sub(volumes)),
        };
        left.less(self.starting.get(&pool.id))
    }

    /// As one of its nodes sees it.
    pub fn left(&self, pool: &DeclaredPool) -> Left {
        self.left_by_stored(pool).less(self.volumes.claimed.get(&pool.id))
    }

    fn room(&self, pool: &DeclaredPool) -> Option<Room> {
        let (left, at_most) = (self.left(pool).least()?, self.left_by_stored(pool).least()?);
        Some(Room { left, at_most })
    }
}

/// What the Volumes that are stored take of the pools.
#[derive(Default)]
struct OfVolumes {
    promised: BTreeMap<PoolId, Bytes>,
    allocated: BTreeMap<PoolId, Bytes>,
    /// By objects that grow or move there and are about to be stored so.
    claimed: ByPool,
    /// By Volumes that imports are about to make.
    kept: ByPool,
}

/// The promises first: a start stores its Volumes before its execution, for which its promise is left out. So what is
/// stored meanwhile may count twice, and never not at all.
fn with_volumes<T>(
    starts: impl FnOnce() -> T,
    volumes: &Volumes,
    unstored: impl FnOnce(&dyn Fn(&str) -> Option<Arc<Volume>>) -> (ByPool, ByPool),
) -> (T, OfVolumes) {
    let starts = starts();
    let mut sums = OfVolumes::default();
    volumes.project_with(|index, volume| {
        (sums.claimed, sums.kept) = unstored(volume);
        add_all(&mut sums.promised, index.promised());
        add_all(&mut sums.allocated, index.allocated());
    });
    (starts, sums)
}

pub(super) fn access(pools: &PoolIndex, pool: &DeclaredPool) -> PoolAccess {
    match pools.marker(&pool.id, &pool.uid) {
        Marker::Same if pool.available => PoolAccess::Reached,
        Marker::Unregistered if pool.available => PoolAccess::BeingRegistered,
        _ => PoolAccess::OutOfReach,
    }
}

/// What may still be put into a pool, as the nodes say that reach it now; `None` when none of them can say.
pub(super) fn room_in(world: &World, pool: &PoolId) -> Option<Room> {
    let mut declared = world.ctx.registry.declared(pool);
    declared.retain(|declared| access(&world.ctx.pools, declared) == PoolAccess::Reached);
    with_sums(world, |sums| declared.iter().filter_map(|declared| sums.room(declared)).max())
}

/// The same as one node says.
pub(super) fn room_of(world: &World, node: &NodeId, pool: &PoolId) -> Option<Room> {
    let snapshot = world.ctx.registry.snapshot_of(node)?;
    let declared = snapshot.pools.iter().find(|declared| declared.id == *pool)?;
    with_sums(world, |sums| sums.room(declared))
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
        let ((), sums) = with_volumes(nothing_is_promised, &volumes, |_| (ByPool::new(), ByPool::new()));
        assert_eq!(sums.allocated.get(&pool), Some(&Bytes::mib(64)));
        assert_eq!(sums.promised.get(&pool), Some(&Bytes::mib(64)));
    }
}
