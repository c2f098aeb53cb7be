//! The open streams: commands, archives and connections, each with its own windows.
//!
//! A stream with a process is over when the process was reaped and its outputs are at their end; a connection when both
//! directions are closed, or it was reset.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use kibo_guest_protocol::v1::{self, Output, StartFailure, StartFailureReason};
use kibo_guest_protocol::{GuestConnection, MAX_STREAMS, ProcessEnd};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};

use super::archiver::{self, Complaint};
use super::connect::{Connecting, Progress};
use super::exec;
use super::inlet::{Inlet, Sink};
use super::outlet::{Outlet, Source, send};
use super::start_failure;
use super::terminal::Terminal;
use crate::configure::Workspace;

/// Between the hangup and the kill of a process that nobody listens to any more.
const HANGUP_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Default)]
pub struct Streams {
    open: BTreeMap<u32, Stream>,
    /// Processes of connections that are gone; they were hung up and still run.
    orphans: Vec<Process>,
    /// The stream that was read last: the next one has its turn first.
    last_read: u32,
}

pub(super) struct Stream {
    pub kind: Kind,
    pub inlet: Option<Inlet>,
    pub outlets: Vec<Outlet>,
    /// Nobody wants it any more; only its end is told.
    pub hung_up: bool,
}

pub(super) enum Kind {
    Command { process: Process, terminal: Option<Terminal> },
    Archive { process: Process, complaint: Complaint },
    Connecting(Connecting),
    Connected,
}

pub(super) struct Process {
    pid: Pid,
    end: Option<ProcessEnd>,
    kill_at: Option<Instant>,
}

/// One end of a stream, for the loop's poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Inlet,
    Output(Output),
    Complaint,
    Connecting,
}

impl End {
    /// Whether it waits for room, not for bytes.
    pub const fn writes(self) -> bool {
        matches!(self, Self::Inlet | Self::Connecting)
    }
}

impl Streams {
    /// Starts the command that the host asks for. `base` is the entrypoint's environment.
    pub fn exec(
        &mut self,
        request: &v1::Exec,
        workspace: &Workspace,
        base: &[v1::EnvVar],
        connection: &mut GuestConnection,
    ) {
        let id = request.stream_id;
        let started = self.check(id).and_then(|()| exec::start(request, workspace, base, connection.widths()));
        self.opened(id, started, connection);
    }

    pub fn archive(&mut self, request: v1::Archive, workspace: &Workspace, connection: &mut GuestConnection) {
        let id = request.stream_id;
        let started = self.check(id).and_then(|()| archiver::start(request, workspace, connection.widths()));
        self.opened(id, started, connection);
    }

    pub fn connect(&mut self, request: v1::Connect, connection: &mut GuestConnection) {
        let id = request.stream_id;
        match self.check(id).and_then(|()| Connecting::begin(request.port)) {
            Err(failure) => refuse(id, failure, connection),
            Ok(progress) => {
                let (kind, inlet) = (Kind::Connected, Some(Inlet::waiting(connection.widths().input)));
                self.open.insert(id, Stream { kind, inlet, outlets: Vec::new(), hung_up: false });
                self.progress(id, progress, connection);
            }
        }
    }

    fn check(&self, id: u32) -> Result<(), StartFailure> {
        if self.open.len() + self.orphans.len() >= MAX_STREAMS {
            let message = format!("{MAX_STREAMS} streams are open already: end some first");
            return Err(start_failure(StartFailureReason::TooMany, message));
        }
        if id == 0 || self.open.contains_key(&id) {
            return Err(start_failure(StartFailureReason::Invalid, format!("the stream id {id} is taken")));
        }
        Ok(())
    }

    fn opened(&mut self, id: u32, started: Result<Stream, StartFailure>, connection: &mut GuestConnection) {
        match started {
            Ok(stream) => {
                let pid = stream.process().map_or(0, |process| process.pid.as_raw_nonzero().get().cast_unsigned());
                self.open.insert(id, stream);
                send(connection, v1::ExecStarted { stream_id: id, pid });
            }
            Err(failure) => refuse(id, failure, connection),
        }
    }

    fn progress(&mut self, id: u32, progress: Progress, connection: &mut GuestConnection) {
        let Some(stream) = self.open.get_mut(&id) else { return };
        match progress {
            Progress::Waiting(connecting) => stream.kind = Kind::Connecting(connecting),
            Progress::Failed(failure) => {
                self.open.remove(&id);
                refuse(id, failure, connection);
            }
            Progress::Connected(socket) => {
                stream.kind = Kind::Connected;
                let width = connection.widths().output;
                stream.outlets.push(Outlet::new(Output::Stdout, Source::Socket(socket.clone()), width));
                send(connection, v1::ExecStarted { stream_id: id, pid: 0 });
                if let Some(inlet) = &mut stream.inlet {
                    inlet.connected(Sink::Socket(socket), id, connection);
                }
            }
        }
    }

