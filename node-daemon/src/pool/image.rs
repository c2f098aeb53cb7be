//! Images: sparse raw files with an ext4 that the host makes.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use kibo_crds::{Bytes, ObjectUid};
use rustix::fs::{OFlags, statvfs};

use super::record_files::remove_if_there;
use crate::{durable, launch::Object};

pub const IMAGE: &str = "image.raw";
const UNFINISHED: &str = "image.raw.new";
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
    #[error(
        "{capacity} may be allocated in the pool and {allocated} are, so an image of {size} does not fit: \
         set a larger capacity or choose a smaller size"
    )]
    NoCapacity { capacity: Bytes, allocated: Bytes, size: Bytes },
    #[error("failed to make a file system in {path}: {problem}")]
    Mkfs { path: PathBuf, problem: String },
    #[error(
        "the pool is shared by several nodes and its file system has no direct I/O, without which a node that was killed could write later: mount one that has it"
    )]
    NoDirectIo,
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
/// with its file system in it, or not at all. One that is larger than was said is good: it grew without anybody
/// hearing of it.
pub fn ensure(dir: &Path, object: &Object) -> Result<Bytes, ImageError> {
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
    let unfinished = dir.join(UNFINISHED);
    let made = make(&unfinished, uid, *wanted);
    if made.is_err() {
        // A failure here is told by the next attempt.
        let _ = fs::remove_file(&unfinished);
    }
    made?;
    fs::rename(&unfinished, &path).map_err(failed("name"))?;
    durable::sync_dir(dir).map_err(failed("sync"))?;
    Ok(*wanted)
}

fn has_space(dir: &Path, needed: Bytes) -> Result<(), ImageError> {
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
    file.set_len(to.0).map_err(failed("grow"))?;
    kibo_failpoint::reach_blocking("image-grown");
    file.sync_all().map_err(failed("sync"))?;
    tracing::info!(image = %path.display(), %from, %to, "the image has grown");
    Ok(())
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

/// Opens the image for QEMU: the file, and whether it bypasses the host's page cache.
///
/// A shared pool needs that: buffered pages of a node that lost its right would be flushed onto the
/// next holder's image.
pub fn open(dir: &Path, needs_direct: bool) -> Result<(File, bool), ImageError> {
    let path = dir.join(IMAGE);
    let open = |flags: OFlags| {
        let flags = i32::try_from(flags.bits()).unwrap_or(0);
        OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path)
    };
    match open(OFlags::DIRECT) {
        Ok(file) => return Ok((file, true)),
        Err(error) if error.raw_os_error() != Some(rustix::io::Errno::INVAL.raw_os_error()) => {
            return Err(ImageError::Io { action: "open", path, source: error });
        }
        Err(_) if needs_direct => return Err(ImageError::NoDirectIo),
        Err(_) => {}
    }
    let file = open(OFlags::empty()).map_err(|source| ImageError::Io { action: "open", path: path.clone(), source })?;
    Ok((file, false))
}

/// Removes the image and what an interrupted making left.
pub fn remove(dir: &Path) -> io::Result<()> {
    remove_if_there(&dir.join(UNFINISHED))?;
    remove_if_there(&dir.join(IMAGE))?;
    durable::sync_dir(dir)
}
