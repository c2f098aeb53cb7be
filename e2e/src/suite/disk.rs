//! A disk of its own for a storage pool: a file system in a sparse file, which a test can fill.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{FallocateFlags, fallocate, statvfs};

/// Mounted; dropped, it is gone with what is on it.
pub struct Disk {
    directory: PathBuf,
    image: PathBuf,
    mount: PathBuf,
    filler: PathBuf,
}

impl Disk {
    /// Makes and mounts one of so many bytes in `directory`, which is empty and goes with it.
    pub fn mount(directory: PathBuf, bytes: u64) -> Result<Self> {
        let (image, mount) = (directory.join("disk.ext4"), directory.join("disk"));
        let disk = Self { filler: mount.join("filler"), directory, image, mount };
        fs::create_dir(&disk.mount).context("failed to make the mount point")?;
        File::create_new(&disk.image).and_then(|file| file.set_len(bytes)).context("failed to make the disk's file")?;
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&disk.image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&disk.image).arg(&disk.mount))?;
        Ok(disk)
    }

    /// A directory on it that does not exist yet.
    pub fn pool(&self) -> PathBuf {
        self.mount.join("pool")
    }

    /// Takes all but `left` bytes.
    pub fn fill(&self, left: u64) -> Result<()> {
        let space = statvfs(&self.mount)?;
        let free = space.f_bavail * space.f_frsize;
        let file = File::create_new(&self.filler)?;
        let taken = free.checked_sub(left).context("the disk has less free than is to be left")?;
        fallocate(&file, FallocateFlags::empty(), 0, taken).context("failed to fill the disk")
    }

    /// Gives back what [`Self::fill`] took.
    pub fn empty(&self) -> Result<()> {
        fs::remove_file(&self.filler).context("failed to free the disk")
    }

    /// Makes its file system give up and become read-only, as one does that has found itself damaged.
    pub fn fail(&self) -> Result<()> {
        run(Command::new("mount").args(["-o", "remount,abort"]).arg(&self.mount))
    }

    /// Checks it and mounts it anew; an error as long as something of it is in use. VMs of others keep it in use where the
    /// host's mounts are not shared: a test that does this runs alone.
    pub fn repair(&self) -> Result<()> {
        if is_mounted(&self.mount)? {
            run(Command::new("umount").arg(&self.mount))?;
        }
        let used = Command::new("losetup").arg("--associated").arg(&self.image).output()?;
        ensure!(used.stdout.is_empty(), "still in use: {}", String::from_utf8_lossy(&used.stdout).trim());
        let checked = Command::new("e2fsck").args(["-p", "-f"]).arg(&self.image).output()?;
        let said = String::from_utf8_lossy(&checked.stdout).into_owned();
        // 1: what was left undone was set right.
        ensure!(matches!(checked.status.code(), Some(0 | 1)), "{}: {said}", self.image.display());
        run(Command::new("mount").args(["-o", "loop"]).arg(&self.image).arg(&self.mount))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily: the daemon of the pool may still look at it.
        let unmounted = run(Command::new("umount").arg("--lazy").arg(&self.mount));
        // Never through the mount, should it still be there.
        let removed = fs::remove_dir(&self.mount)
            .and_then(|()| fs::remove_file(&self.image))
            .and_then(|()| fs::remove_dir(&self.directory));
        for error in [unmounted.err(), removed.err().map(Into::into)].into_iter().flatten() {
            eprintln!("failed to take the disk in {} away: {error:#}", self.directory.display());
        }
    }
}

fn is_mounted(path: &Path) -> Result<bool> {
    Ok(procfs::process::Process::myself()?.mountinfo()?.into_iter().any(|mount| mount.mount_point == path))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("failed to run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
