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
use tokio::sync::{Semaphore, watch};

use super::{control::InstanceControl, node::Node, outbox::Outbox};
use crate::{
    launch::{GrantedObject, Taker},
    pool::{MoveError, Progress},
};

/// At once; the others wait, since they would only share the same disks. One needs 8 MiB of memory.
const AT_ONCE: usize = 8;
const TELL_EVERY: Duration = Duration::from_secs(1);
/// How soon one that waits for its turn hears that it is to stop.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// All moves of this node.
pub struct Moves {
    running: Mutex<BTreeMap<ObjectUid, Running>>,
    slots: Semaphore,
    ended: watch::Sender<u64>,
}

struct Running {
    epoch: Epoch,
    /// Where the object is.
    from: PoolId,
    progress: Arc<Progress>,
    /// Of the newest session that asked.
    outbox: Outbox,
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

impl Moves {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ObjectUid, Running>> {
        // Every change under the lock is one insertion, removal or assignment.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a move has to end before its grant can be closed in this pool. Where the object is it only reads: it is
    /// told to stop, and nobody waits for one that hangs with the other pool.
    pub fn holds(&self, uid: &ObjectUid, pool: &PoolId) -> bool {
        match self.lock().get(uid) {
            Some(running) if running.from == *pool => {
                running.progress.stop();
                false
            }
            running => running.is_some(),
        }
    }

    /// Stops the move of an object up to this epoch, and returns when nothing of it runs any more.
    pub async fn stop(&self, uid: &ObjectUid, until: Epoch) {
        self.stop_where(|it, running| it == uid && running.epoch <= until).await;
    }

    pub async fn stop_all(&self) {
        self.stop_where(|_, _| true).await;
    }

    async fn stop_where(&self, which: impl Fn(&ObjectUid, &Running) -> bool) {
        let mut ended = self.ended.subscribe();
        loop {
            ended.mark_unchanged();
            let left = {
                let running = self.lock();
                let stopped = running.iter().filter(|(uid, running)| which(uid, running));
                stopped.map(|(_, running)| running.progress.stop()).count()
            };
            if left == 0 || ended.changed().await.is_err() {
                return;
            }
        }
    }

    /// A place for a move; `None` when it has one, and whoever asked now hears of it.
    fn begin(&self, order: &Order, outbox: &Outbox) -> Option<Arc<Progress>> {
        let mut running = self.lock();
        if let Some(known) = running.get_mut(&order.granted.object.uid) {
            known.outbox = outbox.clone();
            return None;
        }
        let progress = Arc::new(Progress::default());
        let epoch = order.granted.grant.epoch;
        let from = order.granted.object.pool.clone();
        let new = Running { epoch, from, progress: Arc::clone(&progress), outbox: outbox.clone() };
        running.insert(order.granted.object.uid.clone(), new);
        Some(progress)
    }

    fn outbox(&self, uid: &ObjectUid) -> Option<Outbox> {
        self.lock().get(uid).map(|running| running.outbox.clone())
    }

    fn end(&self, uid: &ObjectUid) -> Option<Outbox> {
        let ended = self.lock().remove(uid);
        self.ended.send_modify(|count| *count += 1);
        ended.map(|running| running.outbox)
    }
}

/// Moves in the background, once for each object.
pub fn start<I: InstanceControl>(node: &Arc<Node<I>>, outbox: &Outbox, order: Order) {
    let (node, outbox) = (Arc::clone(node), outbox.clone());
    tokio::spawn(async move {
        let uid = order.granted.object.uid.clone();
        let epoch = order.granted.grant.epoch;
        // One of an older grant has no right any more.
        node.moves.stop(&uid, Epoch(epoch.0.saturating_sub(1))).await;
        let Some(progress) = node.moves.begin(&order, &outbox) else { return };
        tracing::info!(object = %uid, %epoch, from = %order.granted.object.pool, to = %order.to, "a move begins");
        let said = v1::MoveProgress { uid: uid.to_string(), epoch: epoch.0, ..v1::MoveProgress::default() };
        let outcome = tokio::select! {
            outcome = run(&node, order, Arc::clone(&progress)) => outcome,
            () = tell(&node.moves, &uid, &progress, &said) => Ok(()),
        };
        let told = match &outcome {
            Ok(()) => v1::MoveProgress { state: v1::MoveState::Copied.into(), ..with(said, &progress) },
            Err(Failed { failure, message }) => {
                tracing::warn!(object = %uid, %epoch, message, "a move failed");
                let (failure, message) = ((*failure).into(), message.clone());
                v1::MoveProgress { state: v1::MoveState::Failed.into(), failure, message, ..with(said, &progress) }
            }
        };
        if let Some(outbox) = node.moves.end(&uid) {
            outbox.send(from_node::Message::MoveProgress(told));
        }
    });
}

struct Failed {
    failure: v1::ObjectFailure,
    message: String,
}

async fn run<I: InstanceControl>(node: &Arc<Node<I>>, order: Order, progress: Arc<Progress>) -> Result<(), Failed> {
    let mut slot = pin!(node.moves.slots.acquire());
    let _slot = loop {
        tokio::select! {
            slot = &mut slot => break slot,
            () = tokio::time::sleep(LOOK_EVERY) => {
                if progress.is_stopped() {
                    return Err(Failed { failure: v1::ObjectFailure::Io, message: "it was stopped".into() });
                }
            }
        }
    };
    let pools = Arc::clone(&node.pools);
    let moved =
        tokio::task::spawn_blocking(move || pools.move_object(&order.granted, &order.to, &order.taker, &progress));
    match moved.await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(Failed { failure: error.failure(), message: MoveError::to_string(&error) }),
        Err(error) => Err(Failed { failure: v1::ObjectFailure::Io, message: error.to_string() }),
    }
}

/// Tells how far it is, until it is dropped.
async fn tell(moves: &Moves, uid: &ObjectUid, progress: &Progress, said: &v1::MoveProgress) {
    let mut last = None;
    loop {
        tokio::time::sleep(TELL_EVERY).await;
        let now = v1::MoveProgress { state: v1::MoveState::Copying.into(), ..with(said.clone(), progress) };
        if let Some(outbox) = moves.outbox(uid).filter(|_| last.as_ref() != Some(&now)) {
            outbox.send(from_node::Message::MoveProgress(now.clone()));
            last = Some(now);
        }
    }
}

fn with(said: v1::MoveProgress, progress: &Progress) -> v1::MoveProgress {
    v1::MoveProgress { copied_bytes: progress.copied(), total_bytes: progress.total(), ..said }
}
