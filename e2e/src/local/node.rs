//! The nodes of a local cluster: what each offers, its daemon's config, and how it is enrolled.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::node::{Enrollment, Node, NodeSpec};
use kibo_protocol::{EnrollmentToken, Secret};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::cluster::{ClusterError, LocalCluster, kube_failed};
use super::network::{LocalNetwork, networks_of};
use super::operator::NAMESPACE;
use super::process::Launch;
use super::{Component, pki};

/// How long a host has to use its token; `up` uses it at once.
const TOKEN_VALID: Duration = Duration::from_secs(3600);

/// The accelerator of the nodes' virtual machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// Works on every machine, about ten times slower.
    #[default]
    Tcg,
    Kvm,
}

/// One node: what its daemon is told to offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LocalNode {
    pub id: String,
    /// A quantity: cores or millicores.
    pub cpu: String,
    /// A quantity: bytes.
    pub memory: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_instances: Option<u32>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    pub pools: Vec<LocalPool>,
    /// After so many seconds in which a pool cannot be read its guests stand still; absent: the daemon's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freeze_after_seconds: Option<u32>,
    #[serde(default)]
    pub accelerator: Accelerator,
    /// Root images of its own; absent: those that the guest build made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<PathBuf>,
    /// Where it reaches the operator; absent: directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The network namespace in which its daemon runs; absent: the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Added to its daemon's environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Absent: its guests have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<LocalNetwork>,
    /// A service-account token that says which node it is, and by which it enrolls; absent: by an issued token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account_token: Option<PathBuf>,
    /// Where its daemon finds the host's memory, CPUs and pressure; absent: in /proc.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proc: Option<PathBuf>,
    /// Its daemon reads the id of the host's boot from this file; absent: the kernel's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<PathBuf>,
}

/// A storage pool that a node is attached to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LocalPool {
    pub id: String,
    pub path: PathBuf,
    #[serde(default)]
    pub default: bool,
}

/// The daemon's config file.
#[derive(Serialize)]
struct Config<'a> {
    state_dir: PathBuf,
    node: NodeSection<'a>,
    resources: Resources<'a>,
    storage_pools: &'a [LocalPool],
    fence: Fence,
    vmm: Vmm,
    images: Images,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<Network<'a>>,
    control: Control<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<HostSection<'a>>,
}

#[derive(Serialize)]
struct HostSection<'a> {
    proc: &'a Path,
}

#[derive(Serialize)]
struct NodeSection<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: &'a BTreeMap<String, String>,
}

#[derive(Serialize)]
struct Resources<'a> {
    cpu: &'a str,
    memory: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_instances: Option<u32>,
}

#[derive(Serialize)]
struct Fence {
    #[serde(skip_serializing_if = "Option::is_none")]
    freeze_after_seconds: Option<u32>,
}

#[derive(Serialize)]
struct Vmm {
    accelerator: Accelerator,
    qemu: &'static str,
    kernel: PathBuf,
    initrd: PathBuf,
    uid: u32,
    gid: u32,
    cgroup_root: &'static str,
}

#[derive(Serialize)]
struct Images {
    dir: PathBuf,
}

#[derive(Serialize)]
struct Network<'a> {
    range: &'a str,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    uplinks: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    dns_servers: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nft: Option<&'a Path>,
}

#[derive(Serialize)]
struct Control<'a> {
    endpoints: Vec<String>,
    ca_file: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_account_token_file: Option<&'a Path>,
}

/// The user that owns nothing on a Debian: what runs in a guest gains nothing by leaving it.
const NOBODY: u32 = 65534;

impl LocalCluster {
    /// Remembers a node, so that `start` can run its daemon. One with the same id is replaced: its
    /// new resources count from the next start of its daemon.
    pub fn add_node(&self, node: LocalNode) -> Result<Component, ClusterError> {
        let component = Component::Node(node.id.clone());
        self.change_record(|record| {
            record.nodes.retain(|known| known.id != node.id);
            record.nodes.push(node);
        })?;
        Ok(component)
    }

    /// A node with this cluster's usual storage: a pool of its own, and the one that all share.
    pub fn usual_node(&self, id: &str, cpu: &str, memory: &str, shared: bool) -> LocalNode {
        let own = LocalPool { id: format!("local-{id}"), path: self.layout().node(id).join("pool"), default: true };
        let all =
            shared.then(|| LocalPool { id: "shared".to_owned(), path: self.layout().shared_pool(), default: false });
        LocalNode {
            id: id.to_owned(),
            cpu: cpu.to_owned(),
            memory: memory.to_owned(),
            max_instances: None,
            labels: BTreeMap::new(),
            pools: [own].into_iter().chain(all).collect(),
            freeze_after_seconds: None,
            accelerator: Accelerator::default(),
            images: None,
            endpoint: None,
            service_account_token: None,
            namespace: None,
            env: BTreeMap::new(),
            boot_id: None,
            proc: None,
            network: LocalNetwork::pick(self.recorded().nodes.iter().filter_map(|node| node.network.as_ref())),
        }
    }

