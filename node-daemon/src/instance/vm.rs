//! A running VM and everybody who watches it: what they see becomes an input of its Instance.

use std::{path::PathBuf, sync::Arc, time::Duration};

use kibo_guest_protocol::v1::{self as guest, guest_state};
use tokio::{
    io::AsyncReadExt as _,
    net::unix::pipe,
    sync::{mpsc, watch},
    task::JoinSet,
};

use super::{
    console::{self, ConsoleTail},
    machine::{GuestCondition, Input},
};
use crate::{
    guest::{Guest, GuestEvent, LogSink},
    vmm::{CONTROL_SOCKET, Cgroup, Exit, Qmp, QmpEvent, RunState, SocketDir, VmProcess},
};

const RECONNECT: Duration = Duration::from_millis(500);
/// A guest that was paused because its pool was full is tried again.
const RESUME: Duration = Duration::from_secs(5);
/// What QEMU complains about before it goes; more is cut off.
const COMPLAINTS: usize = 1000;
const LAST_WORDS: Duration = Duration::from_millis(100);

/// What to watch.
pub struct Watched {
    pub process: VmProcess,
    /// Of a VM that this daemon started itself.
    pub complaints: Option<pipe::Receiver>,
    pub cgroup: Cgroup,
    pub directory: PathBuf,
    pub sockets: SocketDir,
}

/// The watchers of one VM; they end with it.
pub struct RunningVm {
    process: Arc<VmProcess>,
    control: watch::Receiver<Option<Qmp>>,
    pub guest: Guest,
    pub console: ConsoleTail,
    tasks: JoinSet<()>,
}

/// What comes from a VM: to its state machine, or to whoever keeps its particulars.
pub enum Report {
    Input(Input),
    Guest(GuestEvent),
}

impl RunningVm {
    /// `known`: the agent had answered to an earlier daemon, so its silence is worth an event.
    pub fn watch(watched: Watched, log: impl LogSink, known: bool, reports: &mpsc::UnboundedSender<Report>) -> Self {
        let Watched { process, complaints, cgroup, directory, sockets } = watched;
        let process = Arc::new(process);
        let (qmp, control) = watch::channel(None);
        let console = ConsoleTail::default();
        let (guest, events, conversation) = Guest::converse(sockets.clone(), log, known);
        let mut tasks = JoinSet::new();
        tasks.spawn(watch_process(process.clone(), complaints, cgroup, reports.clone()));
        tasks.spawn(watch_control(sockets.clone(), qmp, reports.clone()));
        tasks.spawn(console::follow(sockets, directory, console.clone()));
        tasks.spawn(forward(events, reports.clone()));
        tasks.spawn(conversation);
        Self { process, control, guest, console, tasks }
    }

    pub fn kill(&self) {
        self.process.kill();
    }

    /// Asks QEMU to go; that it has is seen at the process.
    pub fn quit(&mut self) {
        let control = self.control.borrow().clone();
        match control {
            Some(qmp) => {
                self.tasks.spawn(async move {
                    // It may be gone before it has answered.
                    let _ = qmp.quit().await;
                });
            }
            None => self.kill(),
        }
    }
}

async fn watch_process(
    process: Arc<VmProcess>,
    complaints: Option<pipe::Receiver>,
    cgroup: Cgroup,
    reports: mpsc::UnboundedSender<Report>,
) {
    let mut said = Vec::new();
    let exit = {
        let listening = listen(complaints, &mut said);
        tokio::pin!(listening);
        tokio::select! {
            () = &mut listening => process.exited().await,
            exit = process.exited() => {
                // What it said last is in the pipe when it is gone; a descendant that keeps the pipe open is not waited for.
                let _ = tokio::time::timeout(LAST_WORDS, &mut listening).await;
                exit
            }
        }
    };
    let exit = exit.unwrap_or_else(|error| {
        tracing::error!(%error, "failed to wait for a VM's process");
        Exit::Unknown
    });
    let out_of_memory = cgroup.oom_kills().is_some_and(|kills| kills > 0);
    let explanation = String::from_utf8_lossy(&said).trim().to_owned();
    let _ = reports.send(Report::Input(Input::Exited { how: exit.to_string(), out_of_memory, explanation }));
}

