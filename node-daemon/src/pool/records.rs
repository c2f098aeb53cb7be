//! What the holder records of one object say about a grant. No I/O.
//!
//! Each epoch has at most one record that it was taken and at most one that it is closed (released,
//! or refused before it was taken). A record also keeps what its grant said about the grant before
//! it, so that an assertion of the control plane ("that holder is dead") outlives the grant that
//! brought it.

use std::collections::BTreeMap;

use kibo_crds::{Epoch, Incarnation, NodeId};
use kibo_protocol::v1::ObjectUse;
use serde::{Deserialize, Serialize};

use crate::launch::{Grant, PredecessorEnd, Taker};

/// Content of one record.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Absent where nobody was to take it: a question whether it was taken, and deletions of older daemons.
    pub taker: Option<Taker>,
    pub grant: Grant,
}

/// Everything that the pool knows of one epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct EpochRecords {
    pub taken: Option<Record>,
    pub released: Option<Record>,
    pub refused: Option<Record>,
}

impl Record {
    /// It was taken to be removed.
    pub fn is_deletion(&self) -> bool {
        self.taker.as_ref().is_none_or(Taker::is_deletion)
    }
}

impl EpochRecords {
    fn is_closed(&self) -> bool {
        self.released.is_some() || self.refused.is_some()
    }

    /// Somebody may be using the object by the right of this epoch.
    fn is_open(&self) -> bool {
        self.taken.is_some() && !self.is_closed()
    }

    fn all(&self) -> impl Iterator<Item = &Record> {
        [&self.taken, &self.released, &self.refused].into_iter().flatten()
    }
}

/// The records of one object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Records(pub BTreeMap<Epoch, EpochRecords>);

/// Why a grant cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    #[error("the grant of epoch {granted} is over: the pool has a record of epoch {found}")]
    Superseded { granted: Epoch, found: Epoch },
    #[error("epoch {0} was refused by this node earlier")]
    Refused(Epoch),
    #[error("epoch {0} was taken and released already")]
    Released(Epoch),
    #[error("epoch {epoch} is taken by {taker}")]
    TakenByOther { epoch: Epoch, taker: Box<Taker> },
    #[error(
        "the pool says that incarnation {dead} of this node was isolated, and the grant is for incarnation {lived}"
    )]
    Isolated { dead: Incarnation, lived: Incarnation },
    #[error("epoch {epoch} is not released by {holder}, and the grant does not say that this holder is dead")]
    PredecessorHolds { epoch: Epoch, holder: String },
}

/// Why an image is not removed as what a move left over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotACopy {
    #[error("it has a record of the later epoch {0}")]
    Newer(Epoch),
    #[error("it has an image and no record that a move made it")]
    NoRecord,
    #[error("the move of epoch {0} has ended, and this is the object")]
    IsTheObject(Epoch),
    #[error("it was taken in epoch {epoch} by {taker}")]
    TakenBy { epoch: Epoch, taker: String },
}

impl Conflict {
    /// How the pool says already that this grant is not taken. `None`: a refusal must be written, so that it never is,
    /// also not by a rest of a crashed attempt.
    pub fn leaves(&self) -> Option<ObjectUse> {
        match self {
            Self::Released(_) => Some(ObjectUse::Released),
            Self::Refused(_) => Some(ObjectUse::Refused),
            // The record is somebody else's to close.
            Self::TakenByOther { .. } => Some(ObjectUse::Held),
            Self::Superseded { .. } | Self::PredecessorHolds { .. } | Self::Isolated { .. } => None,
        }
    }
}

/// What closes the grant of an Instance that does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// The records say it already.
    Done(ObjectUse),
    /// It was taken: write a release.
    Release,
    /// It was not: write a refusal.
    Refuse,
}

/// What a node that was granted an object may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakeDecision {
    /// Write the record of this epoch.
    Write,
    /// This same Instance has taken it before; the record stands.
    AlreadyMine,
    Conflict(Conflict),
}

impl Records {
    /// Whether some grant at or above an epoch declared every holder up to that epoch dead.
    fn is_declared_dead(&self, epoch: Epoch, by: &Grant) -> bool {
        let says_so = |grant: &Grant| grant.predecessor_end.voids_unreleased() && epoch <= grant.predecessor;
        says_so(by) || self.0.range(epoch..).flat_map(|(_, records)| records.all()).any(|record| says_so(&record.grant))
    }

