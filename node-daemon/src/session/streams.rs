//! Streams (commands, connections, archives, logs): the operator asks on the session, the node dials back.
//!
//! Each stream has a connection of its own, so that a client that does not read stops only its own
//! stream. When that connection reaches another replica than the one that asked, the stream goes
//! through the session's connection.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::StreamExt as _;
use kibo_protocol::v1::{
    self, from_node::Message, open_stream::Kind, stream_from_node::Frame, stream_to_node::Frame as FrameToNode,
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Streaming, transport::Channel};

use super::{
    connect::{self, Trust},
    control::InstanceControl,
    node::Node,
    outbox::Outbox,
    transfers::{self, Transfer},
};
use crate::{
    config::Endpoint,
    instance::{ExecExit, ExecInput, ExecOutput, ExecStream, StreamError},
    launch::Taker,
};

/// Frames on their way to the operator: what a client does not read is not to pile up here.
const FRAMES: usize = 2;
const DIAL_WITHIN: Duration = Duration::from_secs(10);
/// How long the last word of a stream that is interrupted may take to reach the operator.
const LAST_WORD: Duration = Duration::from_secs(1);

/// All streams of the daemon, so that it can say goodbye to them.
#[derive(Clone, Debug, Default)]
pub struct OpenStreams {
    tasks: TaskTracker,
    stopping: CancellationToken,
}

impl OpenStreams {
    /// The daemon ends: tells each client so and waits until they are told, for a moment.
    pub async fn end(&self) {
        self.stopping.cancel();
        self.tasks.close();
        let _ = timeout(LAST_WORD, self.tasks.wait()).await;
    }
}

/// When the streams of a session end, and what their clients are told.
#[derive(Clone, Debug, Default)]
pub struct SessionEnd {
    closed: CancellationToken,
    why: Arc<OnceLock<String>>,
}

impl SessionEnd {
    pub fn close(&self, why: String) {
        // The first word stands.
        let _ = self.why.set(why);
        self.closed.cancel();
    }

    pub fn child_token(&self) -> CancellationToken {
        self.closed.child_token()
    }
}

/// How to reach the operator that this session is with.
#[derive(Clone)]
pub struct Way {
    pub endpoint: Endpoint,
    pub trust: Trust,
    pub session: Channel,
}

pub struct Stream<I> {
    pub node: Arc<Node<I>>,
    /// By whom the objects of a transfer are taken.
    pub transfers_by: Taker,
    pub way: Way,
    pub outbox: Outbox,
    /// The operator wants this one no more, or its session has ended.
    pub cancel: CancellationToken,
    pub session: SessionEnd,
}

/// An attached stream: both directions are bounded.
struct Attached {
    to_operator: mpsc::Sender<v1::StreamFromNode>,
    from_operator: Streaming<v1::StreamToNode>,
}

impl<I: InstanceControl> Stream<I> {
    /// Serves the stream on a task of its own.
    pub fn spawn(self, open: v1::OpenStream) {
        let tasks = self.node.streams.tasks.clone();
        tasks.spawn(self.run(open));
    }

    async fn run(self, open: v1::OpenStream) {
        let stream_id = open.stream_id;
        let attached = tokio::select! {
            attached = self.attach(&stream_id) => attached,
            _ = self.interrupted() => return,
        };
        match attached {
            Ok(attached) => self.serve(open.kind, attached).await,
            Err(message) => {
                let failure = v1::StreamFailure::Unspecified.into();
                tracing::warn!(message, "a stream could not be attached");
                self.outbox.send(Message::StreamRefused(v1::StreamRefused { stream_id, message, failure }));
            }
        }
        // Marks the stream as over for whoever keeps the list.
        self.cancel.cancel();
    }

