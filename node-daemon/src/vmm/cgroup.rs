//! The cgroup of one Instance: its limits, and what the kernel counted in it.
//!
//! By hand, over a handful of files: the crates for it look for the hierarchy at fixed places, while `vmm.cgroup_root`
//! is configurable (a container sees the host's somewhere else), and none reads the OOM counters of both versions.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use kibo_crds::{Bytes, MilliCpu};

/// Above `<controller>/` (v1) or the root (v2): `kibotos/<node>/<instance>`.
const TOP: &str = "kibotos";
/// The hierarchies of version 1 in which an Instance has a cgroup of its own.
const CONTROLLERS: [&str; 3] = ["cpu", "memory", "freezer"];
/// The kernel frees a cgroup a moment after its last process was reaped.
const REMOVAL_LIMIT: Duration = Duration::from_secs(2);
/// The kernel takes no quota below 1 ms.
const MIN_QUOTA_MICROS: u64 = 1000;
const PERIOD_MICROS: u64 = 100_000;
const LONG_PERIOD_MICROS: u64 = 1_000_000;

#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error(
        "{root} is no cgroup file system with the controllers cpu and memory, and with version 1 freezer: set \
         vmm.cgroup_root to where it is mounted"
    )]
    NotMounted { root: PathBuf },
    #[error("failed to {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// Where the cgroups of this node's Instances are.
#[derive(Clone, Debug)]
pub struct Cgroups {
    root: PathBuf,
    node: String,
    version: Version,
}

/// The most that an Instance may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Absent: as much as the host gives.
    pub cpu: Option<MilliCpu>,
    /// What it gets of a host that is short of CPU, in proportion to the others.
    pub cpu_share: MilliCpu,
    /// Guest memory and the VMM's own.
    pub memory: Bytes,
}

impl Cgroups {
    /// Finds out which version is mounted at `root`; a hybrid host (v1 with an empty v2 beside it) counts as v1.
    pub fn open(root: &Path, node: &str) -> Result<Self, CgroupError> {
        let v2 = fs::read_to_string(root.join("cgroup.controllers")).is_ok_and(|controllers| {
            let has = |name| controllers.split_whitespace().any(|controller| controller == name);
            has("cpu") && has("memory")
        });
        let v1 = || CONTROLLERS.iter().all(|controller| root.join(controller).join("cgroup.procs").is_file());
        let version = match v2 {
            true => Version::V2,
            false if v1() => Version::V1,
            false => return Err(CgroupError::NotMounted { root: root.to_owned() }),
        };
        Ok(Self { root: root.to_owned(), node: node.to_owned(), version })
    }

    /// The cgroup of one Instance, whether it exists or not.
    pub fn instance(&self, name: &str) -> Cgroup {
        let below = Path::new(TOP).join(&self.node).join(name);
        let [cpu, memory, freezer] = CONTROLLERS.map(|controller| match self.version {
            Version::V1 => self.root.join(controller).join(&below),
            Version::V2 => self.root.join(&below),
        });
        let others = if self.version == Version::V1 { self.other_hierarchies() } else { Vec::new() };
        Cgroup { version: self.version, root: self.root.clone(), cpu, memory, freezer, others }
    }

    /// Where the Instances of all nodes of this host are, by node and name; it need not exist.
    pub fn of_host(&self) -> PathBuf {
        match self.version {
            Version::V1 => self.root.join("memory").join(TOP),
            Version::V2 => self.root.join(TOP),
        }
    }

    /// The v1 hierarchies beside those of our controllers (which may be mounted under several names).
    fn other_hierarchies(&self) -> Vec<PathBuf> {
        let limited: Vec<_> =
            CONTROLLERS.iter().filter_map(|controller| self.root.join(controller).canonicalize().ok()).collect();
        let Ok(entries) = fs::read_dir(&self.root) else { return Vec::new() };
        let mut others: Vec<PathBuf> = entries
            .filter_map(|entry| entry.ok()?.path().canonicalize().ok())
            .filter(|path| !limited.contains(path) && path.join("cgroup.procs").is_file())
            .collect();
        others.sort_unstable();
        others.dedup();
        others
    }
}

