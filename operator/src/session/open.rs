//! Opens sessions: reads, decides, commits, and only then enters the session into the registry.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kibo_crds::{
    Incarnation, Node, NodeId,
    node::{AdoptionResult, NodeStatus, Quarantine, UnknownInstances},
};
use kibo_protocol::v1::{self, SessionRefusal};
use kube::{Api, api::ListParams};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::{
    hello::{Decision, Existing, Hello, Observed, decide, without_key},
    hooks::{DesiredSet, EventIngest, MoveIngest, StreamAcceptor},
    live::{NewSession, Session},
};
use crate::{
    evidence::Evidence,
    guarded::WriteError,
    node::{NodeControl, Refused, compute_status, effective_settings},
};

/// A host waits for it, and holds the place of others that come.
const READ_WITHIN: Duration = Duration::from_secs(10);
/// The status names so many of the Instances that belong to no known Workspace.
const UNKNOWN_LISTED: usize = 32;
/// Attempts to commit a session while others write the Node.
const ATTEMPTS: usize = 8;
/// Whether an isolation is carried out is decided sooner, and a host waits longer for the answer to its Hello.
const ISOLATION_DECIDED_WITHIN: Duration = Duration::from_secs(20);
const ISOLATION_LOOK: Duration = Duration::from_millis(100);

/// What the session server needs while this process leads.
pub struct Leading {
    pub nodes: Arc<NodeControl>,
    pub desired: Arc<dyn DesiredSet>,
    pub events: Arc<dyn EventIngest>,
    pub moves: Arc<dyn MoveIngest>,
    pub streams: Arc<dyn StreamAcceptor>,
}

/// Hellos that wait for the decision about an isolation; the others are told to come back.
static AWAIT_ISOLATION: Semaphore = Semaphore::const_new(8);

/// Nodes whose stored key is read for somebody who shows one that is not known.
static LOOK_UPS: Semaphore = Semaphore::const_new(8);

/// What comes of a Hello that is not refused.
pub enum Opening {
    /// The node is to be adopted: ask it what it has, and open again.
    TakeInventory,
    Opened(Box<Opened>),
}

/// A session, and the turn among the Hellos until it is acknowledged.
pub struct Opened {
    pub committed: Committed,
    pub turn: OwnedSemaphorePermit,
}

/// A committed session that is in the registry.
pub struct Committed {
    pub session: Arc<Session>,
    /// What is queued for the node.
    pub queue: mpsc::Receiver<v1::ToNode>,
    /// Revision of the control plane that this session's commit made at least.
    pub revision: u64,
    /// The quarantine that ends with this session; empty when there was none.
    pub adopts: String,
}

/// A session that does not come about, as the node is told.
#[derive(Clone, Debug)]
pub struct Refusal {
    pub reason: SessionRefusal,
    pub message: String,
}

