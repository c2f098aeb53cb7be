mod aside;

use std::os::unix::fs::FileExt as _;

use kibo_crds::{Incarnation, InstanceId, NodeId};

use super::*;
use crate::{
    config::{FenceConfig, PoolConfig},
    launch::{By, Grant, Object, Operation, PredecessorEnd},
    pool::{
        NotACopy, init, marker,
        record_files::{Kind, write},
        records::Record,
    },
};

const UID: &str = "6f9619ff-8b86-d011-b42d-00c04fc964ff";

struct Setup {
    dir: tempfile::TempDir,
}

impl Setup {
    /// Two pools; in the first one the object was used in epoch 1 and has data.
    fn new() -> Self {
        let setup = Self { dir: tempfile::tempdir().unwrap() };
        for pool in ["old", "new"] {
            init(&setup.dir.path().join(pool), &pool.parse().unwrap()).unwrap();
        }
        let pools = setup.on("a");
        let old = pools.get(&id("old")).unwrap();
        let taken = old.take(&object("old", 1, PredecessorEnd::None), &instance("a")).unwrap();
        let image = OpenOptions::new().write(true).open(setup.image("old")).unwrap();
        for (at, byte) in [(0, 5), (17 << 20, 6), ((64 << 20) - 4096, 7)] {
            image.write_all_at(&[byte; 4096], at).unwrap();
        }
        drop(taken.image);
        old.release(&taken.uid, taken.epoch).unwrap();
        setup
    }

    fn on(&self, node: &str) -> Pools {
        let config = |pool: &str| PoolConfig { id: id(pool), path: self.dir.path().join(pool), default: pool == "old" };
        Pools::open(&[config("old"), config("new")], FenceConfig::default(), &node.parse().unwrap()).unwrap()
    }

    fn object_dir(&self, pool: &str) -> std::path::PathBuf {
        self.dir.path().join(pool).join(marker::OBJECTS).join(UID)
    }

    fn image(&self, pool: &str) -> std::path::PathBuf {
        self.object_dir(pool).join(image::IMAGE)
    }

    fn files(&self, pool: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.object_dir(pool)) else { return Vec::new() };
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Of the move of epoch 2, which has come so far.
    fn journal(&self, done: usize, complete: bool) -> Journal {
        let image = fs::read(self.image("old")).unwrap();
        let mut journal = Journal::new(id("old"), Epoch(2), image.len() as u64);
        (journal.done, journal.content, journal.complete) =
            (done as u64, sparse::Content::of(0, &image[..done]), complete);
        journal
    }

    fn run(&self, node: &str, epoch: u64, end: PredecessorEnd) -> Result<(), MoveError> {
        let granted = object("old", epoch, end);
        self.on(node).move_object(&granted, &id("new"), &mover(node), &Progress::default())
    }

    fn assert_copied(&self, what: &str) {
        assert!(fs::read(self.image("old")).unwrap() == fs::read(self.image("new")).unwrap(), "{what}");
        assert!(!self.files("new").iter().any(|name| name.ends_with(".moving.2")), "{what}: {:?}", self.files("new"));
    }
}

fn id(pool: &str) -> PoolId {
    pool.parse().unwrap()
}

fn uid() -> ObjectUid {
    UID.parse().unwrap()
}

fn object(pool: &str, epoch: u64, predecessor_end: PredecessorEnd) -> GrantedObject {
    GrantedObject {
        object: Object { uid: uid(), pool: id(pool), size: Bytes::mib(64), must_exist: epoch > 1, grows_from: None },
        grant: Grant { epoch: Epoch(epoch), predecessor: Epoch(epoch - 1), predecessor_end },
    }
}

fn by(node: &str, by: By) -> Taker {
    Taker { node: node.parse().unwrap(), incarnation: Incarnation(1), by }
}

fn instance(node: &str) -> Taker {
    by(node, By::Instance(InstanceId::generate()))
}

fn mover(node: &str) -> Taker {
    by(node, By::Operation(Operation::Move))
}

