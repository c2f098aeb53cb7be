//! One test's place in the shared cluster: its namespace, its nodes, and how it talks to them.

use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use k8s_openapi::api::core::v1::Namespace;
use kibo_crds::node::Admission;
use kibo_crds::{Node, Volume, Workspace};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use super::disk::Disk;
use super::host_files::HostFiles;
use super::outside::Outside;
use super::remote::Remote;
use super::wait::{eventually, watched};
use crate::local::{Component, LocalCluster, process};

/// How long deleting everything of a test may take.
const CLEAN_LIMIT: Duration = Duration::from_secs(60);

/// No single command of a test takes longer, so one that hangs fails by its own name.
const LIMIT: Duration = Duration::from_secs(120);

/// Makes node ids unique in a cluster: a registration is never reused.
static NODES: AtomicU32 = AtomicU32::new(1);

/// The place of one test.
pub struct Place {
    cluster: Arc<LocalCluster>,
    client: Client,
    namespace: String,
    nodes: Mutex<Vec<String>>,
    outsides: Mutex<Vec<Arc<Outside>>>,
    disks: Mutex<Vec<Arc<Disk>>>,
    remotes: Mutex<Vec<Arc<Remote>>>,
}

/// What a program printed, and how it ended.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ran {
    /// The output of a program that succeeded.
    pub fn ok(self) -> Result<String> {
        ensure!(self.code == 0, "ended with {}: {}{}", self.code, self.stderr, self.stdout);
        Ok(self.stdout)
    }
}

impl Place {
    pub(super) async fn begin(cluster: Arc<LocalCluster>, name: &str) -> Result<Self> {
        let client = cluster.client().await?;
        // Names of tests are sentences, names of namespaces have 63 characters.
        let namespace: String = name.replace('_', "-").chars().take(60).collect();
        let namespace = namespace.trim_end_matches('-').to_owned();
        let api: Api<Namespace> = Api::all(client.clone());
        let object: Namespace = serde_json::from_value(serde_json::json!({ "metadata": { "name": namespace } }))?;
        api.create(&PostParams::default(), &object).await.with_context(|| format!("failed to create {namespace}"))?;
        Ok(Self {
            cluster,
            client,
            namespace,
            nodes: Mutex::default(),
            outsides: Mutex::default(),
            disks: Mutex::default(),
            remotes: Mutex::default(),
        })
    }

    pub fn cluster(&self) -> &LocalCluster {
        &self.cluster
    }

    pub fn client(&self) -> Client {
        self.client.clone()
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Objects of a kind in this test's namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Cluster-wide objects of a kind.
    pub fn all<K>(&self) -> Api<K>
    where
        K: Resource,
        K::DynamicType: Default,
    {
        Api::all(self.client.clone())
    }

    /// The label that this test's nodes carry, and that its Workspaces select: so that tests at the
    /// same time do not take each other's room.
    pub fn selector(&self) -> (&'static str, &str) {
        ("test", &self.namespace)
    }

    /// Starts a node of this test's own and waits until it is ready; gives back its id.
    pub async fn node(&self, cpu: &str, memory: &str) -> Result<String> {
        self.node_with(cpu, memory, |_| {}).await
    }

    /// The same, with something about it changed.
    pub async fn node_with(
        &self,
        cpu: &str,
        memory: &str,
        change: impl FnOnce(&mut crate::local::LocalNode),
    ) -> Result<String> {
        let id = format!("e2e-{}-{}", std::process::id(), NODES.fetch_add(1, Ordering::Relaxed));
        self.node_named(&id, cpu, memory, change).await
    }

    /// The same with a name that nobody else in the cluster gives.
    pub async fn node_named(
        &self,
        id: &str,
        cpu: &str,
        memory: &str,
        change: impl FnOnce(&mut crate::local::LocalNode),
    ) -> Result<String> {
        let mut node = self.cluster.usual_node(id, cpu, memory, false);
        let (key, value) = self.selector();
        node.labels.insert(key.to_owned(), value.to_owned());
        change(&mut node);
        let component = self.cluster.add_node(node)?;
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner).push(id.to_owned());
        self.cluster.start(&component).await?;
        Ok(id.to_owned())
    }

