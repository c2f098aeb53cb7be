//! Proves that this host can run guests, by running one: opening /dev/kvm proves nothing, since some nested hosts open it
//! and then hang every guest. That guest also reads a disk by `io_uring`, which a kernel can forbid and a QEMU can lack; where
//! it cannot, disks are used by threads.

use std::{
    fs, io,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use kibo_crds::{Bytes, MilliCpu};
use kibo_guest_protocol::v1::{Configure, LogData, RootImage, WritableLayer};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;

use crate::{
    config::{Accelerator, DiskIo, VmmConfig},
    durable,
    guest::{GuestEvent, LogSink},
    instance::{DiskPools, Input, RunningVm, Watched},
    pool::{IMAGE, ImageError, open_image},
    vmm::{Aio, Disk, Machine, Rules, SocketDir, Vmm, io_uring_rules},
};

/// The directory; process and cgroup are named after it too.
const NAME: &str = "accelerator-proof";
const CACHE: &str = "accelerator.json";
/// The serial of the disk that the guest reads.
const DISK: &str = "proof";
const DISK_SIZE: Bytes = Bytes::mib(1);
/// From the hello to a disk that was read, on a host that may be busy.
const DISK_LIMIT: Duration = Duration::from_secs(60);
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
    #[error(
        "vmm.disk_io = \"io_uring\" cannot be used on this host, while threads can: {problem}. Set it to \"auto\", or let QEMU \
         use it: a kernel with kernel.io_uring_disabled = 0, and a QEMU that was built with it"
    )]
    NoIoUring { problem: String },
    #[error("failed to {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

/// What was proved, and of what.
#[derive(Debug, Serialize, Deserialize)]
struct Proof {
    circumstances: Circumstances,
    disk_io: Aio,
}

/// What a proof depends on: as long as all of it is the same, the result is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Circumstances {
    /// The kernel's random id of this boot of the host.
    boot_id: String,
    accelerator: String,
    disk_io: String,
    io_uring: Rules,
    uid: u32,
    gid: u32,
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
        Ok(Self {
            boot_id: boot_id.to_owned(),
            accelerator: config.accelerator.to_string(),
            disk_io: config.disk_io.to_string(),
            io_uring: io_uring_rules(),
            uid: config.uid,
            gid: config.gid,
            files,
        })
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

/// Boots a guest to its agent's hello within `limit` and lets it read a disk, unless that has been done since the host's boot
/// with the same files; answers how disks are used on this host. Only success is remembered: a host that failed may have
/// been mended. Call it after the recovery, which ends the process of a proof that was cut off.
pub async fn prove(vmm: &Vmm, boot_id: &str, limit: Duration) -> Result<Aio, ProofError> {
    let state_dir = vmm.state_dir();
    let directory = state_dir.join(NAME);
    // The rest of a daemon that was killed in the middle; its process is ended by the recovery.
    clear(vmm, &directory, &[Aio::IoUring, Aio::Threads])?;
    let circumstances = Circumstances::of(vmm.config(), boot_id)?;
    if let Some(known) = read(state_dir).filter(|known| known.circumstances == circumstances) {
        return Ok(known.disk_io);
    }
    let started = Instant::now();
    let disk_io = find(vmm, &directory, limit).await?;
    let (accelerator, after) = (vmm.config().accelerator, started.elapsed());
    tracing::info!(%accelerator, disk_io = disk_io.as_str(), ?after, "a guest has booted on this host");
    let cache = state_dir.join(CACHE);
    let text = serde_json::to_vec_pretty(&Proof { circumstances, disk_io });
    let text = text.map_err(|error| failed("write", &cache)(error.into()))?;
    durable::replace(&cache, &text).map_err(failed("write", &cache))?;
    Ok(disk_io)
}

/// How the VMs of a daemon with this state directory use their disks, as it found out last.
pub fn remembered(state_dir: &Path) -> Option<Aio> {
    read(state_dir).map(|proof| proof.disk_io)
}

fn read(state_dir: &Path) -> Option<Proof> {
    serde_json::from_slice(&fs::read(state_dir.join(CACHE)).ok()?).ok()
}

