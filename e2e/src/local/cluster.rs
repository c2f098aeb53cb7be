//! One local cluster: opens its state directory, and starts and stops what runs in it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use rustix::fs::FlockOperation;
use rustix::process::Signal;
use tokio::time::{Instant, sleep};

use super::component::{CONTROL_PLANE, Component};
use super::control_plane;
use super::layout::Layout;
use super::leftovers::{remove_cgroups, thaw};
use super::pki::{self, Pki, PkiError};
use super::process::{self, Launch, ProcessError, ProcessId, VirtualMachine};
use super::programs::Programs;
use super::progress::Progress;
use super::record::{Ports, Record, RecordError, Started};

/// How long a component may take to serve. Generous: two cores may be busy with a build.
const READY_LIMIT: Duration = Duration::from_secs(120);

/// How long a component may take to end after SIGTERM.
const STOP_GRACE: Duration = Duration::from_secs(15);

const POLL: Duration = Duration::from_millis(50);

#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("failed to make the state directory {}", path.display())]
    StateDir {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("another command works on {}: wait until it has finished", path.display())]
    Busy { path: PathBuf },
    #[error("there is no local cluster in {}: start one with up", path.display())]
    NoCluster { path: PathBuf },
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("{component} ended while it started; the end of {}:\n{tail}", log.display())]
    Died { component: Component, log: PathBuf, tail: String },
    #[error("{component} does not serve after {READY_LIMIT:?}; the end of {}:\n{tail}", log.display())]
    NotReady { component: Component, log: PathBuf, tail: String },
    #[error("{0} is not running")]
    NotRunning(Component),
    #[error("this cluster has no node {0:?}: add it first")]
    NoNode(String),
    #[error("failed to read the manifests in {}", path.display())]
    Manifest {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("failed to initialise storage pool {id} in {}: {message}", path.display())]
    Pool { id: String, path: PathBuf, message: String },
    #[error("failed to remove the network of the guests of {node}: {message}")]
    Network { node: String, message: String },
    #[error("failed to enroll node {node}: {message}")]
    Enroll { node: String, message: String },
    #[error("failed to make a client for {what}")]
    Client {
        what: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("failed to {what}")]
    Kube {
        what: String,
        #[source]
        source: Box<kube::Error>,
    },
}

/// For `map_err`: says what was asked of the API server.
pub(super) fn kube_failed(what: String) -> impl FnOnce(kube::Error) -> ClusterError {
    move |source| ClusterError::Kube { what, source: Box::new(source) }
}

/// A local cluster, held: nobody else starts or stops anything in its state directory meanwhile.
pub struct LocalCluster {
    layout: Layout,
    pki: Pki,
    programs: Programs,
    progress: Progress,
    record: Mutex<Record>,
    _lock: File,
}

impl LocalCluster {
    /// Opens the state directory `root`, making it with new keys and ports when it is new. Starts
    /// nothing.
    pub fn open(root: PathBuf, programs: Programs, progress: Progress) -> Result<Self, ClusterError> {
        let layout = Layout::new(root);
        make_private(layout.root())?;
        make_private(&layout.control_plane())?;
        let lock = lock(&layout)?;
        let record = match Record::load(&layout.record())? {
            Some(record) => record,
            None => Record::new()?,
        };
        record.save(&layout.record())?;
        let pki = Pki::ensure(layout.pki())?;
        let cluster = Self { layout, pki, programs, progress, record: Mutex::new(record), _lock: lock };
        cluster.write_files()?;
        Ok(cluster)
    }

    /// Opens a state directory that must exist.
    pub fn open_existing(root: PathBuf, programs: Programs, progress: Progress) -> Result<Self, ClusterError> {
        if !Layout::new(root.clone()).record().exists() {
            return Err(ClusterError::NoCluster { path: root });
        }
        Self::open(root, programs, progress)
    }

    fn write_files(&self) -> Result<(), ClusterError> {
        let server = self.server();
        let admin = self.pki.kubeconfig("admin", &server)?;
        pki::write(&self.layout.kubeconfig(), admin.as_bytes())?;
        let manager = self.pki.kubeconfig("controller-manager", &server)?;
        pki::write(&self.pki.path("controller-manager.kubeconfig"), manager.as_bytes())?;
        self.link_programs()?;
        pki::write(&self.layout.audit_policy(), control_plane::AUDIT_POLICY.as_bytes())?;
        Ok(())
    }

