//! The gRPC service that nodes dial. Every replica listens; only the leader opens sessions.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::Stream;
use kibo_protocol::v1::{
    self, FromNode, SessionRefusal, StreamFromNode, StreamToNode, ToNode, from_node,
    node_control_server::{NodeControl, NodeControlServer},
};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Identity, Server, ServerTlsConfig},
};
use tower::util::MapRequestLayer;

use super::{
    enroll,
    hello::Hello,
    inbound::one_line,
    open::{Leading, Refusal, shows_key},
    serve::{self, Wire},
    service_account::Policy,
    strangers::{Strangers, bound_first_message},
};
use crate::tls::Serving;

/// The first message of a session, and of a stream, comes within this time.
const FIRST_MESSAGE_WITHIN: Duration = Duration::from_secs(5);
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
/// A connection that is silent this long is asked for a sign of life, and closed without one. Longer than between two
/// heartbeats, so that a node that lives is not asked.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(6);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// After a change of leader everybody comes at once; the others wait in line.
const HELLOS_IN_FLIGHT: usize = 32;
/// Each asks the API server, for whoever comes: strangers must not take its time from the sessions.
const ENROLLMENTS_IN_FLIGHT: usize = 8;
/// Whoever would wait longer comes again: a host that has given up before its answer comes has lost its token.
const ENROLLMENT_WAITS: Duration = Duration::from_secs(5);
/// Whoever finds a replica that has just been elected waits here until it serves, rather than to knock again and again:
/// each time costs both sides a handshake, when the new leader has most to do. A node waits longer for its answer.
const ELECTED_SERVES_WITHIN: Duration = Duration::from_secs(15);
/// Calls of one connection at once: a daemon has its session there, and each stream on a connection of its own.
const CALLS_OF_A_CONNECTION: u32 = 32;
/// Messages between the queue of a session and its connection.
const WIRE: usize = 64;
/// An inventory lists everything that a node has in its pools.
const LARGEST_MESSAGE: usize = 16 << 20;
/// What a node may send ahead on one call, so that a stream is not slowed down by distance; a connection has
/// room for the session and for a stream whose reader pauses.
const STREAM_WINDOW: u32 = 512 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// A frame of a stream in one piece, not in four.
const HTTP2_FRAME: u32 = 128 << 10;

#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("failed to listen on {address} for --session-listen: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("failed to serve control sessions: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// What this replica is at the moment.
enum Turn {
    /// Another one leads, or none.
    Standby,
    /// Leads, and has to list everything before it serves.
    Elected,
    Leading(Arc<Leading>),
}

/// The service; cheap to clone.
#[derive(Clone)]
pub struct SessionServer {
    turn: Arc<watch::Sender<Turn>>,
    observed_term: Arc<AtomicU64>,
    strangers: Strangers,
    hellos: Arc<Semaphore>,
    enrollments: Arc<Semaphore>,
    in_cluster: Option<Arc<Policy>>,
}

impl SessionServer {
    /// A server that refuses everybody until [`SessionServer::lead`]. Without a policy hosts enroll by issued tokens
    /// alone.
    pub fn new(observed_term: Arc<AtomicU64>, in_cluster: Option<Policy>) -> Self {
        Self {
            turn: Arc::new(watch::Sender::new(Turn::Standby)),
            observed_term,
            strangers: Strangers::default(),
            hellos: Arc::new(Semaphore::new(HELLOS_IN_FLIGHT)),
            enrollments: Arc::new(Semaphore::new(ENROLLMENTS_IN_FLIGHT)),
            in_cluster: in_cluster.map(Arc::new),
        }
    }

    /// From now on those who come wait for [`SessionServer::lead`].
    pub fn elected(&self) {
        self.turn.send_replace(Turn::Elected);
    }

    /// From now on sessions are opened.
    pub fn lead(&self, leading: Arc<Leading>) {
        self.turn.send_replace(Turn::Leading(leading));
    }

    /// From now on they are refused again.
    pub fn resign(&self) {
        self.turn.send_replace(Turn::Standby);
    }

    /// Waits for a leadership that is about to begin; `None` when this replica does not lead.
    async fn leading(&self) -> Option<Arc<Leading>> {
        let mut turn = self.turn.subscribe();
        let settled = turn.wait_for(|turn| !matches!(turn, Turn::Elected));
        match &*tokio::time::timeout(ELECTED_SERVES_WITHIN, settled).await.ok()?.ok()? {
            Turn::Leading(leading) => Some(leading.clone()),
            Turn::Standby | Turn::Elected => None,
        }
    }

    async fn leading_or_unavailable(&self) -> Result<Arc<Leading>, Status> {
        self.leading().await.ok_or_else(|| Status::unavailable("this operator is not the leader: come back soon"))
    }

