//! What is stored, what the node proves, what comes of it.

use kibo_crds::{
    Bytes, Epoch, Incarnation, InstanceId, MilliCpu, NodeId, SequenceNumber,
    node::{Holder, HolderEnd},
    workspace::{PowerRequest, PowerState, PowerStatus, WorkspaceSpec, WorkspaceStatus},
};
use kube::api::ObjectMeta;

use super::*;
use crate::evidence::{LastTaker, ObjectEvidence};

const UID: &str = "11111111-1111-1111-1111-111111111111";
const VOLUME: &str = "22222222-2222-2222-2222-222222222222";

fn node(name: &str) -> NodeId {
    name.parse().unwrap()
}

fn instance(number: u8) -> InstanceId {
    format!("inst-0000000000000000000000000{number}").parse().unwrap()
}

fn at() -> Time {
    Time(k8s_openapi::jiff::Timestamp::from_second(1_000_000).unwrap())
}

/// A Workspace that ran as `execution` on a node and held its layer with `epoch` when the backup was made.
fn stored(phase: WorkspacePhase, execution: Option<(u8, &str)>, holder: Option<(&str, u64)>) -> Workspace {
    let spec: WorkspaceSpec = serde_json::from_value(serde_json::json!({ "template": "t" })).unwrap();
    let mut workspace = Workspace::new("w", spec);
    workspace.metadata = ObjectMeta { name: Some("w".into()), uid: Some(UID.into()), ..ObjectMeta::default() };
    let consumed = PowerRequest { state: PowerState::Running, ..PowerRequest::at_creation() };
    workspace.status = Some(WorkspaceStatus {
        phase: Some(phase),
        power: Some(PowerStatus { consumed, consumed_at: at() }),
        execution: execution.map(|(number, on)| Execution {
            instance_id: instance(number),
            node: node(on),
            incarnation: Incarnation(3),
            cpu_milli: MilliCpu(1000),
            memory_bytes: Bytes(1 << 20),
            last_seq: SequenceNumber(1),
            started_at: at(),
            address: None,
        }),
        epoch: holder.map(|(_, epoch)| Epoch(epoch)),
        holder: holder.map(|(on, epoch)| Holder {
            node: node(on),
            incarnation: Incarnation(3),
            epoch: Epoch(epoch),
            idle: false,
        }),
        writable_layer: Some(LayerStatus {
            pool: "p".parse().unwrap(),
            size: Bytes(1 << 20),
            grow_to: None,
            created: true,
        }),
        ..WorkspaceStatus::default()
    });
    workspace
}

fn taker(number: u8, on: &str, epoch: u64, holds: bool) -> LastTaker {
    LastTaker {
        node: node(on),
        incarnation: Incarnation(3),
        epoch: Epoch(epoch),
        instance: Some(instance(number)),
        holds,
    }
}

fn records(highest: u64, last: Option<LastTaker>) -> ObjectEvidence {
    ObjectEvidence { pool: "p".parse().unwrap(), highest: Epoch(highest), last, size: Some(Bytes(1 << 20)) }
}

fn runs(number: u8, epoch: u64, state: v1::InstanceState) -> InstanceEvidence {
    InstanceEvidence {
        instance: instance(number),
        workspace_uid: UID.into(),
        workspace: "ns/w".into(),
        workspace_name: "w".into(),
        cpu: MilliCpu(500),
        memory: Bytes(2 << 20),
        state,
        available: state == v1::InstanceState::Running,
        acked: SequenceNumber(4),
        layer_epoch: Epoch(epoch),
        volumes: [(VOLUME.to_owned(), Epoch(epoch))].into(),
    }
}

/// What node a, in incarnation 3, has.
fn proof(running: Option<InstanceEvidence>, layer: Option<ObjectEvidence>) -> Evidence {
    Evidence {
        node: node("a"),
        incarnation: Incarnation(3),
        running: running.into_iter().map(|running| (UID.to_owned(), running)).collect(),
        ended: std::collections::BTreeSet::new(),
        objects: layer.into_iter().map(|layer| (UID.to_owned(), layer)).collect(),
    }
}

/// Execution (number, node), phase, epoch, holder (node, epoch, idle).
type Shown = (Option<(InstanceId, String)>, WorkspacePhase, u64, Option<(String, u64, bool)>);

fn shown(workspace: &Workspace, outcome: &Outcome) -> Shown {
    let status = outcome.status.as_deref().or(workspace.status.as_ref()).unwrap();
    (
        status.execution.as_ref().map(|execution| (execution.instance_id, execution.node.to_string())),
        status.phase.unwrap(),
        status.epoch.unwrap_or_default().0,
        status.holder.as_ref().map(|holder| (holder.node.to_string(), holder.epoch.0, holder.idle)),
    )
}

