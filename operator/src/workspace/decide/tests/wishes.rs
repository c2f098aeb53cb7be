//! What a stopped Workspace is asked to become: another layer size, another Volume.

use kibo_crds::workspace::{BoundVolume, VolumeBinding, WritableLayer};

use super::*;
use crate::workspace::launch;

fn stopped() -> Workspace {
    let mut workspace = executing(WorkspacePhase::Available);
    let status = workspace.status.as_mut().unwrap();
    (status.execution, status.phase) = (None, Some(WorkspacePhase::Stopped));
    status.holder = Some(holder(1, true));
    workspace
}

fn asking(size: &str, id: Option<&str>) -> Workspace {
    let mut workspace = stopped();
    workspace.spec.writable_layer = Some(WritableLayer {
        size: Some(size.parse().unwrap()),
        pool: None,
        request_id: id.map(|id| id.parse().unwrap()),
    });
    workspace
}

fn with_room(mib: u32) -> Facts {
    let left = Bytes::mib(mib);
    Facts { room: Some(Room { left, at_most: left }), ..online() }
}

fn unmet<'a>(status: &'a WorkspaceStatus, kind: &str) -> Option<&'a str> {
    status.conditions.iter().find(|condition| condition.type_ == kind).map(|condition| condition.reason.as_str())
}

#[test]
fn a_layer_that_exists_grows_at_the_next_start() {
    let workspace = asking("3Gi", Some("grow"));
    let decision = look(&workspace, &with_room(2048));
    let status = status(&decision);
    assert_eq!(status.writable_layer.as_ref().unwrap().grow_to, Some(Bytes::mib(3072)));
    assert_eq!(unmet(status, "Resized"), Some("AtNextStart"));
    let record = &status.commands[0];
    assert_eq!((record.id.as_str(), record.operation.as_str()), ("grow", "resize"));
    assert_eq!(record.result, CommandResult::Succeeded);
    let mut after = stored(&workspace, &decision);
    assert_eq!(
        look(&after, &with_room(0)).outcome.status,
        None,
        "it is recorded once, and room that goes is no matter"
    );
    let object = launch::layer(&after).unwrap();
    assert_eq!((object.size_bytes, object.grows_from_bytes, object.must_exist), (3 << 30, 1 << 30, true));

    after.spec.power = Some(request(PowerState::Running, "start"));
    let Action::Start(start) = look(&after, &with_room(4096)).action else { panic!("it starts") };
    let grows_by = crate::placement::Disk::In { pool: pool(), to_allocate: Bytes::mib(2048) };
    assert_eq!(start.demand.disks, [grows_by]);
}

#[test]
fn what_depends_on_what_others_are_about_to_take_is_not_decided() {
    let contested = Some(Room { left: Bytes::mib(2047), at_most: Bytes::mib(2048) });
    let workspace = asking("3Gi", Some("grow"));
    assert!(look(&workspace, &Facts { room: contested, ..online() }).is_undecided);
    assert!(!look(&workspace, &with_room(2047)).is_undecided && !look(&workspace, &with_room(2048)).is_undecided);
}

#[test]
fn a_size_that_the_pool_cannot_hold_is_refused_and_can_be_lowered() {
    let workspace = asking("3Gi", Some("grow"));
    let decision = look(&workspace, &with_room(2047));
    let refused = status(&decision);
    assert_eq!(refused.writable_layer.as_ref().unwrap().grow_to, None);
    assert_eq!(unmet(refused, "Resized"), Some("ResourceExhausted"));
    let record = &refused.commands[0];
    assert_eq!((record.result, record.reason.as_deref()), (CommandResult::Failed, Some("ResourceExhausted")));

    let later = look(&stored(&workspace, &decision), &with_room(4096));
    assert_eq!(later.outcome.status, None, "a command that has failed is not carried out later");
    let mut anew = stored(&workspace, &decision);
    anew.spec.writable_layer.as_mut().unwrap().request_id = None;
    let taken = look(&anew, &with_room(4096));
    assert_eq!(status(&taken).writable_layer.as_ref().unwrap().grow_to, Some(Bytes::mib(3072)), "the spec alone is");

    let mut lowered = stored(&workspace, &decision);
    lowered.spec.writable_layer.as_mut().unwrap().size = Some("1Gi".parse().unwrap());
    lowered.spec.writable_layer.as_mut().unwrap().request_id = Some("back".parse().unwrap());
    let decision = look(&lowered, &with_room(2047));
    let status = status(&decision);
    assert_eq!(unmet(status, "Resized"), None);
    assert_eq!(status.commands.len(), 1, "what it has already opens no command");
}

