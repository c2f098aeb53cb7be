//! The live sessions of this leader. They exist in memory only: a node's connection ends in one process,
//! so that process is the only one that can reach it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use kibo_crds::{Bytes, Incarnation, NodeId, PoolId};
use kibo_protocol::v1::{self, to_node};
use tokio::sync::watch;

use crate::node::{InstanceUsage, Refused};

use super::{
    live::{Capacity, DeclaredPool, LastReport, OfferAnswer, Session, Settings},
    questions::{Questions, Unanswered},
};

/// A node answers an offer from memory; much longer than that means that it is stuck.
const OFFER_TIMEOUT: Duration = Duration::from_secs(3);
/// Commands on objects touch the disk, and a deletion may free much of it.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// A look at one small file; longer than that means that the pool hangs.
const LOOK_TIMEOUT: Duration = Duration::from_secs(3);

/// What placement sees of a node with a live session. A value, so that a tick may charge its own copy.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSnapshot {
    pub id: NodeId,
    pub incarnation: Incarnation,
    pub session_id: String,
    pub labels: BTreeMap<String, String>,
    /// As reported; what could not be measured is absent and no constraint.
    pub capacity: Capacity,
    /// Drain, slots and ratios in force.
    pub settings: Settings,
    /// The node has confirmed that its admission uses `settings`.
    pub settings_confirmed: bool,
    /// The HelloAck with the desired set was sent.
    pub desired_sent: bool,
    /// Whether it is the pool that the cluster means, [`crate::storage_pool::PoolIndex::has_marker`] tells.
    pub pools: Vec<DeclaredPool>,
    pub last_assigned: Option<Instant>,
    /// Whether the node's clock is out of bounds; absent before its first measurement in this session.
    pub clock_over: Option<bool>,
    /// The node said that its host is short of memory.
    pub memory_tight: bool,
}

impl NodeSnapshot {
    /// How many Instances may run here at once; absent: no limit.
    pub fn slots(&self) -> Option<u32> {
        self.settings.slots.or(self.capacity.max_instances)
    }

    /// Whether everything is known that placement goes by.
    pub fn is_settled(&self) -> bool {
        self.desired_sent && self.settings_confirmed && self.clock_over.is_some()
    }

    /// Capacity times ratio.
    pub fn schedulable_cpu(&self) -> Option<kibo_crds::MilliCpu> {
        self.capacity.cpu.map(|cpu| self.settings.cpu.of_cpu(cpu))
    }

    /// Capacity times ratio.
    pub fn schedulable_memory(&self) -> Option<Bytes> {
        self.capacity.memory.map(|memory| self.settings.memory.of_memory(memory))
    }
}

/// A node has reserved what an offer names, for 5 s of its own clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// The incarnation that the execution and the holders must name.
    pub incarnation: Incarnation,
    pub session_id: String,
}

/// An offer did not lead to a reservation. Nothing is left on the node, or its Revoke is on the way.
#[derive(Debug, thiserror::Error)]
pub enum OfferFailure {
    #[error("the node refused: {message}")]
    Refused { reason: v1::RefuseReason, message: String },
    #[error("node {0} has no control session")]
    NoSession(NodeId),
    #[error("the control session of node {0} ended before it answered the offer")]
    SessionLost(NodeId),
    #[error("node {0} did not answer the offer in time")]
    Timeout(NodeId),
}

/// There is no session in that incarnation to send on.
#[derive(Debug, thiserror::Error)]
#[error("node {0} has no control session")]
pub struct NoSession(pub NodeId);

/// A command on an object of a pool; the node answers with an ObjectResult.
#[derive(Clone, Debug, PartialEq)]
pub enum ObjectCommand {
    Delete(v1::DeleteObject),
    ConfirmNotTaken(v1::ConfirmNotTaken),
    RemoveUnowned(v1::RemoveUnowned),
    Discard(v1::DiscardCopy),
}

