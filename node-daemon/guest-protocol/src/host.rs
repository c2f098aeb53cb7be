//! The daemon's end of a connection.
//!
//! The guest is not trusted: what it may make the daemon hold is bounded by the windows, and a message that breaks the
//! protocol ends the connection with a [`Violation`].

use std::collections::{HashMap, VecDeque};

use prost::Message;

use crate::flow::{Overrun, ReceiveWindow, SendWindow};
use crate::frame::{self, Check, DELIMITER, Decoder, Direction, Nonce, TooLong};
use crate::outgoing::Outgoing;
use crate::v1::{self, Output, archive, guest_message, host_message};
use crate::{MAX_CHUNK, PROTOCOL, ProcessEnd, WITH_SUMS};

/// Names a stream within its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(u32);

impl StreamId {
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// What the guest said.
#[derive(Clone, Debug, PartialEq)]
pub enum HostEvent {
    /// The guest echoed the nonce; from here on the connection is good. Comes once.
    Connected(v1::HelloReply),
    ConfigureResult(v1::ConfigureResult),
    Pong(v1::Pong),
    SyncDone(v1::SyncDone),
    ShuttingDown,
    Log(v1::LogData),
    Entrypoint(v1::EntrypointState),
    ExecStarted {
        stream: StreamId,
        pid: u32,
    },
    /// Report with [`HostConnection::consumed`] when it was passed on.
    Output {
        stream: StreamId,
        output: Output,
        data: Vec<u8>,
    },
    OutputClosed {
        stream: StreamId,
        output: Output,
    },
    /// There is room for standard input again.
    StdinWritable {
        stream: StreamId,
    },
    /// The stream is over; comes after all its output.
    ExecEnded {
        stream: StreamId,
        end: ProcessEnd,
    },
}

/// The guest broke the protocol: close the port and say hello anew, or give the guest up.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("the guest sent a message that cannot be read: {0}")]
    Unreadable(prost::DecodeError),
    #[error("the guest ignored the window of stream {stream}: {overrun}")]
    Window { stream: u32, overrun: Overrun },
    #[error("the guest's message about stream {stream} is not complete")]
    Incomplete { stream: u32 },
}

/// One connection to a guest, from its hello to the loss of the port.
#[derive(Debug)]
pub struct HostConnection {
    hello: v1::Hello,
    nonce: Nonce,
    connected: bool,
    /// What the agent understands, see [`v1::HelloReply`].
    protocol: u32,
    decoder: Decoder,
    wire: Wire,
    events: VecDeque<HostEvent>,
    streams: HashMap<StreamId, Stream>,
    next_stream: u32,
}

#[derive(Debug, Default)]
struct Stream {
    stdin: SendWindow,
    stdin_open: bool,
    stdout: ReceiveWindow,
    stderr: ReceiveWindow,
    abandoned: bool,
}

impl Stream {
    fn window(&mut self, output: Output) -> Option<&mut ReceiveWindow> {
        match output {
            Output::Stdout => Some(&mut self.stdout),
            Output::Stderr => Some(&mut self.stderr),
            Output::Unspecified => None,
        }
    }
}

impl HostConnection {
    /// Opens a connection: the delimiter and the hello are ready to be written. `nonce` is random and fresh, `log_offset`
    /// the first byte of the log that the daemon does not have.
    pub fn open(nonce: Nonce, log_offset: u64) -> Self {
        let daemon_version = env!("CARGO_PKG_VERSION").to_owned();
        let hello = v1::Hello { nonce: nonce.get(), log_offset, daemon_version, protocol: PROTOCOL };
        let mut connection = Self {
            hello,
            nonce,
            connected: false,
            protocol: 0,
            decoder: Decoder::new(Direction::FromGuest),
            wire: Wire::default(),
            events: VecDeque::new(),
            streams: HashMap::new(),
            next_stream: 1,
        };
        connection.say_hello();
        connection
    }

    pub const fn nonce(&self) -> Nonce {
        self.nonce
    }

    pub const fn is_connected(&self) -> bool {
        self.connected
    }

    /// Whether the guest knows terminals, connections, archives and hangups. One that was started by an older daemon may
    /// not, and must not be asked.
    pub const fn knows_streams(&self) -> bool {
        self.protocol >= 1
    }

    /// How many pieces of what was read were no frames (leftovers of an older connection, or damage).
    pub const fn broken_frames(&self) -> u64 {
        self.decoder.broken()
    }

