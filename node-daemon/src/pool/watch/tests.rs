use std::{
    fs,
    path::Path,
    sync::mpsc::{Sender, channel},
    time::Instant,
};

use kibo_crds::Incarnation;
use kibo_protocol::v1;

use super::*;
use crate::{
    durable,
    pool::{fence, init},
};

const UID: &str = "6f9619ff-8b86-d011-b42d-00c04fc964ff";
const SOON: Duration = Duration::from_secs(60);

/// What is done to a guest.
struct Told(Mutex<Sender<String>>);

impl Told {
    fn tell(&self, words: String) {
        let _ = self.0.lock().unwrap().send(words);
    }
}

impl Grip for Told {
    fn freeze(&self, _: &PoolId, problem: &str) {
        self.tell(format!("freeze: {problem}"));
    }

    fn thaw(&self) {
        self.tell("thaw".to_owned());
    }

    fn kill(&self, _: &PoolId, why: &str, stood_still: bool) {
        self.tell(format!("kill: {why}{}", if stood_still { ", it stood still" } else { "" }));
    }
}

fn launch() -> Launch {
    let object = v1::Object {
        uid: UID.to_owned(),
        pool: "p".to_owned(),
        size_bytes: 64 << 20,
        must_exist: false,
        grant: Some(v1::Grant { epoch: 1, predecessor_epoch: 0, predecessor_end: v1::PredecessorEnd::None.into() }),
        ..v1::Object::default()
    };
    let message = v1::Launch {
        instance_id: InstanceId::generate().to_string(),
        workspace: Some(v1::WorkspaceRef::default()),
        cpu_milli: 1000,
        memory_bytes: 64 << 20,
        allocated_memory_bytes: 64 << 20,
        root_image: "debian".to_owned(),
        layer: Some(object),
        ..v1::Launch::default()
    };
    Launch::read(message, "a".parse().unwrap(), Incarnation(3)).unwrap()
}

struct Setup {
    dir: tempfile::TempDir,
    watch: Watch,
    told: Receiver<String>,
    registration: Registration,
}

impl Setup {
    fn new(freeze_after: Duration) -> Self {
        let (dir, id): (_, PoolId) = (tempfile::tempdir().unwrap(), "p".parse().unwrap());
        let marker = init(dir.path(), &id).unwrap();
        let node: NodeId = "a".parse().unwrap();
        fence::sign_in(dir.path(), &node).unwrap();
        let place = Place { id, path: dir.path().to_owned(), uid: Arc::new(OnceLock::from(marker.uid)) };
        let watch = Watch::start([place], &node, freeze_after).unwrap();
        let (sender, told) = channel();
        let registration = watch.register(&launch(), Arc::new(Told(Mutex::new(sender))), false);
        Self { dir, watch, told, registration }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn hears(&self) -> String {
        self.told.recv_timeout(SOON).expect("nothing is done to the guest")
    }

    /// Makes a directory with the record of what is held.
    fn take_in(&self, dir: &Path) {
        let made = dir.with_file_name("made");
        fs::create_dir(&made).unwrap();
        let taker = self.watch.lock().values().next().unwrap().taker.clone();
        let grant = crate::launch::Grant {
            epoch: kibo_crds::Epoch(1),
            predecessor: kibo_crds::Epoch(0),
            predecessor_end: crate::launch::PredecessorEnd::None,
        };
        let record = crate::pool::records::Record { taker: Some(taker), grant };
        crate::pool::record_files::write(&made, &"a".parse().unwrap(), crate::pool::record_files::Kind::Taken, &record)
            .unwrap();
        fs::rename(made, dir).unwrap();
    }

    fn isolate(&self, incarnation: u64) {
        fence::mark(self.path(), &"a".parse().unwrap(), Incarnation(incarnation), &"b".parse().unwrap()).unwrap();
    }
}

#[test]
fn a_mark_kills_within_the_bound_and_an_older_one_does_nothing() {
    let setup = Setup::new(SOON * 10);
    setup.isolate(2);
    let begun = Instant::now();
    setup.isolate(3);
    assert_eq!(setup.hears(), "kill: incarnation 3 of this node was isolated");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    // Its VM is just being started: it must not run either.
    setup.registration.runs();
    assert!(setup.hears().starts_with("kill"));
}

#[test]
fn a_pool_without_its_marker_freezes_and_its_return_is_a_proof_only_with_the_record() {
    let setup = Setup::new(Duration::from_secs(3));
    setup.registration.runs();
    let marker = setup.path().join("kibotos-pool.json");
    let content = fs::read(&marker).unwrap();
    fs::remove_file(&marker).unwrap();
    assert!(setup.hears().contains("is not a storage pool"));
    // Another pool in its place.
    let other = String::from_utf8(content.clone()).unwrap().replace("\"uid\": \"", "\"uid\": \"x");
    durable::replace(&marker, other.as_bytes()).unwrap();
    assert!(setup.hears().contains("another pool"));
    durable::replace(&marker, &content).unwrap();
    assert!(setup.hears().contains("the record of epoch 1 is gone"));
    setup.take_in(&setup.path().join("objects").join(UID));
    assert_eq!(setup.hears(), "thaw");
    // Frozen again, and what it held was given away meanwhile.
    let marker = setup.path().join("kibotos-pool.json");
    let content = fs::read(&marker).unwrap();
    fs::remove_file(&marker).unwrap();
    assert!(setup.hears().starts_with("freeze"));
    setup.isolate(3);
    durable::replace(&marker, &content).unwrap();
    let told = setup.hears();
    assert!(told.starts_with("kill") && told.ends_with("it stood still"), "{told}");
}

#[test]
fn whose_disk_was_put_aside_by_mistake_goes_on() {
    let setup = Setup::new(Duration::from_secs(1));
    setup.registration.runs();
    assert!(setup.hears().contains("the record of epoch 1 is gone"));
    setup.take_in(&setup.path().join("objects").join(format!(".discard.{UID}.1.01ARZ3NDEKTSV4RRFFQ69G5FAV")));
    assert_eq!(setup.hears(), "thaw");
    assert!(setup.path().join("objects").join(UID).join("holder.1").exists());
}

#[test]
fn who_has_gone_is_not_stopped_any_more() {
    let Setup { dir, watch, told, registration } = Setup::new(SOON * 10);
    drop(registration);
    fence::mark(dir.path(), &"a".parse().unwrap(), Incarnation(3), &"b".parse().unwrap()).unwrap();
    assert!(told.recv_timeout(SOON).is_err(), "its sender is gone with it");
    drop(watch);
}

#[test]
fn an_earlier_registration_does_not_end_a_later_one() {
    let setup = Setup::new(SOON * 10);
    let (sender, told) = channel();
    let (instance, taker) = {
        let users = setup.watch.lock();
        users.iter().map(|(instance, user)| (*instance, user.taker.clone())).next().unwrap()
    };
    let later = setup.watch.register_unclear(instance, taker, Arc::new(Told(Mutex::new(sender))), false);
    drop(setup.registration);
    fence::mark(setup.dir.path(), &"a".parse().unwrap(), Incarnation(3), &"b".parse().unwrap()).unwrap();
    assert!(told.recv_timeout(SOON).unwrap().starts_with("kill"));
    drop(later);
}
