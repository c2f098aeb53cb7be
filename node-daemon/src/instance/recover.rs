//! What an earlier daemon left, found by listing: directories and processes. Cgroups are not listed: those of another
//! daemon with the same node id look the same, and every cgroup has a directory or a process.

use std::{collections::BTreeMap, io, sync::Arc, time::Duration};

use kibo_crds::InstanceId;
use kibo_protocol::v1::{EndReason, InstanceState};

use super::{
    FilesError, Inner, Record,
    files::host_boot_id,
    machine::Ending,
    task::{self, Found},
};
use crate::{
    launch::Launch,
    vmm::{ProcessId, SocketDir, VmProcess},
};

/// A killed process is reaped by its parent, which is not always us.
const KILL_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error("failed to list the processes: {0}")]
    Processes(io::Error),
    #[error("failed to open the directory of {instance}: {source}")]
    Directory { instance: InstanceId, source: io::Error },
}

/// Processes by the name of their Instance.
type Processes = BTreeMap<String, Vec<ProcessId>>;

pub async fn recover(inner: &Arc<Inner>) -> Result<(), RecoverError> {
    let mut processes = Processes::new();
    for (name, process) in inner.deps.vmm.processes().map_err(RecoverError::Processes)? {
        processes.entry(name).or_default().push(process);
    }
    for instance in inner.dirs.list()? {
        let own = processes.remove(&instance.to_string()).unwrap_or_default();
        recover_one(inner, instance, own).await?;
    }
    // Nobody knows what these were for, so nobody can have an interest in them.
    for (name, strays) in processes {
        tracing::warn!(name, "killing a VM of this node that has no directory");
        kill_all(strays).await;
        if let Err(error) = inner.deps.vmm.cgroup(&name).remove() {
            tracing::warn!(name, %error, "failed to remove the cgroup of a VM that had no directory");
        }
    }
    Ok(())
}

async fn recover_one(inner: &Arc<Inner>, instance: InstanceId, own: Vec<ProcessId>) -> Result<(), RecoverError> {
    let directory = inner.dirs.of(instance);
    let Some((record, launch)) = directory.load()? else {
        // Killed before the record was written: nothing was done yet.
        kill_all(own).await;
        return Ok(directory.remove()?);
    };
    if inner.deps.spool.has_ended(instance) {
        // Killed between the Ended event and the removal of the directory, the last two steps.
        kill_all(own).await;
        return Ok(directory.remove()?);
    }
    let process = choose(&record, own).await;
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

/// The one process that is the Instance's VM. Two would write to the same disks; only the recorded one has a right to.
async fn choose(record: &Record, mut own: Vec<ProcessId>) -> Option<VmProcess> {
    let recorded = record.process.and_then(|recorded| own.iter().position(|process| *process == recorded));
    let chosen = match recorded {
        Some(index) => Some(own.swap_remove(index)),
        // Killed between the start of the process and its record.
        None if own.len() == 1 => own.pop(),
        None => None,
    };
    kill_all(own).await;
    let chosen = chosen?;
    VmProcess::open(chosen.pid).ok().filter(|process| process.id() == chosen)
}

fn found(inner: &Inner, record: &Record, launch: &Launch, process: Option<VmProcess>) -> Result<Found, RecoverError> {
    let instance = launch.instance();
    Ok(match (process, &record.ending) {
        (Some(process), _) => {
            let sockets = SocketDir::open(inner.dirs.of(instance).path());
            Found::Running(process, sockets.map_err(|source| RecoverError::Directory { instance, source })?)
        }
        (None, Some(ending)) => Found::Gone(ending.clone()),
        (None, None) if may_start_again(record, &host_boot_id()) => Found::Unstarted,
        (None, None) => {
            let cgroup = inner.deps.vmm.cgroup(&instance.to_string());
            let ending = if cgroup.oom_kills().is_some_and(|kills| kills > 0) {
                let message = "the VM used more memory than its limit and was killed: give the Workspace more memory";
                Ending::new(EndReason::OutOfMemory, message)
            } else if record.host_boot_id != host_boot_id() {
                Ending::new(EndReason::VmmExited, "the host was restarted, or failed, while the VM ran")
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

async fn kill_all(processes: Vec<ProcessId>) {
    for process in processes {
        let Ok(running) = VmProcess::open(process.pid) else { continue };
        if running.id() != process {
            continue;
        }
        running.kill();
        match tokio::time::timeout(KILL_LIMIT, running.exited()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::error!(pid = process.pid, %error, "failed to wait for a killed process"),
            Err(_) => tracing::error!(pid = process.pid, "a killed process does not go: its disk may hang"),
        }
    }
}

#[cfg(test)]
mod tests {
    use kibo_crds::Incarnation;

    use super::*;
    use crate::launch::Taker;

    fn record(host_boot_id: &str, configured: bool) -> Record {
        let taker =
            Taker { node: "n1".parse().unwrap(), incarnation: Incarnation(1), instance: InstanceId::generate() };
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
