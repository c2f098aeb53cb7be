//! The daemon's configuration: a TOML file, every key checked before anything is started.

mod host;
mod read;
mod section;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, fmt, net::Ipv4Addr, path::PathBuf, time::Duration};

use kibo_crds::{Bytes, MilliCpu, NodeId, PoolId};

use crate::network::{Range, TAP_PREFIX};

pub use host::check_host;
pub use section::{Problem, Problems};

/// What the file says. Paths are absolute; whether they exist is [`check_host`]'s question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub state_dir: PathBuf,
    pub node: NodeConfig,
    pub resources: Resources,
    /// At least one; ids and paths are unique.
    pub storage_pools: Vec<PoolConfig>,
    pub fence: FenceConfig,
    pub vmm: VmmConfig,
    pub images: ImagesConfig,
    /// Absent: guests have no network.
    pub network: Option<NetworkConfig>,
    pub control: ControlConfig,
    pub host: HostConfig,
}

/// Where the host shows itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// Its /proc: memory, CPUs and pressure are read there.
    pub proc: PathBuf,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self { proc: PathBuf::from("/proc") }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeConfig {
    /// Absent: the enrollment token says it.
    pub id: Option<NodeId>,
    pub labels: BTreeMap<String, String>,
}

/// What the host gives to VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    pub cpu: MilliCpu,
    pub memory: Bytes,
    /// Absent: no limit of the node's own.
    pub max_instances: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    pub id: PoolId,
    pub path: PathBuf,
    /// New objects go here; exactly one pool is the default.
    pub default: bool,
}

/// How this node finds out that it has lost what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceConfig {
    /// A pool that could not be read for so long: what uses it stands still until it can.
    pub freeze_after: Duration,
}

impl Default for FenceConfig {
    fn default() -> Self {
        Self { freeze_after: Duration::from_secs(15) }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmmConfig {
    pub accelerator: Accelerator,
    pub disk_io: DiskIo,
    pub qemu: PathBuf,
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    /// QEMU's user; never 0.
    pub uid: u32,
    pub gid: u32,
    pub cgroup_root: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    Kvm,
    Tcg,
}

impl Accelerator {
    /// As QEMU's `-accel` takes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// How QEMU reads and writes the disks of its guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskIo {
    /// By `io_uring` where a guest of this host has read a disk by it, else by threads.
    #[default]
    Auto,
    Threads,
    /// Where no guest can read a disk by it the daemon does not start.
    IoUring,
}

impl DiskIo {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Threads => "threads",
            Self::IoUring => "io_uring",
        }
    }
}

impl fmt::Display for DiskIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl std::str::FromStr for DiskIo {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Auto, Self::Threads, Self::IoUring];
        all.into_iter().find(|it| it.as_str() == text).ok_or("must be \"auto\", \"threads\" or \"io_uring\"")
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagesConfig {
    /// Root images: `<name>.erofs` or `<name>.squashfs`.
    pub dir: PathBuf,
}

/// The network of the guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkConfig {
    /// Their addresses; nobody else's on this host.
    pub range: Range,
    /// Interfaces by which guests reach the outside; none: those of the host's default routes.
    pub uplinks: Vec<InterfaceName>,
    /// What guests ask; absent: the servers of the host's resolv.conf that are not on the host.
    pub dns_servers: Option<Vec<Ipv4Addr>>,
    /// Absent: the least of the uplinks'.
    pub mtu: Option<u32>,
    pub nft: PathBuf,
}

/// Name of a network interface of the host, safe in a line of rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceName(String);

