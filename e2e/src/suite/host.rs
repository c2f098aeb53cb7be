//! A host that speaks the control session by hand: for what a well-behaved daemon never does.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::Node;
use kibo_crds::node::{Enrollment, NodeSpec};
use kibo_protocol::v1::node_control_client::NodeControlClient;
use kibo_protocol::v1::{self, FromNode, ToNode, from_node, to_node};
use kibo_protocol::{NodeKey, Secret};
use kube::api::{Api, PostParams};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Status, Streaming};

use super::{Place, secrets};
use crate::local::NAMESPACE;

/// How long an answer of the operator may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

const HEARTBEAT: Duration = Duration::from_millis(500);

/// An enrolled host.
#[derive(Clone)]
pub struct Host {
    pub client: NodeControlClient<Channel>,
    pub id: String,
    pub key: NodeKey,
    pub boot_id: String,
    pub pools: Vec<v1::Pool>,
}

/// One control session, after its Hello was answered. As long as it is there it says that the node lives, and what its
/// clock shows.
pub struct Session {
    pub ack: v1::HelloAck,
    pub term: u64,
    outbound: mpsc::Sender<FromNode>,
    inbound: mpsc::UnboundedReceiver<Result<Option<ToNode>, Status>>,
    life: AbortOnDropHandle<()>,
}

/// Registers a node with a token for `secret`.
pub async fn issue(place: &Place, id: &str, secret: &Secret, valid: Duration) -> Result<Node> {
    let expires_at = Time(jiff::Timestamp::now() + jiff::SignedDuration::try_from(valid)?);
    let enrollment = Enrollment { secret_hash: secret.hash().to_string(), expires_at, request_id: None };
    let node = Node::new(id, NodeSpec { enrollment: Some(enrollment), ..NodeSpec::default() });
    Ok(place.all::<Node>().create(&PostParams::default(), &node).await?)
}

/// A connection to the operator's session port.
pub async fn dial(place: &Place) -> Result<NodeControlClient<Channel>> {
    dial_port(place, place.cluster().ports().session).await
}

/// The same to another replica.
pub async fn dial_port(place: &Place, port: u16) -> Result<NodeControlClient<Channel>> {
    let maps: Api<ConfigMap> = Api::namespaced(place.client(), NAMESPACE);
    let ca = maps.get("kibotos-ca").await?.data.unwrap_or_default().remove("ca.crt").context("no ca.crt")?;
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).domain_name("localhost");
    let endpoint = Endpoint::from_shared(format!("https://127.0.0.1:{port}"))?.tls_config(tls)?;
    Ok(NodeControlClient::new(endpoint.connect().await?))
}

impl Host {
    /// A new node, enrolled.
    pub async fn enroll(place: &Place, id: &str) -> Result<Self> {
        let secret = secrets::generate()?;
        issue(place, id, &secret, Duration::from_secs(60)).await?;
        let mut client = dial(place).await?;
        let request = v1::EnrollRequest {
            node_id: id.to_owned(),
            secret: secret.expose().to_vec(),
            version: "unreleased".to_owned(),
            service_account_token: String::new(),
        };
        let enrolled = client.enroll(request).await?.into_inner();
        secrets::remember(&enrolled.node_key);
        let key = NodeKey::from_bytes(&enrolled.node_key)?;
        Ok(Self { client, id: id.to_owned(), key, boot_id: "boot-1".to_owned(), pools: Vec::new() })
    }

    /// The same host after a restart of the operator, or with another replica.
    #[must_use]
    pub fn through(&self, client: NodeControlClient<Channel>) -> Self {
        Self { client, ..self.clone() }
    }

    pub fn hello(&self, incarnation: Option<u64>) -> v1::Hello {
        v1::Hello {
            node_id: self.id.clone(),
            node_key: self.key.expose().to_vec(),
            incarnation,
            boot_id: self.boot_id.clone(),
            version: "unreleased".to_owned(),
            capacity: Some(v1::Capacity { cpu_milli: Some(4000), memory_bytes: Some(4 << 30), max_instances: Some(8) }),
            pools: self.pools.clone(),
            ..v1::Hello::default()
        }
    }

    /// Opens a session; the inner error is the operator's refusal.
    pub async fn open(&self, incarnation: Option<u64>) -> Result<Result<Session, v1::SessionRefused>> {
        self.say(from_node::Message::Hello(self.hello(incarnation))).await
    }

    /// Opens a session that must be accepted.
    pub async fn session(&self, incarnation: Option<u64>) -> Result<Session> {
        match self.open(incarnation).await? {
            Ok(session) => Ok(session),
            Err(refused) => bail!("the session was refused: {:?}: {}", refused.reason(), refused.message),
        }
    }