impl Refusal {
    pub fn new(reason: SessionRefusal, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

/// A resourceVersion as the number that it is with etcd; `None` with a store that numbers otherwise.
pub fn revision_of(resource_version: Option<&str>) -> Option<u64> {
    resource_version?.parse().ok()
}

/// A quorum read of one Node, and the revision of the whole control plane at that moment. A list by name
/// costs the API server what a get costs, and its resourceVersion is that of the store.
pub async fn read_node(api: &Api<Node>, id: &NodeId) -> Result<(Option<Node>, Option<u64>), kube::Error> {
    let params = ListParams::default().fields(&format!("metadata.name={id}"));
    let list = tokio::time::timeout(READ_WITHIN, api.list(&params)).await;
    let list = list.map_err(|_| kube::Error::Service("the API server did not answer in time".into()))??;
    let revision = revision_of(list.metadata.resource_version.as_deref());
    Ok((list.items.into_iter().next(), revision))
}

/// Whether the host shows the key of its node, before it takes anything that others wait for. A key that is known costs
/// nothing; who shows another one waits for one of few reads.
pub async fn shows_key(leading: &Leading, hello: &Hello) -> Result<(), Refusal> {
    let ctx = &leading.nodes.ctx;
    if ctx.nodes.knows_key(&hello.node, &hello.key.hash()) {
        return Ok(());
    }
    // Nothing closes the semaphore.
    let _turn = LOOK_UPS.acquire().await;
    let (node, _) = read_node(&leading.nodes.api(), &hello.node).await.map_err(|error| unanswered(&error))?;
    kibo_failpoint::reach("key-looked-up").await;
    if let Some(node) = &node {
        ctx.nodes.observe(node);
    }
    match without_key(hello, node.as_ref()) {
        Some((reason, message)) => Err(refused(leading, hello, reason, message)),
        None => Ok(()),
    }
}

fn unanswered(error: &kube::Error) -> Refusal {
    Refusal::new(SessionRefusal::NotLeader, format!("the API server does not answer, try again: {error}"))
}

async fn turn_of(hellos: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Refusal> {
    let turn = hellos.clone().acquire_owned().await;
    turn.map_err(|_| Refusal::new(SessionRefusal::NotLeader, "this operator ends: come back soon"))
}

/// One Hello of a node at a time; everything in here is read after the Hello came.
pub async fn open(
    leading: &Leading,
    hellos: &Arc<Semaphore>,
    hello: &Hello,
    inventory: Option<&v1::Inventory>,
) -> Result<Opening, Refusal> {
    let ctx = &leading.nodes.ctx;
    let Some(lock) = ctx.registry.opening(&hello.node) else {
        return Err(Refusal::new(SessionRefusal::NotLeader, "this node says Hello many times at once: come back soon"));
    };
    let _one_at_a_time = lock.lock().await;
    // After the node's own lock: those who wait for each other take no turn of others.
    let mut turn = turn_of(hellos).await?;
    // Of all attempts together: what one has ended, the next finds ended.
    let mut ended = 0;
    let (mut attempts, begun) = (0..ATTEMPTS, Instant::now());
    let mut waits = None;
    while attempts.next().is_some() {
        if ctx.stop.is_cancelled() {
            return Err(Refusal::new(SessionRefusal::NotLeader, "this operator leads no more: come back soon"));
        }
        kibo_failpoint::reach("hello-received").await;
        let (node, revision) =
            read_node(&leading.nodes.api(), &hello.node).await.map_err(|error| unanswered(&error))?;
        let existing = ctx.registry.get(&hello.node);
        let decision = decide(
            hello,
            Observed {
                node: node.as_ref(),
                existing: existing.as_ref().map(|session| Existing {
                    boot_id: &session.boot_id,
                    home: &session.home,
                    incarnation: session.incarnation,
                }),
                cluster_id: &ctx.cluster_id,
                term: ctx.term,
                history: &ctx.history,
                inventoried: inventory.map(|inventory| Incarnation(inventory.highest_incarnation)),
                revision,
            },
        );
        let (incarnation, minted, adopts) = match decision {
            Decision::Refuse { reason, message } => return Err(refused(leading, hello, reason, message)),
            Decision::TakeInventory => return Ok(Opening::TakeInventory),
            Decision::AwaitIsolation => {
                // Few at a time, since each of them keeps another Hello waiting.
                waits = waits.or_else(|| AWAIT_ISOLATION.try_acquire().ok());
                if waits.is_none() || begun.elapsed() >= ISOLATION_DECIDED_WITHIN {
                    let message = "an isolation of this node is being decided: come back soon";
                    return Err(Refusal::new(SessionRefusal::NotLeader, message));
                }
                drop(turn);
                tokio::time::sleep(ISOLATION_LOOK).await;
                turn = turn_of(hellos).await?;
                attempts = 0..ATTEMPTS;
                continue;
            }
            Decision::Admit { incarnation, minted, adopts, .. } => (incarnation, minted, adopts),
        };
        kibo_failpoint::reach("hello-decided").await;
        let Some(node) = node else { continue };
        let adoption = match (adopts, inventory) {
            (Some(_), Some(inventory)) => {
                let adoption = adopt(leading, hello, &node, incarnation, inventory).await?;
                ended += adoption.ended;
                Some(AdoptionResult { ended, ..adoption })
            }
            _ => None,
        };
        if let Some(old) = existing {
            ctx.registry.remove(&old);
            old.end(SessionRefusal::Replaced, "a newer session of the same life took over");
            leading.streams.session_ended(&hello.node);
        }
        let admitted = Admitted { incarnation, minted, adoption };
        if let Some(committed) = commit(leading, hello, &node, revision, admitted).await? {
            return Ok(Opening::Opened(Box::new(Opened { committed, turn })));
        }
    }
    Err(Refusal::new(SessionRefusal::NotLeader, format!("Node {} changes too often, try again", hello.node)))
}

/// What the decision to admit says.
struct Admitted {
    incarnation: Incarnation,
    minted: bool,
    adoption: Option<AdoptionResult>,
}

/// Brings what the node proved to have into the Workspaces and Volumes. Idempotent, and before the session: when it
/// stops half-way the node is still in quarantine, and all of it is decided anew.
async fn adopt(
    leading: &Leading,
    hello: &Hello,
    node: &Node,
    incarnation: Incarnation,
    inventory: &v1::Inventory,
) -> Result<AdoptionResult, Refusal> {
    let back = |message: String| Refusal::new(SessionRefusal::ControlPlaneWentBack, message);
    let Some(ordered) = node.spec.adoption.clone() else { return Err(back("the adoption was taken back".into())) };
    let evidence = Evidence::read(&hello.node, incarnation, inventory)
        .map_err(|error| back(format!("what the node says that it has makes no sense: {error}")))?;
    let adopted = leading.desired.adopt(&evidence).await.map_err(|retry| {
        Refusal::new(SessionRefusal::NotLeader, format!("the adoption is not finished, try again: {retry}"))
    })?;
    tracing::warn!(
        node = %hello.node, quarantine = hello.quarantine, action = ?ordered.action, adopted = adopted.adopted,
        ended = adopted.ended, unknown = ?adopted.unknown, "the node was adopted"
    );
    Ok(AdoptionResult {
        quarantine: ordered.quarantine,
        incarnation,
        action: ordered.action,
        unknown: ordered.unknown,
        request_id: ordered.request_id,
        adopted: adopted.adopted,
        ended: adopted.ended,
        unknown_count: u32::try_from(adopted.unknown.len()).unwrap_or(u32::MAX),
        unknown_instances: adopted.unknown.into_iter().take(UNKNOWN_LISTED).collect(),
        finished_at: crate::clock::now(),
    })
}

/// Writes the session and enters it. `None`: somebody else wrote the Node first (an isolation, perhaps).
async fn commit(
    leading: &Leading,
    hello: &Hello,
    node: &Node,
    revision: Option<u64>,
    admitted: Admitted,
) -> Result<Option<Committed>, Refusal> {
    let ctx = &leading.nodes.ctx;
    let Admitted { incarnation, minted, adoption } = admitted;
    let adopts = adoption.as_ref().map(|adoption| adoption.quarantine.clone()).unwrap_or_default();
    let mut node = node.clone();
    let status = node.status.get_or_insert_default();
    status.incarnation = Some(incarnation);
    if adoption.is_some() {
        status.adoption = adoption;
    }
    let node = &node;
    let (session, queue) = Session::new(NewSession {
        id: ulid::Ulid::new().to_string().to_ascii_lowercase(),
        node: hello.node.clone(),
        incarnation,
        boot_id: hello.boot_id.clone(),
        home: hello.home.clone(),
        version: hello.version.clone(),
        source_revision: hello.source_revision.clone(),
        term: ctx.term,
        capacity: hello.capacity,
        labels: hello.labels.clone(),
        pools: hello.pools.clone(),
        settings: effective_settings(&node.spec, &ctx.overcommit.get()),
        settings_revision: revision.unwrap_or_default() + 1,
        spares_unknown: spares_unknown(node),
        history: ctx.history.clone(),
        clock_period: ctx.clock_period,
    });
    session.relabel(node.metadata.labels.as_ref());
    let status = status_with(leading, node, &session);
    let committed = match leading.nodes.write(&hello.node, node, status).await {
        Ok(committed) => committed,
        Err(WriteError::Conflict { .. } | WriteError::Gone { .. }) => return Ok(None),
        Err(error) => {
            tracing::error!(node = %hello.node, %error, "failed to commit a session");
            return Err(Refusal::new(SessionRefusal::NotLeader, format!("try again: {error}")));
        }
    };
    kibo_failpoint::reach("hello-committed").await;
    if minted {
        leading.desired.incarnation_began(&hello.node, incarnation).await;
    }
    let session = Arc::new(session);
    ctx.watchdog.heard(&hello.node);
    ctx.registry.insert(session.clone());
    kibo_failpoint::reach("hello-entered").await;
    ctx.nodes.touch(&hello.node);
    let committed_at = revision_of(committed.metadata.resource_version.as_deref());
    tracing::info!(node = %hello.node, session = session.id, %incarnation, minted, version = hello.version, "session opened");
    Ok(Some(Committed { session, queue, revision: committed_at.max(revision).unwrap_or_default(), adopts }))
}

/// Since an adoption of this life, that there is no Workspace proves nothing: it may be one that was made after the
/// backup. An admin may say that such Instances are to go.
pub fn spares_unknown(node: &Node) -> bool {
    let Some(status) = &node.status else { return false };
    status.adoption.as_ref().is_some_and(|adoption| {
        let ordered = node.spec.adoption.as_ref().filter(|ordered| ordered.quarantine == adoption.quarantine);
        let unknown = ordered.map_or(adoption.unknown, |ordered| ordered.unknown);
        Some(adoption.incarnation) == status.incarnation && unknown == UnknownInstances::Keep
    })
}

/// The status that the commit writes: this session is the node's.
fn status_with(leading: &Leading, node: &Node, session: &Session) -> NodeStatus {
    let observed = leading.nodes.observe(&session.node, node);
    compute_status(&crate::node::Observed { live: Some(session.view()), refused: None, orphaned: false, ..observed })
}

/// Who shows a wrong key is not the node, and writes nothing into its conditions.
fn refused(leading: &Leading, hello: &Hello, reason: SessionRefusal, message: String) -> Refusal {
    let shown = match reason {
        SessionRefusal::Duplicate => Some("DuplicateHost"),
        SessionRefusal::ControlPlaneWentBack => Some("ControlPlaneWentBack"),
        SessionRefusal::Isolated => Some("IncarnationEnded"),
        SessionRefusal::InvalidHello => Some("InvalidHello"),
        _ => None,
    };
    if let Some(shown) = shown {
        let ctx = &leading.nodes.ctx;
        let duplicate = reason == SessionRefusal::Duplicate;
        let quarantine = (reason == SessionRefusal::ControlPlaneWentBack).then(|| Quarantine {
            id: hello.quarantine.clone(),
            message: message.chars().take(1024).collect(),
            instances: u32::try_from(hello.instances.iter().filter(|it| !it.ended).count()).unwrap_or(u32::MAX),
            since: crate::clock::now(),
        });
        let refused = Refused { reason: shown, message: message.clone(), duplicate, quarantine };
        if !duplicate {
            ctx.watchdog.heard(&hello.node);
        }
        ctx.registry.note_refusal(&hello.node, refused);
        ctx.nodes.touch(&hello.node);
    }
    Refusal::new(reason, message)
}
