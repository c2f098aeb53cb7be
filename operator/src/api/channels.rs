//! A stream between its client's WebSocket and its node: exec, files and portforward alike.
//!
//! Nothing is kept beyond one message in each direction, so that who reads slowly stops the sender. At most a MiB
//! is in memory for one stream: a message from the client, a frame from the node, what HTTP/2 and TLS hold of them.

use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use futures::{
    FutureExt as _, SinkExt as _, StreamExt as _,
    future::BoxFuture,
    stream::{SplitSink, SplitStream},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Status, StatusCause};
use kibo_crds::{InstanceId, Workspace, workspace::WorkspacePhase};
use kube::Api;
use tokio::time::{Instant, interval_at, timeout};
use tokio_util::sync::CancellationToken;

use super::remote_command::{self, Channel, FromClient, Protocol};
use crate::streams::{Input, NodeStream, Output, OutputFrame};

/// A client that went away without a word is noticed when it does not take a sign of life. It is a pong that nobody
/// asked for: client-go gives up after a minute without one, and its own pings wait behind the input that a slow
/// command has not taken.
const SIGN_EVERY: Duration = Duration::from_secs(5);
/// How long a client may take to end its side after it was told how the stream ended.
const FAREWELL: Duration = Duration::from_secs(5);
/// The same when the leadership ends, since the Lease waits for it.
const HASTY_FAREWELL: Duration = Duration::from_secs(1);
/// Clients send pieces of 32 to 256 KiB.
pub const MAX_MESSAGE: usize = 512 * 1024;
/// To find out why a stream ended.
const LOOK: Duration = Duration::from_secs(2);

/// What of the protocol one kind of stream uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a channel of the protocol")]
pub struct Carries {
    pub input: bool,
    pub stdout: bool,
    pub stderr: bool,
    /// Window sizes mean something.
    pub terminal: bool,
    /// Signals do.
    pub signals: bool,
    /// A client that takes or gives nothing for so long is taken for gone, since others wait for what its stream holds.
    pub patience: Option<Duration>,
    /// What the client should do when the leader changes.
    pub when_leader_changes: &'static str,
}

/// What a stream is into, to say why it ended.
pub struct Place {
    pub workspaces: Api<Workspace>,
    pub name: String,
    pub instance: InstanceId,
}

/// Whoever has a say in how a stream ended.
pub trait Conclude: Send {
    /// What its client is told, from what is known so far.
    fn conclude(self, status: Status) -> impl Future<Output = Status> + Send;

    /// Ends it before its node does, with these words for its client.
    fn called_off(&self) -> BoxFuture<'static, String> {
        std::future::pending().boxed()
    }
}

impl Conclude for Place {
    async fn conclude(self, status: Status) -> Status {
        self.explain(status).await
    }
}

/// Passes everything on between client and guest until the stream has ended or one of the two is gone.
/// `stop` ends it early, since this process does not lead any more.
pub async fn serve(
    socket: WebSocket,
    protocol: Protocol,
    carries: Carries,
    stream: NodeStream,
    place: impl Conclude,
    stop: CancellationToken,
) {
    let (sink, mut source) = socket.split();
    let NodeStream { output, input } = stream;
    let mut client = ToClient { sink, protocol, carries };
    let called_off = place.called_off();
    let pass_on = async {
        let mut output = output;
        tokio::select! {
            end = client.pass_on(&mut output) => end,
            message = called_off => Some(remote_command::status_of_failure(&message)),
            () = stop.cancelled() => {
                let message = format!("the operator's leader changes: {}", carries.when_leader_changes);
                Some(remote_command::status_of_failure(&message))
            }
        }
    };
    let end = tokio::select! {
        end = pass_on => end,
        gone = take_input(&mut source, protocol, carries, &input) => match gone {
            Gone::Closed => None,
            Gone::Wrong(error) => {
                client.close(close_code::PROTOCOL, &error).await;
                None
            }
        },
    };
    let Some(status) = end else {
        tracing::debug!("the client of a stream went away");
        return;
    };
    let status = if stop.is_cancelled() { status } else { place.conclude(status).await };
    let farewell = async {
        client.finish(&status).await;
        // What a client still sends is read, or the connection would be reset under the status.
        while let Some(Ok(_)) = source.next().await {}
    };
    let _ = timeout(if stop.is_cancelled() { HASTY_FAREWELL } else { FAREWELL }, farewell).await;
}

impl Place {
    /// Adds to a failure that the Workspace stops or has stopped, which is mostly why.
    async fn explain(&self, mut status: Status) -> Status {
        if !remote_command::may_be_of_a_stop(&status) {
            return status;
        }
        let Ok(Ok(now)) = timeout(LOOK, self.workspaces.get_opt(&self.name)).await else { return status };
        if let Some(said) = self.what_happened(now.as_ref()) {
            let message = status.message.take().unwrap_or_default();
            status.message = Some(format!("{message}; {said}"));
            let cause = StatusCause { reason: Some("Workspace".to_owned()), message: Some(said), field: None };
            status.details.get_or_insert_default().causes.get_or_insert_default().push(cause);
        }
        status
    }

