//! Decisions, one by one; [`ends`] has what a node says of an execution, [`wishes`] those about what a stopped one is to
//! become, and [`walk`] strings decisions together and dies between any two of them.

mod ends;
mod transfers;
mod walk;
mod wishes;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{
    Bytes, CommandResult, Epoch, Incarnation, InstanceId, NodeId, PoolId, SequenceNumber, Template, Volume, Workspace,
    WorkspaceId,
    node::Holder,
    volume::{BoundTo, VolumeSpec, VolumeStatus},
    workspace::{
        Execution, LayerStatus, PowerRequest, PowerState, PowerStatus, StopMode, WhenUnplaceable, WorkspacePhase,
        WorkspaceSpec, WorkspaceStatus,
    },
};
use kibo_protocol::v1;

use super::*;
use crate::{
    node::Void,
    space::Room,
    workspace::{event, sight::Cluster},
};

const UID: &str = "11111111-1111-1111-1111-111111111111";

/// A cluster of one pool, whose facts a test sets.
#[derive(Default)]
pub(super) struct Facts {
    sessions: Vec<(NodeId, Incarnation)>,
    voids: Vec<(NodeId, Incarnation, Void)>,
    told: Vec<InstanceId>,
    offline: Vec<NodeId>,
    settling: bool,
    lost: Vec<PoolId>,
    others_bound: Vec<String>,
    room: Option<Room>,
    /// Of pools; one that is not here has node a.
    members: Vec<(PoolId, Vec<NodeId>)>,
    transfer: Option<crate::transfer::Wish>,
}

impl Cluster for Facts {
    fn void(&self, node: &NodeId, incarnation: Incarnation) -> Option<Void> {
        self.voids.iter().find(|(n, i, _)| n == node && *i == incarnation).map(|(_, _, void)| *void)
    }

    fn session(&self, node: &NodeId) -> Option<Incarnation> {
        self.sessions.iter().find(|(n, _)| n == node).map(|(_, incarnation)| *incarnation)
    }

    fn is_offline(&self, node: &NodeId) -> bool {
        self.offline.contains(node)
    }

    fn is_settling(&self) -> bool {
        self.settling
    }

    fn others_reach(&self, _: &PoolId, node: &NodeId) -> bool {
        self.sessions.iter().any(|(n, _)| n != node)
    }

    fn reachable_members(&self, _: &PoolId) -> Vec<(NodeId, Incarnation)> {
        self.sessions.clone()
    }

    fn is_lost(&self, pool: &PoolId) -> bool {
        self.lost.contains(pool)
    }

    fn members(&self, pool: &PoolId) -> Vec<NodeId> {
        let known = self.members.iter().find(|(known, _)| known == pool);
        known.map_or_else(|| vec![node("a")], |(_, members)| members.clone())
    }

    fn room_in(&self, _: &PoolId) -> Option<Room> {
        self.room
    }

    fn was_told(&self, instance: InstanceId) -> bool {
        self.told.contains(&instance)
    }

    fn transfer(&self, _: &str) -> Option<crate::transfer::Wish> {
        self.transfer.clone()
    }
}

pub(super) fn node(name: &str) -> NodeId {
    name.parse().unwrap()
}

pub(super) fn pool() -> PoolId {
    "local-a".parse().unwrap()
}

pub(super) fn at(second: i64) -> Time {
    Time(jiff::Timestamp::from_second(second).unwrap())
}

fn online() -> Facts {
    Facts { sessions: vec![(node("a"), Incarnation(1))], ..Facts::default() }
}

pub(super) fn template() -> Template {
    serde_json::from_value(serde_json::json!({
        "apiVersion": "kibotos.dev/v1alpha1", "kind": "Template", "metadata": { "name": "debian" },
        "spec": {
            "rootImage": "debian-12",
            "resources": { "cpu": "1", "memory": "512Mi" },
            "writableLayer": { "size": "1Gi" },
        },
    }))
    .unwrap()
}

