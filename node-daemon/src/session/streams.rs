//! Exec and log streams: the operator asks on the session, the node dials back.
//!
//! Each stream has a connection of its own, so that a client that does not read stops only its own
//! stream. When that connection reaches another replica than the one that asked, the stream goes
//! through the session's connection.

use std::{sync::Arc, time::Duration};

use futures::StreamExt as _;
use kibo_protocol::v1::{
    self, from_node::Message, open_stream::Kind, stream_from_node::Frame, stream_to_node::Frame as FrameToNode,
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Streaming, transport::Channel};

use super::{
    connect::{self, Trust},
    control::InstanceControl,
    node::Node,
    outbox::Outbox,
};
use crate::{
    config::Endpoint,
    instance::{ExecExit, ExecOutput, ExecStream, StreamError},
};

/// Frames on their way to the operator.
const FRAMES: usize = 8;
const DIAL_WITHIN: Duration = Duration::from_secs(10);

/// How to reach the operator that this session is with.
#[derive(Clone)]
pub struct Way {
    pub endpoint: Endpoint,
    pub trust: Trust,
    pub session: Channel,
}

pub struct Stream<I> {
    pub node: Arc<Node<I>>,
    pub way: Way,
    pub outbox: Outbox,
    pub cancel: CancellationToken,
}

/// An attached stream: both directions are bounded.
struct Attached {
    to_operator: mpsc::Sender<v1::StreamFromNode>,
    from_operator: Streaming<v1::StreamToNode>,
}

impl<I: InstanceControl> Stream<I> {
    pub async fn run(self, open: v1::OpenStream) {
        let stream_id = open.stream_id;
        let done = async {
            let attached = match self.attach(&stream_id).await {
                Ok(attached) => attached,
                Err(message) => {
                    let failure = v1::StreamFailure::Unspecified.into();
                    tracing::warn!(message, "a stream could not be attached");
                    self.outbox.send(Message::StreamRefused(v1::StreamRefused { stream_id, message, failure }));
                    return;
                }
            };
            let Attached { to_operator, mut from_operator } = attached;
            let served = match open.kind {
                Some(Kind::Exec(request)) => self.exec(request, &to_operator, &mut from_operator).await,
                Some(Kind::Log(request)) => self.log(&request, &to_operator, &mut from_operator).await,
                Some(Kind::Connect(_) | Kind::Archive(_)) | None => {
                    Err(invalid("this node does not know what kind of stream that is: update its node-daemon".into()))
                }
            };
            if let Err(error) = served {
                let error = v1::StreamError { failure: error.failure.into(), message: error.message };
                send(&to_operator, Frame::Error(error)).await;
            }
            // Half-closed: the operator reads what is left, for as long as its client likes, and then closes too. When
            // it is gone, the connection's keep-alive ends this.
            drop(to_operator);
            until_closed(&mut from_operator).await;
        };
        tokio::select! {
            () = done => {}
            () = self.cancel.cancelled() => {}
        }
        // Marks the stream as over for whoever keeps the list.
        self.cancel.cancel();
    }

    async fn attach(&self, stream_id: &str) -> Result<Attached, String> {
        let own = match connect::connect(&self.way.endpoint, &self.way.trust).await {
            Ok(channel) => self.attach_over(channel, stream_id).await,
            Err(error) => Err(error.to_string()),
        };
        match own {
            Ok(attached) => Ok(attached),
            Err(first) => {
                tracing::debug!(error = first, "a stream goes through the session's connection");
                self.attach_over(self.way.session.clone(), stream_id).await
            }
        }
    }

    async fn attach_over(&self, channel: Channel, stream_id: &str) -> Result<Attached, String> {
        let (to_operator, frames) = mpsc::channel(FRAMES);
        let hello = v1::AttachHello { node_id: self.node.id.to_string(), stream_id: stream_id.to_owned() };
        send(&to_operator, Frame::Hello(hello)).await;
        let mut client = v1::node_control_client::NodeControlClient::new(channel);
        match timeout(DIAL_WITHIN, client.attach(ReceiverStream::new(frames))).await {
            Err(_) => Err("the operator did not take the stream in time".into()),
            Ok(Err(status)) => Err(format!("the operator did not take the stream: {}", status.message())),
            Ok(Ok(response)) => Ok(Attached { to_operator, from_operator: response.into_inner() }),
        }
    }