#[test]
fn what_runs_by_right_is_the_execution_and_what_does_not_run_has_ended() {
    use WorkspacePhase::{Available, Starting, Stopped, Stopping};
    use v1::InstanceState as Is;
    let held = |on: &str, epoch| Some((on.to_owned(), epoch, false));
    let execution = |number, on: &str| Some((instance(number), on.to_owned()));
    let running = |number, epoch| Some(runs(number, epoch, Is::Running));
    let open = |number, on: &str, epoch| Some(records(epoch, Some(taker(number, on, epoch, true))));
    let closed = |number, on: &str, epoch| Some(records(epoch, Some(taker(number, on, epoch, false))));
    let cases: Vec<(&str, Workspace, Evidence, Fate, Shown)> = vec![
        (
            "nothing happened since the backup",
            stored(Available, Some((1, "a")), Some(("a", 1))),
            proof(running(1, 1), open(1, "a", 1)),
            Fate::Adopted,
            (execution(1, "a"), Available, 1, held("a", 1)),
        ),
        (
            "it became available since, and nobody will say so again",
            stored(Starting, Some((1, "a")), Some(("a", 1))),
            proof(running(1, 1), open(1, "a", 1)),
            Fate::Adopted,
            (execution(1, "a"), Available, 1, held("a", 1)),
        ),
        (
            "its Go was on the way: the object is not taken yet",
            stored(Starting, Some((1, "a")), Some(("a", 1))),
            proof(Some(runs(1, 1, Is::Starting)), None),
            Fate::Adopted,
            (execution(1, "a"), Starting, 1, held("a", 1)),
        ),
        (
            "it was stopped and started again",
            stored(Available, Some((1, "a")), Some(("a", 1))),
            proof(running(3, 5), open(3, "a", 5)),
            Fate::Adopted,
            (execution(3, "a"), Available, 5, held("a", 5)),
        ),
        (
            "it was started first after the backup",
            stored(Stopped, None, None),
            proof(running(1, 2), open(1, "a", 2)),
            Fate::Adopted,
            (execution(1, "a"), Available, 2, held("a", 2)),
        ),
        (
            "it moved here from another node",
            stored(Available, Some((1, "b")), Some(("b", 1))),
            proof(running(2, 2), open(2, "a", 2)),
            Fate::Adopted,
            (execution(2, "a"), Available, 2, held("a", 2)),
        ),
        (
            "a stop that was asked for before the backup is done on the same Instance",
            stored(Stopping, Some((1, "a")), Some(("a", 1))),
            proof(running(1, 1), open(1, "a", 1)),
            Fate::Adopted,
            (execution(1, "a"), Stopping, 1, held("a", 1)),
        ),
        (
            "it was stopped",
            stored(Available, Some((1, "a")), Some(("a", 1))),
            proof(None, closed(1, "a", 1)),
            Fate::Ended,
            (None, Stopped, 1, None),
        ),
        (
            "it moved to another node, whose record is in the shared pool",
            stored(Available, Some((1, "a")), Some(("a", 1))),
            proof(None, open(2, "b", 2)),
            Fate::Ended,
            (None, Stopped, 2, held("b", 2)),
        ),
        (
            "it moved away and came to its end there",
            stored(Available, Some((1, "a")), Some(("a", 1))),
            proof(None, closed(2, "b", 2)),
            Fate::Ended,
            (None, Stopped, 2, None),
        ),
        (
            "the store that was put back has granted it to another node since, which has not taken it",
            stored(Starting, Some((9, "b")), Some(("b", 2))),
            proof(running(1, 1), open(1, "a", 1)),
            Fate::Adopted,
            (execution(1, "a"), Available, 2, held("a", 1)),
        ),
        (
            "another node has it by a newer grant, and this one let go of it",
            stored(Available, Some((9, "b")), Some(("b", 4))),
            proof(None, closed(1, "a", 1)),
            Fate::None,
            (execution(9, "b"), Available, 4, held("b", 4)),
        ),
        (
            "an Instance whose grant is over does not come back",
            stored(Available, Some((9, "b")), Some(("b", 4))),
            proof(running(1, 1), closed(1, "a", 1)),
            Fate::None,
            (execution(9, "b"), Available, 4, held("b", 4)),
        ),
    ];
    for (what, workspace, evidence, fate, expected) in cases {
        let (was, outcome) = super::workspace(&workspace, None, &evidence, true, &at());
        assert_eq!(was, fate, "{what}");
        assert_eq!(shown(&workspace, &outcome), expected, "{what}");
        // Decided again on what was written, nothing changes.
        let mut again = workspace.clone();
        if let Some(status) = outcome.status {
            again.status = Some(*status);
        }
        let (_, outcome) = super::workspace(&again, None, &evidence, true, &at());
        assert_eq!(outcome.status, None, "{what}: not idempotent");
    }
}

#[test]
fn a_pool_of_one_node_keeps_the_right_there() {
    let workspace = stored(WorkspacePhase::Available, Some((1, "a")), Some(("a", 1)));
    let evidence = proof(None, Some(records(3, Some(taker(2, "a", 3, false)))));
    let (_, outcome) = super::workspace(&workspace, None, &evidence, false, &at());
    let status = outcome.status.unwrap();
    assert_eq!(status.holder.map(|holder| (holder.epoch, holder.idle)), Some((Epoch(3), true)));
    assert_eq!(status.previous_holder.unwrap().ended, HolderEnd::Released);
}