/// The cgroup of one Instance.
#[derive(Clone, Debug)]
pub struct Cgroup {
    version: Version,
    root: PathBuf,
    cpu: PathBuf,
    memory: PathBuf,
    freezer: PathBuf,
    /// Of the v1 hierarchies in which an Instance has no limits.
    others: Vec<PathBuf>,
}

impl Cgroup {
    /// Makes it with its limits. Idempotent.
    pub fn create(&self, limits: Limits) -> Result<(), CgroupError> {
        for directory in self.directories() {
            make_directory(directory)?;
        }
        if self.version == Version::V2 {
            self.enable_controllers()?;
        }
        self.limit_memory(limits.memory)?;
        self.share_cpu(limits.cpu_share)?;
        self.limit_cpu(limits.cpu)
    }

    fn share_cpu(&self, share: MilliCpu) -> Result<(), CgroupError> {
        let shares = shares(share);
        match self.version {
            Version::V1 => write(&self.cpu.join("cpu.shares"), &shares.to_string()),
            Version::V2 => write(&self.cpu.join("cpu.weight"), &weight(shares).to_string()),
        }
    }

    /// Changes the CPU limit of what runs.
    pub fn limit_cpu(&self, cpu: Option<MilliCpu>) -> Result<(), CgroupError> {
        let quota = cpu.map(quota);
        match self.version {
            Version::V1 => {
                let (quota, period) =
                    quota.map_or((-1, PERIOD_MICROS), |(quota, period)| (quota.cast_signed(), period));
                // A quota that is larger than the new period is refused while the old period stands, and the other way
                // round: without a limit in between, every order works.
                write(&self.cpu.join("cpu.cfs_quota_us"), "-1")?;
                write(&self.cpu.join("cpu.cfs_period_us"), &period.to_string())?;
                write(&self.cpu.join("cpu.cfs_quota_us"), &quota.to_string())
            }
            Version::V2 => {
                let limit = quota.map_or_else(|| "max".to_owned(), |(quota, period)| format!("{quota} {period}"));
                write(&self.cpu.join("cpu.max"), &limit)
            }
        }
    }

    fn limit_memory(&self, memory: Bytes) -> Result<(), CgroupError> {
        let file = match self.version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        };
        write(&self.memory.join(file), &memory.0.to_string())
    }

    /// A v2 cgroup has the files of a controller only when every one above it hands the controller down.
    fn enable_controllers(&self) -> Result<(), CgroupError> {
        let below = self.cpu.strip_prefix(&self.root).unwrap_or(&self.cpu);
        let mut above = self.root.clone();
        for part in below {
            write(&above.join("cgroup.subtree_control"), "+cpu +memory")?;
            above.push(part);
        }
        Ok(())
    }

    /// The files into which a process writes itself to join. Where an Instance has no limits it goes to the top, since
    /// whoever ends the daemon's container or unit may end everything in its cgroup, in any hierarchy.
    pub fn joins(&self) -> Vec<PathBuf> {
        let own = self.directories().into_iter();
        own.chain(self.others.iter().map(PathBuf::as_path)).map(|directory| directory.join("cgroup.procs")).collect()
    }

    /// How many processes the kernel killed here because memory ran out; `None` when it cannot be read.
    pub fn oom_kills(&self) -> Option<u64> {
        let file = match self.version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        let counters = fs::read_to_string(self.memory.join(file)).ok()?;
        counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }

    /// Stops every process in it, as soon as it leaves the kernel: one that waits for a disk that hangs cannot run
    /// anything afterwards either. Does not wait. `false`: there is no such cgroup.
    pub fn freeze(&self) -> Result<bool, CgroupError> {
        self.set_frozen(true)
    }

    /// Lets what is frozen go on. What was killed while it was frozen dies, also with version 1, where it does not before.
    pub fn thaw(&self) -> Result<bool, CgroupError> {
        self.set_frozen(false)
    }

    fn set_frozen(&self, frozen: bool) -> Result<bool, CgroupError> {
        let (file, words) = self.freezer_file();
        match fs::write(&file, words[usize::from(frozen)]) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            result => result.map(|()| true).map_err(failed("write", &file)),
        }
    }

    /// Whether it was told to freeze, and not to thaw since.
    pub fn is_frozen(&self) -> bool {
        let (file, [thawed, _]) = self.freezer_file();
        fs::read_to_string(file).is_ok_and(|state| state.trim() != thawed)
    }

    /// The file, and what stands in it for thawed and for frozen.
    fn freezer_file(&self) -> (PathBuf, [&'static str; 2]) {
        match self.version {
            Version::V1 => (self.freezer.join("freezer.state"), ["THAWED", "FROZEN"]),
            Version::V2 => (self.freezer.join("cgroup.freeze"), ["0", "1"]),
        }
    }

    /// Removes it, and what is empty above it. Its processes must be reaped. Idempotent; blocks for a moment.
    pub fn remove(&self) -> Result<(), CgroupError> {
        for directory in self.directories() {
            remove_directory(directory)?;
            // The node's and our own level go with the last Instance; when they are not empty that is no error.
            let above = directory.ancestors().skip(1).take(2);
            above.take_while(|directory| fs::remove_dir(directory).is_ok()).for_each(drop);
        }
        Ok(())
    }

    fn directories(&self) -> Vec<&Path> {
        match self.version {
            Version::V1 => vec![&self.cpu, &self.memory, &self.freezer],
            Version::V2 => vec![&self.cpu],
        }
    }
}

