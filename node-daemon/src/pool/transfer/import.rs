//! Disks out of an archive.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use kibo_archive::{Description, Disk, Reader, Record};
use kibo_crds::{Bytes, Epoch};
use tokio_util::sync::CancellationToken;

use super::{Disks, Held, Leave, TransferError, failed};
use crate::{
    durable,
    launch::Taker,
    pool::{Pools, image, moving, record_files::remove_if_there, sparse},
};

/// What an import makes in the directory of an object begins like this; the epoch follows.
const PREFIX: &str = "image.raw.importing.";

/// An image that has no name yet.
struct Target<'a> {
    held: &'a Held<'a>,
    path: PathBuf,
    file: File,
}

impl<'a> Target<'a> {
    fn make(held: &'a Held<'a>) -> Result<Self, TransferError> {
        let (dir, object) = (held.dir(), &held.granted.object);
        let _lock = held.pool.begin(held.uid())?;
        if image::size(&dir).map_err(failed("look at", &held.image()))?.is_some() {
            return Err(TransferError::Occupied { uid: held.uid().clone(), pool: held.pool.id().clone() });
        }
        let epoch = held.granted.grant.epoch;
        clear(&dir, |of| of <= epoch).map_err(failed("clear away what was left of", &held.image()))?;
        image::has_space(&dir, object.size)?;
        let path = dir.join(format!("{PREFIX}{epoch}"));
        let mut options = OpenOptions::new();
        let (file, _) = sparse::open(&path, options.read(true).write(true).create_new(true).mode(0o600))?;
        file.set_len(object.size.0).map_err(failed("size", &path))?;
        Ok(Self { held, path, file })
    }

    /// Gives it its name: by a link, which never takes the place of another image.
    fn name(&self) -> Result<(), TransferError> {
        let (dir, image) = (self.held.dir(), self.held.image());
        let _lock = self.held.pool.begin(self.held.uid())?;
        self.held.check()?;
        match fs::hard_link(&self.path, &image) {
            // A network file system says so too when the first answer got lost.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let inode = |path: &Path| moving::inode(path).map_err(failed("look at", path));
                if inode(&image)? != inode(&self.path)? {
                    return Err(TransferError::Occupied {
                        uid: self.held.uid().clone(),
                        pool: self.held.pool.id().clone(),
                    });
                }
            }
            linked => linked.map_err(failed("name", &image))?,
        }
        durable::sync_dir(&dir).map_err(failed("sync", &image))?;
        remove_if_there(&self.path).map_err(failed("remove the other name of", &image))?;
        durable::sync_dir(&dir).map_err(failed("sync", &image))?;
        kibo_failpoint::reach_blocking("import-named");
        Ok(())
    }
}

impl Pools {
    /// Makes the disks. When this returns well they have their names; else nothing of them is left that has none. A killed
    /// daemon leaves it until its grants are closed.
    pub fn import(
        &self,
        disks: &Disks,
        archive: &[u8],
        taker: &Taker,
        stop: &CancellationToken,
        from: impl BufRead,
    ) -> Result<(), TransferError> {
        self.with_taken(disks, taker, |held| {
            let done = import(held, archive, stop, from);
            if done.is_err() {
                give_up(held);
            }
            for it in held {
                it.pool.look_again();
            }
            done
        })
    }
}

fn import(
    held: &[Held<'_>],
    archive: &[u8],
    stop: &CancellationToken,
    from: impl BufRead,
) -> Result<(), TransferError> {
    let leave = Leave::new(held, stop);
    let mut reader = Reader::new(from)?;
    if reader.prefix().digest() != archive {
        return Err(TransferError::OtherArchive);
    }
    agree(&reader.prefix().description, held)?;
    let targets = held.iter().map(Target::make).collect::<Result<Vec<_>, _>>()?;
    let mut piece = sparse::Piece::new();
    loop {
        piece.len = sparse::PIECE;
        let Record::Data { disk, offset, length } = reader.next(piece.bytes_mut())? else { break };
        piece.len = length;
        // After what may have taken any time.
        leave.check()?;
        // There is one for each disk that the description has.
        let Some(target) = targets.iter().find(|target| target.held.disk == disk) else { continue };
        target.file.write_all_at(piece.bytes(), offset).map_err(failed("write", &target.path))?;
        kibo_failpoint::reach_blocking("import-writing");
    }
    for target in &targets {
        target.file.sync_all().map_err(failed("sync", &target.path))?;
    }
    kibo_failpoint::reach_blocking("import-synced");
    leave.check_now()?;
    targets.iter().try_for_each(Target::name)
}

/// The images are to have the sizes that the objects were made for.
fn agree(description: &Description, held: &[Held<'_>]) -> Result<(), TransferError> {
    let expected = |disk| held.iter().find(|held| held.disk == disk).map(|held| held.granted.object.size);
    let same = |disk, name, found: Bytes| match expected(disk) {
        Some(expected) if expected == found => Ok(()),
        Some(expected) => Err(TransferError::Size { disk: name, found, expected }),
        None => Err(TransferError::Volume),
    };
    same(Disk::Layer, "writable layer", description.layer)?;
    match description.volume {
        Some(volume) => same(Disk::Volume, "Volume", volume),
        None if expected(Disk::Volume).is_some() => Err(TransferError::Volume),
        None => Ok(()),
    }
}

/// What has its name already stays until its Workspace goes, which nobody can start: an image is never removed by its name
/// by somebody who may have been slow. In a pool that was declared lost all of it stays.
fn give_up(held: &[Held<'_>]) {
    for it in held.iter().filter(|it| !it.is_lost()) {
        if let Err(error) = clear(&it.dir(), |of| of == it.granted.grant.epoch) {
            tracing::warn!(object = %it.uid(), %error, "what is left of an import goes with its Workspace");
        }
    }
}

/// Removes what imports of these epochs left in the directory of an object.
pub fn clear(dir: &Path, which: impl Fn(Epoch) -> bool) -> io::Result<()> {
    image::clear_of_epochs(dir, PREFIX, which)?;
    durable::sync_dir(dir)
}