    /// None: it runs as it did.
    fn what_happened(&self, now: Option<&Workspace>) -> Option<String> {
        let name = &self.name;
        let Some(now) = now else { return Some(format!("Workspace {name:?} was deleted")) };
        let status = now.status.as_ref();
        let execution = status.and_then(|status| status.execution.as_ref());
        let phase = status.and_then(|status| status.phase);
        if execution.is_some_and(|execution| execution.instance_id == self.instance) {
            let phase = phase.filter(|phase| *phase != WorkspacePhase::Available);
            return phase.map(|phase| format!("Workspace {name:?} is {phase:?}"));
        }
        let phase = phase.map(|phase| format!(" and is {phase:?} now")).unwrap_or_default();
        Some(format!("Workspace {name:?} was stopped or failed{phase}"))
    }
}

/// The way to the client.
struct ToClient {
    sink: SplitSink<WebSocket, Message>,
    protocol: Protocol,
    carries: Carries,
}

impl ToClient {
    /// Sends what the guest says; the status at its end, or none when the client is gone.
    async fn pass_on(&mut self, output: &mut Output) -> Option<Status> {
        // Kubernetes says with an empty message that the stream is under way; some clients wait for it.
        let first = if self.carries.stdout {
            Channel::Stdout
        } else if self.carries.stderr {
            Channel::Stderr
        } else {
            Channel::Error
        };
        self.send(Message::Binary(remote_command::encode(first, &[]))).await?;
        let mut sign = interval_at(Instant::now() + SIGN_EVERY, SIGN_EVERY);
        loop {
            let frame = tokio::select! {
                frame = output.next() => frame,
                _ = sign.tick() => {
                    self.send(Message::Pong(axum::body::Bytes::new())).await?;
                    continue;
                }
            };
            match frame {
                Ok(Some(OutputFrame::Stdout(data))) if self.carries.stdout => {
                    self.output(Channel::Stdout, &data).await?;
                }
                Ok(Some(OutputFrame::Stderr(data))) if self.carries.stderr => {
                    self.output(Channel::Stderr, &data).await?;
                }
                Ok(Some(OutputFrame::StdoutClosed)) if self.carries.stdout => {
                    if let Some(closed) = remote_command::encode_closed(self.protocol, Channel::Stdout) {
                        self.send(Message::Binary(closed)).await?;
                    }
                }
                Ok(Some(OutputFrame::Stdout(_) | OutputFrame::Stderr(_) | OutputFrame::StdoutClosed)) => {}
                Ok(Some(OutputFrame::Exit(exit))) => return Some(remote_command::status_of_exit(exit)),
                Ok(None) => {
                    let message = format!("node {} ended the stream without saying how it ended", output.node());
                    return Some(remote_command::status_of_failure(&message));
                }
                Err(lost) => return Some(remote_command::status_of_lost(&lost)),
            }
        }
    }

    async fn output(&mut self, channel: Channel, data: &[u8]) -> Option<()> {
        if data.is_empty() {
            return Some(());
        }
        self.send(Message::Binary(remote_command::encode(channel, data))).await
    }

    async fn finish(&mut self, status: &Status) {
        if self.send(Message::Binary(remote_command::encode_status(status))).await.is_some() {
            self.close(close_code::NORMAL, "").await;
        }
    }

    async fn close(&mut self, code: u16, reason: &str) {
        let frame = CloseFrame { code, reason: reason.into() };
        // The client may be gone already.
        let _ = self.send(Message::Close(Some(frame))).await;
    }

    /// Waits until the client has taken the message; none: it is gone.
    async fn send(&mut self, message: Message) -> Option<()> {
        let sent = self.sink.send(message);
        match self.carries.patience {
            Some(patience) => timeout(patience, sent).await.ok()?.ok(),
            None => sent.await.ok(),
        }
    }
}

/// Why no more input comes.
enum Gone {
    Closed,
    Wrong(String),
}