    /// Highest open epoch below the grant's whose holder nobody declared dead. A deletion goes on
    /// where another one stopped.
    fn open_predecessor(&self, grant: &Grant, is_deletion: bool) -> Option<(Epoch, &EpochRecords)> {
        let below = self.0.range(..grant.epoch).rev().map(|(epoch, records)| (*epoch, records));
        below.into_iter().find(|(epoch, records)| {
            let both_delete = is_deletion && records.taken.as_ref().is_some_and(Record::is_deletion);
            records.is_open() && !both_delete && !self.is_declared_dead(*epoch, grant)
        })
    }

    fn predecessor_conflict(&self, grant: &Grant, is_deletion: bool) -> Option<Conflict> {
        let (epoch, records) = self.open_predecessor(grant, is_deletion)?;
        let taker = records.taken.as_ref().and_then(|record| record.taker.as_ref());
        let holder = taker.map_or_else(|| "a deletion".to_owned(), ToString::to_string);
        Some(Conflict::PredecessorHolds { epoch, holder })
    }

    /// Whether this grant may be taken, seen before and again after the record was written.
    pub fn decide_take(&self, grant: &Grant, taker: &Taker) -> TakeDecision {
        if let Some((found, _)) = self.0.range(Epoch(grant.epoch.0 + 1)..).next_back() {
            return TakeDecision::Conflict(Conflict::Superseded { granted: grant.epoch, found: *found });
        }
        let own = self.0.get(&grant.epoch).cloned().unwrap_or_default();
        if own.refused.is_some() {
            return TakeDecision::Conflict(Conflict::Refused(grant.epoch));
        }
        if own.released.is_some() {
            return TakeDecision::Conflict(Conflict::Released(grant.epoch));
        }
        let is_mine =
            |record: &Record| record.taker.as_ref() == Some(taker) || (record.is_deletion() && taker.is_deletion());
        if let Some(other) = own.taken.as_ref().filter(|record| !is_mine(record)) {
            let Some(other) = other.taker.clone().filter(|_| !other.is_deletion()) else {
                return TakeDecision::Conflict(Conflict::Superseded { granted: grant.epoch, found: grant.epoch });
            };
            return TakeDecision::Conflict(Conflict::TakenByOther { epoch: grant.epoch, taker: Box::new(other) });
        }
        if let Some(conflict) = self.predecessor_conflict(grant, taker.is_deletion()) {
            return TakeDecision::Conflict(conflict);
        }
        if own.taken.is_some() { TakeDecision::AlreadyMine } else { TakeDecision::Write }
    }

    /// Whether a deletion was granted and has begun: the control plane gave the object up.
    pub fn is_deletion_begun(&self) -> bool {
        self.0.values().any(|records| records.taken.as_ref().is_some_and(Record::is_deletion))
    }

    /// Whether all that is recorded are grants that nobody took.
    pub fn are_refusals(&self) -> bool {
        let is_refusal = |records: &EpochRecords| records.taken.is_none() && records.refused.is_some();
        !self.0.is_empty() && self.0.values().all(is_refusal)
    }

    /// Whether whoever took the object by the right of `epoch` may still use it.
    pub fn hold(&self, epoch: Epoch, taker: &Taker) -> Hold {
        let nobody = Grant { epoch, predecessor: Epoch(0), predecessor_end: PredecessorEnd::Released };
        if self.is_declared_dead(epoch, &nobody) {
            let by = self.0.iter().rev().find_map(|(epoch, records)| Some((epoch, records.taken.as_ref()?)));
            return Hold::Over(match by {
                Some((later, Record { taker: Some(by), .. })) if *later > epoch => {
                    format!("it was taken in epoch {later} by {by}")
                }
                Some((later, _)) if *later > epoch => format!("it was taken to be deleted in epoch {later}"),
                _ => "a later grant says that this holder is dead".to_owned(),
            });
        }
        match self.0.get(&epoch) {
            Some(records) if records.is_closed() => Hold::Over("the records say that its use has ended".to_owned()),
            Some(EpochRecords { taken: Some(record), .. }) if record.taker.as_ref() == Some(taker) => Hold::Holds,
            Some(EpochRecords { taken: Some(_), .. }) => Hold::Over("the record of it is somebody else's".to_owned()),
            _ => Hold::Unclear(format!("the record of epoch {epoch} is gone")),
        }
    }

    /// Those who took the object and never ended its use, and are dead by this grant or a record. Before anybody writes,
    /// each of them must be told.
    pub fn dead_holders(&self, by: &Grant) -> BTreeMap<NodeId, Incarnation> {
        let below = self.0.range(..by.epoch);
        let open = below.filter(|(epoch, records)| records.is_open() && self.is_declared_dead(**epoch, by));
        let takers = open.filter_map(|(_, records)| records.taken.as_ref()?.taker.as_ref());
        let mut dead = BTreeMap::new();
        for taker in takers {
            let highest = dead.entry(taker.node.clone()).or_insert(taker.incarnation);
            *highest = taker.incarnation.max(*highest);
        }
        dead
    }

