//! The process that makes or takes an archive, see [`crate::archive`]: the agent's own program, started anew, so that
//! neither a slow disk nor a large file concerns the loop.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use kibo_guest_protocol::ProcessEnd;
use kibo_guest_protocol::flow::Widths;
use kibo_guest_protocol::v1::{self, Output, StartFailure, StartFailureReason, archive::Direction};
use rustix::io::FdFlags;
use rustix::process::Pid;

use super::inlet::{Inlet, Sink};
use super::outlet::{Outlet, Source};
use super::pipe::{self, Found};
use super::start_failure;
use super::streams::{Kind, Process, Stream};
use crate::archive::{Order, reason_of};
use crate::configure::Workspace;
use crate::turn::Turn;

/// What is heard of a failure.
const MAX_COMPLAINT: usize = 4096;

pub(super) fn start(request: v1::Archive, workspace: &Workspace, widths: Widths) -> Result<Stream, StartFailure> {
    let order = match request.direction {
        Some(Direction::Read(read)) => Order::Read { path: read.path },
        Some(Direction::Write(write)) => {
            Order::Write { path: write.path, into_directory: write.into_directory, keep_owner: write.keep_owner }
        }
        None => {
            let message = "this guest does not know what is to be done with the archive: start it anew";
            return Err(start_failure(StartFailureReason::Invalid, message));
        }
    };
    run(&order, workspace, widths)
        .map_err(|error| start_failure(StartFailureReason::Other, format!("failed to start the archiver: {error}")))
}

fn run(order: &Order, workspace: &Workspace, widths: Widths) -> io::Result<Stream> {
    let namespace = workspace.namespace.as_raw_fd();
    let (complaint, stderr) = pipe::readable()?;
    // The agent's own root, not the Workspace's: nobody there chooses what runs.
    let mut command = Command::new("/proc/self/exe");
    command.args(order.arguments(namespace)).env_clear().stderr(stderr);
    let (inlet, outlets) = if matches!(order, Order::Read { .. }) {
        let (stdout, writer) = pipe::readable()?;
        command.stdin(Stdio::null()).stdout(writer);
        (None, vec![Outlet::new(Output::Stdout, Source::Pipe(stdout), widths.output)])
    } else {
        let (stdin, reader) = pipe::writable()?;
        command.stdin(reader).stdout(Stdio::null());
        (Some(Inlet::new(Sink::Pipe(stdin), widths.input)), Vec::new())
    };
    let prepare = move || {
        #[allow(unsafe_code, reason = "a closure for pre_exec cannot borrow")]
        // SAFETY: the descriptor belongs to the Workspace, which outlives the call of spawn, and so does the fork's copy.
        let namespace = unsafe { BorrowedFd::borrow_raw(namespace) };
        rustix::io::fcntl_setfd(namespace, FdFlags::empty())?;
        rustix::process::setsid()?;
        Turn::Ordinary.take()?;
        Ok(())
    };
    #[allow(unsafe_code, reason = "nothing but pre_exec runs between fork and exec")]
    // SAFETY: only system calls, no allocation and no lock: safe after a fork of a process with threads.
    unsafe {
        command.pre_exec(prepare);
    }
    // The handle is dropped: the loop reaps by pid.
    let child = command.spawn()?;
    let pid = Pid::from_raw(child.id().cast_signed()).ok_or_else(|| io::Error::other("a process without a pid"))?;
    let kind = Kind::Archive { process: Process::new(pid), complaint: Complaint::new(complaint) };
    Ok(Stream { kind, inlet, outlets, hung_up: false })
}

/// What the archiver says of a failure.
pub(super) struct Complaint {
    fd: Option<OwnedFd>,
    text: Vec<u8>,
}

impl Complaint {
    const fn new(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), text: Vec::new() }
    }

    pub fn interest(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Whether there was anything.
    pub fn read(&mut self) -> bool {
        let Some(fd) = &self.fd else { return false };
        match pipe::read(fd, MAX_COMPLAINT) {
            Found::Data(data) => {
                let room = MAX_COMPLAINT - self.text.len();
                self.text.extend_from_slice(&data[..data.len().min(room)]);
                true
            }
            Found::Nothing => false,
            Found::End | Found::Broken(_) => {
                self.fd = None;
                false
            }
        }
    }

    /// What the end of the process means.
    pub fn take_end(&mut self, end: ProcessEnd) -> Result<ProcessEnd, StartFailure> {
        while self.read() {}
        let text = String::from_utf8_lossy(&self.text).trim_end().to_owned();
        match end {
            ProcessEnd::Code(0) => Ok(end),
            ProcessEnd::Code(code) => Err(start_failure(reason_of(code), text)),
            ProcessEnd::Signal(9) => {
                let message = "the archiver was killed in the workspace: see whether it is out of memory";
                Err(start_failure(StartFailureReason::Other, message))
            }
            ProcessEnd::Signal(signal) => {
                let message = format!("the archiver was ended by signal {signal} {text}");
                Err(start_failure(StartFailureReason::Other, message.trim_end()))
            }
            ProcessEnd::NotStarted(failure) => Err(failure),
        }
    }
}
