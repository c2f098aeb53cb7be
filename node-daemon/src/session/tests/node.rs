//! A node with a pool and a spool of its own, whose Instances are only noted down.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use futures::stream::BoxStream;
use kibo_crds::{InstanceId, ObjectUid};
use kibo_protocol::v1;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{super::*, operator::Operator};
use crate::{
    config::Config,
    host::Host,
    instance::{ExecExit, ExecInput, ExecOutput, ExecStream, LogChunk, StopMode, StreamError, Summary},
    launch::Launch,
    pool::{self, Pools},
    spool::EventSpool,
    state::{Life, NodeState, StateDir},
};

pub const LAYER: &str = "6f9619ff-8b86-d011-b42d-00c04fc964ff";

/// Notes what it is asked for; an exec gives its input back and ends with its number of bytes.
#[derive(Clone, Default)]
pub struct Noted {
    running: Arc<Mutex<BTreeMap<InstanceId, Summary>>>,
    pub calls: Arc<Mutex<Vec<String>>>,
    pub problems: Arc<Mutex<BTreeMap<InstanceId, String>>>,
}

impl Noted {
    fn note(&self, call: String) {
        self.calls.lock().unwrap().push(call);
    }

    pub fn run(&self, id: InstanceId) {
        let summary = Summary {
            id,
            workspace_uid: LAYER.into(),
            state: v1::InstanceState::Running,
            cpu: kibo_crds::MilliCpu(1000),
            allocated_memory: kibo_crds::Bytes::mib(320),
            pools: std::collections::BTreeSet::new(),
        };
        self.running.lock().unwrap().insert(id, summary);
    }

    /// It has ended, and its end was acknowledged.
    pub fn forget(&self, id: InstanceId) {
        self.running.lock().unwrap().remove(&id);
    }
}

impl InstanceControl for Noted {
    fn list(&self) -> Vec<Summary> {
        self.running.lock().unwrap().values().cloned().collect()
    }

    fn problem(&self, instance: InstanceId) -> Option<String> {
        self.problems.lock().unwrap().get(&instance).cloned()
    }

    fn inventory(&self) -> Result<Vec<Inventoried>, String> {
        let known = |summary: &Summary| Inventoried {
            launch: v1::Launch { instance_id: summary.id.to_string(), ..v1::Launch::default() },
            state: summary.state,
            available: true,
        };
        Ok(self.running.lock().unwrap().values().map(known).collect())
    }

    async fn start(&self, launch: Launch) {
        self.run(launch.instance());
        self.note(format!("start {}", launch.instance()));
    }

    fn stop(&self, instance: InstanceId, mode: StopMode) -> bool {
        let is_here = self.running.lock().unwrap().contains_key(&instance);
        if is_here {
            self.note(format!("stop {instance} {mode:?}"));
        }
        is_here
    }

    fn tear_down(&self, instance: InstanceId, _: &str) -> bool {
        self.running.lock().unwrap().remove(&instance).is_some()
    }

    async fn destroy_all(&self, reason: v1::EndReason, _: &str) {
        self.running.lock().unwrap().clear();
        self.note(format!("destroy {reason:?}"));
    }

    async fn exec(&self, _: v1::ExecRequest) -> Result<ExecStream, StreamError> {
        let (input, mut said) = mpsc::channel(1);
        let (results, output) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut bytes = 0;
            while let Some(heard) = said.recv().await {
                let answer = match heard {
                    ExecInput::Data(data) => {
                        bytes += data.len();
                        ExecOutput::Stdout(data)
                    }
                    ExecInput::Close => break,
                    other => ExecOutput::Stderr(format!("{other:?}").into()),
                };
                let _ = results.send(answer).await;
            }
            let _ = results.send(ExecOutput::Exit(ExecExit::Code(i32::try_from(bytes).unwrap()))).await;
        });
        Ok(ExecStream { input, output })
    }

    async fn connect(&self, request: v1::ConnectRequest) -> Result<ExecStream, StreamError> {
        let (input, mut said) = mpsc::channel(1);
        let (results, output) = mpsc::channel(1);
        tokio::spawn(async move {
            let greeting = format!("port {}", request.port);
            let _ = results.send(ExecOutput::Stdout(greeting.into())).await;
            let _ = results.send(ExecOutput::StdoutClosed).await;
            while said.recv().await.is_some_and(|heard| heard != ExecInput::Close) {}
            let _ = results.send(ExecOutput::Exit(ExecExit::Code(0))).await;
        });
        Ok(ExecStream { input, output })
    }

    async fn archive(&self, _: v1::ArchiveRequest) -> Result<ExecStream, StreamError> {
        Err(StreamError { failure: v1::StreamFailure::NotFound, message: "no file".into() })
    }

    fn log(&self, _: &v1::LogRequest) -> Result<BoxStream<'static, LogChunk>, StreamError> {
        Err(StreamError { failure: v1::StreamFailure::NoInstance, message: "no log".into() })
    }

    fn forget_log(&self, _: &ObjectUid) {}
}

