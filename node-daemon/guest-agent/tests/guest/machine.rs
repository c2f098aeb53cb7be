//! One guest: its disks, its QEMU, and the daemon's end of its channel.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kibo_guest_protocol::v1::{self, Output};
use kibo_guest_protocol::{ENTROPY_LEN, HostConnection, HostEvent, Nonce, ProcessEnd, StreamId};
use tempfile::TempDir;

/// Longer than anything takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Machine {
    directory: TempDir,
    qemu: Child,
    port: Option<UnixStream>,
    connection: HostConnection,
    /// What came while something else was waited for.
    backlog: VecDeque<HostEvent>,
    pub hello: v1::HelloReply,
    pub booted_in: Duration,
}

/// The disks of a guest: (serial, image, read-only).
pub struct Disks(Vec<(&'static str, PathBuf, bool)>);

/// What a stream gave, byte for byte.
#[derive(Debug, PartialEq)]
pub struct Bytes {
    pub end: ProcessEnd,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

/// What an exec gave.
#[derive(Debug, PartialEq)]
pub struct Ran {
    pub end: ProcessEnd,
    pub stdout: String,
    pub stderr: String,
}

pub fn artifacts() -> PathBuf {
    let directory = std::env::var_os("KIBOTOS_GUEST").map_or_else(|| {
        panic!("these tests boot real guests: set KIBOTOS_GUEST to the directory that hack/guest/build prints, or run hack/test")
    }, PathBuf::from);
    assert!(
        directory.join("vmlinux").exists(),
        "KIBOTOS_GUEST={} has no vmlinux: run hack/guest/build",
        directory.display()
    );
    directory
}

impl Disks {
    /// Root image, an empty layer and an empty volume, in `directory`.
    pub fn fresh(directory: &Path) -> Self {
        let (layer, volume) = (directory.join("layer.raw"), directory.join("volume.raw"));
        format_ext4(&layer);
        format_ext4(&volume);
        Self(vec![
            ("root", artifacts().join("images/debian-12.erofs"), true),
            ("rw", layer, false),
            ("vol0", volume, false),
        ])
    }

    pub fn without(mut self, serial: &str) -> Self {
        self.0.retain(|(of, ..)| *of != serial);
        self
    }

    pub fn with_image(mut self, serial: &str, image: &Path) -> Self {
        for (of, path, _) in &mut self.0 {
            if *of == serial {
                *path = image.to_path_buf();
            }
        }
        self
    }
}

pub fn format_ext4(path: &Path) {
    format_ext4_of(path, 64 << 20);
}

pub fn format_ext4_of(path: &Path, size: u64) {
    File::create(path).and_then(|file| file.set_len(size)).expect("a sparse file");
    let options = "lazy_itable_init=1,lazy_journal_init=1,nodiscard";
    let status = Command::new("mkfs.ext4")
        .args(["-q", "-F", "-b", "4096", "-m", "0", "-E", options])
        .arg(path)
        .status()
        .expect("mkfs.ext4 is installed");
    assert!(status.success(), "mkfs.ext4 {}", path.display());
}

/// The host's clock.
pub fn unix_nanos() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    u64::try_from(now.as_nanos()).expect("before 2554")
}

/// The configure message that the tests start from: root, layer and one volume at /data, no entrypoint. Its time is set
/// when it is sent.
pub fn configure() -> v1::Configure {
    v1::Configure {
        instance_id: "inst-1".to_owned(),
        time_unix_nanos: 0,
        entropy: rand::random::<[u8; ENTROPY_LEN]>().to_vec(),
        hostname: "demo".to_owned(),
        network: None,
        root_image: Some(v1::RootImage { serial: "root".to_owned(), fs_type: "erofs".to_owned() }),
        writable_layer: Some(v1::WritableLayer { serial: "rw".to_owned() }),
        volumes: vec![v1::Volume {
            serial: "vol0".to_owned(),
            mount_path: "/data".to_owned(),
            name: "data".to_owned(),
            ..v1::Volume::default()
        }],
        entrypoint: None,
    }
}

pub fn entrypoint(script: &str, policy: v1::RestartPolicy) -> v1::Entrypoint {
    v1::Entrypoint {
        process: Some(shell(script)),
        restart_policy: policy.into(),
        backoff_initial_millis: 50,
        backoff_maximum_millis: 1000,
    }
}

pub fn shell(script: &str) -> v1::Process {
    v1::Process { argv: ["sh", "-c", script].map(str::to_owned).to_vec(), ..v1::Process::default() }
}

impl Machine {
    /// Boots a guest with fresh disks and configures it.
    pub fn ready(configure: v1::Configure) -> Self {
        let mut machine = Self::fresh();
        machine.configure(configure);
        machine
    }

    /// Boots a guest with fresh disks.
    pub fn fresh() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let disks = Disks::fresh(directory.path());
        Self::boot(directory, &disks)
    }

    pub fn boot(directory: TempDir, disks: &Disks) -> Self {
        let started = Instant::now();
        let mut machine = Self::start(directory, disks, "");
        machine.reconnect(0);
        machine.booted_in = started.elapsed();
        machine
    }

    /// Begins to boot a guest with fresh disks whose kernel has no timer.
    pub fn without_timer() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let disks = Disks::fresh(directory.path());
        Self::start(directory, &disks, " nolapic_timer")
    }

    fn start(directory: TempDir, disks: &Disks, more: &str) -> Self {
        let qemu = start_qemu(directory.path(), disks, more);
        Self {
            directory,
            qemu,
            port: None,
            connection: HostConnection::open(Nonce::new(rand::random()), 0),
            backlog: VecDeque::new(),
            hello: v1::HelloReply::default(),
            booted_in: Duration::ZERO,
        }
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Connects anew and says hello; `log_offset` is what the daemon has of the log.
    pub fn reconnect(&mut self, log_offset: u64) {
        self.port = None;
        let path = self.directory.path().join("port.sock");
        let deadline = Instant::now() + PATIENCE;
        let port = loop {
            match UnixStream::connect(&path) {
                Ok(port) => break port,
                Err(error) if Instant::now() > deadline => {
                    panic!("no port: {error}; console:\n{}", self.console())
                }
                Err(_) => sleep(Duration::from_millis(5)),
            }
        };
        port.set_read_timeout(Some(Duration::from_millis(20))).expect("a timeout");
        self.port = Some(port);
        self.backlog.clear();
        self.connection = HostConnection::open(Nonce::new(rand::random()), log_offset);
        self.hello = self.wait_for("the guest's hello", |event| match event {
            HostEvent::Connected(reply) => Some(reply),
            _ => None,
        });
    }

    /// The daemon dies: the socket is closed as it is.
    pub fn hang_up(&mut self) {
        self.port = None;
    }

    pub fn raw_port(&mut self) -> &mut UnixStream {
        self.port.as_mut().expect("connected")
    }

    pub fn connection(&mut self) -> &mut HostConnection {
        &mut self.connection
    }

    pub fn send(&mut self, message: impl Into<v1::host_message::Kind>) {
        self.connection.send(message).expect("short enough");
        self.flush();
    }

    pub fn flush(&mut self) {
        while !self.connection.outgoing().is_empty() {
            let port = self.port.as_mut().expect("connected");
            let len = port.write(self.connection.outgoing()).expect("the port takes it");
            self.connection.written(len);
        }
    }

    /// Reads what is there, at most for a moment.
    pub fn pump(&mut self) {
        self.flush();
        let mut buffer = vec![0; 64 * 1024];
        match self.port.as_mut().expect("connected").read(&mut buffer) {
            Ok(len) => self.connection.receive(&buffer[..len]).expect("an honest guest"),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => panic!("the port is gone: {error}; console:\n{}", self.console()),
        }
    }

    /// Waits for an event that `pick` takes; the others stay for later.
    pub fn wait_for<T>(&mut self, what: &str, pick: impl Fn(HostEvent) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        for _ in 0..self.backlog.len() {
            let event = self.backlog.pop_front().expect("counted");
            match pick(event.clone()) {
                Some(picked) => return picked,
                None => self.backlog.push_back(event),
            }
        }
        loop {
            while let Some(event) = self.connection.next_event() {
                match pick(event.clone()) {
                    Some(picked) => return picked,
                    None => self.backlog.push_back(event),
                }
            }
            assert!(Instant::now() < deadline, "{what} did not come; console:\n{}", self.console());
            self.pump();
        }
    }

    pub fn configure(&mut self, configure: v1::Configure) {
        if let Some(failure) = self.try_configure(configure) {
            panic!("not configured: {failure:?}; console:\n{}", self.console());
        }
    }

    pub fn try_configure(&mut self, configure: v1::Configure) -> Option<v1::Failure> {
        self.send(v1::Configure { time_unix_nanos: unix_nanos(), ..configure });
        self.wait_for("the result of configuring", |event| match event {
            HostEvent::ConfigureResult(result) => Some(result.failure),
            _ => None,
        })
    }

    pub fn exec(&mut self, process: v1::Process, stdin: bool) -> StreamId {
        let stream = self.connection.exec(process, stdin).expect("short enough");
        self.flush();
        stream
    }

    /// Runs a process to its end.
    pub fn run(&mut self, process: v1::Process, stdin: Option<&[u8]>) -> Ran {
        let stream = self.exec(process, stdin.is_some());
        self.collect(stream, stdin.unwrap_or_default())
    }

    pub fn sh(&mut self, script: &str) -> Ran {
        self.run(shell(script), None)
    }

    /// Runs a script that must succeed; its standard output.
    pub fn out(&mut self, script: &str) -> String {
        let ran = self.sh(script);
        assert_eq!((&ran.end, ran.stderr.as_str()), (&ProcessEnd::Code(0), ""), "{script}");
        ran.stdout
    }

    /// Opens a stream: `open` is one of the connection's.
    pub fn open<E: std::fmt::Debug>(
        &mut self,
        open: impl FnOnce(&mut HostConnection) -> Result<StreamId, E>,
    ) -> StreamId {
        let stream = open(&mut self.connection).expect("short enough");
        self.flush();
        stream
    }

    /// Sends all, as fast as it is taken, without closing.
    pub fn type_in(&mut self, stream: StreamId, mut data: &[u8]) {
        loop {
            let taken = self.connection.write_stdin(stream, data);
            data = &data[taken..];
            self.flush();
            if data.is_empty() {
                return;
            }
            self.wait_for("room for input", |event| (event == HostEvent::StdinWritable { stream }).then_some(()));
        }
    }

    pub fn close(&mut self, stream: StreamId) {
        self.connection.close_stdin(stream);
        self.flush();
    }

    pub fn wait_for_end(&mut self, stream: StreamId) -> ProcessEnd {
        self.wait_for("the stream's end", |event| match event {
            HostEvent::ExecEnded { stream: of, end } if of == stream => Some(end),
            _ => None,
        })
    }

    /// Reads an output until it ends with `text`; what came.
    pub fn read_until(&mut self, stream: StreamId, text: &str) -> String {
        let mut heard = String::new();
        while !heard.ends_with(text) {
            let (output, data) = self.wait_for(&format!("{text:?} after {heard:?}"), |event| match event {
                HostEvent::Output { stream: of, output, data } if of == stream => Some((output, data)),
                _ => None,
            });
            self.connection.consumed(stream, output, data.len());
            heard += &String::from_utf8_lossy(&data);
        }
        heard
    }

    pub fn collect(&mut self, stream: StreamId, stdin: &[u8]) -> Ran {
        let Bytes { end, stdout, stderr } = self.collect_bytes(stream, stdin);
        let [stdout, stderr] = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        Ran { end, stdout, stderr }
    }

    pub fn collect_bytes(&mut self, stream: StreamId, mut stdin: &[u8]) -> Bytes {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            let taken = self.connection.write_stdin(stream, stdin);
            stdin = &stdin[taken..];
            if stdin.is_empty() {
                self.connection.close_stdin(stream);
            }
            let event = self.wait_for("the exec's events", |event| match &event {
                HostEvent::Output { stream: of, .. }
                | HostEvent::ExecEnded { stream: of, .. }
                | HostEvent::StdinWritable { stream: of } => (*of == stream).then_some(event),
                _ => None,
            });
            match event {
                HostEvent::Output { output, data, .. } => {
                    self.connection.consumed(stream, output, data.len());
                    if output == Output::Stderr { &mut stderr } else { &mut stdout }.extend(data);
                }
                HostEvent::ExecEnded { end, .. } => return Bytes { end, stdout, stderr },
                _ => {}
            }
        }
    }

    pub fn sync(&mut self) -> String {
        self.send(v1::Sync { id: 1 });
        self.wait_for("the end of the sync", |event| match event {
            HostEvent::SyncDone(done) => Some(done.error),
            _ => None,
        })
    }

    pub fn shut_down(&mut self, grace: Duration) {
        let grace_millis = u32::try_from(grace.as_millis()).expect("short");
        self.send(v1::Shutdown { grace_millis });
        self.wait_for("the word of the shutdown", |event| (event == HostEvent::ShuttingDown).then_some(()));
    }

    /// Shuts down and gives the directory with the disks back, for another boot.
    pub fn power_off(mut self) -> TempDir {
        self.shut_down(Duration::from_secs(5));
        let status = self.wait_for_exit();
        assert!(status.success(), "{status}; console:\n{}", self.console());
        std::mem::replace(&mut self.directory, tempfile::tempdir().expect("a directory"))
    }

    /// Kills QEMU as it is and gives the directory with the disks back.
    pub fn kill(mut self) -> TempDir {
        self.qemu.kill().expect("our own child");
        self.qemu.wait().expect("our own child");
        std::mem::replace(&mut self.directory, tempfile::tempdir().expect("a directory"))
    }

    pub fn wait_for_exit(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.qemu.try_wait().expect("our own child") {
                return status;
            }
            assert!(Instant::now() < deadline, "QEMU goes on; console:\n{}", self.console());
            // Somebody must read, or the guest waits for its last words to be heard.
            if let Some(port) = &mut self.port {
                let mut buffer = vec![0; 64 * 1024];
                if let Ok(0) = port.read(&mut buffer) {
                    self.port = None;
                }
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// CPU time that QEMU used so far.
    pub fn cpu_time(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.qemu.id())).expect("QEMU runs");
        let fields: Vec<_> = stat.rsplit(')').next().expect("a comm").split_whitespace().collect();
        let ticks: u64 = [11, 12].map(|index: usize| fields[index].parse::<u64>().expect("ticks")).iter().sum();
        Duration::from_millis(ticks * 10)
    }

    fn console(&self) -> String {
        fs::read_to_string(self.directory.path().join("console.log")).unwrap_or_default()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn start_qemu(directory: &Path, disks: &Disks, more: &str) -> Child {
    let artifacts = artifacts();
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args([
            "-accel",
            "tcg",
            "-cpu",
            "max,-erms,-pclmulqdq",
            "-smp",
            "1",
            "-m",
            "256M",
            "-machine",
            "microvm,x-option-roms=off",
        ])
        .arg("-kernel")
        .arg(artifacts.join("vmlinux"))
        .arg("-initrd")
        .arg(artifacts.join("initrd.lz4"))
        .args(["-append", &(command_line() + more)]);
    let console = directory.join("console.log");
    command.args(["-chardev", &format!("file,id=con,path={}", console.display()), "-serial", "chardev:con"]);
    for (serial, image, read_only) in &disks.0 {
        let read_only = if *read_only { "on" } else { "off" };
        let file = format!("driver=file,node-name={serial}f,filename={},read-only={read_only}", image.display());
        let raw = format!("driver=raw,node-name={serial},file={serial}f,read-only={read_only}");
        let device = format!("virtio-blk-device,id=d{serial},drive={serial},serial={serial}");
        command.args(["-blockdev", &file, "-blockdev", &raw, "-device", &device]);
    }
    let port = directory.join("port.sock");
    command
        .args(["-device", "virtio-balloon-device,id=bal0,free-page-reporting=on", "-device", "pvpanic"])
        .args(["-device", "virtio-serial-device,id=vser0"])
        .args(["-chardev", &format!("socket,id=vp,path={},server=on,wait=off", port.display())])
        .args(["-device", "virtserialport,chardev=vp,name=agent.0,id=port0"])
        .args(["-netdev", "user,id=n0,restrict=on", "-device", "virtio-net-device,netdev=n0,mac=52:54:00:12:34:56"])
        .args(["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"])
        .stdin(Stdio::null());
    command.spawn().expect("qemu-system-x86_64 is installed")
}

fn command_line() -> String {
    format!(
        "console=ttyS0 quiet no_timer_check tsc_early_khz={} lpj=4000000 cryptomgr.notests panic=-1 reboot=t init_on_alloc=0 rdinit=/init",
        host_tsc_khz()
    )
}

/// QEMU's TCG hands the host's counter through, so the guest must be told the host's rate.
fn host_tsc_khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(|| {
        let (from, started) = (tsc(), Instant::now());
        sleep(Duration::from_millis(100));
        let (ticks, micros) = (tsc() - from, started.elapsed().as_micros());
        u64::try_from(u128::from(ticks) * 1000 / micros).expect("some GHz")
    })
}

#[allow(unsafe_code, reason = "there is no safe form of it")]
fn tsc() -> u64 {
    // SAFETY: every x86-64 CPU has RDTSC.
    unsafe { std::arch::x86_64::_rdtsc() }
}
