//! The task of one Instance: feeds its state machine and does what that decides.

mod beginning;
mod hanging;

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::FutureExt as _;
use kibo_crds::InstanceId;
use kibo_guest_protocol::{ProcessEnd, v1 as guest};
use kibo_protocol::v1::{self as protocol, EndReason, instance_event::Kind};
use tokio::{sync::mpsc, task::JoinHandle, time::Instant};
use tracing::Instrument as _;

use hanging::Hang;

use super::{
    Inner, Record,
    files::InstanceDir,
    grip::Grip,
    launching,
    machine::{Action, Ending, Input, State},
    releasing,
    timeline::{Part, Timeline},
    vm::{self, RunningVm},
};
use crate::{
    guest::GuestEvent,
    launch::Launch,
    network::{GuestNetwork, NetworkError},
    pool::watch::Registration,
    vmm::{SocketDir, VmProcess},
};

/// What a guest gets to end its processes before they are killed.
const SHUTDOWN_GRACE_MILLIS: u32 = 10_000;
/// What a disk gets to store an event that an end makes void.
const LAST_EVENT: Duration = Duration::from_secs(1);
const EXIT_INTERVAL: Duration = Duration::from_millis(500);

/// The mailbox of an Instance.
pub struct Inputs {
    pub sender: mpsc::UnboundedSender<Input>,
    pub receiver: mpsc::UnboundedReceiver<Input>,
}

/// Where an Instance begins that an earlier daemon left.
pub enum Found {
    /// It was being started and no VM runs: start it (again).
    Unstarted,
    Running(VmProcess, SocketDir),
    /// No VM runs any more.
    Gone(Ending),
}

pub struct Task {
    inner: Arc<Inner>,
    launch: Launch,
    directory: InstanceDir,
    record: Record,
    state: State,
    inputs: Inputs,
    vm: Option<RunningVm>,
    grip: Arc<Grip>,
    /// Until the process is reaped.
    watched: Option<Registration>,
    /// When an end of the entrypoint was told last.
    last_exit: Option<Instant>,
    boot_id: String,
    /// Stores the Available event: nothing may wait for that, least of all an order to stop.
    storing: Option<JoinHandle<()>>,
    /// An end of the entrypoint that was heard before that event is stored: told before it, it would say nothing to
    /// anybody.
    exited_meanwhile: Option<guest::EntrypointState>,
    /// It was silent while it stood still.
    silent: bool,
    hang: Hang,
    timeline: Timeline,
}

/// Runs an Instance on its own.
pub fn spawn(instance: InstanceId, run: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    tokio::spawn(or_abort("keeper", run).instrument(tracing::error_span!("keeper", %instance)))
}

/// Ends the whole process with a panic: the Instance would be without a keeper, or without one of those who watch it,
/// while its VM goes on, whereas the next daemon takes it up like after any other crash.
pub async fn or_abort(what: &'static str, run: impl Future<Output = ()>) {
    if AssertUnwindSafe(run).catch_unwind().await.is_err() {
        tracing::error!(what, "a task of an Instance panicked: the daemon aborts, its VMs go on");
        std::process::abort();
    }
}

/// Runs a new Instance to its end.
pub async fn run_new(inner: Arc<Inner>, launch: Launch, inputs: Inputs) {
    let record = Record::new(&launch);
    let directory = inner.dirs.of(launch.instance());
    tracing::info!(instance = %launch.instance(), workspace = %launch.workspace.name, "starting");
    let mut task = Task::new(inner, launch, directory, record, inputs);
    let created = {
        let (directory, record) = (task.directory.clone(), task.record.clone());
        blocking(move || directory.create(&record)).await
    };
    kibo_failpoint::reach("record-written").await;
    match created {
        Ok(()) => task.launch().await,
        Err(error) => task.send(Input::LaunchFailed(Ending::new(EndReason::VmmFailed, error.to_string()))),
    }
    task.run().await;
}

/// Runs an Instance of an earlier daemon to its end.
pub async fn run_found(inner: Arc<Inner>, launch: Launch, record: Record, inputs: Inputs, found: Found) {
    let directory = inner.dirs.of(launch.instance());
    let mut task = Task::new(inner, launch, directory, record, inputs);
    match found {
        Found::Unstarted => task.launch().await,
        Found::Running(process, sockets) => task.adopt(process, sockets).await,
        Found::Gone(ending) => task.send(Input::LaunchFailed(ending)),
    }
    task.run().await;
}

