//! From the kernel's start to an open port.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use kibo_guest_protocol::PORT_NAME;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, mount};

use crate::modules;
use crate::port::Port;
use crate::timer;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to mount {what}: {source}")]
    Mount { what: &'static str, source: io::Error },
    #[error(transparent)]
    Modules(#[from] modules::Error),
    #[error("failed to open the port {path}: {source}")]
    Open { path: PathBuf, source: io::Error },
    #[error("the kernel has no timer that works: {0}")]
    NoTimer(io::Error),
    #[error("failed to set up wake-ups: {0}")]
    Wake(#[from] io::Error),
}

pub fn run() -> Result<Port, Error> {
    let system = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NODEV;
    for (fs_type, target, flags) in
        [("proc", "/proc", system), ("sysfs", "/sys", system), ("devtmpfs", "/dev", MountFlags::NOSUID)]
    {
        mount(fs_type, target, fs_type, flags, None)
            .map_err(|errno| Error::Mount { what: fs_type, source: errno.into() })?;
    }
    // Before the port is open, which is how the host knows that nothing has begun.
    if !timer::is_there() {
        return Err(Error::NoTimer(timer::boot_anew()));
    }
    modules::load(modules::Moment::Boot)?;
    let path = find_port();
    let fd = rustix::fs::open(&path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| Error::Open { path, source: errno.into() })?;
    Ok(Port::new(fd))
}

/// The host names its port; which device that is depends on what else it attached.
fn find_port() -> PathBuf {
    let mut said = false;
    loop {
        let names = fs::read_dir("/sys/class/virtio-ports").into_iter().flatten().flatten();
        for entry in names {
            let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            if name.trim_end() == PORT_NAME {
                return Path::new("/dev").join(entry.file_name());
            }
        }
        if !std::mem::replace(&mut said, true) {
            eprintln!("kibo-guest-agent: waiting for the virtio-serial port {PORT_NAME}");
        }
        sleep(Duration::from_millis(20));
    }
}
