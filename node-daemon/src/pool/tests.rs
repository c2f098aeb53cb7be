use std::{
    io::Write as _,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use kibo_crds::{Incarnation, InstanceId};
use kibo_protocol::v1::ObjectUse;

use super::{
    record_files::{Kind, list, write},
    records::Record,
    *,
};
use crate::launch::{By, Grant, GrantedObject, Object, Operation, PredecessorEnd, Taker};

const UID: &str = "6f9619ff-8b86-d011-b42d-00c04fc964ff";

/// Where an operation was killed, and what is in the object's directory then.
type Step<'a> = (&'a str, Box<dyn Fn(&Path) + 'a>);

struct Setup {
    dir: tempfile::TempDir,
}

impl Setup {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        init(dir.path(), &"p".parse().unwrap()).unwrap();
        Self { dir }
    }

    /// The pool as this node sees it, opened anew: as after a restart of its daemon.
    fn on(&self, node: &str) -> Pool {
        let config = PoolConfig { id: "p".parse().unwrap(), path: self.dir.path().to_owned(), default: true };
        Pools::open(&[config], FenceConfig::default(), &node.parse().unwrap())
            .unwrap()
            .by_id
            .into_values()
            .next()
            .unwrap()
    }

    fn object_dir(&self) -> PathBuf {
        self.dir.path().join(marker::OBJECTS).join(UID)
    }

    fn files(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.object_dir()) else { return Vec::new() };
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn object(epoch: u64, predecessor_end: PredecessorEnd) -> GrantedObject {
    GrantedObject {
        object: Object {
            uid: UID.parse().unwrap(),
            pool: "p".parse().unwrap(),
            size: Bytes::mib(64),
            must_exist: false,
            grows_from: None,
        },
        grant: Grant { epoch: Epoch(epoch), predecessor: Epoch(epoch - 1), predecessor_end },
    }
}

fn taker(node: &str) -> Taker {
    Taker { node: node.parse().unwrap(), incarnation: Incarnation(1), by: By::Instance(InstanceId::generate()) }
}

fn deletion(node: &str) -> Taker {
    Taker { by: By::Operation(Operation::Deletion), ..taker(node) }
}

/// As after the end of a VM: nobody has the image open any more.
fn end_use(pool: &Pool, taken: TakenObject) {
    drop(taken.image);
    pool.release(&taken.uid, taken.epoch).unwrap();
}

#[test]
fn what_is_still_open_is_not_released() {
    let setup = Setup::new();
    let pool = setup.on("a");
    let mine = taker("a");
    let granted = object(1, PredecessorEnd::None);
    let taken = pool.take(&granted, &mine).unwrap();
    let error = pool.close(&granted, &mine).unwrap_err();
    assert!(matches!(error, PoolError::StillOpen { .. }), "{error}");
    assert_eq!(setup.files(), ["holder.1", "image.raw"]);
    drop(taken);
    assert_eq!(pool.close(&granted, &mine).unwrap(), ObjectUse::Released);
}

#[test]
fn a_first_take_makes_the_image() {
    let setup = Setup::new();
    let taken = setup.on("a").take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    let metadata = taken.image.file.metadata().unwrap();
    assert_eq!(metadata.size(), 64 << 20);
    assert!(metadata.blocks() * 512 < 16 << 20, "the image is sparse");
    assert_eq!(metadata.mode() & 0o777, 0o600);
    assert_eq!(setup.files(), ["holder.1", "image.raw"]);
    // The magic number of ext4.
    let mut superblock = [0; 2];
    let image = fs::File::open(setup.object_dir().join("image.raw")).unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&image, &mut superblock, 1024 + 0x38).unwrap();
    assert_eq!(superblock, [0x53, 0xEF]);
}

