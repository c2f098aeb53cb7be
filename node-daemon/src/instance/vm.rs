//! A running VM and everybody who watches it: what they see becomes an input of its Instance.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use kibo_guest_protocol::{
    NO_TIMER,
    v1::{self as guest, guest_state},
};
use kibo_protocol::v1::{self as protocol, EndReason, instance_event::Kind};
use tokio::{
    io::AsyncReadExt as _,
    net::unix::pipe,
    sync::{mpsc, watch},
    task::JoinSet,
};

use super::{
    console::{self, ConsoleTail},
    machine::{Ending, GuestCondition, Input},
    stall::{self, DiskPools, Stall, Step},
    task::or_abort,
};
use crate::{
    guest::{Guest, GuestEvent, LogSink},
    vmm::{CONTROL_SOCKET, Cgroup, DiskReads, Exit, Qmp, QmpError, QmpEvent, RunState, SocketDir, VmProcess},
};

const RECONNECT: Duration = Duration::from_millis(500);
/// A guest whose kernel finds no timer boots anew, see its agent. That happens where its CPU stands still for long just
/// then; five times in turn it is something else.
const BOOTS: u32 = 5;
/// Between the news that a guest has gone off and its last words.
const CONSOLE_WITHIN: Duration = Duration::from_secs(2);
const CONSOLE_LOOK: Duration = Duration::from_millis(20);
/// QEMU's word for it.
const GUEST_RESET: &str = "guest-reset";
/// What QEMU complains about before it goes; more is cut off.
const COMPLAINTS: usize = 1000;
const LAST_WORDS: Duration = Duration::from_millis(100);

/// What to watch.
pub struct Watched {
    pub process: Arc<VmProcess>,
    /// Of a VM that this daemon started itself.
    pub complaints: Option<pipe::Receiver>,
    pub cgroup: Cgroup,
    pub directory: PathBuf,
    pub sockets: SocketDir,
    pub disks: DiskPools,
    /// An earlier daemon saw it stand still for want of space, and not go on.
    pub was_stalled: bool,
}

/// The watchers of one VM; they end with it.
pub struct RunningVm {
    process: Arc<VmProcess>,
    control: watch::Receiver<Option<Qmp>>,
    pub guest: Guest,
    events: mpsc::Receiver<GuestEvent>,
    pub console: ConsoleTail,
    /// Its agent was heard.
    heard: Arc<AtomicBool>,
    watchers: Watchers,
}

/// Tasks that end with their VM. Without one of them a VM would be watched in part only, for ever and unseen.
#[derive(Default)]
struct Watchers(JoinSet<()>);

impl Watchers {
    fn spawn(&mut self, what: &'static str, watcher: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn(or_abort(what, watcher));
    }
}

impl RunningVm {
    /// `known`: the agent had answered to an earlier daemon, so its silence is worth an event.
    pub fn watch(watched: Watched, log: impl LogSink, known: bool, inputs: &mpsc::UnboundedSender<Input>) -> Self {
        let Watched { process, complaints, cgroup, directory, sockets, disks, was_stalled } = watched;
        let (qmp, control) = watch::channel(None);
        let console = ConsoleTail::default();
        let (guest, events, conversation) = Guest::converse(sockets.clone(), log, known);
        let heard = Arc::new(AtomicBool::new(known));
        let boots = Boots { left: BOOTS, heard: heard.clone(), console: console.clone() };
        let mut watchers = Watchers::default();
        watchers.spawn("process", watch_process(process.clone(), complaints, cgroup, inputs.clone()));
        watchers
            .spawn("control socket", watch_control(sockets.clone(), disks, was_stalled, boots, qmp, inputs.clone()));
        watchers.spawn("console", console::follow(sockets, directory, console.clone()));
        watchers.spawn("guest", conversation);
        Self { process, control, guest, events, console, heard, watchers }
    }

    /// What the guest did next. Whoever does not ask makes the guest wait.
    pub async fn next_event(&mut self) -> GuestEvent {
        match self.events.recv().await {
            Some(event) => {
                // Before anybody acts on it: from here on it may be in use.
                self.heard.store(true, Ordering::SeqCst);
                event
            }
            // The conversation is over; that the VM is too is seen at its process.
            None => std::future::pending().await,
        }
    }