/// Nothing is known of the command's effect; it is idempotent, so send it again later.
#[derive(Debug, thiserror::Error)]
pub enum CommandFailure {
    #[error(transparent)]
    NoSession(#[from] NoSession),
    #[error("the control session of node {0} ended before it answered")]
    SessionLost(NodeId),
    #[error("node {0} did not answer in time")]
    Timeout(NodeId),
}

/// A host says Hello again when it hears nothing; more than these at once are not its own doing.
const HELLOS_OF_A_NODE: usize = 4;
/// A refusal is shown in the Node's conditions for this long; a refused node tries again before that.
const REFUSAL_SHOWN: Duration = Duration::from_secs(120);

#[derive(Clone)]
pub struct Registry(Arc<Inner>);

struct Inner {
    sessions: Mutex<HashMap<NodeId, Arc<Session>>>,
    /// One Hello of a node is decided at a time.
    opening: Mutex<HashMap<NodeId, Arc<tokio::sync::Mutex<()>>>>,
    /// Why the newest Hello with a right key was refused.
    refusals: Mutex<HashMap<NodeId, (Refused, Instant)>>,
    /// Events of each node that are being taken in, of its sessions that are over too.
    in_work: Mutex<HashMap<NodeId, u32>>,
    changes: watch::Sender<u64>,
    moves: watch::Sender<u64>,
}

impl Default for Registry {
    fn default() -> Self {
        Self(Arc::new(Inner {
            sessions: Mutex::default(),
            opening: Mutex::default(),
            refusals: Mutex::default(),
            in_work: Mutex::default(),
            changes: watch::channel(0).0,
            moves: watch::channel(0).0,
        }))
    }
}

impl Registry {
    fn sessions(&self) -> MutexGuard<'_, HashMap<NodeId, Arc<Session>>> {
        self.0.sessions.lock().expect("no holder of this lock panics")
    }

    /// All nodes with a live session, candidates or not.
    pub fn snapshot(&self) -> Vec<NodeSnapshot> {
        let sessions: Vec<_> = self.sessions().values().cloned().collect();
        sessions.iter().map(|session| snapshot_of(session)).collect()
    }

    /// A pool as all nodes with a live session say that declare it.
    pub fn declared(&self, pool: &PoolId) -> Vec<DeclaredPool> {
        let sessions: Vec<_> = self.sessions().values().cloned().collect();
        let declared = |session: &Arc<Session>| session.state().pools.iter().find(|it| it.id == *pool).cloned();
        sessions.iter().filter_map(declared).collect()
    }

    pub fn snapshot_of(&self, node: &NodeId) -> Option<NodeSnapshot> {
        self.get(node).map(|session| snapshot_of(&session))
    }

    /// What the Instances of a node used when it reported last.
    pub fn usages_of(&self, node: &NodeId) -> Vec<InstanceUsage> {
        self.get(node).map(|session| session.usages()).unwrap_or_default()
    }

    /// Moves when a session came or went, or when what a node can take changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// Moves when a session came, was acknowledged or went, or reaches other pools: much less often.
    pub fn moves(&self) -> watch::Receiver<u64> {
        self.0.moves.subscribe()
    }

    /// Asks a node to reserve. When this ends without an acceptance that its caller saw, the reservation is
    /// revoked.
    pub async fn offer(&self, node: &NodeId, offer: v1::Offer) -> Result<Accepted, OfferFailure> {
        let session = self.get(node).ok_or_else(|| OfferFailure::NoSession(node.clone()))?;
        let mut pending = PendingOffer { session: &session, offer_id: offer.offer_id.clone(), settled: false };
        let mut asked = session.offers.expect(&offer.offer_id);
        if !session.send(to_node::Message::Offer(offer)) {
            pending.settled = true;
            return Err(OfferFailure::SessionLost(node.clone()));
        }
        kibo_failpoint::reach("offer-sent").await;
        match asked.answered(OFFER_TIMEOUT).await {
            Err(Unanswered::Late) => Err(OfferFailure::Timeout(node.clone())),
            Err(Unanswered::SessionLost) => Err(OfferFailure::SessionLost(node.clone())),
            Ok(OfferAnswer::Refused { reason, message }) => {
                pending.settled = true;
                Err(OfferFailure::Refused { reason, message })
            }
            Ok(OfferAnswer::Accepted) => {
                pending.settled = true;
                session.state().last_assigned = Some(Instant::now());
                Ok(Accepted { incarnation: session.incarnation, session_id: session.id.clone() })
            }
        }
    }

    /// Queues a message for the node, if its session has this incarnation. Queued is not received: what must
    /// not be lost is in the desired set of the next session.
    pub fn send(&self, node: &NodeId, incarnation: Incarnation, message: to_node::Message) -> Result<(), NoSession> {
        let session = self.get_in(node, incarnation)?;
        if session.send(message) { Ok(()) } else { Err(NoSession(node.clone())) }
    }

