//! What an earlier daemon left, found by listing: directories and processes. Cgroups are not listed: those of another
//! daemon with the same node id look the same, and every cgroup has a directory or a process.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Weak},
    time::Duration,
};

use kibo_crds::{InstanceId, PoolId};
use kibo_protocol::v1::{EndReason, InstanceState};
use tokio::runtime::Handle;

use super::{
    FilesError, Inner, Record,
    files::host_boot_id,
    grip,
    machine::Ending,
    task::{self, Found},
};
use crate::{
    launch::Launch,
    network::{Assigned, NetworkError},
    pool::watch,
    vmm::{Cgroup, ProcessId, SocketDir, VmProcess, is_gone},
};

/// A killed process is reaped by its parent, which is not always us.
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// An Instance that could not be taken up is looked at again so often: somebody may have helped.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error(
        "there is no [network] section, but {instance} has a network: give the section back until its Workspace is stopped"
    )]
    NoNetwork { instance: InstanceId },
    #[error("failed to list the processes: {0}; without that nobody knows what runs")]
    Processes(io::Error),
    #[error(
        "{instance} runs on this host as process {pid}, and not for this state directory, which is a copy of another \
         daemon's: only that one may decide over it. Remove this copy"
    )]
    Copied { instance: InstanceId, pid: i32 },
}

/// Why one Instance cannot be taken up now. Its VM may run, so it is neither started nor ended.
#[derive(Debug, thiserror::Error)]
enum Unclear {
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error("failed to list the processes: {0}")]
    Processes(io::Error),
    #[error("failed to take hold of process {pid}: {source}")]
    Process { pid: i32, source: io::Error },
    #[error("process {pid} does not go after it was killed: see whether the disk under its images hangs")]
    Immortal { pid: i32 },
    #[error("failed to open its directory: {0}")]
    Directory(io::Error),
    #[error(transparent)]
    Network(#[from] NetworkError),
}

/// Processes by the name of their Instance.
type Processes = BTreeMap<String, Vec<ProcessId>>;

pub async fn recover(inner: &Arc<Inner>) -> Result<(), RecoverError> {
    let mut processes = processes(inner).map_err(RecoverError::Processes)?;
    let instances = inner.dirs.list()?;
    let others = inner.deps.vmm.processes_of_others().map_err(RecoverError::Processes)?;
    // Before anything is concluded from what does not run here: it would release the disks of a guest that writes.
    for instance in &instances {
        if let Some((_, process)) = others.iter().find(|(name, _)| *name == instance.to_string()) {
            return Err(RecoverError::Copied { instance: *instance, pid: process.pid });
        }
    }
    restore_network(inner, &instances).await?;
    for instance in instances {
        let own = processes.remove(&instance.to_string()).unwrap_or_default();
        // One that cannot be taken up must not keep the others from it.
        if let Err(unclear) = recover_one(inner, instance, own).await {
            tracing::error!(%instance, %unclear, "an Instance cannot be taken up; it is left as it is");
            register_unclear(inner, instance, &unclear);
            tokio::spawn(task::or_abort("recovery", try_again(inner.clone(), instance)));
        }
    }
    // Nobody knows what these were for, so nobody can have an interest in them.
    for (name, strays) in processes {
        tracing::warn!(name, "killing a VM of this node that has no directory");
        if let Err(unclear) = kill_all(&inner.deps.vmm.cgroup(&name), strays).await {
            tracing::error!(name, %unclear, "a VM that has no directory is left; what it holds is not given away");
            continue;
        }
        if let Err(error) = inner.deps.vmm.cgroup(&name).remove() {
            tracing::warn!(name, %error, "failed to remove the cgroup of a VM that had no directory");
        }
    }
    Ok(())
}

/// Before any Instance goes on: the rules of all must be there when those of one are made.
async fn restore_network(inner: &Inner, instances: &[InstanceId]) -> Result<(), RecoverError> {
    let mut guests = BTreeMap::new();
    for instance in instances {
        // One that cannot be read is taken up later, if at all: the rules let nothing of it pass until then.
        if let Ok(Some((record, launch))) = inner.dirs.of(*instance).load()
            && let Some(address) = record.address
            && !inner.deps.spool.has_ended(*instance)
        {
            guests.insert(*instance, Assigned { address, egress: launch.egress });
        }
    }
    match (&inner.deps.network, guests.first_key_value()) {
        (Some(network), _) => Ok(network.restore(guests).await?),
        (None, Some((instance, _))) => Err(RecoverError::NoNetwork { instance: *instance }),
        (None, None) => Ok(()),
    }
}