impl Task {
    fn new(inner: Arc<Inner>, launch: Launch, directory: InstanceDir, record: Record, inputs: Inputs) -> Self {
        let instance = launch.instance();
        let cgroup = inner.deps.vmm.cgroup(&instance.to_string());
        Self {
            inner,
            launch,
            directory,
            record,
            state: State::Starting { end: None },
            grip: Arc::new(Grip::new(instance, cgroup, inputs.sender.clone())),
            watched: None,
            inputs,
            vm: None,
            last_exit: None,
            boot_id: String::new(),
            storing: None,
            exited_meanwhile: None,
            silent: false,
            hang: Hang::default(),
            timeline: Timeline::begin(),
        }
    }

    fn send(&self, input: Input) {
        // Our own mailbox is open as long as we are.
        let _ = self.inputs.sender.send(input);
    }

    /// What the guest is told of its network; nothing when its VM was made without one.
    async fn network(&self) -> Result<Option<GuestNetwork>, Ending> {
        match &self.inner.deps.network {
            Some(network) if self.record.address.is_some() => {
                network.guest(self.launch.instance()).await.map(Some).map_err(network_failed)
            }
            _ => Ok(None),
        }
    }

    /// Until nothing is left of the Instance.
    async fn run(mut self) {
        let instance = self.launch.instance();
        let mut entered = Instant::now();
        loop {
            if let State::Releasing(ending) = &self.state {
                let ending = ending.clone();
                break self.release(ending).await;
            }
            let deadline =
                self.state.deadline(&self.inner.deps.bounds, self.record.stalled).map(|bound| entered + bound);
            let input = tokio::select! {
                biased;
                input = self.inputs.receiver.recv() => input,
                // Before the guest, which could always have something to say.
                () = tokio::time::sleep_until(deadline.unwrap_or(entered)), if deadline.is_some() => {
                    Some(Input::TimedOut)
                }
                () = stored(self.storing.as_mut()) => self.noted_available().await,
                event = next_event(self.vm.as_mut()) => self.heard(event).await,
            };
            let Some(input) = input else { continue };
            let state = std::mem::replace(&mut self.state, State::Starting { end: None });
            let (next, actions) = state.clone().step(input.clone());
            if next != state {
                tracing::info!(%instance, from = ?state, to = ?next, because = ?input, "instance");
            }
            if state.begins_anew(&next, &input) {
                entered = Instant::now();
            }
            self.state = next;
            self.inner.entered(instance, self.state.reported());
            if let Some(why) = self.state.ending() {
                self.with_guest(|guest| guest.ends(why));
            }
            for action in actions {
                self.perform(action).await;
            }
        }
        self.inner.forget(instance);
    }

    /// Notes what the guest said, and makes an input of it when it concerns the state.
    async fn heard(&mut self, event: GuestEvent) -> Option<Input> {
        Some(match event {
            GuestEvent::Connected(reply) => {
                self.timeline.reach(Part::Agent);
                self.boot_id = vm::boot_id(&reply.boot_id);
                if let Some(guest::guest_state::Kind::Ready(ready)) = reply.state.as_ref().and_then(|s| s.kind.as_ref())
                    && let Some(entrypoint) = &ready.entrypoint
                {
                    self.entrypoint_ended(entrypoint).await;
                }
                Input::Connected(vm::condition(&reply, &self.launch.instance().to_string()))
            }
            GuestEvent::Configured(result) => match result.failure {
                None => {
                    self.timeline.reach(Part::Configured);
                    Input::Configured
                }
                Some(failure) => Input::ConfigureFailed(vm::failure(Some(&failure))),
            },
            GuestEvent::Synced { error, .. } => {
                if !error.is_empty() && matches!(self.state, State::Syncing { .. }) {
                    let error = vm::words(&error);
                    tracing::warn!(instance = %self.launch.instance(), error, "the guest could not write everything back");
                }
                Input::Synced { error }
            }
            GuestEvent::ShuttingDown => Input::ShuttingDown,
            GuestEvent::Entrypoint(state) => {
                self.entrypoint_ended(&state).await;
                return None;
            }
            // It stands still, which was told; what is to be said of it then is said when it goes on.
            GuestEvent::Unresponsive if self.record.stalled => {
                self.silent = true;
                return None;
            }
            GuestEvent::Responsive if std::mem::take(&mut self.silent) => return None,
            GuestEvent::Unresponsive => Input::Noticed(Kind::GuestUnresponsive(protocol::GuestUnresponsive {})),
            GuestEvent::Responsive => Input::Noticed(Kind::GuestResponsive(protocol::GuestResponsive {})),
        })
    }

