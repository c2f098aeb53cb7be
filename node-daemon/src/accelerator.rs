//! Proves that this host can run guests, by running one: opening /dev/kvm proves nothing, since some nested hosts open it
//! and then hang every guest.

use std::{
    fs, io,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use kibo_crds::{Bytes, MilliCpu};
use kibo_guest_protocol::v1::LogData;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;

use crate::{
    config::{Accelerator, VmmConfig},
    durable,
    guest::{GuestEvent, LogSink},
    instance::{DiskPools, Input, RunningVm, Watched},
    vmm::{Machine, SocketDir, Vmm, VmmError},
};

/// The directory; process and cgroup are named after it too.
const NAME: &str = "accelerator-proof";
const CACHE: &str = "accelerator.json";
const MEMORY: Bytes = Bytes::mib(256);
const MEMORY_LIMIT: Bytes = Bytes::mib(320);
const END_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    #[error(
        "vmm.accelerator = \"{accelerator}\" runs no guest on this host: {problem}. Set it to \"tcg\" (slow), or run on a \
         host whose virtualization works"
    )]
    Unusable { accelerator: Accelerator, problem: String },
    #[error("failed to {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

/// What a proof depends on: as long as all of it is the same, the result is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Circumstances {
    /// The kernel's random id of this boot of the host.
    boot_id: String,
    accelerator: String,
    files: Vec<Identity>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Identity {
    path: PathBuf,
    inode: u64,
    size: u64,
    modified_nanos: i64,
}

impl Circumstances {
    fn of(config: &VmmConfig, boot_id: &str) -> Result<Self, ProofError> {
        let files = [&config.qemu, &config.kernel, &config.initrd];
        let files = files.into_iter().map(|path| Identity::of(path)).collect::<Result<_, _>>()?;
        Ok(Self { boot_id: boot_id.to_owned(), accelerator: config.accelerator.to_string(), files })
    }
}

impl Identity {
    fn of(path: &Path) -> Result<Self, ProofError> {
        let metadata = fs::metadata(path).map_err(failed("look at", path))?;
        let modified_nanos = metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec());
        Ok(Self { path: path.to_owned(), inode: metadata.ino(), size: metadata.size(), modified_nanos })
    }
}

/// How long a guest may take to its hello.
pub fn limit(accelerator: Accelerator) -> Duration {
    match accelerator {
        Accelerator::Kvm => Duration::from_secs(30),
        // Emulated, on a host that may just be starting everything else too.
        Accelerator::Tcg => Duration::from_secs(120),
    }
}

/// Boots a guest to its agent's hello within `limit`, unless that has been done since the host's boot with the same files.
/// Only success is remembered: a host that failed may have been mended. Call it after the recovery, which ends
/// the process of a proof that was cut off.
pub async fn prove(vmm: &Vmm, boot_id: &str, limit: Duration) -> Result<(), ProofError> {
    let state_dir = vmm.state_dir();
    let directory = state_dir.join(NAME);
    // The rest of a daemon that was killed in the middle; its process is ended by the recovery.
    clear(vmm, &directory)?;
    let circumstances = Circumstances::of(vmm.config(), boot_id)?;
    let cache = state_dir.join(CACHE);
    let known = fs::read(&cache).ok().and_then(|bytes| serde_json::from_slice::<Circumstances>(&bytes).ok());
    if known.as_ref() == Some(&circumstances) {
        return Ok(());
    }
    let started = Instant::now();
    let result = boot(vmm, &directory, limit).await;
    let cleared = clear(vmm, &directory);
    result.map_err(|problem| ProofError::Unusable { accelerator: vmm.config().accelerator, problem })?;
    cleared?;
    tracing::info!(accelerator = %vmm.config().accelerator, after = ?started.elapsed(), "a guest has booted on this host");
    let text = serde_json::to_vec_pretty(&circumstances).map_err(|error| failed("write", &cache)(error.into()))?;
    durable::replace(&cache, &text).map_err(failed("write", &cache))
}

