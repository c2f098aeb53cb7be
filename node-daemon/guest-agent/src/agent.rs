//! The loop that ties all together: one thread, one poll, no state that two could change.
//!
//! What may take long (configuring, syncing) runs on threads that send their result back.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kibo_guest_protocol::v1::{self, ConfigureStage, Failure, Output, StartFailureReason, host_message::Kind};
use kibo_guest_protocol::{GuestEvent, PROTOCOL};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, wait};

use crate::configure::{self, Workspace};
use crate::phase::{self, OnConfigure, Phase, Ready};
use crate::port::Port;
use crate::power::{self, Act, Observed, Stage};
use crate::request::{Entrypoint as EntrypointSpec, Request, failure};
use crate::turn::Turn;
use crate::wake::Wake;
use crate::workload::entrypoint::Entrypoint;
use crate::workload::streams::{self, Streams};
use crate::workload::{end_of, log::Log, start_failure};

/// A poll that fails is out of memory, or a mistake here; either way it must not turn into a busy loop.
const POLL_FAILED_PAUSE: Duration = Duration::from_millis(100);

pub struct Agent {
    port: Port,
    wake: Wake,
    results: (Sender<Done>, Receiver<Done>),
    phase: Phase,
    log: Log,
    streams: Streams,
    /// Set once the way down has begun; there is no way back.
    down: Option<Stage>,
    boot_id: String,
}

/// What a thread says when it is through.
enum Done {
    Configured { instance_id: String, entrypoint: Option<EntrypointSpec>, result: Result<Workspace, Failure> },
    Synced { id: u64, error: String },
}

/// Who a polled descriptor belongs to.
#[derive(Clone, Copy)]
enum Source {
    Wake,
    Port,
    Log(Output),
    Stream(u32, streams::End),
}

impl Agent {
    pub fn new(port: Port) -> io::Result<Self> {
        Ok(Self {
            port,
            wake: Wake::new()?,
            results: channel(),
            phase: Phase::Unconfigured,
            log: Log::default(),
            streams: Streams::default(),
            down: None,
            boot_id: String::new(),
        })
    }

    pub fn run(mut self) -> ! {
        if let Err(error) = Turn::Patient.take() {
            eprintln!("kibo-guest-agent: failed to set its scheduling policy: {error}");
        }
        loop {
            self.tick(Instant::now());
            self.send_log();
            self.port.flush();
            for (source, flags) in self.wait() {
                self.serve(source, flags);
            }
        }
    }

    /// Waits until somebody has something; says who.
    fn wait(&self) -> Vec<(Source, PollFlags)> {
        let interests = self.interests();
        let mut fds: Vec<_> = interests.iter().map(|(_, fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
        let timeout = self.timeout(Instant::now());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                eprintln!("kibo-guest-agent: failed to poll: {errno}");
                thread::sleep(POLL_FAILED_PAUSE);
            }
        }
        let ready = interests.iter().zip(&fds).map(|((source, ..), fd)| (*source, fd.revents()));
        ready.filter(|(_, flags)| !flags.is_empty()).collect()
    }

    fn interests(&self) -> Vec<(Source, BorrowedFd<'_>, PollFlags)> {
        let mut interests = vec![(Source::Wake, self.wake.as_fd(), PollFlags::IN)];
        interests.extend(self.port.interest().map(|(fd, flags)| (Source::Port, fd, flags)));
        if let Some(entrypoint) = self.phase.entrypoint()
            && self.log.room() > 0
        {
            let outputs = entrypoint.outputs();
            interests.extend(outputs.map(|(output, fd)| (Source::Log(output), fd.as_fd(), PollFlags::IN)));
        }
        interests.extend(self.streams.interests(!self.port.is_crowded()).map(|(id, end, fd)| {
            let flags = if end.writes() { PollFlags::OUT } else { PollFlags::IN };
            (Source::Stream(id, end), fd, flags)
        }));
        interests
    }

