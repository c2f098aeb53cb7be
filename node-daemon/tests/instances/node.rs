//! A node for one test: its own state, pool and name, so that tests run side by side; a daemon that can be killed.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use kibo_crds::{Incarnation, InstanceId, NodeId};
use kibo_node_daemon::{
    config::{Accelerator, DiskIo, FenceConfig, PoolConfig, VmmConfig},
    instance::{Bounds, Deps, ExecExit, ExecOutput, Instances},
    launch::Launch,
    log_store::{LogBounds, LogStore},
    pool::{self, Pools},
    spool::EventSpool,
    vmm::{Cgroups, Vmm, list_processes},
};
use kibo_protocol::v1::{self, EndReason, instance_event::Kind};
use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Runtime;

/// Emulated guests on a busy machine take their time.
pub const PATIENCE: Duration = Duration::from_secs(120);
const POOL: &str = "test-pool";
pub const QEMU: &str = "/usr/bin/qemu-system-x86_64";
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// The directory with kernel, initrd and root images.
pub fn guest() -> PathBuf {
    let directory = std::env::var_os("KIBOTOS_GUEST").unwrap_or_else(|| {
        panic!("KIBOTOS_GUEST is not set: these tests boot guests. Run: export KIBOTOS_GUEST=$(hack/guest/build)")
    });
    PathBuf::from(directory)
}

/// What outlives the daemon.
pub struct TestNode {
    directory: tempfile::TempDir,
    pub id: NodeId,
    pub bounds: Bounds,
}

/// One life of the daemon's Instances.
pub struct Daemon {
    runtime: Runtime,
    pub instances: Instances,
    pub spool: Arc<EventSpool>,
}

/// What a Workspace keeps between its Instances.
pub struct Workspace {
    uid: String,
    volume_uid: String,
    epoch: u64,
    pub root_image: String,
    pub entrypoint: Vec<String>,
    pub memory_mib: u64,
    pub cpu_milli: u64,
}

impl Workspace {
    pub fn new() -> Self {
        Self {
            uid: uuid(),
            volume_uid: uuid(),
            epoch: 0,
            root_image: "debian-12".to_owned(),
            entrypoint: vec![],
            memory_mib: 256,
            cpu_milli: 1000,
        }
    }

    /// The next Instance's launch.
    pub fn next(&mut self, node: &TestNode) -> Launch {
        self.epoch += 1;
        self.again(node, InstanceId::generate())
    }

    /// The launch of an Instance that has the newest grants.
    pub fn again(&self, node: &TestNode, instance: InstanceId) -> Launch {
        let predecessor_end = if self.epoch == 1 { v1::PredecessorEnd::None } else { v1::PredecessorEnd::Released };
        let object = |uid: &str, mib: u64| v1::Object {
            uid: uid.to_owned(),
            pool: POOL.to_owned(),
            size_bytes: mib << 20,
            must_exist: self.epoch > 1,
            grant: Some(v1::Grant {
                epoch: self.epoch,
                predecessor_epoch: self.epoch - 1,
                predecessor_end: predecessor_end.into(),
            }),
            grows_from_bytes: 0,
        };
        let message = v1::Launch {
            instance_id: instance.to_string(),
            workspace: Some(v1::WorkspaceRef {
                namespace: "default".to_owned(),
                name: "test".to_owned(),
                uid: self.uid.clone(),
                id: String::new(),
            }),
            cpu_milli: self.cpu_milli,
            memory_bytes: self.memory_mib << 20,
            allocated_memory_bytes: (self.memory_mib + 64) << 20,
            root_image: self.root_image.clone(),
            layer: Some(object(&self.uid, 256)),
            volumes: vec![v1::VolumeMount {
                object: Some(object(&self.volume_uid, 64)),
                mount_path: "/data".to_owned(),
            }],
            entrypoint: Some(v1::Entrypoint { command: self.entrypoint.clone(), ..v1::Entrypoint::default() }),
            hostname: "test".to_owned(),
            network: None,
        };
        Launch::read(message, node.id.clone(), Incarnation(1)).expect("a launch of a test")
    }

    pub fn uid(&self) -> &str {
        &self.uid
    }
}

impl TestNode {
    pub fn new() -> Self {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let suffix = uuid().chars().filter(char::is_ascii_alphanumeric).take(12).collect::<String>();
        Self::of(format!("test-{suffix}").parse().unwrap())
    }

    /// The node of the same id in another cluster on this host.
    pub fn namesake(&self) -> Self {
        Self::of(self.id.clone())
    }

