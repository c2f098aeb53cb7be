//! The commands of a Node that carry an id. Pure.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{
    CommandRecord, Node,
    node::{Admission, AdoptionResult, IsolationResult, IsolationState, NodeStatus},
};

use crate::commands::{self, Outcome};

/// The records as they should be, `status` being right in everything else.
pub fn records(node: &Node, status: &NodeStatus, now: &Time) -> Vec<CommandRecord> {
    commands::records(&node.spec.requested(), &status.commands, now, |record, stands| {
        outcome(record, stands, node, status)
    })
}

fn outcome(record: &CommandRecord, stands: bool, node: &Node, status: &NodeStatus) -> Outcome {
    // The host is told, and speaks for this node no more.
    let is_silent = !status.has_live_session();
    match record.operation.as_str() {
        "isolate" => isolation(record, stands, node, status),
        "adopt" => adoption(record, stands, status),
        "retire" => Outcome::done_when(is_silent && status.admission == Some(Admission::Retired)),
        "revoke" => Outcome::done_when(is_silent && status.admission != Some(Admission::Admitted)),
        // The request itself is all of it: it is in the spec, which the node's session follows.
        _ => Outcome::done_when(true),
    }
}

/// The end of an isolation is in the status, under its id; an isolation of this life that was carried out already is
/// what a second command finds.
fn isolation(record: &CommandRecord, stands: bool, node: &Node, status: &NodeStatus) -> Outcome {
    let wanted = node.spec.isolation.as_ref().map(|isolation| isolation.incarnation);
    let found = status.isolation.as_ref().filter(|found| {
        found.request_id.as_ref() == Some(&record.id)
            || (stands && found.state == IsolationState::Finished && Some(found.incarnation) >= wanted)
    });
    match found {
        Some(found) if found.state == IsolationState::Finished => {
            Outcome { counts: counts(found), ..Outcome::done_when(true) }
        }
        Some(found) if found.state == IsolationState::Refused => {
            Outcome::failed("HostStillWrites", found.evidence.clone().unwrap_or_default())
        }
        None if !stands => Outcome::failed("Superseded", "another isolation took the place of this one".to_owned()),
        Some(_) | None => Outcome::done_when(false),
    }
}

/// It is carried out with the session that the node opens next.
fn adoption(record: &CommandRecord, stands: bool, status: &NodeStatus) -> Outcome {
    let done = status.adoption.as_ref().filter(|done| done.request_id.as_ref() == Some(&record.id));
    match done {
        Some(done) if status.has_live_session() && status.quarantine.is_none() => {
            Outcome { counts: counts_of_adoption(done), ..Outcome::done_when(true) }
        }
        None if !stands => Outcome::failed("Superseded", "another adoption took the place of this one".to_owned()),
        Some(_) | None => Outcome::done_when(false),
    }
}

fn counts_of_adoption(adoption: &AdoptionResult) -> BTreeMap<String, u32> {
    [("adopted", adoption.adopted), ("ended", adoption.ended), ("unknown", adoption.unknown_count)]
        .into_iter()
        .map(|(name, count)| (name.to_owned(), count))
        .collect()
}

