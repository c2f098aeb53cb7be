use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kibo_crds::{
    ConditionType, Incarnation, MilliCpu,
    node::{Drain, Isolation, NodeSpec, Retirement},
};

use super::*;

fn at(second: i64) -> Time {
    Time(Timestamp::from_second(second).unwrap())
}

fn node(admission: Option<Admission>, change: impl FnOnce(&mut Node)) -> Node {
    let mut node = Node::new("node-1", NodeSpec::default());
    node.metadata.generation = Some(7);
    node.status = admission.map(|admission| NodeStatus {
        admission: Some(admission),
        incarnation: Some(Incarnation(3)),
        ..NodeStatus::default()
    });
    change(&mut node);
    node
}

fn settings(drain: bool) -> Settings {
    Settings { drain, cpu: "2".parse().unwrap(), ..Settings::default() }
}

const PERIODS: Periods = Periods { unreachable: Duration::from_secs(15), offline: Duration::from_secs(60) };

fn clock(offset_millis: i64) -> NodeClock {
    let over = offset_millis.abs() > 30_000;
    NodeClock {
        offset_millis,
        uncertainty_millis: 1,
        kernel_synchronized: Some(true),
        over,
        shown: NodeClock::show(offset_millis, over),
        measured_at: at(90),
    }
}

fn live(drain: bool, report: Option<Reported>) -> Live {
    Live {
        session: NodeSession {
            id: "s-1".into(),
            alive: true,
            incarnation: Incarnation(3),
            boot_id: "b".into(),
            version: "v".into(),
            source_revision: None,
            started_at: at(1),
            ended_at: None,
        },
        capacity: Capacity { cpu: Some(MilliCpu(4000)), memory: None, max_instances: Some(8) },
        pools: vec![DeclaredPool {
            id: "local".parse().unwrap(),
            uid: "u".into(),
            default: true,
            available: true,
            capacity: None,
            free: Some(kibo_crds::Bytes(100)),
            used: None,
            waiting_guests: 0,
        }],
        host_labels: [("zone".to_owned(), "a".to_owned())].into(),
        settings: settings(drain),
        settings_confirmed: true,
        clock: Some(clock(7)),
        report,
    }
}

fn reported(second: i64) -> Reported {
    Reported { time: at(second), instances: 0, after_confirmation: true, settings_revision: 7, host: None }
}

fn observed(node: &Node) -> Observed<'_> {
    let drain = node.spec.drain.as_ref().is_some_and(|drain| drain.requested);
    Observed {
        node,
        live: None,
        refused: None,
        orphaned: true,
        reach: Reach::Reachable,
        periods: PERIODS,
        wanted: settings(drain),
        usage: NodeUsage::default(),
        unregistered: None,
        now: at(100),
    }
}

fn condition_of(status: &NodeStatus, kind: ConditionType) -> (&str, &str) {
    let found = status.conditions.iter().find(|c| c.type_ == kind.to_string()).expect("the condition is set");
    assert_eq!(found.observed_generation, Some(7));
    (&found.status, &found.reason)
}

#[test]
fn the_phase_follows_from_the_strongest_fact() {
    type Change = fn(&mut Node);
    let nothing: Change = |_| {};
    let retired: Change = |node| node.spec.retirement = Some(Retirement::default());
    let isolated: Change = |node| {
        node.spec.isolation = Some(Isolation {
            incarnation: Incarnation(3),
            confirm_host_cannot_write: true,
            force_despite_evidence: false,
            request_id: None,
        });
    };
    let isolated_before: Change = |node| {
        node.spec.isolation = Some(Isolation {
            incarnation: Incarnation(2),
            confirm_host_cannot_write: true,
            force_despite_evidence: false,
            request_id: None,
        });
    };
    let admitted = Some(Admission::Admitted);
    for (admission, change, has_session, phase, reason) in [
        (None, nothing, false, NodePhase::Pending, "NotEnrolled"),
        (admitted, nothing, false, NodePhase::NotReady, "NoSessionYet"),
        (admitted, nothing, true, NodePhase::Ready, "SessionLive"),
        (admitted, isolated, false, NodePhase::Isolated, "Isolated"),
        (admitted, isolated_before, true, NodePhase::Ready, "SessionLive"),
        (admitted, retired, false, NodePhase::Retired, "Retired"),
        (Some(Admission::Revoked), isolated, false, NodePhase::Revoked, "Revoked"),
    ] {
        let node = node(admission, change);
        let live = has_session.then(|| live(false, None));
        let status = compute(&Observed { live, ..observed(&node) });
        assert_eq!(status.phase, Some(phase));
        assert_eq!(condition_of(&status, ConditionType::Ready).1, reason);
        assert_eq!(status.observed_generation, Some(7));
    }
}

