//! Images that are open for a VM, and how this host knows that one is not any more.
//!
//! The end of QEMU's process is not always the end of its requests: those of `io_uring` hold the file and not the process,
//! and the kernel lets a killed one go while they are on their way to the disk. So an image is locked when it is opened
//! (`flock`): the lock belongs to what was opened, goes to QEMU with its descriptor, and is gone with the last request that
//! holds it. Only then the object is released; and whoever takes it next, by whatever right, opens it only then.
//!
//! On a file system that several hosts mount, such a lock would be a matter of its server, which may keep that of a host
//! that died; there is none there, and so no `io_uring` either. A request of a thread ends before its process does.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FsWord, OFlags, fstatfs},
    io::Errno,
};

use super::image::{IMAGE, ImageError};

/// By the numbers of `linux/magic.h` and of the file systems' own headers: those whose locks are this kernel's alone.
const LOCAL: [FsWord; 7] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0xf2f5_2010, // F2FS
    0xca45_1a4e, // bcachefs
    0x2fc1_2fc1, // ZFS
    0x0102_1994, // tmpfs
];

/// A process that is just being started has all descriptors of its parent for a moment, and the last requests of one that
/// was killed need one.
const MOMENT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(10);

/// An image that is open for reading and writing.
#[derive(Debug)]
pub struct OpenImage {
    pub file: File,
    /// It bypasses the host's page cache.
    pub is_direct: bool,
    /// As long as anything on this host still reads or writes what was opened here, [`is_closed`] says so.
    pub is_locked: bool,
}

/// Opens the image for QEMU.
///
/// A shared pool needs direct I/O: buffered pages of a node that lost its right would be flushed onto the next holder's
/// image.
pub fn open(dir: &Path, needs_direct: bool) -> Result<OpenImage, ImageError> {
    let path = dir.join(IMAGE);
    let failed = |action| {
        let path = path.clone();
        move |source| ImageError::Io { action, path, source }
    };
    let open = |flags: OFlags| {
        let flags = i32::try_from(flags.bits()).unwrap_or(0);
        OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path)
    };
    let (file, is_direct) = match open(OFlags::DIRECT) {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            if needs_direct {
                return Err(ImageError::NoDirectIo);
            }
            (open(OFlags::empty()).map_err(failed("open"))?, false)
        }
        file => (file.map_err(failed("open"))?, true),
    };
    let is_locked = keeps_locks(&file).map_err(failed("look at the file system of"))?;
    if is_locked && !is_free_within(&file, MOMENT).map_err(failed("lock"))? {
        return Err(ImageError::StillOpen { path });
    }
    Ok(OpenImage { file, is_direct, is_locked })
}

/// Whether nothing on this host reads or writes an image any more that [`open`] has opened, as far as its file system says
/// so; waits a moment for that. One that is missing is closed.
pub fn is_closed(dir: &Path) -> io::Result<bool> {
    closes_within(dir, MOMENT)
}

fn closes_within(dir: &Path, limit: Duration) -> io::Result<bool> {
    let file = match File::open(dir.join(IMAGE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        file => file?,
    };
    Ok(!keeps_locks(&file)? || is_free_within(&file, limit)?)
}

/// Whether nobody else has it locked. It is locked afterwards, as long as the file is open.
fn is_free_within(file: &File, limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return Ok(false),
            Err(TryLockError::WouldBlock) => thread::sleep(POLL),
        }
    }
}

fn keeps_locks(file: &File) -> io::Result<bool> {
    Ok(LOCAL.contains(&fstatfs(file)?.f_type))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_image_is_closed_when_the_last_one_who_got_it_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        assert!(is_closed(dir.path()).unwrap(), "there is none");
        fs::write(dir.path().join(IMAGE), [7; 4096]).unwrap();
        let open_image = open(dir.path(), false).unwrap();
        assert!(open_image.is_locked);
        // As a process does that inherits it.
        let inherited = open_image.file.try_clone().unwrap();
        drop(open_image);
        assert!(matches!(open(dir.path(), false), Err(ImageError::StillOpen { .. })));
        assert!(!closes_within(dir.path(), Duration::ZERO).unwrap());
        drop(inherited);
        assert!(is_closed(dir.path()).unwrap());
        assert!(is_closed(dir.path()).unwrap(), "who asks holds nothing");
        open(dir.path(), false).unwrap();
    }

    #[test]
    fn only_a_file_system_of_this_host_alone_is_asked_for_locks() {
        assert!(keeps_locks(&tempfile::tempfile().unwrap()).unwrap());
        assert!(!keeps_locks(&File::open("/proc/self/stat").unwrap()).unwrap());
    }
}
