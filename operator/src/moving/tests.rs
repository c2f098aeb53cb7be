//! Refusals one by one; then whole moves, in which the leader dies or the node is lost between any two steps.

use std::collections::BTreeMap;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kibo_crds::{
    Bytes, Epoch, Incarnation, InstanceId, MoveRequest, MoveState, MoveStatus, NodeId, PoolId,
    node::{Holder, HolderEnd},
};
use kibo_protocol::v1;

use super::{
    decide::{Action, Decision, Sight, decide, taken_back},
    heard::{Discarded, Heard, Removal, Word},
};
use crate::{node::Void, right::Right, space::Room, workspace::sight::Cluster};

fn node(name: &str) -> NodeId {
    name.parse().unwrap()
}

fn pool(name: &str) -> PoolId {
    name.parse().unwrap()
}

fn at(second: i64) -> Time {
    Time(Timestamp::from_second(second).unwrap())
}

/// Which nodes are attached to which pool, and in which life each of them has a session.
#[derive(Default)]
struct Facts {
    members: BTreeMap<&'static str, Vec<&'static str>>,
    sessions: BTreeMap<&'static str, u64>,
    isolated: Vec<(&'static str, u64)>,
    free: Option<Room>,
    lost: Option<&'static str>,
}

impl Cluster for Facts {
    fn void(&self, node: &NodeId, incarnation: Incarnation) -> Option<Void> {
        let is_void = self.isolated.iter().any(|(name, until)| *name == node.as_str() && incarnation.0 <= *until);
        is_void.then_some(Void::Isolated)
    }

    fn session(&self, node: &NodeId) -> Option<Incarnation> {
        self.sessions.get(node.as_str()).copied().map(Incarnation)
    }

    fn is_lost(&self, pool: &PoolId) -> bool {
        self.lost == Some(pool.as_str())
    }

    fn is_offline(&self, _: &NodeId) -> bool {
        false
    }

    fn is_settling(&self) -> bool {
        false
    }

    fn others_reach(&self, _: &PoolId, _: &NodeId) -> bool {
        true
    }

    fn reachable_members(&self, pool: &PoolId) -> Vec<(NodeId, Incarnation)> {
        let members = self.members(pool).into_iter();
        members.filter_map(|node| Some((node.clone(), self.session(&node)?))).collect()
    }

    fn members(&self, pool: &PoolId) -> Vec<NodeId> {
        self.members.get(pool.as_str()).into_iter().flatten().map(|name| node(name)).collect()
    }

    fn was_told(&self, _: InstanceId) -> bool {
        false
    }

    fn free_in(&self, _: &NodeId, _: &PoolId) -> Option<Room> {
        self.free
    }
}

fn facts() -> Facts {
    Facts {
        members: [("old", vec!["a", "b", "c"]), ("new", vec!["a", "b"])].into(),
        sessions: [("a", 1), ("b", 1), ("c", 1)].into(),
        ..Facts::default()
    }
}

fn left(bytes: Bytes) -> Room {
    Room { left: bytes, at_most: bytes }
}

/// What happens from outside.
type Change = fn(&mut Sim);

/// A Volume, the store, and what is on the disks.
struct Sim {
    facts: Facts,
    request: Option<MoveRequest>,
    status: Option<MoveStatus>,
    right: Right,
    pool: PoolId,
    has_image: bool,
    grows_to: Option<Bytes>,
    is_deleting: bool,
    in_use: bool,
    heard: Heard,
    /// What a node says of a copy that it is ordered to make.
    says: (v1::MoveState, v1::ObjectFailure),
    /// By pool: the epoch of the newest record and whether it is released.
    disks: BTreeMap<PoolId, (Epoch, bool)>,
    steps: usize,
    /// What happens before which step.
    fault: Option<(usize, Change)>,
}

impl Sim {
    fn new() -> Self {
        Self {
            facts: facts(),
            request: Some(MoveRequest { to: pool("new"), request_id: None }),
            status: None,
            right: Right { epoch: Some(Epoch(4)), ..Right::default() },
            pool: pool("old"),
            has_image: true,
            grows_to: None,
            is_deleting: false,
            in_use: false,
            heard: Heard::default(),
            says: (v1::MoveState::Copied, v1::ObjectFailure::Unspecified),
            disks: [(pool("old"), (Epoch(4), true))].into(),
            steps: 0,
            fault: None,
        }
    }

