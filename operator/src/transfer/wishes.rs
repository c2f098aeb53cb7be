//! Who asked for a transfer, and how far it is.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use kibo_crds::{Bytes, Incarnation, InstanceId, NodeId, PoolId, TransferKind};
use kibo_protocol::v1::open_stream;
use tokio::{sync::watch, time::timeout};

use crate::{cache::Key, workspace::world::World};

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

    pub fn placed(&self, uid: &str, id: InstanceId, volume_pool: Option<PoolId>) {
        self.with(uid, id, |known| known.wish.volume_pool = volume_pool);
    }

    /// The disks are granted: the node may be asked.
    pub fn order(&self, uid: &str, id: InstanceId, sizes: Sizes, order: Order) {
        self.with(uid, id, |known| {
            known.wish.ordered = Some(sizes);
            known.say.send_replace(Said::Order(Box::new(order)));
        });
    }

    fn end(&self, uid: &str, id: InstanceId, result: Result<(), String>) {
        self.with(uid, id, |known| {
            known.wish.ended.get_or_insert(result);
        });
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
        {
            let mut all = world.transfers.lock();
            if let Some(other) = all.get(&uid) {
                let message = format!("{} is exporting or importing it: try again when that is over", other.wish.user);
                return Err(Refusal { reason: "Transferring", message });
            }
            all.insert(uid.clone(), Known { wish, say });
        }
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
            _ if self.kind == TransferKind::Export => result,
            Ok(Ok(recorded)) => result.and(recorded),
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