    /// Listens and serves until `stop`.
    pub async fn listen(
        self,
        address: SocketAddr,
        serving: &Serving,
        stop: CancellationToken,
    ) -> Result<impl Future<Output = Result<(), ServerError>> + use<>, ServerError> {
        let listener =
            tokio::net::TcpListener::bind(address).await.map_err(|source| ServerError::Listen { address, source })?;
        let identity = Identity::from_pem(&serving.chain_pem, &serving.key_pem);
        let tls = ServerTlsConfig::new().identity(identity).timeout(HANDSHAKE_WITHIN);
        let service = NodeControlServer::new(self).max_decoding_message_size(LARGEST_MESSAGE);
        let router = Server::builder()
            .layer(MapRequestLayer::new(bound_first_message))
            .tls_config(tls)?
            .max_concurrent_streams(CALLS_OF_A_CONNECTION)
            .tcp_nodelay(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(HTTP2_FRAME)
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .add_service(service);
        let incoming = TcpListenerStream::new(listener);
        Ok(async move { Ok(router.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await?) })
    }

    async fn run(self, peer: Option<SocketAddr>, mut inbound: Streaming<FromNode>, wire: Wire) {
        // Before anything of it is read: those who wait for a leader cost nothing.
        let leading = self.leading().await;
        let Some(listened) = self.strangers.listen(peer.map(|peer| peer.ip())).await else { return };
        let term = self.observed_term.load(Ordering::Relaxed);
        let first = tokio::time::timeout(FIRST_MESSAGE_WITHIN, inbound.message()).await;
        let hello = match first {
            Ok(Ok(Some(FromNode { message: Some(from_node::Message::Hello(hello)) }))) => hello,
            // Whoever opens a session and leaves has said nothing to answer.
            Ok(Ok(None)) => return,
            other => {
                let message = match other {
                    Ok(Err(status)) => format!("the first message cannot be read: {}", one_line(status.message())),
                    _ => "the first message of a session must be a hello, within 5 s".to_owned(),
                };
                tracing::warn!(?peer, message, "session refused");
                return serve::refuse(&wire, term, Refusal::new(SessionRefusal::InvalidHello, message)).await;
            }
        };
        let hello = match Hello::try_from(hello) {
            Ok(hello) => hello,
            Err(error) => {
                tracing::warn!(?peer, %error, "session refused");
                let refusal = Refusal::new(SessionRefusal::InvalidHello, error.to_string());
                return serve::refuse(&wire, term, refusal).await;
            }
        };
        let Some(leading) = leading else {
            let message = "this operator is not the leader: come back soon";
            let term = self.observed_term.load(Ordering::Relaxed);
            return serve::refuse(&wire, term, Refusal::new(SessionRefusal::NotLeader, message)).await;
        };
        // Tracked, so that at the end of the leadership each node still hears why.
        let tasks = leading.nodes.ctx.tasks.clone();
        let serve = async {
            if let Err(refusal) = shows_key(&leading, &hello).await {
                return serve::refuse_hello(&wire, leading.nodes.ctx.term.0, &hello, refusal).await;
            }
            drop(listened);
            Box::pin(serve::serve(leading, hello, inbound, wire, self.hellos.clone())).await;
        };
        Box::pin(tasks.track_future(serve)).await;
    }
}

type Outbound<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl NodeControl for SessionServer {
    async fn enroll(&self, request: Request<v1::EnrollRequest>) -> Result<Response<v1::EnrollResponse>, Status> {
        let permit = tokio::time::timeout(ENROLLMENT_WAITS, self.enrollments.acquire()).await;
        let _permit = permit.map_err(|_| Status::unavailable("many hosts enroll at this moment: come back soon"))?;
        let leading = self.leading_or_unavailable().await?;
        enroll::enroll(&leading, self.in_cluster.as_deref(), request.into_inner()).await.map(Response::new)
    }

    type SessionStream = Outbound<ToNode>;

    async fn session(&self, request: Request<Streaming<FromNode>>) -> Result<Response<Self::SessionStream>, Status> {
        let (wire, outbound) = mpsc::channel(WIRE);
        let peer = request.remote_addr();
        tokio::spawn(self.clone().run(peer, request.into_inner(), wire));
        Ok(Response::new(Box::pin(ReceiverStream::new(outbound))))
    }

    type AttachStream = Outbound<StreamToNode>;

    async fn attach(
        &self,
        request: Request<Streaming<StreamFromNode>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let leading = self.leading_or_unavailable().await?;
        let listened = self.strangers.listen(request.remote_addr().map(|peer| peer.ip())).await;
        let mut inbound = request.into_inner();
        let first = tokio::time::timeout(FIRST_MESSAGE_WITHIN, inbound.message()).await;
        let hello = match first {
            Ok(Ok(Some(StreamFromNode { frame: Some(v1::stream_from_node::Frame::Hello(hello)) }))) => hello,
            Ok(Err(status)) => return Err(status),
            Ok(Ok(_)) | Err(_) => {
                return Err(Status::invalid_argument("the first frame of a stream must be its hello, within 5 s"));
            }
        };
        let outbound = leading.streams.attach(hello, inbound).await?;
        drop(listened);
        Ok(Response::new(outbound))
    }
}