    /// How a grant is closed for an Instance that does not run: released if it was taken for it, else refused.
    pub fn decide_close(&self, epoch: Epoch, taker: &Taker) -> Closing {
        let own = self.0.get(&epoch).and_then(|records| records.taken.as_ref());
        match self.use_of(epoch) {
            EpochUse::Released => Closing::Done(ObjectUse::Released),
            EpochUse::Refused => Closing::Done(ObjectUse::Refused),
            EpochUse::Held if own.and_then(|record| record.taker.as_ref()) != Some(taker) => {
                Closing::Done(ObjectUse::Held)
            }
            EpochUse::Held => Closing::Release,
            EpochUse::Untouched => Closing::Refuse,
        }
    }

    /// What became of one epoch.
    pub fn use_of(&self, epoch: Epoch) -> EpochUse {
        match self.0.get(&epoch) {
            Some(records) if records.refused.is_some() => EpochUse::Refused,
            Some(records) if records.released.is_some() => EpochUse::Released,
            Some(records) if records.taken.is_some() => EpochUse::Held,
            _ => EpochUse::Untouched,
        }
    }

    /// The highest record that somebody took the object, and whether it still stands.
    pub fn last_taken(&self) -> Option<LastTaken> {
        let (epoch, records) = self.0.iter().rev().find(|(_, records)| records.taken.is_some())?;
        let nobody = Grant { epoch: *epoch, predecessor: Epoch(0), predecessor_end: PredecessorEnd::Released };
        let holds = records.is_open() && !self.is_declared_dead(*epoch, &nobody);
        Some(LastTaken { epoch: *epoch, record: records.taken.clone()?, holds })
    }

    /// Whether what lies here is a copy that a move made, up to this epoch, and that did not become the object, or is it no
    /// more. Who becomes the object is released by its move, and taken by others later.
    pub fn decide_discard(&self, epoch: Epoch, has_image: bool) -> Result<(), NotACopy> {
        if let Some((found, _)) = self.0.range(Epoch(epoch.0.saturating_add(1))..).next_back() {
            return Err(NotACopy::Newer(*found));
        }
        let last = self.0.iter().rev().find_map(|(epoch, records)| Some((*epoch, records, records.taken.as_ref()?)));
        match last {
            None if has_image => Err(NotACopy::NoRecord),
            None => Ok(()),
            Some((epoch, records, taken)) => match &taken.taker {
                Some(taker) if taker.is_move() && records.released.is_none() => Ok(()),
                Some(taker) if taker.is_move() => Err(NotACopy::IsTheObject(epoch)),
                taker => {
                    let taker = taker.as_ref().map_or_else(|| "a deletion".to_owned(), ToString::to_string);
                    Err(NotACopy::TakenBy { epoch, taker })
                }
            },
        }
    }

    /// Epochs that no decision needs any more once `epoch` was taken rightly; the lowest first.
    pub fn settled_below(&self, epoch: Epoch) -> Vec<Epoch> {
        self.0.range(..epoch).map(|(epoch, _)| *epoch).collect()
    }
}

/// Whether a right still stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    Holds,
    /// For good; in words, how.
    Over(String),
    /// The records do not say, and why.
    Unclear(String),
}

/// Who took an object last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastTaken {
    pub epoch: Epoch,
    pub record: Record,
    /// It is not closed, and no later grant says that its taker is dead.
    pub holds: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpochUse {
    /// No record names this epoch.
    Untouched,
    Held,
    Released,
    Refused,
}

#[cfg(test)]
mod tests {
    use kibo_crds::{Incarnation, InstanceId};
    use proptest::prelude::*;

    use super::*;
    use crate::launch::{By, Operation};

    fn taker(node: &str) -> Taker {
        // One Instance for each node and test: the same id again is the same Instance.
        let instance = format!("inst-0000000000000000000000000{}", node.len() % 10).parse().unwrap();
        Taker { node: node.parse().unwrap(), incarnation: Incarnation(1), by: By::Instance(instance) }
    }

    fn grant(epoch: u64, predecessor: u64, predecessor_end: PredecessorEnd) -> Grant {
        Grant { epoch: Epoch(epoch), predecessor: Epoch(predecessor), predecessor_end }
    }

