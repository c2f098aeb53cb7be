//! Disks go into an archive and come out of it as they were; whatever goes wrong leaves nothing.

use std::{
    fs::{self, OpenOptions},
    io::{BufRead, BufReader},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    time::SystemTime,
};

use kibo_archive::{Description, Origin, Prefix};
use kibo_crds::{Incarnation, InstanceId, NodeId};

use super::*;
use crate::{
    config::{FenceConfig, PoolConfig},
    launch::{By, Grant, Object, Operation, PredecessorEnd},
    pool::{init, marker},
};

const LAYER: &str = "6f9619ff-8b86-d011-b42d-00c04fc964ff";
const VOLUME: &str = "6f9619ff-8b86-d011-b42d-00c04fc964f0";
const NEW_LAYER: &str = "6f9619ff-8b86-d011-b42d-00c04fc964f1";
const NEW_VOLUME: &str = "6f9619ff-8b86-d011-b42d-00c04fc964f2";
const SIZE: Bytes = Bytes::mib(64);

struct Setup {
    dir: tempfile::TempDir,
    pools: Pools,
}

/// A file, how much of it is there, and when it was written last.
type Written = (PathBuf, u64, SystemTime);

fn id() -> PoolId {
    "p".parse().unwrap()
}

fn node() -> NodeId {
    "a".parse().unwrap()
}

fn taker(by: By) -> Taker {
    Taker { node: node(), incarnation: Incarnation(1), by }
}

fn transfer() -> Taker {
    taker(By::Operation(Operation::Transfer))
}

fn granted(uid: &str, epoch: u64, must_exist: bool) -> GrantedObject {
    let predecessor_end = if epoch == 1 { PredecessorEnd::None } else { PredecessorEnd::Released };
    GrantedObject {
        object: Object { uid: uid.parse().unwrap(), pool: id(), size: SIZE, must_exist, grows_from: None },
        grant: Grant { epoch: Epoch(epoch), predecessor: Epoch(epoch - 1), predecessor_end },
    }
}

fn disks(layer: &str, volume: Option<&str>, epoch: u64, must_exist: bool) -> Disks {
    let volume = volume.map(|uid| granted(uid, epoch, must_exist));
    Disks { layer: granted(layer, epoch, must_exist), volume }
}

fn description() -> Description {
    Description {
        exported_at: "2026-11-30T09:00:00Z".to_owned(),
        origin: Origin::default(),
        labels: std::collections::BTreeMap::new(),
        spec: serde_json::from_str(r#"{"template":"t","volume":{"claim":"v","mountPath":"/v"}}"#).unwrap(),
        root_image: None,
        layer: Bytes::default(),
        volume: None,
        data: Bytes::default(),
    }
}

impl Setup {
    /// A pool with a layer and a Volume that were used in epoch 1 and have data.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        init(dir.path(), &id()).unwrap();
        let config = PoolConfig { id: id(), path: dir.path().to_owned(), default: true };
        let setup = Self { pools: Pools::open(&[config], FenceConfig::default(), &node()).unwrap(), dir };
        for (uid, byte) in [(LAYER, 5), (VOLUME, 6)] {
            let pool = setup.pools.get(&id()).unwrap();
            let taken = pool.take(&granted(uid, 1, false), &taker(By::Instance(InstanceId::generate()))).unwrap();
            let image = OpenOptions::new().write(true).open(setup.image(uid)).unwrap();
            for at in [9 << 20, 40 << 20] {
                image.write_all_at(&vec![byte; 3 << 20], at).unwrap();
            }
            drop(taken.image);
            pool.release(&taken.uid, taken.epoch).unwrap();
        }
        setup
    }

    fn dir(&self, uid: &str) -> PathBuf {
        self.dir.path().join(marker::OBJECTS).join(uid)
    }

    fn image(&self, uid: &str) -> PathBuf {
        self.dir(uid).join(IMAGE)
    }

    fn files(&self, uid: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.dir(uid)) else { return Vec::new() };
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn export(&self, epoch: u64) -> Result<Vec<u8>, TransferError> {
        let mut archive = Vec::new();
        let disks = disks(LAYER, Some(VOLUME), epoch, true);
        self.pools.export(&disks, description(), &transfer(), &CancellationToken::new(), &mut archive)?;
        Ok(archive)
    }

    fn import(&self, epoch: u64, archive: &[u8]) -> Result<(), TransferError> {
        let digest = Prefix::read(archive).ok().flatten().map(|prefix| prefix.digest().to_vec()).unwrap_or_default();
        self.import_as(&disks(NEW_LAYER, Some(NEW_VOLUME), epoch, false), &digest, archive)
    }

    fn import_as(&self, disks: &Disks, digest: &[u8], archive: &[u8]) -> Result<(), TransferError> {
        self.pools.import(disks, digest, &transfer(), &CancellationToken::new(), BufReader::new(archive))
    }

    /// All that is there of objects.
    fn written(&self) -> Vec<Written> {
        let mut found = Vec::new();
        for uid in [LAYER, VOLUME, NEW_LAYER, NEW_VOLUME] {
            for name in self.files(uid) {
                let path = self.dir(uid).join(name);
                let metadata = fs::metadata(&path).unwrap();
                found.push((path, metadata.blocks(), metadata.modified().unwrap()));
            }
        }
        found
    }

    /// Only records, and none that is open.
    fn assert_nothing_left(&self, what: &str) {
        for uid in [NEW_LAYER, NEW_VOLUME] {
            let files = self.files(uid);
            assert!(files.iter().all(|name| name.starts_with("holder.")), "{what}: {files:?}");
            let records = self.pools.get(&id()).unwrap().list(&uid.parse().unwrap()).unwrap();
            assert!(records.last_taken().is_none_or(|last| !last.holds), "{what}: {records:?}");
        }
    }
}