    /// Adds what the console says to an end that is about the guest's kernel.
    pub fn explain(&self, ending: &mut Ending) {
        if ending.reason == EndReason::GuestPanicked
            && let Some((why, is_of_agent)) = self.console.panic()
        {
            *ending = if is_of_agent {
                Ending::new(
                    EndReason::GuestAgentDied,
                    format!("the agent in the guest died, and its kernel with it: {why}"),
                )
            } else {
                Ending::new(EndReason::GuestPanicked, format!("the guest's kernel panicked: {why}"))
            };
            return;
        }
        let is_about_the_console =
            matches!(ending.reason, EndReason::GuestPanicked | EndReason::GuestBootTimeout | EndReason::VmmFailed);
        let console = self.console.text();
        if is_about_the_console && !console.is_empty() {
            ending.message = format!("{}; the console says: {console}", ending.message);
        }
    }

    /// What the guest has read of a disk. Waits until QEMU can be asked.
    pub async fn reads(&self, disk: &str) -> Result<DiskReads, QmpError> {
        let mut control = self.control.clone();
        let qmp = control.wait_for(Option::is_some).await.ok().and_then(|qmp| qmp.clone());
        qmp.ok_or(QmpError::Closed)?.reads(disk).await
    }

    pub fn kill(&self) {
        self.process.kill();
    }

