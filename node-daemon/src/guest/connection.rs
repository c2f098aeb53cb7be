//! The task that talks with one guest.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    time::Duration,
};

use bytes::Bytes;
use kibo_guest_protocol::{
    ENTROPY_LEN, HostConnection, HostEvent, MAX_STREAMS, Nonce, StreamId,
    host::{INPUT_UNSENT, Violation},
    v1,
};
use rand::TryRngCore as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::{mpsc, oneshot},
    time::{Instant, Interval, MissedTickBehavior, interval_at},
};

use super::{
    Command, ExecId, GuestEvent, LogSink, Open,
    pieces::{self, Speaker},
    streams::{ExecEvent, Opened, too_many, too_old, unavailable},
};
use crate::{clock, vmm::SocketDir};

/// Between two pings, and between two hellos that nobody answered.
const BEAT: Duration = Duration::from_secs(2);
/// So many beats without a byte from the guest: it does not respond. Beats are counted, not seconds, so that a daemon
/// that was itself stopped for a while does not blame the guest.
const SILENT_BEATS: u32 = 7;
const RECONNECT: Duration = Duration::from_millis(200);
/// A guest that breaks the protocol on purpose must not keep the daemon busy.
const RECONNECT_AFTER_VIOLATION: Duration = Duration::from_secs(2);
const READ_BUFFER: usize = 64 * 1024;
/// A guest that takes nothing of what it is sent is not listened to either: each of its words may be answered. What is
/// sent unasked, the input of streams, stays far below it: to be slow to take it makes no guest unheard.
const UNREAD_LIMIT: usize = 16 << 20;
const _: () = assert!(UNREAD_LIMIT >= 4 * INPUT_UNSENT);

/// Connects and talks, again and again, until nobody holds the handle any more.
pub(super) async fn converse(
    sockets: SocketDir,
    commands: mpsc::UnboundedReceiver<Command>,
    events: mpsc::Sender<GuestEvent>,
    log: impl LogSink,
    known: bool,
) {
    let health = Health { known, ..Health::default() };
    let mut talk = Conversation { commands, events, log, next_exec: 1, health, beats: beats() };
    while !talk.commands.is_closed() || !talk.commands.is_empty() {
        let pause = match sockets.connect(crate::vmm::AGENT_SOCKET).await {
            Ok(stream) => match talk.over(stream).await {
                Ok(()) => return,
                Err(Broken::Io(error)) => {
                    tracing::debug!(%error, "the connection to the guest is gone");
                    RECONNECT
                }
                Err(Broken::Violation(violation)) => {
                    tracing::warn!(%violation, "the guest broke the protocol; its connection was closed");
                    RECONNECT_AFTER_VIOLATION
                }
            },
            Err(error) => {
                tracing::debug!(%error, "the agent's socket cannot be reached");
                RECONNECT
            }
        };
        talk.wait(pause).await;
    }
}

#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Violation(#[from] Violation),
}

struct Conversation<L> {
    commands: mpsc::UnboundedReceiver<Command>,
    events: mpsc::Sender<GuestEvent>,
    log: L,
    next_exec: ExecId,
    health: Health,
    beats: Interval,
}

/// Whether the guest is heard.
#[derive(Debug, Default)]
struct Health {
    /// The agent answered once; before that it boots, which is not its failure.
    known: bool,
    silent_beats: u32,
    unresponsive: bool,
}

impl Health {
    fn beat(&mut self) -> Option<GuestEvent> {
        if !self.known {
            return None;
        }
        self.silent_beats += 1;
        (self.silent_beats > SILENT_BEATS && !std::mem::replace(&mut self.unresponsive, true))
            .then_some(GuestEvent::Unresponsive)
    }

    fn heard(&mut self) -> Option<GuestEvent> {
        self.known = true;
        self.silent_beats = 0;
        std::mem::take(&mut self.unresponsive).then_some(GuestEvent::Responsive)
    }
}

impl<L: LogSink> Conversation<L> {
    /// Between two connections: what is asked now cannot be had.
    async fn wait(&mut self, pause: Duration) {
        let over = tokio::time::sleep(pause);
        tokio::pin!(over);
        loop {
            tokio::select! {
                () = &mut over => break,
                _ = self.beats.tick() => {
                    let silent = self.health.beat();
                    self.emit(silent).await;
                }
            }
        }
        while let Ok(command) = self.commands.try_recv() {
            refuse(command);
        }
    }