#[test]
fn nothing_is_judged_while_the_layer_is_being_moved() {
    let mut workspace = asking("3Gi", Some("grow"));
    let moving = serde_json::json!({ "to": "q", "state": "Copying", "startedAt": "2026-01-01T00:00:00Z" });
    workspace.status.as_mut().unwrap().r#move = Some(serde_json::from_value(moving).unwrap());
    workspace.spec.r#move = Some(kibo_crds::MoveRequest { to: "q".parse().unwrap(), request_id: None });
    let meanwhile = look(&workspace, &with_room(4096)).outcome.status;
    let grow_to = |status: &WorkspaceStatus| status.writable_layer.as_ref().and_then(|layer| layer.grow_to);
    assert!(meanwhile.as_ref().is_none_or(|it| grow_to(it).is_none() && it.commands.is_empty()), "{meanwhile:?}");
    workspace.status.as_mut().unwrap().r#move.as_mut().unwrap().state = kibo_crds::MoveState::Finished;
    assert_eq!(grow_to(status(&look(&workspace, &with_room(4096)))), Some(Bytes::mib(3072)));
}

#[test]
fn a_layer_that_does_not_exist_is_made_in_the_size_that_was_asked_for() {
    let mut workspace = asking("3Gi", Some("grow"));
    workspace.status.as_mut().unwrap().writable_layer = None;
    let decision = look(&workspace, &with_room(1));
    let status = status(&decision);
    assert_eq!((unmet(status, "Resized"), &status.writable_layer), (None, &None));
    assert_eq!(status.commands[0].result, CommandResult::Succeeded);
    assert_eq!(launch::amounts(&workspace, &template()).unwrap().layer, Bytes::mib(3072));
}

#[test]
fn the_word_of_the_node_ends_the_growth() {
    let mut workspace = asking("3Gi", None);
    let grown = look(&workspace, &with_room(4096));
    workspace = stored(&workspace, &grown);
    let status = workspace.status.as_mut().unwrap();
    (status.phase, status.holder, status.epoch) =
        (Some(WorkspacePhase::Starting), Some(Holder { epoch: Epoch(2), ..holder(2, false) }), Some(Epoch(2)));
    status.execution = executing(WorkspacePhase::Starting).status.unwrap().execution;
    let execution = status.execution.clone().unwrap();
    let event = v1::InstanceEvent {
        instance_id: execution.instance_id.to_string(),
        workspace_uid: UID.into(),
        seq: 1,
        unix_nanos: 0,
        kind: Some(v1::instance_event::Kind::ObjectsTaken(v1::ObjectsTaken {
            objects: vec![v1::ObjectState {
                uid: UID.into(),
                epoch: 2,
                r#use: v1::ObjectUse::Held.into(),
                size_bytes: Some(3 << 30),
            }],
        })),
    };
    let told = event::apply(&workspace, &node("a"), &event, false, at(50)).status.unwrap();
    let layer = told.writable_layer.clone().unwrap();
    assert_eq!((layer.size, layer.grow_to), (Bytes::mib(3072), None));
    assert_eq!(unmet(&told, "Resized"), None);
}

#[test]
fn the_name_of_a_request_is_no_new_revision() {
    let before = look(&asking("3Gi", Some("a")), &with_room(4096));
    let mut workspace = stored(&asking("3Gi", Some("b")), &before);
    workspace.spec.writable_layer.as_mut().unwrap().request_id = Some("b".parse().unwrap());
    let again = look(&workspace, &with_room(4096));
    let revision = |status: &WorkspaceStatus| status.revisions.clone().unwrap().resources;
    assert_eq!(revision(status(&before)), revision(status(&again)));
}

fn claiming(name: Option<&str>) -> Workspace {
    let mut workspace = stopped();
    workspace.status.as_mut().unwrap().volume = Some(BoundVolume { name: "old".into(), uid: "u".into() });
    workspace.spec.volume = name.map(|name| VolumeBinding {
        claim: Some(name.into()),
        new: None,
        mount_path: "/data".into(),
        delete_with_workspace: false,
    });
    workspace
}

