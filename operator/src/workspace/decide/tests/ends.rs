//! What a node says of an execution: that it stands still, that it has ended, that somebody has to help.

use super::*;

#[test]
fn ends_are_told_apart() {
    use v1::EndReason as End;
    for (reason, phase, word) in [
        (End::ForceStopped, WorkspacePhase::Failed, Some("ExecutionLost")),
        (End::OutOfMemory, WorkspacePhase::Stopped, Some("OutOfMemory")),
        (End::GuestShutdown, WorkspacePhase::Stopped, Some("GuestShutdown")),
        (End::VmmExited, WorkspacePhase::Failed, Some("VmmExited")),
        (End::HostRestarted, WorkspacePhase::Failed, Some("NodeRestarted")),
        (End::GuestPanicked, WorkspacePhase::Failed, Some("GuestPanicked")),
        (End::GuestAgentDied, WorkspacePhase::Failed, Some("GuestAgentDied")),
        (End::HolderConflict, WorkspacePhase::Failed, Some("HolderConflict")),
        (End::StorageFailed, WorkspacePhase::Failed, Some("StorageFailed")),
        (End::VmmFailed, WorkspacePhase::Failed, Some("VmmFailed")),
        (End::NetworkFailed, WorkspacePhase::Failed, Some("NetworkFailed")),
        (End::GuestConfigureFailed, WorkspacePhase::Failed, Some("GuestConfigureFailed")),
        (End::GuestBootTimeout, WorkspacePhase::Failed, Some("GuestBootTimeout")),
        (End::TornDown, WorkspacePhase::Failed, Some("TornDown")),
        (End::Isolated, WorkspacePhase::Failed, Some("Unavailable")),
        (End::Fenced, WorkspacePhase::Failed, Some("Fenced")),
        (End::FencedWhileStill, WorkspacePhase::Failed, Some("Fenced")),
    ] {
        let workspace = executing(WorkspacePhase::Available);
        let event = ended(&workspace, reason, v1::ObjectUse::Released);
        let outcome = event::apply(&workspace, &node("a"), &event, true, at(9));
        let status = outcome.status.unwrap();
        assert_eq!((status.phase, status.reason.as_deref()), (Some(phase), word), "{reason:?}");
        assert!(status.execution.is_none() && status.holder.is_none());
        assert_eq!(outcome.notices.len(), 1);
        let replayed = Workspace { status: Some(*status), ..workspace };
        assert_eq!(event::apply(&replayed, &node("a"), &event, true, at(10)), Outcome::default(), "a replay");
    }
}

#[test]
fn what_only_a_person_can_mend_is_said_until_the_end() {
    let workspace = executing(WorkspacePhase::Stopping);
    let end = ended(&workspace, v1::EndReason::ForceStopped, v1::ObjectUse::Released);
    let blocked = v1::Blocked { message: "the record is damaged: restore it".into() };
    let event = v1::InstanceEvent { kind: Some(v1::instance_event::Kind::Blocked(blocked)), ..end.clone() };
    let outcome = event::apply(&workspace, &node("a"), &event, false, at(9));
    let status = outcome.status.unwrap();
    assert_eq!(condition(&status, "Blocked"), ("True", "NodeNeedsHelp"));
    assert_eq!((status.phase, outcome.notices.len()), (Some(WorkspacePhase::Stopping), 1));
    let waiting = Workspace { status: Some(*status), ..workspace };
    let end = v1::InstanceEvent { seq: event.seq + 1, ..end };
    let status = event::apply(&waiting, &node("a"), &end, false, at(10)).status.unwrap();
    assert!(!status.conditions.iter().any(|condition| condition.type_ == "Blocked"));
}

#[test]
fn a_guest_that_stands_still_is_said_until_it_goes_on() {
    let workspace = executing(WorkspacePhase::Available);
    let tell = |workspace: &Workspace, seq, kind| {
        let event = ended(workspace, v1::EndReason::Stopped, v1::ObjectUse::Released);
        let event = v1::InstanceEvent { seq, kind: Some(kind), ..event };
        event::apply(workspace, &node("a"), &event, false, at(9))
    };
    let paused = |reason: v1::PauseReason| {
        v1::instance_event::Kind::Paused(v1::Paused { reason: reason.into(), message: "pool p".into() })
    };
    for (reason, word) in [(v1::PauseReason::PoolUnreadable, "PoolUnreadable"), (v1::PauseReason::DiskFull, "DiskFull")]
    {
        let outcome = tell(&workspace, 7, paused(reason));
        let status = *outcome.status.unwrap();
        assert_eq!(condition(&status, "Paused"), ("True", word));
        assert_eq!((status.phase, outcome.notices.len()), (Some(WorkspacePhase::Available), 1));
        let still = Workspace { status: Some(status), ..workspace.clone() };
        let status = *tell(&still, 8, v1::instance_event::Kind::Resumed(v1::Resumed {})).status.unwrap();
        assert!(!status.conditions.iter().any(|condition| condition.type_ == "Paused"));
        let end = v1::InstanceEvent { seq: 8, ..ended(&still, v1::EndReason::Fenced, v1::ObjectUse::Released) };
        let status = *event::apply(&still, &node("a"), &end, false, at(10)).status.unwrap();
        assert!(!status.conditions.iter().any(|condition| condition.type_ == "Paused"));
    }
}