    pub fn stdin_data(&mut self, message: v1::StdinData, now: Instant, connection: &mut GuestConnection) {
        let id = message.stream_id;
        let Some(stream) = self.open.get_mut(&id) else {
            return;
        };
        if let Some(inlet) = &mut stream.inlet
            && let Err(overrun) = inlet.take(message.data, id, connection)
        {
            eprintln!("kibo-guest-agent: stream {id}: {overrun}; the stream is ended");
            stream.hang_up(now);
        }
    }

    pub fn stdin_close(&mut self, message: v1::StdinClose) {
        if let Some(inlet) = self.open.get_mut(&message.stream_id).and_then(|stream| stream.inlet.as_mut()) {
            inlet.close();
        }
    }

    pub fn signal(&self, message: v1::Signal) {
        let signal = i32::try_from(message.number).ok().and_then(Signal::from_named_raw);
        let (Some(stream), Some(signal)) = (self.open.get(&message.stream_id), signal) else { return };
        let Kind::Command { process, terminal } = &stream.kind else { return };
        // What a keyboard says concerns who has the keyboard; the rest the whole command.
        let keyboard = [Signal::INT, Signal::QUIT, Signal::TSTP, Signal::CONT].contains(&signal);
        match terminal.as_ref().filter(|_| keyboard).and_then(Terminal::foreground) {
            Some(group) if process.end.is_none() => kill_group(group, signal),
            _ => process.signal(signal),
        }
    }

    pub fn resize(&self, message: v1::Resize) {
        if let Some(Kind::Command { terminal: Some(terminal), .. }) =
            self.open.get(&message.stream_id).map(|stream| &stream.kind)
        {
            terminal.resize(message.columns, message.rows);
        }
    }

    pub fn credit(&mut self, message: v1::StreamCredit) {
        let output = message.output();
        if let Some(stream) = self.open.get_mut(&message.stream_id)
            && let Some(outlet) = stream.outlet(output)
        {
            outlet.grant(message.bytes);
        }
    }

    pub fn hang_up(&mut self, message: v1::Hangup, now: Instant) {
        if let Some(stream) = self.open.get_mut(&message.stream_id) {
            stream.hang_up(now);
        }
    }

    /// The connection is gone: nobody will ever hear of these again.
    pub fn hang_up_all(&mut self, now: Instant) {
        for (_, mut stream) in std::mem::take(&mut self.open) {
            stream.hang_up(now);
            self.orphans.extend(stream.into_process().filter(|process| process.end.is_none()));
        }
    }

    /// The guest goes down: an archive that is not complete is not waited for.
    pub fn end_archives(&mut self) {
        for stream in self.open.values_mut().filter(|stream| matches!(stream.kind, Kind::Archive { .. })) {
            stream.inlet = None;
        }
    }

    /// Takes note of a reaped process. `true` when it was one of these.
    pub fn reaped(&mut self, pid: Pid, end: ProcessEnd, now: Instant) -> bool {
        if let Some(at) = self.orphans.iter().position(|process| process.pid == pid) {
            self.orphans.swap_remove(at);
            return true;
        }
        for stream in self.open.values_mut() {
            let Some(process) = stream.process_mut().filter(|process| process.pid == pid && process.end.is_none())
            else {
                continue;
            };
            process.end = Some(end);
            process.kill_at = None;
            for outlet in &mut stream.outlets {
                outlet.ended(now);
            }
            return true;
        }
        false
    }

    /// What to poll for. Outputs only when `hear` and their window is open; who was read last comes last.
    pub fn interests(&self, hear: bool) -> impl Iterator<Item = (u32, End, BorrowedFd<'_>)> {
        let later = self.open.range(self.last_read.saturating_add(1)..);
        later.chain(self.open.range(..=self.last_read)).flat_map(move |(id, stream)| {
            let inlet = stream.inlet.as_ref().and_then(Inlet::interest).map(|fd| (End::Inlet, fd));
            let outlets = stream.outlets.iter().filter(move |_| hear);
            let outlets = outlets.filter_map(|outlet| Some((End::Output(outlet.output), outlet.interest()?)));
            let own = match &stream.kind {
                Kind::Archive { complaint, .. } => complaint.interest().map(|fd| (End::Complaint, fd)),
                Kind::Connecting(connecting) => Some((End::Connecting, connecting.interest())),
                Kind::Command { .. } | Kind::Connected => None,
            };
            inlet.into_iter().chain(outlets).chain(own).map(|(end, fd)| (*id, end, fd))
        })
    }

    /// A polled end can go on.
    pub fn ready(&mut self, id: u32, end: End, now: Instant, connection: &mut GuestConnection) {
        let Some(stream) = self.open.get_mut(&id) else {
            return;
        };
        match end {
            End::Inlet => {
                if let Some(inlet) = &mut stream.inlet {
                    inlet.write(id, connection);
                }
            }
            End::Output(output) => {
                self.last_read = id;
                if let Some(outlet) = stream.outlet(output) {
                    outlet.read(id, now, connection);
                }
            }
            End::Complaint => {
                if let Kind::Archive { complaint, .. } = &mut stream.kind {
                    complaint.read();
                }
            }
            End::Connecting => {
                if let Kind::Connecting(connecting) = std::mem::replace(&mut stream.kind, Kind::Connected) {
                    self.progress(id, connecting.go_on(), connection);
                }
            }
        }
    }

