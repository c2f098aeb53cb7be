//! Transfers, step by step; and what ends them in the middle.

use kibo_crds::{Import, TransferKind, TransferState, workspace::WritableLayer};

use super::*;
use crate::{
    transfer::{Sizes, Wish},
    workspace::decide::transfer::Step,
};

fn wish(kind: TransferKind) -> Wish {
    let id = "inst-01k6zzzzzzzzzzzzzzzzzzzzzz".parse().unwrap();
    Wish { id, kind, user: "jane".into(), volume_pool: None, ordered: None, ended: None }
}

fn wished(wish: &Wish) -> Facts {
    Facts { transfer: Some(wish.clone()), ..online() }
}

fn stopped() -> Workspace {
    let mut workspace = executing(WorkspacePhase::Available);
    let status = workspace.status.as_mut().unwrap();
    (status.execution, status.phase) = (None, Some(WorkspacePhase::Stopped));
    status.holder = Some(holder(1, true));
    workspace
}

fn imported() -> Workspace {
    let mut workspace = workspace();
    workspace.spec.import = Some(Import { archive: "ab".repeat(32), volume: false });
    workspace.spec.writable_layer =
        Some(WritableLayer { size: Some("1Gi".parse().unwrap()), ..WritableLayer::default() });
    workspace.spec.power = Some(request(PowerState::Stopped, "made"));
    let decision = look(&workspace, &online());
    stored(&workspace, &decision)
}

fn step(decision: &Decision) -> &Step {
    match &decision.action {
        Action::Transfer { step, .. } => step,
        other => panic!("{other:?}"),
    }
}

fn refusal(decision: &Decision) -> &'static str {
    match step(decision) {
        Step::Refuse(refusal) => refusal.reason,
        other => panic!("{other:?}"),
    }
}

fn transfer(workspace: &Workspace) -> (TransferState, Option<&str>) {
    let transfer = workspace.status.as_ref().unwrap().transfer.as_ref().unwrap();
    (transfer.state, transfer.reason.as_deref())
}

fn sizes() -> Sizes {
    Sizes { layer: Bytes::mib(1024), volume: None }
}

/// An export whose disks are granted.
fn exporting() -> (Workspace, Wish) {
    let (workspace, wish) = (stopped(), wish(TransferKind::Export));
    let begun = look(&workspace, &wished(&wish));
    (stored(&workspace, &begun), wish)
}

#[test]
fn an_export_is_granted_ordered_and_settled() {
    let (workspace, mut wish) = exporting();
    assert_eq!(transfer(&workspace), (TransferState::Running, None));
    assert_eq!(workspace.status.as_ref().unwrap().holder, Some(holder(2, false)));
    assert_eq!(step(&look(&workspace, &wished(&wish))), &Step::Order(sizes()));
    wish.ordered = Some(sizes());
    assert_eq!(look(&workspace, &wished(&wish)).action, Action::Rest);
    wish.ended = Some(Ok(()));
    let over = look(&workspace, &wished(&wish));
    assert_eq!(over.action, Action::Settle { object: Object::Layer, holder: holder(2, false) });
    let mut workspace = stored(&workspace, &over);
    assert_eq!(transfer(&workspace), (TransferState::Completing, None));
    workspace.status.as_mut().unwrap().holder = Some(holder(2, true));
    let finished = look(&workspace, &wished(&wish));
    let workspace = stored(&workspace, &finished);
    assert_eq!(transfer(&workspace), (TransferState::Finished, None));
    assert_eq!(step(&look(&workspace, &wished(&wish))), &Step::Tell(Ok(())));
    assert_eq!(look(&workspace, &online()).action, Action::Rest);
}

#[test]
fn while_it_is_exported_nobody_starts_it_and_a_deletion_ends_it() {
    let (mut workspace, wish) = exporting();
    workspace.spec.power = Some(request(PowerState::Running, "r2"));
    let start = look(&workspace, &wished(&wish));
    assert_eq!(condition(status(&start), "Placed"), ("False", "Transferring"));
    workspace.metadata.deletion_timestamp = Some(at(5));
    let gone = look(&workspace, &wished(&wish));
    assert!(matches!(gone.action, Action::Settle { object: Object::Layer, .. }), "{:?}", gone.action);
    assert_eq!(transfer(&stored(&workspace, &gone)), (TransferState::Ending, Some("Deleted")));
}

#[test]
fn what_nobody_wants_any_more_and_what_was_lost_ends() {
    let (workspace, wish) = exporting();
    let orphan = look(&workspace, &online());
    assert!(matches!(orphan.action, Action::Settle { .. }));
    assert_eq!(transfer(&stored(&workspace, &orphan)), (TransferState::Ending, Some("Interrupted")));
    let gone = Facts { lost: vec![pool()], ..wished(&wish) };
    assert_eq!(transfer(&stored(&workspace, &look(&workspace, &gone))), (TransferState::Failed, Some("PoolLost")));
    let isolated = Facts { voids: vec![(node("a"), Incarnation(1), Void::Isolated)], ..wished(&wish) };
    let lost = look(&workspace, &isolated);
    let workspace = stored(&workspace, &lost);
    assert_eq!(transfer(&workspace), (TransferState::Failed, Some("NodeLost")));
    assert!(matches!(step(&look(&workspace, &wished(&wish))), Step::Tell(Err(_))));
}

