//! The operations on one object.

use std::{collections::BTreeMap, fs, io, path::Path};

use kibo_crds::{Bytes, Epoch, Incarnation, ObjectUid};
use kibo_protocol::v1::ObjectUse;

use super::{
    Pool, PoolError, PoolObject, TakeError, TakeFailure, TakenObject, fence,
    image::{self, ImageError},
    lock::ObjectLock,
    marker, moving, opening,
    record_files::{self, Kind},
    records::{Closing, Conflict, EpochUse, Record, Records, TakeDecision},
    transfer,
};
use crate::{
    durable,
    launch::{GrantedObject, Taker},
};

/// How often somebody looks for what may just be renamed.
const LOOKS: usize = 3;
const UNSEEN: &str =
    "its name is listed, and it is not there: the file system may remember for a while that it was missing";

impl Pool {
    pub(super) fn io<'e>(
        &'e self,
        action: &'static str,
        uid: &'e ObjectUid,
    ) -> impl FnOnce(io::Error) -> PoolError + 'e {
        move |source| PoolError::Io { action, uid: uid.clone(), pool: self.id.clone(), source }
    }

    pub(super) fn begin(&self, uid: &ObjectUid) -> Result<ObjectLock<'_>, PoolError> {
        let lock = self.locks.lock(uid).ok_or_else(|| PoolError::Busy(uid.clone()))?;
        self.verify()?;
        Ok(lock)
    }

    pub(super) fn list(&self, uid: &ObjectUid) -> Result<Records, PoolError> {
        record_files::list(&self.object_dir(uid)).map_err(self.io("read the holder records", uid))
    }

    /// The records, for somebody who was granted this epoch: one that seems to be missing may have been put aside.
    fn list_with(&self, uid: &ObjectUid, epoch: Epoch) -> Result<Records, PoolError> {
        let records = self.list(uid)?;
        if records.use_of(epoch) != EpochUse::Untouched {
            return Ok(records);
        }
        self.find_again(uid)?;
        self.list(uid)
    }

    fn write(&self, uid: &ObjectUid, kind: Kind, record: &Record) -> Result<(), PoolError> {
        // What came before may have hung until the pool came back.
        if self.loss.is_declared() {
            return Err(PoolError::Lost(self.id.clone()));
        }
        let dir = self.object_dir(uid);
        self.make_object_dir(&dir).map_err(self.io("make the directory", uid))?;
        // One of that name is as good: the decision that follows reads what it says.
        record_files::write(&dir, &self.node, kind, record).map_err(self.io("write a holder record", uid))?;
        Ok(())
    }

    fn make_object_dir(&self, dir: &Path) -> io::Result<()> {
        match fs::create_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            result => result.and_then(|()| durable::sync_dir(&self.path.join(marker::OBJECTS))),
        }
    }

    /// Takes an object for an Instance and opens its image, which is made when it is missing.
    ///
    /// Idempotent for the same Instance. On an error the object is not held any more, unless the
    /// error says HELD.
    pub fn take(&self, granted: &GrantedObject, taker: &Taker) -> Result<TakenObject, TakeError> {
        let uid = &granted.object.uid;
        let error = |object_use, cause| TakeError { uid: uid.clone(), epoch: granted.grant.epoch, object_use, cause };
        let _lock = self.begin(uid).map_err(|cause| error(ObjectUse::Held, cause.into()))?;
        if granted.object.must_exist {
            self.find_again(uid).map_err(|cause| error(ObjectUse::Held, cause.into()))?;
        }
        match self.write_taken(granted, taker) {
            Ok(None) => {}
            Ok(Some(conflict)) => {
                let object_use = self.withdraw(granted, taker, &conflict);
                return Err(error(object_use, conflict.into()));
            }
            Err(cause) => return Err(error(ObjectUse::Held, cause.into())),
        }
        kibo_failpoint::reach_blocking("holder-recorded");
        match self.open_image(granted) {
            Ok(taken) => {
                kibo_failpoint::reach_blocking("image-made");
                self.clear_settled(uid, granted.grant.epoch);
                Ok(taken)
            }
            Err(cause) => {
                let released = self.write_released(uid, granted.grant.epoch);
                let object_use = if released.is_ok() { ObjectUse::Released } else { ObjectUse::Held };
                Err(error(object_use, cause))
            }
        }
    }

    /// The highest incarnation of this node that the pool says is dead.
    pub fn own_mark(&self) -> Result<Option<Incarnation>, PoolError> {
        self.verify()?;
        let fence = fence::read(&self.path, &self.node).map_err(PoolError::Fence)?;
        Ok(fence.and_then(|fence| fence.highest).map(|mark| mark.incarnation))
    }

    /// The highest incarnation of this node that the pool says is dead, if it is this one or a later one. The fence file
    /// is there from here on, so that no cache can say that it is missing.
    fn isolated(&self, lived: Incarnation) -> Result<Option<Incarnation>, PoolError> {
        fence::sign_in(&self.path, &self.node).map_err(|source| PoolError::SignIn { pool: self.id.clone(), source })?;
        let fence = fence::read(&self.path, &self.node).map_err(PoolError::Fence)?;
        let mark = fence.map_or(Ok(None), |fence| fence.mark).map_err(PoolError::Fence)?;
        Ok(mark.map(|mark| mark.incarnation).filter(|dead| *dead >= lived))
    }

    /// Writes the record of a grant if nothing stands against it, before and after. Nothing does as long as this node's
    /// life is not marked as dead. Holders that are dead by this grant
    /// are told before it is written, and again when it turns out that the first list was not complete.
    pub(super) fn write_taken(&self, granted: &GrantedObject, taker: &Taker) -> Result<Option<Conflict>, PoolError> {
        let uid = &granted.object.uid;
        if let Some(dead) = self.isolated(taker.incarnation)? {
            return Ok(Some(Conflict::Isolated { dead, lived: taker.incarnation }));
        }
        let before = self.list(uid)?;
        match before.decide_take(&granted.grant, taker) {
            TakeDecision::Conflict(conflict) => return Ok(Some(conflict)),
            TakeDecision::AlreadyMine => return self.tell_the_dead(&before, granted).map(|()| None),
            TakeDecision::Write => {}
        }
        self.tell_the_dead(&before, granted)?;
        kibo_failpoint::reach_blocking("victims-marked");
        self.write(uid, Kind::Taken, &Record { taker: Some(taker.clone()), grant: granted.grant })?;
        let after = self.list(uid)?;
        match after.decide_take(&granted.grant, taker) {
            TakeDecision::AlreadyMine => self.tell_the_dead(&after, granted).map(|()| None),
            TakeDecision::Conflict(conflict) => Ok(Some(conflict)),
            TakeDecision::Write => {
                let source = io::Error::other("it is not there after it was written");
                Err(self.io("find the holder record", uid)(source))
            }
        }
    }

    /// Marks in their fence files that those are dead who took the object before and never let go of it.
    pub(super) fn tell_the_dead(&self, records: &Records, granted: &GrantedObject) -> Result<(), PoolError> {
        for (victim, dead) in records.dead_holders(&granted.grant) {
            tracing::info!(object = %granted.object.uid, %victim, %dead, "taking over from a dead holder");
            fence::mark(&self.path, &victim, dead, &self.node).map_err(PoolError::Fence)?;
        }
        Ok(())
    }

    /// Makes sure that a grant that met a conflict is never taken, also not by a crashed attempt's rest.
    pub(super) fn withdraw(&self, granted: &GrantedObject, taker: &Taker, conflict: &Conflict) -> ObjectUse {
        let uid = &granted.object.uid;
        if let Some(object_use) = conflict.leaves() {
            return object_use;
        }
        let record = Record { taker: Some(taker.clone()), grant: granted.grant };
        match self.write(uid, Kind::Refused, &record) {
            Ok(()) => ObjectUse::Refused,
            Err(error) => {
                tracing::error!(object = %uid, epoch = %granted.grant.epoch, %error, "failed to record a refusal");
                ObjectUse::Held
            }
        }
    }

    fn open_image(&self, granted: &GrantedObject) -> Result<TakenObject, TakeFailure> {
        let object = &granted.object;
        let dir = self.object_dir(&object.uid);
        let made = image::ensure(&dir, object, granted.grant.epoch);
        if let Err(ImageError::NoSpace { free, .. }) = &made {
            // The next admission is not to believe in what the last look saw.
            self.status.note_free(*free);
        }
        let size = made?;
        let is_shared = self.is_shared().map_err(self.io("find the other users", &object.uid))?;
        let image = opening::open(&dir, is_shared)?;
        let (uid, pool, epoch) = (object.uid.clone(), self.id.clone(), granted.grant.epoch);
        Ok(TakenObject { uid, pool, epoch, size, image })
    }

    /// Removes what no decision needs any more, the lowest epoch first, so that at every point the
    /// records that are left still agree.
    fn clear_settled(&self, uid: &ObjectUid, epoch: Epoch) {
        let dir = self.object_dir(uid);
        let clear = || -> io::Result<()> {
            record_files::remove_leftovers(&dir, &self.node)?;
            moving::clear(&dir, |of| of < epoch)?;
            transfer::clear(&dir, |of| of < epoch)?;
            image::clear_unfinished(&dir, |of| of < epoch)?;
            for settled in record_files::list(&dir)?.settled_below(epoch) {
                record_files::remove(&dir, settled)?;
            }
            Ok(())
        };
        if let Err(error) = clear() {
            tracing::warn!(object = %uid, %error, "failed to clear old holder records; the next start tries again");
        }
    }

    fn write_released(&self, uid: &ObjectUid, epoch: Epoch) -> Result<EpochUse, PoolError> {
        let records = self.list_with(uid, epoch)?;
        let found = records.use_of(epoch);
        let taken = records.0.get(&epoch).and_then(|records| records.taken.as_ref());
        if let (EpochUse::Held, Some(taken)) = (found, taken) {
            // Whoever takes it next must not meet what this one wrote last.
            match opening::is_closed(&self.object_dir(uid)) {
                Ok(true) => {}
                Ok(false) => return Err(PoolError::StillOpen { uid: uid.clone() }),
                // What cannot be opened is opened by nobody else either, and must not be held for ever.
                Err(error) => tracing::warn!(object = %uid, %error, "nobody can say whether the image is still open"),
            }
            self.write(uid, Kind::Released, taken)?;
            return Ok(EpochUse::Released);
        }
        Ok(found)
    }

    /// Records that an Instance's use of an object is over. Idempotent; an epoch that was never
    /// taken, or that a newer one has replaced, needs nothing.
    pub fn release(&self, uid: &ObjectUid, epoch: Epoch) -> Result<(), PoolError> {
        if self.loss.is_declared() {
            return Ok(());
        }
        let _lock = self.begin(uid)?;
        self.write_released(uid, epoch).map(drop)
    }

    /// Closes a grant for an Instance that does not run: released if it was taken for it, else refused.
    /// Afterwards it cannot be taken any more.
    pub fn close(&self, granted: &GrantedObject, taker: &Taker) -> Result<ObjectUse, PoolError> {
        let uid = &granted.object.uid;
        let epoch = granted.grant.epoch;
        if self.loss.is_declared() {
            // Nobody ever asks for it again, and nothing is written there.
            return Ok(ObjectUse::Released);
        }
        let _lock = self.begin(uid)?;
        match self.list_with(uid, epoch)?.decide_close(epoch, taker) {
            Closing::Done(object_use) => Ok(object_use),
            Closing::Release => {
                self.write_released(uid, epoch)?;
                Ok(ObjectUse::Released)
            }
            Closing::Refuse => {
                self.write(uid, Kind::Refused, &Record { taker: Some(taker.clone()), grant: granted.grant })?;
                Ok(ObjectUse::Refused)
            }
        }
    }

    /// Says what became of a grant; one that was not taken is refused for good, and what this node took for an Instance
    /// that it does not have any more, whose record was lost, or for a move or a transfer that does not go on, is released. A deletion
    /// is never given up.
    pub fn confirm_not_taken(
        &self,
        granted: &GrantedObject,
        is_here: impl Fn(&Taker) -> bool,
    ) -> Result<ObjectUse, PoolError> {
        let uid = &granted.object.uid;
        let epoch = granted.grant.epoch;
        if self.loss.is_declared() {
            return Ok(ObjectUse::Released);
        }
        let _lock = self.begin(uid)?;
        let records = self.list_with(uid, epoch)?;
        match records.use_of(epoch) {
            EpochUse::Held => {
                let taken = records.0.get(&epoch).and_then(|records| records.taken.as_ref());
                let taker = taken.and_then(|record| record.taker.as_ref());
                if taker.is_none_or(|taker| taker.node != self.node || taker.is_deletion() || is_here(taker)) {
                    return Ok(ObjectUse::Held);
                }
                tracing::warn!(object = %uid, %epoch, ?taker, "releasing what somebody held who is not here any more");
                if taker.is_some_and(Taker::is_move) {
                    moving::clear(&self.object_dir(uid), |of| of <= epoch)
                        .map_err(self.io("clear away the journal of a move", uid))?;
                }
                if taker.is_some_and(Taker::is_transfer) {
                    transfer::clear(&self.object_dir(uid), |of| of <= epoch)
                        .map_err(self.io("clear away the rest of an import", uid))?;
                }
                self.write_released(uid, epoch)?;
                Ok(ObjectUse::Released)
            }
            EpochUse::Released => Ok(ObjectUse::Released),
            EpochUse::Refused => Ok(ObjectUse::Refused),
            EpochUse::Untouched => {
                self.write(uid, Kind::Refused, &Record { taker: None, grant: granted.grant })?;
                Ok(ObjectUse::Refused)
            }
        }
    }

    /// Removes an object with all its records, under a grant of its own. What does not exist is removed.
    pub fn delete(&self, granted: &GrantedObject, taker: &Taker) -> Result<(), PoolError> {
        let uid = &granted.object.uid;
        let _lock = self.begin(uid)?;
        self.find_again(uid)?;
        let dir = self.object_dir(uid);
        if !dir.try_exists().map_err(self.io("find the directory", uid))? {
            return Ok(());
        }
        if let Some(conflict) = self.write_taken(granted, taker)? {
            self.withdraw(granted, taker, &conflict);
            if self.holds_open(uid)? {
                return Err(PoolError::InUse(uid.clone()));
            }
            return Err(PoolError::Conflict { uid: uid.clone(), conflict });
        }
        kibo_failpoint::reach_blocking("deletion-recorded");
        image::remove(&dir).map_err(self.io("remove the image", uid))?;
        kibo_failpoint::reach_blocking("image-removed");
        let all = self.list(uid)?.settled_below(Epoch(u64::MAX));
        for epoch in all {
            record_files::remove(&dir, epoch).map_err(self.io("remove the holder records", uid))?;
        }
        kibo_failpoint::reach_blocking("holder-records-removed");
        fs::remove_dir_all(&dir).map_err(self.io("remove the directory", uid))?;
        durable::sync_dir(&self.path.join(marker::OBJECTS)).map_err(self.io("sync the directory", uid))?;
        self.status.look_again();
        kibo_failpoint::reach_blocking("object-removed");
        Ok(())
    }

    /// Whether somebody on this node has an open record.
    fn holds_open(&self, uid: &ObjectUid) -> Result<bool, PoolError> {
        let records = self.list(uid)?;
        Ok(records.0.iter().any(|(epoch, of_epoch)| {
            let taker = of_epoch.taken.as_ref().and_then(|record| record.taker.as_ref());
            records.use_of(*epoch) == EpochUse::Held
                && taker.is_some_and(|taker| taker.node == self.node && !taker.is_deletion())
        }))
    }

    /// Every object of the pool with what its records say, also one that was put aside by mistake and is put back by
    /// whoever misses it. An object that cannot be read is an error.
    pub fn objects(&self) -> Result<Vec<PoolObject>, PoolError> {
        self.verify()?;
        let seen = self.seen().map_err(|source| PoolError::List { pool: self.id.clone(), source })?;
        let found = seen.into_iter().map(|(uid, is_aside)| self.find(&uid, is_aside));
        found.filter_map(Result::transpose).collect()
    }

    /// The uids of all that may be an object, and whether something of it was put aside. What is renamed while a directory
    /// is read may be seen under neither name; who puts an object aside by mistake renames it twice, there and back.
    fn seen(&self) -> io::Result<BTreeMap<ObjectUid, bool>> {
        let mut seen: BTreeMap<ObjectUid, bool> = BTreeMap::new();
        for _ in 0..LOOKS {
            for entry in fs::read_dir(self.path.join(marker::OBJECTS))? {
                let name = entry?.file_name();
                let Some(name) = name.to_str() else { continue };
                if let Ok(uid) = name.parse() {
                    seen.entry(uid).or_default();
                } else if let Some(uid) = moving::object_of_aside(name) {
                    seen.insert(uid, true);
                }
            }
        }
        Ok(seen)
    }

    /// An object where it belongs, or where it was put aside, also while it goes from one to the other; `None`: it is gone.
    /// One that cannot be found though its name is there is an error.
    pub(super) fn find(&self, uid: &ObjectUid, is_aside: bool) -> Result<Option<PoolObject>, PoolError> {
        let own = self.object_dir(uid);
        let mut found = self.object_in(&own, uid)?;
        if found.is_some() && !is_aside {
            return Ok(found);
        }
        for _ in 0..LOOKS {
            let asides = moving::asides(&self.path.join(marker::OBJECTS), uid);
            for (_, aside) in asides.map_err(|source| PoolError::List { pool: self.id.clone(), source })? {
                let is_it = moving::is_the_object(&aside).map_err(self.io("look at what was put aside", uid))?;
                if is_it {
                    found = PoolObject::both(found, self.object_in(&aside, uid)?);
                }
            }
            // What was put back since the first look is here.
            found = PoolObject::both(found, self.object_in(&own, uid)?);
            if found.is_some() {
                return Ok(found);
            }
        }
        if self.is_listed(uid).map_err(self.io("list the names", uid))? {
            return Err(self.io("open the directory", uid)(io::Error::new(io::ErrorKind::NotFound, UNSEEN)));
        }
        Ok(None)
    }

    fn is_listed(&self, uid: &ObjectUid) -> io::Result<bool> {
        for entry in fs::read_dir(self.path.join(marker::OBJECTS))? {
            if entry?.file_name().to_str() == Some(uid.as_str()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What there is of an object in a directory; `None`: there is no such directory.
    fn object_in(&self, dir: &Path, uid: &ObjectUid) -> Result<Option<PoolObject>, PoolError> {
        let read = || -> io::Result<_> { Ok((record_files::list(dir)?, image::size(dir)?)) };
        let read = read();
        // Renamed or removed before or while it was read.
        if !dir.try_exists().map_err(self.io("find the directory", uid))? {
            return Ok(None);
        }
        let (records, size) = read.map_err(self.io("read the holder records and the size", uid))?;
        let highest = records.0.keys().next_back().copied().unwrap_or_default();
        Ok(Some(PoolObject { highest, last: records.last_taken(), size, uid: uid.clone() }))
    }

    /// Size of an object's image; `None` when it does not exist.
    pub fn image_size(&self, uid: &ObjectUid) -> Result<Option<Bytes>, PoolError> {
        if self.loss.is_declared() {
            return Ok(None);
        }
        self.verify()?;
        image::size(&self.object_dir(uid)).map_err(self.io("find the size", uid))
    }
}
