//! Processes that outlive the one that started them, and how to name one so that a later process
//! with the same pid is never taken for it.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

/// Every process of a local cluster carries its state directory in this variable, also what a
/// component started itself: so a listing finds what no record names.
pub const STATE_VARIABLE: &str = "KIBOTOS_LOCAL_STATE";

/// How often a state is looked at that the kernel does not tell us about.
const POLL: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("{} does not exist or is not executable: {hint}", program.display())]
    NoProgram { program: PathBuf, hint: &'static str },
    #[error("failed to start {}", program.display())]
    Spawn {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("failed to send {signal:?} to process {pid}")]
    Signal {
        pid: i32,
        signal: Signal,
        #[source]
        source: io::Error,
    },
    #[error("process {pid} is still there {limit:?} after SIGKILL: look at its state in ps")]
    Immortal { pid: i32, limit: Duration },
}

/// One process: its pid and when it was started, in clock ticks since the boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessId {
    pub pid: i32,
    pub start_ticks: u64,
}

impl ProcessId {
    /// The process that has this pid now, unless it has ended already.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = procfs::process::Process::new(pid).ok()?.stat().ok()?;
        // A zombie only waits for its parent to look; but while it has threads these still hold its
        // files and ports.
        let ended = matches!(stat.state, 'Z' | 'X') && stat.num_threads <= 1;
        (!ended).then_some(Self { pid, start_ticks: stat.starttime })
    }

    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Whether the file of its program was replaced or removed since it was started.
    pub fn is_outdated(self) -> bool {
        // The link of a replaced file ends so; procfs leaves it as it is.
        fs::read_link(format!("/proc/{}/exe", self.pid))
            .is_ok_and(|exe| exe.as_os_str().to_string_lossy().ends_with(" (deleted)"))
    }

    /// Sends a signal to this very process; false when it is gone already.
    pub fn signal(self, signal: Signal) -> Result<bool, ProcessError> {
        let failed = |source: rustix::io::Errno| ProcessError::Signal { pid: self.pid, signal, source: source.into() };
        let Some(pid) = Pid::from_raw(self.pid) else {
            return Ok(false);
        };
        let descriptor = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(descriptor) => descriptor,
            Err(rustix::io::Errno::SRCH) => return Ok(false),
            Err(source) => return Err(failed(source)),
        };
        // Looked at after the open: from here on the descriptor cannot come to mean another one.
        if !self.is_alive() {
            return Ok(false);
        }
        match pidfd_send_signal(&descriptor, signal) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::SRCH) => Ok(false),
            Err(source) => Err(failed(source)),
        }
    }

    /// Waits until the process has ended; false when it has not within `limit`.
    pub async fn ended_within(self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while self.is_alive() {
            if Instant::now() >= deadline {
                return false;
            }
            sleep(POLL).await;
        }
        true
    }

    /// Asks the process to end, and makes it end when it has not within `grace`.
    /// Returns whether it ended by itself.
    pub async fn terminate(self, grace: Duration) -> Result<bool, ProcessError> {
        self.signal(Signal::TERM)?;
        // A stopped process would take the signal only when it is continued.
        self.signal(Signal::CONT)?;
        if self.ended_within(grace).await {
            return Ok(true);
        }
        self.kill().await?;
        Ok(false)
    }

    /// Kills the process and waits until it is gone.
    pub async fn kill(self) -> Result<(), ProcessError> {
        const LIMIT: Duration = Duration::from_secs(10);
        self.signal(Signal::KILL)?;
        if self.ended_within(LIMIT).await {
            return Ok(());
        }
        Err(ProcessError::Immortal { pid: self.pid, limit: LIMIT })
    }
}

/// What to start, and where its output goes.
#[derive(Clone, Debug)]
pub struct Launch {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    pub env: Vec<(OsString, OsString)>,
    /// Output and errors are appended here.
    pub log: PathBuf,
    /// What to do when the program is missing.
    pub hint: &'static str,
}

impl Launch {
    pub fn new(program: PathBuf, log: PathBuf, hint: &'static str) -> Self {
        Self { program, args: Vec::new(), env: Vec::new(), log, hint }
    }

    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// `--name=value`
    #[must_use]
    pub fn flag(self, name: &str, value: impl Into<OsString>) -> Self {
        let mut arg = OsString::from(format!("--{name}="));
        arg.push(value.into());
        self.arg(arg)
    }

    /// Starts the program in a session of its own: neither the terminal's ^C nor its end reaches it.
    pub fn start(&self, state: &Path) -> Result<ProcessId, ProcessError> {
        use std::os::unix::fs::PermissionsExt as _;

        let executable =
            fs::metadata(&self.program).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
        if !executable {
            return Err(ProcessError::NoProgram { program: self.program.clone(), hint: self.hint });
        }
        let failed = |source| ProcessError::Spawn { program: self.program.clone(), source };
        let log = OpenOptions::new().create(true).append(true).open(&self.log).map_err(failed)?;
        // setsid(1) makes the session and becomes the program: the pid stays the same.
        let mut child = Command::new("setsid")
            .arg(&self.program)
            .args(&self.args)
            .env_remove("KUBECONFIG")
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env(STATE_VARIABLE, state)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(failed)?)
            .stderr(log)
            .spawn()
            .map_err(failed)?;
        let pid = i32::try_from(child.id()).expect("pids are below 2^22");
        let id = ProcessId::of(pid);
        // While we live we are the parent: somebody has to collect it when it ends.
        std::thread::spawn(move || child.wait());
        id.ok_or_else(|| failed(io::Error::other("it ended at once, see its log")))
    }
}

