//! Offers, commits, growths and imports in flight: room that is promised and not yet to be seen in any stored object.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kibo_crds::{Bytes, InstanceId, NodeId, PoolId};
use kube::{Resource, ResourceExt as _};
use tokio::sync::Notify;

use crate::{
    node::NodeIndex,
    placement::Used,
    space::{self, ByPool, Taken},
};

/// What one offer promises.
#[derive(Clone, Debug)]
pub struct Promise {
    pub node: NodeId,
    pub used: Used,
    pub pools: Vec<(PoolId, Bytes)>,
}

/// What an object that exists is about to take more than before: it grows, or a move of it begins.
struct More {
    /// Of the object that it was decided on. Its status is written in the place of that one or not at all.
    version: String,
    pools: ByPool,
}

/// What an import is about to make in a pool, as long as its Volume is stored in none.
struct Coming {
    volume: String,
    pool: PoolId,
    size: Bytes,
}

/// All promises of this leader. Cheap to clone.
#[derive(Clone)]
pub struct Ledger {
    promises: Arc<Mutex<HashMap<InstanceId, Promise>>>,
    /// By the uid of the object.
    claims: Arc<Mutex<HashMap<String, More>>>,
    coming: Arc<Mutex<BTreeMap<u64, Coming>>>,
    /// Whoever looks for room and takes it is alone with that.
    turn: Arc<Mutex<()>>,
    nodes: NodeIndex,
    room: Arc<Notify>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}

impl Ledger {
    /// `room` is notified whenever a promise ends.
    pub fn new(nodes: NodeIndex, room: Arc<Notify>) -> Self {
        let (promises, claims, coming) = (Arc::default(), Arc::default(), Arc::default());
        Self { promises, claims, coming, turn: Arc::default(), nodes, room }
    }

    /// Until it is dropped, nobody else takes room that they have found.
    pub fn turn(&self) -> MutexGuard<'_, ()> {
        // It guards nothing that a panic in a decision could leave half done.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a decision about an object. One that takes more of a pool than is stored is made once more while nobody else
    /// takes any, and what it takes is held until the claim is dropped: after it is in the index, or came to nothing.
    pub fn in_turn<K: Resource, D>(
        &self,
        object: &K,
        decide: impl Fn() -> D,
        more: impl Fn(&D) -> ByPool,
    ) -> (D, Option<Claim>) {
        let decision = decide();
        if more(&decision).is_empty() {
            return (decision, None);
        }
        let _turn = self.turn();
        let decision = decide();
        let pools = more(&decision);
        if pools.is_empty() {
            return (decision, None);
        }
        let (uid, version) = (object.uid().unwrap_or_default(), object.resource_version().unwrap_or_default());
        lock(&self.claims).insert(uid.clone(), More { version: version.clone(), pools });
        (decision, Some(Claim { uid, version, ledger: self.clone() }))
    }

    /// Sums over all claims of objects of which nothing newer is stored: what is stored counts by itself.
    /// `version` is of what is stored, by uid.
    pub fn claimed(&self, version: impl Fn(&str) -> Option<String>) -> ByPool {
        let mut sums = ByPool::new();
        for (uid, more) in &*lock(&self.claims) {
            if version(uid).as_ref() == Some(&more.version) {
                space::add_all(&mut sums, more.pools.clone());
            }
        }
        sums
    }

    /// Holds room for the Volume of an import until it is dropped: the layer is stored first, and the Volume only in a
    /// write of its own. It names no node, so that an isolation does not wait for who sends the archive.
    pub fn keep_for(&self, volume: String, pool: PoolId, size: Bytes) -> Kept {
        let mut coming = lock(&self.coming);
        let number = coming.last_key_value().map_or(0, |(last, _)| last + 1);
        coming.insert(number, Coming { volume, pool, size });
        Kept { number, ledger: self.clone() }
    }

    /// Sums over what imports are about to make. `is_stored` tells, by uid, of Volumes that are in a pool, where they count
    /// by themselves, and of those that are gone.
    pub fn kept(&self, is_stored: impl Fn(&str) -> bool) -> ByPool {
        let mut sums = ByPool::new();
        for coming in lock(&self.coming).values().filter(|coming| !is_stored(&coming.volume)) {
            space::add_all(&mut sums, [(coming.pool.clone(), Taken::all(coming.size))]);
        }
        sums
    }

    /// Holds the room until the reservation is dropped.
    pub fn promise(&self, instance: InstanceId, promise: Promise) -> Reservation {
        self.nodes.touch(&promise.node);
        lock(&self.promises).insert(instance, promise);
        Reservation { instance, ledger: self.clone() }
    }

