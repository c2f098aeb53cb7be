//! Images: sparse raw files with an ext4 that the host makes.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use kibo_crds::{Bytes, Epoch, ObjectUid};
use rustix::{
    fs::{FallocateFlags, fallocate, statvfs},
    io::Errno,
};

use super::record_files::remove_if_there;
use crate::{durable, launch::Object};

pub const IMAGE: &str = "image.raw";
/// With the epoch of the grant that it is made under: whoever is slow to die touches only its own.
const UNFINISHED: &str = "image.raw.new.";
/// A host needs some room for itself; an image never takes the last of it.
pub(super) const HEADROOM: Bytes = Bytes::mib(64);

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("the image {path} does not exist: it was removed by hand, or the pool was replaced")]
    Missing { path: PathBuf },
    #[error("the image {path} has {found} bytes, but the control plane says {expected}")]
    Size { path: PathBuf, found: u64, expected: u64 },
    #[error("the pool has {free} free, and {size} are needed for the image: free some space or choose a smaller size")]
    NoSpace { free: Bytes, size: Bytes },
    #[error("failed to make a file system in {path}: {problem}")]
    Mkfs { path: PathBuf, problem: String },
    #[error(
        "the pool is shared by several nodes and its file system has no direct I/O, without which a node that was killed could write later: mount one that has it"
    )]
    NoDirectIo,
    #[error(
        "the image {path} is still open on this host: what a VM that has ended wrote last is on its way to the disk, or another \
         program has locked it (lslocks says which)"
    )]
    StillOpen { path: PathBuf },
    #[error("failed to {action} the image {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

/// The space of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// For everybody; some file systems keep a rest for root.
    pub free: Bytes,
    pub used: Bytes,
    pub capacity: Bytes,
}

/// Of the file system that a directory is on.
pub fn space(dir: &Path) -> io::Result<Space> {
    let fs = statvfs(dir)?;
    let bytes = |blocks: u64| Bytes(blocks.saturating_mul(fs.f_frsize));
    let used = fs.f_blocks.saturating_sub(fs.f_bfree);
    Ok(Space { free: bytes(fs.f_bavail), used: bytes(used), capacity: bytes(fs.f_blocks) })
}