/// The first disk I/O with which a guest boots and reads, of what the configuration allows.
async fn find(vmm: &Vmm, directory: &Path, limit: Duration) -> Result<Aio, ProofError> {
    let VmmConfig { accelerator, disk_io, .. } = *vmm.config();
    let unusable = |failure: Failure| ProofError::Unusable { accelerator, problem: failure.problem() };
    let mut refused = None;
    if disk_io != DiskIo::Threads {
        match attempt(vmm, directory, limit, Aio::IoUring).await? {
            Ok(()) => return Ok(Aio::IoUring),
            // No other disk makes that guest boot.
            Err(failure @ Failure::Boot(_)) => return Err(unusable(failure)),
            Err(failure) => refused = Some(failure.problem()),
        }
    }
    attempt(vmm, directory, limit, Aio::Threads).await?.map_err(unusable)?;
    match refused {
        Some(problem) if disk_io == DiskIo::IoUring => return Err(ProofError::NoIoUring { problem }),
        Some(problem) => tracing::info!(problem, "no guest can use io_uring on this host: disks are used by threads"),
        None => {}
    }
    Ok(Aio::Threads)
}

async fn attempt(vmm: &Vmm, directory: &Path, limit: Duration, aio: Aio) -> Result<Result<(), Failure>, ProofError> {
    let result = boot(&vmm.trying(aio), &name(vmm, aio), directory, limit).await;
    clear(vmm, directory, &[aio])?;
    Ok(match result {
        // Later ones use threads then by themselves, and say so.
        Ok(said) if aio == Aio::IoUring && said.contains(aio.as_str()) => Err(Failure::Disk(said)),
        result => result.map(drop),
    })
}

/// What came of a guest, for people.
#[derive(Debug)]
enum Failure {
    /// It did not boot, and its disk is not the reason.
    Boot(String),
    /// QEMU went by itself.
    Exited(String),
    /// It did not read its disk.
    Disk(String),
}

impl Failure {
    fn problem(self) -> String {
        match self {
            Self::Boot(problem) | Self::Exited(problem) | Self::Disk(problem) => problem,
        }
    }

    fn with(self, console: &str) -> Self {
        let with = |problem: String| {
            if console.is_empty() { problem } else { format!("{problem}; its console says: {console}") }
        };
        match self {
            Self::Boot(problem) => Self::Boot(with(problem)),
            Self::Exited(problem) => Self::Exited(with(problem)),
            Self::Disk(problem) => Self::Disk(with(problem)),
        }
    }
}

/// Answers what QEMU complained about.
async fn boot(vmm: &Vmm, name: &str, directory: &Path, limit: Duration) -> Result<String, Failure> {
    let failed = |action: &str, error: &dyn std::fmt::Display| {
        Failure::Boot(format!("failed to {action} {}: {error}", directory.display()))
    };
    fs::create_dir_all(directory).map_err(|error| failed("make", &error))?;
    let sockets = SocketDir::open(directory).map_err(|error| failed("open", &error))?;
    let disk = disk(directory).map_err(|error| Failure::Boot(error.to_string()))?;
    let started = {
        let (vmm, sockets, machine) = (vmm.clone(), sockets.clone(), machine(name.to_owned(), disk));
        tokio::task::spawn_blocking(move || vmm.start(machine, &sockets)).await
    };
    let started = started.map_err(|error| Failure::Boot(error.to_string()))?;
    let started = started.map_err(|error| Failure::Boot(error.to_string()))?;
    let (sender, mut inputs) = mpsc::unbounded_channel();
    let watched = Watched {
        process: std::sync::Arc::new(started.process),
        complaints: Some(started.complaints),
        cgroup: vmm.cgroup(name),
        directory: directory.to_owned(),
        sockets,
        disks: DiskPools::default(),
        was_stalled: false,
    };
    let mut vm = RunningVm::watch(watched, NoLog, false, &sender);
    let tried = try_out(&mut inputs, &mut vm, limit).await;
    let console = vm.console.text();
    let mut said = String::new();
    if !matches!(tried, Err(Failure::Exited(_))) {
        vm.kill();
        let ended = tokio::time::timeout(END_LIMIT, exited(&mut inputs)).await;
        // It may hang with its disk.
        said = ended.map_err(|_| Failure::Disk("its process cannot be killed".to_owned()))?;
    }
    tried.map(|()| said).map_err(|failure| failure.with(&console))
}