    /// Writes a node's config, initialises its pools and enrolls it where that is not done yet; then
    /// says how its daemon is started.
    pub(super) async fn node_launch(&self, id: &str) -> Result<Launch, ClusterError> {
        let record = self.recorded();
        let node = record.nodes.iter().find(|node| node.id == id);
        let node = node.ok_or_else(|| ClusterError::NoNode(id.to_owned()))?;
        let dir = self.layout().node(id);
        super::cluster::make_private(&dir)?;
        for pool in &node.pools {
            self.init_pool(pool).await?;
        }
        let config = toml::to_string(&self.config_of(node)).expect("a config has no unserializable part");
        pki::write(&dir.join("config.toml"), config.as_bytes())?;
        self.share_proof(node)?;
        if !dir.join("state/credentials.json").exists() {
            let ca = operator_ca(&self.client().await?).await?;
            pki::write(&dir.join("ca.crt"), ca.as_bytes())?;
            if node.service_account_token.is_none() {
                self.grant(id, &dir, &ca).await?;
            }
        }
        let launch = node.env.iter().fold(self.daemon_launch(node), |launch, (name, value)| launch.env(name, value));
        Ok(launch
            .arg("run")
            .flag("config", dir.join("config.toml"))
            .env(kibo_failpoint::DIRECTORY_VARIABLE, self.layout().node_failpoints(id)))
    }

    /// The daemon, or what becomes it: the process stays the same.
    fn daemon_launch(&self, node: &LocalNode) -> Launch {
        const MOUNT: &str = r#"mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@""#;
        let mut words: Vec<OsString> = Vec::new();
        if let Some(namespace) = &node.namespace {
            words.extend(["/usr/bin/nsenter".into(), format!("--net=/run/netns/{namespace}").into(), "--".into()]);
        }
        if let Some(boot_id) = &node.boot_id {
            words.extend(["/usr/bin/unshare", "--mount", "--propagation", "private", "--"].map(Into::into));
            words.extend(["/bin/sh", "-c", MOUNT].map(Into::into));
            words.push(boot_id.into());
        }
        words.push(self.programs().node_daemon().into());
        let log = self.log(&Component::Node(node.id.clone()));
        let mut words = words.into_iter();
        let program = words.next().map(PathBuf::from).unwrap_or_default();
        words.fold(Launch::new(program, log, "build it with cargo build --bins; install util-linux"), Launch::arg)
    }