    async fn exec(
        &self,
        request: v1::ExecRequest,
        to_operator: &mpsc::Sender<v1::StreamFromNode>,
        from_operator: &mut Streaming<v1::StreamToNode>,
    ) -> Result<(), StreamError> {
        let has_stdin = request.stdin;
        let ExecStream { stdin, output } = self.node.instances.exec(request).await?;
        // Dropping `output` kills the process, and that happens as soon as the operator is gone.
        tokio::select! {
            result = pump_output(output, to_operator) => result,
            () = pump_stdin(from_operator, has_stdin.then_some(stdin), to_operator) => Ok(()),
        }
    }

    async fn log(
        &self,
        request: &v1::LogRequest,
        to_operator: &mpsc::Sender<v1::StreamFromNode>,
        from_operator: &mut Streaming<v1::StreamToNode>,
    ) -> Result<(), StreamError> {
        let mut chunks = self.node.instances.log(&request.workspace_uid, request.tail_lines, request.follow)?;
        let copy = async {
            while let Some(chunk) = chunks.next().await {
                let frame = if chunk.is_stderr { Frame::Stderr(chunk.data) } else { Frame::Stdout(chunk.data) };
                if !send(to_operator, frame).await {
                    return;
                }
            }
        };
        tokio::select! {
            () = copy => {}
            () = pump_stdin(from_operator, None, to_operator) => {}
        }
        Ok(())
    }
}

fn invalid(message: String) -> StreamError {
    StreamError { failure: v1::StreamFailure::Invalid, message }
}

/// Waits for room; `false` when the operator is gone.
async fn send(sender: &mpsc::Sender<v1::StreamFromNode>, frame: Frame) -> bool {
    sender.send(v1::StreamFromNode { frame: Some(frame) }).await.is_ok()
}

async fn pump_output(
    mut output: mpsc::Receiver<ExecOutput>,
    to_operator: &mpsc::Sender<v1::StreamFromNode>,
) -> Result<(), StreamError> {
    while let Some(piece) = output.recv().await {
        let frame = match piece {
            ExecOutput::Stdout(data) => Frame::Stdout(data),
            ExecOutput::Stderr(data) => Frame::Stderr(data),
            ExecOutput::Failed(error) => return Err(error),
            ExecOutput::Exit(exit) => {
                send(to_operator, Frame::Exit(exit_status(exit))).await;
                return Ok(());
            }
        };
        if !send(to_operator, frame).await {
            return Ok(());
        }
    }
    let message = "the guest or its channel was lost before the command ended".into();
    Err(StreamError { failure: v1::StreamFailure::GuestUnavailable, message })
}

fn exit_status(exit: ExecExit) -> v1::ExitStatus {
    match exit {
        ExecExit::Code(code) => v1::ExitStatus { code: Some(code), signal: None },
        ExecExit::Signal(signal) => v1::ExitStatus { code: None, signal: Some(signal) },
    }
}

/// Ends when the operator is gone; not when it only has nothing more to say.
async fn pump_stdin(
    from_operator: &mut Streaming<v1::StreamToNode>,
    mut stdin: Option<mpsc::Sender<bytes::Bytes>>,
    to_operator: &mpsc::Sender<v1::StreamFromNode>,
) {
    loop {
        match from_operator.message().await {
            Err(_) => return,
            Ok(None) => break,
            Ok(Some(message)) => match message.frame {
                Some(FrameToNode::Stdin(data)) if !data.is_empty() => {
                    if let Some(open) = &stdin
                        && open.send(data).await.is_err()
                    {
                        // The process does not read any more; what comes is dropped, as a pipe would.
                        stdin = None;
                    }
                }
                Some(FrameToNode::StdinClosed(true)) => stdin = None,
                _ => {}
            },
        }
    }
    drop(stdin);
    to_operator.closed().await;
}

async fn until_closed(from_operator: &mut Streaming<v1::StreamToNode>) {
    while let Ok(Some(_)) = from_operator.message().await {}
}
