//! One state machine for each Instance: what runs on this host.
//!
//! [`Instances`] supervises them. Each Instance is a task that owns its VM and its record on disk; what it decides is in
//! [`machine`], which is pure. A daemon that starts finds by listing what an earlier one left ([`recover`]): what runs is
//! adopted, what does not is ended, and the order at an end is always the same: the process is reaped, the traces on the
//! host are removed (cgroup, network), the holder records are released, the Ended event is on the disk, the directory
//! goes.

mod console;
mod control;
mod files;
mod grip;
mod launching;
mod machine;
mod persisting;
mod recover;
mod releasing;
mod root_image;
mod stall;
mod streams;
mod task;
mod timeline;
mod types;
mod vm;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::Stream;
use kibo_crds::{Bytes, InstanceId, MilliCpu, ObjectUid};
use kibo_protocol::v1::{self, EndReason, StreamFailure};
use tokio::sync::{mpsc, watch};

use crate::{
    guest::{Guest, Open},
    launch::{Launch, instance_id},
    log_store::{LogStore, Wanted},
    network::Network,
    pool::{Pools, watch::Registration},
    session::Inventoried,
    spool::EventSpool,
    vmm::Vmm,
};
use files::{InstanceDirs, Record};
pub(crate) use machine::Input;
pub(crate) use stall::DiskPools;
pub(crate) use vm::{RunningVm, Watched};

pub use files::FilesError;
pub use launching::{configuration, machine};
pub use machine::{Bounds, Ending};
pub use recover::RecoverError;
pub use root_image::{RootImage, find as find_root_image};
pub use types::{ExecExit, ExecInput, ExecOutput, ExecStream, LogChunk, StopMode, StreamError, Summary};

/// VMs are dead within a moment; what can take longer is the storage.
const DESTROY_LIMIT: Duration = Duration::from_secs(60);

/// What Instances are made from.
#[derive(Clone)]
pub struct Deps {
    /// Where root images are.
    pub images_dir: PathBuf,
    pub vmm: Vmm,
    /// Absent: guests have no network.
    pub network: Option<Network>,
    pub pools: Arc<Pools>,
    pub spool: Arc<EventSpool>,
    pub logs: Arc<LogStore>,
    pub bounds: Bounds,
}

/// All Instances of this node. Cheap to clone.
#[derive(Clone)]
pub struct Instances(Arc<Inner>);

struct Inner {
    deps: Deps,
    dirs: InstanceDirs,
    running: Mutex<BTreeMap<InstanceId, Handle>>,
    changed: watch::Sender<u64>,
}

/// How to reach an Instance's task.
struct Handle {
    summary: Summary,
    inputs: mpsc::UnboundedSender<Input>,
    guest: Option<Guest>,
    /// Why nobody keeps it: its VM may run, and nothing is done for it before somebody has helped.
    unclear: Option<String>,
    /// Of one that nobody keeps.
    watched: Option<Registration>,
}

impl Handle {
    /// Says nothing about whether it was heard: an Instance exists until its handle is gone, also when its task has
    /// failed. Its VM may still write then, so nobody may release its objects.
    fn tell(&self, input: Input) {
        let _ = self.inputs.send(input);
    }
}

impl Instances {
    /// Takes up what an earlier daemon left: adopts what runs, ends what does not, removes what belongs to nothing.
    pub async fn recover(deps: Deps) -> Result<Self, RecoverError> {
        let dirs = InstanceDirs::open(deps.vmm.state_dir())?;
        let inner = Inner { deps, dirs, running: Mutex::default(), changed: watch::Sender::new(0) };
        let instances = Self(Arc::new(inner));
        recover::recover(&instances.0).await?;
        Ok(instances)
    }

    /// What runs or is being started or stopped. What has ended is in the spool.
    pub fn list(&self) -> Vec<Summary> {
        self.0.lock().values().map(|handle| handle.summary.clone()).collect()
    }

    /// Why an Instance is on this host and can neither be stopped nor started; nothing for any other.
    pub fn problem(&self, instance: InstanceId) -> Option<String> {
        self.0.lock().get(&instance).and_then(|handle| handle.unclear.clone())
    }