/// Quota and period in microseconds that stand for an amount of CPU.
fn quota(cpu: MilliCpu) -> (u64, u64) {
    let period = if cpu.0 * PERIOD_MICROS / 1000 >= MIN_QUOTA_MICROS { PERIOD_MICROS } else { LONG_PERIOD_MICROS };
    ((cpu.0.saturating_mul(period) / 1000).max(MIN_QUOTA_MICROS), period)
}

/// As Kubernetes counts them: 1024 for each core.
fn shares(cpu: MilliCpu) -> u64 {
    (cpu.0.saturating_mul(1024) / 1000).clamp(2, 262_144)
}

/// The range of v1's shares (2 to 262144) on that of v2's weights (1 to 10000), as Kubernetes maps it.
fn weight(shares: u64) -> u64 {
    1 + (shares - 2) * 9999 / 262_142
}

fn make_directory(directory: &Path) -> Result<(), CgroupError> {
    // Another Instance's removal may take an empty level away between its making and ours.
    let mut attempts = 0;
    loop {
        match fs::create_dir_all(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && attempts < 10 => attempts += 1,
            result => return result.map_err(failed("make", directory)),
        }
    }
}

fn remove_directory(directory: &Path) -> Result<(), CgroupError> {
    let deadline = Instant::now() + REMOVAL_LIMIT;
    loop {
        match fs::remove_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(10));
            }
            result => return result.map_err(failed("remove", directory)),
        }
    }
}