#[test]
fn released_and_taken_again_by_another_node_it_is_the_same_image() {
    let setup = Setup::new();
    let (a, b) = (setup.on("a"), setup.on("b"));
    let first = a.take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    let inode = first.image.file.metadata().unwrap().ino();
    end_use(&a, first);
    a.release(&UID.parse().unwrap(), Epoch(1)).unwrap();
    let second = b.take(&object(2, PredecessorEnd::Released), &taker("b")).unwrap();
    assert_eq!(second.image.file.metadata().unwrap().ino(), inode);
    assert_eq!(setup.files(), ["holder.2", "image.raw"]);
}

#[test]
fn what_another_holds_is_refused_and_that_grant_is_void_for_ever() {
    let setup = Setup::new();
    let (a, b) = (setup.on("a"), setup.on("b"));
    let held = a.take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    let wrong = object(2, PredecessorEnd::Released);
    let error = b.take(&wrong, &taker("b")).unwrap_err();
    assert_eq!(error.end_reason(), v1::EndReason::HolderConflict);
    assert_eq!(error.object_use, ObjectUse::Refused);
    assert!(error.to_string().contains("not released by a"), "{error}");
    end_use(&a, held);
    let error = b.take(&wrong, &taker("b")).unwrap_err();
    assert_eq!(error.end_reason(), v1::EndReason::NotStarted);
    b.take(&object(3, PredecessorEnd::Refused), &taker("b")).unwrap();
}

#[test]
fn the_dead_do_not_stop_the_living() {
    let setup = Setup::new();
    setup.on("a").take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    let b = setup.on("b");
    let taken = b.take(&object(2, PredecessorEnd::Isolated), &taker("b")).unwrap();
    end_use(&b, taken);
    setup.on("c").take(&object(3, PredecessorEnd::Released), &taker("c")).unwrap();
    // The isolated node comes back with its old grant.
    let error = setup.on("a").take(&object(1, PredecessorEnd::None), &taker("a")).unwrap_err();
    assert_eq!(error.end_reason(), v1::EndReason::NotStarted);
}

/// A killed process may be gone before its last requests are: whoever takes over by an isolation waits for those too.
#[test]
fn what_the_dead_still_have_open_is_opened_by_nobody_else() {
    let setup = Setup::new();
    let pool = setup.on("a");
    let left = pool.take(&object(1, PredecessorEnd::None), &taker("a")).unwrap().image.file;
    let (next, granted) = (taker("b"), object(2, PredecessorEnd::Isolated));
    let error = setup.on("b").take(&granted, &next).unwrap_err();
    assert!(matches!(error.cause, TakeFailure::Image(ImageError::StillOpen { .. })), "{error}");
    assert_eq!((error.object_use, error.end_reason()), (ObjectUse::Held, v1::EndReason::StorageFailed));
    drop(left);
    setup.on("b").take(&granted, &next).unwrap();
}

/// Killed between any two steps of a take: the same Instance goes on.
#[test]
fn a_take_that_was_killed_anywhere_is_taken_up() {
    let granted = object(2, PredecessorEnd::Released);
    let mine = taker("a");
    let record = |epoch, taker: Option<&Taker>| Record {
        taker: taker.cloned(),
        grant: object(epoch, PredecessorEnd::Released).grant,
    };
    let node: NodeId = "a".parse().unwrap();
    let before = taker("b");
    let steps: Vec<Step<'_>> = vec![
        ("nothing but the directory", Box::new(|_| ())),
        ("half a temporary record", Box::new(|dir| fs::write(dir.join(".record.a.01"), "{").unwrap())),
        ("the own record", Box::new(|dir| assert!(write(dir, &node, Kind::Taken, &record(2, Some(&mine))).unwrap()))),
        ("half an image", Box::new(|dir| fs::write(dir.join("image.raw.new.1"), "half").unwrap())),
        (
            "an old epoch of which only the release is left",
            Box::new(|dir| assert!(write(dir, &node, Kind::Released, &record(1, Some(&before))).unwrap())),
        ),
    ];
    for (what, step) in steps {
        let setup = Setup::new();
        let pool = setup.on("a");
        fs::create_dir(setup.object_dir()).unwrap();
        step(&setup.object_dir());
        pool.take(&granted, &mine).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(setup.files(), ["holder.2", "image.raw"], "{what}");
        // The second time is the same as the first.
        drop(pool.take(&granted, &mine).unwrap());
    }
}

