//! Whether the operator that answered is one to obey. No I/O.

use kibo_crds::{Incarnation, Term};
use kibo_protocol::v1;

use crate::state::{Life, NodeRecord};

/// What a Hello said, to be compared with its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    pub incarnation: Option<Incarnation>,
    /// Empty when the node belongs to none yet.
    pub cluster_id: String,
    /// Names what the node has seen, should the control plane not know it.
    pub quarantine: String,
}

/// Whether an admin ordered that the node takes up with this control plane though it was put back: it names what this
/// node has seen, so that it is about no other accident.
pub fn adopts(sent: &Sent, ack: &v1::HelloAck) -> Result<bool, String> {
    match ack.adopts.as_str() {
        "" => Ok(false),
        adopts if adopts == sent.quarantine => Ok(true),
        adopts => Err(format!("the operator ends the quarantine {adopts}, but this node is in {}", sent.quarantine)),
    }
}

/// The record after an accepted Hello, or why this operator is not obeyed.
pub fn accept(record: &NodeRecord, sent: &Sent, boot_id: &str, ack: &v1::HelloAck) -> Result<NodeRecord, String> {
    if ack.cluster_id.is_empty() {
        return Err("the operator did not say which cluster it speaks for".into());
    }
    let is_adopted = adopts(sent, ack)?;
    if !is_adopted && !sent.cluster_id.is_empty() && sent.cluster_id != ack.cluster_id {
        let (ours, theirs) = (&sent.cluster_id, &ack.cluster_id);
        return Err(format!("the operator speaks for cluster {theirs}, but this node belongs to {ours}"));
    }
    let incarnation = Incarnation(ack.incarnation);
    match sent.incarnation {
        Some(sent) if sent != incarnation => {
            return Err(format!("the operator changed the incarnation from {sent} to {incarnation} unasked"));
        }
        None if record.life.as_ref().is_some_and(|life| life.incarnation >= incarnation) || incarnation.0 == 0 => {
            return Err(format!("the operator gave the incarnation {incarnation}, which is not a new one"));
        }
        _ => {}
    }
    Ok(NodeRecord {
        life: Some(Life { incarnation, boot_id: boot_id.to_owned() }),
        cluster_id: ack.cluster_id.clone(),
        highest_revision: if is_adopted { ack.revision } else { record.highest_revision.max(ack.revision) },
        highest_term: record.highest_term,
        latest: ack.moment.clone().map(Into::into).or_else(|| record.latest.clone()),
        lost_pools: record.lost_pools.clone(),
    })
}

/// Whether a message of this term is obeyed; `true` when the term is a new highest one.
pub fn check_term(highest: Term, term: u64) -> Result<bool, String> {
    let term = Term(term);
    if term < highest {
        return Err(format!("a leader of term {term} spoke, but term {highest} was obeyed already"));
    }
    Ok(term > highest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(incarnation: u64, cluster_id: &str) -> v1::HelloAck {
        v1::HelloAck { incarnation, cluster_id: cluster_id.into(), revision: 5, ..Default::default() }
    }

    fn record(incarnation: u64) -> NodeRecord {
        NodeRecord {
            life: Some(Life { incarnation: Incarnation(incarnation), boot_id: "a".into() }),
            cluster_id: "c".into(),
            highest_revision: 9,
            highest_term: Term(2),
            latest: None,
            lost_pools: std::collections::BTreeSet::new(),
        }
    }

    fn sent(incarnation: Option<u64>) -> Sent {
        Sent { incarnation: incarnation.map(Incarnation), cluster_id: "c".into(), quarantine: "q-1".into() }
    }

    #[test]
    fn an_adopted_node_forgets_the_control_plane_that_is_no_more() {
        let adopting = |adopts: &str| v1::HelloAck { adopts: adopts.into(), ..ack(3, "d") };
        let accepted = accept(&record(3), &sent(Some(3)), "b", &adopting("q-1")).unwrap();
        assert_eq!((accepted.cluster_id.as_str(), accepted.highest_revision), ("d", 5));
        assert!(accept(&record(3), &sent(Some(3)), "b", &adopting("q-2")).is_err(), "another accident");
        assert!(accept(&record(3), &sent(Some(3)), "b", &adopting("")).is_err(), "no adoption");
    }

    #[test]
    fn who_is_obeyed() {
        let fresh = NodeRecord::default();
        for (what, record, sent, ack, good) in [
            ("the first session", fresh.clone(), None, ack(1, "c"), true),
            ("a daemon restart", record(3), Some(Incarnation(3)), ack(3, "c"), true),
            ("a host restart", record(3), None, ack(4, "c"), true),
            ("an incarnation of the past", record(3), None, ack(3, "c"), false),
            ("no incarnation", fresh.clone(), None, ack(0, "c"), false),
            ("an incarnation that nobody asked for", record(3), Some(Incarnation(3)), ack(4, "c"), false),
            ("another cluster", record(3), Some(Incarnation(3)), ack(3, "d"), false),
            ("no cluster", fresh, None, ack(1, ""), false),
        ] {
            let sent = Sent { incarnation: sent, cluster_id: record.cluster_id.clone(), quarantine: "q-1".into() };
            let accepted = accept(&record, &sent, "b", &ack);
            assert_eq!(accepted.is_ok(), good, "{what}: {accepted:?}");
        }
    }

    #[test]
    fn the_life_moves_on_to_this_boot_and_the_revision_never_falls() {
        let accepted = accept(&record(3), &sent(None), "b", &ack(4, "c")).unwrap();
        assert_eq!(accepted.life, Some(Life { incarnation: Incarnation(4), boot_id: "b".into() }));
        assert_eq!(accepted.highest_revision, 9);
    }

    #[test]
    fn a_lower_term_is_not_obeyed() {
        assert!(check_term(Term(2), 1).is_err());
        assert_eq!(check_term(Term(2), 2), Ok(false));
        assert_eq!(check_term(Term(2), 3), Ok(true));
    }
}
