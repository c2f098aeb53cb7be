//! The hand on an Instance's guest: whoever watches its pools stops it at once, whatever else its task is doing.

use std::sync::{Arc, Mutex, PoisonError};

use kibo_crds::{InstanceId, PoolId};
use kibo_protocol::v1::{EndReason, PauseReason, Paused, Resumed, instance_event::Kind};
use tokio::sync::mpsc;

use super::machine::{Ending, Input};
use crate::{
    pool::watch,
    vmm::{Cgroup, VmProcess},
};

/// Ends with its Instance.
pub struct Grip {
    instance: InstanceId,
    cgroup: Cgroup,
    /// Absent: nothing runs yet.
    process: Mutex<Option<Arc<VmProcess>>>,
    inputs: mpsc::UnboundedSender<Input>,
}

impl Grip {
    pub fn new(instance: InstanceId, cgroup: Cgroup, inputs: mpsc::UnboundedSender<Input>) -> Self {
        Self { instance, cgroup, process: Mutex::default(), inputs }
    }

    /// From now on it holds this process.
    pub fn take(&self, process: Arc<VmProcess>) {
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = Some(process);
    }

    /// Kills the process, also one that is frozen.
    pub fn kill_process(&self) {
        if let Some(process) = &*self.process.lock().unwrap_or_else(PoisonError::into_inner) {
            process.kill();
            thaw(&self.cgroup);
        }
    }

    /// Whether its process waits in the kernel for what no signal interrupts, as far as that can be seen.
    pub fn waits_in_kernel(&self) -> bool {
        let process = self.process.lock().unwrap_or_else(PoisonError::into_inner).clone();
        process.is_some_and(|process| {
            process.waits_in_kernel().unwrap_or_else(|error| {
                tracing::warn!(%error, "what a VM's process does cannot be seen");
                false
            })
        })
    }

    fn holds_a_process(&self) -> bool {
        self.process.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn tell(&self, input: Input) {
        // Nobody listens any more: it has ended.
        let _ = self.inputs.send(input);
    }
}

/// After a kill: with version 1 a process that is frozen does not die.
pub fn thaw(cgroup: &Cgroup) {
    if let Err(error) = cgroup.thaw() {
        tracing::error!(%error, "failed to thaw a cgroup");
    }
}

impl watch::Grip for Grip {
    fn freeze(&self, pool: &PoolId, problem: &str) {
        match self.cgroup.freeze() {
            Ok(true) => {}
            // Nothing runs yet: it is told again once something does.
            Ok(false) if !self.holds_a_process() => {}
            Ok(false) => return self.kill(pool, &format!("{problem}; the guest has no cgroup to freeze"), false),
            // What cannot be stopped must not go on.
            Err(error) => return self.kill(pool, &format!("{problem}; the guest could not be frozen: {error}"), false),
        }
        let message = format!(
            "storage pool {pool} cannot be read ({problem}): nobody knows whether this node still holds the disks that are \
             there. The guest stands still, and goes on by itself once the pool says that it does"
        );
        self.tell(Input::Noticed(Kind::Paused(Paused { reason: PauseReason::PoolUnreadable.into(), message })));
    }

    fn thaw(&self) {
        thaw(&self.cgroup);
        tracing::info!(instance = %self.instance, "its pools can be read, and it holds its disks: the guest goes on");
        self.tell(Input::Noticed(Kind::Resumed(Resumed {})));
    }

    fn kill(&self, pool: &PoolId, why: &str, stood_still: bool) {
        let (reason, until) = match stood_still {
            _ if !self.holds_a_process() => (EndReason::FencedWhileStill, "nothing of it ran yet"),
            true => (EndReason::FencedWhileStill, "it had stood still since before that"),
            false => (EndReason::Fenced, "until then the guest ran"),
        };
        let message = format!("killed at once, since storage pool {pool} says that {why}; {until}");
        // First why: what the process's end is taken for comes after it.
        self.tell(Input::End(Ending::new(reason, message)));
        self.kill_process();
    }
}