/// A host with a daemon's rooms; the daemon itself begins with [`TestNode::begin`].
pub struct TestNode {
    pub dir: tempfile::TempDir,
    pub instances: Noted,
    /// Beside `p`, each in a directory of its name.
    more_pools: &'static [&'static str],
}

/// A daemon that runs until it is dropped or killed.
pub struct Running {
    pub spool: Arc<EventSpool>,
    pub pools: Arc<Pools>,
    pub outcome: tokio::task::JoinHandle<Outcome>,
    shutdown: CancellationToken,
}

impl TestNode {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        pool::init(&dir.path().join("pool"), &"p".parse().unwrap()).unwrap();
        std::fs::create_dir(dir.path().join("images")).unwrap();
        std::fs::write(dir.path().join("images/debian.erofs"), "").unwrap();
        Self { dir, instances: Noted::default(), more_pools: &[] }
    }

    pub fn with_pools(more_pools: &'static [&'static str]) -> Self {
        let node = Self { more_pools, ..Self::new() };
        for id in more_pools {
            pool::init(&node.dir.path().join(id), &id.parse().unwrap()).unwrap();
        }
        node
    }

    fn config(&self, operator: &Operator) -> Config {
        let dir = self.dir.path().display();
        let more = |id: &&str| format!(r#", {{ id = "{id}", path = "{dir}/{id}" }}"#);
        let more: String = self.more_pools.iter().map(more).collect();
        std::fs::write(self.dir.path().join("ca.crt"), &operator.ca_pem).unwrap();
        let text = format!(
            r#"
            state_dir = "{dir}/state"
            resources = {{ cpu = "2", memory = "1Gi" }}
            storage_pools = [{{ id = "p", path = "{dir}/pool", default = true }}{more}]
            vmm = {{ accelerator = "tcg", qemu = "/q", kernel = "/k", initrd = "/i" }}
            images = {{ dir = "{dir}/images" }}
            control = {{ endpoints = ["https://{}"], ca_file = "{dir}/ca.crt", token_file = "{dir}/token" }}
            "#,
            operator.address
        );
        Config::parse(&text).unwrap()
    }

    /// A daemon of this host whose node was given the operator's token.
    pub fn begin(&self, operator: &Operator) -> Running {
        std::fs::write(self.dir.path().join("token"), operator.token.expose()).unwrap();
        self.begin_with_its_token(operator)
    }

    pub fn begin_with_its_token(&self, operator: &Operator) -> Running {
        let config = Arc::new(self.config(operator));
        let dir = StateDir::open(&config.state_dir).unwrap();
        let id: kibo_crds::NodeId = "node-a".parse().unwrap();
        let spool = Arc::new(EventSpool::open(&config.spool_dir()).unwrap());
        let state = NodeState::open(&dir).unwrap();
        // What runs began in some life.
        if !self.instances.running.lock().unwrap().is_empty() && state.get().life.is_none() {
            let life = Life { incarnation: kibo_crds::Incarnation(1), boot_id: "boot".into() };
            state.update(|record| record.life = Some(life)).unwrap();
        }
        let pools = Arc::new(Pools::open(&config.storage_pools, config.fence, &id).unwrap());
        let node = Node::new(NodeParts {
            state,
            pools: Arc::clone(&pools),
            spool: Arc::clone(&spool),
            host: Host::start(config.host.proc.clone(), self.dir.path().join("cgroups")),
            boot_id: "boot".into(),
            instances: self.instances.clone(),
            id,
            dir,
            config,
        });
        let shutdown = CancellationToken::new();
        let outcome = tokio::spawn(run(Arc::new(node), shutdown.clone()));
        Running { spool, pools, outcome, shutdown }
    }

    pub fn calls(&self) -> Vec<String> {
        self.instances.calls.lock().unwrap().clone()
    }

    pub fn record(&self, name: &str) -> bool {
        self.dir.path().join("pool/objects").join(LAYER).join(name).exists()
    }
}

impl Running {
    /// Ends the daemon; its VMs go on.
    pub async fn end(self) {
        self.shutdown.cancel();
        assert_eq!(self.outcome.await.unwrap(), Outcome::Shutdown);
    }
}