    /// Asks QEMU to go; that it has is seen at the process.
    pub fn quit(&mut self) {
        let control = self.control.borrow().clone();
        match control {
            Some(qmp) => {
                self.watchers.spawn("end", async move {
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
    inputs: mpsc::UnboundedSender<Input>,
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
    let _ = inputs.send(Input::Exited { how: exit.to_string(), out_of_memory, explanation });
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
    disks: DiskPools,
    was_stalled: bool,
    mut boots: Boots,
    published: watch::Sender<Option<Qmp>>,
    inputs: mpsc::UnboundedSender<Input>,
) {
    let mut stall = was_stalled.then(|| Stall::survived(Instant::now()));
    loop {
        let connected = async { Qmp::connect(sockets.connect(CONTROL_SOCKET).await?).await }.await;
        match connected {
            Ok((qmp, events)) => {
                published.send_replace(Some(qmp.clone()));
                listen_to(qmp, events, &disks, (&mut stall, &mut boots), &inputs).await;
                published.send_replace(None);
            }
            Err(error) => tracing::debug!(%error, "QEMU's control socket cannot be used yet"),
        }
        tokio::time::sleep(RECONNECT).await;
    }
}

/// How often a guest may still boot anew by itself, before anything of it has begun.
struct Boots {
    left: u32,
    heard: Arc<AtomicBool>,
    console: ConsoleTail,
}

impl Boots {
    /// Boots it once more, if it may and has said why.
    async fn once_more(&mut self, qmp: &Qmp) -> bool {
        let Some(left) = self.left.checked_sub(1) else { return false };
        if !self.may().await {
            return false;
        }
        self.left = left;
        let boots = qmp.boot_anew().await.unwrap_or_else(|error| {
            tracing::warn!(%error, "a guest whose kernel found no timer cannot be booted anew");
            false
        });
        if boots {
            tracing::warn!(
                left,
                "the kernel of a guest found no timer that works, since this host is too busy: it boots anew"
            );
        }
        boots
    }

    /// Whether nothing of it has begun, and it has said that it found no timer. What it said last may be on its way.
    async fn may(&self) -> bool {
        let says_so = async {
            while !self.console.text().contains(NO_TIMER) {
                tokio::time::sleep(CONSOLE_LOOK).await;
            }
        };
        !self.heard.load(Ordering::SeqCst) && tokio::time::timeout(CONSOLE_WITHIN, says_so).await.is_ok()
    }
}

async fn listen_to(
    qmp: Qmp,
    mut events: mpsc::UnboundedReceiver<QmpEvent>,
    disks: &DiskPools,
    (stall, boots): (&mut Option<Stall>, &mut Boots),
    inputs: &mpsc::UnboundedSender<Input>,
) {
    let report = |input| drop(inputs.send(input));
    // An earlier daemon may have been killed while it booted the guest anew.
    if let Err(error) = qmp.reboots_are_ends().await {
        tracing::warn!(%error, "a reboot of the guest may go unseen");
    }
    // What happened while nobody listened.
    match qmp.run_state().await {
        Ok(RunState::Shutdown) => report(Input::Off { by_guest: true, reason: "while the daemon was away".to_owned() }),
        Ok(RunState::GuestPanicked) => report(Input::Panicked),
        Ok(RunState::IoError) => {
            let failed = qmp.failed_disk().await.ok().flatten();
            let found = stall.get_or_insert_with(|| Stall::survived(Instant::now()));
            found.found(disks, failed.as_ref(), Instant::now());
            report(Input::Noticed(Kind::Paused(found.message())));
        }
        Ok(RunState::Prelaunch) => {
            // It may have gone on by itself meanwhile; what does not is seen at the boot's limit.
            let _ = qmp.resume().await;
        }
        Ok(RunState::Running | RunState::Other) | Err(_) => {}
    }
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = tokio::time::sleep(stall::LOOK_EVERY), if stall.is_some() => {
                if let Some(stalled) = stall.as_mut() {
                    if stalled.settle(Instant::now()) {
                        report(Input::Noticed(Kind::Paused(stalled.message())));
                    }
                    match stalled.next(disks, Instant::now()) {
                        Step::Wait => {}
                        Step::Try => {
                            if qmp.resume().await.is_ok() {
                                stalled.goes_on(Instant::now());
                            }
                        }
                        Step::Over => {
                            *stall = None;
                            report(Input::Noticed(Kind::Resumed(protocol::Resumed {})));
                        }
                    }
                }
                continue;
            }
        };
        match event {
            Some(QmpEvent::Shutdown { reason, .. }) if reason == GUEST_RESET && boots.once_more(&qmp).await => {}
            Some(QmpEvent::Shutdown { by_guest, reason }) => report(Input::Off { by_guest, reason }),
            Some(QmpEvent::GuestPanicked) => report(Input::Panicked),
            Some(QmpEvent::BlockError { disk, stopped: true, is_full, reason }) => {
                let stalled = stall.get_or_insert_with(|| Stall::survived(Instant::now()));
                if stalled.failed(disks, &disk, is_full, &reason, Instant::now()) {
                    tracing::warn!(disk, is_full, reason, "a disk of the guest cannot be written: it stands still");
                    report(Input::Noticed(Kind::Paused(stalled.message())));
                }
            }
            Some(QmpEvent::BlockError { disk, reason, .. }) => {
                tracing::warn!(disk, reason, "a disk of the guest cannot be read");
            }
            Some(QmpEvent::AgentPort { open: true }) => boots.left = 0,
            Some(QmpEvent::AgentPort { open: false }) => {}
            Some(QmpEvent::Closed) | None => return,
        }
    }
}

/// What a hello's answer says of the guest, seen from the Instance whose guest it ought to be.
pub fn condition(reply: &guest::HelloReply, instance: &str) -> GuestCondition {
    let foreign = |id: &str| (id != instance).then(|| GuestCondition::Foreign(words(id)));
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
    format!("{stage}: {}", words(&failure.message))
}

/// A guest's words, fit for a terminal and for a status: it may say anything.
pub fn words(text: &str) -> String {
    const LIMIT: usize = 600;
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LIMIT).collect()
}

/// The guest kernel's id of its boot; empty when it does not look like one.
pub fn boot_id(text: &str) -> String {
    let is_uuid = text.len() == 36 && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    if is_uuid { text.to_owned() } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instance::task::tests::dies_of_a_panic;

    #[test]
    fn a_watcher_that_panics_ends_the_process() {
        dies_of_a_panic("instance::vm::tests::a_watcher_that_panics_ends_the_process", async {
            let mut watchers = Watchers::default();
            watchers.spawn("test", async { panic!("on purpose") });
            watchers.0.join_all().await;
        });
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_boots_anew_only_before_it_was_heard_and_only_for_want_of_a_timer() {
        let boots = Boots { left: BOOTS, heard: Arc::default(), console: ConsoleTail::default() };
        assert!(!boots.may().await, "it says nothing");
        boots.console.push(b"kibo-guest-agent: something else\n");
        assert!(!boots.may().await, "it says something else");
        boots.console.push(format!("kibo-guest-agent: {NO_TIMER}\n").as_bytes());
        assert!(boots.may().await);
        boots.heard.store(true, Ordering::SeqCst);
        assert!(!boots.may().await, "it was heard");
    }

    #[test]
    fn a_guest_that_lies_is_not_repeated() {
        assert_eq!(words("a\x1b[2Jb\nc"), "a [2Jb c");
        assert_eq!(words(&"x".repeat(100_000)).len(), 600);
        assert_eq!(boot_id("6f9619ff-8b86-d011-b42d-00c04fc964ff"), "6f9619ff-8b86-d011-b42d-00c04fc964ff");
        assert_eq!(boot_id(&"x".repeat(100_000)), "");
    }
}
