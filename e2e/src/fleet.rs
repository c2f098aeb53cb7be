//! Many nodes in one process: the daemon's own sessions, admission, pools and spools, each with a state directory of its
//! own, and no virtual machines. What the operator sees of them is what it would see of as many hosts. They take what
//! they are offered, by their own admission, and then run none of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::stream::{self, BoxStream, StreamExt as _, TryStreamExt as _};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::node::{Enrollment, NodeSpec};
use kibo_crds::{InstanceId, Node as NodeObject, NodeId, ObjectUid};
use kibo_node_daemon::config::Config;
use kibo_node_daemon::host::Host;
use kibo_node_daemon::instance::{ExecStream, LogChunk, StopMode, StreamError, Summary};
use kibo_node_daemon::launch::Launch;
use kibo_node_daemon::pool::{self, Pools};
use kibo_node_daemon::session::{self, InstanceControl, Inventoried, Node, NodeParts, Outcome};
use kibo_node_daemon::spool::EventSpool;
use kibo_node_daemon::state::{NodeState, StateDir};
use kibo_protocol::{EnrollmentToken, Secret, v1};
use kube::Client;
use kube::api::{Api, PostParams};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::local::{LocalCluster, NAMESPACE};
use crate::suite::{eventually, secrets};

/// How long a token works; each node uses its own within minutes.
const TOKEN_VALID: SignedDuration = SignedDuration::from_mins(30);
/// Nodes that are made at once.
const SIDE_BY_SIDE: usize = 16;
const ENROLLED_WITHIN: Duration = Duration::from_secs(120);

/// What a Template names to be admitted here; nobody reads it.
pub const ROOT_IMAGE: &str = "none";

/// The nodes; their sessions end with [`Fleet::end`].
pub struct Fleet {
    directory: TempDir,
    shutdown: CancellationToken,
    nodes: Vec<JoinHandle<Outcome>>,
}

impl Fleet {
    /// Registers `size` nodes and begins their sessions with the operator behind one of these endpoints; the nodes
    /// enroll by themselves.
    pub async fn begin(cluster: &LocalCluster, size: usize, endpoints: &[String]) -> Result<Self> {
        let client = cluster.client().await?;
        let kept = TempDir::with_prefix_in("kibo-fleet-", memory().unwrap_or(cluster.layout().root()))?;
        let directory = kept.path();
        let images = directory.join("images");
        fs::create_dir_all(&images)?;
        fs::write(images.join(format!("{ROOT_IMAGE}.erofs")), "")?;
        // They share a host, and one look at it is enough.
        let host = Host::start("/proc".into(), directory.join("cgroups"));
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
        let ca = maps.get("kibotos-ca").await?.data.unwrap_or_default().remove("ca.crt").context("no ca.crt")?;
        fs::write(directory.join("ca.crt"), &ca)?;
        let der = CertificateDer::from_pem_slice(ca.as_bytes()).context("the operator's CA is no certificate")?;
        let ca_hash = EnrollmentToken::hash_of_ca(&der);

        let shutdown = CancellationToken::new();
        let make = |number: usize| {
            let (client, shutdown, host) = (client.clone(), shutdown.clone(), host.clone());
            async move {
                let id: NodeId = name(number).parse()?;
                let secret = secrets::generate()?;
                register(&client, &id, &secret).await?;
                let token = EnrollmentToken { node_id: id.to_string(), secret, ca_hash };
                let node = prepare(directory, &id, &token, endpoints, host)?;
                let running = tokio::spawn(session::run(node, shutdown));
                enrolled(directory, &id).await?;
                anyhow::Ok(running)
            }
        };
        let made = stream::iter((0..size).map(make)).buffer_unordered(SIDE_BY_SIDE);
        let nodes = made.try_collect().await?;
        Ok(Self { directory: kept, shutdown, nodes })
    }

    pub fn size(&self) -> usize {
        self.nodes.len()
    }

    /// Ends the daemons, and takes their directories off the disk.
    pub async fn end(self) -> Result<()> {
        self.shutdown.cancel();
        for node in self.nodes {
            let outcome = node.await?;
            ensure!(outcome == Outcome::Shutdown, "a node of the fleet ended by itself: {outcome:?}");
        }
        self.directory.close().context("failed to remove the directories of the fleet")
    }
}

/// A file system in memory: 500 hosts have 500 disks, and here they would wait for each other at one.
fn memory() -> Option<&'static Path> {
    Some(Path::new("/dev/shm")).filter(|path| path.is_dir())
}

/// Of a node of the fleet.
fn name(number: usize) -> String {
    format!("fleet-{number:03}")
}