/// The whole of it: copied, made the object, used in the new pool, removed in the old one.
#[test]
fn a_moved_object_is_used_where_it_is_and_gone_where_it_was() {
    let setup = Setup::new();
    setup.run("a", 2, PredecessorEnd::Released).unwrap();
    setup.assert_copied("moved");
    assert!(setup.files("old").contains(&"holder.2".to_owned()), "{:?}", setup.files("old"));
    let a = setup.on("a");
    let (old, new) = (a.get(&id("old")).unwrap(), a.get(&id("new")).unwrap());
    // Nobody else can use either of them meanwhile.
    for pool in [old, new] {
        let granted = object(pool.id().as_str(), 3, PredecessorEnd::Released);
        assert!(pool.take(&granted, &instance("b")).is_err());
    }
    let moved = object("new", 2, PredecessorEnd::Released);
    assert_eq!(new.confirm_not_taken(&moved, |_| true).unwrap(), v1::ObjectUse::Held, "it goes on");
    assert_eq!(new.confirm_not_taken(&moved, |_| false).unwrap(), v1::ObjectUse::Released);
    assert_eq!(setup.files("new"), ["holder.2", "holder.2.released", "holder.3.refused", "image.raw"]);
    new.take(&object("new", 4, PredecessorEnd::Refused), &instance("b")).unwrap();
    // The old copy has seen a later grant that came to nothing, and so a later discard.
    assert!(old.discard_copy(&uid(), Epoch(2)).is_err());
    old.discard_copy(&uid(), Epoch(3)).unwrap();
    assert!(!setup.object_dir("old").exists());
    old.discard_copy(&uid(), Epoch(3)).unwrap();
    // What is the object is never taken for a copy, whatever is asked.
    let error = new.discard_copy(&uid(), Epoch(9)).unwrap_err();
    assert!(matches!(error, PoolError::NotACopy { .. }), "{error}");
}

#[test]
fn a_move_that_is_given_up_leaves_the_object_where_it_is() {
    let setup = Setup::new();
    setup.run("a", 2, PredecessorEnd::Released).unwrap();
    let a = setup.on("a");
    let (old, new) = (a.get(&id("old")).unwrap(), a.get(&id("new")).unwrap());
    new.discard_copy(&uid(), Epoch(2)).unwrap();
    assert!(!setup.object_dir("new").exists());
    old.confirm_not_taken(&object("old", 2, PredecessorEnd::Released), |_| false).unwrap();
    let error = old.discard_copy(&uid(), Epoch(2)).unwrap_err();
    assert!(matches!(error, PoolError::NotACopy { problem: NotACopy::IsTheObject(_), .. }), "{error}");
    // A late order finds the grant closed.
    assert!(matches!(setup.run("a", 2, PredecessorEnd::Released), Err(MoveError::Conflict { .. })));
    assert!(!setup.object_dir("new").exists());
    old.take(&object("old", 3, PredecessorEnd::Released), &instance("b")).unwrap();
}

/// How far a killed one has come.
type Step<'a> = (&'a str, Box<dyn Fn(&Setup) + 'a>);