    /// Links in `bin/` for the `PATH` that `env` prints. kubectl finds its plugins by their names.
    fn link_programs(&self) -> Result<(), ClusterError> {
        use std::os::unix::fs::symlink;

        let failed = |path: PathBuf| |source| ClusterError::StateDir { path, source };
        let bin = self.layout.bin();
        make_private(&bin)?;
        let links = [
            ("kubectl", self.programs.kubectl()),
            ("kibo", self.programs.kibo()),
            ("kubectl-kibo", self.programs.kibo()),
            ("kubectl_complete-kibo", self.programs.kibo()),
        ];
        for (name, target) in links.iter().filter(|(_, target)| target.exists()) {
            let (link, fresh) = (bin.join(name), bin.join(format!(".{name}")));
            let _ = fs::remove_file(&fresh);
            symlink(target, &fresh).map_err(failed(fresh.clone()))?;
            fs::rename(&fresh, &link).map_err(failed(link.clone()))?;
        }
        Ok(())
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    pub fn progress(&self) -> Progress {
        self.progress
    }

    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    pub fn ports(&self) -> Ports {
        self.record().ports
    }

    /// The API server's URL.
    pub fn server(&self) -> String {
        format!("https://127.0.0.1:{}", self.ports().apiserver)
    }

    /// A snapshot of what is recorded.
    pub fn recorded(&self) -> Record {
        self.record().clone()
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the record and writes it in the same step.
    pub(super) fn change_record<T>(&self, change: impl FnOnce(&mut Record) -> T) -> Result<T, ClusterError> {
        let mut record = self.record();
        let result = change(&mut record);
        record.save(&self.layout.record())?;
        Ok(result)
    }

    /// A client with all rights. It belongs to the calling task's runtime.
    pub async fn client(&self) -> Result<Client, ClusterError> {
        let failed =
            |source: Box<dyn std::error::Error + Send + Sync>| ClusterError::Client { what: "the API server", source };
        let kubeconfig = Kubeconfig::read_from(self.layout.kubeconfig()).map_err(|error| failed(error.into()))?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .map_err(|error| failed(error.into()))?;
        Client::try_from(config).map_err(|error| failed(error.into()))
    }

    /// A client for another HTTPS server on loopback, with the client certificate `pair`.
    async fn client_of(&self, port: u16, ca: &str, pair: &str) -> Result<Client, ClusterError> {
        let failed =
            |source: Box<dyn std::error::Error + Send + Sync>| ClusterError::Client { what: "a component", source };
        let text = pki::kubeconfig(
            &format!("https://127.0.0.1:{port}"),
            &self.pki.read(ca)?,
            pair,
            &self.pki.credentials(pair)?,
        );
        let kubeconfig = Kubeconfig::from_yaml(&text).map_err(|error| failed(error.into()))?;
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .map_err(|error| failed(error.into()))?;
        config.connect_timeout = Some(Duration::from_secs(2));
        Client::try_from(config).map_err(|error| failed(error.into()))
    }

    /// The process of a component, when it runs.
    pub fn process(&self, component: &Component) -> Option<ProcessId> {
        self.record().alive(component)
    }

    /// Starts a component that does not run, and waits until it serves.
    pub async fn start(&self, component: &Component) -> Result<(), ClusterError> {
        self.spawn(component).await?;
        self.ready(component).await
    }

    /// Starts a component that does not run, without waiting for it.
    pub async fn spawn(&self, component: &Component) -> Result<(), ClusterError> {
        if self.process(component).is_some() {
            return Ok(());
        }
        let launch = self.prepare(component).await?;
        // A killed daemon's session may look alive for a while: it is not the one to wait for.
        let session_before = match component {
            Component::Node(id) => self.session_of(id).await,
            _ => None,
        };
        let process = launch.start(self.layout.root())?;
        let started = Started { process, at: Timestamp::now(), session_before };
        self.change_record(|record| record.processes.insert(component.clone(), started))?;
        Ok(())
    }

    async fn prepare(&self, component: &Component) -> Result<Launch, ClusterError> {
        let (layout, pki, ports) = (&self.layout, &self.pki, self.ports());
        let binaries = self.programs.control_plane.join("bin");
        Ok(match component {
            Component::Etcd => {
                self.forget_unborn_etcd()?;
                control_plane::etcd(layout, pki, ports, &binaries)
            }
            Component::ApiServer => {
                pki::write(&layout.etcd_in_use(), b"")?;
                control_plane::apiserver(layout, pki, ports, &binaries)
            }
            Component::ControllerManager => control_plane::controller_manager(layout, pki, ports, &binaries),
            Component::Operator => self.operator_launch().await?,
            Component::Node(id) => self.node_launch(id).await?,
        })
    }

    /// An etcd that was killed while it made its first files never elects itself again. Before an API
    /// server was started there is nothing in it, so it begins anew.
    fn forget_unborn_etcd(&self) -> Result<(), ClusterError> {
        let data = self.layout.etcd_data();
        if self.layout.etcd_in_use().exists() {
            return Ok(());
        }
        match fs::remove_dir_all(&data) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                Err(ClusterError::StateDir { path: data, source })
            }
            _ => Ok(()),
        }
    }