#[test]
fn an_end_that_is_on_its_way_is_told_by_its_event() {
    let workspace = stored(WorkspacePhase::Available, Some((1, "a")), Some(("a", 1)));
    let mut evidence = proof(None, None);
    evidence.ended.insert(instance(1));
    let (fate, outcome) = super::workspace(&workspace, None, &evidence, false, &at());
    assert_eq!((fate, shown(&workspace, &outcome).0.is_some()), (Fate::None, true));
    // All of it was destroyed, and the node begins a new life: what the old one says of itself is not waited for.
    evidence.incarnation = Incarnation(4);
    let (fate, outcome) = super::workspace(&workspace, None, &evidence, false, &at());
    assert_eq!((fate, shown(&workspace, &outcome).1), (Fate::Ended, WorkspacePhase::Stopped));
}

#[test]
fn a_request_that_something_newer_overtook_is_not_repeated() {
    let mut workspace = stored(WorkspacePhase::Available, Some((1, "a")), Some(("a", 1)));
    workspace.spec.power =
        Some(serde_json::from_value(serde_json::json!({ "state": "Stopped", "requestId": "r" })).unwrap());
    let newer = proof(Some(runs(3, 5, v1::InstanceState::Running)), Some(records(5, Some(taker(3, "a", 5, true)))));
    let same = proof(Some(runs(1, 1, v1::InstanceState::Running)), Some(records(1, Some(taker(1, "a", 1, true)))));
    for (evidence, is_consumed) in [(newer, true), (same, false)] {
        let (_, outcome) = super::workspace(&workspace, None, &evidence, true, &at());
        let status = outcome.status.map_or_else(|| workspace.status.clone().unwrap(), |status| *status);
        let after = Workspace { status: Some(status), ..workspace.clone() };
        assert_eq!(after.is_power_request_consumed(), is_consumed);
    }
}

#[test]
fn a_volume_follows_the_instance_that_uses_it() {
    let mut volume: Volume = serde_json::from_value(serde_json::json!({
        "apiVersion": "kibotos.dev/v1alpha1", "kind": "Volume",
        "metadata": { "name": "v", "uid": VOLUME }, "spec": { "size": "1Gi" },
    }))
    .unwrap();
    let mut evidence = proof(Some(runs(3, 5, v1::InstanceState::Running)), None);
    evidence.objects.insert(VOLUME.into(), records(5, Some(taker(3, "a", 5, true))));
    let status = super::volume(&volume, &evidence, true, &at());
    assert_eq!(status.epoch, Some(Epoch(5)));
    assert_eq!(status.granted_for.as_ref().map(|granted| granted.instance_id), Some(instance(3)));
    assert_eq!(status.bound_to.as_ref().map(|bound| bound.uid.as_str()), Some(UID));
    assert_eq!(status.pool.as_ref().map(ToString::to_string).as_deref(), Some("p"));
    volume.status = Some(status.clone());
    assert_eq!(super::volume(&volume, &evidence, true, &at()), status, "not idempotent");
    // The Instance is gone, and its release is on record.
    evidence.running.clear();
    evidence.objects.insert(VOLUME.into(), records(5, Some(taker(3, "a", 5, false))));
    let released = super::volume(&volume, &evidence, true, &at());
    assert_eq!((released.holder, released.granted_for, released.epoch), (None, None, Some(Epoch(5))));
}

#[test]
fn what_was_moved_after_the_backup_is_where_its_records_say() {
    let mut volume: Volume = serde_json::from_value(serde_json::json!({
        "apiVersion": "kibotos.dev/v1alpha1", "kind": "Volume",
        "metadata": { "name": "v", "uid": VOLUME }, "spec": { "size": "1Gi" },
        "status": {
            "pool": "old", "size": 1 << 20, "epoch": 2,
            "move": {
                "to": "p", "from": "old", "leftover": "p", "state": "Copying", "epoch": 2, "node": "a", "incarnation": 3,
                "startedAt": "2026-11-30T00:00:00Z",
            },
        },
    }))
    .unwrap();
    let by_move = |epoch, holds| LastTaker { instance: None, ..taker(1, "a", epoch, holds) };
    let of = |epoch, holds| {
        let mut evidence = proof(None, None);
        evidence.objects.insert(VOLUME.into(), records(epoch, Some(by_move(epoch, holds))));
        evidence
    };
    // A copy that was under way says nothing about where the object is.
    let status = super::volume(&volume, &of(3, true), true, &at());
    assert_eq!(status.pool.map(|pool| pool.to_string()).as_deref(), Some("old"));
    let status = super::volume(&volume, &of(3, false), true, &at());
    let moving = status.r#move.clone().unwrap();
    assert_eq!(status.pool.as_ref().map(ToString::to_string).as_deref(), Some("p"));
    assert_eq!(moving.state, kibo_crds::MoveState::Removing);
    assert_eq!(moving.leftover.map(|pool| pool.to_string()).as_deref(), Some("old"));
    volume.status = Some(status.clone());
    assert_eq!(super::volume(&volume, &of(3, false), true, &at()), status, "not idempotent");
}