#[test]
fn a_temporary_record_of_another_node_is_left_alone() {
    let setup = Setup::new();
    fs::create_dir(setup.object_dir()).unwrap();
    fs::write(setup.object_dir().join(".record.b.01"), "{").unwrap();
    setup.on("a").take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    assert!(setup.files().contains(&".record.b.01".to_owned()));
}

#[test]
fn an_image_that_must_exist_is_not_made() {
    let setup = Setup::new();
    let mut granted = object(1, PredecessorEnd::None);
    granted.object.must_exist = true;
    let error = setup.on("a").take(&granted, &taker("a")).unwrap_err();
    assert_eq!(error.end_reason(), v1::EndReason::StorageFailed);
    // The record says that nobody uses it.
    assert_eq!(error.object_use, ObjectUse::Released);
    assert_eq!(setup.files(), ["holder.1", "holder.1.released"]);
}

#[test]
fn an_image_of_another_size_is_refused() {
    let setup = Setup::new();
    let pool = setup.on("a");
    let taken = pool.take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    end_use(&pool, taken);
    let mut larger = object(2, PredecessorEnd::Released);
    larger.object.size = Bytes::mib(128);
    let error = pool.take(&larger, &taker("a")).unwrap_err();
    assert!(matches!(error.cause, TakeFailure::Image(ImageError::Size { .. })), "{error}");
}

#[test]
fn an_image_grows_when_that_was_asked_for_and_keeps_what_is_in_it() {
    let setup = Setup::new();
    let pool = setup.on("a");
    let taken = pool.take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    let image = setup.object_dir().join("image.raw");
    let head = |image: &std::path::Path| fs::read(image).unwrap()[..64 << 10].to_vec();
    let before = head(&image);
    end_use(&pool, taken);
    let larger = |epoch, mib| {
        let mut granted = object(epoch, PredecessorEnd::Released);
        (granted.object.size, granted.object.must_exist) = (Bytes::mib(mib), true);
        granted.object.grows_from = Some(Bytes::mib(64));
        granted
    };
    let grown = pool.take(&larger(2, 128), &taker("a")).unwrap();
    assert_eq!((grown.size, fs::metadata(&image).unwrap().len()), (Bytes::mib(128), 128 << 20));
    assert_eq!(head(&image), before);
    // Nobody heard of it: asked for the same again, or for less, it has what it has.
    end_use(&pool, grown);
    let again = pool.take(&larger(3, 96), &taker("a")).unwrap();
    assert_eq!(again.size, Bytes::mib(128));
    // One that has lost its end is damaged and does not grow over that.
    end_use(&pool, again);
    fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(32 << 20).unwrap();
    let error = pool.take(&larger(4, 128), &taker("a")).unwrap_err();
    assert!(matches!(error.cause, TakeFailure::Image(ImageError::Size { .. })), "{error}");
}

#[test]
fn an_image_does_not_grow_beyond_its_pool() {
    let setup = Setup::new();
    let pool = setup.on("a");
    let taken = pool.take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    end_use(&pool, taken);
    let mut granted = object(2, PredecessorEnd::Released);
    (granted.object.size, granted.object.grows_from) = (Bytes(1 << 60), Some(Bytes::mib(64)));
    let error = pool.take(&granted, &taker("a")).unwrap_err();
    assert!(matches!(error.cause, TakeFailure::Image(ImageError::NoSpace { .. })), "{error}");
    assert_eq!(fs::metadata(setup.object_dir().join("image.raw")).unwrap().len(), 64 << 20);
}

