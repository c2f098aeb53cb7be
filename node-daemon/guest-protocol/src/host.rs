//! The daemon's end of a connection.
//!
//! The guest is not trusted: what it may make the daemon hold is bounded by the windows, and a message that breaks the
//! protocol ends the connection with a [`Violation`].

use std::collections::{HashMap, VecDeque};

use prost::Message;

use crate::flow::{COMMON, COMMON_OUTPUT, Overrun, ReceiveWindow};
use crate::frame::{DELIMITER, Decoder, Direction, Frame, Nonce, Take, TooLong};
use crate::mask::Mask;
use crate::run::Run;
use crate::stream::Stream;
use crate::v1::{self, Output, archive, guest_message, host_message};
use crate::wire::Wire;
use crate::{MAX_CHUNK, MAX_RUN, PROTOCOL, ProcessEnd};

/// No more input is taken while so much waits for the port: windows count its bytes alone, and single bytes cost many
/// times as much on their way.
pub const INPUT_UNSENT: usize = 4 << 20;

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
    #[error("the guest announced {len} bytes of stream {stream} as one run, which has 1 to {MAX_RUN}")]
    Run { stream: u32, len: u32 },
    #[error("the guest sent other bytes of stream {stream} than it announced")]
    Damaged { stream: u32 },
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
    /// Output that was announced and is not all there yet.
    run: Option<Run<v1::OutputRun>>,
    wire: Wire,
    events: VecDeque<HostEvent>,
    streams: HashMap<StreamId, Stream>,
    next_stream: u32,
}

impl HostConnection {
    /// Opens a connection: the hello is ready to be written, behind delimiters that make up for a run that a daemon which
    /// is gone may have left half sent. `nonce` is random and fresh, `log_offset` the first byte of the log that the
    /// daemon does not have.
    pub fn open(nonce: Nonce, log_offset: u64) -> Self {
        let daemon_version = env!("CARGO_PKG_VERSION").to_owned();
        let hello = v1::Hello { nonce: nonce.get(), log_offset, daemon_version, protocol: PROTOCOL };
        let mut connection = Self {
            hello,
            nonce,
            connected: false,
            protocol: 0,
            decoder: Decoder::new(Direction::FromGuest),
            run: None,
            wire: Wire::default(),
            events: VecDeque::new(),
            streams: HashMap::new(),
            next_stream: 1,
        };
        connection.wire.outgoing.push_delimiters(MAX_RUN);
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
        let mut decoder = std::mem::replace(&mut self.decoder, Decoder::new(Direction::FromGuest));
        let mut listener = Listener { connection: self, heard: Ok(()) };
        decoder.feed(bytes, &mut listener);
        let heard = listener.heard;
        self.decoder = decoder;
        heard
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
        self.streams.insert(stream, Stream::new(self.wire.widths(), stdin_open));
        Ok(stream)
    }

    /// The client's terminal has another size now.
    pub fn resize(&mut self, stream: StreamId, columns: u32, rows: u32) {
        if self.streams.contains_key(&stream) {
            self.push_small(v1::Resize { stream_id: stream.0, columns, rows });
        }
    }

    /// How many bytes [`Self::write_stdin`] takes now: what the stream's window allows, and what others left.
    pub fn stdin_room(&self, stream: StreamId) -> usize {
        let Some(state) = self.streams.get(&stream).filter(|state| state.stdin_open) else { return 0 };
        if self.outgoing().len() >= INPUT_UNSENT {
            return 0;
        }
        let taken: usize = self.streams.values().map(|state| state.stdin.of_common()).sum();
        state.stdin.available_with(COMMON.saturating_sub(taken))
    }

    /// The streams whose input had to wait for others or for the port, and need not any more. To be looked at after
    /// [`Self::written`] and [`Self::receive`].
    pub fn input_to_go_on(&self) -> impl Iterator<Item = StreamId> {
        let waiting = self.streams.iter().filter(|(_, state)| state.waits && !state.abandoned);
        waiting.map(|(stream, _)| *stream).filter(|stream| self.stdin_room(*stream) > 0)
    }

