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

    /// Sums over all promises by node and by pool, without those whose execution is stored: it counts by itself there, as
    /// do its disks.
    pub fn sums(&self, is_stored: impl Fn(InstanceId) -> bool) -> (HashMap<NodeId, Used>, BTreeMap<PoolId, Bytes>) {
        let mut nodes: HashMap<NodeId, Used> = HashMap::new();
        let mut pools = BTreeMap::new();
        for (instance, promise) in &*self.lock() {
            if is_stored(*instance) {
                continue;
            }
            add_all(&mut pools, promise.pools.iter().map(|(pool, bytes)| (pool, *bytes)));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_counts_by_itself_and_is_not_promised_too() {
        let ledger = Ledger::new(NodeIndex::default(), Arc::default());
        let pool: PoolId = "p".parse().unwrap();
        let promise = |mib| Promise {
            node: "a".parse().unwrap(),
            used: Used { instances: 1, ..Used::default() },
            pools: vec![(pool.clone(), Bytes::mib(mib))],
        };
        let (stored, offered) = (InstanceId::generate(), InstanceId::generate());
        let _held = [ledger.promise(stored, promise(8)), ledger.promise(offered, promise(1))];
        let (nodes, pools) = ledger.sums(|instance| instance == stored);
        assert_eq!(nodes[&"a".parse::<NodeId>().unwrap()].instances, 1);
        assert_eq!(pools[&pool], Bytes::mib(1));
    }
}
