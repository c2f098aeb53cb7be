//! Sums and lookups over all Volumes.

use std::collections::{BTreeSet, HashMap};

use kibo_crds::{Bytes, NodeId, PoolId, Volume, volume::VolumeStatus};

use crate::{
    cache::{Cache, Key, Projection},
    held::{Held, HeldByNode},
    session::hooks::PoolUsage,
    workspace::launch::volume_size,
};

pub type Volumes = Cache<Volume, ByHolder>;

#[derive(Default)]
pub struct ByHolder {
    keys: HashMap<NodeId, BTreeSet<Key>>,
    held: HeldByNode,
    pools: HashMap<PoolId, PoolUsage>,
    /// Space promised to Volumes whose images are not made yet.
    promised: HashMap<PoolId, Bytes>,
    deleting: BTreeSet<Key>,
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

    /// Volumes on their way out.
    pub fn deleting(&self) -> Vec<Key> {
        self.deleting.iter().cloned().collect()
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
        if let Some((status, size)) = Self::status_of(old) {
            if let Some(holder) = &status.holder {
                self.held.subtract(holder, status.pool.as_ref());
                if let Some(keys) = self.keys.get_mut(&holder.node) {
                    keys.remove(key);
                }
            }
            if let Some(pool) = &status.pool {
                let usage = self.pools.entry(pool.clone()).or_default();
                usage.allocated = usage.allocated.saturating_sub(size);
                usage.objects = usage.objects.saturating_sub(1);
                if status.size.is_none() {
                    let promised = self.promised.entry(pool.clone()).or_default();
                    *promised = promised.saturating_sub(size);
                }
            }
        }
        if let Some((status, size)) = Self::status_of(new) {
            if let Some(holder) = &status.holder {
                self.held.add(holder, status.pool.as_ref());
                self.keys.entry(holder.node.clone()).or_default().insert(key.clone());
            }
            if let Some(pool) = &status.pool {
                let usage = self.pools.entry(pool.clone()).or_default();
                usage.allocated.0 = usage.allocated.0.saturating_add(size.0);
                usage.objects += 1;
                if status.size.is_none() {
                    let promised = self.promised.entry(pool.clone()).or_default();
                    promised.0 = promised.0.saturating_add(size.0);
                }
            }
        }
    }
}