    /// Queues standard input, as much as there is room for, and says how much. What is left can be given again after
    /// [`HostEvent::StdinWritable`], or when it is among [`Self::input_to_go_on`].
    pub fn write_stdin(&mut self, stream: StreamId, data: &[u8]) -> usize {
        let len = data.len().min(self.stdin_room(stream));
        if self.wire.takes_runs() {
            for chunk in data[..len].chunks(MAX_RUN) {
                self.push_run(stream, chunk);
            }
        } else {
            for chunk in data[..len].chunks(MAX_CHUNK) {
                self.push_small(v1::StdinData { stream_id: stream.0, data: chunk.to_vec() });
            }
        }
        if let Some(state) = self.streams.get_mut(&stream) {
            state.stdin.sent(len);
            state.waits = len < data.len();
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
        if let Some(window) = self.window(stream, output) {
            window.passed_on(len);
        }
        let taken: usize = self.streams.values().map(Stream::beyond).sum();
        let common = COMMON_OUTPUT.saturating_sub(taken);
        if let Some(bytes) = self.window(stream, output).and_then(|window| window.credit(common)) {
            self.push_small(v1::StreamCredit { stream_id: stream.0, output: output.into(), bytes });
        }
    }

    fn window(&mut self, stream: StreamId, output: Output) -> Option<&mut ReceiveWindow> {
        self.streams.get_mut(&stream)?.window(output)
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
                // The delimiters at the beginning were much, and are gone.
                self.wire.outgoing.give_back();
                self.events.push_back(HostEvent::Connected(reply));
            }
            return Ok(());
        }
        if !self.connected {
            return Ok(());
        }
        let event = match kind {
            // The bytes of a run come by themselves, see `heard`.
            guest_message::Kind::HelloReply(_) | guest_message::Kind::OutputRun(_) => None,
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

    fn started(&mut self, started: v1::ExecStarted) -> Option<HostEvent> {
        let stream = StreamId(started.stream_id);
        let state = self.streams.get_mut(&stream)?;
        (state.start(started.pid) && !state.abandoned).then_some(HostEvent::ExecStarted { stream, pid: started.pid })
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

    fn closed(&mut self, message: v1::OutputClosed) -> Option<HostEvent> {
        let (stream, output) = (StreamId(message.stream_id), message.output());
        let state = self.streams.get_mut(&stream)?;
        (state.close(output) && !state.abandoned).then_some(HostEvent::OutputClosed { stream, output })
    }

    fn credit(&mut self, credit: v1::StdinCredit) -> Option<HostEvent> {
        let stream = StreamId(credit.stream_id);
        let state = self.streams.get_mut(&stream)?;
        state.stdin.grant(credit.bytes);
        (state.stdin_open && !state.abandoned).then_some(HostEvent::StdinWritable { stream })
    }

    fn push_run(&mut self, stream: StreamId, bytes: &[u8]) {
        let masked = self.wire.takes_masks();
        let mask = masked.then_some(Mask::of(self.nonce));
        let copy = |room: &mut [u8]| {
            room.copy_from_slice(bytes);
            if let Some(mask) = mask {
                mask.apply(room);
            }
            bytes.len()
        };
        self.wire.push_run((Direction::FromHost, self.nonce), bytes.len(), copy, |bytes, sum| {
            let run = v1::StdinRun { stream_id: stream.0, bytes, sum, masked };
            v1::HostMessage { kind: Some(host_message::Kind::StdinRun(run)) }
        });
    }

    /// The length of the run that follows a frame. Runs are sent only to who asked for them, and only over the
    /// connection that is theirs: what anybody else says of them is no announcement.
    fn heard(&mut self, frame: &Frame<'_>) -> Result<usize, Violation> {
        if frame.nonce != self.nonce {
            return Ok(0);
        }
        match v1::GuestMessage::decode(frame.payload).map_err(Violation::Unreadable)?.kind {
            Some(guest_message::Kind::OutputRun(head)) if self.connected && self.wire.takes_runs() => {
                let refused = Violation::Run { stream: head.stream_id, len: head.bytes };
                let run = Run::begin(head, head.bytes, head.sum, Vec::with_capacity).ok_or(refused)?;
                Ok(self.run.insert(run).len())
            }
            Some(kind) => self.take(kind).map(|()| 0),
            // A kind that this version does not know is none for it.
            None => Ok(0),
        }
    }

    fn heard_raw(&mut self, bytes: &[u8]) -> Result<(), Violation> {
        let Some(mut run) = self.run.take() else { return Ok(()) };
        run.push(bytes);
        if !run.is_whole() {
            self.run = Some(run);
            return Ok(());
        }
        let (v1::OutputRun { stream_id, output, .. }, data) = run.finish();
        let data = data.ok_or(Violation::Damaged { stream: stream_id })?;
        let event = self.output(v1::OutputData { stream_id, output, data })?;
        self.events.extend(event);
        Ok(())
    }

    fn push(&mut self, message: impl Into<host_message::Kind>) -> Result<(), TooLong> {
        let message = v1::HostMessage { kind: Some(message.into()) };
        self.wire.push(Direction::FromHost, self.nonce, &message)
    }

    fn push_small(&mut self, message: impl Into<host_message::Kind>) {
        self.push(message).expect("stream messages are bounded by MAX_CHUNK");
    }
}

/// Takes what is found in the bytes of the port, up to the first violation.
struct Listener<'a> {
    connection: &'a mut HostConnection,
    heard: Result<(), Violation>,
}

impl Take for &mut Listener<'_> {
    fn frame(&mut self, frame: Frame<'_>) -> usize {
        if self.heard.is_err() {
            return 0;
        }
        self.connection.heard(&frame).unwrap_or_else(|violation| {
            self.heard = Err(violation);
            0
        })
    }

    fn raw(&mut self, bytes: &[u8]) {
        if self.heard.is_ok() {
            self.heard = self.connection.heard_raw(bytes);
        }
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
