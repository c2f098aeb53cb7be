//! The operator's side of the protocol, played by a test over real TLS.

use std::{net::SocketAddr, pin::Pin, time::Duration};

use futures::Stream;
use kibo_protocol::{
    EnrollmentToken, NodeKey, Secret,
    v1::{self, from_node, node_control_server as server, stream_to_node, to_node},
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tokio::{net::TcpListener, sync::mpsc, time::timeout};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming, transport::Identity};

pub const CLUSTER: &str = "cluster-1";
pub const PATIENCE: Duration = Duration::from_secs(20);

type Outbound<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What the test's server has received.
#[derive(Clone)]
struct Service {
    key: NodeKey,
    secret: Secret,
    sessions: mpsc::Sender<Session>,
    streams: mpsc::Sender<Attached>,
}

/// A listening operator.
pub struct Operator {
    pub address: SocketAddr,
    pub ca_pem: String,
    pub token: EnrollmentToken,
    pub key: NodeKey,
    sessions: mpsc::Receiver<Session>,
    streams: mpsc::Receiver<Attached>,
}

/// One session that a node opened.
pub struct Session {
    inbound: Streaming<v1::FromNode>,
    outbound: mpsc::Sender<Result<v1::ToNode, Status>>,
}

/// A stream that a node dialled.
pub struct Attached {
    pub inbound: Streaming<v1::StreamFromNode>,
    outbound: mpsc::Sender<Result<v1::StreamToNode, Status>>,
}

#[tonic::async_trait]
impl server::NodeControl for Service {
    type SessionStream = Outbound<v1::ToNode>;
    type AttachStream = Outbound<v1::StreamToNode>;

    async fn enroll(&self, request: Request<v1::EnrollRequest>) -> Result<Response<v1::EnrollResponse>, Status> {
        if request.into_inner().secret != self.secret.expose() {
            return Err(Status::permission_denied("the token is not known"));
        }
        let node_key = self.key.expose().to_vec();
        Ok(Response::new(v1::EnrollResponse { node_key, cluster_id: CLUSTER.into() }))
    }

    async fn session(
        &self,
        request: Request<Streaming<v1::FromNode>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (outbound, messages) = mpsc::channel(64);
        let _ = self.sessions.send(Session { inbound: request.into_inner(), outbound }).await;
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }

    async fn attach(
        &self,
        request: Request<Streaming<v1::StreamFromNode>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let (outbound, messages) = mpsc::channel(64);
        let _ = self.streams.send(Attached { inbound: request.into_inner(), outbound }).await;
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }
}

impl Operator {
    pub async fn listen() -> Self {
        let ca_key = KeyPair::generate().unwrap();
        let mut ca = CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_certificate = ca.self_signed(&ca_key).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec!["127.0.0.1".into()])
            .unwrap()
            .signed_by(&key, &Issuer::new(ca, ca_key))
            .unwrap();
        let token = EnrollmentToken {
            node_id: "node-a".into(),
            secret: Secret::generate().unwrap(),
            ca_hash: EnrollmentToken::hash_of_ca(ca_certificate.der()),
        };
        let (sessions, opened) = mpsc::channel(8);
        let (streams, attached) = mpsc::channel(8);
        let node_key = NodeKey::generate().unwrap();
        let service = Service { key: node_key.clone(), secret: token.secret.clone(), sessions, streams };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let identity = Identity::from_pem(certificate.pem(), key.serialize_pem());
        let tls = tonic::transport::ServerTlsConfig::new().identity(identity);
        tokio::spawn(
            tonic::transport::Server::builder()
                .tls_config(tls)
                .unwrap()
                .add_service(server::NodeControlServer::new(service))
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        Self { address, ca_pem: ca_certificate.pem(), token, key: node_key, sessions: opened, streams: attached }
    }

    /// The next session, and the Hello that it began with.
    pub async fn session(&mut self) -> (Session, v1::Hello) {
        let mut session = timeout(PATIENCE, self.sessions.recv()).await.expect("a session comes").unwrap();
        match session.next().await {
            from_node::Message::Hello(hello) => (session, hello),
            other => panic!("not a hello: {other:?}"),
        }
    }

    /// The next session, accepted with this desired set.
    pub async fn accepted(&mut self, desired: Vec<v1::Desired>) -> Session {
        let (session, hello) = self.session().await;
        let incarnation = hello.incarnation.unwrap_or(1);
        session.send(1, ack(incarnation, desired)).await;
        session
    }

    pub async fn attached(&mut self) -> Attached {
        let mut stream = timeout(PATIENCE, self.streams.recv()).await.expect("a stream comes").unwrap();
        assert!(matches!(stream.next().await, Some(v1::stream_from_node::Frame::Hello(_))));
        stream
    }
}

pub fn ack(incarnation: u64, desired: Vec<v1::Desired>) -> to_node::Message {
    to_node::Message::HelloAck(v1::HelloAck {
        session_id: "s".into(),
        incarnation,
        cluster_id: CLUSTER.into(),
        revision: 1,
        settings: Some(settings(1)),
        desired,
        ..v1::HelloAck::default()
    })
}

pub fn settings(revision: u64) -> v1::Settings {
    v1::Settings { revision, cpu_ratio: 1000, memory_ratio: 1000, ..v1::Settings::default() }
}

impl Session {
    pub async fn send(&self, term: u64, message: to_node::Message) {
        let _ = self.outbound.send(Ok(v1::ToNode { term, message: Some(message) })).await;
    }

    pub async fn next(&mut self) -> from_node::Message {
        let message = timeout(PATIENCE, self.inbound.message()).await.expect("a message comes");
        message.unwrap().expect("the session goes on").message.unwrap()
    }

    /// The next message for which `pick` finds something; others are passed over.
    pub async fn find<T>(&mut self, pick: impl Fn(from_node::Message) -> Option<T>) -> T {
        loop {
            if let Some(found) = pick(self.next().await) {
                return found;
            }
        }
    }

    pub async fn event(&mut self) -> v1::InstanceEvent {
        let events = self.find(|message| match message {
            from_node::Message::Events(events) => Some(events.events),
            _ => None,
        });
        let mut events = events.await;
        assert_eq!(events.len(), 1, "{events:?}");
        events.remove(0)
    }

    /// Returns when the node has closed its side.
    pub async fn closed(&mut self) {
        while let Ok(Some(_)) = timeout(PATIENCE, self.inbound.message()).await.expect("the session ends") {}
    }
}

impl Attached {
    pub async fn next(&mut self) -> Option<v1::stream_from_node::Frame> {
        let message = timeout(PATIENCE, self.inbound.message()).await.expect("a frame comes");
        message.unwrap().map(|message| message.frame.unwrap())
    }

    pub async fn send(&self, frame: stream_to_node::Frame) {
        let _ = self.outbound.send(Ok(v1::StreamToNode { frame: Some(frame) })).await;
    }
}