/// Keeps the end of what a pipe gives, until it is closed; for ever when there is none.
async fn listen(pipe: Option<pipe::Receiver>, said: &mut Vec<u8>) {
    let Some(mut pipe) = pipe else { return std::future::pending().await };
    let mut buffer = [0; 1024];
    while let Ok(len) = pipe.read(&mut buffer).await {
        if len == 0 {
            return;
        }
        tracing::debug!(text = %String::from_utf8_lossy(&buffer[..len]), "QEMU says");
        said.extend_from_slice(&buffer[..len]);
        let excess = said.len().saturating_sub(COMPLAINTS);
        said.drain(..excess);
    }
}

async fn watch_control(
    sockets: SocketDir,
    published: watch::Sender<Option<Qmp>>,
    reports: mpsc::UnboundedSender<Report>,
) {
    loop {
        let connected = async { Qmp::connect(sockets.connect(CONTROL_SOCKET).await?).await }.await;
        match connected {
            Ok((qmp, events)) => {
                published.send_replace(Some(qmp.clone()));
                listen_to(qmp, events, &reports).await;
                published.send_replace(None);
            }
            Err(error) => tracing::debug!(%error, "QEMU's control socket cannot be used yet"),
        }
        tokio::time::sleep(RECONNECT).await;
    }
}

async fn listen_to(qmp: Qmp, mut events: mpsc::UnboundedReceiver<QmpEvent>, reports: &mpsc::UnboundedSender<Report>) {
    let report = |input| drop(reports.send(Report::Input(input)));
    let mut paused = false;
    // What happened while nobody listened.
    match qmp.run_state().await {
        Ok(RunState::Shutdown) => report(Input::Off { by_guest: true, reason: "while the daemon was away".to_owned() }),
        Ok(RunState::GuestPanicked) => report(Input::Panicked),
        Ok(RunState::IoError) => paused = true,
        Ok(RunState::Running | RunState::Other) | Err(_) => {}
    }
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = tokio::time::sleep(RESUME), if paused => {
                paused = qmp.resume().await.is_err();
                continue;
            }
        };
        match event {
            Some(QmpEvent::Shutdown { by_guest, reason }) => report(Input::Off { by_guest, reason }),
            Some(QmpEvent::GuestPanicked) => report(Input::Panicked),
            Some(QmpEvent::BlockError { device, stopped }) => {
                tracing::warn!(device, stopped, "a disk of the guest failed: see whether its pool is full");
                paused |= stopped;
            }
            Some(QmpEvent::AgentPort { .. }) => {}
            Some(QmpEvent::Closed) | None => return,
        }
    }
}

async fn forward(mut events: mpsc::UnboundedReceiver<GuestEvent>, reports: mpsc::UnboundedSender<Report>) {
    while let Some(event) = events.recv().await {
        if reports.send(Report::Guest(event)).is_err() {
            return;
        }
    }
}

/// What a hello's answer says of the guest, seen from the Instance whose guest it ought to be.
pub fn condition(reply: &guest::HelloReply, instance: &str) -> GuestCondition {
    let foreign = |id: &str| (id != instance).then(|| GuestCondition::Foreign(id.to_owned()));
    let kind = reply.state.as_ref().and_then(|state| state.kind.as_ref());
    match kind {
        None | Some(guest_state::Kind::Unconfigured(_)) => GuestCondition::Unconfigured,
        Some(guest_state::Kind::Configuring(state)) => {
            foreign(&state.instance_id).unwrap_or(GuestCondition::Configuring)
        }
        Some(guest_state::Kind::Ready(state)) => foreign(&state.instance_id).unwrap_or(GuestCondition::Ready),
        Some(guest_state::Kind::Failed(state)) => {
            foreign(&state.instance_id).unwrap_or_else(|| GuestCondition::Failed(failure(state.failure.as_ref())))
        }
        Some(guest_state::Kind::ShuttingDown(_)) => GuestCondition::ShuttingDown,
    }
}

/// The guest's reason for not being configured, with the step at which it failed.
pub fn failure(failure: Option<&guest::Failure>) -> String {
    let Some(failure) = failure else { return "the guest gave no reason".to_owned() };
    let stage = failure.stage().as_str_name().trim_start_matches("CONFIGURE_STAGE_").to_lowercase().replace('_', " ");
    format!("{stage}: {}", failure.message)
}
