//! The QEMU process of an Instance: found by its name, held by a pidfd, gone only when it was reaped.

use std::{ffi::OsStr, io, os::fd::OwnedFd, os::unix::ffi::OsStrExt as _, path::Path};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_open, pidfd_send_signal, waitid,
};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

const NAME_PREFIX: &str = "kibotos";

/// In the environment of every VM: the state directory of its daemon. Two daemons on one host may have the same node id,
/// each in its own cluster, and neither may take the other's VMs for its own.
pub const STATE_VARIABLE: &str = "KIBOTOS_STATE_DIR";

/// A process that cannot be confused with a later one of the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    pub pid: i32,
    /// Of the process, in clock ticks since the boot.
    pub start_time: u64,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
    /// It was not our child (its daemon is gone), so only its end is known.
    Unknown,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "with exit code {code}"),
            Self::Signal(signal) => write!(f, "by signal {signal}"),
            Self::Unknown => f.write_str("in an unknown way (an earlier daemon had started it)"),
        }
    }
}

/// The name that the process of an Instance carries in its arguments.
pub fn process_name(node: &str, instance: &str) -> String {
    format!("{NAME_PREFIX}:{node}:{instance}")
}

/// A running process.
#[derive(Debug)]
pub struct VmProcess {
    id: ProcessId,
    pidfd: AsyncFd<OwnedFd>,
}

impl VmProcess {
    /// Takes hold of a process that runs, or that ended and is not reaped.
    pub fn open(pid: i32) -> io::Result<Self> {
        let raw = Pid::from_raw(pid).ok_or_else(|| io::Error::other("0 is no process"))?;
        // In this order: a pid that is reused in between has another start time than the one that the pidfd stands for,
        // and is told apart when the two are compared with what was recorded.
        let pidfd = pidfd_open(raw, PidfdFlags::NONBLOCK)?;
        let start_time = start_time(pid)?;
        Ok(Self { id: ProcessId { pid, start_time }, pidfd: register(pidfd)? })
    }

    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// SIGKILL. Of a process that is gone already: nothing.
    pub fn kill(&self) {
        if let Err(error) = pidfd_send_signal(&self.pidfd, Signal::KILL)
            && error != rustix::io::Errno::SRCH
        {
            tracing::error!(pid = self.id.pid, %error, "failed to kill a VM's process");
        }
    }

    /// Returns when the process is gone: all its descriptors are closed, and if it was our child it is reaped.
    pub async fn exited(&self) -> io::Result<Exit> {
        loop {
            let mut ready = self.pidfd.readable().await?;
            match waitid(WaitId::PidFd(self.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
                Ok(Some(status)) => return Ok(exit(&status)),
                Ok(None) | Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
                Err(rustix::io::Errno::CHILD) => return Ok(Exit::Unknown),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(self.pidfd.get_ref())
    }
}

#[expect(unsafe_code, reason = "tokio takes descriptors of any kind only on trust")]
fn register(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open until it is dropped, which is when the AsyncFd is, and names the same file all the time.
    Ok(unsafe { AsyncFd::register(pidfd) }?)
}

fn exit(status: &WaitIdStatus) -> Exit {
    if let Some(code) = status.exit_status() {
        Exit::Code(code)
    } else {
        status.terminating_signal().map_or(Exit::Unknown, Exit::Signal)
    }
}

fn start_time(pid: i32) -> io::Result<u64> {
    let stat = procfs::process::Process::new(pid).and_then(|process| process.stat()).map_err(io::Error::other)?;
    Ok(stat.starttime)
}

/// The processes of the Instances of one daemon, by its node's id and its state directory: the name of the Instance, and
/// the process.
pub fn list(node: &str, state_dir: &Path) -> io::Result<Vec<(String, ProcessId)>> {
    let prefix = process_name(node, "");
    let mut found = Vec::new();
    for process in procfs::process::all_processes().map_err(io::Error::other)? {
        // Processes come and go while they are listed.
        let Some(pid) = process.map(|process| process.pid).ok() else { continue };
        let directory = Path::new("/proc").join(pid.to_string());
        let Ok(cmdline) = std::fs::read(directory.join("cmdline")) else { continue };
        let Some(instance) = instance_of(&cmdline, &prefix) else { continue };
        let Ok(environment) = std::fs::read(directory.join("environ")) else { continue };
        if !is_of(&environment, state_dir) {
            continue;
        }
        if let Ok(start_time) = start_time(pid) {
            found.push((instance, ProcessId { pid, start_time }));
        }
    }
    Ok(found)
}

fn is_of(environment: &[u8], state_dir: &Path) -> bool {
    let own = [STATE_VARIABLE.as_bytes(), b"=", state_dir.as_os_str().as_bytes()].concat();
    environment.split(|byte| *byte == 0).any(|variable| variable == own)
}

/// The Instance that a command line names: as QEMU's option or as the launcher's, so that neither a search for the name
/// nor an editor with it is taken for a VM.
fn instance_of(cmdline: &[u8], prefix: &str) -> Option<String> {
    let arguments: Vec<&[u8]> = cmdline.split(|byte| *byte == 0).collect();
    arguments.windows(2).find_map(|pair| {
        let [option, value] = pair else { return None };
        if *option != b"-name" && *option != b"--name" {
            return None;
        }
        OsStr::from_bytes(value).to_str()?.strip_prefix(prefix).map(str::to_owned)
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn only_an_option_names_an_instance() {
        let prefix = process_name("node-1", "");
        let cases: [(&[u8], Option<&str>); 5] = [
            (b"qemu\0-name\0kibotos:node-1:inst-a\0-smp\x001\0", Some("inst-a")),
            (b"kibo-node-daemon\0vm-launch\0--name\0kibotos:node-1:inst-a\0", Some("inst-a")),
            (b"grep\0kibotos:node-1:inst-a\0", None),
            (b"qemu\0-name\0kibotos:node-10:inst-a\0", None),
            (b"", None),
        ];
        for (cmdline, expected) in cases {
            assert_eq!(instance_of(cmdline, &prefix).as_deref(), expected, "{}", String::from_utf8_lossy(cmdline));
        }
    }

    #[test]
    fn the_same_node_of_another_cluster_is_another_one() {
        let environment = b"A=b\0KIBOTOS_STATE_DIR=/var/lib/kibotos\0";
        for (state_dir, expected) in
            [("/var/lib/kibotos", true), ("/var/lib/kibotos2", false), ("/var/lib", false), ("", false)]
        {
            assert_eq!(is_of(environment, Path::new(state_dir)), expected, "{state_dir:?}");
        }
    }

    fn spawn(command: &mut Command) -> VmProcess {
        #[expect(clippy::zombie_processes, reason = "reaping it is what is tested")]
        let child = command.spawn().unwrap();
        VmProcess::open(child.id().cast_signed()).unwrap()
    }

    #[tokio::test]
    async fn a_killed_child_is_reaped_with_its_signal() {
        let process = spawn(Command::new("sleep").arg("60"));
        process.kill();
        assert_eq!(process.exited().await.unwrap(), Exit::Signal(9));
        assert!(VmProcess::open(process.id().pid).is_err(), "nothing is left of it");
        process.kill();
    }

    #[tokio::test]
    async fn an_exit_code_is_told() {
        let process = spawn(Command::new("sh").args(["-c", "exit 7"]));
        assert_eq!(process.exited().await.unwrap(), Exit::Code(7));
    }
}
