//! Pipes to processes: the agent's end never blocks.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

/// What a read found.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    Data(Vec<u8>),
    Nothing,
    End,
}

/// A pipe that the agent reads: (agent's end, process's end).
pub fn readable() -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&reader, true)?;
    Ok((reader, writer))
}

/// A pipe that the agent writes: (agent's end, process's end).
pub fn writable() -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&writer, true)?;
    Ok((writer, reader))
}

/// Reads at most `limit` bytes, which is more than 0.
pub fn read(fd: &OwnedFd, limit: usize) -> Found {
    let mut buffer = vec![0; limit];
    match rustix::io::read(fd, buffer.as_mut_slice()) {
        Ok(0) => Found::End,
        Ok(len) => {
            buffer.truncate(len);
            Found::Data(buffer)
        }
        Err(Errno::AGAIN | Errno::INTR) => Found::Nothing,
        Err(_) => Found::End,
    }
}