fn counts(isolation: &IsolationResult) -> BTreeMap<String, u32> {
    [
        ("releasedVolumes", isolation.released_volumes),
        ("releasedLayers", isolation.released_layers),
        ("failedWorkspaces", isolation.failed_workspaces),
    ]
    .into_iter()
    .filter_map(|(name, count)| Some((name.to_owned(), count?)))
    .collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::{SignedDuration, Timestamp};
    use kibo_crds::{
        CommandResult, Incarnation,
        node::{
            Adoption, AdoptionAction, AdoptionResult, Drain, Isolation, NodeSession, NodeSpec, Retirement,
            UnknownInstances,
        },
    };

    use super::*;
    use crate::commands::{KEPT, MAX};

    fn at(second: i64) -> Time {
        Time(Timestamp::from_second(second).unwrap())
    }

    fn node(change: impl FnOnce(&mut NodeSpec)) -> Node {
        let mut node = Node::new("n", NodeSpec::default());
        change(&mut node.spec);
        node
    }

    fn draining(requested: bool, id: &str) -> Node {
        node(|spec| spec.drain = Some(Drain { requested, request_id: Some(id.parse().unwrap()) }))
    }

    fn isolating(id: &str) -> Node {
        node(|spec| {
            spec.isolation = Some(Isolation {
                incarnation: Incarnation(3),
                confirm_host_cannot_write: true,
                force_despite_evidence: false,
                request_id: Some(id.parse().unwrap()),
            });
        })
    }

    fn isolation(id: &str, state: IsolationState) -> NodeStatus {
        NodeStatus {
            isolation: Some(IsolationResult {
                incarnation: Incarnation(3),
                request_id: Some(id.parse().unwrap()),
                state,
                evidence: Some("node b saw it write".to_owned()),
                released_volumes: Some(2),
                released_layers: Some(3),
                failed_workspaces: Some(1),
                started_at: None,
                finished_at: None,
            }),
            ..NodeStatus::default()
        }
    }

    fn with(status: NodeStatus, commands: Vec<CommandRecord>) -> NodeStatus {
        NodeStatus { commands, ..status }
    }

    #[test]
    fn each_new_id_is_recorded_once() {
        let first = records(&draining(true, "a"), &NodeStatus::default(), &at(1));
        assert_eq!((first.len(), first[0].operation.as_str(), first[0].result), (1, "drain", CommandResult::Succeeded));
        let status = with(NodeStatus::default(), first.clone());
        assert_eq!(records(&draining(true, "a"), &status, &at(9)), first, "nothing is new");
        let second = records(&draining(false, "b"), &status, &at(9));
        let told: Vec<_> = second.iter().map(|it| (it.id.as_str(), it.operation.as_str())).collect();
        assert_eq!(told, [("a", "drain"), ("b", "cancel-drain")]);
    }

    #[test]
    fn a_record_outlives_its_day_while_its_id_stands_in_the_spec() {
        let day = i64::try_from(KEPT.as_secs()).unwrap();
        let status = with(NodeStatus::default(), records(&draining(true, "a"), &NodeStatus::default(), &at(0)));
        assert_eq!(records(&draining(true, "a"), &status, &at(day * 3)).len(), 1);
        assert_eq!(records(&node(|_| {}), &status, &at(day)).len(), 1);
        assert_eq!(records(&node(|_| {}), &status, &at(day + 1)).len(), 0);
    }

    #[test]
    fn the_oldest_go_first_but_not_those_in_force() {
        let mut status = with(NodeStatus::default(), Vec::new());
        status.commands = records(&draining(true, "in-force"), &status, &at(0));
        for number in 0..20 {
            let mut node = draining(true, "in-force");
            node.spec.retirement = Some(Retirement { request_id: Some(format!("r{number}").parse().unwrap()) });
            status.admission = Some(Admission::Retired);
            status.commands = records(&node, &status, &at(number));
        }
        let ids: Vec<_> = status.commands.iter().map(|it| it.id.to_string()).collect();
        assert_eq!(ids.len(), MAX);
        assert_eq!((ids[0].as_str(), ids[1].as_str(), ids[15].as_str()), ("in-force", "r5", "r19"));
    }

    #[test]
    fn an_isolation_ends_with_what_the_status_says_of_it() {
        let begun = records(&isolating("a"), &NodeStatus::default(), &at(1));
        assert_eq!(begun[0].result, CommandResult::Processing);
        let seen =
            |id: &str, state| records(&isolating("a"), &with(isolation(id, state), begun.clone()), &at(2))[0].clone();
        assert_eq!(seen("a", IsolationState::InProgress).result, CommandResult::Processing);
        let done = seen("a", IsolationState::Finished);
        assert_eq!((done.result, done.counts["releasedVolumes"]), (CommandResult::Succeeded, 2));
        assert_eq!(done.finished_at, Some(at(2)));
        let refused = seen("a", IsolationState::Refused);
        assert_eq!(refused.reason.as_deref(), Some("HostStillWrites"));
        assert_eq!(refused.message.as_deref(), Some("node b saw it write"));
        // Somebody else was quicker, with the same life.
        assert_eq!(seen("b", IsolationState::Finished).result, CommandResult::Succeeded);
        assert_eq!(seen("b", IsolationState::Refused).result, CommandResult::Processing);
    }

    #[test]
    fn a_retirement_ends_with_the_session() {
        let retired = node(|spec| spec.retirement = Some(Retirement { request_id: Some("r".parse().unwrap()) }));
        let with_session = |alive| NodeStatus {
            admission: Some(Admission::Retired),
            session: Some(session(alive)),
            ..NodeStatus::default()
        };
        let told = records(&retired, &with_session(true), &at(1));
        assert_eq!(told[0].result, CommandResult::Processing);
        assert_eq!(records(&retired, &with(with_session(false), told), &at(2))[0].result, CommandResult::Succeeded);
    }

    fn session(alive: bool) -> NodeSession {
        NodeSession {
            id: "s".into(),
            alive,
            incarnation: Incarnation(1),
            boot_id: "b".into(),
            version: "v".into(),
            source_revision: None,
            started_at: at(0),
            ended_at: None,
        }
    }

    #[test]
    fn an_adoption_ends_with_the_session_that_it_opened() {
        let adopting = |id: &str| {
            node(|spec| {
                spec.adoption = Some(Adoption {
                    quarantine: "q".to_owned(),
                    action: AdoptionAction::Adopt,
                    unknown: UnknownInstances::Keep,
                    request_id: Some(id.parse().unwrap()),
                });
            })
        };
        let begun = records(&adopting("a"), &NodeStatus::default(), &at(1));
        assert_eq!((begun[0].operation.as_str(), begun[0].result), ("adopt", CommandResult::Processing));
        let adopted = |alive| NodeStatus {
            session: Some(session(alive)),
            adoption: Some(AdoptionResult {
                quarantine: "q".to_owned(),
                incarnation: Incarnation(1),
                action: AdoptionAction::Adopt,
                unknown: UnknownInstances::Keep,
                request_id: Some("a".parse().unwrap()),
                adopted: 2,
                ended: 1,
                unknown_count: 0,
                unknown_instances: Vec::new(),
                finished_at: at(2),
            }),
            ..NodeStatus::default()
        };
        let seen = |alive| records(&adopting("a"), &with(adopted(alive), begun.clone()), &at(2))[0].clone();
        assert_eq!(seen(false).result, CommandResult::Processing);
        assert_eq!((seen(true).result, seen(true).counts["adopted"]), (CommandResult::Succeeded, 2));
        let replaced = records(&adopting("b"), &with(NodeStatus::default(), begun), &at(2));
        assert_eq!(replaced[0].reason.as_deref(), Some("Superseded"));
    }

    #[test]
    fn an_isolation_that_was_replaced_has_failed_and_what_has_ended_stays() {
        let begun = records(&isolating("a"), &NodeStatus::default(), &at(1));
        let replaced = records(&isolating("b"), &with(NodeStatus::default(), begun), &at(2));
        assert_eq!((replaced[0].result, replaced[0].reason.as_deref()), (CommandResult::Failed, Some("Superseded")));
        let status = with(isolation("b", IsolationState::Finished), replaced.clone());
        let after = records(&isolating("b"), &status, &at(3));
        assert_eq!(after[0], replaced[0]);
        assert_eq!(after[1].result, CommandResult::Succeeded);
        let later = at(3).0 + SignedDuration::from_secs(1);
        assert_eq!(records(&isolating("b"), &with(status, after.clone()), &Time(later)), after, "counted once");
    }
}
