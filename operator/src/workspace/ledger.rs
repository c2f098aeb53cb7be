//! Offers and commits in flight: room that is promised and not yet to be seen in any stored object.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard},
};

use kibo_crds::{Bytes, InstanceId, NodeId, PoolId};
use tokio::sync::Notify;

use super::index::add_all;
use crate::{node::NodeIndex, placement::Used};

/// What one offer promises.
#[derive(Clone, Debug)]
pub struct Promise {
    pub node: NodeId,
    pub used: Used,
    pub pools: Vec<(PoolId, Bytes)>,
}

/// All promises of this leader. Cheap to clone.
#[derive(Clone)]
pub struct Ledger {
    promises: Arc<Mutex<HashMap<InstanceId, Promise>>>,
    nodes: NodeIndex,
    room: Arc<Notify>,
}

impl Ledger {
    /// `room` is notified whenever a promise ends.
    pub fn new(nodes: NodeIndex, room: Arc<Notify>) -> Self {
        Self { promises: Arc::default(), nodes, room }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<InstanceId, Promise>> {
        self.promises.lock().expect("no holder of this lock panics")
    }

    /// Holds the room until the reservation is dropped.
    pub fn promise(&self, instance: InstanceId, promise: Promise) -> Reservation {
        self.nodes.touch(&promise.node);
        self.lock().insert(instance, promise);
        Reservation { instance, ledger: self.clone() }
    }

    /// Whether a start with this Instance is under way here.
    pub fn is_starting(&self, instance: InstanceId) -> bool {
        self.lock().contains_key(&instance)
    }

    pub fn in_flight(&self, node: &NodeId) -> u32 {
        let count = self.lock().values().filter(|promise| promise.node == *node).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// Sums over all promises: by node, without those whose execution is stored and counts by itself; and by pool.
    pub fn sums(&self, is_stored: impl Fn(InstanceId) -> bool) -> (HashMap<NodeId, Used>, BTreeMap<PoolId, Bytes>) {
        let mut nodes: HashMap<NodeId, Used> = HashMap::new();
        let mut pools = BTreeMap::new();
        for (instance, promise) in &*self.lock() {
            add_all(&mut pools, promise.pools.iter().map(|(pool, bytes)| (pool, *bytes)));
            if is_stored(*instance) {
                continue;
            }
            let used = nodes.entry(promise.node.clone()).or_default();
            used.cpu.0 = used.cpu.0.saturating_add(promise.used.cpu.0);
            used.memory.0 = used.memory.0.saturating_add(promise.used.memory.0);
            used.instances = used.instances.saturating_add(promise.used.instances);
        }
        (nodes, pools)
    }
}

/// Room held for one start. Drop it after the commit is in the index, or when the start came to nothing.
pub struct Reservation {
    pub instance: InstanceId,
    ledger: Ledger,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(promise) = self.ledger.lock().remove(&self.instance) {
            self.ledger.nodes.touch(&promise.node);
        }
        self.ledger.room.notify_one();
    }
}