    #[derive(Clone, Copy)]
    enum On {
        Taken(&'static str),
        Released(&'static str),
        Refused,
        Withdrawn(&'static str),
    }

    fn records(entries: &[(Grant, On)]) -> Records {
        let mut records = Records::default();
        for (grant, on) in entries {
            let record = |node: Option<&str>| Some(Record { taker: node.map(taker), grant: *grant });
            let at = records.0.entry(grant.epoch).or_default();
            match *on {
                On::Taken(node) => at.taken = record(Some(node)),
                On::Released(node) => (at.taken, at.released) = (record(Some(node)), record(Some(node))),
                On::Refused => at.refused = record(None),
                On::Withdrawn(node) => (at.taken, at.refused) = (record(Some(node)), record(Some(node))),
            }
        }
        records
    }

    fn conflict(decision: &TakeDecision) -> &'static str {
        match decision {
            TakeDecision::Write => "write",
            TakeDecision::AlreadyMine => "mine",
            TakeDecision::Conflict(Conflict::Superseded { .. }) => "superseded",
            TakeDecision::Conflict(Conflict::Refused(_)) => "refused",
            TakeDecision::Conflict(Conflict::Released(_)) => "released",
            TakeDecision::Conflict(Conflict::TakenByOther { .. }) => "other",
            TakeDecision::Conflict(Conflict::PredecessorHolds { .. }) => "predecessor",
            TakeDecision::Conflict(Conflict::Isolated { .. }) => "isolated",
        }
    }

    /// What it is about, the records, the grant, what is decided.
    type Case<'a> = (&'a str, &'a [(Grant, On)], Grant, &'a str);

    #[test]
    fn what_records_and_grant_mean_for_a_taker() {
        use On::{Refused, Released, Taken, Withdrawn};
        use PredecessorEnd as End;
        let first = grant(1, 0, End::None);
        let after_release = |epoch| grant(epoch, epoch - 1, End::Released);
        let after_isolation = |epoch| grant(epoch, epoch - 1, End::Isolated);
        let table: &[Case<'_>] = &[
            ("nothing there", &[], first, "write"),
            ("a crash after the record was written", &[(first, Taken("a"))], first, "mine"),
            ("another node has this epoch", &[(first, Taken("bb"))], first, "other"),
            ("this epoch was refused", &[(first, Refused)], first, "refused"),
            ("this epoch was withdrawn", &[(first, Withdrawn("a"))], first, "refused"),
            ("this epoch has ended", &[(first, Released("a"))], first, "released"),
            ("the predecessor released", &[(first, Released("bb"))], after_release(2), "write"),
            ("the predecessor refused", &[(first, Refused)], grant(2, 1, End::Refused), "write"),
            (
                "the pool lacks the release that the grant tells of",
                &[(first, Taken("bb"))],
                after_release(2),
                "predecessor",
            ),
            ("the predecessor is dead", &[(first, Taken("bb"))], after_isolation(2), "write"),
            (
                "the predecessor's incarnation is over",
                &[(first, Taken("bb"))],
                grant(2, 1, End::IncarnationEnded),
                "write",
            ),
            ("a newer grant was taken", &[(after_release(2), Taken("bb"))], first, "superseded"),
            ("a newer grant was refused", &[(after_release(2), Refused)], first, "superseded"),
            (
                "a newer one appeared after the own record",
                &[(first, Taken("a")), (after_isolation(2), Taken("bb"))],
                first,
                "superseded",
            ),
            (
                "an older one appeared after the own record",
                &[(first, Taken("bb")), (after_release(2), Taken("a"))],
                after_release(2),
                "predecessor",
            ),
            (
                "an earlier taker was told that the first is dead",
                &[(first, Taken("bb")), (after_isolation(2), Released("a"))],
                after_release(3),
                "write",
            ),
            (
                "the one who was told refused",
                &[(first, Taken("bb")), (after_isolation(2), Refused)],
                grant(3, 2, End::Refused),
                "write",
            ),
            (
                "dead up to the predecessor, not beyond",
                &[(first, Taken("bb")), (after_release(2), Taken("ccc"))],
                grant(3, 1, End::Isolated),
                "predecessor",
            ),
            ("a withdrawn record holds nothing", &[(first, Withdrawn("bb"))], grant(2, 1, End::Refused), "write"),
        ];
        for (what, on_disk, grant, expected) in table {
            let decision = records(on_disk).decide_take(grant, &taker("a"));
            assert_eq!(conflict(&decision), *expected, "{what}");
        }
    }

