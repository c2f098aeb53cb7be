//! The QEMU process of an Instance: found by its name, held by a pidfd, gone only when it was reaped.

use std::{ffi::OsStr, fs, io, os::fd::OwnedFd, os::unix::ffi::OsStrExt as _, path::Path};

use procfs::{FromRead as _, process::Stat};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_open, pidfd_send_signal, waitid,
};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

const PROC: &str = "/proc";
const NAME_PREFIX: &str = "kibotos";
/// The kernel's letter for a thread that waits for what no signal interrupts.
const UNINTERRUPTIBLE: char = 'D';

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
    /// Takes hold of a process that runs, or that ended and is not reaped. Only [`is_gone`] says of an error that there
    /// is none.
    pub fn open(pid: i32) -> io::Result<Self> {
        let raw = Pid::from_raw(pid).ok_or_else(|| io::Error::other("0 is no process"))?;
        // In this order: a pid that is reused in between has another start time than the one that the pidfd stands for,
        // and is told apart when the two are compared with what was recorded.
        let pidfd = pidfd_open(raw, PidfdFlags::NONBLOCK)?;
        let start_time = start_time(&Path::new(PROC).join(pid.to_string()))?;
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

    /// Whether one of its threads waits in the kernel for what no signal interrupts, such as an answer of a disk. One that
    /// is gone does not.
    pub fn waits_in_kernel(&self) -> io::Result<bool> {
        let process = Path::new(PROC).join(self.id.pid.to_string());
        if unless_gone(start_time(&process))? != Some(self.id.start_time) {
            return Ok(false);
        }
        Ok(unless_gone(a_thread_waits(&process))?.unwrap_or(false))
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

/// Whether an error at a process means that the process does not exist. Any other error says nothing about it: whoever
/// took it for an end would start a second VM on the disks of the first.
pub fn is_gone(error: &io::Error) -> bool {
    let gone = [rustix::io::Errno::NOENT, rustix::io::Errno::SRCH].map(rustix::io::Errno::raw_os_error);
    error.raw_os_error().is_some_and(|code| gone.contains(&code))
}

/// Nothing for a process that is gone.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if is_gone(&error) => Ok(None),
        result => result.map(Some),
    }
}

fn read(process: &Path, file: &str) -> io::Result<Vec<u8>> {
    let path = process.join(file);
    fs::read(&path).map_err(|error| match error.raw_os_error() {
        // A message of its own would hide the number that says whether it is gone.
        Some(_) if is_gone(&error) => error,
        _ => io::Error::new(error.kind(), format!("failed to read {}: {error}", path.display())),
    })
}

fn start_time(process: &Path) -> io::Result<u64> {
    stat(process).map(|stat| stat.starttime)
}

fn stat(process: &Path) -> io::Result<Stat> {
    Stat::from_read(read(process, "stat")?.as_slice()).map_err(io::Error::other)
}

