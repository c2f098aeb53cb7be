//! What nodes said of moves.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use kibo_crds::{Epoch, NodeId, PoolId};
use kibo_protocol::v1;

/// An order that was sent and not answered is sent again: orders are idempotent, and may be lost.
const RESEND: Duration = Duration::from_secs(30);
/// What went wrong for the time being is tried again after this.
const RETRY: Duration = Duration::from_secs(5);
/// Progress alone is worth a write this often.
const WORTH_A_WRITE: Duration = Duration::from_secs(5);

/// The newest word about the move of one object.
#[derive(Clone, Debug, PartialEq)]
pub struct Word {
    pub node: NodeId,
    pub epoch: Epoch,
    pub state: v1::MoveState,
    pub copied: u64,
    pub total: u64,
    pub failure: v1::ObjectFailure,
    pub message: String,
}

/// What came of the removal of a copy.
#[derive(Clone, Debug, PartialEq)]
pub struct Discarded {
    pub node: NodeId,
    pub pool: PoolId,
    pub epoch: Epoch,
    pub outcome: Removal,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Removal {
    Removed,
    /// By the records there it is nothing that this move left over; it stays. For people.
    NotOurs(String),
    /// Not yet. For people.
    Failed(String),
}

/// Everything that was heard about one object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Heard {
    pub word: Option<Word>,
    pub discarded: Option<Discarded>,
}

#[derive(Default)]
struct Known {
    heard: Heard,
    /// In which session which grant was ordered to be moved, and when.
    ordered: Option<(String, Epoch, Instant)>,
    /// Not before: the last try went wrong for the time being.
    again_at: Option<Instant>,
    discarding: bool,
    rung: Option<Instant>,
}

/// The same for all objects, by uid.
#[derive(Default)]
pub struct Hearsay(Mutex<HashMap<String, Known>>);

impl Hearsay {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    pub fn of(&self, uid: &str) -> Heard {
        self.lock().get(uid).map(|known| known.heard.clone()).unwrap_or_default()
    }

    /// Takes a word in. Returns whether somebody is to look at the object now.
    pub fn hear(&self, uid: &str, word: Word) -> bool {
        let mut all = self.lock();
        let known = all.entry(uid.to_owned()).or_default();
        if word.state == v1::MoveState::Failed {
            known.ordered = None;
            known.again_at = Some(Instant::now() + RETRY);
        }
        let is_last = word.state != v1::MoveState::Copying;
        known.heard.word = Some(word);
        let is_due = is_last || known.rung.is_none_or(|at| at.elapsed() >= WORTH_A_WRITE);
        if is_due {
            known.rung = Some(Instant::now());
        }
        is_due
    }

    /// Whether the order is to be sent in this session; else how long it has time.
    pub fn may_order(&self, uid: &str, session: &str, epoch: Epoch) -> Result<(), Duration> {
        let mut all = self.lock();
        let known = all.entry(uid.to_owned()).or_default();
        let now = Instant::now();
        if let Some(rest) = known.again_at.map(|at| at.saturating_duration_since(now)).filter(|rest| !rest.is_zero()) {
            return Err(rest);
        }
        if let Some((to, of, at)) = &known.ordered
            && (to.as_str(), *of) == (session, epoch)
            && at.elapsed() < RESEND
        {
            return Err(RESEND.saturating_sub(at.elapsed()));
        }
        known.ordered = Some((session.to_owned(), epoch, now));
        Ok(())
    }

    /// Whether a copy of this object is to be removed now; else when to ask again, if nobody rings before.
    pub fn begin_discard(&self, uid: &str) -> Result<(), Option<Duration>> {
        let mut all = self.lock();
        let known = all.entry(uid.to_owned()).or_default();
        if known.discarding {
            return Err(None);
        }
        let rest = known.again_at.map(|at| at.saturating_duration_since(Instant::now())).unwrap_or_default();
        if !rest.is_zero() {
            return Err(Some(rest));
        }
        known.discarding = true;
        Ok(())
    }

    pub fn end_discard(&self, uid: &str, discarded: Discarded) {
        let mut all = self.lock();
        let known = all.entry(uid.to_owned()).or_default();
        known.discarding = false;
        if discarded.outcome != Removal::Removed {
            known.again_at = Some(Instant::now() + RETRY);
        }
        known.heard.discarded = Some(discarded);
    }

    /// The move is over, or the object is gone.
    pub fn forget(&self, uid: &str) {
        let mut all = self.lock();
        if all.get(uid).is_some_and(|known| !known.discarding) {
            all.remove(uid);
        }
    }
}