/// Takes the client's messages until it is gone. Also while no input is wanted, or not any more, they are looked
/// at, since pings and the end of the connection come among them.
async fn take_input(source: &mut SplitStream<WebSocket>, protocol: Protocol, carries: Carries, input: &Input) -> Gone {
    let mut open = carries.input;
    loop {
        let message = match carries.patience.filter(|_| open) {
            Some(patience) => timeout(patience, source.next()).await.unwrap_or(None),
            None => source.next().await,
        };
        let message = match message {
            None | Some(Err(_) | Ok(Message::Close(_))) => return Gone::Closed,
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => continue,
            Some(Ok(Message::Text(_))) => return Gone::Wrong(remote_command::ProtocolError::Text.to_string()),
            Some(Ok(Message::Binary(data))) => data,
        };
        // A node that listens no more has sent, or is about to send, how the stream ended.
        match remote_command::decode(protocol, &message) {
            Err(error) => return Gone::Wrong(error.to_string()),
            Ok(FromClient::Stdin(data)) if open => open = input.write(data).await,
            Ok(FromClient::StdinClosed) if open => {
                input.close().await;
                open = false;
            }
            Ok(FromClient::Resize(size)) if carries.terminal => {
                input.resize(size.columns, size.rows).await;
            }
            Ok(FromClient::Signal(signal)) if carries.signals => {
                input.signal(signal).await;
            }
            Ok(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        net::SocketAddr,
        sync::{Arc, Mutex},
    };

    use axum::{Router, extract::WebSocketUpgrade, routing::any};
    use futures::stream;
    use kibo_crds::Incarnation;
    use kibo_protocol::v1::{self, stream_from_node::Frame};
    use kube::Client;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
        sync::mpsc,
    };

    use super::*;
    use crate::{
        session::Registry,
        streams::{Close, Dialled},
    };

    struct Nobody;

    impl Conclude for Nobody {
        async fn conclude(self, status: Status) -> Status {
            status
        }
    }

    /// A node that sends as much as is taken.
    fn endless() -> NodeStream {
        let frame = || Ok(v1::StreamFromNode { frame: Some(Frame::Stdout(vec![7; 64 << 10].into())) });
        let dialled = Dialled { from_node: stream::repeat_with(frame).boxed(), to_node: mpsc::channel(1).0 };
        let node = "node-1".parse().unwrap();
        let (sessions, id) = (Registry::default(), "stream".to_owned());
        NodeStream::new(dialled, Close { sessions, node, incarnation: Incarnation(1), id })
    }

    /// Serves it at this address; says when it is over with a client.
    async fn served(patience: Duration) -> (SocketAddr, mpsc::UnboundedReceiver<Infallible>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (serving, is_served) = mpsc::unbounded_channel();
        let serving = Arc::new(Mutex::new(Some(serving)));
        let one = move |upgrade: WebSocketUpgrade| {
            let serving = serving.lock().unwrap().take();
            let carries = Carries { stdout: true, patience: Some(patience), ..Carries::default() };
            async move {
                upgrade.on_upgrade(move |socket| async move {
                    serve(socket, Protocol::V5, carries, endless(), Nobody, CancellationToken::new()).await;
                    drop(serving);
                })
            }
        };
        tokio::spawn(async move { axum::serve(listener, Router::new().route("/", any(one))).await });
        (address, is_served)
    }

    async fn client(address: SocketAddr) -> TcpStream {
        let mut client = TcpStream::connect(address).await.unwrap();
        let request = "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                       Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
        client.write_all(request.as_bytes()).await.unwrap();
        client
    }

    #[tokio::test]
    async fn a_client_that_takes_nothing_is_taken_for_gone() {
        let (address, mut is_served) = served(Duration::from_secs(1)).await;
        let client = client(address).await;
        let over = timeout(Duration::from_secs(60), is_served.recv()).await.expect("it is given up");
        assert!(over.is_none());
        drop(client);
    }

    #[tokio::test]
    async fn a_client_that_takes_little_is_served_as_long_as_it_likes_and_its_end_is_seen_at_once() {
        let patience = Duration::from_secs(3);
        let (address, mut is_served) = served(patience).await;
        let mut client = client(address).await;
        let begun = Instant::now();
        let mut pace = tokio::time::interval(Duration::from_millis(50));
        let mut piece = vec![0; 256 << 10];
        while begun.elapsed() < 2 * patience {
            pace.tick().await;
            assert_ne!(client.read(&mut piece).await.unwrap(), 0, "given up after {:?}", begun.elapsed());
        }
        assert!(is_served.try_recv().is_err_and(|error| error == mpsc::error::TryRecvError::Empty), "it goes on");
        drop(client);
        let over = timeout(Duration::from_secs(60), is_served.recv()).await.expect("it is over");
        assert!(over.is_none());
    }

    #[tokio::test]
    async fn a_stream_says_what_became_of_its_workspace() {
        let client = Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let instance = InstanceId::generate();
        let place = Place { workspaces: Api::namespaced(client, "team"), name: "dev".to_owned(), instance };
        let workspace = |phase: &str, instance: Option<InstanceId>| -> Workspace {
            let execution = instance.map(|instance| {
                serde_json::json!({
                    "instanceId": instance, "node": "n", "incarnation": 1, "cpuMilli": 1, "memoryBytes": 1,
                    "lastSeq": 0, "startedAt": "2026-01-01T00:00:00Z",
                })
            });
            serde_json::from_value(serde_json::json!({
                "apiVersion": "kibotos.dev/v1alpha1", "kind": "Workspace", "metadata": { "name": "dev" },
                "spec": { "template": "t" }, "status": { "phase": phase, "execution": execution },
            }))
            .unwrap()
        };
        let said = |now: Option<Workspace>| place.what_happened(now.as_ref()).unwrap_or_default();
        assert_eq!(said(Some(workspace("Available", Some(instance)))), "");
        assert!(said(Some(workspace("Stopping", Some(instance)))).contains("is Stopping"));
        assert!(said(Some(workspace("Stopped", None))).contains("is Stopped now"));
        assert!(said(Some(workspace("Available", Some(InstanceId::generate())))).contains("was stopped"));
        assert!(said(None).contains("deleted"));
    }
}
