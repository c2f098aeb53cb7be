use super::*;

fn node() -> NodeId {
    "node-a".parse().unwrap()
}

fn holder(idle: bool) -> Right {
    let json = serde_json::json!({ "node": "node-a", "incarnation": 2, "epoch": 5, "idle": idle });
    (Some(serde_json::from_value(json).unwrap()), None)
}

fn previous(ended: HolderEnd) -> Right {
    let json = serde_json::json!({ "node": "node-a", "incarnation": 2, "epoch": 5, "ended": ended });
    (None, Some(serde_json::from_value(json).unwrap()))
}

fn running(phase: WorkspacePhase) -> Seen {
    let execution = serde_json::json!({
        "instanceId": "inst-01k6zzzzzzzzzzzzzzzzzzzzzz", "node": "node-a", "incarnation": 2, "cpuMilli": 1000,
        "memoryBytes": 1, "lastSeq": 1, "startedAt": "2026-01-01T00:00:00Z",
    });
    Seen {
        phase: Some(phase),
        execution: Some(serde_json::from_value(execution).unwrap()),
        layer: holder(false),
        volume: Some(holder(false)),
        ..Seen::default()
    }
}

fn ended(reason: &str) -> LastExecution {
    let json = serde_json::json!({
        "instanceId": "inst-01k6zzzzzzzzzzzzzzzzzzzzzz", "node": "node-a", "incarnation": 2,
        "endedAt": "2026-01-01T00:00:00Z", "reason": reason,
    });
    serde_json::from_value(json).unwrap()
}

fn alive() -> NodeFacts {
    NodeFacts { is_alive: true, incarnation: Some(Incarnation(2)), ..NodeFacts::default() }
}

fn told(seen: &Seen, facts: NodeFacts) -> [(State, Source); 3] {
    decide(seen, &[(node(), facts)].into()).map(|part| (part.state, part.source))
}

use Source::{ControlPlane, Node as ByNode};
use State::{Held, Released, Releasing, Retained, Unknown};

#[test]
fn while_it_runs_its_node_holds_it() {
    let all = |state, source| [(state, source); 3];
    assert_eq!(told(&running(WorkspacePhase::Available), alive()), all(Held, ByNode));
    assert_eq!(told(&running(WorkspacePhase::Stopping), alive()), all(Releasing, ByNode));
    let silent = NodeFacts { is_alive: false, ..alive() };
    assert_eq!(told(&running(WorkspacePhase::Available), silent), all(Unknown, ControlPlane));
    let isolated = NodeFacts { isolated: Some(Incarnation(2)), ..silent };
    assert_eq!(told(&running(WorkspacePhase::Available), isolated), all(Released, ControlPlane));
    let back = NodeFacts { incarnation: Some(Incarnation(3)), ..alive() };
    assert_eq!(told(&running(WorkspacePhase::Available), back), all(Released, ControlPlane));
    // Who may not read nodes is not told that the node says so.
    assert_eq!(told(&running(WorkspacePhase::Available), NodeFacts::HIDDEN), all(Unknown, ControlPlane));
    // The node may not have heard of it yet.
    assert_eq!(told(&running(WorkspacePhase::Starting), alive()), all(Held, ControlPlane));
}

#[test]
fn after_a_stop_the_node_has_given_its_word() {
    let stopped = |layer| Seen {
        phase: Some(WorkspacePhase::Stopped),
        last: Some(ended("Stopped")),
        layer,
        volume: None,
        ..Seen::default()
    };
    let shared = stopped(previous(HolderEnd::Released));
    assert_eq!(told(&shared, alive()), [(Released, ByNode), (Released, ControlPlane), (Released, ByNode)]);
    let private = stopped(holder(true));
    assert_eq!(told(&private, alive())[2], (Retained, ByNode));
    let back = NodeFacts { incarnation: Some(Incarnation(3)), ..alive() };
    assert_eq!(told(&private, back)[2], (Retained, ByNode), "it lies there still");
    let isolated = NodeFacts { isolated: Some(Incarnation(2)), ..back };
    assert_eq!(told(&private, isolated)[2], (Released, ControlPlane));
}

#[test]
fn after_an_isolation_or_a_retirement_the_control_plane_says_it() {
    let failed = |reason, end| Seen {
        phase: Some(WorkspacePhase::Failed),
        last: Some(ended(reason)),
        layer: previous(end),
        volume: Some(previous(end)),
        ..Seen::default()
    };
    let all = [(Released, ControlPlane); 3];
    assert_eq!(told(&failed("Unavailable", HolderEnd::Isolated), alive()), all);
    assert_eq!(told(&failed("NodeRestarted", HolderEnd::IncarnationEnded), alive()), all);
    assert_eq!(told(&failed("VmmExited", HolderEnd::Released), alive()), [(Released, ByNode); 3]);
    let retired = NodeFacts { is_retired: true, ..NodeFacts::default() };
    assert_eq!(told(&failed("VmmExited", HolderEnd::Released), retired), all);
    let deleted = Seen { is_deleted: true, last: Some(ended("Stopped")), ..Seen::default() };
    assert_eq!(told(&deleted, retired), all);
    assert_eq!(told(&deleted, alive()), [(Released, ByNode), (Released, ControlPlane), (Released, ByNode)]);
}

#[test]
fn what_never_ran_holds_nothing() {
    assert_eq!(told(&Seen::default(), alive()), [(Released, ControlPlane); 3]);
    assert_eq!(told(&Seen { is_deleted: true, ..Seen::default() }, alive()), [(Released, ControlPlane); 3]);
}
