//! Whether an Instance may still write to what it holds, and what follows for its guest. No I/O, no clock.
//!
//! Two rules. Whoever reads that a right is over kills at once. Whoever has read nothing for too long stops, and goes on
//! only after a look that began later has proven that everything still holds.

use std::{collections::BTreeMap, fmt, time::Duration};

use kibo_crds::{Epoch, Incarnation, ObjectUid, PoolId};

use crate::{
    clock::BootTime,
    launch::Taker,
    pool::records::{Hold, Records},
};

/// What a mark says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dead {
    /// This one and all before it.
    pub incarnation: Incarnation,
    /// When it was marked, by the clock of whoever did it.
    pub unix_millis: u64,
}

/// Why the right to an object is over, for good.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Loss {
    /// Somebody took over what this life of the node held.
    Isolated(Dead),
    /// A record of the object says so.
    Object { uid: ObjectUid, epoch: Epoch, how: String },
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Isolated(Dead { incarnation, .. }) => {
                write!(f, "incarnation {incarnation} of this node was isolated")
            }
            Self::Object { uid, epoch, how } => write!(f, "epoch {epoch} of object {uid} is over: {how}"),
        }
    }
}

/// What an Instance holds in one pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Holding {
    pub taker: Taker,
    pub objects: Vec<(ObjectUid, Epoch)>,
}

/// What the records show of one holding.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Finding {
    Lost(Loss),
    Holds,
    /// Of the records nobody knows. With a fence file that says nothing against it that is enough for a guest that runs,
    /// since whoever takes over marks that first; what stands still is not thawed by it.
    Unclear(String),
}

/// What the node's fence file says: the highest mark that can be read, and why there may be a higher one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FenceSeen {
    pub dead: Option<Dead>,
    pub problem: Option<String>,
}

/// What the fence file alone shows. It can end a right; that everything holds only the records can prove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FenceFinding {
    Lost(Loss),
    Undisputed,
    Unknown(String),
}

pub fn find_in_fence(taker: &Taker, fence: &FenceSeen) -> FenceFinding {
    match (&fence.dead, &fence.problem) {
        (Some(dead), _) if dead.incarnation >= taker.incarnation => FenceFinding::Lost(Loss::Isolated(*dead)),
        (_, Some(problem)) => FenceFinding::Unknown(problem.clone()),
        (_, None) => FenceFinding::Undisputed,
    }
}

/// What the records of all of its objects show, of a holding that has taken them.
pub fn find_in_records(holding: &Holding, records: &BTreeMap<ObjectUid, Result<Records, String>>) -> Finding {
    let mut unclear = holding.objects.is_empty().then(|| "nobody knows what it holds".to_owned());
    for (uid, epoch) in &holding.objects {
        let hold = match records.get(uid) {
            Some(Ok(records)) => records.hold(*epoch, &holding.taker),
            Some(Err(problem)) => Hold::Unclear(problem.clone()),
            None => Hold::Unclear("the holder records were not read".to_owned()),
        };
        match hold {
            Hold::Holds => {}
            Hold::Over(how) => return Finding::Lost(Loss::Object { uid: uid.clone(), epoch: *epoch, how }),
            Hold::Unclear(problem) => unclear = Some(problem),
        }
    }
    unclear.map_or(Finding::Holds, Finding::Unclear)
}

/// Whether the guest may run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Pulse {
    Runs,
    /// Since when, and what people were told.
    Frozen {
        since: BootTime,
        why: Option<(PoolId, String)>,
    },
    Killed,
}

/// What is to be done to the guest.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Also of what stands still already, when there is something new to tell.
    Freeze {
        pool: PoolId,
        problem: String,
    },
    Thaw,
    /// `still`: since when it has stood still already.
    Kill {
        pool: PoolId,
        loss: Loss,
        still: Option<BootTime>,
    },
}

/// What is known of one pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Proof {
    /// When the newest look began that found nothing against it.
    undisputed: BootTime,
    /// When the newest look began that proved everything.
    whole: Option<BootTime>,
    problem: Option<String>,
}

