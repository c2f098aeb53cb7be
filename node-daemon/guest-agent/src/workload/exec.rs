//! Exec streams: processes that the host starts, each with its own windows.
//!
//! A stream is over when its process was reaped and both outputs are at their end. A child that the process left behind
//! may keep an output open for ever: once the process is gone, an output that stays silent for [`LINGER`] is closed.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::{Duration, Instant};

use kibo_guest_protocol::flow::{ReceiveWindow, SendWindow};
use kibo_guest_protocol::v1::{self, Output, StartFailure, StartFailureReason};
use kibo_guest_protocol::{GuestConnection, MAX_CHUNK, ProcessEnd};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};

use super::pipe::{self, Found};
use super::process::{Streams as Fds, spawn};
use super::start_failure;
use crate::configure::Workspace;

const MAX_STREAMS: usize = 128;
const LINGER: Duration = Duration::from_millis(500);

#[derive(Default)]
pub struct Streams(BTreeMap<u32, Stream>);

struct Stream {
    pid: Pid,
    stdin: Option<Stdin>,
    outputs: [Outlet; 2],
    end: Option<ProcessEnd>,
}

struct Stdin {
    /// `None` when the process closed it: what comes is dropped.
    fd: Option<OwnedFd>,
    queue: VecDeque<u8>,
    window: ReceiveWindow,
    closing: bool,
}

struct Outlet {
    output: Output,
    fd: Option<OwnedFd>,
    window: SendWindow,
    /// Silent since then, counted from the end of the process.
    silent_since: Option<Instant>,
}

/// One end of one stream's pipe, for the loop's poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Stdin,
    Output(Output),
}

impl Streams {
    /// Starts what the host asks for and tells it how that went.
    pub fn start(
        &mut self,
        request: &v1::Exec,
        workspace: &Workspace,
        base: &[v1::EnvVar],
        connection: &mut GuestConnection,
    ) {
        let stream_id = request.stream_id;
        match self.try_start(request, workspace, base) {
            Ok(stream) => {
                let pid = stream.pid.as_raw_nonzero().get().cast_unsigned();
                self.0.insert(stream_id, stream);
                send(connection, v1::ExecStarted { stream_id, pid });
            }
            Err(failure) => refuse(stream_id, failure, connection),
        }
    }

    fn try_start(
        &self,
        request: &v1::Exec,
        workspace: &Workspace,
        base: &[v1::EnvVar],
    ) -> Result<Stream, StartFailure> {
        if self.0.len() >= MAX_STREAMS {
            let message = format!("{MAX_STREAMS} exec streams are open already: end some first");
            return Err(start_failure(StartFailureReason::TooMany, message));
        }
        if request.stream_id == 0 || self.0.contains_key(&request.stream_id) {
            return Err(start_failure(
                StartFailureReason::Invalid,
                format!("the stream id {} is taken", request.stream_id),
            ));
        }
        let process = request.process.clone().unwrap_or_default();
        let broken =
            |error: std::io::Error| start_failure(StartFailureReason::Other, format!("failed to make a pipe: {error}"));
        let (stdout, stdout_writer) = pipe::readable().map_err(broken)?;
        let (stderr, stderr_writer) = pipe::readable().map_err(broken)?;
        let (stdin, stdin_reader) = if request.stdin {
            let (writer, reader) = pipe::writable().map_err(broken)?;
            (Some(Stdin::new(writer)), Stdio::from(reader))
        } else {
            (None, Stdio::null())
        };
        let fds = Fds { stdin: stdin_reader, stdout: stdout_writer, stderr: stderr_writer };
        let pid = spawn(workspace, &process, base, fds)?;
        let outputs = [Outlet::new(Output::Stdout, stdout), Outlet::new(Output::Stderr, stderr)];
        Ok(Stream { pid, stdin, outputs, end: None })
    }

    pub fn stdin_data(&mut self, message: &v1::StdinData, connection: &mut GuestConnection) {
        let Some(stream) = self.0.get_mut(&message.stream_id) else {
            return;
        };
        let Some(stdin) = stream.stdin.as_mut().filter(|stdin| !stdin.closing) else {
            return;
        };
        if let Err(overrun) = stdin.window.received(message.data.len()) {
            eprintln!("kibo-guest-agent: exec stream {}: {overrun}; the stream is killed", message.stream_id);
            stream.signal(Signal::KILL);
            return;
        }
        stdin.queue.extend(&message.data);
        stdin.write(message.stream_id, connection);
    }

    pub fn stdin_close(&mut self, message: v1::StdinClose) {
        if let Some(stdin) = self.0.get_mut(&message.stream_id).and_then(|stream| stream.stdin.as_mut()) {
            stdin.closing = true;
            stdin.close_if_done();
        }
    }

    pub fn signal(&self, message: v1::Signal) {
        let signal = i32::try_from(message.number).ok().and_then(Signal::from_named_raw);
        if let (Some(stream), Some(signal)) = (self.0.get(&message.stream_id), signal) {
            stream.signal(signal);
        }
    }

    pub fn credit(&mut self, message: v1::StreamCredit) {
        if let Some(stream) = self.0.get_mut(&message.stream_id)
            && let Some(outlet) = stream.outlet(message.output())
        {
            outlet.window.grant(message.bytes);
        }
    }

    /// Takes note of a reaped process. `true` when it was one of these.
    pub fn reaped(&mut self, pid: Pid, end: ProcessEnd, now: Instant) -> bool {
        let Some(stream) = self.0.values_mut().find(|stream| stream.pid == pid && stream.end.is_none()) else {
            return false;
        };
        stream.end = Some(end);
        for outlet in &mut stream.outputs {
            outlet.silent_since = Some(now);
        }
        true
    }

