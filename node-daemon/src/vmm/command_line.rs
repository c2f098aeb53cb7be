//! QEMU's command line. Pure: what it says was measured, and every part has its reason here.

use std::ffi::OsString;

use kibo_crds::{Bytes, MilliCpu};
use kibo_guest_protocol::PORT_NAME;
use serde::{Deserialize, Serialize};

/// How QEMU runs the guest's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceleration {
    Kvm,
    /// Emulation. The guest reads the host's time stamp counter through it, and must be told its frequency: guessed, its
    /// clock runs several times too fast.
    Tcg {
        tsc_khz: Option<u64>,
    },
}

/// The machine to make, without its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineShape {
    /// Names the process.
    pub name: String,
    pub cpu: MilliCpu,
    pub memory: Bytes,
    pub disks: Vec<DiskShape>,
    /// Absent: the guest has no network.
    pub card: Option<NetworkCard>,
}

/// A network card at a tap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkCard {
    /// Of the tap, as QEMU inherits it.
    pub tap: i32,
    pub mac: String,
}

/// How QEMU reads and writes a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aio {
    /// Each request holds a thread as long as the file system takes for it, so that none of them outlives the process.
    Threads,
    /// Without a thread for each, and without waiting in QEMU's loop, as Linux's older asynchronous I/O would where a block
    /// of a sparse file has to be found first. Requests may outlive the process: see [`crate::vmm::Disk::is_locked`].
    IoUring,
}

impl Aio {
    /// As QEMU's `aio=` takes it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::IoUring => "io_uring",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskShape {
    /// By which the guest finds it.
    pub serial: String,
    pub read_only: bool,
    /// Past the host's page cache. The descriptor must allow it.
    pub direct: bool,
    pub aio: Aio,
    /// QEMU locks the file as well, so that no second one on this host writes to it by mistake. Not where a server would
    /// keep the lock of a host that died: who may write is said by the pool's records, and nobody else could begin.
    pub locking: bool,
}

/// Descriptors as QEMU inherits them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    pub kernel: i32,
    pub initrd: i32,
    /// Listening sockets.
    pub control: i32,
    pub agent: i32,
    pub console: i32,
    /// Of the first disk; the others follow.
    pub first_disk: i32,
}

/// MiB of translated code that the emulator keeps. Its default grows to 1 GiB, which would count as the Instance's.
pub const TCG_CODE_MIB: u64 = 64;

/// What the guest's CPU can do.
pub const fn cpu_model(acceleration: Acceleration) -> &'static str {
    match acceleration {
        Acceleration::Kvm => "host",
        // What the emulator is slow at, and what nothing needs: `rep movsb` goes byte by byte, though a kernel that is told
        // of it (ERMS) copies with nothing else; a carry-less multiplication goes bit by bit.
        Acceleration::Tcg { .. } => "max,-erms,-pclmulqdq",
    }
}