    pub async fn object_command(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        command: ObjectCommand,
    ) -> Result<v1::ObjectResult, CommandFailure> {
        let session = self.get_in(node, incarnation)?;
        let (id, message) = match command {
            ObjectCommand::Delete(delete) => (delete.command_id.clone(), to_node::Message::DeleteObject(delete)),
            ObjectCommand::ConfirmNotTaken(confirm) => {
                (confirm.command_id.clone(), to_node::Message::ConfirmNotTaken(confirm))
            }
            ObjectCommand::RemoveUnowned(remove) => {
                (remove.command_id.clone(), to_node::Message::RemoveUnowned(remove))
            }
            ObjectCommand::Discard(discard) => (discard.command_id.clone(), to_node::Message::DiscardCopy(discard)),
        };
        ask(&session, &session.commands, &id, message, COMMAND_TIMEOUT).await
    }

    /// What a member of a pool sees of another node's fence file there, read afresh.
    pub async fn look_at_fence(
        &self,
        member: &NodeId,
        pool: &PoolId,
        of: &NodeId,
    ) -> Result<Option<v1::fence_seen::Result>, CommandFailure> {
        let session = self.get(member).ok_or_else(|| NoSession(member.clone()))?;
        let look_id = ulid::Ulid::new().to_string();
        let look = v1::LookAtFence { look_id: look_id.clone(), pool: pool.to_string(), node_id: of.to_string() };
        let seen = ask(&session, &session.looks, &look_id, to_node::Message::LookAtFence(look), LOOK_TIMEOUT).await;
        seen.map(|seen| seen.result)
    }

    /// A page of what a member finds in a pool, in the order of the names, after one of them.
    pub async fn list_pool(
        &self,
        member: &NodeId,
        incarnation: Incarnation,
        pool: &PoolId,
        after: &str,
        limit: u32,
    ) -> Result<v1::PoolListing, CommandFailure> {
        let session = self.get_in(member, incarnation)?;
        let list_id = ulid::Ulid::new().to_string();
        let list = v1::ListPool { list_id: list_id.clone(), pool: pool.to_string(), after: after.to_owned(), limit };
        ask(&session, &session.listings, &list_id, to_node::Message::ListPool(list), COMMAND_TIMEOUT).await
    }

    pub(crate) fn get(&self, node: &NodeId) -> Option<Arc<Session>> {
        self.sessions().get(node).cloned()
    }

    /// Whether the session of this node, or of any node, is younger than `age`.
    pub fn has_opened_within(&self, age: Duration, node: Option<&NodeId>) -> bool {
        let is_young = |session: &Arc<Session>| session.opened_at.elapsed() < age;
        match node {
            Some(node) => self.get(node).is_some_and(|session| is_young(&session)),
            None => self.sessions().values().any(is_young),
        }
    }

    fn get_in(&self, node: &NodeId, incarnation: Incarnation) -> Result<Arc<Session>, NoSession> {
        self.get(node).filter(|session| session.incarnation == incarnation).ok_or_else(|| NoSession(node.clone()))
    }

    /// The lock under which a Hello of this node is decided and committed; `None` when many wait for it already.
    pub(crate) fn opening(&self, node: &NodeId) -> Option<Arc<tokio::sync::Mutex<()>>> {
        let mut opening = self.0.opening.lock().expect("no holder of this lock panics");
        opening.retain(|_, lock| Arc::strong_count(lock) > 1);
        let lock = opening.entry(node.clone()).or_default();
        (Arc::strong_count(lock) <= HELLOS_OF_A_NODE).then(|| lock.clone())
    }

    /// Whether a Hello of this node is being decided. Ask before [`Registry::get`]: a session that is committed
    /// and not yet entered is not an orphan.
    pub(crate) fn is_opening(&self, node: &NodeId) -> bool {
        let opening = self.0.opening.lock().expect("no holder of this lock panics");
        opening.get(node).is_some_and(|lock| lock.try_lock().is_err())
    }

    /// An event of the node is being taken in for as long as this is kept.
    pub(crate) fn take_in(&self, node: &NodeId) -> InWork {
        *self.in_work().entry(node.clone()).or_default() += 1;
        InWork { registry: self.clone(), node: node.clone() }
    }

