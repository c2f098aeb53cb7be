//! Moves an object from one pool to another, under one grant that is taken in both.
//!
//! In the old pool nothing is written but the record. In the new one the copy grows beside its final name, with a
//! journal, and gets that name once all of it is on the disk and was compared. Which of the two is the object is for
//! the operator to say, after that: until then both are left as they are, and a daemon that is killed at any point is
//! followed by one that goes on. The copy that is not the object any more, or does not become it, is removed by
//! [`Pool::discard_copy`], which goes by the records in that pool and not by the order alone.
//!
//! A node that is wrongly taken for dead may stand still between any two calls of the system and go on much later, when
//! others have made the object under the same name. So a move itself never removes an image by its name, and gives its
//! own copy that name only where there is none.

mod copy;
mod discard;
mod journal;
mod line;
#[cfg(test)]
mod tests;

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
    sync::Mutex,
    time::{Duration, Instant},
};

use kibo_crds::{Bytes, Epoch, ObjectUid, PoolId};
use kibo_protocol::v1;

pub use copy::Progress;
pub use discard::{asides, is_the_object, object_of_aside, put_back_objects};
pub use journal::clear;

use super::{
    Pool, PoolError, Pools,
    image::{self, ImageError},
    opening, record_files,
    records::{Conflict, TakeDecision},
    sparse,
};
use crate::{
    durable,
    launch::{GrantedObject, Taker},
};
use copy::{Copy, CopyError};
use journal::{Journal, copy_path};
use line::Mark;

/// How often a copy notes what is durable of it.
const NOTE_EVERY: Duration = Duration::from_secs(2);
/// How often it looks whether the grant still stands in both pools.
const LOOK_EVERY: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("object {uid} cannot be moved: {conflict}")]
    Conflict { uid: ObjectUid, conflict: Conflict },
    #[error(
        "storage pool {pool} has an image of object {uid} already, which this move has not made: nothing was changed"
    )]
    Occupied { uid: ObjectUid, pool: PoolId },
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("object {uid}, from storage pool {from} to {to}: {source}")]
    Copy { uid: ObjectUid, from: PoolId, to: PoolId, source: CopyError },
}

impl MoveError {
    /// The same for the operator.
    pub fn failure(&self) -> v1::ObjectFailure {
        match self {
            Self::Pool(error) => error.failure(),
            Self::Conflict { .. } | Self::Occupied { .. } => v1::ObjectFailure::HolderConflict,
            Self::Image(ImageError::NoSpace { .. }) => v1::ObjectFailure::NoSpace,
            Self::Copy { source: CopyError::Write(error), .. } if error.kind() == io::ErrorKind::StorageFull => {
                v1::ObjectFailure::NoSpace
            }
            Self::Copy { source: CopyError::Lost(_), .. } => v1::ObjectFailure::PoolUnavailable,
            Self::Image(_) | Self::Copy { .. } => v1::ObjectFailure::Io,
        }
    }
}

impl Pools {
    /// Copies an object into another pool. When it returns, both pools have the record of this grant, and the new one
    /// has the whole image.
    pub fn move_object(
        &self,
        granted: &GrantedObject,
        to: &PoolId,
        taker: &Taker,
        progress: &Progress,
    ) -> Result<(), MoveError> {
        let (from, to) = (self.get(&granted.object.pool)?, self.get(to)?);
        let moving = Moving { from, to, granted, taker, progress };
        let (source, size) = moving.take_source()?;
        let mut journal = moving.take_target(size)?;
        if !moving.has_its_name(&journal)? {
            moving.copy(&source, &mut journal)?;
        }
        moving.name_it(&mut journal)
    }
}

/// One move.
struct Moving<'a> {
    from: &'a Pool,
    to: &'a Pool,
    granted: &'a GrantedObject,
    taker: &'a Taker,
    progress: &'a Progress,
}