#[test]
fn an_image_larger_than_the_pool_is_refused_before_it_is_made() {
    let setup = Setup::new();
    let mut granted = object(1, PredecessorEnd::None);
    granted.object.size = Bytes(1 << 60);
    let error = setup.on("a").take(&granted, &taker("a")).unwrap_err();
    assert!(matches!(error.cause, TakeFailure::Image(ImageError::NoSpace { .. })), "{error}");
    assert_eq!(setup.files(), ["holder.1", "holder.1.released"]);
}

#[test]
fn a_grant_that_was_never_taken_is_closed_for_good() {
    let setup = Setup::new();
    let pool = setup.on("a");
    let granted = object(1, PredecessorEnd::None);
    let mine = taker("a");
    assert_eq!(pool.confirm_not_taken(&granted, |_| true).unwrap(), ObjectUse::Refused);
    assert_eq!(pool.confirm_not_taken(&granted, |_| true).unwrap(), ObjectUse::Refused);
    assert_eq!(pool.close(&granted, &mine).unwrap(), ObjectUse::Refused);
    assert_eq!(pool.take(&granted, &mine).unwrap_err().object_use, ObjectUse::Refused);
}

#[test]
fn closing_releases_only_the_own_take() {
    let setup = Setup::new();
    let pool = setup.on("a");
    let granted = object(1, PredecessorEnd::None);
    let mine = taker("a");
    pool.take(&granted, &mine).unwrap();
    assert_eq!(pool.confirm_not_taken(&granted, |_| true).unwrap(), ObjectUse::Held);
    assert_eq!(pool.close(&granted, &taker("a")).unwrap(), ObjectUse::Held);
    assert_eq!(pool.close(&granted, &mine).unwrap(), ObjectUse::Released);
    assert_eq!(pool.take(&granted, &mine).unwrap_err().object_use, ObjectUse::Released);
}

#[test]
fn a_deleted_object_leaves_nothing() {
    let setup = Setup::new();
    let pool = setup.on("a");
    pool.delete(&object(1, PredecessorEnd::None), &deletion("a")).unwrap();
    let taken = pool.take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    assert!(matches!(pool.delete(&object(2, PredecessorEnd::Released), &deletion("a")), Err(PoolError::InUse(_))));
    end_use(&pool, taken);
    pool.delete(&object(3, PredecessorEnd::Refused), &deletion("a")).unwrap();
    assert!(!setup.object_dir().exists());
    pool.delete(&object(3, PredecessorEnd::Refused), &deletion("a")).unwrap();
}

/// Killed between any two steps of a deletion: the same command, also with a newer grant, ends it.
#[test]
fn a_deletion_that_was_killed_anywhere_is_taken_up() {
    let node: NodeId = "a".parse().unwrap();
    let released = |dir: &Path| {
        let record = Record { taker: Some(taker("b")), grant: object(1, PredecessorEnd::None).grant };
        write(dir, &node, Kind::Taken, &record).unwrap();
        write(dir, &node, Kind::Released, &record).unwrap();
        fs::write(dir.join("image.raw"), "bytes").unwrap();
    };
    let own = |dir: &Path| {
        let record = Record { taker: None, grant: object(2, PredecessorEnd::Released).grant };
        write(dir, &node, Kind::Taken, &record).unwrap();
    };
    let steps: Vec<Step<'_>> = vec![
        ("nothing done", Box::new(|dir| released(dir))),
        ("the own record", Box::new(|dir| (released(dir), own(dir)).0)),
        (
            "the image is gone",
            Box::new(|dir| {
                released(dir);
                own(dir);
                fs::remove_file(dir.join("image.raw")).unwrap();
            }),
        ),
        ("the old records are gone", Box::new(|dir| own(dir))),
        ("all records are gone", Box::new(|_| ())),
    ];
    for epoch in [2, 3] {
        for (what, step) in &steps {
            let setup = Setup::new();
            fs::create_dir(setup.object_dir()).unwrap();
            step(&setup.object_dir());
            let end = if epoch == 2 { PredecessorEnd::Released } else { PredecessorEnd::Refused };
            setup.on("a").delete(&object(epoch, end), &deletion("a")).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(!setup.object_dir().exists(), "{what}");
        }
    }
}

