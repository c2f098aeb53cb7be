//! Where what the host sends on a stream goes: a process's standard input, a terminal, a connection.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use kibo_guest_protocol::GuestConnection;
use kibo_guest_protocol::flow::{self, Overrun, ReceiveWindow, Width};
use kibo_guest_protocol::v1;
use rustix::io::Errno;
use rustix::net::Shutdown;

use super::outlet::send;
use super::terminal::Terminal;

/// The other end of what was sent.
#[derive(Debug)]
pub enum Sink {
    Pipe(OwnedFd),
    Terminal(Terminal),
    Socket(Rc<OwnedFd>),
}

impl AsFd for Sink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Pipe(fd) => fd.as_fd(),
            Self::Terminal(terminal) => terminal.as_fd(),
            Self::Socket(socket) => socket.as_fd(),
        }
    }
}

pub struct Inlet {
    /// `None` before a connection is open, and when the process closed it: what comes then is dropped.
    sink: Option<Sink>,
    queue: VecDeque<Vec<u8>>,
    /// What is written of the first piece.
    head: usize,
    window: ReceiveWindow,
    state: State,
    last: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A connection that is not there yet.
    Waiting,
    Open,
    /// The host sends nothing more; what is queued is still written.
    Closing,
    Closed,
    /// The other end is gone, before all was written.
    Broken,
}

impl Inlet {
    pub fn new(sink: Sink, width: Width) -> Self {
        Self { sink: Some(sink), state: State::Open, ..Self::waiting(width) }
    }

    /// For a connection that is being made.
    pub fn waiting(width: Width) -> Self {
        let (queue, window) = (VecDeque::new(), ReceiveWindow::new(width));
        Self { sink: None, queue, head: 0, window, state: State::Waiting, last: None }
    }

    /// The connection is there.
    pub fn connected(&mut self, sink: Sink, id: u32, connection: &mut GuestConnection) {
        self.sink = Some(sink);
        if self.state == State::Waiting {
            self.state = State::Open;
        }
        self.write(id, connection);
    }

    pub fn take(&mut self, data: Vec<u8>, id: u32, connection: &mut GuestConnection) -> Result<(), Overrun> {
        if matches!(self.state, State::Closing | State::Closed) || data.is_empty() {
            return Ok(());
        }
        self.window.received(data.len())?;
        if self.queue.back_mut().is_some_and(|last| flow::join(last, &data)) {
            connection.recycle(data);
        } else {
            self.queue.push_back(data);
        }
        self.write(id, connection);
        Ok(())
    }

    pub fn close(&mut self) {
        if matches!(self.state, State::Waiting | State::Open) {
            self.state = State::Closing;
            if let Some(Sink::Terminal(terminal)) = &self.sink {
                let last = self.queue.back().and_then(|piece| piece.last().copied()).or(self.last);
                let typed = terminal.end_of_input(last);
                if !typed.is_empty() {
                    self.queue.push_back(typed);
                }
            }
            self.close_if_done();
        }
    }

    /// What to poll for room, when something waits for it.
    pub fn interest(&self) -> Option<BorrowedFd<'_>> {
        self.sink.as_ref().filter(|_| !self.queue.is_empty()).map(AsFd::as_fd)
    }

    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed | State::Broken)
    }

    pub fn is_broken(&self) -> bool {
        self.state == State::Broken
    }

    /// Writes what the other end takes now and grants as much again.
    pub fn write(&mut self, id: u32, connection: &mut GuestConnection) {
        if self.state == State::Waiting || (self.sink.is_none() && self.state == State::Closing) {
            return;
        }
        let mut written = 0;
        while let (Some(sink), Some(piece)) = (&self.sink, self.queue.front()) {
            match rustix::io::write(sink, &piece[self.head..]) {
                Ok(len) => {
                    written += len;
                    self.head += len;
                    self.last = piece[..self.head].last().copied();
                    if self.head == piece.len() {
                        self.head = 0;
                        self.queue.pop_front().into_iter().for_each(|piece| connection.recycle(piece));
                    }
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                // The process closed it; that is its right.
                Err(_) => {
                    self.sink = None;
                    self.state = State::Broken;
                }
            }
        }
        if self.sink.is_none() {
            written += self.queue.iter().map(Vec::len).sum::<usize>() - self.head;
            self.queue.clear();
            self.head = 0;
        }
        if let Some(bytes) = self.window.consumed(written) {
            send(connection, v1::StdinCredit { stream_id: id, bytes });
        }
        self.close_if_done();
    }

    fn close_if_done(&mut self) {
        if self.state != State::Closing || !self.queue.is_empty() {
            return;
        }
        match &self.sink {
            // A connection that is still being made is closed once it is there.
            None => return,
            Some(Sink::Socket(socket)) => {
                // One that is gone already has nothing to be shut down.
                let _ = rustix::net::shutdown(socket, Shutdown::Write);
                self.sink = None;
            }
            // A terminal stays: its end was typed.
            Some(Sink::Terminal(_)) => {}
            Some(Sink::Pipe(_)) => self.sink = None,
        }
        self.state = State::Closed;
    }
}