    fn look(&self) -> Decision {
        decide(&Sight {
            name: "the Volume",
            request: self.request.as_ref(),
            status: self.status.as_ref(),
            image: self.has_image.then(|| (self.pool.clone(), Bytes::mib(1024))),
            grows_to: self.grows_to,
            right: self.right.clone(),
            is_deleting: self.is_deleting,
            in_use: self.in_use,
            heard: self.heard.clone(),
            cluster: &self.facts,
            now: at(7),
        })
    }

    fn step(&mut self) {
        if let Some((_, fault)) = self.fault.filter(|(when, _)| *when == self.steps) {
            fault(self);
        }
        self.steps += 1;
    }

    /// One decision with what follows; whether anything happened.
    fn round(&mut self) -> bool {
        if let Some(right) = self.right.voided(|node, incarnation| self.facts.void(node, incarnation)) {
            self.right = right;
        }
        let is_lost = |pool: &PoolId| self.facts.lost == Some(pool.as_str());
        if let Some(pool) = taken_back(self.status.as_mut(), &self.right, is_lost, &at(7)) {
            self.pool = pool;
        }
        if is_lost(&self.pool)
            && let Some(right) = self.right.lost()
        {
            self.right = right;
        }
        let decision = self.look();
        let wrote = decision.status != self.status || decision.right != self.right || decision.pool.is_some();
        (self.status, self.right) = (decision.status, decision.right);
        self.pool = decision.pool.unwrap_or_else(|| self.pool.clone());
        let is_hit = self.fault.is_some_and(|(when, _)| when == self.steps);
        self.step();
        // A fault may have changed what was decided on.
        match decision.action.filter(|action| Some(action) == self.look().action.as_ref()) {
            None => wrote || is_hit,
            Some(Action::Copy { node, to, .. }) => self.copy(&node, to),
            Some(Action::Settle { holder }) => self.settle(&holder),
            Some(Action::Discard { node, pool, epoch, .. }) => self.discard(node, pool, epoch),
        }
    }

    fn copy(&mut self, node: &NodeId, to: PoolId) -> bool {
        let epoch = self.right.holder.as_ref().unwrap().epoch;
        if self.heard.word.as_ref().is_some_and(|word| word.epoch == epoch && word.state == self.says.0) {
            return false;
        }
        assert!(self.disks.contains_key(&self.pool), "there is something to copy");
        assert_ne!(self.disks.get(&to).map(|copy| copy.1), Some(true), "what was released there is an object");
        self.disks.insert(self.pool.clone(), (epoch, false));
        self.disks.insert(to, (epoch, false));
        self.step();
        let (state, failure) = self.says;
        let message = "it cannot".to_owned();
        self.heard.word = Some(Word { node: node.clone(), epoch, state, copied: 5, total: 9, failure, message });
        true
    }

    fn settle(&mut self, holder: &Holder) -> bool {
        // A node that never took the grant leaves a record too.
        if let Some(record) = self.disks.get_mut(&self.pool).filter(|record| record.0 <= holder.epoch) {
            *record = (holder.epoch, true);
        }
        self.step();
        match self.right.released(&holder.node, holder.epoch, true) {
            Some(right) => self.right = right,
            // The fault took it.
            None => return true,
        }
        true
    }

    fn discard(&mut self, node: NodeId, pool: PoolId, epoch: Epoch) -> bool {
        assert_ne!(pool, self.pool, "the object is never a copy");
        let object = self.disks.get(&self.pool).expect("the object is there");
        let goes_anyway = self.is_deleting || self.state() != MoveState::Removing;
        assert!(object.1 || goes_anyway, "nobody can take the object for a rest of a move");
        if let Some((found, is_released)) = self.disks.get(&pool) {
            assert!(*found <= epoch && !is_released, "it is a copy");
        }
        self.disks.remove(&pool);
        self.step();
        self.heard.discarded = Some(Discarded { node, pool, epoch, outcome: Removal::Removed });
        true
    }

    fn run(&mut self) {
        for _ in 0..60 {
            if !self.round() {
                return;
            }
        }
        panic!("no end: {:#?}", self.status);
    }

    fn state(&self) -> MoveState {
        self.status.as_ref().unwrap().state
    }

    fn reason(&self) -> &str {
        self.status.as_ref().unwrap().reason.as_deref().unwrap_or_default()
    }