    /// An outside for guests, which is there until this test's nodes are stopped.
    pub async fn outside(&self) -> Result<Arc<Outside>> {
        let outside = Arc::new(Outside::make().await?);
        self.outsides.lock().unwrap_or_else(PoisonError::into_inner).push(outside.clone());
        Ok(outside)
    }

    /// Files that say of a host what this test wants.
    pub fn host_files(&self, name: &str) -> Result<HostFiles> {
        HostFiles::make(self.cluster.layout().root().join(format!("proc-of-{}-{name}", self.namespace)))
    }

    /// A disk of so many bytes, which is there until this test's nodes are stopped.
    pub fn disk(&self, bytes: u64) -> Result<Arc<Disk>> {
        let directory = self.cluster.layout().root().join(format!("disk-of-{}", self.namespace));
        std::fs::create_dir(&directory)?;
        let disk = Arc::new(Disk::mount(directory, bytes)?);
        self.disks.lock().unwrap_or_else(PoisonError::into_inner).push(disk.clone());
        Ok(disk)
    }

    /// A file system on a network, which is there until this test's nodes are stopped.
    pub fn remote(&self) -> Result<Arc<Remote>> {
        let directory = self.cluster.layout().root().join(format!("remote-of-{}", self.namespace));
        let remote = Arc::new(Remote::mount(&directory)?);
        self.remotes.lock().unwrap_or_else(PoisonError::into_inner).push(remote.clone());
        Ok(remote)
    }

    /// Creates any object from its JSON; in this namespace where it says none and its kind has them.
    pub async fn create(&self, object: Value) -> Result<DynamicObject, kube::Error> {
        let object: DynamicObject = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
        self.dynamic(&object).create(&PostParams::default(), &object).await
    }

    /// Merges a patch into an object named by its JSON (`apiVersion`, `kind`, `metadata.name`).
    pub async fn merge(&self, of: &DynamicObject, patch: Value) -> Result<DynamicObject, kube::Error> {
        self.dynamic(of).patch(&of.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await
    }

    /// The same for its status, which only tests of the rules themselves may do.
    pub async fn merge_status(&self, of: &DynamicObject, patch: Value) -> Result<DynamicObject, kube::Error> {
        self.dynamic(of).patch_status(&of.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await
    }

    pub async fn delete(&self, object: &DynamicObject) -> Result<(), kube::Error> {
        self.dynamic(object).delete(&object.name_any(), &DeleteParams::default()).await.map(drop)
    }

    /// Whether a delete would be taken; nothing is deleted.
    pub async fn dry_delete(&self, object: &DynamicObject) -> Result<(), kube::Error> {
        let params = DeleteParams { dry_run: true, ..DeleteParams::default() };
        self.dynamic(object).delete(&object.name_any(), &params).await.map(drop)
    }

    fn dynamic(&self, object: &DynamicObject) -> Api<DynamicObject> {
        let types = object.types.clone().unwrap_or_default();
        let (group, version) = types.api_version.split_once('/').unwrap_or(("", &types.api_version));
        let mut resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &types.kind));
        if types.kind == "OvercommitPolicy" {
            "overcommitpolicies".clone_into(&mut resource.plural);
        }
        match types.kind.as_str() {
            "Workspace" | "Volume" | "ConfigMap" | "Secret" => {
                Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
            }
            _ => Api::all_with(self.client.clone(), &resource),
        }
    }

    /// Waits until a Workspace is as wanted; after `seconds` the error shows it.
    pub async fn workspace(
        &self,
        name: &str,
        what: &str,
        seconds: u64,
        reached: impl Fn(&Workspace) -> bool,
    ) -> Result<Workspace> {
        self.watched(self.api(), name, what, seconds, reached).await
    }

    /// Waits until an object exists and is as wanted.
    pub async fn watched<K>(
        &self,
        api: Api<K>,
        name: &str,
        what: &str,
        seconds: u64,
        reached: impl Fn(&K) -> bool,
    ) -> Result<K>
    where
        K: Resource + Clone + std::fmt::Debug + DeserializeOwned + Serialize + Send + 'static,
    {
        let limit = Duration::from_secs(seconds);
        let found = watched(api, name, what, limit, |object| object.is_some_and(&reached)).await?;
        found.context("watched objects exist")
    }