    fn of(id: NodeId) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let node = Self { directory, id, bounds: Bounds::of(Accelerator::Tcg) };
        std::fs::create_dir(node.pool_path()).unwrap();
        pool::init(&node.pool_path(), &POOL.parse().unwrap()).unwrap();
        std::fs::create_dir(node.images()).unwrap();
        for image in guest().join("images").read_dir().unwrap() {
            let image = image.unwrap();
            std::os::unix::fs::symlink(image.path(), node.images().join(image.file_name())).unwrap();
        }
        node
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn images(&self) -> PathBuf {
        self.path().join("images")
    }

    /// Where an object's image and records are.
    pub fn object(&self, uid: &str) -> PathBuf {
        self.pool_path().join("objects").join(uid)
    }

    fn pool_path(&self) -> PathBuf {
        self.path().join("pool")
    }

    pub fn state(&self) -> PathBuf {
        self.path().join("state")
    }

    pub fn vmm(&self) -> Vmm {
        self.vmm_with(DiskIo::Auto, QEMU.as_ref())
    }

    pub fn vmm_with(&self, disk_io: DiskIo, qemu: &Path) -> Vmm {
        let config = VmmConfig {
            accelerator: Accelerator::Tcg,
            disk_io,
            qemu: qemu.to_owned(),
            kernel: guest().join("vmlinux"),
            initrd: guest().join("initrd.lz4"),
            uid: 65534,
            gid: 65534,
            cgroup_root: CGROUP_ROOT.into(),
        };
        Vmm::open(config, self.id.clone(), self.state(), env!("CARGO_BIN_EXE_kibo-node-daemon").into()).unwrap()
    }

    /// A daemon begins its life.
    pub fn daemon(&self) -> Daemon {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let pools = [PoolConfig { id: POOL.parse().unwrap(), path: self.pool_path(), default: true }];
        let spool = Arc::new(EventSpool::open(&self.state().join("events")).unwrap());
        let deps = Deps {
            images_dir: self.images(),
            vmm: self.vmm(),
            network: None,
            pools: Arc::new(Pools::open(&pools, FenceConfig::default(), &self.id).unwrap()),
            spool: spool.clone(),
            logs: Arc::new(LogStore::open(self.state().join("logs"), LogBounds::default()).unwrap()),
            bounds: self.bounds,
        };
        let instances = runtime.block_on(Instances::recover(deps)).unwrap();
        Daemon { runtime, instances, spool }
    }

    pub fn processes(&self) -> Vec<i32> {
        list_processes(self.id.as_str(), &self.state()).unwrap().into_iter().map(|(_, process)| process.pid).collect()
    }

    /// In every hierarchy that has limits.
    pub fn cgroups(&self) -> Vec<String> {
        let directories = ["cpu", "memory", "."].map(|controller| {
            std::fs::read_dir(Path::new(CGROUP_ROOT).join(controller).join("kibotos").join(self.id.as_str()))
        });
        let entries = directories.into_iter().filter_map(Result::ok).flatten().map(Result::unwrap);
        let directories = entries.filter(|entry| entry.file_type().unwrap().is_dir());
        directories.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }

    /// Nothing of any Instance may be left on the host.
    pub fn assert_nothing_left(&self) {
        assert_eq!(self.processes(), [] as [i32; 0], "processes are left");
        assert_eq!(self.cgroups(), [] as [&str; 0], "cgroups are left");
        let directories: Vec<_> = self.state().join("instances").read_dir().unwrap().map(Result::unwrap).collect();
        assert!(directories.is_empty(), "directories are left: {directories:?}");
        for controller in ["cpu", "memory"] {
            let above = Path::new(CGROUP_ROOT).join(controller).join("kibotos").join(self.id.as_str());
            assert!(!above.exists(), "{} is left", above.display());
        }
    }
}

impl Drop for TestNode {
    /// A test that failed leaves nothing either.
    fn drop(&mut self) {
        for pid in self.processes() {
            kill(pid);
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.processes().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let cgroups = Cgroups::open(Path::new(CGROUP_ROOT), self.id.as_str()).unwrap();
        for name in self.cgroups() {
            let _ = cgroups.instance(&name).remove();
        }
    }
}

pub fn kill(pid: i32) {
    signal(pid, Signal::KILL);
}

pub fn signal(pid: i32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid).unwrap(), signal);
}

impl Daemon {
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// As `kill -9` would: no task gets to do anything any more.
    pub fn die(self) {
        let Self { runtime, instances, spool } = self;
        drop((instances, spool));
        runtime.shutdown_background();
        // Tasks that were just running stop at their next await.
        std::thread::sleep(Duration::from_millis(50));
    }

    pub fn start(&self, launch: Launch) -> InstanceId {
        let instance = launch.instance();
        let _runtime = self.runtime.enter();
        self.instances.start(launch);
        instance
    }

