//! Runs one QEMU per Instance: unprivileged, sandboxed, in its own cgroup and in empty namespaces. The daemon opens every
//! file and socket and passes descriptors, so the process can reach nothing by itself.

mod cgroup;
mod command_line;
mod launch;
mod process;
mod qmp;
mod sockets;
mod tsc;

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::{
        fd::{OwnedFd, RawFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, OnceLock},
};

use command_fds::{CommandFdExt as _, FdMapping};
use kibo_crds::{Bytes, MilliCpu, NodeId};
use tokio::net::unix::pipe;

use crate::config::{Accelerator, DiskIo, VmmConfig};

pub use cgroup::{Cgroup, CgroupError, Cgroups, Limits};
pub use command_line::{Acceleration, Aio, DiskShape};
pub use launch::{LaunchArgs, LaunchError, launch};
pub use process::{Exit, ProcessId, VmProcess, is_gone, list as list_processes, list_others, process_name};
pub use qmp::{DiskReads, FailedDisk, Qmp, QmpError, QmpEvent, RunState};
pub use sockets::SocketDir;

use command_line::{Descriptors, MachineShape, NetworkCard, TCG_CODE_MIB};
use process::STATE_VARIABLE;

/// Names of the sockets in an Instance's directory.
pub const CONTROL_SOCKET: &str = "qmp.sock";
pub const AGENT_SOCKET: &str = "agent.sock";
pub const CONSOLE_SOCKET: &str = "console.sock";

const KVM_DEVICE: &str = "/dev/kvm";
/// The first descriptor that is neither standard input nor an output.
const FIRST_FD: RawFd = 3;

#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    #[error("failed to open {what} {path}: {source}")]
    Open { what: &'static str, path: PathBuf, source: io::Error },
    #[error("failed to make the socket {path}: {source}")]
    Socket { path: PathBuf, source: io::Error },
    #[error("failed to start QEMU: {0}")]
    Spawn(io::Error),
}

/// What all VMs of this node have in common.
#[derive(Clone, Debug)]
pub struct Vmm {
    config: VmmConfig,
    node: NodeId,
    state_dir: PathBuf,
    cgroups: Cgroups,
    acceleration: Acceleration,
    /// And what the kernel said of it then. Empty: not known yet, and so threads.
    aio: Arc<OnceLock<(Aio, Rules)>>,
    /// Of the device that QEMU has to open itself.
    device_group: Option<u32>,
    launcher: PathBuf,
}

/// A disk: the file is already open.
#[derive(Debug)]
pub struct Disk {
    /// At most 20 bytes; the guest finds the disk by it.
    pub serial: String,
    pub file: File,
    pub read_only: bool,
    /// The file is open for direct I/O.
    pub direct: bool,
    /// A lock of this host's own tells when the last request on it is over. The kernel lets a process go with requests of
    /// `io_uring` on their way, so without one a disk that is written gets threads.
    pub is_locked: bool,
}

/// The guest's network: the tap is already open, and QEMU's alone from its start on.
#[derive(Debug)]
pub struct Tap {
    pub fd: OwnedFd,
    pub mac: String,
}

/// The VM to start.
#[derive(Debug)]
pub struct Machine {
    /// Names process and cgroup: the Instance's id.
    pub name: String,
    pub cpu: MilliCpu,
    pub memory: Bytes,
    /// Guest memory and QEMU's own.
    pub memory_limit: Bytes,
    pub disks: Vec<Disk>,
    /// Absent: the guest has no network.
    pub tap: Option<Tap>,
}

/// QEMU and all that it is started with.
#[derive(Debug)]
pub struct Qemu {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// By the numbers that the arguments name.
    pub files: Vec<FdMapping>,
}

/// A VM that was just started.
#[derive(Debug)]
pub struct Started {
    pub process: VmProcess,
    /// What the launcher and QEMU complain about.
    pub complaints: pipe::Receiver,
}

impl Vmm {
    /// Node id and state directory together tell this daemon's VMs from all others on the host. `launcher` is the program
    /// whose `vm-launch` becomes QEMU: this one. Blocks for a moment.
    pub fn open(config: VmmConfig, node: NodeId, state_dir: PathBuf, launcher: PathBuf) -> Result<Self, VmmError> {
        let cgroups = Cgroups::open(&config.cgroup_root, node.as_str())?;
        let acceleration = match config.accelerator {
            Accelerator::Kvm => Acceleration::Kvm,
            Accelerator::Tcg => Acceleration::Tcg { tsc_khz: tsc::measure_khz() },
        };
        let device_group = device_group(config.accelerator);
        Ok(Self { config, node, state_dir, cgroups, acceleration, aio: Arc::default(), device_group, launcher })
    }