    /// Waits until an object is gone.
    pub async fn gone<K>(&self, api: Api<K>, name: &str, seconds: u64) -> Result<()>
    where
        K: Resource + Clone + std::fmt::Debug + DeserializeOwned + Serialize + Send + 'static,
    {
        let limit = Duration::from_secs(seconds);
        watched(api, name, "is gone", limit, |object| object.is_none()).await.map(drop)
    }

    /// Runs kubectl in this test's namespace.
    pub async fn kubectl(&self, args: &[&str]) -> Result<Ran> {
        self.kubectl_with(args, "").await
    }

    /// Runs kubectl with text on its standard input.
    pub async fn kubectl_with(&self, args: &[&str], stdin: &str) -> Result<Ran> {
        let mut command = Command::new(self.cluster.programs().kubectl());
        command.env("KUBECACHEDIR", self.cluster.layout().root().join("kube-cache"));
        self.run(command, args, stdin).await
    }

    /// Runs kibo in this test's namespace.
    pub async fn kibo(&self, args: &[&str]) -> Result<Ran> {
        self.kibo_with(args, "").await
    }

    /// Runs kibo with text on its standard input.
    pub async fn kibo_with(&self, args: &[&str], stdin: &str) -> Result<Ran> {
        self.run(Command::new(self.cluster.programs().kibo()), args, stdin).await
    }

    /// Runs a line as somebody would type it in this test's namespace: kibo and kubectl are found, the context
    /// of the kubeconfig has the namespace. All lines are typed in one directory, which begins empty.
    pub async fn bash(&self, line: &str) -> Result<Ran> {
        let layout = self.cluster.layout();
        let here = layout.root().join(format!("{}-here", self.namespace));
        std::fs::create_dir_all(&here)?;
        let mut command = Command::new("bash");
        command
            .args(["-c", line])
            .env("PATH", path_with(&layout.bin()))
            .env("KUBECONFIG", self.kubeconfig()?)
            .env("KUBECACHEDIR", layout.root().join("kube-cache"))
            .current_dir(here)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let ran = tokio::time::timeout(LIMIT, command.output()).await;
        let output = ran.with_context(|| format!("{line}: did not end within {LIMIT:?}"))??;
        Ok(Ran::from(output))
    }

    /// A kubeconfig whose contexts have this test's namespace.
    fn kubeconfig(&self) -> Result<PathBuf> {
        let layout = self.cluster.layout();
        let mut config: serde_yaml::Value = serde_yaml::from_str(&std::fs::read_to_string(layout.kubeconfig())?)?;
        for context in config["contexts"].as_sequence_mut().context("a kubeconfig has contexts")? {
            context["context"]["namespace"] = self.namespace.as_str().into();
        }
        let path = layout.root().join(format!("{}.kubeconfig", self.namespace));
        std::fs::write(&path, serde_yaml::to_string(&config)?)?;
        Ok(path)
    }

    /// kibo in this test's namespace, with the standard streams that the test gives it.
    pub fn kibo_command(&self, args: &[&str]) -> Command {
        self.command(Command::new(self.cluster.programs().kibo()), args)
    }

    fn command(&self, mut command: Command, args: &[&str]) -> Command {
        command
            // After the verb: kubectl takes no flag before the name of a plugin.
            .args(args.first())
            .args(["-n", &self.namespace])
            .args(args.iter().skip(1))
            .env("KUBECONFIG", self.cluster.layout().kubeconfig())
            .env("PATH", path_with(&self.cluster.layout().bin()))
            .kill_on_drop(true);
        command
    }