#[test]
fn disks_come_out_as_they_went_in_and_their_grants_are_closed() {
    let setup = Setup::new();
    let archive = setup.export(2).unwrap();
    assert!(archive.len() < 1 << 20, "{} bytes", archive.len());
    let described = Prefix::read(&archive).unwrap().unwrap().description;
    assert_eq!((described.layer, described.volume), (SIZE, Some(SIZE)));
    setup.import(1, &archive).unwrap();
    for (old, new) in [(LAYER, NEW_LAYER), (VOLUME, NEW_VOLUME)] {
        assert!(fs::read(setup.image(old)).unwrap() == fs::read(setup.image(new)).unwrap());
        assert_eq!(setup.files(new), ["holder.1", "holder.1.released", IMAGE]);
        assert!(setup.files(old).contains(&"holder.2.released".to_owned()), "{:?}", setup.files(old));
        let (old, new) = (fs::metadata(setup.image(old)).unwrap(), fs::metadata(setup.image(new)).unwrap());
        assert!(new.blocks() <= old.blocks(), "{} and {}: zeros were written", new.blocks(), old.blocks());
        assert_eq!(new.mode() & 0o777, 0o600);
    }
}

#[test]
fn an_archive_that_is_not_whole_leaves_nothing() {
    let setup = Setup::new();
    let archive = setup.export(2).unwrap();
    let truncated = &archive[..archive.len() - 5];
    assert!(matches!(setup.import(1, truncated), Err(TransferError::Archive(ArchiveError::Truncated))));
    setup.assert_nothing_left("truncated");
    let longer = [&archive[..], b"x"].concat();
    assert!(matches!(setup.import(2, &longer), Err(TransferError::Archive(ArchiveError::Trailing))));
    setup.assert_nothing_left("longer");
    let mut altered = archive.clone();
    let last = altered.len() - 20;
    altered[last] ^= 1;
    assert!(matches!(setup.import(3, &altered), Err(TransferError::Archive(_))));
    setup.assert_nothing_left("altered");
    // The next grant is as good as the first.
    setup.import(4, &archive).unwrap();
}

#[test]
fn only_the_archive_that_was_asked_for_is_taken() {
    let setup = Setup::new();
    let archive = setup.export(2).unwrap();
    let digest = Prefix::read(&archive).unwrap().unwrap().digest().to_vec();
    let both = |epoch| disks(NEW_LAYER, Some(NEW_VOLUME), epoch, false);
    assert!(matches!(setup.import_as(&both(1), &[0; 32], &archive), Err(TransferError::OtherArchive)));
    let mut smaller = both(2);
    smaller.layer.object.size = Bytes::mib(32);
    let refused = setup.import_as(&smaller, &digest, &archive);
    assert!(matches!(refused, Err(TransferError::Size { disk: "writable layer", .. })), "{refused:?}");
    let layer_only = disks(NEW_LAYER, None, 3, false);
    assert!(matches!(setup.import_as(&layer_only, &digest, &archive), Err(TransferError::Volume)));
    setup.assert_nothing_left("refused");
    // What is there is not overwritten.
    let over = setup.import_as(&disks(LAYER, Some(NEW_VOLUME), 4, false), &digest, &archive);
    assert!(matches!(over, Err(TransferError::Occupied { .. })), "{over:?}");
    assert!(fs::read(setup.image(LAYER)).unwrap().contains(&5));
}