fn processes(inner: &Inner) -> io::Result<Processes> {
    let mut processes = Processes::new();
    for (name, process) in inner.deps.vmm.processes()? {
        processes.entry(name).or_default().push(process);
    }
    Ok(processes)
}

/// Keeps its place, and lets its pools have their say: its VM may run.
fn register_unclear(inner: &Arc<Inner>, instance: InstanceId, unclear: &Unclear) {
    let cgroup = inner.deps.vmm.cgroup(&instance.to_string());
    let watch = || {
        let is_frozen = cgroup.is_frozen();
        let grip = UnclearGrip { inner: Arc::downgrade(inner), instance, cgroup, runtime: Handle::current() };
        inner.deps.pools.watch_unclear(instance, Arc::new(grip), is_frozen)
    };
    inner.register_unclear(instance, &unclear.to_string(), watch);
}

/// The hand on a VM whose Instance could not be taken up.
struct UnclearGrip {
    inner: Weak<Inner>,
    instance: InstanceId,
    cgroup: Cgroup,
    runtime: Handle,
}

impl watch::Grip for UnclearGrip {
    fn freeze(&self, pool: &PoolId, problem: &str) {
        tracing::error!(instance = %self.instance, %pool, problem, "an Instance that could not be taken up stands still");
        if let Err(error) = self.cgroup.freeze() {
            self.kill(pool, &error.to_string(), false);
        }
    }

    fn thaw(&self) {
        grip::thaw(&self.cgroup);
    }

    fn kill(&self, pool: &PoolId, why: &str, _: bool) {
        tracing::error!(instance = %self.instance, %pool, why, "an Instance that could not be taken up is destroyed");
        let (inner, instance) = (self.inner.clone(), self.instance);
        self.runtime.spawn(async move {
            if let Some(inner) = inner.upgrade() {
                destroy_unclear(&inner, instance).await;
            }
        });
    }
}

/// Until somebody has helped, and the Instance is taken up like any other.
async fn try_again(inner: Arc<Inner>, instance: InstanceId) {
    loop {
        tokio::time::sleep(LOOK_AGAIN).await;
        let again = async {
            let own = processes(&inner).map_err(Unclear::Processes)?.remove(&instance.to_string());
            recover_one(&inner, instance, own.unwrap_or_default()).await
        };
        match again.await {
            Ok(()) => {
                tracing::info!(%instance, "the Instance could be taken up");
                return inner.forget_unclear(instance);
            }
            Err(unclear) => {
                tracing::debug!(%instance, %unclear, "an Instance still cannot be taken up");
                register_unclear(&inner, instance, &unclear);
            }
        }
    }
}

async fn recover_one(inner: &Arc<Inner>, instance: InstanceId, own: Vec<ProcessId>) -> Result<(), Unclear> {
    let directory = inner.dirs.of(instance);
    let Some((record, launch)) = directory.load()? else {
        // Killed before the record was written: nothing was done yet.
        return discard(inner, instance, own).await;
    };
    if inner.deps.spool.has_ended(instance) {
        // Killed between the Ended event and the removal of the directory, the last two steps.
        return discard(inner, instance, own).await;
    }
    if let (Some(network), Some(address)) = (&inner.deps.network, record.address) {
        network.adopt(instance, Assigned { address, egress: launch.egress }).await?;
    }
    let process = choose(&inner.deps.vmm.cgroup(&instance.to_string()), &record, own).await?;
    let found = found(inner, &record, &launch, process)?;
    let state = match &found {
        Found::Unstarted => InstanceState::Starting,
        Found::Running(..) => InstanceState::Running,
        Found::Gone(_) => InstanceState::Stopping,
    };
    if let Some(inputs) = inner.register(&launch, state) {
        task::spawn(instance, task::run_found(inner.clone(), launch, record, inputs, found));
    }
    Ok(())
}

/// Ends an Instance that cannot be taken up, on a node whose every right is void. Its processes are found by listing.
pub async fn destroy_unclear(inner: &Inner, instance: InstanceId) {
    let name = instance.to_string();
    let destroyed = async {
        let own = processes(inner).map_err(Unclear::Processes)?.remove(&name);
        discard(inner, instance, own.unwrap_or_default()).await
    };
    if let Err(unclear) = destroyed.await {
        return tracing::error!(%instance, %unclear, "an Instance that could not be taken up cannot be destroyed either");
    }
    if let Err(error) = inner.deps.vmm.cgroup(&name).remove() {
        tracing::warn!(%instance, %error, "failed to remove a cgroup");
    }
    if let Some(network) = &inner.deps.network
        && let Err(error) = network.detach(instance).await
    {
        tracing::warn!(%instance, %error, "failed to detach a network");
    }
    inner.forget_unclear(instance);
}