#[test]
fn what_ran_on_after_it_was_declared_dead_is_said_where_the_disk_was_given_away() {
    let lost = executing(WorkspacePhase::Available);
    let event = ended(&lost, v1::EndReason::Fenced, v1::ObjectUse::Released);
    let mut elsewhere = lost.clone();
    let status = elsewhere.status.as_mut().unwrap();
    status.execution.as_mut().unwrap().instance_id = kibo_crds::InstanceId::generate();
    let outcome = event::apply(&elsewhere, &node("a"), &event, false, at(9));
    let told = |status: &WorkspaceStatus| status.conditions.iter().any(|condition| condition.type_ == "TwoWriters");
    assert!(!outcome.status.is_some_and(|status| told(&status)), "nobody was granted it");
    let status = elsewhere.status.as_mut().unwrap();
    status.epoch = Some(Epoch(2));
    status.holder.as_mut().unwrap().epoch = Epoch(2);
    let outcome = event::apply(&elsewhere, &node("a"), &event, false, at(9));
    let status = *outcome.status.unwrap();
    assert_eq!(condition(&status, "TwoWriters"), ("True", "WrongIsolation"));
    assert_eq!((status.phase, outcome.notices.len()), (Some(WorkspacePhase::Available), 1));
    let told = Workspace { status: Some(status), ..elsewhere };
    assert_eq!(event::apply(&told, &node("a"), &event, false, at(10)), Outcome::default(), "told once");
}

#[test]
fn an_end_that_was_missed_still_releases_its_layer() {
    let workspace = executing(WorkspacePhase::Available);
    let event = ended(&workspace, v1::EndReason::Stopped, v1::ObjectUse::Released);
    let mut later = workspace.clone();
    later.status.as_mut().unwrap().execution = None;
    later.status.as_mut().unwrap().phase = Some(WorkspacePhase::Deleting);
    let status = event::apply(&later, &node("a"), &event, false, at(9)).status.unwrap();
    assert!(status.holder.unwrap().idle);
    assert_eq!(status.phase, Some(WorkspacePhase::Deleting));
    assert_eq!(event::apply(&later, &node("b"), &event, false, at(9)), Outcome::default(), "another node's word");
}

#[test]
fn what_the_node_did_not_start_is_placed_again() {
    let workspace = executing(WorkspacePhase::Starting);
    let event = ended(&workspace, v1::EndReason::NotStarted, v1::ObjectUse::Refused);
    let status = event::apply(&workspace, &node("a"), &event, false, at(9)).status.unwrap();
    assert_eq!((&status.execution, &status.holder, &status.writable_layer), (&None, &None, &None));
    let workspace = Workspace { status: Some(*status), ..workspace };
    let decision = look(&workspace, &online());
    let Action::Start(start) = decision.action else { panic!("{decision:?}") };
    assert!(matches!(start.demand.disks[0], crate::placement::Disk::New { .. }), "no pool holds it yet");
}

/// A Workspace whose layer was in a pool that was declared lost, while its node is away.
#[test]
fn what_was_in_a_lost_pool_has_failed_and_is_deleted_without_a_node() {
    let facts = Facts { lost: vec![pool()], ..Facts::default() };
    let mut stopped = executing(WorkspacePhase::Stopped);
    stopped.status.as_mut().unwrap().execution = None;
    stopped.spec.power = Some(request(PowerState::Running, "start"));
    let decision = look(&stopped, &facts);
    let failed = status(&decision);
    assert_eq!((failed.phase, failed.reason.as_deref()), (Some(WorkspacePhase::Failed), Some("StoragePoolLost")));
    assert_eq!((&failed.holder, failed.epoch), (&None, Some(Epoch(1))));
    assert_eq!(failed.previous_holder.as_ref().unwrap().ended, kibo_crds::node::HolderEnd::PoolLost);
    assert_eq!((failed.commands[0].result, decision.action.clone()), (CommandResult::Failed, Action::Rest));
    let failed = stored(&stopped, &decision);
    assert_eq!(look(&failed, &facts).outcome, Outcome::default(), "told once");

    let mut deleted = failed;
    deleted.metadata.deletion_timestamp = Some(at(99));
    let decision = look(&deleted, &facts);
    assert_eq!((status(&decision).writable_layer.clone(), decision.action), (None, Action::Bury));
    // What runs keeps its execution: only its node or an isolation ends that.
    let running = executing(WorkspacePhase::Available);
    assert!(look(&running, &facts).outcome.status.is_none_or(|status| status.execution.is_some()));
}