#[test]
fn an_export_that_cannot_be_is_refused_with_its_reason() {
    let wished = wished(&wish(TransferKind::Export));
    let running = executing(WorkspacePhase::Available);
    let instance = running.status.as_ref().unwrap().execution.as_ref().unwrap().instance_id;
    assert_eq!(refusal(&look(&running, &Facts { told: vec![instance], ..wished_all(&wished) })), "InUse");
    let mut never = stopped();
    never.status.as_mut().unwrap().writable_layer = None;
    assert_eq!(refusal(&look(&never, &wished)), "NoImage");
    assert_eq!(refusal(&look(&imported(), &wished)), "NotImported");
    let lost = Facts { lost: vec![pool()], ..wished_all(&wished) };
    assert_eq!(refusal(&look(&stopped(), &lost)), "PoolLost");
    let away = Facts { sessions: Vec::new(), ..wished_all(&wished) };
    assert_eq!(refusal(&look(&stopped(), &away)), "NodeUnreachable");
    let import = Facts { transfer: Some(wish(TransferKind::Import)), ..online() };
    assert_eq!(refusal(&look(&stopped(), &import)), "NotAnImport");
}

fn wished_all(facts: &Facts) -> Facts {
    Facts { transfer: facts.transfer.clone(), sessions: facts.sessions.clone(), ..Facts::default() }
}

#[test]
fn an_import_is_not_started_before_it_is_complete() {
    let pending = imported();
    let status = pending.status.as_ref().unwrap();
    assert_eq!((status.phase, status.reason.as_deref()), (Some(WorkspacePhase::Creating), Some("ImportPending")));
    let mut start = pending.clone();
    let fail = PowerRequest { when_unplaceable: Some(WhenUnplaceable::Fail), ..request(PowerState::Running, "r2") };
    start.spec.power = Some(fail);
    let refused = stored(&start, &look(&start, &online()));
    assert!(refused.is_power_request_consumed());
    assert_eq!(refused.status.as_ref().unwrap().commands[1].reason.as_deref(), Some("ImportPending"));
    let mut wish = wish(TransferKind::Import);
    let placed = look(&pending, &wished(&wish));
    assert!(matches!(step(&placed), Step::Place(demand) if demand.disks.len() == 1), "{:?}", placed.action);

    // As the shell writes it.
    let mut running = pending.clone();
    let status = running.status.as_mut().unwrap();
    status.writable_layer = Some(layer(false));
    (status.epoch, status.holder) = (Some(Epoch(1)), Some(holder(1, false)));
    status.transfer = Some(serde_json::from_value(serde_json::json!({
        "id": wish.id, "kind": "Import", "state": "Running", "user": "jane", "node": "a", "incarnation": 1, "epoch": 1,
        "startedAt": "2026-11-30T00:00:00Z",
    })).unwrap());
    assert_eq!(step(&look(&running, &wished(&wish))), &Step::Order(sizes()));
    wish.ordered = Some(sizes());

    wish.ended = Some(Err("the archive is truncated".into()));
    let mut failed = stored(&running, &look(&running, &wished(&wish)));
    failed.status.as_mut().unwrap().holder = Some(holder(1, true));
    let failed = stored(&failed, &look(&failed, &wished(&wish)));
    let failed = stored(&failed, &look(&failed, &wished(&wish)));
    let status = failed.status.as_ref().unwrap();
    assert_eq!((status.phase, status.reason.as_deref()), (Some(WorkspacePhase::Failed), Some("ImportFailed")));
    let again = Facts { transfer: Some(Wish { id: InstanceId::generate(), ended: None, ..wish.clone() }), ..online() };
    assert_eq!(refusal(&look(&failed, &again)), "ImportFailed");

    wish.ended = Some(Ok(()));
    let complete = stored(&running, &look(&running, &wished(&wish)));
    let status = complete.status.as_ref().unwrap();
    assert!(status.imported && status.writable_layer.as_ref().unwrap().created);
    assert_eq!((status.phase, transfer(&complete).0), (Some(WorkspacePhase::Stopped), TransferState::Completing));
}

#[test]
fn the_volume_of_an_import_that_did_not_complete_goes_with_it_and_another_one_does_not() {
    let mut half = imported();
    half.spec.volume =
        Some(serde_json::from_value(serde_json::json!({ "new": { "size": "1Gi" }, "mountPath": "/data" })).unwrap());
    half.metadata.deletion_timestamp = Some(at(5));
    let made_for = volume(Some(UID), Some(UID));
    let delete = |workspace: &Workspace, volume: &Volume| look_with(workspace, None, Some(volume), &online()).action;
    assert_eq!(delete(&half, &made_for), Action::DeleteVolume);
    assert_eq!(delete(&half, &volume(Some(UID), None)), Action::UnbindVolume);
    // After its layer is gone it is as complete as before.
    let mut whole = half.clone();
    let status = whole.status.as_mut().unwrap();
    (status.imported, status.writable_layer) = (true, None);
    assert_eq!(delete(&whole, &made_for), Action::UnbindVolume);
}