    /// Waits until a component that was spawned serves.
    pub async fn ready(&self, component: &Component) -> Result<(), ClusterError> {
        let deadline = Instant::now() + READY_LIMIT;
        while !self.serves(component).await? {
            let log = self.log(component);
            let component = component.clone();
            if self.process(&component).is_none() {
                return Err(ClusterError::Died { component, tail: process::tail(&log, 25), log });
            }
            if Instant::now() >= deadline {
                return Err(ClusterError::NotReady { component, tail: process::tail(&log, 25), log });
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    /// Whether a component does its work now.
    async fn serves(&self, component: &Component) -> Result<bool, ClusterError> {
        let ports = self.ports();
        let admin = self.client().await?;
        Ok(match component {
            Component::Etcd => {
                let etcd = self.client_of(ports.etcd_client, "etcd-ca.crt", "etcd-client").await?;
                control_plane::etcd_serves(&etcd).await
            }
            Component::ApiServer => control_plane::apiserver_serves(&admin).await,
            Component::ControllerManager => {
                let manager = self.client_of(ports.controller_manager, "ca.crt", "admin").await?;
                control_plane::controllers_work(&manager, &admin).await
            }
            Component::Operator => self.operator_serves(&admin).await,
            Component::Node(id) => self.node_is_ready(&admin, id).await,
        })
    }

    /// Where a component's output goes.
    pub fn log(&self, component: &Component) -> PathBuf {
        match component {
            Component::Etcd | Component::ApiServer | Component::ControllerManager => {
                self.layout.control_plane().join(format!("{component}.log"))
            }
            Component::Operator => self.layout.root().join("operator.log"),
            Component::Node(id) => self.layout.node(id).join("daemon.log"),
        }
    }

    /// Ends a component with SIGTERM; whether it ended by itself in time. One that does not run is
    /// stopped already.
    pub async fn stop(&self, component: &Component) -> Result<bool, ClusterError> {
        let clean = match self.process(component) {
            Some(process) => process.terminate(STOP_GRACE).await?,
            None => true,
        };
        self.change_record(|record| record.processes.remove(component))?;
        Ok(clean)
    }

    /// Kills a component, which must run, with SIGKILL.
    pub async fn kill(&self, component: &Component) -> Result<(), ClusterError> {
        self.running(component)?.kill().await?;
        self.change_record(|record| record.processes.remove(component))?;
        Ok(())
    }

    /// Stops the clock of a component with SIGSTOP: it is there and answers nothing.
    pub fn pause(&self, component: &Component) -> Result<(), ClusterError> {
        self.running(component)?.signal(Signal::STOP)?;
        Ok(())
    }

    pub fn resume(&self, component: &Component) -> Result<(), ClusterError> {
        self.running(component)?.signal(Signal::CONT)?;
        Ok(())
    }

    fn running(&self, component: &Component) -> Result<ProcessId, ClusterError> {
        self.process(component).ok_or_else(|| ClusterError::NotRunning(component.clone()))
    }

    /// Starts what of the control plane does not run, and waits until all of it serves.
    pub async fn up_control_plane(&self) -> Result<(), ClusterError> {
        self.end_unrecorded_components().await?;
        for component in &CONTROL_PLANE {
            self.bring_up(component).await?;
        }
        Ok(())
    }

    /// Starts what of the whole cluster does not run: control plane, operator, every known node. A
    /// program that was built anew since its process was started is started again.
    pub async fn up(&self) -> Result<(), ClusterError> {
        self.up_control_plane().await?;
        let nodes: Vec<Component> = self.recorded().nodes.into_iter().map(|node| Component::Node(node.id)).collect();
        for component in [Component::Operator].iter().chain(&nodes) {
            if self.process(component).is_some_and(ProcessId::is_outdated) {
                self.progress.step(&format!("stopping the old {component}"), self.stop(component)).await?;
            }
        }
        self.bring_up(&Component::Operator).await?;
        // Each proves its accelerator by booting a guest: they do that side by side.
        for node in &nodes {
            self.spawn(node).await?;
        }
        for node in &nodes {
            self.bring_up(node).await?;
        }
        Ok(())
    }

    /// Starts a component, or waits for one that an earlier command has started.
    async fn bring_up(&self, component: &Component) -> Result<(), ClusterError> {
        if self.process(component).is_some() && self.serves(component).await? {
            return Ok(());
        }
        self.progress.step(&component.to_string(), self.start(component)).await
    }

    /// Stops everything of this cluster, recorded or not, virtual machines included. State stays.
    pub async fn down(&self) -> Result<(), ClusterError> {
        let components: Vec<Component> = self.record().processes.keys().rev().cloned().collect();
        for component in &components {
            if self.process(component).is_some() {
                self.progress.step(&format!("stopping {component}"), self.stop(component)).await?;
            }
        }
        for node in self.recorded().nodes {
            if !self.virtual_machines(&node.id).is_empty() {
                let what = format!("ending the virtual machines of {}", node.id);
                self.progress.step(&what, self.end_virtual_machines(&node.id)).await?;
            }
            remove_cgroups(&node.id).await;
        }
        self.down_unrecorded().await?;
        // Nothing runs any more, recorded or not.
        for node in self.recorded().nodes {
            self.remove_network(&node).await?;
        }
        self.change_record(|record| record.processes.clear())
    }

    /// Kills the virtual machines of a node whose daemon does not run, as a host that loses power.
    pub async fn end_virtual_machines(&self, node: &str) -> Result<(), ClusterError> {
        let machines = self.virtual_machines(node);
        for machine in &machines {
            machine.id.signal(Signal::KILL)?;
        }
        // With cgroup v1 what is frozen does not die.
        thaw(node);
        for machine in machines {
            machine.id.kill().await?;
        }
        remove_cgroups(node).await;
        Ok(())
    }

    /// The virtual machines of a node of this cluster. Another cluster may have a node of the same
    /// name: its machines say that they belong to another state directory.
    pub fn virtual_machines(&self, node: &str) -> Vec<VirtualMachine> {
        let state = self.layout.node(node).join("state");
        let mut machines = process::virtual_machines(node);
        machines.retain(|machine| machine.state_dir.as_ref().is_none_or(|dir| *dir == state));
        machines
    }

    /// Ends components that an `up` had started when it was interrupted, before it could record
    /// them: they would stand in the way of those that are started now.
    async fn end_unrecorded_components(&self) -> Result<(), ClusterError> {
        let record = self.recorded();
        let known: Vec<ProcessId> = record.processes.values().map(|started| started.process).collect();
        let listed = process::processes_of(self.layout.root());
        for stray in listed.iter().filter(|it| it.is_component() && !known.contains(&it.id)) {
            stray.id.kill().await?;
        }
        Ok(())
    }

    /// What a listing still finds: whatever an interrupted `up` started without recording it.
    async fn down_unrecorded(&self) -> Result<(), ClusterError> {
        let left = process::processes_of(self.layout.root());
        if left.is_empty() {
            return Ok(());
        }
        let mut programs: BTreeMap<&str, usize> = BTreeMap::new();
        for listed in &left {
            *programs.entry(&listed.program).or_default() += 1;
        }
        let what: Vec<String> = programs.iter().map(|(name, count)| format!("{count} {name}")).collect();
        let work = async {
            for listed in &left {
                listed.id.kill().await?;
            }
            Ok::<_, ClusterError>(())
        };
        self.progress.step(&format!("ending {}", what.join(", ")), work).await
    }
}

pub(super) fn make_private(path: &Path) -> Result<(), ClusterError> {
    use std::os::unix::fs::DirBuilderExt as _;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|source| ClusterError::StateDir { path: path.to_owned(), source })
}

fn lock(layout: &Layout) -> Result<File, ClusterError> {
    let path = layout.lock();
    let failed = |source| ClusterError::StateDir { path: path.clone(), source };
    let file = File::create(&path).map_err(failed)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ClusterError::Busy { path: layout.root().to_owned() }),
        Err(error) => Err(failed(error.into())),
    }
}
