//! The Workspace's file systems: root image below, writable layer above, Volumes and the kernel's own inside.

use std::ffi::CStr;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use kibo_guest_protocol::v1::{ConfigureStage, Failure};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change, mount_move};
use rustix::thread::UnshareFlags;

use super::Workspace;
use super::disks::Disks;
use super::grow;
use crate::request::{Request, RootImage, Volume, failure};

const IMAGE: &str = "/mnt/image";
const LAYER: &str = "/mnt/layer";
/// What is deleted is given back to the storage pool, by commits of the journal.
const GIVING_BACK: Option<&CStr> = Some(c"discard");
const MERGED: &str = "/mnt/merged";

/// Mounts all and makes the Workspace's root the thread's own.
pub fn mount_all(request: &Request, disks: &Disks) -> Result<Workspace, Failure> {
    own_namespace()
        .map_err(|errno| failure(ConfigureStage::Disks, format!("failed to make a mount namespace: {errno}")))?;
    mount_image(&request.root_image, disks)?;
    let layer = mount_layer(&request.layer_serial, disks)?;
    mount_overlay()?;
    enter_merged().map_err(|errno| at_root(format!("failed to enter the merged root: {errno}")))?;
    mount_system()?;
    let mut writable = vec![("the writable layer".to_owned(), layer)];
    for volume in &request.volumes {
        let root = mount_volume(volume, disks)?;
        if !volume.read_only {
            writable.push((format!("volume {}", volume.name), root));
        }
    }
    let open = |path: &str| rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let namespace = open("/proc/thread-self/ns/mnt")
        .map_err(|errno| at_root(format!("failed to keep the mount namespace: {errno}")))?;
    let root = open("/").map_err(|errno| at_root(format!("failed to open /: {errno}")))?;
    let terminals = open("/dev/pts").map_err(|errno| at_root(format!("failed to open /dev/pts: {errno}")))?;
    Ok(Workspace { namespace, root, terminals, writable })
}

fn at_root(message: String) -> Failure {
    failure(ConfigureStage::RootImage, message)
}

fn own_namespace() -> Result<(), Errno> {
    #[allow(unsafe_code, reason = "rustix marks every unshare as unsafe because of UnshareFlags::FILES")]
    // SAFETY: file descriptors stay shared; only this thread's mounts, root and working directory part.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
}

fn mount_image(image: &RootImage, disks: &Disks) -> Result<(), Failure> {
    let device = disks.device(&image.serial).map_err(at_root)?;
    let fs_type = image.fs_type.name();
    make_dir(IMAGE).map_err(|error| at_root(format!("failed to make {IMAGE}: {error}")))?;
    mount(device, IMAGE, fs_type, MountFlags::RDONLY, None).map_err(|errno| {
        at_root(format!(
            "failed to mount the root image (disk {:?}) as {fs_type}: {}",
            image.serial,
            explain(errno, fs_type)
        ))
    })
}

fn mount_layer(serial: &str, disks: &Disks) -> Result<OwnedFd, Failure> {
    let at_layer = |message| failure(ConfigureStage::WritableLayer, message);
    let device = disks.device(serial).map_err(at_layer)?;
    make_dir(LAYER).map_err(|error| at_layer(format!("failed to make {LAYER}: {error}")))?;
    mount(device, LAYER, "ext4", MountFlags::empty(), GIVING_BACK).map_err(|errno| {
        at_layer(format!("failed to mount the writable layer (disk {serial:?}) as ext4: {}", explain(errno, "ext4")))
    })?;
    let layer = open_dir(LAYER).map_err(|errno| at_layer(format!("failed to open the writable layer: {errno}")))?;
    grow("the writable layer", device, &layer);
    // The root directory that a Workspace sees is the upper one: root's, 0755, whatever the image says.
    for name in ["upper", "work"] {
        make_dir(&format!("{LAYER}/{name}"))
            .map_err(|error| at_layer(format!("failed to make the directory {name} on the writable layer: {error}")))?;
    }
    Ok(layer)
}

/// A file system that does not grow (it is full of errors, say) is no reason to keep what is on it from its owner: the
/// console has why, and the next start tries again.
fn grow(what: &str, device: &Path, root: &OwnedFd) {
    if let Err(error) = grow::to_disk(device, root) {
        eprintln!("kibo-guest-agent: the file system of {what} keeps its size: {error}");
    }
}