#[test]
fn what_fails_has_failed_also_when_nobody_said_why() {
    let (workspace, wish) = exporting();
    let failed = Wish { ended: Some(Err(String::new())), ordered: Some(sizes()), ..wish.clone() };
    let mut workspace = stored(&workspace, &look(&workspace, &wished(&failed)));
    assert_eq!(transfer(&workspace).0, TransferState::Ending);
    let status = workspace.status.as_mut().unwrap();
    status.transfer.as_mut().unwrap().reason = None;
    status.holder = Some(holder(2, true));
    let workspace = stored(&workspace, &look(&workspace, &wished(&failed)));
    assert_eq!(transfer(&workspace), (TransferState::Failed, None));
}

#[test]
fn an_export_does_not_go_on_without_the_volume_that_it_began_with() {
    let (mut workspace, wish) = exporting();
    workspace.spec.volume =
        Some(serde_json::from_value(serde_json::json!({ "claim": "data", "mountPath": "/data" })).unwrap());
    // It was bound when the export began, and has gone since.
    let gone = look_with(&workspace, Some(&template()), None, &wished(&wish));
    assert_eq!(transfer(&stored(&workspace, &gone)), (TransferState::Ending, Some("VolumeNotFound")));
    // What the node reads already it reads to the end: it holds the grants.
    let read = Wish { ordered: Some(sizes()), ..wish.clone() };
    let reading = look_with(&workspace, Some(&template()), None, &wished(&read));
    assert_eq!(transfer(&stored(&workspace, &reading)), (TransferState::Running, None));
}

#[test]
fn a_node_that_vanishes_in_the_middle_is_named_with_the_way_out() {
    let (mut workspace, mut wish) = exporting();
    wish.ended = Some(Err("the connection to node a was lost".into()));
    workspace.spec.power = Some(request(PowerState::Running, "r2"));
    let away = Facts { sessions: Vec::new(), ..wished_all(&wished(&wish)) };
    let start = look(&workspace, &away);
    let placed = status(&start).conditions.iter().find(|condition| condition.type_ == "Placed").unwrap();
    assert_eq!(placed.reason, "Transferring");
    assert!(placed.message.contains("isolate"), "{placed:?}");
    let mut workspace = stored(&workspace, &start);
    let why = workspace.status.as_ref().unwrap().transfer.as_ref().unwrap().message.as_deref();
    assert_eq!(why, Some("the connection to node a was lost"), "and why it failed is not forgotten");
    workspace.metadata.deletion_timestamp = Some(at(5));
    let deletion = format!("{:?}", status(&look(&workspace, &away)));
    assert!(deletion.contains("TransferNotOver") && deletion.contains("isolate"), "{deletion}");
}

#[test]
fn a_refusal_is_said_also_while_there_is_something_else_to_do() {
    let mut never = workspace();
    never = stored(&never, &look(&never, &online()));
    let starts = look(&never, &wished(&wish(TransferKind::Export)));
    assert!(matches!(starts.action, Action::Start(_)), "{:?}", starts.action);
    assert!(
        matches!(&starts.word, Some(Action::Transfer { step: Step::Refuse(refusal), .. }) if refusal.reason == "NoImage"),
        "{:?}",
        starts.word
    );
}

#[test]
fn another_volume_is_not_taken_for_the_imported_one() {
    let mut running = imported();
    running.spec.import = Some(Import { archive: "ab".repeat(32), volume: true });
    running.spec.volume =
        Some(serde_json::from_value(serde_json::json!({ "new": { "size": "1Gi" }, "mountPath": "/data" })).unwrap());
    let sizes = Sizes { volume: Some(Bytes::mib(1024)), ..sizes() };
    let done = Wish { ordered: Some(sizes), ended: Some(Ok(())), ..wish(TransferKind::Import) };
    let status = running.status.as_mut().unwrap();
    status.writable_layer = Some(layer(false));
    (status.epoch, status.holder) = (Some(Epoch(1)), Some(holder(1, false)));
    status.transfer = Some(
        serde_json::from_value(serde_json::json!({
            "id": done.id, "kind": "Import", "state": "Running", "user": "jane", "node": "a", "incarnation": 1,
            "epoch": 1, "startedAt": "2026-11-30T00:00:00Z",
        }))
        .unwrap(),
    );
    let mut bound = volume(Some(UID), Some(UID));
    let other = look_with(&running, Some(&template()), Some(&bound), &wished(&done));
    let failed = stored(&running, &other);
    assert_eq!(transfer(&failed), (TransferState::Ending, Some("VolumeGone")));
    assert!(!failed.status.unwrap().imported);
    bound.status.as_mut().unwrap().granted_for =
        Some(kibo_crds::volume::GrantedFor { workspace_uid: UID.into(), instance_id: done.id });
    let granted = look_with(&running, Some(&template()), Some(&bound), &wished(&done));
    assert_eq!(step(&granted), &Step::MakeVolume(Bytes::mib(1024)));
}
