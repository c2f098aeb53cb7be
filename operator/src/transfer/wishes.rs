//! Who asked for a transfer, and how far it is.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures::{FutureExt as _, future::BoxFuture};
use kibo_crds::{Bytes, Incarnation, InstanceId, NodeId, PoolId, TransferKind};
use kibo_protocol::v1::open_stream;
use tokio::{
    sync::watch,
    time::{Instant, timeout, timeout_at},
};

use crate::{
    cache::Key,
    workspace::{ledger::Kept, world::World},
};

/// How long whoever asks waits for its turn.
const TURN_WITHIN: Duration = Duration::from_secs(30);
/// How long for what comes of it to be on record; less than the silence after which clients give up.
const RECORDED_WITHIN: Duration = Duration::from_secs(20);

/// Why a transfer is not begun: a reason as in conditions, and for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: &'static str,
    pub message: String,
}

/// Of the images that are transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub layer: Bytes,
    pub volume: Option<Bytes>,
}

/// What somebody asks for, as decisions see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Wish {
    pub id: InstanceId,
    pub kind: TransferKind,
    pub user: String,
    /// Where a Volume that is made goes to; known once the place for it is.
    pub volume_pool: Option<PoolId>,
    /// The stream may have been asked for since.
    pub ordered: Option<Sizes>,
    /// How the stream ended, or why nobody waits for it.
    pub ended: Option<Result<(), String>>,
}

/// Where and what to ask for.
#[derive(Clone, Debug)]
pub struct Order {
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub stream: open_stream::Kind,
}

#[derive(Clone, Debug)]
enum Said {
    Nothing,
    Order(Box<Order>),
    Refused(Refusal),
    Over(Result<(), String>),
}

struct Known {
    wish: Wish,
    say: watch::Sender<Said>,
    /// For the Volume that is made, as long as it is stored nowhere.
    room: Option<Kept>,
}

/// All of this leadership, by the uid of the Workspace.
#[derive(Default)]
pub struct Wishes(Mutex<HashMap<String, Known>>);

impl Wishes {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    pub fn of(&self, uid: &str) -> Option<Wish> {
        self.lock().get(uid).map(|known| known.wish.clone())
    }

    fn with(&self, uid: &str, id: InstanceId, change: impl FnOnce(&mut Known)) {
        if let Some(known) = self.lock().get_mut(uid).filter(|known| known.wish.id == id) {
            change(known);
        }
    }

    /// Takes the wish away, with its last word.
    fn settle(&self, uid: &str, id: InstanceId, said: Said) {
        let mut all = self.lock();
        if all.get(uid).is_some_and(|known| known.wish.id == id)
            && let Some(known) = all.remove(uid)
        {
            known.say.send_replace(said);
        }
    }

    /// Whoever asks for something of another Workspace is told that it is gone.
    pub fn keep(&self, is_there: impl Fn(&str) -> bool) {
        self.lock().retain(|uid, known| {
            let keeps = is_there(uid);
            if !keeps {
                known.say.send_replace(Said::Over(Err("the Workspace was deleted".to_owned())));
            }
            keeps
        });
    }

    pub fn refuse(&self, uid: &str, id: InstanceId, refusal: Refusal) {
        self.settle(uid, id, Said::Refused(refusal));
    }

    pub fn over(&self, uid: &str, id: InstanceId, result: Result<(), String>) {
        self.settle(uid, id, Said::Over(result));
    }

    /// Its disks have a place. The room that the Volume takes there is kept until its grant is stored, or nobody asks for it
    /// any more.
    pub fn placed(&self, uid: &str, id: InstanceId, volume_pool: Option<PoolId>, room: Option<Kept>) {
        self.with(uid, id, |known| (known.wish.volume_pool, known.room) = (volume_pool, room));
    }

    /// The disks are granted: the node may be asked.
    pub fn order(&self, uid: &str, id: InstanceId, sizes: Sizes, order: Order) {
        self.with(uid, id, |known| {
            (known.wish.ordered, known.room) = (Some(sizes), None);
            known.say.send_replace(Said::Order(Box::new(order)));
        });
    }