    /// Talks over one connection until it breaks (an error) or nobody holds the handle.
    async fn over(&mut self, mut stream: UnixStream) -> Result<(), Broken> {
        let connection = HostConnection::open(Nonce::new(random()?), self.log.offset());
        let mut link = Link { connection, execs: HashMap::new() };
        let mut buffer = vec![0; READ_BUFFER];
        let (mut read, mut write) = stream.split();
        loop {
            let outgoing = link.connection.outgoing();
            tokio::select! {
                len = read.read(&mut buffer), if outgoing.len() < UNREAD_LIMIT => {
                    let len = len?;
                    if len == 0 {
                        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                    }
                    link.connection.receive(&buffer[..len])?;
                    self.take_events(&mut link).await;
                    link.go_on_with_input();
                }
                len = write.write(outgoing), if !outgoing.is_empty() => {
                    let len = len?;
                    link.connection.written(len);
                    link.go_on_with_input();
                }
                command = self.commands.recv() => match command {
                    Some(command) => self.obey(&mut link, command)?,
                    None => return Ok(()),
                },
                _ = self.beats.tick() => {
                    let silent = self.health.beat();
                    self.emit(silent).await;
                    link.beat();
                }
            }
        }
    }

    /// Waits when the Instance is behind, and with it waits the guest.
    async fn emit(&mut self, event: Option<GuestEvent>) {
        if let Some(event) = event {
            // The Instance stops listening when it has ended; the rest is of no interest then.
            let _ = self.events.send(event).await;
        }
    }

    async fn take_events(&mut self, link: &mut Link) {
        while let Some(event) = link.connection.next_event() {
            // Only what bears our nonce counts as a sign of life.
            let alive = self.health.heard();
            self.emit(alive).await;
            let event = match event {
                HostEvent::Connected(reply) => Some(GuestEvent::Connected(reply)),
                HostEvent::ConfigureResult(result) => Some(GuestEvent::Configured(result)),
                HostEvent::SyncDone(done) => Some(GuestEvent::Synced { id: done.id, error: done.error }),
                HostEvent::ShuttingDown => Some(GuestEvent::ShuttingDown),
                HostEvent::Entrypoint(state) => Some(GuestEvent::Entrypoint(state)),
                other => {
                    self.carry(link, other);
                    None
                }
            };
            self.emit(event).await;
        }
    }

    /// What concerns nobody but the log and the streams.
    fn carry(&mut self, link: &mut Link, event: HostEvent) {
        match event {
            HostEvent::Log(data) => {
                self.log.store(&data);
                link.send(v1::LogAck { offset: self.log.offset() });
            }
            HostEvent::ExecStarted { stream, .. } => link.started(stream),
            HostEvent::Output { stream, output, data } => link.output(stream, output, data),
            HostEvent::OutputClosed { stream, output } => link.closed(stream, output),
            HostEvent::StdinWritable { stream } => link.push_stdin(stream),
            HostEvent::ExecEnded { stream, end } => link.ended(stream, end),
            _ => {}
        }
    }

    fn obey(&mut self, link: &mut Link, command: Command) -> io::Result<()> {
        if !link.connection.is_connected() {
            refuse(command);
            return Ok(());
        }
        match command {
            Command::Configure(configure) => {
                let entropy = entropy()?;
                link.send(v1::Configure { time_unix_nanos: clock::unix_nanos(), entropy, ..*configure });
            }
            Command::Sync(id) => link.send(v1::Sync { id }),
            Command::Shutdown { grace_millis } => link.send(v1::Shutdown { grace_millis }),
            Command::Open { what, opened } => {
                let id = self.next_exec;
                self.next_exec += 1;
                link.open(id, what, opened);
            }
            Command::Resize { exec, columns, rows } => {
                if let Some((stream, _)) = link.find(exec) {
                    link.connection.resize(stream, columns, rows);
                }
            }
            Command::Signal { exec, number } => {
                if let Some((stream, _)) = link.find(exec) {
                    link.connection.signal(stream, number);
                }
            }
            Command::Stdin { exec, data, taken } => link.stdin(exec, data, taken),
            Command::CloseStdin(exec) => link.close_stdin(exec),
            Command::Consumed { exec, output, len } => {
                if let Some((stream, _)) = link.find(exec) {
                    link.connection.consumed(stream, output, len);
                }
            }
            Command::Abandon(exec) => {
                if let Some((stream, _)) = link.find(exec) {
                    link.connection.abandon(stream);
                }
            }
        }
        Ok(())
    }
}

/// Answers what cannot be done now. What is no question is asked again by whoever wants it, after the next hello.
fn refuse(command: Command) {
    if let Command::Open { opened, .. } = command {
        let _ = opened.send(Err(unavailable()));
    }
}

/// One connection and the streams on it.
struct Link {
    connection: HostConnection,
    execs: HashMap<StreamId, Exec>,
}

struct Exec {
    id: ExecId,
    events: Speaker,
    /// Input that the window does not take yet; the next piece comes only after this one.
    waiting: Option<(Bytes, oneshot::Sender<()>)>,
}

impl Link {
    fn beat(&mut self) {
        if self.connection.is_connected() && self.connection.outgoing().len() < UNREAD_LIMIT {
            self.send(v1::Ping { id: 0 });
        } else if self.connection.outgoing().is_empty() {
            self.connection.say_hello();
        }
    }

