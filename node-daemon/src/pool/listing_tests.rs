use std::{collections::BTreeSet, path::PathBuf};

use kibo_crds::{Epoch, Incarnation, InstanceId, PoolId};
use kibo_protocol::v1::ObjectUse;

use super::*;
use crate::{
    config::{FenceConfig, PoolConfig},
    launch::{By, Operation},
    pool::{Pools, TakeFailure, init},
};

const UID: &str = "6f9619ff-8b86-4011-b42d-00c04fc964ff";

fn id() -> PoolId {
    "p".parse().unwrap()
}

fn uid() -> ObjectUid {
    UID.parse().unwrap()
}

fn taker(by: By) -> Taker {
    Taker { node: "a".parse().unwrap(), incarnation: Incarnation(1), by }
}

fn deletion() -> Taker {
    taker(By::Operation(Operation::Deletion))
}

fn granted(epoch: u64) -> GrantedObject {
    let predecessor_end = if epoch == 1 { PredecessorEnd::None } else { PredecessorEnd::Released };
    GrantedObject {
        object: Object { uid: uid(), pool: id(), size: Bytes::mib(64), must_exist: epoch > 1, grows_from: None },
        grant: Grant { epoch: Epoch(epoch), predecessor: Epoch(epoch - 1), predecessor_end },
    }
}

struct Setup {
    dir: tempfile::TempDir,
    pools: Pools,
}

impl Setup {
    fn new(lost: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        init(dir.path(), &id()).unwrap();
        let config = PoolConfig { id: id(), path: dir.path().to_owned(), default: true };
        let lost: BTreeSet<PoolId> = lost.then(id).into_iter().collect();
        let pools = Pools::open_but(&[config], FenceConfig::default(), &"a".parse().unwrap(), &lost).unwrap();
        Self { dir, pools }
    }

    fn pool(&self) -> &Pool {
        self.pools.get(&id()).unwrap()
    }

    fn objects(&self) -> PathBuf {
        self.dir.path().join(marker::OBJECTS)
    }
}

#[test]
fn everything_is_listed_in_pages_and_deletions_are_told() {
    let setup = Setup::new(false);
    for name in ["a", "b", "c"] {
        fs::write(setup.objects().join(name), vec![0; 8192]).unwrap();
    }
    setup.pool().take(&granted(1), &taker(By::Instance(InstanceId::generate()))).unwrap();
    let first = setup.pool().entries("", 2).unwrap();
    assert_eq!((first.entries.len(), first.more), (2, true));
    let rest = setup.pool().entries(&first.entries[1].name, 10).unwrap();
    assert_eq!((rest.entries.len(), rest.more), (2, false));
    let all: Vec<_> = first.entries.into_iter().chain(rest.entries).collect();
    let told: Vec<_> = all.iter().map(|it| (it.name.as_str(), it.uid.is_some(), it.is_deleted)).collect();
    assert_eq!(told, [(UID, true, false), ("a", false, false), ("b", false, false), ("c", false, false)]);
    assert!(all[0].used > Bytes(0) && all[1].used == Bytes(8192), "{all:?}");
}

#[test]
fn what_was_put_aside_is_an_object_that_nobody_knows_to_be_deleted() {
    let setup = Setup::new(false);
    let pool = setup.pool();
    // Only the record of a refusal: under the object's own name it would count as deleted.
    pool.close(&granted(1), &taker(By::Instance(InstanceId::generate()))).unwrap();
    let told =
        || pool.entries("", 9).unwrap().entries.into_iter().map(|it| (it.uid, it.is_deleted)).collect::<Vec<_>>();
    assert_eq!(told(), [(Some(uid()), true)]);
    let aside = setup.objects().join(format!(".discard.{UID}.1.01ARZ3NDEKTSV4RRFFQ69G5FAV"));
    fs::rename(setup.objects().join(UID), aside).unwrap();
    assert_eq!(told(), [(Some(uid()), false)]);
}

#[test]
fn what_is_left_of_a_deleted_object_goes_unless_somebody_uses_it_or_the_pool_is_another() {
    let setup = Setup::new(false);
    let pool = setup.pool();
    let marker = pool.entries("", 1).unwrap().pool_uid;
    let instance = taker(By::Instance(InstanceId::generate()));
    pool.take(&granted(1), &instance).unwrap();
    assert!(matches!(pool.remove_unowned(&marker, &uid(), &deletion()), Err(PoolError::InUse(_))));
    assert!(setup.objects().join(UID).join("image.raw").exists());
    // That attempt closed its grant, and the one who holds it goes on and releases.
    pool.release(&uid(), Epoch(1)).unwrap();
    assert!(matches!(pool.remove_unowned("another", &uid(), &deletion()), Err(PoolError::OtherPool { .. })));
    pool.remove_unowned(&marker, &uid(), &deletion()).unwrap();
    assert!(!setup.objects().join(UID).exists());
    pool.remove_unowned(&marker, &uid(), &deletion()).unwrap();
}

#[test]
fn nothing_is_written_to_a_lost_pool_and_nothing_waits_for_it() {
    let setup = Setup::new(true);
    let pool = setup.pool();
    assert!(!pool.status().is_available() && pool.status().uid.is_some());
    let instance = taker(By::Instance(InstanceId::generate()));
    let error = pool.take(&granted(1), &instance).unwrap_err();
    assert!(matches!(error.cause, TakeFailure::Pool(PoolError::Lost(_))), "{error}");
    assert_eq!(pool.close(&granted(1), &instance).unwrap(), ObjectUse::Released);
    assert_eq!(pool.image_size(&uid()).unwrap(), None);
    assert!(matches!(pool.delete(&granted(2), &deletion()), Err(PoolError::Lost(_))));
    assert_eq!(fs::read_dir(setup.objects()).unwrap().count(), 0);
    assert_eq!(fs::read_dir(setup.dir.path().join(marker::NODES)).unwrap().count(), 0, "not even a sign of this node");
}
