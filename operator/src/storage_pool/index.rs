//! Markers and members of the pools, for placement and for the release of objects.

use kibo_crds::{
    Bytes, NodeId, PoolId, StoragePool,
    storage_pool::{PoolMember, StoragePoolStatus},
};
use kube::runtime::reflector::{ObjectRef, Store};

/// How a marker stands to the pool of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    Same,
    /// Nobody declared the pool before; the first marker becomes its own in a moment.
    Unregistered,
    Another,
}

/// All StoragePools, as the watch shows them.
#[derive(Clone)]
pub struct PoolIndex(Store<StoragePool>);

impl PoolIndex {
    pub fn new(pools: Store<StoragePool>) -> Self {
        Self(pools)
    }

    fn with<T>(&self, pool: &PoolId, read: impl FnOnce(&StoragePoolStatus) -> T) -> Option<T> {
        self.0.get(&ObjectRef::new(pool.as_str()))?.status.as_ref().map(read)
    }

    pub fn exists(&self, pool: &PoolId) -> bool {
        self.0.get(&ObjectRef::new(pool.as_str())).is_some()
    }

    /// The nodes that mean this pool; empty when it is not known.
    pub fn members(&self, pool: &PoolId) -> Vec<PoolMember> {
        self.with(pool, |status| status.members.clone()).unwrap_or_default()
    }

    /// Whether a node other than `node` is a member, whether it reaches the pool now or not.
    pub fn has_other_member(&self, pool: &PoolId, node: &NodeId) -> bool {
        self.with(pool, |status| status.members.iter().any(|member| member.node != *node)).unwrap_or_default()
    }

    /// Whether `uid` is the marker of this pool, and the pool may be used. One that nobody has registered yet has none.
    pub fn has_marker(&self, pool: &PoolId, uid: &str) -> bool {
        self.marker(pool, uid) == Marker::Same
    }

    /// How the marker that a node found stands to the pool that the cluster knows by this id.
    pub fn marker(&self, pool: &PoolId, uid: &str) -> Marker {
        match self.with(pool, |status| status.uid.clone()).flatten() {
            // What was declared lost is used by nobody, whatever came back.
            _ if uid.is_empty() || self.is_lost(pool) => Marker::Another,
            None => Marker::Unregistered,
            Some(known) if known == uid => Marker::Same,
            Some(_) => Marker::Another,
        }
    }

    /// Whether an admin has declared it lost, which is for ever.
    pub fn is_lost(&self, pool: &PoolId) -> bool {
        self.0.get(&ObjectRef::new(pool.as_str())).is_some_and(|pool| pool.spec.lost.is_some())
    }

    /// All that were declared lost.
    pub fn lost(&self) -> Vec<String> {
        let lost = self.0.state().into_iter().filter(|pool| pool.spec.lost.is_some());
        let mut lost: Vec<_> = lost.filter_map(|pool| pool.metadata.name.clone()).collect();
        lost.sort();
        lost
    }

    /// What may be allocated in the pool, when somebody limited it.
    pub fn limit(&self, pool: &PoolId) -> Option<Bytes> {
        self.0.get(&ObjectRef::new(pool.as_str()))?.spec.capacity.as_ref()?.amount().ok()
    }
}