/// The arguments after the program's name.
pub fn arguments(acceleration: Acceleration, shape: &MachineShape, fds: Descriptors) -> Vec<OsString> {
    let memory_mib = shape.memory.0 >> 20;
    let mut line = Line::default();
    line.option("-name", &shape.name);
    for flag in ["-nodefaults", "-no-user-config"] {
        line.flag(flag);
    }
    line.option("-display", "none");
    line.option("-accel", accelerator(acceleration));
    line.option("-cpu", cpu_model(acceleration));
    line.option("-smp", shape.cpu.vcpus().to_string());
    // Shared memory is given back in pages of its own; anonymous memory came back in huge pages, twice as much of it.
    line.option("-object", format!("memory-backend-memfd,id=ram,size={memory_mib}M,share=on"));
    line.option("-m", format!("{memory_mib}M"));
    line.option("-machine", "microvm,x-option-roms=off,memory-backend=ram");
    // By descriptor: the unprivileged user need not be able to walk to the files.
    line.option("-kernel", format!("/proc/self/fd/{}", fds.kernel));
    line.option("-initrd", format!("/proc/self/fd/{}", fds.initrd));
    line.option("-append", kernel_arguments(acceleration));
    // A reboot ends the VM; an end waits for the daemon, which may be away just then, and learns how it came about.
    line.flag("-no-reboot");
    line.option("-action", "shutdown=pause,panic=pause");
    line.device("pvpanic");
    // Without a client what the guest prints is dropped, so that nothing grows while the daemon is away.
    line.listener("console", fds.console);
    line.option("-serial", "chardev:console");
    line.listener("control", fds.control);
    line.option("-mon", "chardev=control,mode=control");
    line.listener("agent", fds.agent);
    line.device("virtio-serial-device,id=serial");
    line.device(&format!("virtserialport,chardev=agent,name={PORT_NAME},id=agent-port"));
    line.device("virtio-balloon-device,id=balloon,free-page-reporting=on");
    for (disk, fd) in shape.disks.iter().zip(fds.first_disk..) {
        line.disk(disk, fd);
    }
    if let Some(NetworkCard { tap, mac }) = &shape.card {
        // The kernel's vhost would need a device of its own, and runs outside the sandbox.
        line.option("-netdev", format!("tap,id=net,fd={tap},vhost=off"));
        line.device(&format!("virtio-net-device,netdev=net,mac={mac}"));
    }
    line.option("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
    line.0
}

fn accelerator(acceleration: Acceleration) -> String {
    match acceleration {
        Acceleration::Kvm => "kvm".to_owned(),
        Acceleration::Tcg { .. } => format!("tcg,tb-size={TCG_CODE_MIB}"),
    }
}

/// Nothing of a Workspace is here: all guests boot alike, and are configured afterwards.
fn kernel_arguments(acceleration: Acceleration) -> String {
    let common = "console=ttyS0 quiet no_timer_check cryptomgr.notests init_on_alloc=0 panic=-1 reboot=t rdinit=/init";
    match acceleration {
        Acceleration::Tcg { tsc_khz: Some(khz) } => format!("{common} tsc_early_khz={khz} lpj=4000000"),
        _ => common.to_owned(),
    }
}

#[derive(Default)]
struct Line(Vec<OsString>);

impl Line {
    fn flag(&mut self, flag: &str) {
        self.0.push(flag.into());
    }

    fn option(&mut self, option: &str, value: impl Into<OsString>) {
        self.flag(option);
        self.0.push(value.into());
    }

    fn device(&mut self, device: &str) {
        self.option("-device", device);
    }

    /// A unix socket that already listens.
    fn listener(&mut self, id: &str, fd: i32) {
        self.option("-chardev", format!("socket,id={id},fd={fd},server=on,wait=off"));
    }

    fn disk(&mut self, disk: &DiskShape, fd: i32) {
        let DiskShape { serial, read_only, direct, aio, locking } = disk;
        let on = |yes: bool| if yes { "on" } else { "off" };
        let read_only = on(*read_only);
        let (direct, aio) = (on(*direct), aio.as_str());
        let locking = if *locking { "auto" } else { "off" };
        self.option("-add-fd", format!("fd={fd},set={fd}"));
        self.option(
            "-blockdev",
            format!(
                "driver=file,node-name={serial}-file,filename=/dev/fdset/{fd},aio={aio},cache.direct={direct},\
                 discard=unmap,locking={locking},read-only={read_only}"
            ),
        );
        self.option(
            "-blockdev",
            format!("driver=raw,node-name={serial},file={serial}-file,discard=unmap,read-only={read_only}"),
        );
        // What cannot be written (a full pool, a file system that became read-only) pauses the guest until it can, instead
        // of breaking the guest's file system.
        let errors = if disk.read_only { "" } else { ",werror=stop" };
        self.device(&format!("virtio-blk-device,id=disk-{serial},drive={serial},serial={serial}{errors}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(acceleration: Acceleration) -> Vec<String> {
        let disk = |serial: &str, read_only| {
            let aio = if read_only { Aio::Threads } else { Aio::IoUring };
            DiskShape { serial: serial.to_owned(), read_only, direct: !read_only, aio, locking: read_only }
        };
        let shape = MachineShape {
            name: "kibotos:node-1:inst-x".to_owned(),
            cpu: MilliCpu(1500),
            memory: Bytes::mib(256),
            disks: vec![disk("root", true), disk("rw", false)],
            card: Some(NetworkCard { tap: 10, mac: "02:00:00:00:00:01".to_owned() }),
        };
        let fds = Descriptors { kernel: 3, initrd: 4, control: 5, agent: 6, console: 7, first_disk: 8 };
        arguments(acceleration, &shape, fds).into_iter().map(|argument| argument.into_string().unwrap()).collect()
    }

    fn value_of<'a>(line: &'a [String], option: &str) -> Vec<&'a str> {
        line.windows(2).filter(|pair| pair[0] == option).map(|pair| pair[1].as_str()).collect()
    }

    #[test]
    fn the_process_is_named_after_its_instance() {
        let line = line(Acceleration::Kvm);
        assert_eq!(line[..2], ["-name", "kibotos:node-1:inst-x"]);
    }

    #[test]
    fn a_part_of_a_cpu_is_a_whole_vcpu() {
        assert_eq!(value_of(&line(Acceleration::Kvm), "-smp"), ["2"]);
    }

    #[test]
    fn each_disk_has_its_own_descriptor_and_is_found_by_serial() {
        let line = line(Acceleration::Kvm);
        assert_eq!(value_of(&line, "-add-fd"), ["fd=8,set=8", "fd=9,set=9"]);
        let disks = value_of(&line, "-blockdev");
        assert!(disks[0].contains("/dev/fdset/8") && disks[0].contains("read-only=on"), "{disks:?}");
        assert!(disks[0].contains("aio=threads,cache.direct=off,discard=unmap,locking=auto"), "{disks:?}");
        assert!(
            disks[2].contains("/dev/fdset/9")
                && disks[2].contains("aio=io_uring,cache.direct=on,discard=unmap,locking=off"),
            "{disks:?}"
        );
    }

    #[test]
    fn the_network_card_is_at_the_tap_that_was_passed() {
        let line = line(Acceleration::Kvm);
        assert_eq!(value_of(&line, "-netdev"), ["tap,id=net,fd=10,vhost=off"]);
        assert!(value_of(&line, "-device").contains(&"virtio-net-device,netdev=net,mac=02:00:00:00:00:01"), "{line:?}");
    }

    #[test]
    fn only_an_emulated_guest_is_told_the_frequency() {
        let tcg = line(Acceleration::Tcg { tsc_khz: Some(2_596_000) });
        assert!(value_of(&tcg, "-append")[0].contains("tsc_early_khz=2596000"));
        assert!(!value_of(&line(Acceleration::Kvm), "-append")[0].contains("tsc_early_khz"));
    }

    #[test]
    fn the_sandbox_denies_all_four() {
        let line = line(Acceleration::Kvm);
        let sandbox = value_of(&line, "-sandbox")[0].to_owned();
        for denied in ["obsolete", "elevateprivileges", "spawn", "resourcecontrol"] {
            assert!(sandbox.contains(&format!("{denied}=deny")), "{sandbox}");
        }
    }
}