impl InterfaceName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for InterfaceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // What the kernel forbids, and what means something in the rules.
        let is_good = |b: u8| b.is_ascii_graphic() && !b"/\"\\*".contains(&b);
        if !(1..=15).contains(&text.len()) || !text.bytes().all(is_good) || text == "." || text == ".." {
            return Err(
                "must be the name of a network interface: 1 to 15 characters without spaces, '/', '*' and quotes"
                    .to_owned(),
            );
        }
        if text.starts_with(TAP_PREFIX) {
            return Err(format!("must not begin with {TAP_PREFIX}, as the guests' own interfaces do"));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlConfig {
    /// At least one; tried in turn.
    pub endpoints: Vec<Endpoint>,
    /// The operator's CA, PEM.
    pub ca_file: PathBuf,
    /// Absent once the node is enrolled.
    pub token_file: Option<PathBuf>,
    /// What Kubernetes gives to the daemon's pod, for a host of the cluster that enrolls by it.
    pub service_account_token_file: Option<PathBuf>,
}

/// Where an operator listens: `https://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(String);

impl Endpoint {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for Endpoint {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let rule = "must be https://<host>:<port>";
        let uri: tonic::transport::Uri = text.parse().map_err(|_| rule)?;
        let is_plain = matches!(uri.path(), "" | "/") && uri.query().is_none();
        if uri.scheme_str() != Some("https") || uri.host().is_none_or(str::is_empty) || uri.port_u16().is_none() {
            return Err(rule);
        }
        if !is_plain || text.contains('@') {
            return Err(rule);
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Config {
    /// Reads the text of a config file; all problems are found at once.
    pub fn parse(text: &str) -> Result<Self, Problems> {
        read::config(text)
    }

    pub fn instances_dir(&self) -> PathBuf {
        self.state_dir.join("instances")
    }

    pub fn spool_dir(&self) -> PathBuf {
        self.state_dir.join("spool")
    }

    pub fn default_pool(&self) -> Option<&PoolConfig> {
        self.storage_pools.iter().find(|pool| pool.default)
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.node.id.as_ref().map_or("as it is enrolled", NodeId::as_str);
        writeln!(f, "node:      {id}")?;
        for (key, value) in &self.node.labels {
            writeln!(f, "label:     {key}={value}")?;
        }
        writeln!(f, "state:     {}", self.state_dir.display())?;
        write!(f, "resources: cpu {}, memory {}", self.resources.cpu, self.resources.memory)?;
        match self.resources.max_instances {
            Some(max) => writeln!(f, ", at most {max} Instances")?,
            None => writeln!(f)?,
        }
        for pool in &self.storage_pools {
            let default = if pool.default { " (default)" } else { "" };
            writeln!(f, "pool:      {} at {}{default}", pool.id, pool.path.display())?;
        }
        writeln!(f, "fence:     guests stand still when a pool is unreadable for {:?}", self.fence.freeze_after)?;
        let vmm = &self.vmm;
        writeln!(f, "vmm:       {} with {}, uid {}, gid {}", vmm.qemu.display(), vmm.accelerator, vmm.uid, vmm.gid)?;
        writeln!(f, "disk I/O:  {}", vmm.disk_io)?;
        writeln!(f, "guest:     kernel {}, initrd {}", vmm.kernel.display(), vmm.initrd.display())?;
        writeln!(f, "cgroups:   {}", vmm.cgroup_root.display())?;
        writeln!(f, "proc:      {}", self.host.proc.display())?;
        writeln!(f, "images:    {}", self.images.dir.display())?;
        match &self.network {
            Some(network) => writeln!(f, "network:   {network}")?,
            None => writeln!(f, "network:   none for guests, since there is no [network] section")?,
        }
        for endpoint in &self.control.endpoints {
            writeln!(f, "operator:  {endpoint}")?;
        }
        write!(f, "CA:        {}", self.control.ca_file.display())
    }
}

impl fmt::Display for NetworkConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |all: Vec<String>| if all.is_empty() { "none".to_owned() } else { all.join(", ") };
        let uplinks = match self.uplinks.as_slice() {
            [] => "those of the default routes".to_owned(),
            uplinks => list(uplinks.iter().map(ToString::to_string).collect()),
        };
        let dns = match &self.dns_servers {
            None => "as the host, without servers on the host".to_owned(),
            Some(servers) => list(servers.iter().map(ToString::to_string).collect()),
        };
        let mtu = self.mtu.map_or_else(|| "of the uplinks".to_owned(), |mtu| mtu.to_string());
        write!(f, "{}, uplinks {uplinks}, DNS {dns}, MTU {mtu}, by {}", self.range, self.nft.display())
    }
}
