//! The moves that run on this node. A move outlives the session that ordered it; each new session asks for it again,
//! and hears from then on how it goes.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kibo_crds::{Epoch, ObjectUid, PoolId};
use kibo_protocol::v1::{self, from_node};
use tokio::sync::{Semaphore, SemaphorePermit, watch};

use super::{control::InstanceControl, node::Node, outbox::Outbox};
use crate::{
    launch::{GrantedObject, Taker},
    pool::{MoveError, Progress},
};

/// At once; the others wait, since they would only share the same disks. One needs 8 MiB of memory.
const AT_ONCE: usize = 8;
const TELL_EVERY: Duration = Duration::from_secs(1);
/// How soon one that waits hears that it is to stop.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// All moves of this node.
pub struct Moves {
    /// By their grants: one that hangs stays here beside the one that was ordered after it.
    running: Mutex<BTreeMap<(ObjectUid, Epoch), Running>>,
    slots: Semaphore,
    ended: watch::Sender<u64>,
}

struct Running {
    /// Where the object is.
    from: PoolId,
    to: PoolId,
    progress: Arc<Progress>,
    /// Of the newest session that asked.
    outbox: Outbox,
}

impl Running {
    /// With a pool that was declared lost it may hang for good. What it has begun to write it may write yet, to a copy of its
    /// own: what that becomes is looked at under the object's lock.
    fn goes_on(&self, is_lost: impl Fn(&PoolId) -> bool) -> bool {
        !is_lost(&self.from) && !is_lost(&self.to)
    }
}

impl Default for Moves {
    fn default() -> Self {
        Self { running: Mutex::default(), slots: Semaphore::new(AT_ONCE), ended: watch::Sender::new(0) }
    }
}

/// What a session orders.
pub struct Order {
    pub granted: GrantedObject,
    pub to: PoolId,
    pub taker: Taker,
}

impl Order {
    fn key(&self) -> (ObjectUid, Epoch) {
        (self.granted.object.uid.clone(), self.granted.grant.epoch)
    }
}

impl Moves {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(ObjectUid, Epoch), Running>> {
        // Every change under the lock is one insertion, removal or assignment.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a move by this grant has to end before the grant can be closed in this pool. Where the object is it only
    /// reads: nobody waits there for one that hangs with the other pool.
    pub fn holds(&self, uid: &ObjectUid, epoch: Epoch, pool: &PoolId, is_lost: impl Fn(&PoolId) -> bool) -> bool {
        let running = self.lock();
        running.get(&(uid.clone(), epoch)).is_some_and(|running| running.from != *pool && running.goes_on(is_lost))
    }

    /// Whoever asks what became of a grant in this pool wants no move from there by it any more, nor by an older one: they
    /// are told to stop, and not waited for.
    pub fn let_go(&self, uid: &ObjectUid, until: Epoch, pool: &PoolId) {
        for ((of, epoch), running) in &*self.lock() {
            if of == uid && *epoch <= until && running.from == *pool {
                running.progress.stop();
            }
        }
    }

    /// Whether anything is moved here.
    pub fn go_on(&self, is_lost: impl Fn(&PoolId) -> bool) -> bool {
        self.lock().values().any(|running| running.goes_on(&is_lost))
    }

    /// Stops the moves of an object up to this epoch, and returns when none of them writes to this pool any more.
    pub async fn stop(&self, uid: &ObjectUid, until: Epoch, pool: &PoolId, is_lost: impl Fn(&PoolId) -> bool) {
        let writes = |running: &Running| running.to == *pool && running.goes_on(&is_lost);
        self.stop_where(|it, epoch| it == uid && epoch <= until, writes).await;
    }