    /// Over, whole, in one pool, and free.
    fn assert_clean(&self, what: &str) {
        let status = self.status.as_ref().unwrap();
        assert!(status.state.is_over() && status.leftover.is_none(), "{what}: {status:#?}");
        assert_eq!(self.disks.keys().collect::<Vec<_>>(), [&self.pool], "{what}");
        assert_eq!(self.right.holder, None, "{what}");
    }
}

#[test]
fn what_cannot_be_moved_is_refused_with_the_reason() {
    let table: [(&str, &str, Change); 8] = [
        ("NoImage", "no image yet", |sim| sim.has_image = false),
        ("InUse", "stop the Workspace first", |sim| sim.in_use = true),
        ("NotAttached", "old is attached to a, b, c; new to no node", |sim| drop(sim.facts.members.remove("new"))),
        ("NotAttached", "old is attached to c; new to a, b", |sim| {
            sim.facts.members.insert("old", vec!["c"]);
        }),
        ("PoolLost", "new was declared lost", |sim| sim.facts.lost = Some("new")),
        ("PoolFull", "has 1000 free", |sim| sim.facts.free = Some(left(Bytes(1000)))),
        ("PoolFull", "the image of 2Gi needs as much", |sim| {
            (sim.facts.free, sim.grows_to) = (Some(left(Bytes::mib(1500))), Some(Bytes::mib(2048)));
        }),
        ("Cancelled", "taken back", |sim| {
            sim.facts.sessions.clear();
            sim.run();
            assert_eq!((sim.state(), sim.reason()), (MoveState::Pending, "NodeUnreachable"));
            sim.request = None;
        }),
    ];
    for (reason, words, change) in table {
        let mut sim = Sim::new();
        change(&mut sim);
        sim.run();
        assert!(sim.state().is_over() && sim.pool == pool("old"), "{reason}");
        let message = sim.status.as_ref().unwrap().message.clone().unwrap();
        assert!(sim.reason() == reason && message.contains(words), "{}: {message}", sim.reason());
        sim.assert_clean(reason);
    }
}

#[test]
fn what_depends_on_what_others_are_about_to_take_is_not_decided() {
    let mut sim = Sim::new();
    sim.facts.free = Some(Room { left: Bytes::mib(1023), at_most: Bytes::mib(1024) });
    let undecided = sim.look();
    assert!(undecided.is_undecided && undecided.right == sim.right, "{undecided:?}");
    sim.facts.free = Some(left(Bytes::mib(1024)));
    assert_eq!(sim.look().status.map(|status| status.state), Some(MoveState::Copying));
}

#[test]
fn who_holds_it_is_asked_first_and_waited_for() {
    let mut sim = Sim::new();
    let held = Holder { node: node("c"), incarnation: Incarnation(1), epoch: Epoch(4), idle: false };
    sim.right.holder = Some(held.clone());
    assert_eq!(sim.look().action, Some(Action::Settle { holder: held }));
    sim.facts.sessions.remove("c");
    let waits = sim.look().status.unwrap();
    assert_eq!((waits.state, waits.reason.as_deref()), (MoveState::Pending, Some("HolderUnreachable")));
    assert!(waits.message.unwrap().contains("isolate it"));
}

#[test]
fn the_same_request_is_done_once_and_the_next_one_too() {
    let mut sim = Sim::new();
    sim.run();
    assert_eq!((sim.state(), &sim.pool), (MoveState::Finished, &pool("new")));
    let (steps, epoch) = (sim.steps, sim.right.epoch);
    sim.run();
    assert!(sim.steps <= steps + 1 && sim.right.epoch == epoch, "nothing to do");
    sim.request = Some(MoveRequest { to: pool("old"), request_id: Some("back".parse().unwrap()) });
    sim.heard = Heard::default();
    sim.run();
    assert_eq!((sim.state(), &sim.pool), (MoveState::Finished, &pool("old")));
    sim.assert_clean("back");
}

/// Everything that may happen between two steps.
const FAULTS: [(&str, Change); 6] = [
    ("the leader dies", |sim| sim.heard = Heard::default()),
    ("the node is isolated and comes back", |sim| {
        sim.facts.isolated.push(("a", 1));
        sim.facts.sessions.insert("a", 2);
    }),
    ("the node is isolated and stays away", |sim| {
        sim.facts.isolated.push(("a", 1));
        sim.facts.sessions.remove("a");
    }),
    ("it is deleted", |sim| sim.is_deleting = true),
    ("it is taken back", |sim| sim.request = None),
    ("it is deleted, and the node is lost with the leader", |sim| {
        sim.is_deleting = true;
        sim.heard = Heard::default();
        sim.facts.isolated.push(("a", 1));
        sim.facts.sessions.remove("a");
    }),
];

#[test]
fn a_move_ends_clean_whatever_happens_between_any_two_steps() {
    let mut undisturbed = Sim::new();
    undisturbed.run();
    assert_eq!(undisturbed.state(), MoveState::Finished);
    undisturbed.assert_clean("undisturbed");
    for (what, fault) in FAULTS {
        for when in 0..undisturbed.steps {
            let mut sim = Sim::new();
            sim.fault = Some((when, fault));
            sim.run();
            let what = format!("{what} at {when}");
            sim.assert_clean(&what);
            let expected = if sim.pool == pool("new") { MoveState::Finished } else { MoveState::Cancelled };
            assert_eq!(sim.state(), expected, "{what}");
        }
    }
}

#[test]
fn a_failure_leaves_it_where_it_was_and_a_pool_that_is_away_is_waited_for() {
    use v1::ObjectFailure as Failure;
    for (failure, reason) in
        [(Failure::NoSpace, "PoolFull"), (Failure::HolderConflict, "HolderConflict"), (Failure::Io, "StorageFailed")]
    {
        let mut sim = Sim::new();
        sim.says = (v1::MoveState::Failed, failure);
        sim.run();
        assert_eq!((sim.state(), sim.reason(), &sim.pool), (MoveState::Failed, reason, &pool("old")));
        assert_eq!(sim.status.as_ref().unwrap().message.as_deref(), Some("node a: it cannot"));
        sim.assert_clean(reason);
    }
    let mut sim = Sim::new();
    sim.says = (v1::MoveState::Failed, Failure::PoolUnavailable);
    sim.run();
    assert_eq!((sim.state(), sim.reason()), (MoveState::Copying, "PoolUnavailable"));
    assert!(matches!(sim.look().action, Some(Action::Copy { .. })), "it is tried again");
}

#[test]
fn what_a_node_waits_for_while_it_copies_is_told() {
    let mut sim = Sim::new();
    sim.says = (v1::MoveState::Copying, v1::ObjectFailure::Unspecified);
    sim.run();
    let mut word = sim.heard.word.clone().unwrap();
    word.message = "waits for its move to storage pool third".to_owned();
    sim.heard.word = Some(word.clone());
    let decision = sim.look();
    let status = decision.status.unwrap();
    assert_eq!((status.state, status.reason.as_deref()), (MoveState::Copying, Some("NodeWaits")));
    assert_eq!(status.message.as_deref(), Some("node a: waits for its move to storage pool third"));
    assert!(matches!(decision.action, Some(Action::Copy { .. })), "it is looked after");
    sim.status = Some(status);
    word.message = String::new();
    sim.heard.word = Some(word);
    assert_eq!(sim.look().status.unwrap().reason, None, "it goes on");
}

#[test]
fn one_that_removes_is_waited_for_and_why_it_was_given_up_is_kept() {
    let mut sim = Sim::new();
    sim.says = (v1::MoveState::Failed, v1::ObjectFailure::Io);
    while sim.status.as_ref().is_none_or(|status| status.state != MoveState::Clearing) {
        assert!(sim.round());
    }
    let pinned = sim.status.clone().unwrap();
    let problem = Removal::Failed("node a: the disk says no".to_owned());
    let epoch = pinned.epoch.unwrap();
    sim.heard.discarded = Some(Discarded { node: node("a"), pool: pool("new"), epoch, outcome: problem });
    let decision = sim.look();
    assert!(matches!(decision.action, Some(Action::Discard { .. })));
    let message = decision.status.unwrap().message.unwrap();
    assert_eq!(message, "node a: it cannot; now: node a: the disk says no");
    let mut stranger = sim.look().status;
    let foreign = Removal::NotOurs("node a: it was taken in epoch 2 by somebody".to_owned());
    sim.heard.discarded = Some(Discarded { node: node("a"), pool: pool("new"), epoch, outcome: foreign });
    std::mem::swap(&mut sim.status, &mut stranger);
    assert_eq!(sim.look().status.unwrap().leftover, None, "what was there before stays, and nobody waits for it");
    sim.status = Some(pinned);
    sim.heard.discarded = None;
    sim.facts.sessions.remove("a");
    let decision = sim.look();
    assert_eq!(decision.action, None, "b does not do it while a may be at it");
    assert!(decision.status.unwrap().message.unwrap().starts_with("node a: it cannot; now: waits for"));
    sim.facts.isolated.push(("a", 1));
    assert!(matches!(sim.look().action, Some(Action::Discard { node: it, .. }) if it == node("b")));
}

#[test]
fn a_move_that_was_given_up_does_not_hold_the_object_while_the_other_pool_hangs() {
    let mut sim = Sim::new();
    while sim.status.as_ref().is_none_or(|status| status.state != MoveState::Copying) {
        assert!(sim.round());
    }
    sim.request = None;
    let mut given_up = sim.look();
    (sim.status, sim.right) = (given_up.status.take(), given_up.right);
    assert_eq!(sim.state(), MoveState::Cancelling);
    let Some(Action::Settle { holder }) = sim.look().action else { panic!("the node lets go first") };
    // What the node removes there it never says.
    sim.settle(&holder);
    let decision = sim.look();
    assert!(matches!(&decision.action, Some(Action::Discard { pool: it, .. }) if *it == pool("new")));
    let status = decision.status.unwrap();
    assert!(status.state == MoveState::Clearing && !status.state.holds() && decision.right.holder.is_none());
    assert_eq!(status.leftover, Some(pool("new")), "and it is not forgotten");
}

/// A store that was put back to the time of the copying, and told by a node who uses the object now.
#[test]
fn nothing_is_granted_over_somebody_whom_no_move_knows() {
    let mut sim = Sim::new();
    while sim.status.as_ref().is_none_or(|status| status.state != MoveState::Copying) {
        assert!(sim.round());
    }
    let user = Holder { node: node("c"), incarnation: Incarnation(1), epoch: Epoch(9), idle: false };
    sim.right = Right { epoch: Some(Epoch(9)), holder: Some(user.clone()), previous: None };
    let decision = sim.look();
    assert_eq!(decision.right.holder, Some(user), "it goes on");
    let status = decision.status.unwrap();
    assert_eq!((status.state, status.reason.as_deref()), (MoveState::Cancelling, Some("HolderConflict")));
}

/// Before anything used it there and before anything was removed here; afterwards the old copy may not be whole.
#[test]
fn what_was_moved_to_a_pool_that_is_lost_is_still_in_the_old_one() {
    let mut sim = Sim::new();
    while sim.status.as_ref().is_none_or(|status| status.state != MoveState::Removing) {
        assert!(sim.round());
    }
    assert_eq!(sim.pool, pool("new"));
    sim.facts.lost = Some("new");
    sim.facts.members.remove("new");
    sim.run();
    assert_eq!((sim.state(), sim.reason(), &sim.pool), (MoveState::Failed, "PoolLost", &pool("old")));
    assert!(sim.disks.contains_key(&pool("old")) && sim.status.as_ref().unwrap().leftover.is_none());

    let mut sim = Sim::new();
    while sim.status.as_ref().is_none_or(|status| status.reason.as_deref() != Some("OldCopyGoes")) {
        assert!(sim.round());
    }
    sim.facts.lost = Some("new");
    let right = sim.right.clone();
    assert_eq!(taken_back(sim.status.as_mut(), &right, |pool| pool.as_str() == "new", &at(7)), None);
}

#[test]
fn nobody_waits_for_a_pool_that_is_lost() {
    for (pool_lost, state) in [("new", MoveState::Failed), ("old", MoveState::Finished)] {
        let mut sim = Sim::new();
        let until = if pool_lost == "new" { MoveState::Copying } else { MoveState::Removing };
        while sim.status.as_ref().is_none_or(|status| status.state != until) {
            assert!(sim.round());
        }
        sim.facts.lost = Some(pool_lost);
        sim.facts.members.remove(pool_lost);
        sim.run();
        assert_eq!(sim.state(), state, "{pool_lost}");
        assert_eq!((sim.status.as_ref().unwrap().leftover.as_ref(), &sim.right.holder), (None, &None), "{pool_lost}");
    }
}

#[test]
fn an_isolated_holder_is_named_to_the_next_one() {
    let mut sim = Sim::new();
    sim.fault = Some((1, |sim| {
        sim.facts.isolated.push(("a", 1));
        sim.facts.sessions.remove("a");
    }));
    sim.round();
    let first = sim.right.epoch;
    while sim.right.epoch == first {
        assert!(sim.round(), "another one begins");
    }
    assert_eq!(sim.right.previous.as_ref().unwrap().ended, HolderEnd::Isolated);
    assert_eq!(sim.right.holder.as_ref().unwrap().node, node("b"));
}