    fn send(&mut self, message: impl Into<v1::host_message::Kind>) {
        if let Err(error) = self.connection.send(message) {
            tracing::error!(%error, "a message to the guest is too long and was not sent");
        }
    }

    fn open(&mut self, id: ExecId, what: Open, opened: oneshot::Sender<Result<Opened, crate::instance::StreamError>>) {
        let is_plain = matches!(&what, Open::Exec(v1::Exec { terminal: None, login_shell: false, .. }));
        if !is_plain && !self.connection.knows_streams() {
            let _ = opened.send(Err(too_old()));
            return;
        }
        // Counted here too, since a guest may say that it has room for any number.
        if self.execs.len() >= MAX_STREAMS {
            let _ = opened.send(Err(too_many()));
            return;
        }
        let started = match what {
            Open::Exec(exec) => self.connection.start(exec),
            Open::Connect { port } => self.connection.connect(port),
            Open::Archive(direction) => self.connection.archive(direction),
        };
        let stream = match started {
            Ok(stream) => stream,
            Err(too_long) => {
                let failure = kibo_protocol::v1::StreamFailure::Invalid;
                let _ = opened.send(Err(crate::instance::StreamError { failure, message: too_long.to_string() }));
                return;
            }
        };
        let (events, incoming) = pieces::channel();
        self.execs.insert(stream, Exec { id, events, waiting: None });
        if opened.send(Ok(Opened { id, events: incoming })).is_err() {
            self.connection.abandon(stream);
        }
    }

    fn find(&mut self, id: ExecId) -> Option<(StreamId, &mut Exec)> {
        self.execs.iter_mut().find(|(_, exec)| exec.id == id).map(|(stream, exec)| (*stream, exec))
    }

    fn stdin(&mut self, id: ExecId, data: Bytes, taken: oneshot::Sender<()>) {
        let Some((stream, exec)) = self.find(id) else { return };
        exec.waiting = Some((data, taken));
        self.push_stdin(stream);
    }

    fn push_stdin(&mut self, stream: StreamId) {
        let Entry::Occupied(mut exec) = self.execs.entry(stream) else { return };
        let Some((mut data, taken)) = exec.get_mut().waiting.take() else { return };
        let len = self.connection.write_stdin(stream, &data);
        let rest = data.split_off(len);
        if rest.is_empty() {
            let _ = taken.send(());
        } else {
            exec.get_mut().waiting = Some((rest, taken));
        }
    }

    /// What had to wait for other streams, or for the port.
    fn go_on_with_input(&mut self) {
        let streams: Vec<_> = self.connection.input_to_go_on().collect();
        for stream in streams {
            self.push_stdin(stream);
        }
    }

    fn close_stdin(&mut self, id: ExecId) {
        if let Some((stream, _)) = self.find(id) {
            self.connection.close_stdin(stream);
        }
    }

    fn started(&mut self, stream: StreamId) {
        if let Some(exec) = self.execs.get(&stream) {
            let _ = exec.events.say(ExecEvent::Started);
        }
    }

    fn output(&mut self, stream: StreamId, output: v1::Output, data: Vec<u8>) {
        let Some(exec) = self.execs.get(&stream) else { return };
        if exec.events.say(ExecEvent::Output(output, data)).is_err() {
            self.connection.abandon(stream);
        }
    }

    fn closed(&mut self, stream: StreamId, output: v1::Output) {
        if let Some(exec) = self.execs.get(&stream) {
            let _ = exec.events.say(ExecEvent::Closed(output));
        }
    }

    fn ended(&mut self, stream: StreamId, end: kibo_guest_protocol::ProcessEnd) {
        if let Some(exec) = self.execs.remove(&stream) {
            let _ = exec.events.say(ExecEvent::Ended(end));
        }
    }
}

fn beats() -> Interval {
    let mut beats = interval_at(Instant::now() + BEAT, BEAT);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beats
}

fn random() -> io::Result<u64> {
    rand::rngs::OsRng.try_next_u64().map_err(io::Error::other)
}

fn entropy() -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; ENTROPY_LEN];
    rand::rngs::OsRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

#[cfg(test)]
mod health_tests {
    use super::*;

    #[test]
    fn a_guest_that_was_never_heard_is_not_blamed() {
        let mut health = Health::default();
        assert!((0..100).all(|_| health.beat().is_none()));
    }

    #[test]
    fn silence_is_told_once_and_so_is_its_end() {
        let mut health = Health::default();
        assert_eq!(health.heard(), None);
        let told: Vec<_> = (0..100).filter_map(|_| health.beat()).collect();
        assert_eq!(told, [GuestEvent::Unresponsive]);
        assert_eq!((health.heard(), health.heard()), (Some(GuestEvent::Responsive), None));
    }
}