    async fn run(&self, command: Command, args: &[&str], stdin: &str) -> Result<Ran> {
        let mut command = self.command(command, args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let what = format!("failed to run {:?}", command.as_std());
        let mut child = command.spawn().context(what)?;
        let mut input = child.stdin.take().context("stdin is piped")?;
        let text = stdin.as_bytes().to_vec();
        // Beside the reading: a program that prints while it reads must not block.
        let feed = tokio::spawn(async move { input.write_all(&text).await });
        let output = tokio::time::timeout(LIMIT, child.wait_with_output())
            .await
            .with_context(|| format!("{args:?} did not end within {LIMIT:?}"))??;
        feed.abort();
        Ok(Ran::from(output))
    }

    /// The ids of this test's nodes.
    pub fn nodes(&self) -> Vec<String> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Prints what somebody needs who looks for the reason of a failure.
    pub(super) async fn explain(&self) {
        let mut parts = vec![format!("---- {} failed ----", self.namespace)];
        if let Ok(objects) = self.kubectl(&["get", "workspaces,volumes,events", "-o", "wide"]).await {
            parts.push(objects.stdout);
        }
        let nodes = self.nodes().into_iter().map(Component::Node);
        for component in [Component::Operator].into_iter().chain(nodes) {
            let tail = process::tail(&self.cluster.log(&component), 40);
            parts.push(format!("---- end of the log of {component} ----\n{tail}"));
        }
        // One write, so that the parts of two tests that fail together do not mix.
        eprintln!("{}", parts.join("\n"));
    }

    /// Deletes what the test made, and stops its nodes.
    pub(super) async fn end(&self) -> Result<()> {
        for remote in self.remotes.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            remote.go_on();
        }
        let cleaned = if self.nodes().is_empty() { Ok(()) } else { self.delete_all().await };
        for id in self.nodes() {
            self.cluster.stop(&Component::Node(id.clone())).await?;
            self.cluster.end_virtual_machines(&id).await?;
        }
        cleaned
    }

    async fn delete_all(&self) -> Result<()> {
        // Daemons that a test stopped or paused must run to let go of what they hold.
        for id in self.nodes() {
            let component = Component::Node(id.clone());
            match self.cluster.process(&component) {
                Some(_) => self.cluster.resume(&component)?,
                // It holds nothing, and would never have a session.
                None if self.is_retired(&id).await? => {}
                None => self.cluster.start(&component).await?,
            }
        }
        self.cluster.start(&Component::Operator).await?;
        self.delete_kind::<Workspace>().await?;
        self.delete_kind::<Volume>().await
    }

    async fn is_retired(&self, id: &str) -> Result<bool> {
        let node = self.all::<Node>().get_opt(id).await?;
        Ok(node.and_then(|node| node.status?.admission) == Some(Admission::Retired))
    }

    async fn delete_kind<K>(&self) -> Result<()>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned
            + Send
            + 'static,
        K::DynamicType: Default,
    {
        let api: Api<K> = self.api();
        api.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        eventually(&format!("every {kind} of {} is gone", self.namespace), CLEAN_LIMIT, || async {
            let left = api.list(&ListParams::default()).await?;
            Ok(left.items.is_empty().then_some(()))
        })
        .await
    }
}

/// The search path with a directory in front: kubectl finds its plugins there.
fn path_with(bin: &std::path::Path) -> std::ffi::OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let all = [bin.to_owned()].into_iter().chain(std::env::split_paths(&path));
    std::env::join_paths(all).unwrap_or(path.clone())
}

/// Applies the custom resources and policies as the operator does when it starts.
pub(super) async fn apply_contract(cluster: &LocalCluster) -> Result<()> {
    let client = cluster.client().await?;
    let params = PatchParams::apply("kibo-e2e").force();
    for crd in kibo_crds::yaml::crds() {
        let api = Api::all(client.clone());
        let name = crd.name_any();
        api.patch(&name, &params, &Patch::Apply(&crd)).await.with_context(|| format!("failed to apply {name}"))?;
        watched(api, &name, "is served", Duration::from_secs(20), is_established).await?;
    }
    for policy in kibo_crds::policy::all() {
        let name = policy.policy.name_any();
        let policies: Api<ValidatingAdmissionPolicy> = Api::all(client.clone());
        policies.patch(&name, &params, &Patch::Apply(&policy.policy)).await?;
        let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(client.clone());
        bindings.patch(&name, &params, &Patch::Apply(&policy.binding)).await?;
    }
    Ok(())
}

fn is_established(
    crd: Option<&k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition>,
) -> bool {
    crd.and_then(|crd| crd.status.as_ref()?.conditions.as_ref())
        .is_some_and(|all| all.iter().any(|it| it.type_ == "Established" && it.status == "True"))
}
