//! Wakes the loop: a byte in a socket when a child ends or a thread has something to say.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

pub struct Wake {
    receiver: UnixStream,
    sender: Arc<UnixStream>,
}

/// A handle for threads.
#[derive(Clone)]
pub struct Waker(Arc<UnixStream>);

impl Wake {
    /// Also registers for the end of children.
    pub fn new() -> io::Result<Self> {
        let (receiver, sender) = UnixStream::pair()?;
        receiver.set_nonblocking(true)?;
        sender.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(signal_hook::consts::SIGCHLD, sender.try_clone()?)?;
        Ok(Self { receiver, sender: Arc::new(sender) })
    }

    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.sender))
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }

    /// Forgets the wake-ups so far.
    pub fn clear(&mut self) {
        let mut sink = [0; 64];
        while matches!(self.receiver.read(&mut sink), Ok(len) if len > 0) {}
    }
}

impl Waker {
    pub fn wake(&self) {
        // A full socket wakes the loop as well.
        match (&*self.0).write(&[0]) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => {
                eprintln!("kibo-guest-agent: no wake-up: {error}");
            }
            _ => {}
        }
    }
}