    /// One that nobody wants any more, as of somebody who was interrupted and tries again, is waited for.
    async fn insert(&self, uid: &str, known: Known) -> Result<(), Refusal> {
        let refusal = |message| Err(Refusal { reason: "Transferring", message });
        let within = Instant::now() + TURN_WITHIN;
        loop {
            let mut other = match self.lock().entry(uid.to_owned()) {
                Entry::Vacant(free) => {
                    free.insert(known);
                    return Ok(());
                }
                Entry::Occupied(other) if other.get().wish.ended.is_none() => {
                    let user = &other.get().wish.user;
                    return refusal(format!("{user} is exporting or importing it: try again when that is over"));
                }
                Entry::Occupied(other) => other.get().say.subscribe(),
            };
            // It goes with its last word.
            let over = other.wait_for(|said| matches!(said, Said::Over(_) | Said::Refused(_)));
            if timeout_at(within, over).await.is_err() {
                return refusal(
                    "the export or import before is over, but its disks are not free yet: see its conditions"
                        .to_owned(),
                );
            }
        }
    }

    /// Ends what somebody else asked for; what is returned says when it is over. None: nobody asks for it.
    fn cancel(&self, uid: &str, kind: TransferKind, by: &str) -> Option<watch::Receiver<Said>> {
        let mut all = self.lock();
        let known = all.get_mut(uid).filter(|known| known.wish.kind == kind)?;
        known.wish.ended.get_or_insert_with(|| Err(format!("{by} cancelled it")));
        Some(known.say.subscribe())
    }

    fn end(&self, uid: &str, id: InstanceId, result: Result<(), String>) {
        self.with(uid, id, |known| {
            known.wish.ended.get_or_insert(result);
        });
    }
}

/// Ends the transfer of somebody else, and waits until its disks are free.
pub async fn cancel(world: &World, key: Key, uid: &str, kind: TransferKind, by: &str) -> Result<(), Refusal> {
    let Some(mut said) = world.transfers.cancel(uid, kind, by) else {
        let doing = if kind == TransferKind::Export { "exports" } else { "imports" };
        return Err(Refusal { reason: "NotTransferring", message: format!("nobody {doing} it now") });
    };
    world.bells.workspaces.push(key);
    let over = said.wait_for(|said| matches!(said, Said::Over(_) | Said::Refused(_)));
    match timeout(RECORDED_WITHIN, over).await {
        Ok(Ok(said)) if matches!(*said, Said::Over(Ok(()))) => {
            Err(Refusal { reason: "Complete", message: "it was complete already".to_owned() })
        }
        // When its other end is gone, the leader changes, which ends it as well.
        Ok(_) => Ok(()),
        Err(_) => {
            let message =
                "it is cancelled, but its node has not let go of the disks yet: see its conditions".to_owned();
            Err(Refusal { reason: "Unavailable", message })
        }
    }
}

/// The transfer of whoever asks. Dropped, it is given up.
pub struct Transfer {
    world: Arc<World>,
    key: Key,
    uid: String,
    pub id: InstanceId,
    kind: TransferKind,
    said: watch::Receiver<Said>,
}

impl Transfer {
    /// Asks for it, and waits until its disks are granted.
    pub async fn begin(
        world: Arc<World>,
        key: Key,
        uid: String,
        kind: TransferKind,
        user: String,
    ) -> Result<(Self, Order), Refusal> {
        let id = InstanceId::generate();
        let (say, said) = watch::channel(Said::Nothing);
        let wish = Wish { id, kind, user, volume_pool: None, ordered: None, ended: None };
        world.transfers.insert(&uid, Known { wish, say, room: None }).await?;
        let mut transfer = Self { world, key, uid, id, kind, said };
        transfer.ring();
        let ordered = timeout(TURN_WITHIN, transfer.ordered()).await.unwrap_or_else(|_| {
            let message = "its disks were not free in time: see its conditions, and try again".to_owned();
            Err(Refusal { reason: "Unavailable", message })
        });
        ordered.map(|order| (transfer, order))
    }

    async fn ordered(&mut self) -> Result<Order, Refusal> {
        let lost = |message: String| Refusal { reason: "Unavailable", message };
        let said = self.said.wait_for(|said| !matches!(said, Said::Nothing)).await;
        match said.map_err(|_| lost("the operator's leader changes".to_owned()))?.clone() {
            Said::Order(order) => Ok(*order),
            Said::Refused(refusal) => Err(refusal),
            Said::Over(Err(message)) => Err(lost(message)),
            Said::Nothing | Said::Over(Ok(())) => Err(lost("it ended before it began".to_owned())),
        }
    }