    /// What runs, with what it was made from.
    pub fn inventory(&self) -> Result<Vec<Inventoried>, String> {
        let mut all = Vec::new();
        for summary in self.list() {
            if let Some(problem) = self.problem(summary.id) {
                return Err(problem);
            }
            match self.0.dirs.of(summary.id).load().map_err(|error| error.to_string())? {
                Some((record, launch)) => {
                    all.push(Inventoried { launch: launch.message, state: summary.state, available: record.available });
                }
                None if summary.state == v1::InstanceState::Starting => {
                    return Err(format!("{} is just being started", summary.id));
                }
                // Its end is in the spool.
                None => {}
            }
        }
        Ok(all)
    }

    /// Changes whenever an Instance comes, goes or enters another state.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    /// Starts an Instance, once: also asked again, also after its end. What becomes of it is told by events.
    pub fn start(&self, launch: Launch) {
        let instance = launch.instance();
        if self.0.deps.spool.has_ended(instance) {
            return;
        }
        if self.problem(instance).is_some() {
            return;
        }
        let Some(inputs) = self.0.register(&launch, v1::InstanceState::Starting) else { return };
        let inner = self.0.clone();
        task::spawn(instance, task::run_new(inner, launch, inputs));
    }

    /// Stops an Instance; the end is told by an event. False when it does not exist here.
    pub fn stop(&self, instance: InstanceId, mode: StopMode) -> bool {
        self.0.tell(instance, Input::Stop(mode))
    }

    /// Ends an Instance at once because the control plane does not hold it. False when it does not exist here.
    pub fn tear_down(&self, instance: InstanceId, reason: &str) -> bool {
        self.0.tell(instance, Input::End(Ending::new(EndReason::TornDown, reason)))
    }

    /// Ends all at once and returns when nothing of them is left; or, when a pool does not answer, after a while: its
    /// holder records are the next daemon's to release then.
    pub async fn destroy_all(&self, reason: EndReason, message: &str) {
        if tokio::time::timeout(DESTROY_LIMIT, self.destroy(reason, message)).await.is_err() {
            let left: Vec<String> = self.0.lock().keys().map(InstanceId::to_string).collect();
            tracing::error!(?left, "some Instances could not be cleared: see whether a pool hangs");
        }
    }