pub(super) fn workspace() -> Workspace {
    let mut workspace = Workspace::new(
        "demo",
        WorkspaceSpec {
            template: "debian".into(),
            resources: None,
            writable_layer: None,
            volume: None,
            power: None,
            node_selector: BTreeMap::default(),
            network: None,
            r#move: None,
            import: None,
            annotations: BTreeMap::default(),
        },
    );
    workspace.metadata.namespace = Some("default".into());
    workspace.metadata.uid = Some(UID.into());
    workspace.metadata.generation = Some(1);
    workspace.metadata.finalizers = Some(vec![WORKSPACE_FINALIZER.into()]);
    workspace
}

fn holder(epoch: u64, idle: bool) -> Holder {
    Holder { node: node("a"), incarnation: Incarnation(1), epoch: Epoch(epoch), idle }
}

fn layer(created: bool) -> LayerStatus {
    LayerStatus { pool: pool(), size: Bytes::mib(1024), grow_to: None, created }
}

/// As it is after a start that was asked for by creation.
fn executing(phase: WorkspacePhase) -> Workspace {
    let mut workspace = workspace();
    workspace.status = Some(WorkspaceStatus {
        id: Some(WorkspaceId::generate()),
        phase: Some(phase),
        power: Some(PowerStatus { consumed: PowerRequest::at_creation(), consumed_at: at(1) }),
        execution: Some(Execution {
            instance_id: InstanceId::generate(),
            node: node("a"),
            incarnation: Incarnation(1),
            cpu_milli: kibo_crds::MilliCpu(1000),
            memory_bytes: Bytes::mib(576),
            last_seq: SequenceNumber(0),
            started_at: at(1),
            address: None,
        }),
        epoch: Some(Epoch(1)),
        holder: Some(holder(1, false)),
        writable_layer: Some(layer(phase != WorkspacePhase::Starting)),
        ..WorkspaceStatus::default()
    });
    workspace
}

fn request(state: PowerState, id: &str) -> PowerRequest {
    PowerRequest { state, request_id: Some(id.parse().unwrap()), ..PowerRequest::at_creation() }
}

fn look(workspace: &Workspace, facts: &Facts) -> Decision {
    look_with(workspace, Some(&template()), None, facts)
}

pub(super) fn look_with(
    workspace: &Workspace,
    template: Option<&Template>,
    volume: Option<&Volume>,
    facts: &Facts,
) -> Decision {
    decide(&Sight {
        workspace,
        template,
        volume,
        others_bound: facts.others_bound.clone(),
        cluster: facts,
        now: at(100),
        fresh_id: WorkspaceId::generate(),
        vm_overhead: Bytes::mib(64),
    })
}

/// The Workspace with the decision's status stored.
fn stored(workspace: &Workspace, decision: &Decision) -> Workspace {
    let mut workspace = workspace.clone();
    if let Some(status) = &decision.outcome.status {
        workspace.status = Some((**status).clone());
    }
    workspace
}

fn status(decision: &Decision) -> &WorkspaceStatus {
    decision.outcome.status.as_deref().expect("the decision writes")
}

fn condition<'a>(status: &'a WorkspaceStatus, kind: &str) -> (&'a str, &'a str) {
    let found = status.conditions.iter().find(|condition| condition.type_ == kind).expect("the condition is there");
    (&found.status, &found.reason)
}

