//! What all sessions of this daemon share.

use std::{
    collections::{BTreeSet, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kibo_crds::{Incarnation, InstanceId, NodeId, PoolId};
use kibo_protocol::v1;

use super::{control::InstanceControl, moves::Moves, streams::OpenStreams, transfers::Transfers};
use crate::{
    admission::Admission,
    config::Config,
    host::Host,
    launch::{GrantedObject, Taker},
    pool::Pools,
    spool::EventSpool,
    state::{NodeState, StateDir, StateError},
};

/// So long an isolated node waits for its moves and transfers to stop.
const MOVES_LIMIT: Duration = Duration::from_secs(10);
/// A node ends a session for a new life no oftener: whoever can write to one of its pools could ask for that for ever, and
/// take the other ones with it.
pub const RENEWS_EVERY: Duration = Duration::from_secs(5 * 60);
/// Whatever an operator says.
const LONGEST_RETURN: Duration = Duration::from_secs(60);

/// The rooms that a node is made from.
pub struct NodeParts<I> {
    pub id: NodeId,
    /// The kernel's random id of this boot.
    pub boot_id: String,
    pub config: Arc<Config>,
    pub dir: StateDir,
    pub state: NodeState,
    pub pools: Arc<Pools>,
    pub spool: Arc<EventSpool>,
    pub host: Arc<Host>,
    pub instances: I,
}

pub struct Node<I> {
    pub(super) id: NodeId,
    pub(super) boot_id: String,
    pub(super) config: Arc<Config>,
    pub(super) dir: StateDir,
    pub(super) state: NodeState,
    pub(super) pools: Arc<Pools>,
    pub(super) spool: Arc<EventSpool>,
    pub(super) host: Arc<Host>,
    pub(super) admission: Admission,
    pub(super) instances: I,
    pub(super) streams: OpenStreams,
    pub(super) moves: Moves,
    pub(super) transfers: Arc<Transfers>,
    settling: Mutex<HashSet<InstanceId>>,
    pace: Mutex<Pace>,
    /// When a session ended last for a new life.
    renewed: Mutex<Option<Instant>>,
}

/// What the last session leaves for the time after it.
#[derive(Default)]
struct Pace {
    /// Over how long a time the fleet's return is spread, as the operator said.
    return_within: Duration,
    in_session: bool,
    /// It ended so that a new life can begin.
    renews: bool,
}

impl<I: InstanceControl> Node<I> {
    pub fn new(parts: NodeParts<I>) -> Self {
        let NodeParts { id, boot_id, config, dir, state, pools, spool, host, instances } = parts;
        let images = config.images.dir.clone();
        let admission = Admission::new(config.resources, images, Arc::clone(&pools), Arc::clone(&host));
        let (settling, pace, renewed) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (streams, moves, transfers) = (OpenStreams::default(), Moves::default(), Arc::default());
        Self {
            id,
            boot_id,
            config,
            dir,
            state,
            pools,
            spool,
            host,
            admission,
            instances,
            streams,
            moves,
            transfers,
            settling,
            pace,
            renewed,
        }
    }

    /// Marks an Instance whose grants are being closed; `false` when it is marked already.
    pub(super) fn begin_settling(&self, instance: InstanceId) -> bool {
        self.settling.lock().unwrap_or_else(PoisonError::into_inner).insert(instance)
    }

    pub(super) fn end_settling(&self, instance: InstanceId) {
        self.settling.lock().unwrap_or_else(PoisonError::into_inner).remove(&instance);
    }

    /// Whether this Instance ended here, or will, without being started again.
    pub(super) fn is_over(&self, instance: InstanceId) -> bool {
        self.spool.has_ended(instance)
            || self.settling.lock().unwrap_or_else(PoisonError::into_inner).contains(&instance)
    }

    pub(super) fn is_listed(&self, instance: InstanceId) -> bool {
        self.instances.list().iter().any(|summary| summary.id == instance)
    }

    /// Whether whoever took an object is at work on this host.
    pub(super) fn is_here(&self, granted: &GrantedObject, taker: &Taker) -> bool {
        let GrantedObject { object, grant } = granted;
        match taker.instance() {
            Some(instance) => self.is_listed(instance),
            None if taker.is_transfer() => self.transfers.is_running(&object.uid, grant.epoch, self.is_lost()),
            None => taker.is_move() && self.moves.holds(&object.uid, grant.epoch, &object.pool, self.is_lost()),
        }
    }

    /// The operator took this node, and said over how long a time its fleet is to return after the session.
    pub(super) fn enters_session(&self, return_within: Duration) {
        *self.pace() = Pace { return_within: return_within.min(LONGEST_RETURN), in_session: true, renews: false };
    }

    /// Whether there was a session since it was asked last.
    pub(super) fn leaves_session(&self) -> bool {
        std::mem::take(&mut self.pace().in_session)
    }

    pub(super) fn return_within(&self) -> Duration {
        self.pace().return_within
    }

    /// Ends the session for a new life. The next Hello names the one that ends: of an isolation that this node missed the
    /// operator tells it first, and then it begins with a new process.
    pub(super) fn renew(&self) {
        self.pace().renews = true;
        *self.renewed() = Some(Instant::now());
    }

    /// Whether the last time is long enough ago.
    pub(super) fn may_renew(&self) -> bool {
        self.renewed().is_none_or(|at| at.elapsed() >= RENEWS_EVERY)
    }

    fn renewed(&self) -> MutexGuard<'_, Option<Instant>> {
        self.renewed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn renews(&self) -> bool {
        self.pace().renews
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether something of this life goes on that is no Instance, or the end of one is not acknowledged.
    pub(super) fn is_busy(&self) -> bool {
        let works = self.moves.go_on(self.is_lost()) || self.transfers.go_on(self.is_lost());
        works || !self.spool.unacked().is_empty()
    }

    pub(super) fn is_lost(&self) -> impl Fn(&PoolId) -> bool + Copy {
        |pool| self.pools.is_lost(pool)
    }

    /// A pool says that this node's life is over, and nothing of it goes on here: it may as well begin another one, with
    /// which it can use that pool. In words, why.
    pub(super) fn may_begin_anew(&self) -> Option<String> {
        let (dead, lived) = (self.pools.own_mark()?, self.incarnation()?);
        let runs = self.instances.list().iter().any(|it| it.state != v1::InstanceState::Ended);
        (dead >= lived && !runs && !self.is_busy()).then(|| {
            format!("a storage pool says that this node is dead up to incarnation {dead}, and it lives {lived}: nothing runs here, and a new life begins")
        })
    }

    /// The life that this node leads since its last session.
    pub(super) fn incarnation(&self) -> Option<Incarnation> {
        self.state.get().life.map(|life| life.incarnation)
    }

    /// These pools were declared lost: that is remembered first, then nothing is written there any more, and what uses
    /// them is ended.
    pub(super) fn lose_pools(&self, ids: &[String]) -> Result<(), StateError> {
        let lost: BTreeSet<PoolId> = ids.iter().filter_map(|id| id.parse().ok()).collect();
        self.state.update(|record| record.lost_pools.extend(lost.iter().cloned()))?;
        self.pools.declare_lost(&lost);
        self.moves.look_again();
        self.transfers.look_again();
        for instance in self.instances.list() {
            if let Some(pool) = instance.pools.iter().find(|pool| lost.contains(pool)) {
                let reason = format!("one of its disks is in storage pool {pool}, which was declared lost");
                self.instances.tear_down(instance.id, &reason);
            }
        }
        Ok(())
    }

    /// An operator asserted that this node is dead, and others may use what it held: make it true.
    pub(super) async fn isolate(&self) {
        tracing::error!(incarnation = ?self.incarnation(), "this node was isolated: all its Instances are destroyed");
        let stopped =
            async { tokio::join!(self.moves.stop_all(self.is_lost()), self.transfers.stop_all(self.is_lost())) };
        let moves = tokio::time::timeout(MOVES_LIMIT, stopped).await;
        self.instances.destroy_all(v1::EndReason::Isolated, "this node was isolated").await;
        if moves.is_err() {
            // As with Instances below: the next daemon is refused with this life too, and has no moves.
            tracing::error!("a move or a transfer does not stop: see whether a pool hangs");
            return;
        }
        let left = self.instances.list().iter().filter(|it| it.state != v1::InstanceState::Ended).count();
        if left > 0 {
            // With this life the next daemon is refused again, and goes on destroying; without it, it would be taken for
            // one that runs nothing.
            tracing::error!(left, "Instances are left: the next daemon goes on with them");
            return;
        }
        if let Err(error) = self.state.update(|record| record.life = None) {
            tracing::error!(%error, "failed to forget the incarnation; the next session is refused again");
        }
        self.pools.live(None);
    }
}