/// Killed between any two steps: the same order ends it.
#[test]
fn a_move_that_was_killed_anywhere_is_taken_up() {
    let node: NodeId = "a".parse().unwrap();
    let record = || Record { taker: Some(mover("a")), grant: object("old", 2, PredecessorEnd::Released).grant };
    let copied = |setup: &Setup, name: &str| {
        fs::copy(setup.image("old"), setup.object_dir("new").join(name)).unwrap();
    };
    let source = |setup: &Setup| assert!(write(&setup.object_dir("old"), &node, Kind::Taken, &record()).unwrap());
    let both = |setup: &Setup| {
        source(setup);
        fs::create_dir(setup.object_dir("new")).unwrap();
        assert!(write(&setup.object_dir("new"), &node, Kind::Taken, &record()).unwrap());
    };
    let steps: Vec<Step<'_>> = vec![
        ("taken in the old pool", Box::new(|setup| source(setup))),
        ("taken in both", Box::new(|setup| both(setup))),
        (
            "half a copy and no journal",
            Box::new(|setup| {
                both(setup);
                let copy = fs::File::create(setup.object_dir("new").join("image.raw.moving.2")).unwrap();
                // Where the image has a hole.
                copy.write_all_at(b"of an earlier try", 40 << 20).unwrap();
            }),
        ),
        (
            "half a copy with its journal",
            Box::new(|setup| {
                both(setup);
                copied(setup, "image.raw.moving.2");
                let copy = OpenOptions::new().write(true).open(setup.object_dir("new").join("image.raw.moving.2"));
                copy.unwrap().write_all_at(&[9; 4096], (64 << 20) - 4096).unwrap();
                setup.journal(18 << 20, false).write(&setup.object_dir("new")).unwrap();
            }),
        ),
        (
            "a whole copy without its name",
            Box::new(|setup| {
                both(setup);
                copied(setup, "image.raw.moving.2");
                setup.journal(64 << 20, true).write(&setup.object_dir("new")).unwrap();
            }),
        ),
        (
            "with both names",
            Box::new(|setup| {
                both(setup);
                copied(setup, "image.raw.moving.2");
                let dir = setup.object_dir("new");
                fs::hard_link(dir.join("image.raw.moving.2"), dir.join("image.raw")).unwrap();
                setup.journal(64 << 20, true).write(&dir).unwrap();
            }),
        ),
        (
            "with both names and a journal that is damaged",
            Box::new(|setup| {
                both(setup);
                copied(setup, "image.raw.moving.2");
                let dir = setup.object_dir("new");
                fs::hard_link(dir.join("image.raw.moving.2"), dir.join("image.raw")).unwrap();
                fs::write(dir.join("image.raw.moving.2.json"), "{").unwrap();
            }),
        ),
        (
            "done, and nobody heard of it",
            Box::new(|setup| {
                both(setup);
                copied(setup, "image.raw");
                setup.journal(64 << 20, true).write(&setup.object_dir("new")).unwrap();
            }),
        ),
        (
            "a journal that is damaged",
            Box::new(|setup| {
                both(setup);
                copied(setup, "image.raw.moving.2");
                fs::write(setup.object_dir("new").join("image.raw.moving.2.json"), "{").unwrap();
            }),
        ),
    ];
    for (what, step) in steps {
        let setup = Setup::new();
        step(&setup);
        setup.run("a", 2, PredecessorEnd::Released).unwrap_or_else(|error| panic!("{what}: {error}"));
        setup.assert_copied(what);
        setup.run("a", 2, PredecessorEnd::Released).unwrap_or_else(|error| panic!("{what}, again: {error}"));
        setup.assert_copied(what);
    }
}

/// What a daemon of before has copied is not believed in: nothing gets the name that was not read back as a whole.
#[test]
fn a_move_that_is_taken_up_compares_what_was_copied_before_too() {
    for (what, done, complete, at) in [
        ("before the journal's mark", 18 << 20, false, 17 << 20),
        ("where there is a hole", 18 << 20, false, 10 << 20),
        ("in a whole copy", 64 << 20, true, 17 << 20),
    ] {
        let setup = Setup::new();
        let record = Record { taker: Some(mover("a")), grant: object("old", 2, PredecessorEnd::Released).grant };
        let dir = setup.object_dir("new");
        fs::create_dir(&dir).unwrap();
        for pool in ["old", "new"] {
            assert!(write(&setup.object_dir(pool), &"a".parse().unwrap(), Kind::Taken, &record).unwrap());
        }
        let copy = dir.join("image.raw.moving.2");
        fs::copy(setup.image("old"), &copy).unwrap();
        OpenOptions::new().write(true).open(&copy).unwrap().write_all_at(b"damaged", at).unwrap();
        setup.journal(done, complete).write(&dir).unwrap();
        let error = setup.run("a", 2, PredecessorEnd::Released).unwrap_err();
        assert!(matches!(error, MoveError::Copy { source: CopyError::Differs, .. }), "{what}: {error}");
        assert!(!setup.image("new").exists(), "{what}");
        // It is given up, and asked for again.
        let a = setup.on("a");
        a.get(&id("new")).unwrap().discard_copy(&uid(), Epoch(2)).unwrap();
        let granted = object("old", 2, PredecessorEnd::Released);
        a.get(&id("old")).unwrap().confirm_not_taken(&granted, |_| false).unwrap();
        setup.run("a", 3, PredecessorEnd::Released).unwrap_or_else(|error| panic!("{what}, again: {error}"));
        setup.assert_copied(what);
    }
}