    async fn destroy(&self, reason: EndReason, message: &str) {
        let mut changes = self.0.changed.subscribe();
        loop {
            changes.mark_unchanged();
            let ids: Vec<InstanceId> = self.0.lock().keys().copied().collect();
            if ids.is_empty() {
                return;
            }
            // One that is unclear takes its time, and none of the others is to wait for it.
            let (unclear, clear): (Vec<_>, Vec<_>) = ids.into_iter().partition(|id| self.problem(*id).is_some());
            for id in clear {
                self.0.tell(id, Input::End(Ending::new(reason, message)));
            }
            for id in unclear {
                recover::destroy_unclear(&self.0, id).await;
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Runs a command in a guest.
    pub async fn exec(&self, request: v1::ExecRequest) -> Result<ExecStream, StreamError> {
        let guest = self.guest(&request.instance_id)?;
        guest.open(streams::command(request)?).await
    }

    /// Connects to a TCP port in a guest.
    pub async fn connect(&self, request: v1::ConnectRequest) -> Result<ExecStream, StreamError> {
        self.guest(&request.instance_id)?.open(Open::Connect { port: request.port }).await
    }

    /// Moves files out of a guest or into it.
    pub async fn archive(&self, request: v1::ArchiveRequest) -> Result<ExecStream, StreamError> {
        let guest = self.guest(&request.instance_id)?;
        guest.open(streams::archive(request)?).await
    }

    fn guest(&self, instance: &str) -> Result<Guest, StreamError> {
        let instance = instance_id(instance).map_err(|error| streams::invalid(error.to_string()))?;
        let guest = self.0.lock().get(&instance).map(|handle| handle.guest.clone());
        let guest = guest.ok_or_else(|| StreamError {
            failure: StreamFailure::NoInstance,
            message: format!("{instance} does not run on this node"),
        })?;
        guest.ok_or_else(|| StreamError {
            failure: StreamFailure::GuestUnavailable,
            message: format!("the guest of {instance} is not started yet"),
        })
    }

    /// Removes what a Workspace printed; its writable layer was deleted. Blocks for a moment.
    pub fn forget_log(&self, workspace: &ObjectUid) {
        if let Err(error) = self.0.deps.logs.remove(workspace) {
            tracing::warn!(%workspace, %error, "failed to remove the log of a deleted Workspace");
        }
    }

    /// What a Workspace printed on this node. With `follow`, it ends with the Instance.
    pub fn log(&self, request: &v1::LogRequest) -> Result<impl Stream<Item = LogChunk> + Send + use<>, StreamError> {
        let workspace: ObjectUid =
            request.workspace_uid.parse().map_err(|error: kibo_crds::NameError| streams::invalid(error.to_string()))?;
        let wanted = Wanted {
            tail: request.tail_lines,
            since_unix_nanos: request.since_unix_nanos,
            timestamps: request.timestamps,
            limit: request.limit_bytes,
        };
        self.0.deps.logs.read(&workspace, wanted, request.follow).map_err(|error| StreamError {
            failure: StreamFailure::Failed,
            message: format!("failed to read the log of {workspace}: {error}"),
        })
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<InstanceId, Handle>> {
        // Every change under the lock is one insertion, removal or assignment.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    /// A place for an Instance; `None` when it has one.
    fn register(&self, launch: &Launch, state: v1::InstanceState) -> Option<task::Inputs> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let summary = Summary {
            id: launch.instance(),
            workspace_uid: launch.workspace.uid.clone(),
            state,
            cpu: launch.cpu,
            allocated_memory: launch.allocated_memory,
            pools: launch.objects().map(|granted| granted.object.pool.clone()).collect(),
        };
        let mut running = self.lock();
        if running.get(&launch.instance()).is_some_and(|handle| handle.unclear.is_none()) {
            return None;
        }
        running.insert(
            launch.instance(),
            Handle { summary, inputs: sender.clone(), guest: None, unclear: None, watched: None },
        );
        drop(running);
        self.changed();
        Some(task::Inputs { sender, receiver })
    }

    /// Keeps the place of an Instance that cannot be taken up, so that nobody starts it a second time.
    fn register_unclear(&self, instance: InstanceId, problem: &str, watch: impl FnOnce() -> Option<Registration>) {
        let summary = Summary {
            id: instance,
            workspace_uid: String::new(),
            state: v1::InstanceState::Running,
            cpu: MilliCpu(0),
            allocated_memory: Bytes(0),
            pools: BTreeSet::new(),
        };
        let (inputs, _) = mpsc::unbounded_channel();
        let mut running = self.lock();
        // The same as before: what its pools have said of it counts.
        let watched = running.remove(&instance).and_then(|handle| handle.watched).or_else(watch);
        running.insert(instance, Handle { summary, inputs, guest: None, unclear: Some(problem.to_owned()), watched });
        drop(running);
        self.changed();
    }

    /// There was nothing to take up; otherwise it has its place as any other by now.
    fn forget_unclear(&self, instance: InstanceId) {
        let mut running = self.lock();
        if running.get(&instance).is_some_and(|handle| handle.unclear.is_some()) {
            running.remove(&instance);
        }
        drop(running);
        self.changed();
    }

    fn tell(&self, instance: InstanceId, input: Input) -> bool {
        self.lock().get(&instance).map(|handle| handle.tell(input)).is_some()
    }

    fn entered(&self, instance: InstanceId, state: v1::InstanceState) {
        let changed = self.lock().get_mut(&instance).is_some_and(|handle| {
            let old = std::mem::replace(&mut handle.summary.state, state);
            old != state
        });
        if changed {
            self.changed();
        }
    }

    fn set_guest(&self, instance: InstanceId, guest: Option<Guest>) {
        if let Some(handle) = self.lock().get_mut(&instance) {
            handle.guest = guest;
        }
    }

    fn forget(&self, instance: InstanceId) {
        self.lock().remove(&instance);
        self.changed();
    }
}