    /// What this host was found to take. The first word stands.
    pub fn use_aio(&self, aio: Aio) {
        self.aio.get_or_init(|| (aio, io_uring_rules()));
    }

    /// The same with this disk I/O, whatever the others use.
    #[must_use]
    pub fn trying(&self, aio: Aio) -> Self {
        Self { aio: Arc::new(OnceLock::from((aio, io_uring_rules()))), ..self.clone() }
    }

    /// What was found is not believed in any more once the kernel's rules are others: threads work under all of them.
    fn aio(&self) -> Aio {
        let Some((aio, rules)) = self.aio.get() else { return Aio::Threads };
        if *aio == Aio::IoUring && self.config.disk_io != DiskIo::IoUring && *rules != io_uring_rules() {
            tracing::warn!(
                "the kernel's rules for io_uring have changed: disks get threads until the daemon is restarted"
            );
            return Aio::Threads;
        }
        *aio
    }

    /// The running program itself, also after its file was replaced by an update.
    pub fn own_program() -> PathBuf {
        PathBuf::from("/proc/self/exe")
    }

    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    /// The processes of this daemon's VMs, by the names of their machines.
    pub fn processes(&self) -> io::Result<Vec<(String, ProcessId)>> {
        list_processes(self.node.as_str(), &self.state_dir)
    }

    /// The processes of VMs of other daemons with the same node id.
    pub fn processes_of_others(&self) -> io::Result<Vec<(String, ProcessId)>> {
        list_others(self.node.as_str(), &self.state_dir)
    }

    pub fn config(&self) -> &VmmConfig {
        &self.config
    }

    /// Below it are the VMs of all nodes of this host.
    pub fn cgroups_of_host(&self) -> PathBuf {
        self.cgroups.of_host()
    }

    pub fn cgroup(&self, name: &str) -> Cgroup {
        self.cgroups.instance(name)
    }

    /// Makes cgroup and sockets and starts QEMU. Blocks; needs a tokio runtime. What it made before it failed is there
    /// afterwards: clean up as after an end.
    pub fn start(&self, machine: Machine, sockets: &SocketDir) -> Result<Started, VmmError> {
        let cgroup = self.cgroup(&machine.name);
        cgroup.create(self.boot_limits(&machine))?;
        kibo_failpoint::reach_blocking("cgroup-made");
        let name = process_name(self.node.as_str(), &machine.name);
        let qemu = self.qemu(machine, sockets)?;

        let mut command = Command::new(&self.launcher);
        // QEMU inherits this environment, and nothing else of the daemon's.
        command.env_clear().env(STATE_VARIABLE, &self.state_dir);
        command.arg("vm-launch").args(["--name", &name]);
        for file in cgroup.joins() {
            command.arg("--join").arg(file);
        }
        command.args(["--uid", &self.config.uid.to_string(), "--gid", &self.config.gid.to_string()]);
        if let Some(group) = self.device_group {
            command.args(["--group", &group.to_string()]);
        }
        command.arg("--").arg(qemu.program).args(qemu.arguments);
        spawn(command, qemu.files)
    }

    /// Opens what QEMU needs and says how it is started: all of a machine but what keeps it in its place. Blocks for a
    /// moment.
    pub fn qemu(&self, machine: Machine, sockets: &SocketDir) -> Result<Qemu, VmmError> {
        let mut inherited = Inherited::default();
        let fds = Descriptors {
            kernel: inherited.add(open("the guest's kernel", &self.config.kernel)?),
            initrd: inherited.add(open("the guest's initrd", &self.config.initrd)?),
            control: inherited.add(sockets.listen(CONTROL_SOCKET)?),
            agent: inherited.add(sockets.listen(AGENT_SOCKET)?),
            console: inherited.add(sockets.listen(CONSOLE_SOCKET)?),
            first_disk: inherited.next(),
        };
        let parts = machine.disks.into_iter().map(|disk| disk.into_parts(self.aio()));
        let (disks, files): (Vec<_>, Vec<_>) = parts.unzip();
        for file in files {
            inherited.add(file);
        }
        let name = process_name(self.node.as_str(), &machine.name);
        let card = machine.tap.map(|tap| NetworkCard { tap: inherited.add(tap.fd), mac: tap.mac });
        let shape = MachineShape { name, cpu: machine.cpu, memory: machine.memory, disks, card };
        let arguments = command_line::arguments(self.acceleration, &shape, fds);
        Ok(Qemu { program: self.config.qemu.clone(), arguments, files: inherited.into_mappings() })
    }

