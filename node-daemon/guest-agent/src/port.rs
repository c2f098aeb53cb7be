//! The virtio-serial port: bytes in, bytes out, and what hanging up means.
//!
//! While no host has the port open, `poll` reports a hangup at once and for ever; then the port is looked at every
//! [`Port::pause`] instead. A host that comes back quickly may go unnoticed here, which is why connections are told
//! apart by their nonces.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use kibo_guest_protocol::{GuestConnection, MAX_RUN};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// How long a host that comes back may wait to be noticed: a daemon that restarts is back soon, one that has been away
/// for long may well be for longer, and each look costs an idle guest CPU time.
const SHORT_PAUSE: Duration = Duration::from_millis(100);
const LONG_PAUSE: Duration = Duration::from_millis(500);
const LONG_AFTER: Duration = Duration::from_secs(10);

/// Above this much unsent output, nothing more is read from the workload.
const CROWDED: usize = 512 * 1024;

/// What is read in one round of the loop, more or less: the kernel gives a page at a time, and a look at everybody costs as
/// much as many pages.
const BYTES_OF_A_TURN: usize = MAX_RUN;
const PAGE: usize = 4096;

pub struct Port {
    fd: OwnedFd,
    pub connection: GuestConnection,
    hung_up_since: Option<Instant>,
    buffer: Vec<u8>,
}

impl Port {
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, connection: GuestConnection::default(), hung_up_since: None, buffer: vec![0; PAGE] }
    }

    /// What to poll for; `None` while hung up.
    pub fn interest(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let mut flags = PollFlags::IN;
        if !self.connection.outgoing().is_empty() {
            flags |= PollFlags::OUT;
        }
        self.hung_up_since.is_none().then(|| (self.fd.as_fd(), flags))
    }

    /// How long to wait before the next [`Self::look`]; `None` while a host is there.
    pub fn pause(&self, now: Instant) -> Option<Duration> {
        let since = self.hung_up_since?;
        let long = now.duration_since(since) >= LONG_AFTER;
        Some(if long { LONG_PAUSE } else { SHORT_PAUSE })
    }

    /// Whether so much waits to be sent that the workload should wait too.
    pub fn is_crowded(&self) -> bool {
        self.connection.outgoing().len() > CROWDED
    }

    /// Looks whether a host came back.
    pub fn look(&mut self) {
        if self.hung_up_since.is_some() {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
            let looked = poll(&mut fds, Some(&now));
            if looked.is_ok() && !fds[0].revents().contains(PollFlags::HUP) {
                self.hung_up_since = None;
            }
        }
    }

    /// Reads what is there into the connection. `true` when the host hung up.
    pub fn read(&mut self) -> bool {
        let mut read = 0;
        let hung_up = loop {
            match self.read_piece() {
                Ok(0) => break true,
                Ok(len) => read += len,
                Err(Errno::AGAIN) => break false,
                Err(Errno::INTR) => {}
                Err(_) => break true,
            }
            if read >= BYTES_OF_A_TURN {
                break false;
            }
        };
        if hung_up {
            self.hung_up_since = Some(Instant::now());
            self.connection.hang_up();
        }
        hung_up
    }

    /// Reads what the kernel gives at once, to where it belongs if that is known.
    fn read_piece(&mut self) -> Result<usize, Errno> {
        if let Some(room) = self.connection.room() {
            let len = rustix::io::read(&self.fd, room)?;
            self.connection.filled(len);
            return Ok(len);
        }
        let len = rustix::io::read(&self.fd, &mut self.buffer)?;
        self.connection.receive(&self.buffer[..len]);
        Ok(len)
    }

    /// Writes as much as the host takes now.
    pub fn flush(&mut self) {
        while !self.connection.outgoing().is_empty() {
            match rustix::io::write(&self.fd, self.connection.outgoing()) {
                Ok(len) if len > 0 => self.connection.written(len),
                // A host that is gone is noticed when reading.
                Ok(_) | Err(_) => return,
            }
        }
    }
}
