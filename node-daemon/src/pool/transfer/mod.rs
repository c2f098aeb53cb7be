//! The disks of a Workspace on their way into an archive, and out of one.
//!
//! Both are uses of the objects, under a grant that is taken like any other and closed when the transfer is over, however
//! it ends. An export only reads, and ends its archive only after it has seen that the grants still stand. An import
//! writes beside the final names, and gives the disks those names once all of the archive was read, was found to be what
//! was exported, and is on the disk; what ends before leaves nothing. Which import becomes a Workspace's disks is for the
//! operator to say, after that.

mod export;
mod import;
#[cfg(test)]
mod tests;

use std::{
    cell::Cell,
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use kibo_archive::{ArchiveError, Disk, PrefixError};
use kibo_crds::{Bytes, Epoch, ObjectUid, PoolId};
use kibo_protocol::v1;
use tokio_util::sync::CancellationToken;

pub use import::clear;

use super::{
    Pool, PoolError, Pools,
    image::{IMAGE, ImageError},
    records::{Conflict, TakeDecision},
};
use crate::launch::{GrantedObject, Taker};

/// How often a transfer looks whether its grants still stand.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The objects of one transfer, each with its grant.
#[derive(Clone, Debug)]
pub struct Disks {
    pub layer: GrantedObject,
    pub volume: Option<GrantedObject>,
}

impl Disks {
    /// In the order in which an archive has them.
    fn iter(&self) -> impl Iterator<Item = (Disk, &GrantedObject)> {
        let volume = self.volume.iter().map(|volume| (Disk::Volume, volume));
        std::iter::once((Disk::Layer, &self.layer)).chain(volume)
    }

    /// What names the transfer among others of the same objects.
    pub fn grants(&self) -> Vec<(ObjectUid, Epoch)> {
        self.iter().map(|(_, granted)| (granted.object.uid.clone(), granted.grant.epoch)).collect()
    }

    pub fn pools(&self) -> BTreeSet<PoolId> {
        self.iter().map(|(_, granted)| granted.object.pool.clone()).collect()
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("object {uid} cannot be transferred: {conflict}")]
    Conflict { uid: ObjectUid, conflict: Conflict },
    #[error("storage pool {pool} has an image of object {uid} already: nothing was changed")]
    Occupied { uid: ObjectUid, pool: PoolId },
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    #[error("this is another archive than the one that the Workspace was made for")]
    OtherArchive,
    #[error("the archive's {disk} has {found}, and {expected} was asked for")]
    Size { disk: &'static str, found: Bytes, expected: Bytes },
    #[error("the archive and the request do not agree on whether there is a Volume")]
    Volume,
    #[error("the archive could not be sent on: {0}")]
    Output(io::Error),
    #[error("the transfer was stopped")]
    Stopped,
}

impl From<PrefixError> for TransferError {
    fn from(error: PrefixError) -> Self {
        Self::Archive(error.into())
    }
}

impl TransferError {
    /// The same for whoever reads or sends the archive.
    pub fn failure(&self) -> v1::StreamFailure {
        match self {
            Self::Archive(ArchiveError::Input(_)) | Self::Output(_) | Self::Stopped => v1::StreamFailure::Interrupted,
            Self::Archive(_) | Self::OtherArchive | Self::Size { .. } | Self::Volume => v1::StreamFailure::Invalid,
            Self::Image(ImageError::NoSpace { .. }) => v1::StreamFailure::NoSpace,
            Self::Image(ImageError::Io { source, .. }) if source.kind() == io::ErrorKind::StorageFull => {
                v1::StreamFailure::NoSpace
            }
            Self::Pool(_) | Self::Conflict { .. } | Self::Occupied { .. } | Self::Image(_) => v1::StreamFailure::Failed,
        }
    }
}

/// An object that this transfer has taken.
struct Held<'a> {
    disk: Disk,
    pool: &'a Pool,
    granted: &'a GrantedObject,
    taker: &'a Taker,
}

impl Held<'_> {
    fn uid(&self) -> &ObjectUid {
        &self.granted.object.uid
    }

    fn dir(&self) -> PathBuf {
        self.pool.object_dir(self.uid())
    }

    fn image(&self) -> PathBuf {
        self.dir().join(IMAGE)
    }

    fn is_lost(&self) -> bool {
        self.pool.loss.is_declared()
    }

    /// Whether the grant still stands: who holds the object by a newer one takes this node for dead.
    fn check(&self) -> Result<(), TransferError> {
        match self.pool.list(self.uid())?.decide_take(&self.granted.grant, self.taker) {
            TakeDecision::AlreadyMine => Ok(()),
            TakeDecision::Conflict(conflict) => {
                tracing::warn!(object = %self.uid(), pool = %self.pool.id(), %conflict, "a transfer lost its grant");
                Err(TransferError::Conflict { uid: self.uid().clone(), conflict })
            }
            TakeDecision::Write => Err(TransferError::Stopped),
        }
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TransferError {
    let path = path.to_owned();
    move |source| ImageError::Io { action, path, source }.into()
}

/// Says now and then whether a transfer may go on.
struct Leave<'a> {
    held: &'a [Held<'a>],
    stop: &'a CancellationToken,
    looked: Cell<Instant>,
}

impl<'a> Leave<'a> {
    fn new(held: &'a [Held<'a>], stop: &'a CancellationToken) -> Self {
        Self { held, stop, looked: Cell::new(Instant::now()) }
    }

    fn check(&self) -> Result<(), TransferError> {
        if self.stop.is_cancelled() {
            return Err(TransferError::Stopped);
        }
        // With the next piece, and not with the next look.
        if let Some(lost) = self.held.iter().find(|held| held.is_lost()) {
            return Err(PoolError::Lost(lost.pool.id().clone()).into());
        }
        if self.looked.get().elapsed() < LOOK_EVERY {
            return Ok(());
        }
        self.looked.set(Instant::now());
        self.check_now()
    }

    fn check_now(&self) -> Result<(), TransferError> {
        if self.stop.is_cancelled() {
            return Err(TransferError::Stopped);
        }
        // Nothing is read or written once a pool was declared lost, which this looks at too.
        self.held.iter().try_for_each(|held| held.pool.verify().map_err(Into::into).and_then(|()| held.check()))
    }
}

impl Pools {
    /// Takes the objects, does something with them, and releases them, whatever came of it. A release that cannot be
    /// written is asked for again by the operator.
    fn with_taken<T>(
        &self,
        disks: &Disks,
        taker: &Taker,
        work: impl FnOnce(&[Held<'_>]) -> Result<T, TransferError>,
    ) -> Result<T, TransferError> {
        let mut held = Vec::new();
        let taken = disks.iter().try_for_each(|(disk, granted)| {
            let pool = self.get(&granted.object.pool)?;
            let _lock = pool.begin(&granted.object.uid)?;
            match pool.write_taken(granted, taker)? {
                None => held.push(Held { disk, pool, granted, taker }),
                Some(conflict) => {
                    pool.withdraw(granted, taker, &conflict);
                    return Err(TransferError::Conflict { uid: granted.object.uid.clone(), conflict });
                }
            }
            Ok(())
        });
        kibo_failpoint::reach_blocking("transfer-taken");
        let done = taken.and_then(|()| work(&held));
        for Held { pool, granted, .. } in held {
            if let Err(error) = pool.release(&granted.object.uid, granted.grant.epoch) {
                tracing::warn!(object = %granted.object.uid, %error, "the end of a transfer is not recorded yet");
            }
        }
        kibo_failpoint::reach_blocking("transfer-released");
        done
    }
}