async fn try_out(
    inputs: &mut mpsc::UnboundedReceiver<Input>,
    vm: &mut RunningVm,
    limit: Duration,
) -> Result<(), Failure> {
    let silent = |what: &str, limit: Duration| format!("its agent did not {what} within {} s", limit.as_secs());
    let hello = until(inputs, vm, |event| matches!(event, GuestEvent::Connected(_)));
    tokio::time::timeout(limit, hello).await.map_err(|_| Failure::Boot(silent("answer", limit)))??;
    // It finds its disk and looks for partitions, and then fails, as there is no root image.
    vm.guest.configure(Configure {
        instance_id: NAME.to_owned(),
        hostname: NAME.to_owned(),
        root_image: Some(RootImage { serial: "none".to_owned(), fs_type: "erofs".to_owned() }),
        writable_layer: Some(WritableLayer { serial: DISK.to_owned() }),
        ..Configure::default()
    });
    let configured = until(inputs, vm, |event| matches!(event, GuestEvent::Configured(_)));
    let configured = tokio::time::timeout(DISK_LIMIT, configured).await;
    configured.map_err(|_| Failure::Disk(silent("find its disk", DISK_LIMIT)))??;
    let unknown = |why: String| Failure::Disk(format!("nobody knows whether it has read its disk: {why}"));
    let reads = tokio::time::timeout(END_LIMIT, vm.reads(DISK)).await;
    let reads = reads.map_err(|_| unknown("QEMU does not answer".to_owned()))?;
    let reads = reads.map_err(|error| unknown(error.to_string()))?;
    if reads.succeeded == 0 || reads.failed > 0 {
        return Err(Failure::Disk(format!("it could not read its disk ({} of its reads failed)", reads.failed)));
    }
    Ok(())
}

/// It is no Instance's id, so a process that a killed daemon left is ended as a stray; and it is another one for each
/// state directory, since another cluster's node of the same id may prove at the same time. One that cannot be killed is in no
/// later one's way.
fn name(vmm: &Vmm, aio: Aio) -> String {
    let hash = Sha256::digest(vmm.state_dir().as_os_str().as_bytes());
    format!("{NAME}-{:02x}{:02x}{:02x}{:02x}-{}", hash[0], hash[1], hash[2], hash[3], aio.as_str())
}

fn machine(name: String, disk: Disk) -> Machine {
    Machine { name, cpu: MilliCpu(1000), memory: MEMORY, memory_limit: MEMORY_LIMIT, disks: vec![disk], tap: None }
}

/// Opened as a pool opens an image. Nobody else ever gets it, so that no lock has to say when the last use is over.
fn disk(directory: &Path) -> Result<Disk, ImageError> {
    let path = directory.join(IMAGE);
    let made = fs::File::create_new(&path).and_then(|file| file.set_len(DISK_SIZE.0));
    made.map_err(|source| ImageError::Io { action: "make", path, source })?;
    let image = open_image(directory, false)?;
    Ok(Disk { serial: DISK.to_owned(), file: image.file, read_only: false, direct: image.is_direct, is_locked: true })
}

/// Waits until the guest has done something, or QEMU has ended.
async fn until(
    inputs: &mut mpsc::UnboundedReceiver<Input>,
    vm: &mut RunningVm,
    is_it: impl Fn(&GuestEvent) -> bool,
) -> Result<(), Failure> {
    loop {
        tokio::select! {
            event = vm.next_event() => if is_it(&event) {
                return Ok(());
            },
            Some(input) = inputs.recv() => if let Input::Exited { how, explanation, .. } = input {
                return Err(Failure::Exited(format!("QEMU ended {how}: {explanation}")));
            },
        }
    }
}

/// What QEMU complained about.
async fn exited(inputs: &mut mpsc::UnboundedReceiver<Input>) -> String {
    while let Some(input) = inputs.recv().await {
        if let Input::Exited { explanation, .. } = input {
            return explanation;
        }
    }
    String::new()
}

fn clear(vmm: &Vmm, directory: &Path, of: &[Aio]) -> Result<(), ProofError> {
    for aio in of {
        if let Err(error) = vmm.cgroup(&name(vmm, *aio)).remove() {
            tracing::warn!(%error, "a guest that was tried cannot be cleared away yet");
        }
    }
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