impl Moving<'_> {
    fn uid(&self) -> &ObjectUid {
        &self.granted.object.uid
    }

    fn epoch(&self) -> Epoch {
        self.granted.grant.epoch
    }

    fn take(&self, pool: &Pool) -> Result<(), MoveError> {
        let Some(conflict) = pool.write_taken(self.granted, self.taker)? else { return Ok(()) };
        pool.withdraw(self.granted, self.taker, &conflict);
        Err(MoveError::Conflict { uid: self.uid().clone(), conflict })
    }

    fn copy_error(&self, source: CopyError) -> MoveError {
        let (from, to) = (self.from.id.clone(), self.to.id.clone());
        MoveError::Copy { uid: self.uid().clone(), from, to, source }
    }

    fn io_error(&self, action: &'static str) -> impl Fn(io::Error) -> MoveError {
        let path = self.to.object_dir(self.uid()).join(image::IMAGE);
        move |source| ImageError::Io { action, path: path.clone(), source }.into()
    }

    fn take_source(&self) -> Result<(File, u64), MoveError> {
        let _lock = self.from.begin(self.uid())?;
        self.from.find_again(self.uid())?;
        self.take(self.from)?;
        kibo_failpoint::reach_blocking("move-source-taken");
        let dir = self.from.object_dir(self.uid());
        let path = dir.join(image::IMAGE);
        let failed = |source| ImageError::Io { action: "look at", path: path.clone(), source };
        let size = image::size(&dir).map_err(failed)?.ok_or_else(|| ImageError::Missing { path: path.clone() })?;
        if !opening::is_closed(&dir).map_err(failed)? {
            return Err(ImageError::StillOpen { path }.into());
        }
        let (file, _) = sparse::open(&path, OpenOptions::new().read(true))?;
        Ok((file, size.0))
    }

    /// Takes the object in the new pool too, once what an earlier move left there is gone. Answers how far an earlier
    /// daemon came with this same move.
    fn take_target(&self, size: u64) -> Result<Journal, MoveError> {
        let _lock = self.to.begin(self.uid())?;
        self.to.find_again(self.uid())?;
        let dir = self.to.object_dir(self.uid());
        let failed = |action| self.io_error(action);
        let new = Journal::new(self.from.id.clone(), self.epoch(), size);
        let mut journal = self.known(&dir, &new)?;
        let is_whole = journal.as_ref().is_some_and(|journal| journal.complete);
        if !is_whole && image::size(&dir).map_err(failed("look at"))?.is_some() {
            self.discard_older(&dir)?;
            // A journal goes with the copy that it tells of.
            journal = self.known(&dir, &new)?;
        }
        self.take(self.to)?;
        kibo_failpoint::reach_blocking("move-target-taken");
        journal::clear(&dir, |of| of < self.epoch()).map_err(failed("clear away older copies of"))?;
        if journal.is_none() {
            self.check_space(&dir, size)?;
        }
        Ok(journal.unwrap_or(new))
    }

    /// How far the copy of this move has come, as far as it is there.
    fn known(&self, dir: &Path, new: &Journal) -> Result<Option<Journal>, MoveError> {
        let known = Journal::read(dir, new).map_err(self.io_error("read the journal of"))?;
        Ok(known.filter(|known| known.complete || copy_path(dir, self.epoch()).exists()))
    }

    /// Removes the copy of an earlier move that came to nothing. Who made it may live, and is told first.
    fn discard_older(&self, dir: &Path) -> Result<(), MoveError> {
        let records = self.to.list(self.uid())?;
        match records.decide_take(&self.granted.grant, self.taker) {
            // The grant is refused with that.
            TakeDecision::Conflict(_) => return Ok(()),
            // What was older went before the record was written. So this is of somebody who was slow to die; or it is the
            // object already, and this order came late.
            TakeDecision::AlreadyMine if !self.has_named(dir)? => return Err(self.occupied()),
            TakeDecision::AlreadyMine | TakeDecision::Write => {}
        }
        self.to.tell_the_dead(&records, self.granted)?;
        match self.to.discard(self.uid(), self.epoch()) {
            Err(PoolError::NotACopy { uid, pool, .. }) => Err(MoveError::Occupied { uid, pool }),
            discarded => Ok(discarded?),
        }
    }

    /// Whether the image is the copy of this move, under both of its names.
    fn has_named(&self, dir: &Path) -> Result<bool, MoveError> {
        let find = |path: &Path| inode(path).map_err(self.io_error("look at"));
        let unnamed = find(&copy_path(dir, self.epoch()))?;
        Ok(unnamed.is_some() && unnamed == find(&dir.join(image::IMAGE))?)
    }

    fn occupied(&self) -> MoveError {
        MoveError::Occupied { uid: self.uid().clone(), pool: self.to.id.clone() }
    }

    fn check_space(&self, dir: &Path, size: u64) -> Result<(), MoveError> {
        let free = image::space(dir).map_err(self.io_error("find the free space for"))?.free;
        if free.saturating_sub(image::HEADROOM).0 < size {
            self.to.status.note_free(free);
            return Err(ImageError::NoSpace { free, size: Bytes(size) }.into());
        }
        Ok(())
    }

    /// An earlier try came to its end: it was found whole before it got that.
    fn has_its_name(&self, journal: &Journal) -> Result<bool, MoveError> {
        let path = copy_path(&self.to.object_dir(self.uid()), self.epoch());
        Ok(journal.complete && inode(&path).map_err(self.io_error("look at"))?.is_none())
    }

    /// Copies what is missing, and compares the whole copy, whoever has made which part of it, before anybody can take it for
    /// the object.
    fn copy(&self, source: &File, journal: &mut Journal) -> Result<(), MoveError> {
        self.is_wanted().map_err(|source| self.copy_error(source))?;
        let dir = self.to.object_dir(self.uid());
        let path = copy_path(&dir, self.epoch());
        let size = journal.size;
        let from = Mark { at: if journal.complete { size } else { journal.done }, content: journal.content };
        let mut options = OpenOptions::new();
        // Never a new one where the journal says that some of it is there.
        options.read(true).write(from.at < size).create(from.at == 0).truncate(false).mode(0o600);
        let (target, _) = sparse::open(&path, &mut options)?;
        if from.at == 0 {
            // Of what an earlier try left nobody knows how much is there.
            target.set_len(0).map_err(self.io_error("begin the copy of"))?;
        }
        if from.at < size {
            target.set_len(size).map_err(self.io_error("size the copy of"))?;
        } else {
            // It may have its name already: nothing of it is touched any more.
            self.is_read_back();
        }
        let copy = Copy { source, target: &target, size, progress: self.progress };
        let looked = Mutex::new(Instant::now());
        let mut noted = Instant::now();
        let durable = |mark: Mark| {
            let is_whole = mark.at == size;
            if !is_whole && noted.elapsed() < NOTE_EVERY {
                return Ok(());
            }
            if is_whole {
                kibo_failpoint::reach_blocking("move-synced");
                self.is_read_back();
            }
            self.is_wanted()?;
            (journal.done, journal.content, journal.complete) = (mark.at, mark.content, is_whole);
            journal.write(&dir).map_err(CopyError::Write)?;
            noted = Instant::now();
            Ok(())
        };
        copy.run(from, durable, || self.may_go_on(&looked)).map_err(|source| self.copy_error(source))?;
        kibo_failpoint::reach_blocking("move-verified");
        Ok(())
    }

    fn is_read_back(&self) {
        self.progress.waits_for(Some("the rest of the copy is read back and compared".to_owned()));
    }

    /// Nothing is read or written once one of the pools was declared lost.
    fn is_wanted(&self) -> Result<(), CopyError> {
        if let Some(pool) = [self.from, self.to].into_iter().find(|pool| pool.loss.is_declared()) {
            tracing::warn!(object = %self.uid(), pool = %pool.id, "a move stops, since a pool was declared lost");
            return Err(CopyError::Lost(pool.id.clone()));
        }
        if self.progress.is_stopped() { Err(CopyError::Stopped) } else { Ok(()) }
    }

    /// The same, and now and then whether the grant still stands: who holds the object by a newer one takes this node for
    /// dead.
    fn may_go_on(&self, looked: &Mutex<Instant>) -> Result<(), CopyError> {
        self.is_wanted()?;
        let mut looked = looked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if looked.elapsed() < LOOK_EVERY {
            return Ok(());
        }
        *looked = Instant::now();
        for pool in [self.from, self.to] {
            let records = pool.list(self.uid()).map_err(|error| CopyError::Read(io::Error::other(error)))?;
            if records.decide_take(&self.granted.grant, self.taker) != TakeDecision::AlreadyMine {
                tracing::warn!(object = %self.uid(), pool = %pool.id, "a move lost its grant");
                return Err(CopyError::Stopped);
            }
        }
        Ok(())
    }

    /// Gives the copy its name, if the grant still stands.
    fn name_it(&self, journal: &mut Journal) -> Result<(), MoveError> {
        let uid = self.uid();
        let _lock = self.to.begin(uid)?;
        let records = self.to.list(uid)?;
        match records.decide_take(&self.granted.grant, self.taker) {
            TakeDecision::AlreadyMine if !self.progress.is_stopped() => self.link(journal),
            TakeDecision::Conflict(conflict) => Err(MoveError::Conflict { uid: uid.clone(), conflict }),
            _ => Err(self.copy_error(CopyError::Stopped)),
        }
    }

    /// Never in the place of another image: whoever is taken for dead and wakes up late finds the name taken.
    fn link(&self, journal: &mut Journal) -> Result<(), MoveError> {
        let dir = self.to.object_dir(self.uid());
        let (copy, image) = (copy_path(&dir, self.epoch()), dir.join(image::IMAGE));
        let failed = |action| self.io_error(action);
        let (unnamed, named) = (inode(&copy).map_err(failed("look at"))?, inode(&image).map_err(failed("look at"))?);
        let size = Some(journal.size);
        match (unnamed, named) {
            // An earlier try came to its end.
            (None, Some((_, found))) if Some(found) == size => {}
            (None, _) => {
                *journal = Journal::new(self.from.id.clone(), self.epoch(), journal.size);
                journal.write(&dir).map_err(failed("write the journal of"))?;
                return Err(ImageError::Missing { path: copy }.into());
            }
            (Some(unnamed), Some(named)) if unnamed == named => {}
            // Of an earlier move, whose node was slow to die; or of a later one, and it is this node that was slow.
            (Some(_), Some(_)) => return Err(self.occupied()),
            (Some(unnamed), None) => match fs::hard_link(&copy, &image) {
                // A network file system says so too when the first answer got lost.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    if inode(&image).map_err(failed("look at"))? != Some(unnamed) {
                        return Err(self.occupied());
                    }
                }
                linked => linked.map_err(failed("name"))?,
            },
        }
        durable::sync_dir(&dir).map_err(failed("sync"))?;
        kibo_failpoint::reach_blocking("move-named");
        record_files::remove_if_there(&copy).map_err(failed("remove the other name of"))?;
        durable::sync_dir(&dir).map_err(failed("sync"))
    }
}

/// Which file has this name, and its size.
pub(super) fn inode(path: &Path) -> io::Result<Option<(u64, u64)>> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(|found| Some((found.ino(), found.size()))),
    }
}