    /// Tells an end of the entrypoint, once for each. First the event, then that it was made: a daemon that is killed in
    /// between tells it twice, and never not at all.
    async fn entrypoint_ended(&mut self, state: &guest::EntrypointState) {
        use guest::entrypoint_state::Kind::{Exited, Restarting};
        let (status, will_restart) = match &state.kind {
            Some(Exited(exited)) => (exited.status.clone(), false),
            Some(Restarting(restarting)) => (restarting.status.clone(), true),
            _ => return,
        };
        if !self.record.available {
            self.exited_meanwhile = Some(state.clone());
            return;
        }
        let number = state.restarts.saturating_add(1);
        // An agent waits a second before it starts the entrypoint again; what comes faster is none, and each is a write
        // to the host's disk.
        if number <= self.record.exits_told || self.last_exit.is_some_and(|last| last.elapsed() < EXIT_INTERVAL) {
            return;
        }
        self.last_exit = Some(Instant::now());
        let exited = Kind::EntrypointExited(entrypoint_exited(status, will_restart));
        if !self.try_tell(exited).await {
            return;
        }
        kibo_failpoint::reach("exit-told").await;
        if let Err(ending) = self.remember(|record| record.exits_told = number).await {
            tracing::warn!(instance = %self.launch.instance(), problem = ending.message, "an event may come twice");
        }
    }

    async fn perform(&mut self, action: Action) {
        match action {
            Action::Configure => self.configure().await,
            Action::Available => self.available(),
            Action::Sync => {
                self.with_guest(|guest| guest.sync(1));
                kibo_failpoint::reach("sync-asked").await;
            }
            Action::ShutDown => {
                self.with_guest(|guest| guest.shut_down(SHUTDOWN_GRACE_MILLIS));
                kibo_failpoint::reach("shutdown-sent").await;
            }
            Action::Remember(ending) => {
                let instance = self.launch.instance();
                tracing::info!(%instance, reason = ending.reason.as_str_name(), message = ending.message, "ending");
                if let Err(problem) = self.remember(|record| record.ending = Some(ending)).await {
                    tracing::error!(%instance, problem = problem.message, "a daemon after this one will not know why");
                }
                kibo_failpoint::reach("ending-noted").await;
            }
            Action::Quit => {
                if let Some(vm) = &mut self.vm {
                    vm.quit();
                }
            }
            Action::Kill => {
                self.grip.kill_process();
                kibo_failpoint::reach("vm-killed").await;
                self.was_killed().await;
            }
            // Of these there can be any number, and an order to stop must not wait behind a full disk.
            Action::Tell(kind) => self.tell(kind).await,
        }
    }

    /// Tells what can be spared. That the guest stands still is noted too: the daemon after this one is to know it.
    async fn tell(&mut self, kind: Kind) {
        let stalled = match kind {
            Kind::Paused(_) => Some(true),
            Kind::Resumed(_) => Some(false),
            _ => None,
        };
        self.try_tell(kind).await;
        if let Some(stalled) = stalled.filter(|stalled| *stalled != self.record.stalled)
            && let Err(problem) = self.remember(|record| record.stalled = stalled).await
        {
            tracing::warn!(instance = %self.launch.instance(), problem = problem.message, "a pause may be told twice");
            self.record.stalled = stalled;
        }
        if stalled == Some(false) && std::mem::take(&mut self.silent) {
            self.try_tell(Kind::GuestUnresponsive(protocol::GuestUnresponsive {})).await;
        }
    }

    async fn configure(&mut self) {
        let network = self.network().await;
        let configured =
            network.and_then(|network| launching::configuration(&self.inner.deps.images_dir, &self.launch, network));
        // From the moment in which it is sent the guest may write.
        let configured = match configured {
            Ok(configure) => self.remember(|record| record.configured = true).await.map(|()| configure),
            Err(ending) => Err(ending),
        };
        kibo_failpoint::reach("configuring-noted").await;
        match configured {
            Ok(configure) => {
                self.with_guest(|guest| guest.configure(configure));
                kibo_failpoint::reach("configuration-sent").await;
            }
            Err(ending) => self.send(Input::End(ending)),
        }
    }

    fn available(&mut self) {
        let instance = self.launch.instance();
        // What the boot was given beyond the Workspace's share ends here.
        if let Err(error) = self.inner.deps.vmm.cgroup(&instance.to_string()).limit_cpu(Some(self.launch.cpu)) {
            return self.send(Input::End(Ending::new(EndReason::VmmFailed, error.to_string())));
        }
        if self.record.available || self.storing.is_some() {
            return;
        }
        if self.timeline.is_whole() {
            tracing::info!(%instance, millis = %self.timeline, "available");
        }
        let (deps, launch) = (self.inner.deps.clone(), self.launch.clone());
        let address = self.record.address.map(|address| address.to_string()).unwrap_or_default();
        let available = Kind::Available(protocol::Available { guest_boot_id: self.boot_id.clone(), address });
        self.storing = Some(spawn(instance, async move {
            kibo_failpoint::reach("before-available-told").await;
            releasing::append(&deps, &launch, available).await;
            kibo_failpoint::reach("available-told").await;
        }));
    }