/// The move of epoch 2 is taken in both pools, and the new one has an image which that move has not named.
fn interrupted_beside_an_image(setup: &Setup) {
    let (a, granted, taker, progress) =
        (setup.on("a"), object("old", 2, PredecessorEnd::Released), mover("a"), Progress::default());
    let (from, to) = (a.get(&id("old")).unwrap(), a.get(&id("new")).unwrap());
    let moving = Moving { from, to, granted: &granted, taker: &taker, progress: &progress };
    let (_, size) = moving.take_source().unwrap();
    moving.take_target(size).unwrap();
    fs::write(setup.image("new"), "of another one").unwrap();
}

#[test]
fn a_move_never_goes_on_from_a_journal_whose_copy_is_gone() {
    let setup = Setup::new();
    interrupted_beside_an_image(&setup);
    // Somebody who was slow to die has named its copy, and this one was killed when it had a part of its own.
    let dir = setup.object_dir("new");
    fs::copy(setup.image("old"), dir.join("image.raw.moving.2")).unwrap();
    let mut journal = Journal::new(id("old"), Epoch(2), 64 << 20);
    journal.done = 18 << 20;
    journal.write(&dir).unwrap();
    let before = setup.files("new");
    assert!(matches!(setup.run("a", 2, PredecessorEnd::Released), Err(MoveError::Occupied { .. })));
    assert_eq!(setup.files("new"), before, "nothing is touched");
    // The move has failed, what is there goes, and it is asked for again.
    let a = setup.on("a");
    a.get(&id("new")).unwrap().discard_copy(&uid(), Epoch(2)).unwrap();
    let granted = object("old", 2, PredecessorEnd::Released);
    a.get(&id("old")).unwrap().confirm_not_taken(&granted, |_| false).unwrap();
    setup.run("a", 3, PredecessorEnd::Released).unwrap();
    setup.assert_copied("again");

    // The copy goes between the look at the journal and the copying.
    let setup = Setup::new();
    let (a, granted, taker, progress) =
        (setup.on("a"), object("old", 2, PredecessorEnd::Released), mover("a"), Progress::default());
    let (from, to) = (a.get(&id("old")).unwrap(), a.get(&id("new")).unwrap());
    let moving = Moving { from, to, granted: &granted, taker: &taker, progress: &progress };
    let (source, size) = moving.take_source().unwrap();
    moving.take_target(size).unwrap();
    assert!(matches!(moving.copy(&source, &mut journal), Err(MoveError::Image(ImageError::Io { .. }))));
    assert!(!setup.files("new").contains(&"image.raw.moving.2".to_owned()));
}

#[test]
fn an_order_that_comes_after_the_commit_does_not_touch_what_is_the_object_now() {
    let setup = Setup::new();
    setup.run("a", 2, PredecessorEnd::Released).unwrap();
    let inode = fs::metadata(setup.image("new")).unwrap().ino();
    // Killed on the way to the record of the release: the journal is gone already.
    journal::clear(&setup.object_dir("new"), |of| of <= Epoch(2)).unwrap();
    assert!(matches!(setup.run("a", 2, PredecessorEnd::Released), Err(MoveError::Occupied { .. })));
    assert_eq!(fs::metadata(setup.image("new")).unwrap().ino(), inode);
    assert_eq!(setup.files("new"), ["holder.2", "image.raw"]);
}

#[test]
fn another_node_begins_anew_where_the_first_one_died() {
    let setup = Setup::new();
    setup.run("a", 2, PredecessorEnd::Released).unwrap();
    let stale = OpenOptions::new().write(true).open(setup.image("new")).unwrap();
    stale.write_all_at(&[9; 4096], 0).unwrap();
    setup.run("b", 3, PredecessorEnd::Isolated).unwrap();
    setup.assert_copied("by b");
    // The first one wakes up, and has nothing to say any more.
    assert!(matches!(setup.run("a", 2, PredecessorEnd::Released), Err(MoveError::Conflict { .. })));
    setup.assert_copied("by b, after a");
}