    /// The connection is gone: nobody will ever hear of these again.
    pub fn kill_all(&mut self) {
        for stream in self.0.values().filter(|stream| stream.end.is_none()) {
            stream.signal(Signal::KILL);
        }
        self.0.clear();
    }

    /// What to poll for. Outputs only when `hear` and their window is open.
    pub fn interests(&self, hear: bool) -> impl Iterator<Item = (u32, End, &OwnedFd)> {
        self.0.iter().flat_map(move |(id, stream)| {
            let stdin =
                stream.stdin.as_ref().filter(|stdin| !stdin.queue.is_empty()).and_then(|stdin| stdin.fd.as_ref());
            let outputs = stream.outputs.iter().filter(move |outlet| hear && outlet.window.available() > 0);
            let outputs = outputs.filter_map(|outlet| Some((*id, End::Output(outlet.output), outlet.fd.as_ref()?)));
            stdin.map(|fd| (*id, End::Stdin, fd)).into_iter().chain(outputs)
        })
    }

    /// A polled end can go on.
    pub fn ready(&mut self, id: u32, end: End, now: Instant, connection: &mut GuestConnection) {
        let Some(stream) = self.0.get_mut(&id) else {
            return;
        };
        match end {
            End::Stdin => {
                if let Some(stdin) = &mut stream.stdin {
                    stdin.write(id, connection);
                }
            }
            End::Output(output) => {
                if let Some(outlet) = stream.outlet(output) {
                    outlet.read(id, now, connection);
                }
            }
        }
    }

    /// Closes silent outputs of ended processes and reports the streams that are over.
    pub fn tick(&mut self, now: Instant, connection: &mut GuestConnection) {
        self.0.retain(|id, stream| {
            for outlet in &mut stream.outputs {
                if outlet.lingers_until().is_some_and(|until| now >= until) {
                    outlet.read(*id, now, connection);
                    if outlet.lingers_until().is_some_and(|until| now >= until) {
                        outlet.close(*id, connection);
                    }
                }
            }
            let heard = stream.outputs.iter().all(|outlet| outlet.fd.is_none());
            match stream.end.take_if(|_| heard) {
                Some(end) => {
                    send(connection, v1::ExecExited { stream_id: *id, status: Some(end.into()) });
                    false
                }
                None => true,
            }
        });
    }

    pub fn deadline(&self) -> Option<Instant> {
        self.0.values().flat_map(|stream| &stream.outputs).filter_map(Outlet::lingers_until).min()
    }
}

/// Tells the host that nothing was started.
pub fn refuse(stream_id: u32, failure: StartFailure, connection: &mut GuestConnection) {
    send(connection, v1::ExecFailed { stream_id, failure: Some(failure) });
}

impl Stream {
    fn outlet(&mut self, output: Output) -> Option<&mut Outlet> {
        self.outputs.iter_mut().find(|outlet| outlet.output == output)
    }

    /// The process leads a group of its own. Never after it was reaped: its number may be another's by then.
    fn signal(&self, signal: Signal) {
        if self.end.is_none() {
            match kill_process_group(self.pid, signal) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(errno) => eprintln!("kibo-guest-agent: failed to signal process group {:?}: {errno}", self.pid),
            }
        }
    }
}

impl Stdin {
    fn new(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), queue: VecDeque::new(), window: ReceiveWindow::default(), closing: false }
    }

    /// Writes what the process takes now and grants as much again.
    fn write(&mut self, id: u32, connection: &mut GuestConnection) {
        let mut written = 0;
        while let Some(fd) = self.fd.as_ref().filter(|_| !self.queue.is_empty()) {
            match rustix::io::write(fd, self.queue.as_slices().0) {
                Ok(len) => {
                    self.queue.drain(..len);
                    written += len;
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                // The process closed it; that is its right.
                Err(_) => self.fd = None,
            }
        }
        if self.fd.is_none() {
            written += self.queue.len();
            self.queue.clear();
        }
        if let Some(bytes) = self.window.consumed(written) {
            send(connection, v1::StdinCredit { stream_id: id, bytes });
        }
        self.close_if_done();
    }

    fn close_if_done(&mut self) {
        if self.closing && self.queue.is_empty() {
            self.fd = None;
        }
    }
}

impl Outlet {
    const fn new(output: Output, fd: OwnedFd) -> Self {
        Self { output, fd: Some(fd), window: SendWindow::initial(), silent_since: None }
    }

    fn read(&mut self, id: u32, now: Instant, connection: &mut GuestConnection) {
        let limit = self.window.available().min(MAX_CHUNK);
        let Some(fd) = self.fd.as_ref().filter(|_| limit > 0) else {
            return;
        };
        match pipe::read(fd, limit) {
            Found::Data(data) => {
                self.window.sent(data.len());
                self.silent_since = self.silent_since.map(|_| now);
                send(connection, v1::OutputData { stream_id: id, output: self.output.into(), data });
            }
            Found::End => self.close(id, connection),
            Found::Nothing => {}
        }
    }

    fn close(&mut self, id: u32, connection: &mut GuestConnection) {
        if self.fd.take().is_some() {
            send(connection, v1::OutputClosed { stream_id: id, output: self.output.into() });
        }
    }

    /// When an output that stays silent is closed. A host that grants nothing is waited for.
    fn lingers_until(&self) -> Option<Instant> {
        let open = self.fd.is_some() && self.window.available() > 0;
        self.silent_since.filter(|_| open).map(|since| since + LINGER)
    }
}

fn send(connection: &mut GuestConnection, message: impl Into<v1::guest_message::Kind>) {
    connection.send(message).expect("stream messages are bounded by MAX_CHUNK");
}
