//! What is put aside to be removed, and who finds it.

use super::*;

/// As somebody who was slow to die, and whose daemon has ended then.
fn put_aside(pool: &Pool) {
    let dir = pool.object_dir(&uid());
    fs::rename(&dir, dir.with_file_name(format!(".discard.{UID}.2.01ARZ3NDEKTSV4RRFFQ69G5FAV"))).unwrap();
}

#[test]
fn a_remover_that_was_slow_to_die_removes_nothing_that_is_the_object() {
    let setup = Setup::new();
    moved_by_another(&setup);
    let inode = fs::metadata(setup.image("new")).unwrap().ino();
    let a = setup.on("a");
    let new = a.get(&id("new")).unwrap();
    // It has judged its own copy, which was one, and goes on only now.
    let error = new.put_aside(&uid(), Epoch(2)).unwrap_err();
    assert!(matches!(error, PoolError::NotACopy { problem: NotACopy::Newer(Epoch(3)), .. }), "{error}");
    assert_eq!(fs::metadata(setup.image("new")).unwrap().ino(), inode);
    assert_eq!(setup.files("new"), ["holder.3", "holder.3.released", "image.raw"]);
    let names: Vec<_> = fs::read_dir(setup.dir.path().join("new").join(marker::OBJECTS)).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    let c = setup.on("c");
    c.get(&id("new")).unwrap().take(&object("new", 4, PredecessorEnd::Released), &instance("c")).unwrap();
    assert_eq!(setup.files("new"), ["holder.4", "image.raw"]);
}

#[test]
fn what_a_killed_daemon_has_put_aside_is_judged_by_its_records_too() {
    let setup = Setup::new();
    moved_by_another(&setup);
    let (a, objects) = (setup.on("a"), setup.dir.path().join("new").join(marker::OBJECTS));
    let new = a.get(&id("new")).unwrap();
    let aside = |epoch: u64| objects.join(format!(".discard.{UID}.{epoch}.01ARZ3NDEKTSV4RRFFQ69G5FAV"));
    fs::rename(setup.object_dir("new"), aside(2)).unwrap();
    let error = new.discard_copy(&uid(), Epoch(2)).unwrap_err();
    assert!(matches!(error, PoolError::NotACopy { .. }), "{error}");

    let setup = Setup::new();
    setup.run("a", 2, PredecessorEnd::Released).unwrap();
    let (a, objects) = (setup.on("a"), setup.dir.path().join("new").join(marker::OBJECTS));
    fs::rename(setup.object_dir("new"), objects.join(format!(".discard.{UID}.2.01ARZ3NDEKTSV4RRFFQ69G5FAV"))).unwrap();
    a.get(&id("new")).unwrap().discard_copy(&uid(), Epoch(2)).unwrap();
    assert_eq!(fs::read_dir(&objects).unwrap().count(), 0, "the copy is gone");
}

/// What somebody does who misses the object.
type Missed<'a> = (&'a str, Box<dyn Fn(&Pool) + 'a>);

#[test]
fn what_was_put_aside_and_is_the_object_is_found_by_whoever_misses_it() {
    let holder = instance("c");
    let granted = |epoch: u64| object("new", epoch, PredecessorEnd::Released);
    let held: Vec<Missed<'_>> = vec![
        (
            "taken again",
            Box::new(|pool| {
                pool.take(&granted(4), &holder).unwrap();
            }),
        ),
        (
            "released, and given to the next",
            Box::new(|pool| {
                pool.release(&uid(), Epoch(4)).unwrap();
                pool.take(&granted(5), &instance("c")).unwrap();
            }),
        ),
        ("closed", Box::new(|pool| assert_eq!(pool.close(&granted(4), &holder).unwrap(), v1::ObjectUse::Released))),
        (
            "asked for",
            Box::new(|pool| {
                assert_eq!(pool.confirm_not_taken(&granted(4), |_| true).unwrap(), v1::ObjectUse::Held);
            }),
        ),
    ];
    let inode = |setup: &Setup| fs::metadata(setup.image("new")).ok().map(|image| image.ino());
    for (what, miss) in held {
        let setup = Setup::new();
        moved_by_another(&setup);
        let c = setup.on("c");
        let pool = c.get(&id("new")).unwrap();
        pool.take(&granted(4), &holder).unwrap();
        let before = inode(&setup);
        put_aside(pool);
        assert_eq!(inode(&setup), None);
        miss(pool);
        assert_eq!(inode(&setup), before, "{what}");
    }
}

