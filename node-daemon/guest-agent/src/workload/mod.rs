//! What runs in the Workspace: the entrypoint with its log, and the streams of its host.

mod archiver;
mod connect;
pub mod entrypoint;
mod exec;
mod inlet;
pub mod log;
mod outlet;
mod pipe;
mod process;
mod shell;
pub mod streams;
mod terminal;
mod user;

use kibo_guest_protocol::ProcessEnd;
use kibo_guest_protocol::v1::{self, StartFailureReason};
use rustix::process::WaitStatus;

/// A failure to start a process.
pub fn start_failure(reason: StartFailureReason, message: impl Into<String>) -> v1::StartFailure {
    v1::StartFailure { reason: reason.into(), message: message.into() }
}

/// How a reaped process ended.
#[allow(clippy::cast_sign_loss, reason = "exit codes and signal numbers are not negative")]
pub fn end_of(status: WaitStatus) -> ProcessEnd {
    match (status.exit_status(), status.terminating_signal()) {
        (_, Some(signal)) => ProcessEnd::Signal(signal as u32),
        (code, None) => ProcessEnd::Code(code.unwrap_or_default() as u32),
    }
}
