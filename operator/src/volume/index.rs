//! Sums and lookups over all Volumes.

use std::collections::{BTreeSet, HashMap};

use kibo_crds::{Bytes, NodeId, PoolId, Volume, volume::VolumeStatus};

use crate::{
    cache::{Cache, Key, Projection},
    held::{Held, HeldByNode},
    moving,
    session::hooks::PoolUsage,
    space,
    workspace::launch::volume_size,
};

pub type Volumes = Cache<Volume, ByHolder>;

#[derive(Default)]
pub struct ByHolder {
    keys: HashMap<NodeId, BTreeSet<Key>>,
    held: HeldByNode,
    pools: HashMap<PoolId, PoolUsage>,
    /// Space promised to Volumes whose images are not made, or not grown, yet.
    promised: HashMap<PoolId, Bytes>,
    deleting: BTreeSet<Key>,
    /// By the uid of the Workspace that binds them.
    bound: HashMap<String, BTreeSet<Key>>,
    moving: BTreeSet<Key>,
}

impl ByHolder {
    pub fn keys_of(&self, node: &NodeId) -> Vec<Key> {
        self.keys.get(node).into_iter().flatten().cloned().collect()
    }

    pub fn held(&self, node: &NodeId) -> Held {
        self.held.of(node)
    }

    pub fn pool(&self, pool: &PoolId) -> PoolUsage {
        self.pools.get(pool).copied().unwrap_or_default()
    }

    pub fn allocated(&self) -> impl Iterator<Item = (&PoolId, Bytes)> {
        self.pools.iter().map(|(pool, usage)| (pool, usage.allocated))
    }

    /// Volumes that name the Workspace with this uid as the one that binds them.
    pub fn bound_to(&self, uid: &str) -> Vec<Key> {
        self.bound.get(uid).into_iter().flatten().cloned().collect()
    }

    /// Volumes on their way out.
    pub fn deleting(&self) -> Vec<Key> {
        self.deleting.iter().cloned().collect()
    }

    /// Volumes that are being moved.
    pub fn moving(&self) -> Vec<Key> {
        self.moving.iter().cloned().collect()
    }

    pub fn promised_in(&self, pool: &PoolId) -> Bytes {
        self.promised.get(pool).copied().unwrap_or_default()
    }

    pub fn promised(&self) -> impl Iterator<Item = (&PoolId, Bytes)> {
        self.promised.iter().map(|(pool, bytes)| (pool, *bytes))
    }

    fn status_of(volume: Option<&Volume>) -> Option<(&VolumeStatus, Bytes)> {
        let volume = volume?;
        Some((volume.status.as_ref()?, volume_size(volume)))
    }
}

impl Projection<Volume> for ByHolder {
    fn replace(&mut self, key: &Key, old: Option<&Volume>, new: Option<&Volume>) {
        self.deleting.remove(key);
        if new.is_some_and(|new| new.metadata.deletion_timestamp.is_some()) {
            self.deleting.insert(key.clone());
        }
        self.moving.remove(key);
        if new.and_then(|new| new.status.as_ref()).is_some_and(|it| moving::is_open(it.r#move.as_ref())) {
            self.moving.insert(key.clone());
        }
        if let Some((status, size)) = Self::status_of(old) {
            if let Some(bound) = &status.bound_to
                && let Some(keys) = self.bound.get_mut(&bound.uid)
            {
                keys.remove(key);
                if keys.is_empty() {
                    self.bound.remove(&bound.uid);
                }
            }
            for (pool, taken) in space::of_volume(status, size) {
                let usage = self.pools.entry(pool.clone()).or_default();
                usage.allocated = usage.allocated.saturating_sub(taken.allocated);
                let promised = self.promised.entry(pool).or_default();
                *promised = promised.saturating_sub(taken.promised);
            }
            if let Some(remover) = status.r#move.as_ref().and_then(kibo_crds::MoveStatus::remover) {
                self.held.subtract(&remover, None);
            }
            if let Some(holder) = &status.holder {
                self.held.subtract(holder, status.pool.as_ref());
                if let Some(keys) = self.keys.get_mut(&holder.node) {
                    keys.remove(key);
                }
            }
            if let Some(pool) = &status.pool {
                let usage = self.pools.entry(pool.clone()).or_default();
                usage.objects = usage.objects.saturating_sub(1);
            }
        }
        if let Some((status, size)) = Self::status_of(new) {
            if let Some(bound) = &status.bound_to {
                self.bound.entry(bound.uid.clone()).or_default().insert(key.clone());
            }
            for (pool, taken) in space::of_volume(status, size) {
                let usage = self.pools.entry(pool.clone()).or_default();
                usage.allocated.0 = usage.allocated.0.saturating_add(taken.allocated.0);
                let promised = self.promised.entry(pool).or_default();
                promised.0 = promised.0.saturating_add(taken.promised.0);
            }
            if let Some(remover) = status.r#move.as_ref().and_then(kibo_crds::MoveStatus::remover) {
                self.held.add(&remover, None);
            }
            if let Some(holder) = &status.holder {
                self.held.add(holder, status.pool.as_ref());
                self.keys.entry(holder.node.clone()).or_default().insert(key.clone());
            }
            if let Some(pool) = &status.pool {
                self.pools.entry(pool.clone()).or_default().objects += 1;
            }
        }
    }
}
