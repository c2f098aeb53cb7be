//! Markers and members of the pools, for placement and for the release of objects.

use std::{
    collections::HashMap,
    sync::{Arc, RwLock},
};

use kibo_crds::{Bytes, NodeId, PoolId, StoragePool, storage_pool::PoolMember};

/// What is known of one pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    pub uid: Option<String>,
    pub members: Vec<PoolMember>,
    /// What may be allocated, when the pool's owner limited it.
    pub limit: Option<Bytes>,
}

/// All StoragePools, from the watch and from own commits.
#[derive(Clone, Default)]
pub struct PoolIndex(Arc<RwLock<HashMap<PoolId, Known>>>);

impl PoolIndex {
    pub fn get(&self, pool: &PoolId) -> Option<Known> {
        self.0.read().expect("no holder of this lock panics").get(pool).cloned()
    }

    /// Whether a node other than `node` is a member that reached the pool at its last report.
    pub fn has_other_available_member(&self, pool: &PoolId, node: &NodeId) -> bool {
        self.0
            .read()
            .expect("no holder of this lock panics")
            .get(pool)
            .is_some_and(|known| known.members.iter().any(|member| member.available && member.node != *node))
    }

    /// Whether `uid` is the marker of this pool. A pool that nobody has registered yet has none.
    pub fn has_marker(&self, pool: &PoolId, uid: &str) -> bool {
        self.0
            .read()
            .expect("no holder of this lock panics")
            .get(pool)
            .is_some_and(|known| known.uid.as_deref() == Some(uid))
    }

    pub(crate) fn observe(&self, pool: &StoragePool) {
        let Some(id) = pool.metadata.name.as_deref().and_then(|name| name.parse::<PoolId>().ok()) else { return };
        let status = pool.status.clone().unwrap_or_default();
        let limit = pool.spec.capacity.as_ref().and_then(|capacity| capacity.amount().ok());
        let known = Known { uid: status.uid, members: status.members, limit };
        self.0.write().expect("no holder of this lock panics").insert(id, known);
    }

    pub(crate) fn forget(&self, pool: &PoolId) {
        self.0.write().expect("no holder of this lock panics").remove(pool);
    }
}
