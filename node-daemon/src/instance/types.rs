//! What the other rooms see of an Instance.

use std::collections::BTreeSet;

use bytes::Bytes;
use kibo_crds::{InstanceId, MilliCpu, PoolId};
use kibo_protocol::v1;
use tokio::sync::mpsc;

/// What the session and the admission need to know of an Instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    pub id: InstanceId,
    pub workspace_uid: String,
    pub state: v1::InstanceState,
    pub cpu: MilliCpu,
    /// Guest memory and the VMM's own.
    pub allocated_memory: kibo_crds::Bytes,
    /// Where its disks are.
    pub pools: BTreeSet<PoolId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopMode {
    /// Ends when the guest has confirmed its writeback.
    Normal,
    /// One short sync, then the end; supersedes a normal stop.
    Force,
}

/// An open command, connection or archive. Both directions are bounded: whoever does not read is not sent more.
#[derive(Debug)]
pub struct ExecStream {
    /// Dropped: standard input is closed.
    pub input: mpsc::Sender<ExecInput>,
    /// Ends with an [`ExecOutput::Exit`] or an [`ExecOutput::Failed`]. Dropped: a process is hung up, a connection closed.
    pub output: mpsc::Receiver<ExecOutput>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExecInput {
    Data(Bytes),
    /// Of standard input; the rest may still come.
    Close,
    Resize {
        columns: u32,
        rows: u32,
    },
    /// Linux number, for the command's whole group.
    Signal(u32),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExecOutput {
    Stdout(Bytes),
    Stderr(Bytes),
    /// A connection's server sends nothing more.
    StdoutClosed,
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
    pub data: Bytes,
}

/// Why a stream cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct StreamError {
    pub failure: v1::StreamFailure,
    pub message: String,
}
