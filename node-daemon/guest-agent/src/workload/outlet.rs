//! Where what the host hears on a stream comes from, within its window.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use kibo_guest_protocol::GuestConnection;
use kibo_guest_protocol::flow::{SendWindow, Width};
use kibo_guest_protocol::v1::{self, Output};
use rustix::io::Errno;

use super::pipe::{self, Found};
use super::terminal::Terminal;

/// A child that a process left behind may keep an output open for ever: once the process is gone, an output that stays
/// silent for so long is closed.
const LINGER: Duration = Duration::from_millis(500);

/// What a pipe holds: with one CPU whoever fills it does not go on meanwhile.
const BYTES_OF_A_TURN: usize = pipe::CAPACITY;

#[derive(Debug)]
pub enum Source {
    Pipe(OwnedFd),
    Terminal(Terminal),
    Socket(Rc<OwnedFd>),
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Pipe(fd) => fd.as_fd(),
            Self::Terminal(terminal) => terminal.as_fd(),
            Self::Socket(socket) => socket.as_fd(),
        }
    }
}

pub struct Outlet {
    pub output: Output,
    source: Option<Source>,
    window: SendWindow,
    /// Silent since then, counted from the end of the process.
    silent_since: Option<Instant>,
    broken: bool,
}

impl Outlet {
    pub const fn new(output: Output, source: Source, width: Width) -> Self {
        Self { output, source: Some(source), window: SendWindow::new(width), silent_since: None, broken: false }
    }

    pub fn grant(&mut self, bytes: u32) {
        self.window.grant(bytes);
    }

    /// What to poll for, when it may be read.
    pub fn interest(&self) -> Option<BorrowedFd<'_>> {
        self.source.as_ref().filter(|_| self.window.available() > 0).map(AsFd::as_fd)
    }

    pub const fn is_closed(&self) -> bool {
        self.source.is_none()
    }

    /// The connection was reset.
    pub const fn is_broken(&self) -> bool {
        self.broken
    }

    /// Sends what is there, as far as its turn goes: a look at everybody for each piece costs more than the piece.
    pub fn read(&mut self, id: u32, now: Instant, connection: &mut GuestConnection) {
        let mut left = BYTES_OF_A_TURN;
        while let Some(len) = self.read_piece(id, left, now, connection) {
            left -= len;
        }
    }

    /// Sends at most `left` bytes; says how many. `None` when there may be no more for now.
    fn read_piece(&mut self, id: u32, left: usize, now: Instant, connection: &mut GuestConnection) -> Option<usize> {
        let limit = self.window.available().min(connection.longest_output()).min(left);
        let source = self.source.as_ref().filter(|_| limit > 0)?;
        let mut found = Found::Nothing;
        let read = |room: &mut [u8]| {
            found = pipe::read_to(source, room);
            if let Found::Data(len) = found { len } else { 0 }
        };
        connection.send_output(id, self.output, limit, read).expect("a piece is bounded");
        match found {
            Found::Data(len) => {
                self.window.sent(len);
                self.silent_since = self.silent_since.map(|_| now);
                return (len == limit).then_some(len);
            }
            Found::Broken(errno) => {
                // EIO is how a terminal says that nobody is at its other end any more.
                self.broken = errno != Errno::IO;
                self.close(id, connection);
            }
            Found::End => self.close(id, connection),
            Found::Nothing => {}
        }
        None
    }

    pub fn close(&mut self, id: u32, connection: &mut GuestConnection) {
        if self.source.take().is_some() {
            send(connection, v1::OutputClosed { stream_id: id, output: self.output.into() });
        }
    }

    /// The process has ended.
    pub const fn ended(&mut self, now: Instant) {
        self.silent_since = Some(now);
    }

    /// Closes it when it has been silent for long enough after the end of its process.
    pub fn tick(&mut self, id: u32, now: Instant, connection: &mut GuestConnection) {
        let is_due = |outlet: &Self| outlet.lingers_until().is_some_and(|until| now >= until);
        if is_due(self) {
            self.read(id, now, connection);
            if is_due(self) {
                self.close(id, connection);
            }
        }
    }

    /// When an output that stays silent is closed. A host that grants nothing is waited for.
    pub fn lingers_until(&self) -> Option<Instant> {
        let open = self.source.is_some() && self.window.available() > 0;
        self.silent_since.filter(|_| open).map(|since| since + LINGER)
    }
}

/// Queues a message of a stream.
pub fn send(connection: &mut GuestConnection, message: impl Into<v1::guest_message::Kind>) {
    connection.send(message).expect("stream messages are short");
}