    fn ring(&self) {
        self.world.bells.workspaces.push(self.key.clone());
    }

    /// Why it is over although its stream goes on: its node lost the disks, somebody cancelled it.
    pub fn over(&self) -> BoxFuture<'static, String> {
        let mut said = self.said.clone();
        async move {
            let over = said.wait_for(|said| matches!(said, Said::Over(Err(_)))).await.map(|said| said.clone());
            match over {
                Ok(Said::Over(Err(why))) => why,
                _ => std::future::pending().await,
            }
        }
        .boxed()
    }

    /// How its stream ended. Answers what came of that.
    pub async fn conclude(mut self, result: Result<(), String>) -> Result<(), String> {
        self.world.transfers.end(&self.uid, self.id, result.clone());
        self.ring();
        let over = async {
            let said = self.said.wait_for(|said| matches!(said, Said::Over(_))).await;
            said.map(|said| if let Said::Over(result) = &*said { result.clone() } else { Ok(()) })
        };
        match timeout(RECORDED_WITHIN, over).await {
            // What was exported is complete, whatever becomes of the Workspace.
            _ if self.kind == TransferKind::Export && result.is_ok() => result,
            // The stream may have broken because of what is on record: a deletion, somebody who cancelled it.
            Ok(Ok(recorded)) => recorded.and(result),
            Ok(Err(_)) | Err(_) => result
                .and_then(|()| Err("the operator could not record in time that the disks are complete".to_owned())),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // After its end this changes nothing.
        let gone = Err("whoever asked for it went away, or the connection was lost".to_owned());
        self.world.transfers.end(&self.uid, self.id, gone);
        self.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(user: &str) -> (Known, InstanceId) {
        let id = InstanceId::generate();
        let wish = Wish {
            id,
            kind: TransferKind::Export,
            user: user.to_owned(),
            volume_pool: None,
            ordered: None,
            ended: None,
        };
        (Known { wish, say: watch::channel(Said::Nothing).0, room: None }, id)
    }

    #[tokio::test]
    async fn who_tries_again_waits_for_what_was_broken_off_and_for_nothing_else() {
        let wishes = Arc::new(Wishes::default());
        let (first, id) = known("jane");
        wishes.insert("u", first).await.unwrap();
        let refused = wishes.insert("u", known("joe").0).await.unwrap_err();
        assert!(refused.message.contains("jane is exporting"), "{refused:?}");
        wishes.end("u", id, Err("she went away".to_owned()));
        let again = tokio::spawn({
            let wishes = wishes.clone();
            async move { wishes.insert("u", known("jane").0).await }
        });
        tokio::task::yield_now().await;
        assert!(!again.is_finished());
        wishes.over("u", id, Err("she went away".to_owned()));
        again.await.unwrap().unwrap();
        assert!(wishes.of("u").is_some_and(|wish| wish.id != id && wish.ended.is_none()));
    }

    #[tokio::test(start_paused = true)]
    async fn disks_that_do_not_come_free_are_not_waited_for_long() {
        let wishes = Wishes::default();
        let (first, id) = known("jane");
        wishes.insert("u", first).await.unwrap();
        wishes.end("u", id, Err("she went away".to_owned()));
        let refused = wishes.insert("u", known("jane").0).await.unwrap_err();
        assert!(refused.message.contains("not free yet"), "{refused:?}");
    }

    #[test]
    fn somebody_else_ends_what_is_under_way_and_not_what_is_complete() {
        let wishes = Wishes::default();
        let (first, id) = known("jane");
        wishes.lock().insert("u".to_owned(), first);
        assert!(wishes.cancel("u", TransferKind::Import, "joe").is_none(), "it is an export");
        assert!(wishes.cancel("v", TransferKind::Export, "joe").is_none());
        assert!(wishes.cancel("u", TransferKind::Export, "joe").is_some());
        assert_eq!(wishes.of("u").unwrap().ended, Some(Err("joe cancelled it".to_owned())));
        let (second, other) = known("jane");
        wishes.lock().insert("u".to_owned(), second);
        wishes.end("u", id, Ok(()));
        assert_eq!(wishes.of("u").unwrap().ended, None, "the end of another one");
        wishes.end("u", other, Ok(()));
        wishes.cancel("u", TransferKind::Export, "joe");
        assert_eq!(wishes.of("u").unwrap().ended, Some(Ok(())));
    }
}