    fn config_of<'a>(&self, node: &'a LocalNode) -> Config<'a> {
        let dir = self.layout().node(&node.id);
        let guest = self.programs().guest.clone().unwrap_or_default();
        let by_token = node.service_account_token.is_none();
        Config {
            state_dir: dir.join("state"),
            node: NodeSection { id: by_token.then_some(&node.id), labels: &node.labels },
            resources: Resources { cpu: &node.cpu, memory: &node.memory, max_instances: node.max_instances },
            storage_pools: &node.pools,
            fence: Fence { freeze_after_seconds: node.freeze_after_seconds },
            vmm: Vmm {
                accelerator: node.accelerator,
                qemu: "/usr/bin/qemu-system-x86_64",
                kernel: guest.join("vmlinux"),
                initrd: guest.join("initrd.lz4"),
                uid: NOBODY,
                gid: NOBODY,
                cgroup_root: "/sys/fs/cgroup",
            },
            images: Images { dir: node.images.clone().unwrap_or_else(|| guest.join("images")) },
            network: node.network.as_ref().map(|network| Network {
                range: &network.range,
                uplinks: &network.uplinks,
                dns_servers: network.dns_servers.as_deref(),
                nft: network.nft.as_deref(),
            }),
            control: Control {
                endpoints: vec![
                    node.endpoint.clone().unwrap_or_else(|| format!("https://127.0.0.1:{}", self.ports().session)),
                ],
                ca_file: dir.join("ca.crt"),
                token_file: by_token.then(|| dir.join("enroll.token")),
                service_account_token_file: node.service_account_token.as_deref(),
            },
            host: node.proc.as_deref().map(|proc| HostSection { proc }),
        }
    }

    /// A daemon boots a guest to prove that its accelerator works, once for each boot of the host. All
    /// nodes of a local cluster are on one host: what one has proved is proved for the next. The daemon
    /// looks itself whether the proof is of the same accelerator and files.
    fn share_proof(&self, node: &LocalNode) -> Result<(), ClusterError> {
        let proof = |id: &str| self.layout().node(id).join("state").join("accelerator.json");
        let own = proof(&node.id);
        let others = self.recorded().nodes.into_iter().map(|other| proof(&other.id));
        let Some(known) = others.filter(|path| *path != own).find_map(|path| fs::read(path).ok()) else {
            return Ok(());
        };
        if !own.exists() {
            super::cluster::make_private(&self.layout().node(&node.id).join("state"))?;
            pki::write(&own, &known)?;
        }
        Ok(())
    }

    /// Initialises a pool whose directory is not there or empty, and leaves any other as it is.
    async fn init_pool(&self, pool: &LocalPool) -> Result<(), ClusterError> {
        let empty = fs::read_dir(&pool.path).map_or(true, |mut entries| entries.next().is_none());
        if !empty {
            return Ok(());
        }
        super::cluster::make_private(&pool.path)?;
        let mut init = self.daemon_command(&["pool", "init", "--id", &pool.id, "--path"]);
        let done = succeeds(init.arg(&pool.path)).await;
        done.map_err(|message| ClusterError::Pool { id: pool.id.clone(), path: pool.path.clone(), message })
    }

    /// Takes what a killed daemon left of its guests' network off the host. Its virtual machines must be gone.
    pub(super) async fn remove_network(&self, node: &LocalNode) -> Result<(), ClusterError> {
        if networks_of(std::slice::from_ref(node)).is_empty() {
            return Ok(());
        }
        let mut remove = self.daemon_command(&["network", "remove", "--config"]);
        let done = succeeds(remove.arg(self.layout().node(&node.id).join("config.toml"))).await;
        done.map_err(|message| ClusterError::Network { node: node.id.clone(), message })
    }

    /// A command of the daemon's program that ends by itself.
    fn daemon_command(&self, arguments: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(self.programs().node_daemon());
        command.args(arguments).stdin(Stdio::null());
        command
    }

    /// Grants this host the node: the Node object gets the hash of a new secret, the host the token.
    async fn grant(&self, id: &str, dir: &Path, ca: &str) -> Result<(), ClusterError> {
        let admin = self.client().await?;
        let der = CertificateDer::from_pem_slice(ca.as_bytes()).map_err(|error| ClusterError::Enroll {
            node: id.to_owned(),
            message: format!("the operator's CA is no certificate: {error}"),
        })?;
        let secret = Secret::generate()
            .map_err(|error| ClusterError::Enroll { node: id.to_owned(), message: error.to_string() })?;
        let enrollment = Enrollment {
            secret_hash: secret.hash().to_string(),
            expires_at: Time(Timestamp::now() + TOKEN_VALID),
            request_id: None,
        };
        let token = EnrollmentToken { node_id: id.to_owned(), secret, ca_hash: EnrollmentToken::hash_of_ca(&der) };
        pki::write(&dir.join("enroll.token"), token.expose().as_bytes())?;

        let nodes: Api<Node> = Api::all(admin);
        let what = format!("grant node {id}");
        if nodes.get_opt(id).await.map_err(kube_failed(what.clone()))?.is_none() {
            let spec = NodeSpec { enrollment: Some(enrollment), ..NodeSpec::default() };
            let made = nodes.create(&PostParams::default(), &Node::new(id, spec)).await;
            return made.map(drop).map_err(kube_failed(what));
        }
        let patch = Patch::Merge(json!({ "spec": { "enrollment": enrollment } }));
        let patched = nodes.patch(id, &PatchParams::default(), &patch).await;
        patched.map(drop).map_err(kube_failed(what))
    }

    /// The id of the node's newest session, ended or not.
    pub(super) async fn session_of(&self, id: &str) -> Option<String> {
        let nodes: Api<Node> = Api::all(self.client().await.ok()?);
        let node = nodes.get_opt(id).await.ok()??;
        Some(node.status?.session?.id)
    }

    /// Whether the node is ready in a session that the running daemon opened.
    pub(super) async fn node_is_ready(&self, admin: &Client, id: &str) -> bool {
        let nodes: Api<Node> = Api::all(admin.clone());
        let Ok(Some(Node { status: Some(status), .. })) = nodes.get_opt(id).await else {
            return false;
        };
        let component = Component::Node(id.to_owned());
        let before = self.recorded().processes.get(&component).and_then(|it| it.session_before.clone());
        let ready = status.conditions.iter().any(|it| it.type_ == "Ready" && it.status == "True");
        // Ready by its session, and a candidate once its settings are confirmed.
        let settled =
            |reason: &str| !matches!(reason, "NotReady" | "NoSession" | "SettingsUnconfirmed" | "ClockNotMeasured");
        let ready = ready && status.conditions.iter().any(|it| it.type_ == "Schedulable" && settled(&it.reason));
        ready && status.session.is_some_and(|session| session.alive && Some(session.id) != before)
    }
}

/// The certificate of the operator's CA, which it publishes when it starts.
async fn operator_ca(admin: &Client) -> Result<String, ClusterError> {
    let maps: Api<ConfigMap> = Api::namespaced(admin.clone(), NAMESPACE);
    let map = maps.get("kibotos-ca").await.map_err(kube_failed("read the operator's CA".to_owned()))?;
    Ok(map.data.and_then(|mut data| data.remove("ca.crt")).unwrap_or_default())
}

/// Runs a command to its end; what it complained of, when it failed.
async fn succeeds(command: &mut tokio::process::Command) -> Result<(), String> {
    let output = command.output().await.map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()) }
}