fn ended(workspace: &Workspace, reason: v1::EndReason, used: v1::ObjectUse) -> v1::InstanceEvent {
    let execution = workspace.status.as_ref().unwrap().execution.as_ref().unwrap();
    v1::InstanceEvent {
        instance_id: execution.instance_id.to_string(),
        workspace_uid: UID.into(),
        seq: 3,
        unix_nanos: 0,
        kind: Some(v1::instance_event::Kind::Ended(v1::Ended {
            reason: reason.into(),
            message: String::new(),
            objects: vec![v1::ObjectState { uid: UID.into(), epoch: 1, r#use: used.into(), size_bytes: None }],
        })),
    }
}

#[test]
fn nothing_is_done_before_the_finalizer_is_there() {
    let mut workspace = workspace();
    workspace.metadata.finalizers = None;
    assert_eq!(look(&workspace, &online()).action, Action::AddFinalizer);
    workspace.metadata.deletion_timestamp = Some(at(5));
    assert_eq!(look(&workspace, &online()).action, Action::Rest);
}

#[test]
fn creation_is_a_request_to_start() {
    let decision = look(&workspace(), &online());
    assert!(matches!(decision.action, Action::Start(_)), "{decision:?}");
    let status = status(&decision);
    assert_eq!(status.phase, Some(WorkspacePhase::Creating));
    assert!(status.id.is_some());
    assert_eq!(condition(status, "PowerRequestConsumed").0, "False");
    let again = look(&stored(&workspace(), &decision), &online());
    assert_eq!(again.outcome.status, None, "nothing changed, nothing is written");
    assert!(matches!(again.action, Action::Start(_)));
}

#[test]
fn what_is_consumed_is_not_acted_upon_again() {
    let mut workspace = executing(WorkspacePhase::Available);
    let event = ended(&workspace, v1::EndReason::OutOfMemory, v1::ObjectUse::Released);
    let outcome = event::apply(&workspace, &node("a"), &event, false, at(50));
    workspace.status = outcome.status.map(|status| *status);
    let status = workspace.status.clone().unwrap();
    assert_eq!((status.phase, status.reason.as_deref()), (Some(WorkspacePhase::Stopped), Some("OutOfMemory")));
    assert_eq!(look(&workspace, &online()).action, Action::Rest, "an OOM kill is no fight with the spec");
    workspace.spec.power = Some(request(PowerState::Running, "again"));
    assert!(matches!(look(&workspace, &online()).action, Action::Start(_)), "a new request is");
}

#[test]
fn a_missing_template_waits_or_fails() {
    let mut workspace = workspace();
    let waits = look_with(&workspace, None, None, &online());
    assert_eq!(waits.action, Action::Rest);
    assert_eq!(condition(status(&waits), "Placed"), ("False", "TemplateNotFound"));
    assert_eq!(status(&waits).power, None, "the request stands");
    let power = PowerRequest { when_unplaceable: Some(WhenUnplaceable::Fail), ..request(PowerState::Running, "c1") };
    workspace.spec.power = Some(power);
    let fails = look_with(&workspace, None, None, &online());
    let failed = status(&fails);
    assert_eq!((failed.phase, failed.reason.as_deref()), (Some(WorkspacePhase::Failed), Some("TemplateNotFound")));
    assert_eq!(failed.commands[0].result, CommandResult::Failed);
    assert_eq!(look_with(&stored(&workspace, &fails), None, None, &online()).outcome.status, None);
}

#[test]
fn what_nobody_takes_fails_or_waits_as_the_request_says() {
    let sight = |workspace| (workspace, template(), online());
    for (request, phase, consumed) in [
        (PowerRequest::at_creation(), WorkspacePhase::Creating, false),
        (PowerRequest { node: Some(node("b")), ..request(PowerState::Running, "p") }, WorkspacePhase::Failed, true),
    ] {
        let mut workspace = workspace();
        workspace.spec.power = Some(request.clone());
        let (workspace, template, facts) = sight(workspace);
        let sight = Sight {
            workspace: &workspace,
            template: Some(&template),
            volume: None,
            others_bound: Vec::new(),
            cluster: &facts,
            now: at(1),
            fresh_id: WorkspaceId::generate(),
            vm_overhead: Bytes(0),
        };
        let status = *unplaced(&sight, &request, "no node can take it").status.unwrap();
        assert_eq!(status.phase, Some(phase));
        assert_eq!(status.reason.as_deref(), Some("ResourceExhausted"));
        assert_eq!(status.message.as_deref(), Some("no node can take it"));
        assert_eq!(status.power.is_some(), consumed);
        assert_eq!(condition(&status, "Placed"), ("False", if consumed { "NoExecution" } else { "ResourceExhausted" }));
        let after = Workspace { status: Some(status), ..workspace.clone() };
        let next = look(&after, &facts);
        assert_eq!(next.outcome.status, None, "looking again writes nothing");
        assert_eq!(matches!(next.action, Action::Start(_)), !consumed);
    }
}

#[test]
fn a_stop_is_recorded_before_the_node_is_asked() {
    let mut workspace = executing(WorkspacePhase::Available);
    workspace.spec.power = Some(request(PowerState::Stopped, "s1"));
    let decision = look(&workspace, &online());
    assert!(matches!(decision.action, Action::Stop { mode: v1::StopMode::Normal, .. }));
    let stopping = stored(&workspace, &decision);
    let written = stopping.status.as_ref().unwrap();
    assert_eq!(
        (written.phase, written.commands[0].result),
        (Some(WorkspacePhase::Stopping), CommandResult::Processing)
    );
    let again = look(&stopping, &online());
    assert_eq!(again.outcome.status, None);
    assert!(matches!(again.action, Action::Stop { .. }), "a leader that takes over asks again");
    let event = ended(&stopping, v1::EndReason::Stopped, v1::ObjectUse::Released);
    let done = event::apply(&stopping, &node("a"), &event, false, at(60)).status.unwrap();
    assert_eq!((done.phase, done.reason.as_deref()), (Some(WorkspacePhase::Stopped), None));
    assert_eq!(done.commands[0].result, CommandResult::Succeeded);
    assert!(done.holder.as_ref().is_some_and(|holder| holder.idle), "in a private pool the right stays with the node");
    assert_eq!(condition(&done, "Stopped"), ("True", "Stopped"));
}

#[test]
fn force_takes_the_place_of_a_normal_stop() {
    let mut workspace = executing(WorkspacePhase::Available);
    workspace.spec.power = Some(request(PowerState::Stopped, "s1"));
    let mut workspace = stored(&workspace, &look(&workspace, &online()));
    workspace.spec.power =
        Some(PowerRequest { stop_mode: Some(StopMode::Force), ..request(PowerState::Stopped, "s2") });
    let decision = look(&workspace, &online());
    assert!(matches!(decision.action, Action::Stop { mode: v1::StopMode::Force, .. }));
    let results: Vec<_> = status(&decision).commands.iter().map(|command| command.result).collect();
    assert_eq!(results, [CommandResult::Failed, CommandResult::Processing]);
}

#[test]
fn a_start_while_stopping_waits_for_the_end() {
    let mut workspace = executing(WorkspacePhase::Available);
    workspace.spec.power = Some(request(PowerState::Stopped, "s1"));
    let mut workspace = stored(&workspace, &look(&workspace, &online()));
    workspace.spec.power = Some(request(PowerState::Running, "r1"));
    let decision = look(&workspace, &online());
    assert!(matches!(decision.action, Action::Stop { .. }));
    let workspace = stored(&workspace, &decision);
    let event = ended(&workspace, v1::EndReason::Stopped, v1::ObjectUse::Released);
    let status = event::apply(&workspace, &node("a"), &event, false, at(60)).status.unwrap();
    let workspace = Workspace { status: Some(*status), ..workspace };
    assert!(matches!(look(&workspace, &online()).action, Action::Start(_)));
}

#[test]
fn a_stop_without_a_session_says_what_it_waits_for() {
    let mut workspace = executing(WorkspacePhase::Available);
    workspace.spec.power = Some(request(PowerState::Stopped, "s1"));
    let decision = look(&workspace, &Facts::default());
    assert_eq!(decision.action, Action::Rest);
    let status = status(&decision);
    assert_eq!(condition(status, "NodeReachable"), ("False", "NodeUnreachable"));
    assert!(
        status.message.as_ref().unwrap().contains("`kibo node isolate a --confirm-host-cannot-write`"),
        "{status:?}"
    );
    let settling = Facts { settling: true, ..Facts::default() };
    let says_nothing = super::tests::status(&look(&workspace, &settling)).conditions.clone();
    assert!(says_nothing.iter().all(|condition| condition.type_ != "NodeReachable"), "{says_nothing:?}");
}

#[test]
fn an_offline_node_is_said_and_the_phase_stays_until_the_node_is_back() {
    let mut workspace = executing(WorkspacePhase::Available);
    let offline = Facts { offline: vec![node("a")], ..Facts::default() };
    let mut see = |facts: &Facts| {
        if let Some(status) = look(&workspace, facts).outcome.status {
            workspace.status = Some(*status);
        }
        let status = workspace.status.as_ref().unwrap();
        assert_eq!(status.phase, Some(WorkspacePhase::Available));
        let (value, reason) = condition(status, "NodeReachable");
        (value.to_owned(), reason.to_owned())
    };
    let said = |value: &str, reason: &str| (value.to_owned(), reason.to_owned());
    assert_eq!(see(&online()), said("True", "SessionAlive"));
    // Its session is gone, and it may be back in a moment.
    assert_eq!(see(&Facts::default()), said("True", "SessionAlive"));
    assert_eq!(see(&offline), said("False", "NodeOffline"));
    // A new leader has not heard of it either.
    assert_eq!(see(&Facts::default()), said("False", "NodeOffline"));
    // Back in another life: that is for the void to say.
    let other_life = Facts { sessions: vec![(node("a"), Incarnation(2))], ..Facts::default() };
    assert_eq!(see(&other_life), said("False", "NodeOffline"));
    assert_eq!(see(&online()), said("True", "SessionAlive"));
}

#[test]
fn a_commit_whose_go_may_be_lost_is_told_again() {
    let workspace = executing(WorkspacePhase::Starting);
    assert_eq!(look(&workspace, &online()).action, Action::Go);
    let instance = workspace.status.as_ref().unwrap().execution.as_ref().unwrap().instance_id;
    let told = Facts { told: vec![instance], ..online() };
    assert_eq!(look(&workspace, &told).action, Action::Rest);
    let gone = look(&workspace, &Facts::default());
    assert_eq!(condition(status(&gone), "NodeReachable"), ("False", "NodeUnreachable"), "only its node ends it");
}

#[test]
fn a_void_incarnation_fails_what_ran_on_it() {
    for (void, reason, end) in [
        (Void::IncarnationEnded, "NodeRestarted", kibo_crds::node::HolderEnd::IncarnationEnded),
        (Void::Isolated, "Unavailable", kibo_crds::node::HolderEnd::Isolated),
    ] {
        for phase in [WorkspacePhase::Starting, WorkspacePhase::Available, WorkspacePhase::Stopping] {
            let workspace = executing(phase);
            let facts = Facts { voids: vec![(node("a"), Incarnation(1), void)], ..online() };
            let decision = look(&workspace, &facts);
            let status = status(&decision);
            assert_eq!((status.phase, status.reason.as_deref()), (Some(WorkspacePhase::Failed), Some(reason)));
            assert_eq!((&status.execution, &status.holder), (&None, &None));
            assert_eq!(status.previous_holder.as_ref().unwrap().ended, end);
            assert_eq!(status.last_execution.as_ref().unwrap().reason, reason);
            assert_eq!(look(&stored(&workspace, &decision), &facts).action, Action::Rest, "it is not started again");
        }
    }
}

#[test]
fn what_was_isolated_says_where_it_can_start() {
    let isolated = |sessions: &[&str]| Facts {
        voids: vec![(node("a"), Incarnation(1), Void::Isolated)],
        sessions: sessions.iter().map(|name| (node(name), Incarnation(7))).collect(),
        ..Facts::default()
    };
    let lost =
        stored(&executing(WorkspacePhase::Available), &{ look(&executing(WorkspacePhase::Available), &isolated(&[])) });
    let placed = |workspace: &Workspace| {
        let status = workspace.status.as_ref().unwrap();
        let found = status.conditions.iter().find(|it| it.type_ == "Placed").unwrap().clone();
        (found.reason, found.message)
    };
    let (reason, message) = placed(&lost);
    assert_eq!(reason, "PoolOutOfReach");
    assert!(message.contains("storage pool local-a") && message.contains("its member is a"), "{message}");
    let back = stored(&lost, &look(&lost, &isolated(&["c", "b"])));
    let (reason, message) = placed(&back);
    assert_eq!(reason, "CanStart");
    assert!(message.contains("nodes b, c,"), "{message}");
    assert_eq!(back.status.as_ref().unwrap().phase, Some(WorkspacePhase::Failed));
    // The nodes of a new leader are on their way.
    let new_leader = Facts { settling: true, ..isolated(&[]) };
    assert_eq!(look(&back, &new_leader).outcome.status, None);
    let back = stored(&back, &look(&back, &isolated(&[])));
    assert_eq!(placed(&back).0, "PoolOutOfReach", "they did not come");
}

#[test]
fn where_it_could_start_is_no_news_that_cannot_wait() {
    use crate::workspace::draft::{News, news};
    let failed = executing(WorkspacePhase::Available);
    let isolated = |sessions: &[&str]| Facts {
        voids: vec![(node("a"), Incarnation(1), Void::Isolated)],
        sessions: sessions.iter().map(|name| (node(name), Incarnation(7))).collect(),
        ..Facts::default()
    };
    let of = |facts: &Facts| status(&look(&failed, facts)).clone();
    let (nobody, one, two) = (of(&isolated(&[])), of(&isolated(&["b"])), of(&isolated(&["b", "c"])));
    assert_eq!(news(&nobody, &one), News::Place);
    assert_eq!(news(&one, &two), News::Words);
    assert_eq!(news(failed.status.as_ref().unwrap(), &one), News::Facts);
}

#[test]
fn a_layer_that_somebody_holds_is_settled_or_said() {
    let mut workspace = executing(WorkspacePhase::Available);
    workspace.spec.power = Some(request(PowerState::Running, "r2"));
    let status = workspace.status.as_mut().unwrap();
    (status.execution, status.phase) = (None, Some(WorkspacePhase::Failed));
    assert!(matches!(look(&workspace, &online()).action, Action::Settle { object: Object::Layer, .. }));
    let waits = look(&workspace, &Facts::default());
    assert_eq!(super::tests::status(&waits).reason.as_deref(), Some("HolderUnreachable"));
    let isolated = Facts { voids: vec![(node("a"), Incarnation(1), Void::Isolated)], ..Facts::default() };
    assert!(matches!(look(&workspace, &isolated).action, Action::Start(_)));
}

fn volume(bound: Option<&str>, created_for: Option<&str>) -> Volume {
    let mut volume = Volume::new("data", VolumeSpec { size: "1Gi".parse().unwrap(), pool: None, r#move: None });
    volume.metadata.uid = Some("22222222-2222-2222-2222-222222222222".into());
    volume.metadata.labels =
        created_for.map(|uid| [(crate::workspace::sight::CREATED_FOR.to_owned(), uid.to_owned())].into());
    volume.status = Some(VolumeStatus {
        bound_to: bound.map(|uid| BoundTo { name: "x".into(), uid: uid.into() }),
        ..VolumeStatus::default()
    });
    volume
}

#[test]
fn a_volume_is_bound_before_a_place_is_looked_for() {
    let mut claim = workspace();
    claim.spec.volume =
        Some(serde_json::from_value(serde_json::json!({ "claim": "data", "mountPath": "/data" })).unwrap());
    let step = |volume: Option<&Volume>| look_with(&claim, Some(&template()), volume, &online());
    assert_eq!(status(&step(None)).reason.as_deref(), Some("VolumeNotFound"));
    assert_eq!(step(Some(&volume(None, None))).action, Action::BindVolume);
    assert_eq!(status(&step(Some(&volume(Some("other"), None)))).reason.as_deref(), Some("VolumeInUse"));
    let bound = step(Some(&volume(Some(UID), None)));
    assert!(matches!(bound.action, Action::Start(start) if start.demand.disks.len() == 2));
    let mut new = claim.clone();
    new.spec.volume =
        Some(serde_json::from_value(serde_json::json!({ "new": { "size": "1Gi" }, "mountPath": "/data" })).unwrap());
    let step = |volume: Option<&Volume>| look_with(&new, Some(&template()), volume, &online());
    assert_eq!(step(None).action, Action::CreateVolume);
    assert_eq!(step(Some(&volume(None, Some(UID)))).action, Action::BindVolume);
    assert_eq!(status(&step(Some(&volume(None, None)))).reason.as_deref(), Some("VolumeNameTaken"));
}

#[test]
fn revisions_move_with_the_content_only() {
    let revision = |workspace: &Workspace| {
        let revisions = workspace.status.as_ref().unwrap().revisions.clone().unwrap();
        (revisions.labels.revision, revisions.annotations.revision, revisions.resources.revision)
    };
    let first = stored(&workspace(), &look(&workspace(), &online()));
    assert_eq!(revision(&first), (1, 1, 1));
    let mut second = first.clone();
    second.metadata.generation = Some(2);
    second.metadata.labels = Some([("kibotos.dev/internal".to_owned(), "x".to_owned())].into());
    second.spec.annotations.insert("note".into(), "hello".into());
    let second = stored(&second, &look(&second, &online()));
    assert_eq!(revision(&second), (1, 2, 1));
    let generations: Vec<_> =
        second.status.as_ref().unwrap().conditions.iter().map(|condition| condition.observed_generation).collect();
    assert!(generations.iter().all(|generation| *generation == Some(2)), "{generations:?}");
}

#[test]
fn a_deletion_goes_from_the_inside_out() {
    let mut workspace = executing(WorkspacePhase::Available);
    workspace.metadata.deletion_timestamp = Some(at(5));
    let decision = look_with(&workspace, None, None, &online());
    assert!(matches!(decision.action, Action::Stop { mode: v1::StopMode::Force, .. }));
    let workspace = stored(&workspace, &decision);
    let event = ended(&workspace, v1::EndReason::ForceStopped, v1::ObjectUse::Released);
    let status = event::apply(&workspace, &node("a"), &event, false, at(6)).status.unwrap();
    assert_eq!(status.phase, Some(WorkspacePhase::Deleting));
    let workspace = Workspace { status: Some(*status), ..workspace };
    let away = look_with(&workspace, None, None, &Facts::default());
    assert_eq!(away.action, Action::Rest);
    assert_eq!(super::tests::status(&away).reason.as_deref(), Some("NoPoolMember"));
    let granted = look_with(&workspace, None, None, &online());
    assert_eq!(super::tests::status(&granted).holder, Some(holder(2, false)));
    let workspace = stored(&workspace, &granted);
    assert_eq!(look_with(&workspace, None, None, &online()).action, Action::DeleteLayer { holder: holder(2, false) });
    let workspace = Workspace { status: Some(layer_deleted(&workspace, &node("a"), Epoch(2))), ..workspace };
    assert_eq!(look_with(&workspace, None, None, &online()).action, Action::Bury);
}

#[test]
fn a_status_stays_under_two_kilobytes() {
    let workspace = executing(WorkspacePhase::Starting);
    let facts = online();
    let decision = look(&workspace, &facts);
    let mut workspace = stored(&workspace, &decision);
    let execution = workspace.status.as_ref().unwrap().execution.clone().unwrap();
    let available = v1::InstanceEvent {
        instance_id: execution.instance_id.to_string(),
        workspace_uid: UID.into(),
        seq: 2,
        unix_nanos: 0,
        kind: Some(v1::instance_event::Kind::Available(v1::Available::default())),
    };
    workspace.status = event::apply(&workspace, &node("a"), &available, false, at(7)).status.map(|status| *status);
    assert_eq!(workspace.status.as_ref().unwrap().phase, Some(WorkspacePhase::Available));
    let size = serde_json::to_vec(&workspace.status).unwrap().len();
    assert!(size < 2048, "{size} bytes");
}