fn a_thread_waits(process: &Path) -> io::Result<bool> {
    for thread in fs::read_dir(process.join("task"))? {
        // Threads come and go while they are listed.
        if unless_gone(stat(&thread?.path()))?.is_some_and(|stat| stat.state == UNINTERRUPTIBLE) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The processes of the Instances of one daemon, by its node's id and its state directory: the name of the Instance, and
/// the process. An error when one of them cannot be looked at: it may be one of these.
pub fn list(node: &str, state_dir: &Path) -> io::Result<Vec<(String, ProcessId)>> {
    list_in(Path::new(PROC), node, state_dir)
}

/// The same of other daemons with this node id: those of other clusters, and the one that this state directory is a copy
/// of.
pub fn list_others(node: &str, state_dir: &Path) -> io::Result<Vec<(String, ProcessId)>> {
    list_where(Path::new(PROC), node, &|environment| !is_of(environment, state_dir))
}

fn list_in(proc: &Path, node: &str, state_dir: &Path) -> io::Result<Vec<(String, ProcessId)>> {
    list_where(proc, node, &|environment| is_of(environment, state_dir))
}

fn list_where(proc: &Path, node: &str, is_wanted: &dyn Fn(&[u8]) -> bool) -> io::Result<Vec<(String, ProcessId)>> {
    let prefix = process_name(node, "");
    let mut found = Vec::new();
    for entry in fs::read_dir(proc)? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // Processes come and go while they are listed.
        if let Some(instance) = unless_gone(instance_at(&entry.path(), &prefix, is_wanted))?.flatten()
            && let Some(start_time) = unless_gone(start_time(&entry.path()))?
        {
            found.push((instance, ProcessId { pid, start_time }));
        }
    }
    Ok(found)
}

/// The Instance whose VM this process is, if its environment is one that is looked for.
fn instance_at(process: &Path, prefix: &str, is_wanted: &dyn Fn(&[u8]) -> bool) -> io::Result<Option<String>> {
    let Some(instance) = instance_of(&read(process, "cmdline")?, prefix) else { return Ok(None) };
    Ok(is_wanted(&read(process, "environ")?).then_some(instance))
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

    #[test]
    fn only_what_does_not_exist_is_gone() {
        for (code, expected) in [(2, true), (3, true), (1, false), (5, false), (13, false), (23, false), (24, false)] {
            assert_eq!(is_gone(&io::Error::from_raw_os_error(code)), expected, "{code}");
        }
        assert!(is_gone(&VmProcess::open(i32::MAX).unwrap_err()));
    }

    /// A process of which something cannot be read may be a VM that runs: nobody may take it for none.
    #[test]
    fn a_listing_that_is_not_complete_is_an_error() {
        let proc = tempfile::tempdir().unwrap();
        let state_dir = Path::new("/var/lib/kibotos");
        let vm = proc.path().join("7");
        let write = |file: &str, text: &[u8]| fs::write(vm.join(file), text).unwrap();
        fs::create_dir(&vm).unwrap();
        fs::create_dir(proc.path().join("self")).unwrap();
        let listed = || list_in(proc.path(), "node-1", state_dir);
        assert_eq!(listed().unwrap(), [], "gone before it was looked at");
        write("cmdline", b"qemu\0-name\0kibotos:node-1:inst-a\0");
        assert_eq!(listed().unwrap(), [], "gone while it was looked at");
        write("environ", b"KIBOTOS_STATE_DIR=/var/lib/kibotos\0");
        let stat = fs::read("/proc/self/stat").unwrap();
        write("stat", &stat);
        assert_eq!(listed().unwrap().len(), 1);
        for file in ["stat", "environ", "cmdline"] {
            // A directory cannot be read as a file: an error like EACCES or EIO, also for root.
            fs::remove_file(vm.join(file)).unwrap();
            fs::create_dir(vm.join(file)).unwrap();
            let error = listed().unwrap_err().to_string();
            assert!(error.contains(file), "{error}");
        }
    }

    #[test]
    fn a_process_waits_when_one_of_its_threads_does() {
        let process = tempfile::tempdir().unwrap();
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        let (name, numbers) = own.rsplit_once(") ").unwrap();
        let thread = |id: &str, state: &str| {
            fs::create_dir_all(process.path().join("task").join(id)).unwrap();
            fs::write(process.path().join("task").join(id).join("stat"), format!("{name}) {state}{}", &numbers[1..]))
                .unwrap();
        };
        // The first thread has ended, and waits for the others.
        for (others, expected) in [(["R", "S"], false), (["Z", "R"], false), (["R", "D"], true), (["D", "Z"], true)] {
            thread("7", "Z");
            thread("8", others[0]);
            thread("9", others[1]);
            assert_eq!(a_thread_waits(process.path()).unwrap(), expected, "{others:?}");
        }
        fs::remove_file(process.path().join("task/8/stat")).unwrap();
        assert!(!a_thread_waits(process.path()).unwrap(), "that thread is gone");
    }

    fn spawn(command: &mut Command) -> VmProcess {
        #[expect(clippy::zombie_processes, reason = "reaping it is what is tested")]
        let child = command.spawn().unwrap();
        VmProcess::open(child.id().cast_signed()).unwrap()
    }

    #[tokio::test]
    async fn a_killed_child_is_reaped_with_its_signal() {
        let process = spawn(Command::new("sleep").arg("60"));
        assert!(VmProcess::open(process.id().pid).unwrap().waits_in_kernel().is_ok());
        process.kill();
        assert_eq!(process.exited().await.unwrap(), Exit::Signal(9));
        assert!(!process.waits_in_kernel().unwrap(), "it is gone");
        assert!(VmProcess::open(process.id().pid).is_err(), "nothing is left of it");
        process.kill();
    }

    #[tokio::test]
    async fn an_exit_code_is_told() {
        let process = spawn(Command::new("sh").args(["-c", "exit 7"]));
        assert_eq!(process.exited().await.unwrap(), Exit::Code(7));
    }
}