/// One Instance under watch: over all of its pools.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Watched {
    pools: BTreeMap<PoolId, Proof>,
    pulse: Pulse,
    /// How old what is known of a pool may become.
    freeze_after: Duration,
}

impl Watched {
    /// It runs from now on, or did before; `frozen`: it was found standing still.
    pub fn begin(pools: impl IntoIterator<Item = PoolId>, now: BootTime, frozen: bool, freeze_after: Duration) -> Self {
        let proof = Proof { undisputed: now, whole: None, problem: None };
        let pulse = if frozen { Pulse::Frozen { since: now, why: None } } else { Pulse::Runs };
        Self { pools: pools.into_iter().map(|pool| (pool, proof.clone())).collect(), pulse, freeze_after }
    }

    pub fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    /// Takes in what a look found in the fence file that began at `begun`. The order is obeyed before anything else is
    /// learned.
    #[must_use]
    pub fn learn_of_fence(&mut self, pool: &PoolId, begun: BootTime, finding: FenceFinding) -> Option<Order> {
        let proof = self.pools.get_mut(pool)?;
        match finding {
            FenceFinding::Lost(loss) => self.lose(pool, loss),
            FenceFinding::Undisputed => {
                proof.undisputed = begun;
                None
            }
            FenceFinding::Unknown(problem) => {
                proof.problem = Some(problem.clone());
                self.tell(pool, problem)
            }
        }
    }

    /// The same of the records, whose look began after the fence file was read and said nothing against it.
    #[must_use]
    pub fn learn_of_records(&mut self, pool: &PoolId, begun: BootTime, finding: Finding) -> Option<Order> {
        let proof = self.pools.get_mut(pool)?;
        match finding {
            Finding::Lost(loss) => return self.lose(pool, loss),
            Finding::Unclear(problem) => {
                proof.problem = Some(problem.clone());
                return self.tell(pool, problem);
            }
            Finding::Holds => *proof = Proof { undisputed: begun, whole: Some(begun), problem: None },
        }
        let Pulse::Frozen { since, .. } = &self.pulse else { return None };
        // One that began before it stood still may have read what is not true any more; and so may an old one.
        let is_proof = |whole: BootTime| whole > *since && begun.since(whole) <= self.freeze_after;
        if !self.pools.values().all(|proof| proof.whole.is_some_and(is_proof)) {
            return None;
        }
        self.pulse = Pulse::Runs;
        Some(Order::Thaw)
    }

    fn lose(&mut self, pool: &PoolId, loss: Loss) -> Option<Order> {
        let still = match std::mem::replace(&mut self.pulse, Pulse::Killed) {
            Pulse::Killed => return None,
            Pulse::Frozen { since, .. } => Some(since),
            Pulse::Runs => None,
        };
        Some(Order::Kill { pool: pool.clone(), loss, still })
    }

    /// Why it stands still, if it does and that is news.
    fn tell(&mut self, pool: &PoolId, problem: String) -> Option<Order> {
        let Pulse::Frozen { since, why } = &self.pulse else { return None };
        let is_news = why.as_ref().is_none_or(|(told_of, told)| told_of == pool && *told != problem);
        let since = *since;
        is_news.then(|| {
            self.pulse = Pulse::Frozen { since, why: Some((pool.clone(), problem.clone())) };
            Order::Freeze { pool: pool.clone(), problem }
        })
    }

    /// Time passes.
    #[must_use]
    pub fn tick(&mut self, now: BootTime) -> Option<Order> {
        if self.pulse != Pulse::Runs {
            return None;
        }
        let overdue = self.pools.iter().find(|(_, proof)| now.since(proof.undisputed) > self.freeze_after);
        let (pool, proof) = overdue?;
        let problem = proof.problem.clone().unwrap_or_else(|| "its file system does not answer".to_owned());
        let pool = pool.clone();
        self.pulse = Pulse::Frozen { since: now, why: Some((pool.clone(), problem.clone())) };
        Some(Order::Freeze { pool, problem })
    }
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