async fn discard(inner: &Inner, instance: InstanceId, own: Vec<ProcessId>) -> Result<(), Unclear> {
    kill_all(&inner.deps.vmm.cgroup(&instance.to_string()), own).await?;
    Ok(inner.dirs.of(instance).remove()?)
}

/// The one process that is the Instance's VM. Two would write to the same disks; only the recorded one has a right to.
async fn choose(cgroup: &Cgroup, record: &Record, mut own: Vec<ProcessId>) -> Result<Option<VmProcess>, Unclear> {
    let recorded = record.process.and_then(|recorded| own.iter().position(|process| *process == recorded));
    let chosen = match recorded {
        Some(index) => Some(own.swap_remove(index)),
        // Killed between the start of the process and its record.
        None if own.len() == 1 => own.pop(),
        None => None,
    };
    kill_all(cgroup, own).await?;
    chosen.map_or(Ok(None), open)
}

/// Takes hold of a process; nothing when it is gone.
fn open(id: ProcessId) -> Result<Option<VmProcess>, Unclear> {
    match VmProcess::open(id.pid) {
        Ok(process) => Ok(Some(process).filter(|process| process.id() == id)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(source) => Err(Unclear::Process { pid: id.pid, source }),
    }
}

fn found(inner: &Inner, record: &Record, launch: &Launch, process: Option<VmProcess>) -> Result<Found, Unclear> {
    let instance = launch.instance();
    Ok(match (process, &record.ending) {
        (Some(process), _) => {
            let sockets = SocketDir::open(inner.dirs.of(instance).path());
            Found::Running(process, sockets.map_err(Unclear::Directory)?)
        }
        (None, Some(ending)) => Found::Gone(ending.clone()),
        (None, None) if may_start_again(record, &host_boot_id()) => Found::Unstarted,
        (None, None) => {
            let cgroup = inner.deps.vmm.cgroup(&instance.to_string());
            let ending = if cgroup.oom_kills().is_some_and(|kills| kills > 0) {
                let message = "the VM used more memory than its limit and was killed: give the Workspace more memory";
                Ending::new(EndReason::OutOfMemory, message)
            } else if record.host_boot_id != host_boot_id() {
                Ending::new(EndReason::HostRestarted, "the host was restarted, or failed, while the VM ran")
            } else {
                Ending::new(EndReason::VmmExited, "the VM ended while the daemon was away")
            };
            Found::Gone(ending)
        }
    })
}

/// Whether an Instance without a VM and an end is to be started: no guest was configured, so nothing was written and
/// nobody was told that it runs. Never after another boot of the host, nor when that cannot be known: the node may have
/// been isolated while it was down and another node may hold the disks, and nobody is asked before this starts.
fn may_start_again(record: &Record, host_boot_id: &str) -> bool {
    !record.configured && !host_boot_id.is_empty() && record.host_boot_id == host_boot_id
}

/// Returns when they are gone. They may be frozen; what else is in the cgroup is not thawed unless something was killed.
async fn kill_all(cgroup: &Cgroup, processes: Vec<ProcessId>) -> Result<(), Unclear> {
    let mut killed = Vec::new();
    for process in processes {
        let Some(running) = open(process)? else { continue };
        running.kill();
        killed.push(running);
    }
    if !killed.is_empty() {
        grip::thaw(cgroup);
    }
    for running in killed {
        let pid = running.id().pid;
        match tokio::time::timeout(KILL_LIMIT, running.exited()).await {
            Ok(Ok(_)) => {}
            Ok(Err(source)) => return Err(Unclear::Process { pid, source }),
            Err(_) => return Err(Unclear::Immortal { pid }),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kibo_crds::Incarnation;

    use super::*;
    use crate::launch::{By, Taker};

    fn record(host_boot_id: &str, configured: bool) -> Record {
        let by = By::Instance(InstanceId::generate());
        let taker = Taker { node: "n1".parse().unwrap(), incarnation: Incarnation(1), by };
        let record = serde_json::json!({
            "taker": taker, "hostBootId": host_boot_id, "launch": "", "configured": configured,
        });
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn only_what_was_not_configured_in_this_boot_is_started_again() {
        assert!(may_start_again(&record("this", false), "this"));
        assert!(!may_start_again(&record("this", true), "this"));
        assert!(!may_start_again(&record("before", false), "this"));
        // Records of older daemons have none, and it may not be readable.
        assert!(!may_start_again(&record("", false), "this"));
        assert!(!may_start_again(&record("", false), ""));
    }
}