    /// Says hello again, for when no reply came in time (the first may have been glued to a lost connection's rest).
    /// Harmless when both arrive.
    pub fn say_hello(&mut self) {
        self.wire.outgoing.push(DELIMITER);
        let hello = self.hello.clone();
        self.push(hello).expect("a hello is short");
    }

    /// Takes bytes as they were read from the port; then take the events until there are no more.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<(), Violation> {
        let mut messages = Vec::new();
        let nonce = self.nonce;
        self.decoder.feed(bytes, |frame| {
            if frame.nonce == nonce {
                messages.push(v1::GuestMessage::decode(frame.payload));
            }
        });
        for message in messages {
            // A kind that this version does not know is none for it.
            if let Some(kind) = message.map_err(Violation::Unreadable)?.kind {
                self.take(kind)?;
            }
        }
        Ok(())
    }

    pub fn next_event(&mut self) -> Option<HostEvent> {
        self.events.pop_front()
    }

    /// What is to be written to the port.
    pub fn outgoing(&self) -> &[u8] {
        self.wire.outgoing()
    }

    /// The first `len` bytes of [`Self::outgoing`] were written.
    pub fn written(&mut self, len: usize) {
        self.wire.written(len);
    }

    /// Queues a message that belongs to no stream: `Configure`, `Ping`, `Sync`, `Shutdown`, `LogAck`.
    pub fn send(&mut self, message: impl Into<host_message::Kind>) -> Result<(), TooLong> {
        self.push(message)
    }

    /// Starts a process in the guest. Its stream ends with [`HostEvent::ExecEnded`].
    pub fn exec(&mut self, process: v1::Process, stdin: bool) -> Result<StreamId, TooLong> {
        self.start(v1::Exec { process: Some(process), stdin, ..v1::Exec::default() })
    }

    /// As [`Self::exec`], with all that there is to say. The stream's id is filled in.
    pub fn start(&mut self, exec: v1::Exec) -> Result<StreamId, TooLong> {
        let stdin = exec.stdin;
        self.open_stream(|stream_id| v1::Exec { stream_id, ..exec }.into(), stdin)
    }

    /// Connects to a TCP port in the guest.
    pub fn connect(&mut self, port: u32) -> Result<StreamId, TooLong> {
        self.open_stream(|stream_id| v1::Connect { stream_id, port }.into(), true)
    }

    /// Has files archived, or an archive taken.
    pub fn archive(&mut self, direction: archive::Direction) -> Result<StreamId, TooLong> {
        let stdin = matches!(direction, archive::Direction::Write(_));
        self.open_stream(|stream_id| v1::Archive { stream_id, direction: Some(direction) }.into(), stdin)
    }

    fn open_stream(
        &mut self,
        message: impl FnOnce(u32) -> host_message::Kind,
        stdin_open: bool,
    ) -> Result<StreamId, TooLong> {
        let stream = StreamId(self.next_stream);
        self.push(message(stream.0))?;
        self.next_stream += 1;
        self.streams.insert(stream, Stream { stdin_open, ..Stream::default() });
        Ok(stream)
    }

    /// The client's terminal has another size now.
    pub fn resize(&mut self, stream: StreamId, columns: u32, rows: u32) {
        if self.streams.contains_key(&stream) {
            self.push_small(v1::Resize { stream_id: stream.0, columns, rows });
        }
    }

    /// How many bytes [`Self::write_stdin`] takes now.
    pub fn stdin_room(&self, stream: StreamId) -> usize {
        self.streams.get(&stream).filter(|state| state.stdin_open).map_or(0, |state| state.stdin.available())
    }

    /// Queues standard input, as much as the window allows, and says how much. What is left can be given again after
    /// [`HostEvent::StdinWritable`].
    pub fn write_stdin(&mut self, stream: StreamId, data: &[u8]) -> usize {
        let len = data.len().min(self.stdin_room(stream));
        for chunk in data[..len].chunks(MAX_CHUNK) {
            self.push_small(v1::StdinData { stream_id: stream.0, data: chunk.to_vec() });
        }
        if let Some(state) = self.streams.get_mut(&stream) {
            state.stdin.sent(len);
        }
        len
    }

    pub fn close_stdin(&mut self, stream: StreamId) {
        if let Some(state) = self.streams.get_mut(&stream)
            && std::mem::take(&mut state.stdin_open)
        {
            self.push_small(v1::StdinClose { stream_id: stream.0 });
        }
    }

    /// Signals the process's group.
    pub fn signal(&mut self, stream: StreamId, number: u32) {
        if self.streams.contains_key(&stream) {
            self.push_small(v1::Signal { stream_id: stream.0, number });
        }
    }

    /// So many bytes of an output were passed on: the guest may send as many more.
    pub fn consumed(&mut self, stream: StreamId, output: Output, len: usize) {
        let window = self.streams.get_mut(&stream).and_then(|state| state.window(output));
        if let Some(credit) = window.and_then(|window| window.consumed(len)) {
            self.push_small(v1::StreamCredit { stream_id: stream.0, output: output.into(), bytes: credit });
        }
    }

    /// Nobody wants the stream any more: hangs its process up (an old agent's is killed), drops what it still says. Only
    /// its end is reported.
    pub fn abandon(&mut self, stream: StreamId) {
        const SIGKILL: u32 = 9;
        let Some(state) = self.streams.get_mut(&stream) else {
            return;
        };
        if std::mem::replace(&mut state.abandoned, true) {
            return;
        }
        self.events.retain(|event| !matches!(event, HostEvent::Output { stream: of, .. } if *of == stream));
        if self.knows_streams() {
            return self.push_small(v1::Hangup { stream_id: stream.0 });
        }
        self.signal(stream, SIGKILL);
        // All that is open is granted: a process that waits for a reader is not waited for.
        for output in [Output::Stdout, Output::Stderr] {
            self.consumed(stream, output, usize::MAX);
        }
    }

    /// The streams that have not ended.
    pub fn open_streams(&self) -> impl Iterator<Item = StreamId> {
        self.streams.keys().copied()
    }

    fn take(&mut self, kind: guest_message::Kind) -> Result<(), Violation> {
        if let guest_message::Kind::HelloReply(reply) = kind {
            if reply.nonce == self.nonce.get() && !std::mem::replace(&mut self.connected, true) {
                self.protocol = reply.protocol;
                self.wire.agree(reply.protocol);
                self.events.push_back(HostEvent::Connected(reply));
            }
            return Ok(());
        }
        if !self.connected {
            return Ok(());
        }
        let event = match kind {
            guest_message::Kind::HelloReply(_) => None,
            guest_message::Kind::ConfigureResult(result) => Some(HostEvent::ConfigureResult(result)),
            guest_message::Kind::Pong(pong) => Some(HostEvent::Pong(pong)),
            guest_message::Kind::SyncDone(done) => Some(HostEvent::SyncDone(done)),
            guest_message::Kind::ShuttingDown(_) => Some(HostEvent::ShuttingDown),
            guest_message::Kind::LogData(log) => Some(HostEvent::Log(log)),
            guest_message::Kind::EntrypointState(state) => Some(HostEvent::Entrypoint(state)),
            guest_message::Kind::ExecStarted(started) => self.started(started),
            guest_message::Kind::ExecFailed(failed) => self.failed(failed)?,
            guest_message::Kind::ExecExited(exited) => self.exited(exited)?,
            guest_message::Kind::OutputData(data) => self.output(data)?,
            guest_message::Kind::OutputClosed(closed) => self.closed(closed),
            guest_message::Kind::StdinCredit(credit) => self.credit(credit),
        };
        self.events.extend(event);
        Ok(())
    }

    fn started(&self, started: v1::ExecStarted) -> Option<HostEvent> {
        let stream = StreamId(started.stream_id);
        self.streams.contains_key(&stream).then_some(HostEvent::ExecStarted { stream, pid: started.pid })
    }

    fn failed(&mut self, failed: v1::ExecFailed) -> Result<Option<HostEvent>, Violation> {
        let failure = failed.failure.ok_or(Violation::Incomplete { stream: failed.stream_id })?;
        Ok(self.ended(failed.stream_id, ProcessEnd::NotStarted(failure)))
    }

    fn exited(&mut self, exited: v1::ExecExited) -> Result<Option<HostEvent>, Violation> {
        let incomplete = Violation::Incomplete { stream: exited.stream_id };
        let end = ProcessEnd::from_message(exited.status).ok_or(incomplete)?;
        Ok(self.ended(exited.stream_id, end))
    }

    fn ended(&mut self, stream: u32, end: ProcessEnd) -> Option<HostEvent> {
        let stream = StreamId(stream);
        self.streams.remove(&stream).map(|_| HostEvent::ExecEnded { stream, end })
    }

    fn output(&mut self, message: v1::OutputData) -> Result<Option<HostEvent>, Violation> {
        let (stream, output) = (StreamId(message.stream_id), message.output());
        let Some(state) = self.streams.get_mut(&stream) else {
            return Ok(None);
        };
        // Nothing, again and again, would pass every window and pile up before a reader that does not read.
        if message.data.is_empty() {
            return Ok(None);
        }
        let abandoned = state.abandoned;
        let Some(window) = state.window(output) else {
            return Ok(None);
        };
        window.received(message.data.len()).map_err(|overrun| Violation::Window { stream: stream.0, overrun })?;
        if abandoned {
            self.consumed(stream, output, message.data.len());
            return Ok(None);
        }
        Ok(Some(HostEvent::Output { stream, output, data: message.data }))
    }

    fn closed(&self, message: v1::OutputClosed) -> Option<HostEvent> {
        let (stream, output) = (StreamId(message.stream_id), message.output());
        let wanted = self.streams.get(&stream).is_some_and(|state| !state.abandoned);
        wanted.then_some(HostEvent::OutputClosed { stream, output })
    }

    fn credit(&mut self, credit: v1::StdinCredit) -> Option<HostEvent> {
        let stream = StreamId(credit.stream_id);
        let state = self.streams.get_mut(&stream)?;
        state.stdin.grant(credit.bytes);
        (state.stdin_open && !state.abandoned).then_some(HostEvent::StdinWritable { stream })
    }

    fn push(&mut self, message: impl Into<host_message::Kind>) -> Result<(), TooLong> {
        let message = v1::HostMessage { kind: Some(message.into()) };
        self.wire.push(Direction::FromHost, self.nonce, &message)
    }

    fn push_small(&mut self, message: impl Into<host_message::Kind>) {
        self.push(message).expect("stream messages are bounded by MAX_CHUNK");
    }
}