    /// Events of the node that are being taken in.
    pub(crate) fn events_in_work(&self, node: &NodeId) -> u32 {
        self.in_work().get(node).copied().unwrap_or_default()
    }

    fn in_work(&self) -> MutexGuard<'_, HashMap<NodeId, u32>> {
        self.0.in_work.lock().expect("no holder of this lock panics")
    }

    pub(crate) fn note_refusal(&self, node: &NodeId, refused: Refused) {
        let mut refusals = self.0.refusals.lock().expect("no holder of this lock panics");
        refusals.retain(|_, (_, at)| at.elapsed() < REFUSAL_SHOWN);
        refusals.insert(node.clone(), (refused, Instant::now()));
    }

    /// The newest refusal, while it says something about now.
    pub(crate) fn refusal(&self, node: &NodeId) -> Option<Refused> {
        let refusals = self.0.refusals.lock().expect("no holder of this lock panics");
        refusals.get(node).filter(|(_, at)| at.elapsed() < REFUSAL_SHOWN).map(|(refused, _)| refused.clone())
    }

    pub(crate) fn insert(&self, session: Arc<Session>) {
        let replaced = self.sessions().insert(session.node.clone(), session);
        debug_assert!(replaced.is_none(), "the previous session leaves the registry first");
        if let Some(replaced) = replaced {
            replaced.close();
        }
        self.notify_move();
    }

    /// Takes the session out, if it is still the one of its node.
    pub(crate) fn remove(&self, session: &Session) -> bool {
        let mut sessions = self.sessions();
        let current = sessions.get(&session.node).is_some_and(|current| current.id == session.id);
        if current {
            sessions.remove(&session.node);
        }
        drop(sessions);
        if current {
            self.notify_move();
        }
        current
    }

    pub(crate) fn is_current(&self, session: &Session) -> bool {
        self.sessions().get(&session.node).is_some_and(|current| current.id == session.id)
    }

    /// Whether the session that accepted an offer still lives. Its node keeps the reservation and nothing else, so as
    /// long as nothing is committed the start may go elsewhere when it does not.
    pub fn lives(&self, node: &NodeId, accepted: &Accepted) -> bool {
        self.get(node).is_some_and(|session| session.id == accepted.session_id)
    }

    pub(crate) fn notify_move(&self) {
        self.0.moves.send_modify(|count| *count = count.wrapping_add(1));
        self.notify();
    }

    pub(crate) fn notify(&self) {
        self.0.changes.send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// An event that is being taken in.
pub struct InWork {
    registry: Registry,
    node: NodeId,
}

impl Drop for InWork {
    fn drop(&mut self) {
        let mut all = self.registry.in_work();
        if let Some(count) = all.get_mut(&self.node) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.node);
            }
        }
    }
}

/// Asks a node, and waits for its answer.
async fn ask<T>(
    session: &Session,
    questions: &Questions<T>,
    id: &str,
    message: to_node::Message,
    within: Duration,
) -> Result<T, CommandFailure> {
    let mut asked = questions.expect(id);
    if !session.send(message) {
        return Err(CommandFailure::SessionLost(session.node.clone()));
    }
    asked.answered(within).await.map_err(|why| match why {
        Unanswered::Late => CommandFailure::Timeout(session.node.clone()),
        Unanswered::SessionLost => CommandFailure::SessionLost(session.node.clone()),
    })
}

/// Takes an offer back whose answer nobody will see.
struct PendingOffer<'a> {
    session: &'a Session,
    offer_id: String,
    settled: bool,
}

impl Drop for PendingOffer<'_> {
    fn drop(&mut self) {
        if !self.settled {
            self.session.send(to_node::Message::Revoke(v1::Revoke { offer_id: self.offer_id.clone() }));
        }
    }
}

fn snapshot_of(session: &Session) -> NodeSnapshot {
    let state = session.state();
    NodeSnapshot {
        id: session.node.clone(),
        incarnation: session.incarnation,
        session_id: session.id.clone(),
        labels: state.labels.clone(),
        capacity: session.capacity,
        settings: state.settings.settings,
        settings_confirmed: state.settings.confirmed,
        desired_sent: state.acknowledged,
        pools: state.pools.clone(),
        last_assigned: state.last_assigned,
        clock_over: state.clock.current().map(|clock| clock.over),
        memory_tight: state.report.as_ref().is_some_and(LastReport::is_memory_tight),
    }
}
