//! Where it is measured: a local cluster with one node, on loopback, in a directory of its own.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kibo_crds::{Template, Volume, Workspace};
use kibo_e2e::local::{Component, LocalCluster, Need, Programs, Progress};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, process::Command};

use crate::{audit, watch::Watch};

/// The node, and the namespace of all Workspaces.
pub const NAME: &str = "bench";
/// The Template of all Workspaces; its amounts are those of the bare boots too.
pub const TEMPLATE: &str = "bench";
pub const ROOT_IMAGE: &str = "debian-12";
pub const MEMORY_MIB: u32 = 256;
pub const DISK_MIB: u32 = 1024;

/// How long deleting everything may take.
const CLEAR_LIMIT: Duration = Duration::from_secs(120);
const CLEAR_POLL: Duration = Duration::from_millis(100);

pub struct Site {
    cluster: LocalCluster,
    root: PathBuf,
    /// Clusters beside it, which have to go whatever happens.
    others: Mutex<Vec<Arc<LocalCluster>>>,
}

impl Site {
    /// Makes the directory; starts nothing.
    pub fn open() -> Result<Self> {
        // Short, because sockets live below it and their paths may have 107 bytes only.
        let root = env::temp_dir().join(format!("kibo-bench-{}", std::process::id()));
        let cluster = LocalCluster::open(root.clone(), Programs::find(Need::Everything)?, Progress::Shown)?;
        Ok(Self { cluster, root, others: Mutex::default() })
    }

    pub async fn up(&self) -> Result<()> {
        fs::write(self.cluster.layout().audit_policy(), audit::POLICY).context("failed to write the audit policy")?;
        self.cluster.add_node(self.cluster.usual_node(NAME, "64", "64Gi", false))?;
        self.cluster.up().await?;
        let namespaces: Api<Namespace> = Api::all(self.client().await?);
        let namespace: Namespace = serde_json::from_value(json!({ "metadata": { "name": NAME } }))?;
        namespaces.create(&PostParams::default(), &namespace).await.context("failed to create the namespace")?;
        let templates: Api<Template> = Api::all(self.client().await?);
        let template = serde_json::from_value(json!({
            "apiVersion": "kibotos.dev/v1alpha1", "kind": "Template", "metadata": { "name": TEMPLATE },
            "spec": {
                "rootImage": ROOT_IMAGE,
                "resources": { "cpu": "1", "memory": format!("{MEMORY_MIB}Mi") },
                "writableLayer": { "size": format!("{DISK_MIB}Mi") },
            },
        }))?;
        templates.create(&PostParams::default(), &template).await.context("failed to create the Template")?;
        Ok(())
    }

    /// A further cluster without nodes, not started yet.
    pub fn another(&self, name: &str) -> Result<Arc<LocalCluster>> {
        let root = env::temp_dir().join(format!("kibo-bench-{}-{name}", std::process::id()));
        let cluster = Arc::new(LocalCluster::open(root, Programs::find(Need::Operator)?, Progress::Shown)?);
        self.others().push(cluster.clone());
        Ok(cluster)
    }

    /// It is not needed any more.
    pub async fn close(&self, cluster: &Arc<LocalCluster>) -> Result<()> {
        take_down(cluster, false).await?;
        self.others().retain(|other| !Arc::ptr_eq(other, cluster));
        Ok(())
    }

    fn others(&self) -> MutexGuard<'_, Vec<Arc<LocalCluster>>> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes down all that there is.
    pub async fn down(self, keep: bool) -> Result<()> {
        let others = std::mem::take(&mut *self.others());
        for other in &others {
            take_down(other, keep).await?;
        }
        take_down(&self.cluster, keep).await
    }

    pub fn cluster(&self) -> &LocalCluster {
        &self.cluster
    }

    /// A directory of the bench's own, on the same file system as the node's pool and state.
    pub fn directory(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    pub async fn client(&self) -> Result<Client> {
        Ok(self.cluster.client().await?)
    }

    pub async fn workspaces(&self) -> Result<Api<Workspace>> {
        Ok(Api::namespaced(self.client().await?, NAME))
    }

    pub async fn watch(&self) -> Result<Watch> {
        Ok(Watch::begin(self.workspaces().await?))
    }

    pub fn audit(&self) -> Result<audit::Audit> {
        audit::Audit::begin(self.cluster.layout().audit_log())
    }

    /// The text of the log of the node's daemon.
    pub fn daemon_log(&self) -> Result<String> {
        let path = self.cluster.log(&Component::Node(NAME.to_owned()));
        fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))
    }

    /// The daemon's own configuration file.
    pub fn daemon_config(&self) -> PathBuf {
        self.cluster.layout().node(NAME).join("config.toml")
    }

    pub fn pid(&self, component: &Component) -> Result<i32> {
        Ok(self.cluster.process(component).with_context(|| format!("{component} does not run"))?.pid)
    }

    /// `kubectl apply` of some manifests, as a user does it.
    pub async fn apply(&self, manifests: &[Value]) -> Result<()> {
        let mut kubectl = self.command(&self.cluster.programs().kubectl());
        kubectl.args(["apply", "-n", NAME, "-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = kubectl.stderr(Stdio::piped()).spawn().context("failed to run kubectl")?;
        let text = json!({ "apiVersion": "v1", "kind": "List", "items": manifests }).to_string();
        let mut stdin = child.stdin.take().context("stdin is piped")?;
        stdin.write_all(text.as_bytes()).await?;
        drop(stdin);
        let output = child.wait_with_output().await?;
        ensure!(output.status.success(), "kubectl apply: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }

    /// A program that a user of this cluster runs.
    pub fn command(&self, program: &Path) -> Command {
        let layout = self.cluster.layout();
        let mut command = Command::new(program);
        command
            .env("KUBECONFIG", layout.kubeconfig())
            .env("KUBECACHEDIR", layout.root().join("kube-cache"))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    /// Deletes every Workspace and Volume, and waits until they are gone.
    pub async fn clear(&self) -> Result<()> {
        let (workspaces, volumes) = (self.workspaces().await?, Api::<Volume>::namespaced(self.client().await?, NAME));
        let cleared = async {
            delete_all(&workspaces).await?;
            delete_all(&volumes).await
        };
        tokio::time::timeout(CLEAR_LIMIT, cleared).await.context("the Workspaces are not gone in time")?
    }
}

async fn take_down(cluster: &LocalCluster, keep: bool) -> Result<()> {
    cluster.down().await?;
    let root = cluster.layout().root();
    if keep {
        eprintln!("kept: {}", root.display());
        return Ok(());
    }
    fs::remove_dir_all(root).with_context(|| format!("failed to remove {}", root.display()))
}

async fn delete_all<K>(api: &Api<K>) -> Result<()>
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    api.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
    while !api.list(&ListParams::default()).await?.items.is_empty() {
        tokio::time::sleep(CLEAR_POLL).await;
    }
    Ok(())
}

/// A Workspace of the Template, with something more in its spec.
pub fn workspace(name: &str, more: Value) -> Value {
    let mut manifest = json!({
        "apiVersion": "kibotos.dev/v1alpha1", "kind": "Workspace", "metadata": { "name": name },
        "spec": { "template": TEMPLATE },
    });
    if let (Some(spec), Value::Object(more)) = (manifest["spec"].as_object_mut(), more) {
        spec.extend(more);
    }
    manifest
}