    async fn noted_available(&mut self) -> Option<Input> {
        self.storing = None;
        if let Err(ending) = self.remember(|record| record.available = true).await {
            tracing::warn!(instance = %self.launch.instance(), problem = ending.message, "an event may come twice");
            // In memory it is so all the same.
            self.record.available = true;
        }
        if let Some(state) = self.exited_meanwhile.take() {
            self.entrypoint_ended(&state).await;
        }
        None
    }

    fn with_guest(&self, ask: impl FnOnce(&crate::guest::Guest)) {
        if let Some(vm) = &self.vm {
            ask(&vm.guest);
        }
    }

    /// Makes an event that can be spared: when it cannot be stored, that is said and nothing waits for it.
    async fn try_tell(&self, kind: Kind) -> bool {
        let told = releasing::try_append(&self.inner.deps, &self.launch, kind).await;
        if let Err(error) = &told {
            tracing::warn!(instance = %self.launch.instance(), %error, "an event is dropped");
        }
        told.is_ok()
    }

    /// Changes the record, on disk first.
    async fn remember(&mut self, change: impl FnOnce(&mut Record)) -> Result<(), Ending> {
        let mut record = self.record.clone();
        change(&mut record);
        let (directory, stored) = (self.directory.clone(), record.clone());
        blocking(move || directory.store(&stored))
            .await
            .map_err(|error| Ending::new(EndReason::VmmFailed, error.to_string()))?;
        self.record = record;
        Ok(())
    }

    async fn release(&mut self, mut ending: Ending) {
        let instance = self.launch.instance();
        if let Some(mut storing) = self.storing.take()
            && tokio::time::timeout(LAST_EVENT, &mut storing).await.is_err()
        {
            // The end is the last word, and after it no other is stored.
            storing.abort();
        }
        if let Some(vm) = self.vm.take() {
            vm.explain(&mut ending);
        }
        self.inner.set_guest(instance, None);
        // Its process is reaped: from here on the records say that it lets go.
        self.watched = None;
        kibo_failpoint::reach("vm-gone").await;
        releasing::release(&self.inner.deps, &self.launch, &self.directory, &ending).await;
        tracing::info!(%instance, reason = ending.reason.as_str_name(), message = ending.message, "ended");
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn network_failed(error: NetworkError) -> Ending {
    Ending::new(EndReason::NetworkFailed, error.to_string())
}

/// What the guest does next; never, while there is none.
async fn next_event(vm: Option<&mut RunningVm>) -> GuestEvent {
    match vm {
        Some(vm) => vm.next_event().await,
        None => std::future::pending().await,
    }
}

/// Returns when the event is stored; never, while there is none.
async fn stored(storing: Option<&mut JoinHandle<()>>) {
    match storing {
        // It aborts the process where it fails.
        Some(storing) => drop(storing.await),
        None => std::future::pending().await,
    }
}

fn entrypoint_exited(status: Option<guest::ExitStatus>, will_restart: bool) -> protocol::EntrypointExited {
    let number = |number: u32| i32::try_from(number).ok();
    let (code, signal) = match ProcessEnd::from_message(status) {
        Some(ProcessEnd::Code(code)) => (number(code), None),
        Some(ProcessEnd::Signal(signal)) => (None, number(signal)),
        // As a shell tells it.
        Some(ProcessEnd::NotStarted(failure)) => match failure.reason() {
            guest::StartFailureReason::NotFound => (Some(127), None),
            _ => (Some(126), None),
        },
        None => (None, None),
    };
    protocol::EntrypointExited { code, signal, will_restart }
}

/// Runs a step on a thread that may block.
pub(super) async fn blocking<T: Send + 'static>(step: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(step).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Cancelled: the runtime ends, and this task with it.
            Err(_) => std::future::pending().await,
        },
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::{
        os::unix::process::ExitStatusExt as _,
        process::{Command, Stdio},
    };

    use super::*;

    const CHILD: &str = "KIBO_TEST_PANICS";

    /// Runs the test of that name in a process of its own, where it does what must end that process.
    pub(in crate::instance) fn dies_of_a_panic(test: &str, panics: impl Future<Output = ()>) {
        if std::env::var_os(CHILD).is_some() {
            tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(panics);
            return;
        }
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test])
            .env(CHILD, "1")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        assert_eq!(status.unwrap().signal(), Some(6));
    }

    #[test]
    fn a_panic_ends_the_process() {
        dies_of_a_panic("instance::task::tests::a_panic_ends_the_process", async {
            let _ = spawn(InstanceId::generate(), async { panic!("on purpose") }).await;
        });
    }
}