    /// Until the next thing that happens by itself; `None` when nothing does.
    fn timeout(&self, now: Instant) -> Option<Timespec> {
        let look = self.port.pause(now).map(|pause| now + pause);
        let restart = self.phase.entrypoint().and_then(Entrypoint::deadline);
        let down = self.down.and_then(Stage::deadline);
        let next = [look, restart, down, self.streams.deadline()].into_iter().flatten().min()?;
        // A millisecond more than needed beats waking up just before it and finding nothing to do.
        let left = next.saturating_duration_since(now) + Duration::from_millis(1);
        Timespec::try_from(left).ok()
    }

    fn serve(&mut self, source: Source, flags: PollFlags) {
        match source {
            Source::Wake => {
                self.wake.clear();
                while let Ok(done) = self.results.1.try_recv() {
                    self.finish(done);
                }
            }
            Source::Port => self.serve_port(flags),
            Source::Log(output) => {
                if let Some(entrypoint) = self.phase.entrypoint()
                    && self.log.room() > 0
                    && let Some(data) = entrypoint.read(output, self.log.room())
                {
                    self.log.push(output, data, unix_nanos());
                }
            }
            // What was polled in the same moment may have filled the port; the next round begins with who waits.
            Source::Stream(_, streams::End::Output(_)) if self.port.is_crowded() => {}
            Source::Stream(id, end) => {
                self.streams.ready(id, end, Instant::now(), &mut self.port.connection);
            }
        }
    }