/// Frames on their way to the port.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    pub(crate) outgoing: Outgoing,
    /// Where frames are put together, kept so that its memory is not asked for again and again.
    plain: Vec<u8>,
    /// Where what is sent is read to.
    read: Vec<u8>,
    check: Check,
}

impl Wire {
    /// From here on frames are such as the other side understands.
    pub(crate) fn agree(&mut self, protocol: u32) {
        self.check = if protocol >= WITH_SUMS { Check::Sum } else { Check::Crc };
    }

    pub(crate) fn push(&mut self, from: Direction, nonce: Nonce, message: &impl Message) -> Result<(), TooLong> {
        self.plain.clear();
        frame::begin(from, nonce, self.check, message.encoded_len(), &mut self.plain)?;
        message.encode(&mut self.plain).expect("a vector grows as needed");
        frame::seal(self.check, &mut self.plain, &mut self.outgoing);
        Ok(())
    }

    /// As [`Self::push`], for a message that ends with bytes, which are read to where they belong: `read` gets so much
    /// room and says how much it filled, `prefix` what stands before so many bytes, at most [`PREFIX`]. Nothing is sent
    /// when nothing was read.
    pub(crate) fn push_read(
        &mut self,
        (from, nonce): (Direction, Nonce),
        room: usize,
        read: impl FnOnce(&mut [u8]) -> usize,
        prefix: impl FnOnce(usize) -> Vec<u8>,
    ) -> Result<(), TooLong> {
        const BEFORE: usize = frame::HEADER + PREFIX;
        if self.read.len() < BEFORE + room + frame::SUM {
            self.read.resize(BEFORE + room + frame::SUM, 0);
        }
        let len = read(&mut self.read[BEFORE..BEFORE + room]).min(room);
        if len == 0 {
            return Ok(());
        }
        let prefix = prefix(len);
        self.plain.clear();
        frame::begin(from, nonce, self.check, prefix.len() + len, &mut self.plain)?;
        self.plain.extend_from_slice(&prefix);
        let begin = BEFORE - self.plain.len();
        self.read[begin..BEFORE].copy_from_slice(&self.plain);
        frame::seal_in_place(self.check, &mut self.read[begin..], BEFORE - begin + len, &mut self.outgoing);
        Ok(())
    }

    pub(crate) fn outgoing(&self) -> &[u8] {
        self.outgoing.bytes()
    }

    pub(crate) fn written(&mut self, len: usize) {
        self.outgoing.written(len);
    }

    pub(crate) fn clear(&mut self) {
        self.outgoing.clear();
    }
}

/// Room for what stands before the bytes of a message.
pub(crate) const PREFIX: usize = 64;

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