    /// Closes silent outputs of ended processes, kills what does not go, and reports the streams that are over.
    pub fn tick(&mut self, now: Instant, connection: &mut GuestConnection) {
        for orphan in &mut self.orphans {
            orphan.kill_if_due(now);
        }
        self.open.retain(|id, stream| {
            if let Some(process) = stream.process_mut() {
                process.kill_if_due(now);
            }
            for outlet in &mut stream.outlets {
                outlet.tick(*id, now, connection);
            }
            match stream.take_end() {
                Some(Ok(end)) => {
                    send(connection, v1::ExecExited { stream_id: *id, status: Some(end.into()) });
                    false
                }
                Some(Err(failure)) => {
                    refuse(*id, failure, connection);
                    false
                }
                None => true,
            }
        });
    }

    pub fn deadline(&self) -> Option<Instant> {
        let lingers = self.open.values().flat_map(|stream| &stream.outlets).filter_map(Outlet::lingers_until);
        let own = self.open.values().filter_map(Stream::process);
        let kills = own.chain(&self.orphans).filter_map(|process| process.kill_at);
        lingers.chain(kills).min()
    }
}

/// The last word on a stream that could not be started, or failed.
pub fn refuse(id: u32, failure: StartFailure, connection: &mut GuestConnection) {
    send(connection, v1::ExecFailed { stream_id: id, failure: Some(failure) });
}

impl Stream {
    fn outlet(&mut self, output: Output) -> Option<&mut Outlet> {
        self.outlets.iter_mut().find(|outlet| outlet.output == output)
    }

    fn process(&self) -> Option<&Process> {
        match &self.kind {
            Kind::Command { process, .. } | Kind::Archive { process, .. } => Some(process),
            Kind::Connecting(_) | Kind::Connected => None,
        }
    }

    fn process_mut(&mut self) -> Option<&mut Process> {
        match &mut self.kind {
            Kind::Command { process, .. } | Kind::Archive { process, .. } => Some(process),
            Kind::Connecting(_) | Kind::Connected => None,
        }
    }

    fn into_process(self) -> Option<Process> {
        match self.kind {
            Kind::Command { process, .. } | Kind::Archive { process, .. } => Some(process),
            Kind::Connecting(_) | Kind::Connected => None,
        }
    }

    /// Nobody wants it any more.
    fn hang_up(&mut self, now: Instant) {
        self.hung_up = true;
        // Before its pipes go: a writer would hear of them first, and its shell go on to the next command.
        // A terminal's hangup reaches its leader and the foreground; the group may have more than that.
        if let Kind::Command { process, .. } = &self.kind {
            process.signal(Signal::HUP);
        }
        self.inlet = None;
        self.outlets.clear();
        match &mut self.kind {
            Kind::Command { process, terminal } => {
                *terminal = None;
                // A stopped process hears nothing.
                process.signal(Signal::CONT);
                process.kill_after(HANGUP_PATIENCE, now);
            }
            // The end of its streams tells it to clear up and go.
            Kind::Archive { process, .. } => process.kill_after(HANGUP_PATIENCE, now),
            kind @ Kind::Connecting(_) => *kind = Kind::Connected,
            Kind::Connected => {}
        }
    }

    /// How it ended, once it has.
    fn take_end(&mut self) -> Option<Result<ProcessEnd, StartFailure>> {
        let heard = self.outlets.iter().all(Outlet::is_closed);
        match &mut self.kind {
            Kind::Command { process, .. } => process.end.take_if(|_| heard).map(Ok),
            Kind::Archive { process, complaint } => {
                let end = process.end.take_if(|_| heard)?;
                Some(complaint.take_end(end))
            }
            Kind::Connecting(_) => None,
            Kind::Connected if self.hung_up => Some(Ok(ProcessEnd::Code(0))),
            Kind::Connected => {
                let broken = self.outlets.iter().any(Outlet::is_broken);
                let broken = broken || self.inlet.as_ref().is_some_and(Inlet::is_broken);
                let closed = heard && self.inlet.as_ref().is_none_or(Inlet::is_closed);
                (broken || closed).then_some(Ok(ProcessEnd::Code(broken.into())))
            }
        }
    }
}

impl Process {
    pub const fn new(pid: Pid) -> Self {
        Self { pid, end: None, kill_at: None }
    }

    /// It leads a group of its own. Never after it was reaped: its number may be another's by then.
    fn signal(&self, signal: Signal) {
        if self.end.is_none() {
            kill_group(self.pid, signal);
        }
    }

    fn kill_after(&mut self, patience: Duration, now: Instant) {
        if self.end.is_none() {
            self.kill_at.get_or_insert(now + patience);
        }
    }

    fn kill_if_due(&mut self, now: Instant) {
        if self.kill_at.take_if(|at| now >= *at).is_some() {
            self.signal(Signal::KILL);
        }
    }
}

fn kill_group(group: Pid, signal: Signal) {
    match kill_process_group(group, signal) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(errno) => eprintln!("kibo-guest-agent: failed to signal process group {group:?}: {errno}"),
    }
}