async fn register(client: &Client, id: &NodeId, secret: &Secret) -> Result<()> {
    let expires_at = Time(Timestamp::now() + TOKEN_VALID);
    let enrollment = Enrollment { secret_hash: secret.hash().to_string(), expires_at, request_id: None };
    let spec = NodeSpec { enrollment: Some(enrollment), ..NodeSpec::default() };
    let nodes: Api<NodeObject> = Api::all(client.clone());
    let made = nodes.create(&PostParams::default(), &NodeObject::new(id.as_str(), spec)).await;
    made.map(drop).with_context(|| format!("failed to register node {id}"))
}

/// Hosts are installed one after the other: a few of them enroll at the same moment, and not all.
async fn enrolled(directory: &Path, id: &NodeId) -> Result<()> {
    let key = directory.join(id.as_str()).join("state/credentials.json");
    let what = format!("node {id} has enrolled");
    eventually(&what, ENROLLED_WITHIN, async || Ok(key.exists().then_some(()))).await
}

/// The rooms of one daemon, as the daemon itself puts them together.
fn prepare(
    directory: &Path,
    id: &NodeId,
    token: &EnrollmentToken,
    endpoints: &[String],
    host: Arc<Host>,
) -> Result<Arc<Node<Taken>>> {
    let own = directory.join(id.as_str());
    fs::create_dir_all(&own)?;
    fs::write(own.join("enroll.token"), token.expose())?;
    pool::init(&own.join("pool"), &format!("local-{id}").parse()?)?;
    let (shared, own) = (directory.display(), own.display());
    let text = format!(
        r#"
        state_dir = "{own}/state"
        node = {{ id = "{id}" }}
        resources = {{ cpu = "16", memory = "64Gi" }}
        storage_pools = [{{ id = "local-{id}", path = "{own}/pool" }}]
        vmm = {{ accelerator = "tcg", qemu = "/none", kernel = "/none", initrd = "/none" }}
        images = {{ dir = "{shared}/images" }}
        control = {{ endpoints = {endpoints:?}, ca_file = "{shared}/ca.crt", token_file = "{own}/enroll.token" }}
        "#
    );
    let config = Arc::new(Config::parse(&text)?);
    let dir = StateDir::open(&config.state_dir)?;
    let parts = NodeParts {
        id: id.clone(),
        boot_id: format!("boot-of-{id}"),
        state: NodeState::open(&dir)?,
        pools: Arc::new(Pools::open(&config.storage_pools, config.fence, id)?),
        spool: Arc::new(EventSpool::open(&config.spool_dir())?),
        host,
        instances: Taken::default(),
        config,
        dir,
    };
    Ok(Arc::new(Node::new(parts)))
}

/// What a node has taken: it counts as running there, and nothing of it does.
#[derive(Debug, Default)]
struct Taken(Mutex<BTreeMap<InstanceId, Summary>>);

fn no_instance() -> StreamError {
    StreamError { failure: v1::StreamFailure::NoInstance, message: "a fleet runs nothing".to_owned() }
}

impl Taken {
    fn all(&self) -> MutexGuard<'_, BTreeMap<InstanceId, Summary>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InstanceControl for Taken {
    fn list(&self) -> Vec<Summary> {
        self.all().values().cloned().collect()
    }

    fn problem(&self, _: InstanceId) -> Option<String> {
        None
    }

    fn inventory(&self) -> Result<Vec<Inventoried>, String> {
        if self.all().is_empty() { Ok(Vec::new()) } else { Err("a fleet has nothing that could be adopted".to_owned()) }
    }

    async fn start(&self, launch: Launch) {
        let summary = Summary {
            id: launch.instance(),
            workspace_uid: launch.workspace.uid.clone(),
            state: v1::InstanceState::Starting,
            cpu: launch.cpu,
            allocated_memory: launch.allocated_memory,
            pools: launch.objects().map(|granted| granted.object.pool.clone()).collect(),
        };
        self.all().insert(summary.id, summary);
    }

    /// There is no process to wait for: its grants are closed as those of an Instance that is not here.
    fn stop(&self, instance: InstanceId, _: StopMode) -> bool {
        self.all().remove(&instance);
        false
    }

    fn tear_down(&self, instance: InstanceId, _: &str) -> bool {
        self.all().remove(&instance);
        false
    }

    async fn destroy_all(&self, _: v1::EndReason, _: &str) {
        self.all().clear();
    }

    async fn exec(&self, _: v1::ExecRequest) -> Result<ExecStream, StreamError> {
        Err(no_instance())
    }

    async fn connect(&self, _: v1::ConnectRequest) -> Result<ExecStream, StreamError> {
        Err(no_instance())
    }

    async fn archive(&self, _: v1::ArchiveRequest) -> Result<ExecStream, StreamError> {
        Err(no_instance())
    }

    fn log(&self, _: &v1::LogRequest) -> Result<BoxStream<'static, LogChunk>, StreamError> {
        Err(no_instance())
    }

    fn forget_log(&self, _: &ObjectUid) {}
}