#[test]
fn a_session_of_an_earlier_leader_is_given_time_to_return() {
    let node = node(Some(Admission::Admitted), |node| {
        node.status.as_mut().unwrap().session = Some(live(false, None).session);
    });
    let waiting = compute(&Observed { orphaned: false, ..observed(&node) });
    assert!(waiting.session.as_ref().unwrap().alive);
    assert_eq!(waiting.phase, Some(NodePhase::Ready));
    assert_eq!(condition_of(&waiting, ConditionType::Schedulable), ("False", "NoSession"));
    let over = compute(&observed(&node));
    assert_eq!(over.session.as_ref().map(|s| (s.alive, s.ended_at.clone())), Some((false, Some(at(100)))));
    assert_eq!(over.phase, Some(NodePhase::NotReady));
}

#[test]
fn drained_needs_the_confirmation_and_a_later_report_and_nothing_left() {
    let node = node(Some(Admission::Admitted), |node| {
        node.spec.drain = Some(Drain { requested: true, request_id: None });
    });
    let report = |after_confirmation, instances| Some(Reported { instances, after_confirmation, ..reported(90) });
    let used = NodeUsage { held_objects: 1, ..NodeUsage::default() };
    for (live, usage, phase) in [
        (None, NodeUsage::default(), NodePhase::NotReady),
        (Some(live(true, None)), NodeUsage::default(), NodePhase::Draining),
        (Some(live(true, report(false, 0))), NodeUsage::default(), NodePhase::Draining),
        (Some(live(true, report(true, 1))), NodeUsage::default(), NodePhase::Draining),
        (Some(live(true, report(true, 0))), used, NodePhase::Draining),
        (Some(live(false, report(true, 0))), NodeUsage::default(), NodePhase::Draining),
        (Some(live(true, report(true, 0))), NodeUsage::default(), NodePhase::Drained),
    ] {
        let status = compute(&Observed { live: live.clone(), usage, ..observed(&node) });
        assert_eq!(status.phase, Some(phase), "{live:?} {usage:?}");
        assert_eq!(condition_of(&status, ConditionType::Schedulable).0, "False");
    }
}

#[test]
fn who_was_drained_stays_so_while_it_is_away() {
    let mut node = node(Some(Admission::Admitted), |node| {
        node.spec.drain = Some(Drain { requested: true, request_id: None });
    });
    let drained = |status: &NodeStatus| condition_of(status, ConditionType::Drained).0 == "True";
    assert!(!drained(&compute(&observed(&node))), "it never was");
    let stored = compute(&Observed { live: Some(live(true, Some(reported(90)))), ..observed(&node) });
    assert!(drained(&stored));
    node.status = Some(stored.clone());
    let away = compute(&observed(&node));
    assert!(drained(&away));
    assert_eq!(away.phase, Some(NodePhase::NotReady), "which is not the same as how it stands");
    // Back, it says so anew; and nothing that is against it is overlooked.
    assert!(!drained(&compute(&Observed { live: Some(live(true, None)), ..observed(&node) })));
    let held = NodeUsage { held_objects: 1, ..NodeUsage::default() };
    assert!(!drained(&compute(&Observed { usage: held, ..observed(&node) })));
    node.spec.drain = Some(Drain { requested: false, request_id: None });
    assert!(!drained(&compute(&observed(&node))));
    node.spec.drain = Some(Drain { requested: true, request_id: None });
    // Put back to a backup, the control plane does not know what came since.
    let accident = Quarantine { id: "q".into(), message: "m".into(), instances: 1, since: at(1) };
    let refused = |quarantine| Refused { reason: "Because", message: "no".into(), duplicate: false, quarantine };
    let ahead = compute(&Observed { refused: Some(refused(Some(accident))), ..observed(&node) });
    assert!(!drained(&ahead));
    node.status = Some(NodeStatus { conditions: stored.conditions, ..ahead });
    assert!(!drained(&compute(&observed(&node))));
}

#[test]
fn a_new_pool_is_registered_before_its_node_is_schedulable() {
    let node = node(Some(Admission::Admitted), |_| {});
    let observed = Observed { live: Some(live(false, None)), ..observed(&node) };
    assert_eq!(condition_of(&compute(&observed), ConditionType::Schedulable), ("True", "Schedulable"));
    let observed = Observed { unregistered: Some("local".parse().unwrap()), ..observed };
    let status = compute(&observed);
    assert_eq!(condition_of(&status, ConditionType::Schedulable), ("False", "PoolBeingRegistered"));
    assert_eq!(condition_of(&status, ConditionType::Ready).0, "True");
}

#[test]
fn what_was_not_measured_stays_absent() {
    let node = node(Some(Admission::Admitted), |_| {});
    let status = compute(&Observed { live: Some(live(false, None)), ..observed(&node) });
    let schedulable = status.schedulable.unwrap();
    assert_eq!(schedulable.cpu.as_deref(), Some("8"));
    assert_eq!(schedulable.memory, None);
    assert_eq!(status.slots, Some(8));
}

