//! The leaderships that this control plane has seen, kept with the Lease, so that a store that was put back to an
//! older state can be told from one that was not: revisions grow again after a restore (or are raised by it), but a
//! leadership that began after the backup is not in it, nor are the later renewals of the one that it was made in.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kibo_crds::Term;
use kibo_protocol::v1::Moment;
use serde::{Deserialize, Serialize};

use super::decide::term_of;

/// Annotation of the Lease with its leaderships, the newest last.
const ANNOTATION: &str = "kibotos.dev/leaderships";
/// Of nodes that were away for longer than these, only the term is compared.
const KEPT: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Leadership {
    term: u64,
    /// Random.
    id: String,
    /// Its last renewal, in microseconds since 1970; absent while it lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    until: Option<u64>,
}

/// What was before this leadership, and how far it has got.
#[derive(Debug, Default)]
pub struct History {
    leaderships: Vec<Leadership>,
    renewed: AtomicU64,
}

/// The last renewal that a Lease tells of.
pub fn renewed(lease: &Lease) -> u64 {
    let renewed = lease.spec.as_ref().and_then(|spec| spec.renew_time.as_ref());
    renewed.and_then(|time| u64::try_from(time.0.as_microsecond()).ok()).unwrap_or_default()
}

fn read(lease: &Lease) -> Vec<Leadership> {
    let text = lease.metadata.annotations.as_ref().and_then(|annotations| annotations.get(ANNOTATION));
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// The annotations of a Lease that is being taken: one leadership more, and the end of the one before.
pub fn with_one_more(lease: &Lease, term: Term) -> BTreeMap<String, String> {
    let mut leaderships = read(lease);
    if let Some(last) = leaderships.last_mut() {
        last.until.get_or_insert(renewed(lease));
    }
    let id = ulid::Ulid::new().to_string().to_ascii_lowercase();
    leaderships.push(Leadership { term: term.0, id, until: None });
    leaderships.drain(..leaderships.len().saturating_sub(KEPT));
    let mut annotations = lease.metadata.annotations.clone().unwrap_or_default();
    annotations.insert(ANNOTATION.to_owned(), serde_json::to_string(&leaderships).unwrap_or_default());
    annotations
}

impl History {
    /// Of the leadership that has just taken this Lease.
    pub fn of(lease: &Lease) -> Self {
        let mut leaderships = read(lease);
        let term = term_of(lease.spec.as_ref().unwrap_or(&LeaseSpec::default()));
        if leaderships.last().is_none_or(|last| last.term != term.0) {
            leaderships.push(Leadership { term: term.0, id: String::new(), until: None });
        }
        Self { leaderships, renewed: AtomicU64::new(renewed(lease)) }
    }

    /// The API server has confirmed a renewal.
    pub fn renew(&self, renewed: u64) {
        self.renewed.fetch_max(renewed, Ordering::Relaxed);
    }

    pub fn renewed(&self) -> u64 {
        self.renewed.load(Ordering::Relaxed)
    }

    /// What nodes are told to remember.
    pub fn now(&self) -> Moment {
        let current = self.leaderships.last();
        Moment {
            term: current.map(|current| current.term).unwrap_or_default(),
            leadership: current.map(|current| current.id.clone()).unwrap_or_default(),
            renewed_unix_micros: self.renewed(),
        }
    }

    /// Whether that moment is part of this history; else how it shows that it is not.
    pub fn contains(&self, moment: &Moment) -> Result<(), String> {
        let Some(current) = self.leaderships.last() else { return Ok(()) };
        if moment.term > current.term {
            return Err(format!("a leader of term {} steered the node, this one has {}", moment.term, current.term));
        }
        let Some(known) = self.leaderships.iter().find(|known| known.term == moment.term) else {
            let is_older = self.leaderships.first().is_some_and(|oldest| moment.term < oldest.term);
            // Terms that nobody led under are skipped; the node was led under this one.
            return if is_older {
                Ok(())
            } else {
                Err(format!("this control plane had no leader of term {}", moment.term))
            };
        };
        if known.id != moment.leadership {
            return Err(format!(
                "the node was steered by another leader of term {} than this control plane had",
                known.term
            ));
        }
        match known.until {
            Some(until) if moment.renewed_unix_micros > until => Err(format!(
                "the node was steered by the leader of term {} for {} s longer than this control plane knows",
                known.term,
                (moment.renewed_unix_micros - until).div_ceil(1_000_000)
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::{apimachinery::pkg::apis::meta::v1::MicroTime, jiff::Timestamp};

    use super::*;

    /// Takes a Lease that was last renewed at `second`.
    fn taken(mut lease: Lease, second: i64, term: i32) -> Lease {
        let spec = lease.spec.get_or_insert_default();
        spec.renew_time = Some(MicroTime(Timestamp::from_second(second).unwrap()));
        lease.metadata.annotations = Some(with_one_more(&lease, Term(u64::try_from(term).unwrap())));
        lease.spec.get_or_insert_default().lease_transitions = Some(term);
        lease
    }

    #[test]
    fn what_came_after_a_backup_is_not_in_the_history() {
        let second = taken(taken(Lease::default(), 0, 1), 10, 2);
        let moments_of = |lease: &Lease| {
            let history = History::of(lease);
            move |renewed: u64| {
                history.renew(renewed * 1_000_000);
                history.now()
            }
        };
        let (before, lost) = (moments_of(&second), moments_of(&taken(second.clone(), 30, 3)));
        // The backup was made at second 20, in term 2; the store that was put back is led under term 3 again.
        let history = History::of(&taken(second, 20, 3));
        for (what, moment, is_in_it) in [
            (
                "an earlier term",
                Moment { term: 1, leadership: history.leaderships[0].id.clone(), renewed_unix_micros: 10_000_000 },
                true,
            ),
            ("before the backup", before(15), true),
            ("at the backup", before(20), true),
            ("after the backup", before(21), false),
            ("another leader of the same term", lost(30), false),
            ("a later term", Moment { term: 4, ..Moment::default() }, false),
            ("a term before the first that is kept", Moment::default(), true),
            ("this leadership", history.now(), true),
        ] {
            let answer = history.contains(&moment);
            assert_eq!(answer.is_ok(), is_in_it, "{what}: {answer:?}");
        }
    }

    #[test]
    fn the_list_is_bounded() {
        let lease = (1..100).fold(Lease::default(), |lease, term| taken(lease, i64::from(term), term));
        assert_eq!(History::of(&lease).leaderships.len(), KEPT);
    }
}