/// The pool is given up for good once so much of the archive is left.
struct Losing<'a> {
    archive: &'a [u8],
    at: usize,
    setup: &'a Setup,
    found: Option<Vec<Written>>,
}

impl io::Read for Losing<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(buffer)?;
        self.consume(read);
        Ok(read)
    }
}

impl BufRead for Losing<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.archive.len() <= self.at && self.found.is_none() {
            self.setup.pools.declare_lost(&[id()].into());
            self.found = Some(self.setup.written());
        }
        Ok(&self.archive[..self.archive.len().min(16)])
    }

    fn consume(&mut self, count: usize) {
        self.archive = &self.archive[count..];
    }
}

#[test]
fn nothing_is_written_to_a_pool_that_is_lost_meanwhile() {
    let setup = Setup::new();
    let archive = setup.export(2).unwrap();
    let digest = Prefix::read(&archive).unwrap().unwrap().digest().to_vec();
    let both = disks(NEW_LAYER, Some(NEW_VOLUME), 1, false);
    let mut losing = Losing { archive: &archive, at: archive.len() / 4, setup: &setup, found: None };
    let lost = setup.pools.import(&both, &digest, &transfer(), &CancellationToken::new(), &mut losing);
    assert!(matches!(lost, Err(TransferError::Pool(PoolError::Lost(_)))), "{lost:?}");
    assert!(setup.files(NEW_LAYER).contains(&"image.raw.importing.1".to_owned()), "{:?}", setup.files(NEW_LAYER));
    assert_eq!(losing.found, Some(setup.written()));
}

#[test]
fn whoever_lost_the_grant_ends_nothing_well() {
    let setup = Setup::new();
    let pool = setup.pools.get(&id()).unwrap();
    // Another one was granted it, who says that this node is dead.
    let mut later = granted(LAYER, 3, true);
    later.grant.predecessor_end = PredecessorEnd::Isolated;
    pool.take(&later, &taker(By::Instance(InstanceId::generate()))).unwrap();
    assert!(matches!(setup.export(2), Err(TransferError::Conflict { .. })));
    let stop = CancellationToken::new();
    stop.cancel();
    let volume = Disks { layer: granted(VOLUME, 2, true), volume: None };
    let stopped = setup.pools.export(&volume, description(), &transfer(), &stop, Vec::new());
    assert!(matches!(stopped, Err(TransferError::Stopped)), "{stopped:?}");
    assert!(setup.files(VOLUME).contains(&"holder.2.released".to_owned()));
}

#[test]
fn what_a_killed_daemon_left_goes_with_its_grant() {
    let setup = Setup::new();
    let pool = setup.pools.get(&id()).unwrap();
    let granted = granted(NEW_LAYER, 1, false);
    pool.write_taken(&granted, &transfer()).unwrap();
    fs::write(setup.dir(NEW_LAYER).join("image.raw.importing.1"), "half").unwrap();
    assert_eq!(pool.confirm_not_taken(&granted, |_| true).unwrap(), v1::ObjectUse::Held);
    assert_eq!(pool.confirm_not_taken(&granted, |_| false).unwrap(), v1::ObjectUse::Released);
    assert_eq!(setup.files(NEW_LAYER), ["holder.1", "holder.1.released"]);

    // Nor does what an isolated one left, whose grant nobody closes, outlive the next use.
    fs::write(setup.dir(LAYER).join("image.raw.importing.1"), "half").unwrap();
    pool.take(&self::granted(LAYER, 2, true), &taker(By::Instance(InstanceId::generate()))).unwrap();
    assert!(!setup.files(LAYER).contains(&"image.raw.importing.1".to_owned()), "{:?}", setup.files(LAYER));
}
