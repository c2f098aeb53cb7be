//! Conversions that spare the ends the wrapping of messages.

use crate::v1::{self, exit_status, guest_message, host_message};

/// How a process ended.
#[derive(Clone, Debug, PartialEq)]
pub enum ProcessEnd {
    Code(u32),
    Signal(u32),
    NotStarted(v1::StartFailure),
}

impl From<ProcessEnd> for v1::ExitStatus {
    fn from(end: ProcessEnd) -> Self {
        let kind = match end {
            ProcessEnd::Code(code) => exit_status::Kind::Code(code),
            ProcessEnd::Signal(signal) => exit_status::Kind::Signal(signal),
            ProcessEnd::NotStarted(failure) => exit_status::Kind::StartFailure(failure),
        };
        Self { kind: Some(kind) }
    }
}

impl ProcessEnd {
    /// `None` for a status that this version does not know.
    pub fn from_message(status: Option<v1::ExitStatus>) -> Option<Self> {
        Some(match status?.kind? {
            exit_status::Kind::Code(code) => Self::Code(code),
            exit_status::Kind::Signal(signal) => Self::Signal(signal),
            exit_status::Kind::StartFailure(failure) => Self::NotStarted(failure),
        })
    }
}

macro_rules! wrapped {
    ($kind:path: $($message:ident),* $(,)?) => {$(
        impl From<v1::$message> for $kind {
            fn from(message: v1::$message) -> Self {
                Self::$message(message)
            }
        }
    )*};
}

wrapped!(host_message::Kind: Hello, Configure, Ping, Sync, Shutdown, LogAck, Exec, StdinData, StdinClose, Signal, StreamCredit, Resize, Connect, Archive, Hangup, StdinRun);
wrapped!(
    guest_message::Kind: HelloReply, ConfigureResult, Pong, SyncDone, ShuttingDown, LogData, EntrypointState, ExecStarted,
    ExecFailed, ExecExited, OutputData, OutputClosed, StdinCredit, OutputRun,
);