fn write(file: &Path, value: &str) -> Result<(), CgroupError> {
    fs::write(file, value).map_err(failed("write", file))
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError::Io { action, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_keeps_the_exact_amount_down_to_the_smallest() {
        for (milli, expected) in
            [(1, (1000, 1_000_000)), (9, (9000, 1_000_000)), (10, (1000, 100_000)), (1500, (150_000, 100_000))]
        {
            assert_eq!(quota(MilliCpu(milli)), expected, "{milli}m");
        }
    }

    #[test]
    fn shares_stay_within_what_the_kernel_takes() {
        for (milli, expected) in [(1, (2, 1)), (1000, (1024, 39)), (1_024_000, (262_144, 10_000))] {
            assert_eq!((shares(MilliCpu(milli)), weight(shares(MilliCpu(milli)))), expected, "{milli}m");
        }
    }

    /// The files of a hierarchy, as plain files.
    fn fake(directories: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for directory in directories {
            fs::create_dir_all(root.path().join(directory)).unwrap();
            fs::write(root.path().join(directory).join("cgroup.procs"), "").unwrap();
        }
        root
    }

    fn read(path: &Path) -> String {
        fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    const LIMITS: Limits = Limits { cpu: Some(MilliCpu(1500)), cpu_share: MilliCpu(1500), memory: Bytes::mib(320) };

    #[test]
    fn version_2_has_one_directory_and_hands_its_controllers_down() {
        let root = fake(&["."]);
        let root = root.path();
        fs::write(root.join("cgroup.controllers"), "cpuset cpu io memory pids\n").unwrap();
        let cgroup = Cgroups::open(root, "node-1").unwrap().instance("inst-x");
        cgroup.create(LIMITS).unwrap();
        let own = root.join("kibotos/node-1/inst-x");
        assert_eq!(read(&own.join("cpu.max")), "150000 100000");
        assert_eq!(read(&own.join("cpu.weight")), "59");
        assert_eq!(read(&own.join("memory.max")), (320 << 20).to_string());
        for above in ["", "kibotos", "kibotos/node-1"] {
            assert_eq!(read(&root.join(above).join("cgroup.subtree_control")), "+cpu +memory", "{above:?}");
        }
        assert_eq!(cgroup.joins(), [own.join("cgroup.procs")]);
        cgroup.limit_cpu(None).unwrap();
        assert_eq!(read(&own.join("cpu.max")), "max");
        assert_eq!(cgroup.oom_kills(), None);
        fs::write(own.join("memory.events"), "low 0\noom 1\noom_kill 2\noom_group_kill 0\n").unwrap();
        assert_eq!(cgroup.oom_kills(), Some(2));
        assert_eq!((cgroup.freeze().unwrap(), read(&own.join("cgroup.freeze")).as_str()), (true, "1"));
        assert!(cgroup.is_frozen());
        assert_eq!((cgroup.thaw().unwrap(), cgroup.is_frozen()), (true, false));
    }

    const STATE: &str = "freezer/kibotos/node-1/inst-x/freezer.state";

    #[test]
    fn version_1_leaves_the_cgroup_of_the_daemon_in_every_hierarchy() {
        let root = fake(&["cpu,cpuacct", "freezer", "memory", "pids", "systemd"]);
        let root = root.path().canonicalize().unwrap();
        for name in ["cpu", "cpuacct"] {
            std::os::unix::fs::symlink("cpu,cpuacct", root.join(name)).unwrap();
        }
        let cgroup = Cgroups::open(&root, "node-1").unwrap().instance("inst-x");
        cgroup.create(LIMITS).unwrap();
        let joins = [
            "cpu/kibotos/node-1/inst-x/cgroup.procs",
            "memory/kibotos/node-1/inst-x/cgroup.procs",
            "freezer/kibotos/node-1/inst-x/cgroup.procs",
            "pids/cgroup.procs",
            "systemd/cgroup.procs",
        ];
        assert_eq!(cgroup.joins(), joins.map(|file| root.join(file)));
        assert_eq!(read(&root.join("cpu/kibotos/node-1/inst-x/cpu.cfs_quota_us")), "150000");
        assert_eq!(read(&root.join("cpu/kibotos/node-1/inst-x/cpu.shares")), "1536");
        fs::write(
            root.join("memory/kibotos/node-1/inst-x/memory.oom_control"),
            "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        )
        .unwrap();
        assert_eq!(cgroup.oom_kills(), Some(1));
        assert_eq!((cgroup.freeze().unwrap(), read(&root.join(STATE)).as_str()), (true, "FROZEN"));
        assert!(cgroup.is_frozen());
        assert_eq!((cgroup.thaw().unwrap(), cgroup.is_frozen()), (true, false));
        let missing = Cgroups::open(&root, "node-1").unwrap().instance("inst-y");
        assert_eq!((missing.freeze().unwrap(), missing.is_frozen()), (false, false));
        fs::remove_dir_all(root.join("freezer")).unwrap();
        assert!(Cgroups::open(&root, "node-1").is_err(), "what could not be frozen is not started");
    }

    #[test]
    fn a_directory_that_is_no_cgroup_file_system_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let error = Cgroups::open(directory.path(), "node").unwrap_err().to_string();
        assert!(error.contains(&directory.path().display().to_string()), "{error}");
        assert!(error.contains("vmm.cgroup_root"), "{error}");
    }
}
