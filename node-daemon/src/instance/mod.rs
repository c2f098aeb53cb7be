//! One state machine for each Instance: what runs on this host.

use kibo_crds::{Bytes, InstanceId, MilliCpu};
use kibo_protocol::v1;

/// What the session and the admission need to know of an Instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    pub id: InstanceId,
    pub workspace_uid: String,
    pub state: v1::InstanceState,
    pub cpu: MilliCpu,
    /// Guest memory and the VMM's own.
    pub allocated_memory: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopMode {
    /// Ends when the guest has confirmed its writeback.
    Normal,
    /// One short sync, then the end; supersedes a normal stop.
    Force,
}

/// An open exec. Both directions are bounded: whoever does not read is not sent more.
pub struct ExecStream {
    /// Dropped: standard input is closed.
    pub stdin: tokio::sync::mpsc::Sender<bytes::Bytes>,
    /// Ends with an [`ExecOutput::Exit`], or without one when the guest or its channel is gone.
    /// Dropped: the process is killed.
    pub output: tokio::sync::mpsc::Receiver<ExecOutput>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExecOutput {
    Stdout(bytes::Bytes),
    Stderr(bytes::Bytes),
    Exit(ExecExit),
    /// The process could not be started, or the channel to the guest was lost.
    Failed(StreamError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecExit {
    Code(i32),
    Signal(i32),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogChunk {
    pub is_stderr: bool,
    pub data: bytes::Bytes,
}

/// Why a stream cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct StreamError {
    pub failure: v1::StreamFailure,
    pub message: String,
}
