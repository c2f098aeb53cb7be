//! One stream that a node has dialled.

use axum::body::Bytes;
use futures::{StreamExt as _, stream::BoxStream};
use kibo_crds::NodeId;
use kibo_protocol::v1::{self, stream_from_node, stream_to_node};
use tokio::sync::mpsc;

use super::{Close, Dialled};

/// Larger pieces are sent as several frames, so that a node holds little of a stream whose reader pauses. As much as a guest
/// takes in one run: with one CPU, each that it gets costs it as much as many kilobytes.
const FRAME: usize = 256 * 1024;

/// Both directions, to be used apart.
pub struct NodeStream {
    pub output: Output,
    pub input: Input,
}

impl NodeStream {
    pub(crate) fn new(dialled: Dialled, close: Close) -> Self {
        Self {
            output: Output { frames: dialled.from_node, close, ended: false },
            input: Input { to_node: dialled.to_node },
        }
    }
}

/// What comes from the guest.
#[derive(Debug, PartialEq)]
pub enum OutputFrame {
    Stdout(Bytes),
    Stderr(Bytes),
    /// A connection's server sends nothing more; the other direction goes on.
    StdoutClosed,
    /// The last frame of a command, a connection or an archive.
    Exit(v1::ExitStatus),
}

/// The stream ended before it was complete.
#[derive(Debug, thiserror::Error)]
pub enum StreamLost {
    #[error("{message}")]
    Failed { failure: v1::StreamFailure, message: String },
    #[error("the connection to node {node} was lost: {cause}")]
    Connection { node: NodeId, cause: String },
}

/// The node's side to the client. Dropping it before the end closes the stream at the node.
pub struct Output {
    frames: BoxStream<'static, Result<v1::StreamFromNode, tonic::Status>>,
    close: Close,
    ended: bool,
}

impl Output {
    /// The next frame; `None` after the node has ended the stream in order. Cancel safe.
    pub async fn next(&mut self) -> Result<Option<OutputFrame>, StreamLost> {
        use stream_from_node::Frame;
        loop {
            let frame = match self.frames.next().await {
                None => {
                    self.ended = true;
                    return Ok(None);
                }
                Some(Err(status)) => {
                    self.ended = true;
                    let (node, cause) = (self.close.node.clone(), status.message().to_owned());
                    return Err(StreamLost::Connection { node, cause });
                }
                Some(Ok(message)) => message.frame,
            };
            return match frame {
                Some(Frame::Stdout(data)) => Ok(Some(OutputFrame::Stdout(data))),
                Some(Frame::Stderr(data)) => Ok(Some(OutputFrame::Stderr(data))),
                Some(Frame::StdoutClosed(_)) => Ok(Some(OutputFrame::StdoutClosed)),
                Some(Frame::Exit(exit)) => {
                    self.ended = true;
                    Ok(Some(OutputFrame::Exit(exit)))
                }
                Some(Frame::Error(error)) => {
                    self.ended = true;
                    let failure = error.failure();
                    Err(StreamLost::Failed { failure, message: error.message })
                }
                // A second hello says nothing new, and an unknown frame is from a newer node.
                Some(Frame::Hello(_)) | None => continue,
            };
        }
    }

    pub fn node(&self) -> &NodeId {
        &self.close.node
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.ended {
            self.close.send();
        }
    }
}

/// The client's side to the node. Keep it as long as the output is of interest, also when there is no input: the
/// node takes its end without [`Input::close`] as a client that is gone.
pub struct Input {
    to_node: mpsc::Sender<Result<v1::StreamToNode, tonic::Status>>,
}

impl Input {
    /// Sends input, as fast as the node takes it. `false`: the node does not listen any more.
    pub async fn write(&self, mut data: Bytes) -> bool {
        while !data.is_empty() {
            let piece = data.split_to(data.len().min(FRAME));
            if !self.send(stream_to_node::Frame::Stdin(piece)).await {
                return false;
            }
        }
        true
    }

    /// The client's terminal has another size.
    pub async fn resize(&self, columns: u16, rows: u16) -> bool {
        self.send(stream_to_node::Frame::Resize(v1::Resize { columns: columns.into(), rows: rows.into() })).await
    }

    /// A signal for the command, by its Linux number.
    pub async fn signal(&self, signal: u32) -> bool {
        self.send(stream_to_node::Frame::Signal(signal)).await
    }

    /// The input has ended; the command sees the end of its stdin.
    pub async fn close(&self) -> bool {
        self.send(stream_to_node::Frame::StdinClosed(true)).await
    }

    async fn send(&self, frame: stream_to_node::Frame) -> bool {
        self.to_node.send(Ok(v1::StreamToNode { frame: Some(frame) })).await.is_ok()
    }
}