    #[test]
    fn only_what_a_move_left_over_is_a_copy() {
        let first = grant(1, 0, PredecessorEnd::None);
        let moved = Record { taker: Some(Taker { by: By::Operation(Operation::Move), ..taker("a") }), grant: first };
        let mut copy = Records::default();
        copy.0.entry(Epoch(1)).or_default().taken = Some(moved.clone());
        assert_eq!(copy.decide_discard(Epoch(1), true), Ok(()));
        assert_eq!(copy.decide_discard(Epoch(7), true), Ok(()), "an older one");
        let mut object = copy.clone();
        object.0.entry(Epoch(1)).or_default().released = Some(moved);
        assert_eq!(object.decide_discard(Epoch(7), true), Err(NotACopy::IsTheObject(Epoch(1))));
        let mut newer = copy;
        newer.0.extend(records(&[(grant(2, 1, PredecessorEnd::Isolated), On::Taken("a"))]).0);
        assert_eq!(newer.decide_discard(Epoch(1), true), Err(NotACopy::Newer(Epoch(2))));
        assert!(matches!(newer.decide_discard(Epoch(2), true), Err(NotACopy::TakenBy { .. })));
        assert_eq!(Records::default().decide_discard(Epoch(1), true), Err(NotACopy::NoRecord));
        assert_eq!(Records::default().decide_discard(Epoch(1), false), Ok(()), "half made, or half removed");
    }

    #[test]
    fn who_took_it_last_and_may_write_still() {
        use On::{Refused, Released, Taken, Withdrawn};
        let first = grant(1, 0, PredecessorEnd::None);
        let second = |end| grant(2, 1, end);
        for (what, on_disk, expected) in [
            ("nobody", vec![], None),
            ("only refused", vec![(first, Refused)], None),
            ("open", vec![(first, Taken("a"))], Some((1, true))),
            ("closed", vec![(first, Released("a"))], Some((1, false))),
            ("withdrawn", vec![(first, Withdrawn("a"))], Some((1, false))),
            (
                "a newer grant was refused",
                vec![(first, Taken("a")), (second(PredecessorEnd::Released), Refused)],
                Some((1, true)),
            ),
            ("declared dead", vec![(first, Taken("a")), (second(PredecessorEnd::Isolated), Refused)], Some((1, false))),
            ("both", vec![(first, Released("a")), (second(PredecessorEnd::Released), Taken("bb"))], Some((2, true))),
        ] {
            let last = records(&on_disk).last_taken().map(|last| (last.epoch.0, last.holds));
            assert_eq!(last, expected, "{what}");
        }
    }

    #[test]
    fn the_same_node_with_another_instance_is_another_taker() {
        let first = grant(1, 0, PredecessorEnd::None);
        let records = records(&[(first, On::Taken("a"))]);
        let other = Taker { by: By::Instance(InstanceId::generate()), ..taker("a") };
        assert_eq!(conflict(&records.decide_take(&first, &other)), "other");
    }

    /// A history of grants as the leader gives them: the next only when the last has ended in some way.
    fn histories() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(0u8..4, 0..8)
    }

    proptest! {
        /// As long as the leader tells the truth, the next grant can always be taken; and whoever is
        /// open without being declared dead always stops it.
        #[test]
        fn a_true_grant_is_taken_and_a_false_one_is_not(history in histories()) {
            let mut entries = Vec::new();
            let mut end = PredecessorEnd::None;
            let mut epoch = 0;
            for step in history {
                let grant = grant(epoch + 1, epoch, end);
                epoch += 1;
                let (on, next) = match step {
                    0 => (On::Released("bb"), PredecessorEnd::Released),
                    1 => (On::Refused, PredecessorEnd::Refused),
                    2 => (On::Taken("bb"), PredecessorEnd::Isolated),
                    _ => (On::Withdrawn("bb"), PredecessorEnd::Refused),
                };
                entries.push((grant, on));
                end = next;
            }
            let records = records(&entries);
            let next = grant(epoch + 1, epoch, end);
            prop_assert_eq!(records.decide_take(&next, &taker("a")), TakeDecision::Write);
            // The same with a leader that takes the last holder for released though it is not.
            if end == PredecessorEnd::Isolated {
                let wrong = grant(epoch + 1, epoch, PredecessorEnd::Released);
                let decision = records.decide_take(&wrong, &taker("a"));
                prop_assert_eq!(conflict(&decision), "predecessor");
            }
            // No grant of the past can be taken any more.
            for past in 1..=epoch {
                let again = grant(past, past - 1, PredecessorEnd::Isolated);
                let decision = records.decide_take(&again, &taker("a"));
                prop_assert!(matches!(decision, TakeDecision::Conflict(_)), "{:?}", decision);
            }
        }
    }
}