    /// The boot is our work and not the Workspace's, and a small Workspace's own share would let it take minutes.
    fn boot_limits(&self, machine: &Machine) -> Limits {
        let emulator = match self.acceleration {
            Acceleration::Kvm => Bytes(0),
            Acceleration::Tcg { .. } => Bytes(TCG_CODE_MIB << 20),
        };
        let memory = machine.memory_limit.checked_add(emulator).unwrap_or(machine.memory_limit);
        Limits { cpu: Some(boot_cpu(machine.cpu)), cpu_share: machine.cpu, memory }
    }
}

/// Whole vCPUs, and one for what QEMU does beside them: a quota counts all threads, and stops a vCPU that is busy for as long
/// as disks and sockets took.
fn boot_cpu(cpu: MilliCpu) -> MilliCpu {
    MilliCpu(cpu.vcpus().saturating_add(1).saturating_mul(1000))
}

/// Who may use `io_uring`; missing in older kernels, where everybody may.
const IO_URING: [&str; 2] = ["/proc/sys/kernel/io_uring_disabled", "/proc/sys/kernel/io_uring_group"];

/// What the kernel says of that now. It can be changed at any time.
pub type Rules = [Option<String>; 2];

pub fn io_uring_rules() -> Rules {
    IO_URING.map(|path| fs::read_to_string(path).ok())
}

/// The group that may use KVM, other than root's; QEMU opens the device itself, it takes no descriptor for it.
fn device_group(accelerator: Accelerator) -> Option<u32> {
    const GROUP_MAY_USE: u32 = 0o060;
    let device = (accelerator == Accelerator::Kvm).then(|| fs::metadata(KVM_DEVICE).ok()).flatten()?;
    (device.gid() != 0 && device.mode() & GROUP_MAY_USE == GROUP_MAY_USE).then_some(device.gid())
}

impl Disk {
    /// `possible`: what this host takes.
    fn into_parts(self, possible: Aio) -> (DiskShape, OwnedFd) {
        let Self { serial, file, read_only, direct, is_locked } = self;
        let locking = read_only || is_locked;
        let aio = if locking { possible } else { Aio::Threads };
        (DiskShape { serial, read_only, direct, aio, locking }, file.into())
    }
}

/// Descriptors that QEMU inherits, numbered in the order in which they are added.
#[derive(Default)]
struct Inherited(Vec<OwnedFd>);

impl Inherited {
    fn next(&self) -> RawFd {
        FIRST_FD + RawFd::try_from(self.0.len()).expect("a handful of descriptors")
    }

    fn add(&mut self, fd: impl Into<OwnedFd>) -> RawFd {
        let number = self.next();
        self.0.push(fd.into());
        number
    }

    fn into_mappings(self) -> Vec<FdMapping> {
        self.0.into_iter().zip(FIRST_FD..).map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd }).collect()
    }
}

fn open(what: &'static str, path: &Path) -> Result<File, VmmError> {
    File::open(path).map_err(|source| VmmError::Open { what, path: path.to_owned(), source })
}

fn spawn(mut command: Command, files: Vec<FdMapping>) -> Result<Started, VmmError> {
    let (complaints, output) = io::pipe().map_err(VmmError::Spawn)?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
    command.fd_mappings(files).map_err(|error| VmmError::Spawn(io::Error::other(error)))?;
    let mut child = command.spawn().map_err(VmmError::Spawn)?;
    // Nobody reaps it before us, so the pid is still its own.
    let started = VmProcess::open(child.id().cast_signed())
        .and_then(|process| Ok(Started { process, complaints: pipe::Receiver::from_owned_fd(complaints.into())? }));
    started.map_err(|error| {
        // What nobody watches must not run. Both fail only for a process that is gone.
        let _ = child.kill();
        let _ = child.wait();
        VmmError::Spawn(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_gets_its_vcpus_whole() {
        for (milli, expected) in [(1, 2000), (1000, 2000), (1001, 3000)] {
            assert_eq!(boot_cpu(MilliCpu(milli)), MilliCpu(expected), "{milli}m");
        }
    }

    #[test]
    fn a_disk_that_is_written_needs_a_lock_for_io_that_may_outlive_its_process() {
        for (read_only, is_locked, expected) in
            [(true, false, Aio::IoUring), (false, true, Aio::IoUring), (false, false, Aio::Threads)]
        {
            let of = |possible| {
                let file = tempfile::tempfile().unwrap();
                let disk = Disk { serial: "vol0".to_owned(), file, read_only, direct: false, is_locked };
                let shape = disk.into_parts(possible).0;
                (shape.aio, shape.locking)
            };
            let locks = expected == Aio::IoUring;
            assert_eq!(of(Aio::IoUring), (expected, locks), "read-only {read_only}, locked {is_locked}");
            assert_eq!(of(Aio::Threads), (Aio::Threads, locks));
        }
    }
}