/// Size of an object's image; `None` when it does not exist.
pub fn size(dir: &Path) -> io::Result<Option<Bytes>> {
    match fs::metadata(dir.join(IMAGE)) {
        Ok(metadata) => Ok(Some(Bytes(metadata.size()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes the image when it is missing, and larger when that was asked for; answers its size. It appears under its name
/// with its file system in it, or not at all, and never in the place of another one. One that is larger than was said is
/// good: it grew without anybody hearing of it.
pub fn ensure(dir: &Path, object: &Object, epoch: Epoch) -> Result<Bytes, ImageError> {
    let Object { uid, size: wanted, .. } = object;
    let path = dir.join(IMAGE);
    let failed = |action| {
        let path = path.clone();
        move |source| ImageError::Io { action, path, source }
    };
    match size(dir).map_err(failed("look at"))? {
        Some(found) if found >= *wanted => return Ok(found),
        Some(found) if object.grows_from.is_some_and(|least| found >= least) => {
            return grow(dir, found, *wanted).map(|()| *wanted);
        }
        Some(found) => return Err(ImageError::Size { path, found: found.0, expected: wanted.0 }),
        None if object.must_exist => return Err(ImageError::Missing { path }),
        None => {}
    }
    has_space(dir, *wanted)?;
    let unfinished = dir.join(format!("{UNFINISHED}{epoch}"));
    let made = make(&unfinished, uid, *wanted).and_then(|()| link(&unfinished, &path).map_err(failed("name")));
    // What stays of it is removed with the next grant.
    let _ = fs::remove_file(&unfinished);
    let is_named = made?;
    durable::sync_dir(dir).map_err(failed("sync"))?;
    if is_named {
        return Ok(*wanted);
    }
    // Another one is there, or this one after all: the answer of a network file system may get lost.
    match size(dir).map_err(failed("look at"))? {
        Some(_) => ensure(dir, object, epoch),
        // Something has the name and is no image, as a link that leads nowhere.
        None => Err(failed("name")(io::ErrorKind::AlreadyExists.into())),
    }
}

/// `false`: the name is taken.
fn link(unfinished: &Path, path: &Path) -> io::Result<bool> {
    match fs::hard_link(unfinished, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        linked => linked.map(|()| true),
    }
}

pub(super) fn has_space(dir: &Path, needed: Bytes) -> Result<(), ImageError> {
    let failed = |source| ImageError::Io { action: "find the free space for", path: dir.join(IMAGE), source };
    let Space { free, .. } = space(dir).map_err(failed)?;
    if free.saturating_sub(HEADROOM) < needed { Err(ImageError::NoSpace { free, size: needed }) } else { Ok(()) }
}

/// Sparse: what is added takes no space before it is written. Its file system is grown by the guest, which alone trusts it.
fn grow(dir: &Path, from: Bytes, to: Bytes) -> Result<(), ImageError> {
    let path = dir.join(IMAGE);
    let failed = |action| {
        let path = path.clone();
        move |source| ImageError::Io { action, path, source }
    };
    has_space(dir, to.saturating_sub(from))?;
    kibo_failpoint::reach_blocking("image-grows");
    let file = OpenOptions::new().write(true).open(&path).map_err(failed("open"))?;
    extend(&file, to).map_err(failed("grow"))?;
    kibo_failpoint::reach_blocking("image-grown");
    file.sync_all().map_err(failed("sync"))?;
    tracing::info!(image = %path.display(), %from, %to, "the image has grown");
    Ok(())
}

/// Makes a file at least so long; a longer one is left as it is. To set the length would do the same as long as nobody
/// else does anything, but whoever is slow to die would cut off what the next holder has added since.
fn extend(file: &File, to: Bytes) -> io::Result<()> {
    const LAST: u64 = 4096;
    match fallocate(file, FallocateFlags::empty(), to.0.saturating_sub(LAST), LAST.min(to.0)) {
        Err(Errno::OPNOTSUPP) if file.metadata()?.len() < to.0 => file.set_len(to.0),
        Err(Errno::OPNOTSUPP) => Ok(()),
        extended => Ok(extended?),
    }
}

fn make(path: &Path, uid: &ObjectUid, size: Bytes) -> Result<(), ImageError> {
    let failed = |action| move |source| ImageError::Io { action, path: path.to_owned(), source };
    remove_if_there(path).map_err(failed("clear away an unfinished"))?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed("make"))?;
    file.set_len(size.0).map_err(failed("size"))?;
    mkfs(path, uid)?;
    file.sync_all().map_err(failed("sync"))
}

/// Block size and reserve are fixed, so that an image grows the same way whatever its first size was.
fn mkfs(path: &Path, uid: &ObjectUid) -> Result<(), ImageError> {
    let failed = |problem| ImageError::Mkfs { path: path.to_owned(), problem };
    let label = format!("kibo-{}", &uid.as_str()[..8]);
    let output = Command::new("mkfs.ext4")
        .args(["-q", "-F", "-b", "4096", "-m", "0", "-L", &label])
        .args(["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0"])
        .arg(path)
        .env_clear()
        .env("LC_ALL", "C")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| failed(format!("mkfs.ext4 cannot be run: {error}; install e2fsprogs")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(failed(format!("mkfs.ext4 ended with {}: {}", output.status, said.trim())))
}

/// Removes what interrupted makings of these epochs left.
pub fn clear_unfinished(dir: &Path, which: impl Fn(Epoch) -> bool) -> io::Result<()> {
    clear_of_epochs(dir, UNFINISHED, which)
}

/// Removes the files of a directory whose names are this beginning and one of these epochs.
pub(super) fn clear_of_epochs(dir: &Path, beginning: &str, which: impl Fn(Epoch) -> bool) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let epoch = name.and_then(|name| name.strip_prefix(beginning)?.parse().ok().map(Epoch));
        if epoch.is_some_and(&which) {
            remove_if_there(&path)?;
        }
    }
    Ok(())
}

/// Removes the image and what interrupted makings left.
pub fn remove(dir: &Path) -> io::Result<()> {
    clear_unfinished(dir, |_| true)?;
    remove_if_there(&dir.join(IMAGE))?;
    durable::sync_dir(dir)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn a_new_image_never_takes_the_place_of_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let (unfinished, image) = (dir.path().join(format!("{UNFINISHED}1")), dir.path().join(IMAGE));
        fs::write(&unfinished, "late").unwrap();
        fs::write(&image, "precious").unwrap();
        assert!(!link(&unfinished, &image).unwrap());
        assert_eq!(fs::read_to_string(&image).unwrap(), "precious");
        fs::write(dir.path().join(format!("{UNFINISHED}2")), "of somebody else").unwrap();
        clear_unfinished(dir.path(), |of| of < Epoch(2)).unwrap();
        assert!(!unfinished.exists() && dir.path().join(format!("{UNFINISHED}2")).exists());
    }

    #[test]
    fn a_file_grows_sparse_keeps_its_data_and_never_shrinks() {
        let file = tempfile::tempfile().unwrap();
        let ends = |to: u64| {
            extend(&file, Bytes(to)).unwrap();
            file.metadata().unwrap().len()
        };
        assert_eq!(ends(8 << 20), 8 << 20);
        file.write_all_at(&[7; 4096], (8 << 20) - 4096).unwrap();
        assert_eq!(ends(64 << 20), 64 << 20);
        // Of somebody who was asked for less, long ago.
        assert_eq!(ends(8 << 20), 64 << 20);
        let mut block = [0; 4096];
        file.read_exact_at(&mut block, (8 << 20) - 4096).unwrap();
        assert_eq!(block, [7; 4096]);
        file.read_exact_at(&mut block, (64 << 20) - 4096).unwrap();
        assert_eq!(block, [0; 4096]);
        assert!(file.metadata().unwrap().blocks() * 512 < 1 << 20, "it is sparse");
    }
}