/// Moved there in epoch 2 by a; a is taken for dead, b does it again and makes it the object, and c uses it.
fn moved_by_another(setup: &Setup) {
    setup.run("a", 2, PredecessorEnd::Released).unwrap();
    setup.run("b", 3, PredecessorEnd::Isolated).unwrap();
    let b = setup.on("b");
    let new = b.get(&id("new")).unwrap();
    let moved = object("new", 3, PredecessorEnd::Isolated);
    assert_eq!(new.confirm_not_taken(&moved, |_| false).unwrap(), v1::ObjectUse::Released);
    b.get(&id("old")).unwrap().discard_copy(&uid(), Epoch(3)).unwrap();
}

#[test]
fn a_mover_that_was_slow_to_die_gives_its_copy_no_name_that_is_taken() {
    let setup = Setup::new();
    moved_by_another(&setup);
    let inode = fs::metadata(setup.image("new")).unwrap().ino();
    fs::write(setup.object_dir("new").join("image.raw.moving.2"), "a copy of long ago").unwrap();
    let (a, granted, taker, progress) =
        (setup.on("a"), object("old", 2, PredecessorEnd::Released), mover("a"), Progress::default());
    let (from, to) = (a.get(&id("old")).unwrap(), a.get(&id("new")).unwrap());
    let moving = Moving { from, to, granted: &granted, taker: &taker, progress: &progress };
    let mut journal = Journal::new(id("old"), Epoch(2), 64 << 20);
    journal.complete = true;
    // It has seen that its grant stands, and goes on only now.
    assert!(matches!(moving.link(&mut journal), Err(MoveError::Occupied { .. })));
    // The same where it clears away what came before it.
    fs::write(setup.object_dir("new").join("image.raw.moving.3"), "a copy of now").unwrap();
    journal::clear(&setup.object_dir("new"), |of| of < Epoch(2)).unwrap();
    assert!(setup.files("new").contains(&"image.raw.moving.3".to_owned()));
    assert_eq!(fs::metadata(setup.image("new")).unwrap().ino(), inode);
}

#[test]
fn a_move_stops_when_one_of_its_pools_is_declared_lost() {
    for lost in ["old", "new"] {
        let setup = Setup::new();
        let (a, granted, taker, progress) =
            (setup.on("a"), object("old", 2, PredecessorEnd::Released), mover("a"), Progress::default());
        let (from, to) = (a.get(&id("old")).unwrap(), a.get(&id("new")).unwrap());
        let moving = Moving { from, to, granted: &granted, taker: &taker, progress: &progress };
        let (source, size) = moving.take_source().unwrap();
        let mut journal = moving.take_target(size).unwrap();
        let before = setup.files("new");
        // While it runs.
        a.declare_lost(&[id(lost)].into());
        let error = moving.copy(&source, &mut journal).unwrap_err();
        assert!(
            matches!(&error, MoveError::Copy { source: CopyError::Lost(pool), .. } if pool.as_str() == lost),
            "{error}"
        );
        assert!(setup.files("new").iter().all(|name| before.contains(name) || name == "image.raw.moving.2"));
        let copy = fs::metadata(setup.object_dir("new").join("image.raw.moving.2"));
        assert!(copy.map_or(0, |copy| copy.blocks()) == 0, "{lost}: nothing is written");
    }
}

#[test]
fn an_image_that_no_move_has_made_is_left_alone() {
    let setup = Setup::new();
    fs::create_dir(setup.object_dir("new")).unwrap();
    fs::write(setup.image("new"), "precious").unwrap();
    assert!(matches!(setup.run("a", 2, PredecessorEnd::Released), Err(MoveError::Occupied { .. })));
    assert_eq!(setup.files("new"), ["image.raw"]);
    let a = setup.on("a");
    let error = a.get(&id("new")).unwrap().discard_copy(&uid(), Epoch(9)).unwrap_err();
    assert!(matches!(error, PoolError::NotACopy { problem: NotACopy::NoRecord, .. }), "{error}");
}