    /// Begins a session with any message.
    pub async fn say(&self, first: from_node::Message) -> Result<Result<Session, v1::SessionRefused>> {
        let mut session = self.begin().await?;
        session.send(first).await?;
        let answer = session.receive().await?.context("the operator closed the session without a word")?;
        match answer {
            to_node::Message::HelloAck(ack) => Ok(Ok(Session { ack, ..session })),
            to_node::Message::Refused(refused) => Ok(Err(refused)),
            other => bail!("the first answer is {other:?}"),
        }
    }

    /// Begins a session and says nothing; gives back what the operator says by itself.
    pub async fn keep_silent(&self) -> Result<Option<to_node::Message>> {
        self.begin().await?.receive().await
    }

    /// A session in which nothing was said yet.
    pub async fn begin(&self) -> Result<Session> {
        let (outbound, messages) = mpsc::channel(16);
        let connection = self.client.clone().session(ReceiverStream::new(messages)).await?.into_inner();
        let (sender, inbound) = mpsc::unbounded_channel();
        let life = AbortOnDropHandle::new(tokio::spawn(live(connection, outbound.clone(), sender)));
        Ok(Session { ack: v1::HelloAck::default(), term: 0, outbound, inbound, life })
    }
}

/// What every daemon does by itself: answers probes of its clock, and lives.
async fn live(
    mut connection: Streaming<ToNode>,
    outbound: mpsc::Sender<FromNode>,
    inbound: mpsc::UnboundedSender<Result<Option<ToNode>, Status>>,
) {
    let mut beat: Option<tokio::time::Interval> = None;
    loop {
        let next_beat = async {
            match &mut beat {
                Some(beat) => drop(beat.tick().await),
                None => std::future::pending().await,
            }
        };
        let said = tokio::select! {
            () = next_beat => from_node::Message::Heartbeat(v1::Heartbeat {}),
            message = connection.message() => match message {
                Ok(Some(ToNode { message: Some(to_node::Message::ClockProbe(asked)), .. })) => {
                    from_node::Message::ClockReading(read_clock(asked.probe))
                }
                other => {
                    if matches!(&other, Ok(Some(ToNode { message: Some(to_node::Message::HelloAck(_)), .. }))) {
                        beat = Some(tokio::time::interval(HEARTBEAT));
                    }
                    let is_end = !matches!(other, Ok(Some(_)));
                    if inbound.send(other).is_err() || is_end {
                        return;
                    }
                    continue;
                }
            },
        };
        if outbound.send(FromNode { message: Some(said) }).await.is_err() {
            return;
        }
    }
}

fn read_clock(probe: u64) -> v1::ClockReading {
    let now = u64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or_default();
    v1::ClockReading { probe, received_unix_nanos: now, sent_unix_nanos: now, kernel_synchronized: Some(true) }
}

impl Session {
    /// The next message; `None` when the operator has closed the session.
    pub async fn receive(&mut self) -> Result<Option<to_node::Message>> {
        let message = timeout(ANSWER_LIMIT, self.inbound.recv()).await.context("the operator says nothing")?;
        match message.unwrap_or(Ok(None)) {
            Ok(Some(message)) => {
                self.term = message.term;
                Ok(message.message)
            }
            Ok(None) => Ok(None),
            // A connection that is gone has no other word for it.
            Err(status) if is_closed(&status) => Ok(None),
            Err(status) => Err(status.into()),
        }
    }

    pub async fn send(&self, message: from_node::Message) -> Result<()> {
        Ok(self.outbound.send(FromNode { message: Some(message) }).await?)
    }

    /// From now on nothing is said that the test does not say, and nothing is read; the connection stays open.
    pub fn fall_silent(&self) {
        self.life.abort();
    }

    /// Says that the settings are in use, as a daemon does.
    pub async fn confirm(&self, settings: &v1::Settings) -> Result<()> {
        self.send(from_node::Message::SettingsApplied(v1::SettingsApplied { revision: settings.revision })).await
    }

    /// Reports what a node without Instances reports.
    pub async fn report(&self, settings: &v1::Settings, pools: &[v1::Pool]) -> Result<()> {
        let report =
            v1::Report { settings_revision: settings.revision, pools: pools.to_vec(), ..v1::Report::default() };
        self.send(from_node::Message::Report(report)).await
    }

    pub fn settings(&self) -> v1::Settings {
        self.ack.settings.unwrap_or_default()
    }
}

fn is_closed(status: &Status) -> bool {
    matches!(status.code(), tonic::Code::Unavailable | tonic::Code::Cancelled | tonic::Code::Unknown)
}