    /// Whoever waits looks again: a pool was declared lost.
    pub fn look_again(&self) {
        self.ended.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Stops all of them, and returns when none goes on.
    pub async fn stop_all(&self, is_lost: impl Fn(&PoolId) -> bool) {
        self.stop_where(|_, _| true, |running| running.goes_on(&is_lost)).await;
    }

    /// Stops some moves, and waits for some of those.
    async fn stop_where(&self, which: impl Fn(&ObjectUid, Epoch) -> bool, awaited: impl Fn(&Running) -> bool) {
        let mut ended = self.ended.subscribe();
        loop {
            ended.mark_unchanged();
            let left = {
                let running = self.lock();
                let stopped = running.iter().filter(|((uid, epoch), _)| which(uid, *epoch)).map(|(_, running)| running);
                stopped.inspect(|running| running.progress.stop()).filter(|running| awaited(running)).count()
            };
            if left == 0 || ended.changed().await.is_err() {
                return;
            }
        }
    }

    /// A place for a move; `None` when it has one, and whoever asked now hears of it, or when the order came too late.
    fn begin(&self, order: &Order, outbox: &Outbox) -> Option<Arc<Progress>> {
        let (uid, epoch) = order.key();
        let mut running = self.lock();
        if let Some(known) = running.get_mut(&order.key()) {
            known.outbox = outbox.clone();
            return None;
        }
        if running.keys().any(|(of, later)| *of == uid && *later > epoch) {
            return None;
        }
        let progress = Arc::new(Progress::default());
        let (from, to) = (order.granted.object.pool.clone(), order.to.clone());
        let new = Running { from, to, progress: Arc::clone(&progress), outbox: outbox.clone() };
        running.insert(order.key(), new);
        Some(progress)
    }

    /// Tells moves of the object by older grants to stop, and whether one of them writes to the pool of this one.
    fn stop_older(&self, uid: &ObjectUid, epoch: Epoch, to: &PoolId, is_lost: impl Fn(&PoolId) -> bool) -> bool {
        let mut is_in_the_way = false;
        for ((of, older), running) in &*self.lock() {
            if of == uid && *older < epoch {
                running.progress.stop();
                is_in_the_way |= running.to == *to && running.goes_on(&is_lost);
            }
        }
        is_in_the_way
    }

    fn outbox(&self, key: &(ObjectUid, Epoch)) -> Option<Outbox> {
        self.lock().get(key).map(|running| running.outbox.clone())
    }

    fn end(&self, key: &(ObjectUid, Epoch)) -> Option<Outbox> {
        let ended = self.lock().remove(key);
        self.look_again();
        ended.map(|running| running.outbox)
    }
}

/// Moves in the background, once for each grant.
pub fn start<I: InstanceControl>(node: &Arc<Node<I>>, outbox: &Outbox, order: Order) {
    let Some(progress) = node.moves.begin(&order, outbox) else { return };
    let node = Arc::clone(node);
    tokio::spawn(async move {
        let key = order.key();
        let (uid, epoch) = (&key.0, key.1);
        tracing::info!(object = %uid, %epoch, from = %order.granted.object.pool, to = %order.to, "a move begins");
        let said = v1::MoveProgress { uid: uid.to_string(), epoch: epoch.0, ..v1::MoveProgress::default() };
        let pools = [order.granted.object.pool.clone(), order.to.clone()];
        let outcome = tokio::select! {
            outcome = run(&node, order, Arc::clone(&progress)) => outcome,
            () = tell(&node, &key, &pools, &progress, &said) => Ok(()),
        };
        let told = match &outcome {
            Ok(()) => v1::MoveProgress { state: v1::MoveState::Copied.into(), ..with(said, &progress) },
            Err(Failed { failure, message }) => {
                tracing::warn!(object = %uid, %epoch, message, "a move failed");
                let (failure, message) = ((*failure).into(), message.clone());
                v1::MoveProgress { state: v1::MoveState::Failed.into(), failure, message, ..with(said, &progress) }
            }
        };
        if let Some(outbox) = node.moves.end(&key) {
            outbox.send(from_node::Message::MoveProgress(told));
        }
    });
}

struct Failed {
    failure: v1::ObjectFailure,
    message: String,
}

impl Failed {
    fn stopped() -> Self {
        Self { failure: v1::ObjectFailure::Io, message: "it was stopped".into() }
    }
}

async fn run<I: InstanceControl>(node: &Arc<Node<I>>, order: Order, progress: Arc<Progress>) -> Result<(), Failed> {
    older_ended(node, &order, &progress).await?;
    let slot = slot(&node.moves, &progress).await?;
    progress.waits_for(None);
    let pools = Arc::clone(&node.pools);
    let both = [order.granted.object.pool.clone(), order.to.clone()];
    let mut moved =
        tokio::task::spawn_blocking(move || pools.move_object(&order.granted, &order.to, &order.taker, &progress));
    let moved = if let Ok(moved) = node.pools.unless_lost(&both, &mut moved).await {
        moved
    } else {
        // It may hang there for good, and others do not wait for its turn to end.
        drop(slot);
        moved.await
    };
    match moved {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(Failed { failure: error.failure(), message: MoveError::to_string(&error) }),
        Err(error) => Err(Failed { failure: v1::ObjectFailure::Io, message: error.to_string() }),
    }
}

/// Waits for those by older grants that write to the same pool; they have no right any more. One that hangs with another
/// pool, which was given up for good, only reads where the object is, and is in nobody's way.
async fn older_ended<I>(node: &Node<I>, order: &Order, progress: &Progress) -> Result<(), Failed> {
    let (uid, epoch) = order.key();
    let mut ended = node.moves.ended.subscribe();
    loop {
        ended.mark_unchanged();
        if !node.moves.stop_older(&uid, epoch, &order.to, |pool| node.pools.is_lost(pool)) {
            return Ok(());
        }
        if progress.is_stopped() {
            return Err(Failed::stopped());
        }
        let why = problem_of(node, &order.to).map(|why| format!(" ({why})")).unwrap_or_default();
        progress.waits_for(Some(format!(
            "waits for its last move to storage pool {}, which was given up, to let go of that pool{why}",
            order.to
        )));
        tokio::select! {
            _ = ended.changed() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
}

async fn slot<'m>(moves: &'m Moves, progress: &Progress) -> Result<SemaphorePermit<'m>, Failed> {
    let mut slot = pin!(moves.slots.acquire());
    loop {
        tokio::select! {
            biased;
            // It is never closed.
            slot = &mut slot => return slot.map_err(|_| Failed::stopped()),
            () = tokio::time::sleep(LOOK_EVERY) => {
                if progress.is_stopped() {
                    return Err(Failed::stopped());
                }
                progress.waits_for(Some(format!("waits for its turn: {AT_ONCE} moves run on this node")));
            }
        }
    }
}

fn problem_of<I>(node: &Node<I>, pool: &PoolId) -> Option<String> {
    node.pools.get(pool).ok()?.status().problem
}

/// Tells how far it is, and what it waits for, until it is dropped.
async fn tell<I>(
    node: &Node<I>,
    key: &(ObjectUid, Epoch),
    pools: &[PoolId],
    progress: &Progress,
    said: &v1::MoveProgress,
) {
    let mut last = None;
    loop {
        tokio::time::sleep(TELL_EVERY).await;
        let hangs = || pools.iter().find_map(|pool| Some(format!("storage pool {pool}: {}", problem_of(node, pool)?)));
        let message = progress.awaited().or_else(hangs).unwrap_or_default();
        let now = v1::MoveProgress { state: v1::MoveState::Copying.into(), message, ..with(said.clone(), progress) };
        if let Some(outbox) = node.moves.outbox(key).filter(|_| last.as_ref() != Some(&now)) {
            outbox.send(from_node::Message::MoveProgress(now.clone()));
            last = Some(now);
        }
    }
}

fn with(said: v1::MoveProgress, progress: &Progress) -> v1::MoveProgress {
    v1::MoveProgress { copied_bytes: progress.copied(), total_bytes: progress.total(), ..said }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use kibo_crds::{Bytes, Incarnation};

    use super::*;
    use crate::launch::{By, Grant, Object, Operation, PredecessorEnd};

    fn order(epoch: u64) -> Order {
        let uid = "6f9619ff-8b86-d011-b42d-00c04fc964ff".parse().unwrap();
        let pool = "here".parse().unwrap();
        let object = Object { uid, pool, size: Bytes(0), must_exist: true, grows_from: None };
        let grant =
            Grant { epoch: Epoch(epoch), predecessor: Epoch(epoch - 1), predecessor_end: PredecessorEnd::Released };
        let (node, by) = ("a".parse().unwrap(), By::Operation(Operation::Move));
        let taker = Taker { node, incarnation: Incarnation(1), by };
        Order { granted: GrantedObject { object, grant }, to: "there".parse().unwrap(), taker }
    }

    #[test]
    fn who_asks_of_an_older_grant_stops_no_newer_move() {
        let (moves, (outbox, _messages)) = (Moves::default(), Outbox::new());
        let newer = moves.begin(&order(3), &outbox).unwrap();
        let (uid, here, there) = (order(3).key().0, "here".parse().unwrap(), "there".parse().unwrap());
        moves.let_go(&uid, Epoch(2), &here);
        assert!(!newer.is_stopped());
        let holds = |epoch, pool| moves.holds(&uid, Epoch(epoch), pool, |_| false);
        assert!(!holds(2, &there), "what the older grant took is nobody's");
        // A question changes nothing.
        assert!(holds(3, &there) && !holds(3, &here));
        assert!(!moves.holds(&uid, Epoch(3), &there, |pool| *pool == here), "it hangs, and writes nothing any more");
        assert!(!newer.is_stopped());
        moves.let_go(&uid, Epoch(3), &there);
        assert!(!newer.is_stopped(), "that is not where it reads");
        moves.let_go(&uid, Epoch(3), &here);
        assert!(newer.is_stopped());
    }

    #[tokio::test]
    async fn whoever_waits_for_what_hangs_waits_no_longer_once_its_pool_is_lost() {
        let (moves, (outbox, _messages)) = (Moves::default(), Outbox::new());
        let hangs = moves.begin(&order(3), &outbox).unwrap();
        let ((uid, _), there) = (order(3).key(), "there".parse().unwrap());
        let lost = AtomicBool::new(false);
        let mut stopped = pin!(moves.stop(&uid, Epoch(3), &there, |_| lost.load(Relaxed)));
        assert!(futures::poll!(&mut stopped).is_pending() && hangs.is_stopped());
        lost.store(true, Relaxed);
        moves.look_again();
        stopped.await;
    }

    #[test]
    fn one_that_hangs_stays_beside_the_next_one_and_an_order_that_comes_late_begins_nothing() {
        let (moves, (outbox, _messages)) = (Moves::default(), Outbox::new());
        let first = moves.begin(&order(2), &outbox).unwrap();
        let second = moves.begin(&order(3), &outbox).unwrap();
        assert!(moves.begin(&order(3), &outbox).is_none() && moves.begin(&order(2), &outbox).is_none());
        let ((uid, _), there, third) = (order(3).key(), "there".parse().unwrap(), "third".parse().unwrap());
        let stop_older = |to| moves.stop_older(&uid, Epoch(3), to, |_| false);
        assert!(!stop_older(&third) && stop_older(&there));
        assert!(!moves.stop_older(&uid, Epoch(3), &there, |pool| *pool != there), "it hangs where the object was");
        assert!(first.is_stopped() && !second.is_stopped());
        moves.end(&order(2).key());
        assert!(!stop_older(&there));
        assert!(moves.begin(&order(2), &outbox).is_none(), "a newer one is at work");
        moves.end(&order(3).key());
        assert!(!moves.go_on(|_| false));
    }
}