    async fn serve(&self, kind: Option<Kind>, attached: Attached) {
        let Attached { to_operator, mut from_operator } = attached;
        let served = async {
            match kind {
                Some(Kind::Exec(request)) => {
                    let has_stdin = request.stdin;
                    let stream = self.node.instances.exec(request).await?;
                    carry(stream, has_stdin, &to_operator, &mut from_operator).await
                }
                Some(Kind::Connect(request)) => {
                    let stream = self.node.instances.connect(request).await?;
                    carry(stream, true, &to_operator, &mut from_operator).await
                }
                Some(Kind::Archive(request)) => {
                    let has_stdin = matches!(request.direction, Some(v1::archive_request::Direction::Write(_)));
                    let stream = self.node.instances.archive(request).await?;
                    carry(stream, has_stdin, &to_operator, &mut from_operator).await
                }
                Some(Kind::Export(request)) => {
                    let transfer = transfers::export(&self.node, self.transfers_by.clone(), &request)?;
                    carry_transfer(transfer, false, &to_operator, &mut from_operator).await
                }
                Some(Kind::Import(request)) => {
                    let transfer = transfers::import(&self.node, self.transfers_by.clone(), request)?;
                    carry_transfer(transfer, true, &to_operator, &mut from_operator).await
                }
                Some(Kind::Log(request)) => self.log(&request, &to_operator, &mut from_operator).await,
                None => {
                    Err(invalid("this node does not know what kind of stream that is: update its node-daemon".into()))
                }
            }
        };
        let (served, interrupted) = tokio::select! {
            served = served => (served, false),
            why = self.interrupted() => match why {
                Some(message) => (Err(StreamError { failure: v1::StreamFailure::Interrupted, message }), true),
                None => return,
            },
        };
        let close = async {
            if let Err(error) = served {
                let error = v1::StreamError { failure: error.failure.into(), message: error.message };
                send(&to_operator, Frame::Error(error)).await;
            }
            // Half-closed: the operator reads what is left, for as long as its client likes, and then closes too. When
            // it is gone, the connection's keep-alive ends this.
            drop(to_operator);
            until_closed(&mut from_operator).await;
        };
        if interrupted {
            let _ = timeout(LAST_WORD, close).await;
        } else {
            tokio::select! {
                () = close => {}
                _ = self.interrupted() => {}
            }
        }
    }

    /// Waits until the stream is to end, whatever it does; gives what its client is to hear, if it is there.
    async fn interrupted(&self) -> Option<String> {
        tokio::select! {
            () = self.cancel.cancelled() => self.session.why.get().cloned(),
            () = self.node.streams.stopping.cancelled() => {
                Some("the node-daemon restarts; the workspace goes on: try again in a moment".to_owned())
            }
        }
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

    async fn log(
        &self,
        request: &v1::LogRequest,
        to_operator: &mpsc::Sender<v1::StreamFromNode>,
        from_operator: &mut Streaming<v1::StreamToNode>,
    ) -> Result<(), StreamError> {
        let mut chunks = self.node.instances.log(request)?;
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
            () = pump_input(from_operator, None, false, to_operator) => {}
        }
        Ok(())
    }
}

/// Moves bytes both ways until the stream has ended or the operator is gone, which drops it.
async fn carry(
    stream: ExecStream,
    has_stdin: bool,
    to_operator: &mpsc::Sender<v1::StreamFromNode>,
    from_operator: &mut Streaming<v1::StreamToNode>,
) -> Result<(), StreamError> {
    let ExecStream { input, output } = stream;
    tokio::select! {
        result = pump_output(output, to_operator) => result,
        () = pump_input(from_operator, Some(input), has_stdin, to_operator) => Ok(()),
    }
}

/// The same for a transfer, which may be stopped in the middle.
async fn carry_transfer(
    transfer: Transfer,
    has_stdin: bool,
    to_operator: &mpsc::Sender<v1::StreamFromNode>,
    from_operator: &mut Streaming<v1::StreamToNode>,
) -> Result<(), StreamError> {
    let Transfer { stream, stop } = transfer;
    tokio::select! {
        // What has ended is not said to be stopped.
        biased;
        carried = carry(stream, has_stdin, to_operator, from_operator) => carried,
        () = stop.cancelled() => Err(transfers::stopped()),
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
            ExecOutput::StdoutClosed => Frame::StdoutClosed(true),
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
async fn pump_input(
    from_operator: &mut Streaming<v1::StreamToNode>,
    mut input: Option<mpsc::Sender<ExecInput>>,
    has_stdin: bool,
    to_operator: &mpsc::Sender<v1::StreamFromNode>,
) {
    loop {
        match from_operator.message().await {
            Err(_) => return,
            Ok(None) => break,
            Ok(Some(message)) => {
                if let Some(heard) = heard(message, has_stdin)
                    && let Some(open) = &input
                    && open.send(heard).await.is_err()
                {
                    // The process does not read any more; what comes is dropped, as a pipe would.
                    input = None;
                }
            }
        }
    }
    drop(input);
    to_operator.closed().await;
}

fn heard(message: v1::StreamToNode, has_stdin: bool) -> Option<ExecInput> {
    match message.frame? {
        FrameToNode::Stdin(data) => (has_stdin && !data.is_empty()).then(|| ExecInput::Data(data)),
        FrameToNode::StdinClosed(closed) => (has_stdin && closed).then_some(ExecInput::Close),
        FrameToNode::Resize(v1::Resize { columns, rows }) => Some(ExecInput::Resize { columns, rows }),
        FrameToNode::Signal(number) => Some(ExecInput::Signal(number)),
    }
}

async fn until_closed(from_operator: &mut Streaming<v1::StreamToNode>) {
    while let Ok(Some(_)) = from_operator.message().await {}
}