fn binds_old() -> Facts {
    Facts { others_bound: vec!["old".into()], ..online() }
}

fn look_at(workspace: &Workspace, volume: Option<&Volume>, facts: &Facts) -> Decision {
    look_with(workspace, Some(&template()), volume, facts)
}

#[test]
fn another_volume_is_bound_before_the_one_of_before_is_let_go() {
    let workspace = claiming(Some("data"));
    let bind = look_at(&workspace, Some(&volume(None, None)), &binds_old());
    assert_eq!(bind.action, Action::BindVolume);
    let bound = volume(Some(UID), None);
    let release = look_at(&workspace, Some(&bound), &binds_old());
    assert_eq!(release.action, Action::ReleaseVolume("old".into()));
    let name = |decision: &Decision| status(decision).volume.clone().map(|volume| volume.name);
    assert_eq!(name(&release).as_deref(), Some("old"), "it is not said before it is so");
    let done = look_at(&workspace, Some(&bound), &online());
    assert_eq!((done.action.clone(), name(&done).as_deref()), (Action::Rest, Some("data")));
}

#[test]
fn without_a_volume_in_its_spec_it_lets_its_volume_go() {
    let workspace = claiming(None);
    assert_eq!(look_at(&workspace, None, &binds_old()).action, Action::ReleaseVolume("old".into()));
    let done = look_at(&workspace, None, &online());
    assert_eq!((done.action.clone(), &status(&done).volume), (Action::Rest, &None));
}

#[test]
fn a_target_that_is_refused_leaves_the_volume_of_before() {
    let gone: PoolId = "gone".parse().unwrap();
    let mut lost = volume(None, None);
    lost.status.as_mut().unwrap().pool = Some(gone.clone());
    let far: PoolId = "far".parse().unwrap();
    let mut out_of_reach = volume(None, None);
    out_of_reach.status.as_mut().unwrap().pool = Some(far.clone());
    let facts = Facts { members: vec![(far.clone(), vec![node("b")])], lost: vec![gone], ..binds_old() };
    let workspace = claiming(Some("data"));
    for (target, reason) in [
        (None, "VolumeNotFound"),
        (Some(volume(Some("someone else"), None)), "VolumeInUse"),
        (Some(lost), "VolumeLost"),
        (Some(out_of_reach.clone()), "VolumeOutOfReach"),
    ] {
        let decision = look_at(&workspace, target.as_ref(), &facts);
        assert_eq!(decision.action, Action::Rest, "{reason}");
        let status = status(&decision);
        assert_eq!(unmet(status, "VolumeBound"), Some(reason));
        assert_eq!(status.volume.as_ref().unwrap().name, "old", "{reason}");
    }
    // A node that is attached to both makes it reachable.
    let facts = Facts { members: vec![(far, vec![node("b"), node("a")])], ..binds_old() };
    assert_eq!(look_at(&workspace, Some(&out_of_reach), &facts).action, Action::BindVolume);
}

#[test]
fn who_is_deleted_or_lost_lets_the_volume_of_before_go_too() {
    let mut deleting = claiming(Some("data"));
    deleting.metadata.deletion_timestamp = Some(at(5));
    let status = deleting.status.as_mut().unwrap();
    (status.writable_layer, status.holder) = (None, None);
    let taken = volume(Some("someone else"), None);
    assert_eq!(look_at(&deleting, Some(&taken), &binds_old()).action, Action::ReleaseVolume("old".into()));
    assert_eq!(look_at(&deleting, Some(&taken), &online()).action, Action::Bury);
    let facts = Facts { lost: vec![pool()], ..binds_old() };
    assert_eq!(look_at(&claiming(None), None, &facts).action, Action::ReleaseVolume("old".into()));
}

#[test]
fn a_start_waits_until_the_volume_of_before_is_let_go() {
    let mut workspace = claiming(Some("data"));
    workspace.spec.power = Some(request(PowerState::Running, "start"));
    let decision = look_at(&workspace, Some(&volume(Some(UID), None)), &binds_old());
    assert_eq!(decision.action, Action::ReleaseVolume("old".into()));
}