    /// All events of an Instance so far.
    pub fn events(&self, instance: InstanceId) -> Vec<Kind> {
        let id = instance.to_string();
        self.spool
            .unacked()
            .into_iter()
            .filter(|event| event.instance_id == id)
            .filter_map(|event| event.kind)
            .collect()
    }

    /// Waits for an event that `wanted` makes something of; an Ended that it does not want fails the test.
    pub fn wait_for<T>(&self, instance: InstanceId, what: &str, wanted: impl Fn(&Kind) -> Option<T>) -> T {
        let mut changes = self.spool.changes();
        let waiting = async {
            loop {
                changes.mark_unchanged();
                let events = self.events(instance);
                if let Some(found) = events.iter().find_map(&wanted) {
                    return found;
                }
                let ended = events.iter().find(|kind| matches!(kind, Kind::Ended(_)));
                assert!(ended.is_none(), "waited for {what}, but it ended: {ended:?}");
                changes.changed().await.unwrap();
            }
        };
        self.block_on(async { tokio::time::timeout(PATIENCE, waiting).await })
            .unwrap_or_else(|_| panic!("waited too long for {what}; events: {:?}", self.events(instance)))
    }

    /// The guest's boot id.
    pub fn available(&self, instance: InstanceId) -> String {
        self.wait_for(instance, "Available", |kind| match kind {
            Kind::Available(available) => Some(available.guest_boot_id.clone()),
            _ => None,
        })
    }

    pub fn ended(&self, instance: InstanceId) -> (EndReason, v1::Ended) {
        let ended = self.wait_for(instance, "Ended", |kind| match kind {
            Kind::Ended(ended) => Some(ended.clone()),
            _ => None,
        });
        // The directory goes after the event.
        let mut changes = self.instances.changes();
        let gone = async {
            while self.instances.list().iter().any(|summary| summary.id == instance) {
                changes.changed().await.unwrap();
            }
        };
        self.block_on(async { tokio::time::timeout(PATIENCE, gone).await }).expect("it stays in the list");
        (ended.reason(), ended)
    }

    /// At least `count` lines of the Workspace's log from its beginning, as soon as they are there.
    pub fn log_lines(&self, workspace: &Workspace, count: usize) -> Vec<String> {
        let follow = async {
            let mut log = Box::pin(self.instances.log(&follow(workspace.uid())).unwrap());
            let mut text = String::new();
            while text.matches('\n').count() < count {
                text.push_str(str::from_utf8(&log.next().await.expect("the log ends").data).unwrap());
            }
            text
        };
        let text = self.block_on(async { tokio::time::timeout(PATIENCE, follow).await }).expect("too few lines");
        text.lines().map(str::to_owned).collect()
    }

    /// Runs a shell command in the guest: its exit code and what it printed.
    pub fn sh(&self, instance: InstanceId, script: &str) -> (i32, String) {
        self.try_sh(instance, script).unwrap_or_else(|| panic!("{script}: the guest does not answer"))
    }

    /// The same; nothing when the guest cannot be reached.
    pub fn try_sh(&self, instance: InstanceId, script: &str) -> Option<(i32, String)> {
        match self.run(instance, script) {
            (Some(ExecOutput::Exit(ExecExit::Code(code))), printed) => Some((code, printed)),
            (Some(ExecOutput::Failed(_)), _) => None,
            (other, printed) => panic!("{script}: {other:?} after {printed}"),
        }
    }

    /// Runs a shell command to whatever end it comes, and gives that and what it printed.
    pub fn run(&self, instance: InstanceId, script: &str) -> (Option<ExecOutput>, String) {
        let request = v1::ExecRequest {
            instance_id: instance.to_string(),
            command: vec!["/bin/sh".to_owned(), "-c".to_owned(), script.to_owned()],
            ..v1::ExecRequest::default()
        };
        let run = async {
            let mut printed = Vec::new();
            let mut exec = match self.instances.exec(request).await {
                Ok(exec) => exec,
                Err(error) => return (Some(ExecOutput::Failed(error)), printed),
            };
            loop {
                match exec.output.recv().await {
                    Some(ExecOutput::Stdout(data) | ExecOutput::Stderr(data)) => printed.extend_from_slice(&data),
                    last => return (last, printed),
                }
            }
        };
        let (last, printed) = self.block_on(async { tokio::time::timeout(PATIENCE, run).await }).expect("exec hangs");
        (last, String::from_utf8_lossy(&printed).into_owned())
    }
}

/// All of a Workspace's log and what comes.
pub fn follow(workspace_uid: &str) -> v1::LogRequest {
    v1::LogRequest { workspace_uid: workspace_uid.to_owned(), follow: true, ..v1::LogRequest::default() }
}

fn uuid() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap().trim().to_owned()
}