/// A control plane that was put back goes by what a node says that its pools have.
#[test]
fn what_was_put_aside_and_is_the_object_is_among_the_objects_of_the_pool() {
    let setup = Setup::new();
    moved_by_another(&setup);
    let c = setup.on("c");
    let new = c.get(&id("new")).unwrap();
    new.take(&object("new", 4, PredecessorEnd::Released), &instance("c")).unwrap();
    let objects = || new.objects().unwrap();
    let there = objects();
    assert_eq!((there.len(), there[0].highest, there[0].size), (1, Epoch(4), Some(Bytes::mib(64))));
    put_aside(new);
    assert_eq!(objects(), there);
    // Somebody was granted it meanwhile, and found nothing.
    fs::create_dir(setup.object_dir("new")).unwrap();
    let grant = object("new", 5, PredecessorEnd::Released).grant;
    let refusal = Record { taker: None, grant };
    assert!(write(&setup.object_dir("new"), &"a".parse().unwrap(), Kind::Refused, &refusal).unwrap());
    let [found] = objects().try_into().unwrap();
    assert_eq!((found.highest, &found.last, found.size), (Epoch(5), &there[0].last, Some(Bytes::mib(64))));

    let setup = Setup::new();
    setup.run("a", 2, PredecessorEnd::Released).unwrap();
    let a = setup.on("a");
    let new = a.get(&id("new")).unwrap();
    put_aside(new);
    assert_eq!(new.objects().unwrap(), [], "a copy is none");
}

/// Each as it is for somebody who has listed the names before.
#[test]
fn an_object_that_goes_aside_or_back_while_it_is_looked_for_is_found() {
    let setup = Setup::new();
    moved_by_another(&setup);
    let c = setup.on("c");
    let new = c.get(&id("new")).unwrap();
    new.take(&object("new", 4, PredecessorEnd::Released), &instance("c")).unwrap();
    let there = new.objects().unwrap().pop();
    assert_eq!(there.as_ref().map(|object| object.highest), Some(Epoch(4)));
    assert_eq!(new.find(&uid(), true).unwrap(), there, "it was seen aside, and is back");
    put_aside(new);
    assert_eq!(new.find(&uid(), false).unwrap(), there, "it was seen in its place, and is aside");
    fs::remove_dir_all(setup.dir.path().join("new").join(marker::OBJECTS)).unwrap();
    fs::create_dir(setup.dir.path().join("new").join(marker::OBJECTS)).unwrap();
    assert_eq!((new.find(&uid(), false).unwrap(), new.find(&uid(), true).unwrap()), (None, None), "it is gone");
}

#[test]
fn what_was_put_aside_is_moved_all_the_same() {
    let setup = Setup::new();
    moved_by_another(&setup);
    let c = setup.on("c");
    put_aside(c.get(&id("new")).unwrap());
    let granted = object("new", 4, PredecessorEnd::Released);
    c.move_object(&granted, &id("old"), &mover("c"), &Progress::default()).unwrap();
    setup.assert_copied("moved back");
}

#[test]
fn what_was_put_aside_is_deleted_with_its_object() {
    let setup = Setup::new();
    moved_by_another(&setup);
    let (c, objects) = (setup.on("c"), setup.dir.path().join("new").join(marker::OBJECTS));
    let new = c.get(&id("new")).unwrap();
    put_aside(new);
    let deletion = by("c", By::Operation(Operation::Deletion));
    new.delete(&object("new", 4, PredecessorEnd::Released), &deletion).unwrap();
    assert_eq!(fs::read_dir(&objects).unwrap().count(), 0, "the object itself");
    let setup = Setup::new();
    setup.run("a", 2, PredecessorEnd::Released).unwrap();
    let (c, objects) = (setup.on("c"), setup.dir.path().join("new").join(marker::OBJECTS));
    let new = c.get(&id("new")).unwrap();
    put_aside(new);
    new.delete(&object("new", 3, PredecessorEnd::Released), &deletion).unwrap();
    assert_eq!(fs::read_dir(&objects).unwrap().count(), 0, "a copy");
}

/// What a killed one has done.
type Kill = fn(&Setup);

#[test]
fn a_removal_that_was_killed_anywhere_is_taken_up() {
    let steps: [(&str, Kill); 3] = [
        ("the image is gone", |setup| fs::remove_file(setup.image("new")).unwrap()),
        ("the records are gone too", |setup| {
            fs::remove_file(setup.image("new")).unwrap();
            fs::remove_file(setup.object_dir("new").join("holder.2")).unwrap();
        }),
        ("everything is gone", |setup| fs::remove_dir_all(setup.object_dir("new")).unwrap()),
    ];
    for (what, step) in steps {
        let setup = Setup::new();
        setup.run("a", 2, PredecessorEnd::Released).unwrap();
        step(&setup);
        let a = setup.on("a");
        a.get(&id("new")).unwrap().discard_copy(&uid(), Epoch(2)).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(!setup.object_dir("new").exists(), "{what}");
    }
}