/// The error says what went wrong, for people.
async fn boot(vmm: &Vmm, directory: &Path, limit: Duration) -> Result<(), String> {
    fs::create_dir_all(directory).map_err(|error| format!("failed to make {}: {error}", directory.display()))?;
    let sockets =
        SocketDir::open(directory).map_err(|error| format!("failed to open {}: {error}", directory.display()))?;
    let started = {
        let (vmm, sockets) = (vmm.clone(), sockets.clone());
        let start = move || vmm.start(machine(name(&vmm)), &sockets);
        tokio::task::spawn_blocking(start).await.map_err(|error| error.to_string())?
    };
    let started = started.map_err(|error: VmmError| error.to_string())?;
    let (sender, mut inputs) = mpsc::unbounded_channel();
    let watched = Watched {
        process: std::sync::Arc::new(started.process),
        complaints: Some(started.complaints),
        cgroup: vmm.cgroup(&name(vmm)),
        directory: directory.to_owned(),
        sockets,
        disks: DiskPools::default(),
        was_stalled: false,
    };
    let mut vm = RunningVm::watch(watched, NoLog, false, &sender);
    let answer = tokio::time::timeout(limit, answer(&mut inputs, &mut vm)).await;
    let console = vm.console.text();
    if !matches!(answer, Ok(Answer::Exited(_))) {
        vm.kill();
        if tokio::time::timeout(END_LIMIT, exited(&mut inputs)).await.is_err() {
            return Err("its process cannot be killed".to_owned());
        }
    }
    let problem = match answer {
        Ok(Answer::Hello) => return Ok(()),
        Ok(Answer::Exited(how)) => format!("QEMU ended {how}"),
        Err(_) => format!("its agent did not answer within {} s", limit.as_secs()),
    };
    Err(if console.is_empty() { problem } else { format!("{problem}; its console says: {console}") })
}

enum Answer {
    Hello,
    Exited(String),
}

/// It is no Instance's id, so a process that a killed daemon left is ended as a stray; and it is another one for each
/// state directory, since another cluster's node of the same id may prove at the same time.
fn name(vmm: &Vmm) -> String {
    let hash = Sha256::digest(vmm.state_dir().as_os_str().as_bytes());
    format!("{NAME}-{:02x}{:02x}{:02x}{:02x}", hash[0], hash[1], hash[2], hash[3])
}

fn machine(name: String) -> Machine {
    Machine { name, cpu: MilliCpu(1000), memory: MEMORY, memory_limit: MEMORY_LIMIT, disks: Vec::new(), tap: None }
}

async fn answer(inputs: &mut mpsc::UnboundedReceiver<Input>, vm: &mut RunningVm) -> Answer {
    loop {
        tokio::select! {
            event = vm.next_event() => if matches!(event, GuestEvent::Connected(_)) {
                return Answer::Hello;
            },
            Some(input) = inputs.recv() => if let Input::Exited { how, explanation, .. } = input {
                return Answer::Exited(format!("{how}: {explanation}"));
            },
        }
    }
}

async fn exited(inputs: &mut mpsc::UnboundedReceiver<Input>) {
    while let Some(input) = inputs.recv().await {
        if matches!(input, Input::Exited { .. }) {
            return;
        }
    }
}

fn clear(vmm: &Vmm, directory: &Path) -> Result<(), ProofError> {
    let cgroup = vmm.cgroup(&name(vmm)).remove();
    cgroup.map_err(|error| failed("remove the cgroup of", directory)(io::Error::other(error)))?;
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", directory)(error)),
        _ => Ok(()),
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ProofError {
    let path = path.to_owned();
    move |source| ProofError::Io { action, path, source }
}

/// The guest runs nothing, so it prints nothing.
struct NoLog;

impl LogSink for NoLog {
    fn offset(&self) -> u64 {
        0
    }

    fn store(&mut self, _: &LogData) {}
}