#[test]
fn a_duplicate_is_shown_and_taken_back() {
    let mut node = node(Some(Admission::Admitted), |_| {});
    let refused = Refused { reason: "DuplicateHost", message: "two hosts".into(), duplicate: true, quarantine: None };
    let status = compute(&Observed { live: Some(live(false, None)), refused: Some(refused), ..observed(&node) });
    assert_eq!(condition_of(&status, ConditionType::DuplicateHost), ("True", "DuplicateHost"));
    assert_eq!(condition_of(&status, ConditionType::Ready).0, "True");
    node.status = Some(status);
    let status = compute(&Observed { live: Some(live(false, None)), ..observed(&node) });
    assert_eq!(condition_of(&status, ConditionType::DuplicateHost).0, "False");
}

#[test]
fn computing_twice_changes_nothing_and_readings_wait_for_the_period() {
    let mut node = node(Some(Admission::Admitted), |_| {});
    let with = |node: &Node, second, free| {
        let mut live = live(false, Some(reported(second)));
        live.pools[0].free = Some(kibo_crds::Bytes(free));
        compute(&Observed { live: Some(live), ..observed(node) })
    };
    let first = with(&node, 100, 5);
    assert!(is_worth_a_write(node.status.as_ref(), &first));
    node.status = Some(first.clone());
    assert_eq!(with(&node, 100, 5), first);
    assert!(!is_worth_a_write(node.status.as_ref(), &with(&node, 120, 4)));
    assert!(is_worth_a_write(node.status.as_ref(), &with(&node, 160, 5)));
    // By which settings the node goes is a reading, too: with each session they have another revision.
    let other = Reported { settings_revision: 8, ..reported(101) };
    let other = compute(&Observed { live: Some(live(false, Some(other))), ..observed(&node) });
    assert_eq!(other.report.as_ref().and_then(|report| report.settings_revision), Some(8));
    assert!(!is_worth_a_write(node.status.as_ref(), &other));
}

#[test]
fn a_silent_node_is_unreachable_then_offline_and_no_leader_takes_that_back() {
    let mut node = node(Some(Admission::Admitted), |node| {
        node.status.as_mut().unwrap().session = Some(NodeSession { alive: false, ..live(false, None).session });
    });
    for (reach, phase, reason) in [
        (Reach::Reachable, NodePhase::NotReady, "NoSession"),
        (Reach::Unreachable, NodePhase::Unreachable, "Unreachable"),
        (Reach::Offline, NodePhase::Offline, "Offline"),
        // Another leader, that has just begun.
        (Reach::Reachable, NodePhase::Offline, "Offline"),
    ] {
        let status = compute(&Observed { reach, ..observed(&node) });
        assert_eq!(status.phase, Some(phase));
        assert_eq!(condition_of(&status, ConditionType::Ready), ("False", reason));
        node.status = Some(status);
    }
    let refused = |duplicate| {
        let refused = Refused { reason: "Because", message: "no".into(), duplicate, quarantine: None };
        compute(&Observed { refused: Some(refused), ..observed(&node) }).phase
    };
    assert_eq!((refused(false), refused(true)), (Some(NodePhase::NotReady), Some(NodePhase::Offline)));
    let back = compute(&Observed { live: Some(live(false, None)), ..observed(&node) });
    assert_eq!(back.phase, Some(NodePhase::Ready));
}

#[test]
fn a_clock_that_is_off_closes_placement_and_is_known_only_with_a_session() {
    let mut node = node(Some(Admission::Admitted), |_| {});
    let with = |node: &Node, clock: Option<NodeClock>| {
        compute(&Observed { live: Some(Live { clock, ..live(false, None) }), ..observed(node) })
    };
    let unmeasured = with(&node, None);
    assert_eq!(condition_of(&unmeasured, ConditionType::Schedulable), ("False", "ClockNotMeasured"));
    assert_eq!(condition_of(&unmeasured, ConditionType::ClockSynchronized), ("Unknown", "NotMeasured"));
    let off = with(&node, Some(clock(-40_000)));
    assert_eq!(condition_of(&off, ConditionType::Schedulable), ("False", "ClockOff"));
    assert_eq!(condition_of(&off, ConditionType::ClockSynchronized), ("False", "ClockOff"));
    assert_eq!(condition_of(&off, ConditionType::Ready), ("True", "SessionLive"));
    let good = with(&node, Some(clock(20_000)));
    assert_eq!(condition_of(&good, ConditionType::ClockSynchronized), ("True", "WithinBounds"));
    // A few milliseconds are no news; opening and closing is.
    assert!(!is_worth_a_write(Some(&good), &with(&node, Some(clock(20_003)))));
    assert!(is_worth_a_write(Some(&good), &with(&node, Some(clock(21_000)))));
    assert!(is_worth_a_write(Some(&good), &off));

    node.status = Some(good);
    let awaited = compute(&Observed { orphaned: false, ..observed(&node) });
    assert!(awaited.clock.is_some(), "a new leader waits for the node");
    let over = compute(&observed(&node));
    assert_eq!(over.clock, None);
    assert_eq!(condition_of(&over, ConditionType::ClockSynchronized), ("Unknown", "NoSession"));
}
