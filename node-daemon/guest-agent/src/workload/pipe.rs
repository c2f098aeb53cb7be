//! Pipes to processes: the agent's end never blocks.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use kibo_guest_protocol::MAX_RUN;
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

/// More than the kernel's own 64 KiB: with one CPU each filling of a pipe costs two switches between processes. What a
/// run carries at most.
pub const CAPACITY: usize = MAX_RUN;

/// What a read found.
#[derive(Debug, PartialEq, Eq)]
pub enum Found<T = Vec<u8>> {
    Data(T),
    Nothing,
    End,
    /// An end that is none: a connection was reset, a terminal has nobody at its other end any more.
    Broken(Errno),
}

impl<T> Found<T> {
    fn of(read: rustix::io::Result<usize>, data: impl FnOnce(usize) -> T) -> Self {
        match read {
            Ok(0) => Self::End,
            Ok(len) => Self::Data(data(len)),
            Err(Errno::AGAIN | Errno::INTR) => Self::Nothing,
            Err(errno) => Self::Broken(errno),
        }
    }
}

/// A pipe that the agent reads: (agent's end, process's end).
pub fn readable() -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = pipe()?;
    rustix::io::ioctl_fionbio(&reader, true)?;
    Ok((reader, writer))
}

/// A pipe that the agent writes: (agent's end, process's end).
pub fn writable() -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = pipe()?;
    rustix::io::ioctl_fionbio(&writer, true)?;
    Ok((writer, reader))
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    // A kernel that refuses has its reasons, and a smaller pipe works as well.
    let _ = fcntl_setpipe_size(&writer, CAPACITY);
    Ok((reader, writer))
}

/// Reads at most `limit` bytes, which is more than 0.
pub fn read(fd: impl AsFd, limit: usize) -> Found {
    let mut buffer = Vec::with_capacity(limit);
    let read = rustix::io::read(fd, spare_capacity(&mut buffer));
    Found::of(read, |len| {
        // What is kept for a while must not hold memory that it does not use.
        if len < limit / 2 {
            buffer.shrink_to_fit();
        }
        buffer
    })
}

/// Reads to where it belongs, which has room; says how much.
pub fn read_to(fd: impl AsFd, room: &mut [u8]) -> Found<usize> {
    Found::of(rustix::io::read(fd, room), |len| len)
}