#[test]
fn a_pool_without_its_marker_is_not_used() {
    let setup = Setup::new();
    let pool = setup.on("a");
    assert!(pool.status().is_available());
    let marker = setup.dir.path().join("kibotos-pool.json");
    let content = fs::read(&marker).unwrap();
    fs::remove_file(&marker).unwrap();
    let error = pool.take(&object(1, PredecessorEnd::None), &taker("a")).unwrap_err();
    assert_eq!(error.end_reason(), v1::EndReason::StorageFailed);
    assert!(setup.files().is_empty());
    assert!(!setup.on("a").status().is_available());
    // Another pool with the same id in the place of the first.
    fs::write(&marker, &content).unwrap();
    pool.take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    let other = String::from_utf8(content).unwrap().replace("\"uid\": \"", "\"uid\": \"x");
    fs::write(&marker, other).unwrap();
    let error = pool.take(&object(2, PredecessorEnd::Released), &taker("a")).unwrap_err();
    assert!(matches!(error.cause, TakeFailure::Pool(PoolError::Unavailable { .. })), "{error}");
}

#[test]
fn a_pool_is_shared_when_another_node_has_been_there() {
    let setup = Setup::new();
    let a = setup.on("a");
    assert!(!a.is_shared().unwrap());
    let b = setup.on("b");
    assert!(a.is_shared().unwrap() && b.is_shared().unwrap());
}

#[test]
fn a_damaged_record_stops_everything() {
    let setup = Setup::new();
    let pool = setup.on("a");
    fs::create_dir(setup.object_dir()).unwrap();
    fs::write(setup.object_dir().join("holder.1"), "{}\n00000000\n").unwrap();
    let error = pool.take(&object(2, PredecessorEnd::Released), &taker("a")).unwrap_err();
    assert!(error.to_string().contains("damaged"), "{error}");
    assert!(list(&setup.object_dir()).is_err());
}

/// Many nodes try to take the same epoch at once: exactly one wins.
#[test]
fn one_of_many_takers_of_an_epoch_wins() {
    let setup = Setup::new();
    let pools: Vec<_> = ["a", "b", "c", "d"].iter().map(|node| (*node, setup.on(node))).collect();
    let won = std::thread::scope(|scope| {
        let attempts: Vec<_> = pools
            .iter()
            .map(|(node, pool)| scope.spawn(|| pool.take(&object(1, PredecessorEnd::None), &taker(node)).is_ok()))
            .collect();
        attempts.into_iter().map(|attempt| attempt.join().unwrap()).filter(|won| *won).count()
    });
    assert_eq!(won, 1);
}

fn marked(setup: &Setup, node: &str) -> Option<u64> {
    let fence = fence::read(setup.dir.path(), &node.parse().unwrap()).unwrap().unwrap();
    fence.mark.unwrap().map(|mark| mark.incarnation.0)
}

/// The mark is there before the record is, and a second try marks again what the first may not have seen.
#[test]
fn the_dead_are_told_before_anybody_writes() {
    let setup = Setup::new();
    let (a, b) = (setup.on("a"), setup.on("b"));
    a.take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    // Refused: nothing was asserted, nobody is told.
    b.take(&object(2, PredecessorEnd::Released), &taker("b")).unwrap_err();
    assert_eq!(marked(&setup, "a"), None);
    let third = GrantedObject {
        grant: Grant { epoch: Epoch(3), predecessor: Epoch(1), predecessor_end: PredecessorEnd::Isolated },
        ..object(3, PredecessorEnd::Isolated)
    };
    let mine = taker("b");
    b.take(&third, &mine).unwrap();
    assert_eq!((marked(&setup, "a"), marked(&setup, "b")), (Some(1), None));
    b.take(&third, &mine).unwrap();
}