/// Every process whose environment or command line names `state`: what the cluster in that
/// directory runs, whether recorded or not. Never ourselves.
pub fn processes_of(state: &Path) -> Vec<Listed> {
    let Ok(all) = procfs::process::all_processes() else {
        return Vec::new();
    };
    let own = std::process::id();
    all.flatten()
        .filter(|process| u32::try_from(process.pid) != Ok(own))
        .filter_map(|process| {
            let marked =
                process.environ().is_ok_and(|env| env.get(&OsString::from(STATE_VARIABLE)).is_some_and(|v| v == state));
            let cmdline = process.cmdline().ok()?;
            let program = Path::new(cmdline.first()?).file_name()?.to_string_lossy().into_owned();
            // A command line alone proves little: an editor may have a file of ours open.
            let named = COMPONENTS.contains(&program.as_str()) && cmdline.iter().any(|arg| mentions(arg, state));
            if !marked && !named {
                return None;
            }
            let leads_session = process.stat().is_ok_and(|stat| stat.session == process.pid);
            Some(Listed { id: ProcessId::of(process.pid)?, program, leads_session, command: cmdline.join(" ") })
        })
        .collect()
}

/// A virtual machine found by listing.
#[derive(Clone, Debug)]
pub struct VirtualMachine {
    pub id: ProcessId,
    pub instance: String,
    /// The state directory of the daemon that started it, where it says so.
    pub state_dir: Option<PathBuf>,
}

/// The virtual machines of a node: their processes carry `kibotos:<node>:<instance>` as their name.
pub fn virtual_machines(node: &str) -> Vec<VirtualMachine> {
    let prefix = format!("kibotos:{node}:");
    let Ok(all) = procfs::process::all_processes() else { return Vec::new() };
    all.flatten()
        .filter_map(|process| {
            let cmdline = process.cmdline().ok()?;
            // As an option's value: a search for the name is no virtual machine.
            let name = cmdline.windows(2).find(|pair| pair[0] == "-name")?[1].clone();
            let instance = name.strip_prefix(&prefix)?.to_owned();
            let environ = process.environ().unwrap_or_default();
            let state_dir = environ.get(&OsString::from("KIBOTOS_STATE_DIR")).map(PathBuf::from);
            Some(VirtualMachine { id: ProcessId::of(process.pid)?, instance, state_dir })
        })
        .collect()
}

/// A process found by listing.
#[derive(Clone, Debug)]
pub struct Listed {
    pub id: ProcessId,
    /// The file name of its first argument.
    pub program: String,
    pub command: String,
    /// As every component does; what a component starts does not.
    leads_session: bool,
}

impl Listed {
    /// Whether it is one of the programs that a local cluster starts itself; a virtual machine is not.
    pub fn is_component(&self) -> bool {
        let name = self.program.as_str();
        let is_ours = COMPONENTS.contains(&name) && (name != "kibo-node-daemon" || self.command.contains(" run "));
        is_ours && self.leads_session
    }
}

const COMPONENTS: [&str; 5] =
    ["etcd", "kube-apiserver", "kube-controller-manager", "kibo-operator", "kibo-node-daemon"];

/// Whether `arg` contains the path `state` itself or something below it, not merely a longer name.
fn mentions(arg: &str, state: &Path) -> bool {
    let Some(state) = state.to_str() else {
        return false;
    };
    arg.match_indices(state).any(|(at, _)| matches!(arg.as_bytes().get(at + state.len()), None | Some(b'/' | b',')))
}

/// The last lines of a log, for an error's text.
pub fn tail(log: &Path, lines: usize) -> String {
    let Ok(bytes) = fs::read(log) else {
        return String::new();
    };
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_mentioned_only_as_a_whole() {
        let state = Path::new("/tmp/a");
        assert!(mentions("--data-dir=/tmp/a/etcd", state));
        assert!(mentions("guest=x,file=/tmp/a,y", state));
        assert!(mentions("/tmp/a", state));
        assert!(!mentions("--data-dir=/tmp/ab/etcd", state));
    }

    #[tokio::test]
    async fn a_started_process_is_found_listed_and_ended() {
        let state = tempfile::tempdir().unwrap();
        let log = state.path().join("log");
        let launch = Launch::new("/bin/sleep".into(), log, "").arg("60");
        let id = launch.start(state.path()).unwrap();
        assert!(id.is_alive());
        // exec has succeeded a moment before the kernel shows the new environment.
        let listed = async {
            loop {
                let listed: Vec<_> = processes_of(state.path()).iter().map(|p| p.id).collect();
                if !listed.is_empty() {
                    return listed;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        assert_eq!(tokio::time::timeout(Duration::from_secs(5), listed).await, Ok(vec![id]));
        assert!(id.terminate(Duration::from_secs(5)).await.unwrap());
        assert!(!id.is_alive());
        assert!(!id.signal(Signal::TERM).unwrap());
    }

    #[tokio::test]
    async fn a_pid_with_another_start_time_is_never_signalled() {
        let state = tempfile::tempdir().unwrap();
        let launch = Launch::new("/bin/sleep".into(), state.path().join("log"), "").arg("60");
        let id = launch.start(state.path()).unwrap();
        let foreign = ProcessId { start_ticks: id.start_ticks + 1, ..id };
        assert!(!foreign.signal(Signal::KILL).unwrap());
        assert!(id.is_alive());
        id.kill().await.unwrap();
    }
}