    /// Whether a start with this Instance is under way here.
    pub fn is_starting(&self, instance: InstanceId) -> bool {
        lock(&self.promises).contains_key(&instance)
    }

    pub fn in_flight(&self, node: &NodeId) -> u32 {
        let count = lock(&self.promises).values().filter(|promise| promise.node == *node).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// Sums over all promises by node and by pool, without those whose execution is stored: it counts by itself there, as
    /// do its disks.
    pub fn sums(&self, is_stored: impl Fn(InstanceId) -> bool) -> (HashMap<NodeId, Used>, ByPool) {
        let mut nodes: HashMap<NodeId, Used> = HashMap::new();
        let mut pools = ByPool::new();
        for (instance, promise) in &*lock(&self.promises) {
            if is_stored(*instance) {
                continue;
            }
            space::add_all(&mut pools, promise.pools.iter().map(|(pool, bytes)| (pool.clone(), Taken::all(*bytes))));
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
        if let Some(promise) = lock(&self.ledger.promises).remove(&self.instance) {
            self.ledger.nodes.touch(&promise.node);
        }
        self.ledger.room.notify_one();
    }
}

/// Room held for the Volume of one import.
pub struct Kept {
    number: u64,
    ledger: Ledger,
}

impl Drop for Kept {
    fn drop(&mut self) {
        lock(&self.ledger.coming).remove(&self.number);
        self.ledger.room.notify_one();
    }
}

/// Room held for what one decision takes.
pub struct Claim {
    uid: String,
    version: String,
    ledger: Ledger,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claims = lock(&self.ledger.claims);
        if claims.get(&self.uid).is_some_and(|more| more.version == self.version) {
            claims.remove(&self.uid);
        }
        drop(claims);
        self.ledger.room.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use kibo_crds::Volume;

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
        assert_eq!(pools[&pool], Taken::all(Bytes::mib(1)));
    }

    fn volume(uid: &str) -> Volume {
        let spec = serde_json::from_value(serde_json::json!({ "size": "64Mi" })).unwrap();
        let mut volume = Volume::new(uid, spec);
        volume.metadata.uid = Some(uid.to_owned());
        volume.metadata.resource_version = Some("1".to_owned());
        volume
    }

    #[test]
    fn the_volume_of_an_import_counts_until_it_is_stored_or_nobody_makes_it() {
        let ledger = Ledger::new(NodeIndex::default(), Arc::default());
        let pool: PoolId = "p".parse().unwrap();
        let keep = || ledger.keep_for("u".to_owned(), pool.clone(), Bytes::mib(8));
        let (kept, again) = (keep(), keep());
        drop(kept);
        assert_eq!(ledger.kept(|_| false), [(pool.clone(), Taken::all(Bytes::mib(8)))].into());
        assert_eq!(ledger.kept(|uid| uid == "u"), ByPool::new());
        drop(again);
        assert_eq!(ledger.kept(|_| false), ByPool::new());
    }

    /// A pool has room for one more of ten, and two ask for it.
    #[test]
    fn of_two_that_find_the_same_room_one_gets_it() {
        let ledger = Ledger::new(NodeIndex::default(), Arc::default());
        let pool: PoolId = "p".parse().unwrap();
        let ten = Taken { allocated: Bytes(10), promised: Bytes(0) };
        let unstored = |_: &str| Some("1".to_owned());
        let has_room = |version: &dyn Fn(&str) -> Option<String>| {
            let taken = ledger.claimed(version).get(&pool).copied().unwrap_or_default();
            taken.allocated.0 + 10 <= 15
        };
        let more = |accepted: &bool| if *accepted { [(pool.clone(), ten)].into() } else { ByPool::new() };
        let first = Cell::new(None);
        let looked = Cell::new(0);
        let decide = || {
            looked.set(looked.get() + 1);
            let found = has_room(&unstored);
            if looked.get() == 1 {
                // Between its look and its decision somebody else does the same.
                first.set(Some(ledger.in_turn(&volume("a"), || has_room(&unstored), more)));
            }
            found
        };
        let (accepted, claim) = ledger.in_turn(&volume("b"), decide, more);
        assert!(!accepted && claim.is_none(), "the room is taken");
        let (accepted, claim) = first.take().unwrap();
        assert!(accepted && claim.is_some());
        // What is stored counts by itself, from that moment on.
        assert!(has_room(&|_| Some("2".to_owned())));
        assert!(!has_room(&unstored));
        drop(claim);
        assert!(has_room(&unstored), "it came to nothing");
    }
}