#[test]
fn a_deletion_tells_the_dead_too() {
    let setup = Setup::new();
    setup.on("a").take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
    setup.on("b").delete(&object(2, PredecessorEnd::Isolated), &deletion("b")).unwrap();
    assert_eq!(marked(&setup, "a"), Some(1));
}

#[test]
fn who_is_marked_as_dead_takes_nothing_in_that_life() {
    let setup = Setup::new();
    let a = setup.on("a");
    fence::mark(setup.dir.path(), &"a".parse().unwrap(), Incarnation(1), &"b".parse().unwrap()).unwrap();
    let granted = object(1, PredecessorEnd::None);
    let error = a.take(&granted, &taker("a")).unwrap_err();
    assert_eq!((error.end_reason(), error.object_use), (v1::EndReason::NotStarted, ObjectUse::Refused), "{error}");
    a.take(&object(2, PredecessorEnd::Refused), &Taker { incarnation: Incarnation(2), ..taker("a") }).unwrap();
}

/// What a pool must not contain, and what comes of it: nobody takes anything before a person has helped.
#[test]
fn records_that_cannot_be_are_each_refused() {
    let node: NodeId = "b".parse().unwrap();
    let record = |epoch| Record { taker: Some(taker("b")), grant: object(epoch, PredecessorEnd::Released).grant };
    let cases: Vec<(Step<'_>, &str)> = vec![
        (("truncated", Box::new(|dir| fs::write(dir.join("holder.1"), "{\"taker\"").unwrap())), "damaged"),
        (("empty", Box::new(|dir| fs::write(dir.join("holder.1"), "").unwrap())), "damaged"),
        (
            (
                "a release that is damaged",
                Box::new(|dir| {
                    write(dir, &node, Kind::Taken, &record(1)).unwrap();
                    fs::write(dir.join("holder.1.released"), "x").unwrap();
                }),
            ),
            "damaged",
        ),
        (("from the future", Box::new(|dir| assert!(write(dir, &node, Kind::Taken, &record(9)).unwrap()))), "epoch 9"),
        (("of this epoch", Box::new(|dir| assert!(write(dir, &node, Kind::Taken, &record(2)).unwrap()))), "taken by b"),
    ];
    for ((what, step), expected) in cases {
        let setup = Setup::new();
        let pool = setup.on("a");
        fs::create_dir(setup.object_dir()).unwrap();
        step(&setup.object_dir());
        let error = pool.take(&object(2, PredecessorEnd::Released), &taker("a")).unwrap_err().to_string();
        assert!(error.contains(expected), "{what}: {error}");
        assert!(!setup.object_dir().join("image.raw").exists(), "{what}");
    }
    // Not the name of a record, so not a second one of epoch 1.
    let setup = Setup::new();
    fs::create_dir(setup.object_dir()).unwrap();
    fs::write(setup.object_dir().join("holder.01"), "").unwrap();
    setup.on("a").take(&object(1, PredecessorEnd::None), &taker("a")).unwrap();
}

#[test]
fn where_an_object_was_only_refused_nothing_of_it_is_kept() {
    let setup = Setup::new();
    let pool = setup.on("a");
    let granted = object(1, PredecessorEnd::None);
    assert_eq!(pool.confirm_not_taken(&granted, |_| false).unwrap(), ObjectUse::Refused);
    assert_eq!(setup.files(), ["holder.1.refused"]);
    let entries = || pool.entries("", 10).unwrap().entries;
    assert!(entries()[0].is_deleted, "it was never here");
    pool.remove_unowned(&pool.marker_uid(), &granted.object.uid, &deletion("a")).unwrap();
    assert_eq!(entries(), []);
    // One that was here once has a disk, and that is somebody's until its deletion is on record.
    let second = object(2, PredecessorEnd::Refused);
    let taken = pool.take(&second, &taker("a")).unwrap();
    end_use(&pool, taken);
    assert_eq!(pool.confirm_not_taken(&object(3, PredecessorEnd::Released), |_| false).unwrap(), ObjectUse::Refused);
    assert!(!entries()[0].is_deleted);
}