fn mount_overlay() -> Result<(), Failure> {
    let at_layer = |message| failure(ConfigureStage::WritableLayer, message);
    make_dir(MERGED).map_err(|error| at_layer(format!("failed to make {MERGED}: {error}")))?;
    let options = c"lowerdir=/mnt/image,upperdir=/mnt/layer/upper,workdir=/mnt/layer/work";
    mount("overlay", MERGED, "overlay", MountFlags::empty(), options)
        .map_err(|errno| at_layer(format!("failed to lay the writable layer over the root image: {errno}")))
}

/// The initramfs cannot be pivoted away from, so the new root is moved over it. Whoever enters the namespace later
/// starts on top.
fn enter_merged() -> Result<(), Errno> {
    rustix::process::chdir(MERGED)?;
    mount_move(".", "/")?;
    rustix::process::chroot(".")?;
    rustix::process::chdir("/")
}

/// The kernel's own file systems, and those that live in memory.
fn mount_system() -> Result<(), Failure> {
    let quiet = MountFlags::NOSUID | MountFlags::NODEV;
    let kernel = quiet | MountFlags::NOEXEC;
    for (fs_type, target, flags, options) in [
        ("proc", "/proc", kernel, c""),
        ("sysfs", "/sys", kernel, c""),
        ("devtmpfs", "/dev", MountFlags::NOSUID, c""),
        ("devpts", "/dev/pts", MountFlags::NOSUID | MountFlags::NOEXEC, c"gid=5,mode=620,ptmxmode=666"),
        ("tmpfs", "/dev/shm", quiet, c"mode=1777"),
        ("tmpfs", "/run", quiet, c"mode=0755"),
    ] {
        let made = make_dir(target).map_err(|error| at_root(format!("failed to make {target}: {error}")));
        made?;
        mount(fs_type, target, fs_type, flags, options)
            .map_err(|errno| at_root(format!("failed to mount {fs_type} at {target}: {errno}")))?;
    }
    // Only some programs want it, and a kernel without it is no reason not to start.
    if let Err(errno) = mount("cgroup2", "/sys/fs/cgroup", "cgroup2", kernel, None) {
        eprintln!("kibo-guest-agent: no cgroup2 for the workspace: {errno}");
    }
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        match rustix::fs::symlink(target, link) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(at_root(format!("failed to make {link}: {errno}"))),
        }
    }
    Ok(())
}

fn mount_volume(volume: &Volume, disks: &Disks) -> Result<OwnedFd, Failure> {
    let Volume { name, serial, mount_path, read_only } = volume;
    let path = mount_path.display();
    let at_volume = |message: String| failure(ConfigureStage::Volume, format!("volume {name}: {message}"));
    let device = disks.device(serial).map_err(at_volume)?;
    fs::create_dir_all(mount_path)
        .map_err(|error| at_volume(format!("failed to make its mount path {path}: {error}")))?;
    let flags = if *read_only { MountFlags::RDONLY } else { MountFlags::empty() };
    mount(device, mount_path, "ext4", flags, GIVING_BACK).map_err(|errno| {
        at_volume(format!("failed to mount disk {serial:?} at {path} as ext4: {}", explain(errno, "ext4")))
    })?;
    let root = open_dir(mount_path).map_err(|errno| at_volume(format!("failed to open {path}: {errno}")))?;
    if !read_only {
        grow(&format!("volume {name}"), device, &root);
    }
    Ok(root)
}

fn open_dir(path: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

fn make_dir(path: &str) -> io::Result<()> {
    match DirBuilder::new().mode(0o755).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && Path::new(path).is_dir() => Ok(()),
        result => result,
    }
}

/// The kernel's numbers for a bad file system mislead; say what they mean here.
fn explain(errno: Errno, fs_type: &str) -> String {
    match errno {
        Errno::INVAL => {
            format!("it holds no {fs_type} file system, or its superblock is damaged ({errno})")
        }
        Errno::UCLEAN | Errno::BADMSG => format!("the file system is damaged ({errno})"),
        Errno::IO => format!("the disk cannot be read, or the file system is damaged ({errno})"),
        Errno::NODEV => format!("the guest's kernel has no {fs_type}"),
        errno => errno.to_string(),
    }
}