    fn serve_port(&mut self, flags: PollFlags) {
        if !flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            return;
        }
        if self.port.read() {
            self.streams.hang_up_all(Instant::now());
        }
        while let Some(event) = self.port.connection.next_event() {
            match event {
                GuestEvent::Connected(hello) => {
                    self.streams.hang_up_all(Instant::now());
                    self.log.rewind(hello.log_offset);
                    self.reply_hello();
                }
                GuestEvent::HelloAgain(_) => self.reply_hello(),
                GuestEvent::Message(message) => self.obey(*message),
            }
        }
    }

    fn obey(&mut self, message: Kind) {
        match message {
            // The connection keeps hellos to itself, and gives the bytes of a run as input.
            Kind::Hello(_) | Kind::StdinRun(_) => {}
            Kind::Configure(configure) => self.configure(configure),
            Kind::Ping(ping) => self.send(v1::Pong { id: ping.id, time_unix_nanos: unix_nanos() }),
            Kind::Sync(sync) => self.sync(sync.id),
            Kind::Shutdown(shutdown) => self.shut_down(shutdown),
            Kind::LogAck(ack) => self.log.acknowledge(ack.offset),
            Kind::Exec(exec) => self.exec(&exec),
            Kind::StdinData(data) => self.streams.stdin_data(data, Instant::now(), &mut self.port.connection),
            Kind::StdinClose(close) => self.streams.stdin_close(close),
            Kind::Signal(signal) => self.streams.signal(signal),
            Kind::StreamCredit(credit) => self.streams.credit(credit),
            Kind::Resize(resize) => self.streams.resize(resize),
            Kind::Hangup(hangup) => self.streams.hang_up(hangup, Instant::now()),
            Kind::Connect(connect) => self.connect(connect),
            Kind::Archive(archive) => self.archive(archive),
        }
    }

    fn reply_hello(&mut self) {
        // The boot id is made when it is first read: not before a host asks, or all clones of a saved guest share it.
        if self.boot_id.is_empty() {
            let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
            id.trim_end().clone_into(&mut self.boot_id);
        }
        let reply = v1::HelloReply {
            nonce: 0,
            boot_id: self.boot_id.clone(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            state: Some(self.phase.message(self.down.is_some())),
            log_start: self.log.start(),
            log_end: self.log.end(),
            protocol: PROTOCOL,
        };
        self.port.connection.reply(reply);
    }

    fn configure(&mut self, message: v1::Configure) {
        let instance_id = message.instance_id.clone();
        match self.phase.on_configure(&instance_id) {
            OnConfigure::Start => self.start_configuring(message),
            OnConfigure::Wait => {}
            OnConfigure::Answer(failure) => self.send(v1::ConfigureResult { instance_id, failure }),
        }
    }

    fn start_configuring(&mut self, message: v1::Configure) {
        let instance_id = message.instance_id.clone();
        let request = match Request::parse(message) {
            Ok(request) if self.down.is_none() => request,
            Ok(_) => {
                return self.fail(instance_id, failure(ConfigureStage::Request, "the guest shuts down"));
            }
            Err(failure) => return self.fail(instance_id, failure),
        };
        self.phase = Phase::Configuring { instance_id: instance_id.clone() };
        self.in_background(move || {
            let result = configure::run(&request);
            Done::Configured { instance_id, entrypoint: request.entrypoint, result }
        });
    }

    fn finish(&mut self, done: Done) {
        match done {
            Done::Synced { id, error } => self.send(v1::SyncDone { id, error }),
            Done::Configured { instance_id, entrypoint, result } => {
                match result.and_then(|workspace| Ready::start(&instance_id, workspace, entrypoint)) {
                    Ok(ready) => {
                        self.phase = Phase::Ready(Box::new(ready));
                        self.send(v1::ConfigureResult { instance_id, failure: None });
                        self.tell_entrypoint();
                    }
                    Err(failure) => self.fail(instance_id, failure),
                }
            }
        }
    }

    fn fail(&mut self, instance_id: String, failure: Failure) {
        eprintln!("kibo-guest-agent: failed to configure: {}", failure.message);
        self.phase = Phase::Failed { instance_id: instance_id.clone(), failure: failure.clone() };
        self.send(v1::ConfigureResult { instance_id, failure: Some(failure) });
    }

    fn sync(&mut self, id: u64) {
        let syncs = self.phase.writable();
        self.in_background(move || Done::Synced { id, error: phase::sync_all(&syncs) });
    }

    fn exec(&mut self, request: &v1::Exec) {
        let connection = &mut self.port.connection;
        match &self.phase {
            Phase::Ready(ready) if self.down.is_none() => {
                let entrypoint = ready.entrypoint.as_ref().map(|entrypoint| &entrypoint.spec().process);
                let base = entrypoint.map_or(&[] as &[_], |process| process.env.as_slice());
                let mut request = request.clone();
                if let (Some(process), Some(entrypoint)) = (&mut request.process, entrypoint)
                    && process.cwd.is_empty()
                {
                    process.cwd.clone_from(&entrypoint.cwd);
                }
                self.streams.exec(&request, &ready.workspace, base, connection);
            }
            _ => self.refuse(request.stream_id),
        }
    }

    fn connect(&mut self, request: v1::Connect) {
        if self.down.is_none() && matches!(self.phase, Phase::Ready(_)) {
            self.streams.connect(request, &mut self.port.connection);
        } else {
            self.refuse(request.stream_id);
        }
    }

    fn archive(&mut self, request: v1::Archive) {
        match &self.phase {
            Phase::Ready(ready) if self.down.is_none() => {
                self.streams.archive(request, &ready.workspace, &mut self.port.connection);
            }
            _ => self.refuse(request.stream_id),
        }
    }

    fn refuse(&mut self, stream_id: u32) {
        let message = "the guest is not configured yet, or it shuts down";
        streams::refuse(stream_id, start_failure(StartFailureReason::NotReady, message), &mut self.port.connection);
    }

    fn shut_down(&mut self, message: v1::Shutdown) {
        self.send(v1::ShuttingDown {});
        let grace = Duration::from_millis(message.grace_millis.into());
        let begun = Stage::begin(grace, Instant::now());
        match (self.down, begun) {
            // A second request may shorten the grace, never lengthen it.
            (Some(Stage::Terminating { kill_at: old }), Stage::Terminating { kill_at: new }) if new < old => {
                self.down = Some(begun);
            }
            (Some(_), _) => {}
            (None, _) => {
                self.down = Some(begun);
                if let Some(entrypoint) = self.phase.entrypoint_mut() {
                    entrypoint.stop_restarting();
                }
                self.streams.end_archives();
                power::signal_all(Signal::TERM);
                // A stopped process hears nothing.
                power::signal_all(Signal::CONT);
            }
        }
    }

    /// What happens by itself: ended children, restarts, lingering outputs, the way down.
    fn tick(&mut self, now: Instant) {
        self.port.look();
        let processes = self.reap(now);
        if let Phase::Ready(ready) = &mut self.phase
            && let Some(entrypoint) = &mut ready.entrypoint
            && entrypoint.tick(&ready.workspace, now)
        {
            self.tell_entrypoint();
        }
        self.streams.tick(now, &mut self.port.connection);
        self.go_down(processes, now);
    }

    /// Reaps what ended. `true` when processes are left.
    fn reap(&mut self, now: Instant) -> bool {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => self.reaped(pid, status, now),
                Ok(None) => return true,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    fn reaped(&mut self, pid: Pid, status: WaitStatus, now: Instant) {
        let end = end_of(status);
        let entrypoint = self.phase.entrypoint_mut();
        if entrypoint.is_some_and(|entrypoint| entrypoint.reaped(pid, end.clone(), now)) {
            self.tell_entrypoint();
        } else {
            // Anything else is an orphan, and now buried.
            self.streams.reaped(pid, end, now);
        }
    }

    fn go_down(&mut self, processes: bool, now: Instant) {
        let Some(mut stage) = self.down else { return };
        loop {
            if !processes {
                self.read_last_words();
            }
            let (next, act) = stage.step(Observed { processes, unsent: self.has_unsent() }, now);
            if act == Act::KillAll {
                power::signal_all(Signal::KILL);
            }
            if next == Stage::PowerOff {
                // The last descriptors of the Workspace: its file systems are unmounted here.
                self.phase = Phase::Unconfigured;
                power::off();
            }
            if next == stage {
                break;
            }
            stage = next;
        }
        self.down = Some(stage);
    }

    /// Nobody writes any more, but what was written may be in the pipes still, and then no log lacks it yet.
    fn read_last_words(&mut self) {
        let Some(entrypoint) = self.phase.entrypoint() else { return };
        for output in [Output::Stdout, Output::Stderr] {
            while self.log.room() > 0
                && let Some(data) = entrypoint.read(output, self.log.room())
            {
                self.log.push(output, data, unix_nanos());
            }
        }
    }

    fn has_unsent(&self) -> bool {
        let connection = &self.port.connection;
        connection.is_connected() && !(connection.outgoing().is_empty() && self.log.is_acknowledged())
    }

    fn tell_entrypoint(&mut self) {
        if let Phase::Ready(ready) = &self.phase {
            let state = ready.entrypoint_state();
            self.send(state);
        }
    }

    fn send_log(&mut self) {
        while self.port.connection.is_connected() && !self.port.is_crowded() {
            let Some(piece) = self.log.next_to_send() else {
                return;
            };
            self.send(piece);
        }
    }

    fn send(&mut self, message: impl Into<v1::guest_message::Kind>) {
        if let Err(error) = self.port.connection.send(message) {
            eprintln!("kibo-guest-agent: {error}");
        }
    }

    fn in_background(&self, work: impl FnOnce() -> Done + Send + 'static) {
        let (sender, waker) = (self.results.0.clone(), self.wake.waker());
        thread::spawn(move || {
            // The loop holds the receiver for as long as the guest lives.
            let _ = sender.send(work());
            waker.wake();
        });
    }
}

fn unix_nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