#[test]
fn a_pool_in_which_this_life_is_marked_as_dead_is_passed_by() {
    let setup = Setup::new();
    fence::sign_in(setup.dir.path(), &"a".parse().unwrap()).unwrap();
    fence::mark(setup.dir.path(), &"a".parse().unwrap(), Incarnation(7), &"b".parse().unwrap()).unwrap();
    let a = setup.on("a");
    let told = |lived: Option<u64>| {
        a.life.set(lived.map(Incarnation));
        a.report().available
    };
    // Before the first session nobody knows in which life it will be used.
    assert_eq!([None, Some(1), Some(7), Some(8)].map(told), [true, false, false, true]);
    a.life.set(Some(Incarnation(1)));
    let problem = a.status().problem.unwrap();
    assert!(problem.contains("dead up to incarnation 7, and it lives 1"), "{problem}");
    let error = a.take(&object(1, PredecessorEnd::None), &taker("a")).unwrap_err();
    assert!(matches!(error.cause, TakeFailure::Conflict(Conflict::Isolated { .. })), "{error}");
}

#[tokio::test]
async fn what_hangs_in_a_pool_is_not_waited_for_once_the_pool_is_lost_and_writes_nothing_there() {
    let setup = Setup::new();
    // Whoever reads this record waits until somebody has written it.
    let refused = Record { taker: None, grant: object(7, PredecessorEnd::Released).grant };
    let (node, dir) = ("a".parse().unwrap(), setup.object_dir());
    fs::create_dir(&dir).unwrap();
    assert!(write(&dir, &node, Kind::Refused, &refused).unwrap());
    let record = dir.join("holder.7.refused");
    let content = fs::read(&record).unwrap();
    fs::remove_file(&record).unwrap();
    let (fifo, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR);
    rustix::fs::mknodat(rustix::fs::CWD, &record, fifo, mode, 0).unwrap();

    let id: PoolId = "p".parse().unwrap();
    let config = PoolConfig { id: id.clone(), path: setup.dir.path().to_owned(), default: true };
    let pools = Arc::new(Pools::open(&[config], FenceConfig::default(), &node).unwrap());
    let taking = {
        let (pools, id) = (pools.clone(), id.clone());
        move || pools.get(&id).unwrap().take(&object(8, PredecessorEnd::Refused), &taker("a")).map(drop)
    };
    let mut taking = tokio::task::spawn_blocking(taking);
    let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap();
    let mut written = loop {
        // It can be opened like this only when somebody reads it.
        match fs::OpenOptions::new().write(true).custom_flags(flags).open(&record) {
            Ok(written) => break written,
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(2)).await,
        }
    };
    let (lost, declared) = tokio::join!(pools.unless_lost([&id], &mut taking), async {
        tokio::task::yield_now().await;
        pools.declare_lost(&[id.clone()].into())
    });
    assert_eq!((lost.unwrap_err(), declared), (id.clone(), [id].into()));
    // It goes on after all.
    written.write_all(&content).unwrap();
    drop(written);
    let error = taking.await.unwrap().unwrap_err();
    assert!(matches!(error.cause, TakeFailure::Pool(PoolError::Lost(_))), "{error}");
    assert_eq!(setup.files(), ["holder.7.refused"]);
    let nowhere: [&PoolId; 0] = [];
    assert_eq!(pools.unless_lost(nowhere, async { 5 }).await.unwrap(), 5);
}
