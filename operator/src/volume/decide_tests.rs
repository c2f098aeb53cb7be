//! The size that is asked of a Volume, one that was made for nobody, and one in a pool that was lost.

use kibo_crds::{Bytes, Epoch, Incarnation, MoveState, NodeId, PoolId, volume::GrantedFor, volume::VolumeSpec};

use super::*;
use crate::{node::Void, space::Room};

/// A pool that no node reaches.
struct Pool(Room);

/// The id of a pool that was declared lost.
const LOST: &str = "lost";

impl Cluster for Pool {
    fn void(&self, _: &NodeId, _: Incarnation) -> Option<Void> {
        None
    }

    fn session(&self, _: &NodeId) -> Option<Incarnation> {
        None
    }

    fn is_offline(&self, _: &NodeId) -> bool {
        false
    }

    fn is_settling(&self) -> bool {
        false
    }

    fn others_reach(&self, _: &PoolId, _: &NodeId) -> bool {
        false
    }

    fn reachable_members(&self, _: &PoolId) -> Vec<(NodeId, Incarnation)> {
        Vec::new()
    }

    fn members(&self, _: &PoolId) -> Vec<NodeId> {
        Vec::new()
    }

    fn is_lost(&self, pool: &PoolId) -> bool {
        pool.as_str() == LOST
    }

    fn room_in(&self, _: &PoolId) -> Option<Room> {
        Some(self.0)
    }

    fn was_told(&self, _: InstanceId) -> bool {
        false
    }
}

/// One of 64 MiB of which as much is asked.
fn asked(mib: u32) -> Volume {
    let spec: VolumeSpec = serde_json::from_value(serde_json::json!({ "size": format!("{mib}Mi") })).unwrap();
    let mut volume = Volume::new("data", spec);
    volume.metadata.finalizers = Some(vec![VOLUME_FINALIZER.to_owned()]);
    volume.status =
        Some(VolumeStatus { pool: Some("p".parse().unwrap()), size: Some(Bytes::mib(64)), ..VolumeStatus::default() });
    volume
}

fn room(mib: u32) -> Room {
    Room { left: Bytes::mib(mib), at_most: Bytes::mib(mib) }
}

fn look(volume: &Volume, created_for: Owner, room: Room) -> Decision {
    let (bound_to, granted_for) = (Owner::Gone, Owner::Gone);
    let now = Time(jiff::Timestamp::from_second(1).unwrap());
    decide(&Sight { volume, bound_to, granted_for, created_for, cluster: &Pool(room), now })
}

/// The status once it was looked at.
fn after(volume: &Volume, mib: u32) -> VolumeStatus {
    let decision = look(volume, Owner::Gone, room(mib));
    decision.status.map_or_else(|| volume.status.clone().unwrap(), |status| *status)
}

fn unmet(status: &VolumeStatus) -> Option<&str> {
    status.conditions.iter().find(|it| it.type_ == "Resized").map(|it| it.reason.as_str())
}

#[test]
fn a_volume_grows_to_what_its_pool_can_hold() {
    let grows = after(&asked(128), 64);
    assert_eq!((grows.grow_to, unmet(&grows)), (Some(Bytes::mib(128)), Some("AtNextStart")));
    let refused = after(&asked(128), 63);
    assert_eq!((refused.grow_to, unmet(&refused)), (None, Some("ResourceExhausted")));
    let agrees = after(&asked(64), 0);
    assert_eq!((agrees.grow_to, unmet(&agrees)), (None, None));
}

#[test]
fn what_depends_on_what_others_are_about_to_take_is_not_decided() {
    let contested = Room { left: Bytes::mib(63), at_most: Bytes::mib(64) };
    assert_eq!(look(&asked(128), Owner::Gone, contested), Decision::UNDECIDED);
    assert!(look(&asked(129), Owner::Gone, contested).status.is_some_and(|it| unmet(&it) == Some("ResourceExhausted")));
}

#[test]
fn nothing_grows_while_it_is_being_moved() {
    let mut volume = asked(128);
    let moving = serde_json::json!({ "to": "q", "state": "Copying", "startedAt": "2026-01-01T00:00:00Z", "epoch": 1 });
    volume.status.as_mut().unwrap().r#move = Some(serde_json::from_value(moving).unwrap());
    let status = after(&volume, 1024);
    assert_eq!((status.grow_to, unmet(&status)), (None, None), "the pool that it goes to was not asked for that");
    volume.status.as_mut().unwrap().r#move.as_mut().unwrap().state = MoveState::Finished;
    assert_eq!(after(&volume, 1024).grow_to, Some(Bytes::mib(128)));
}

#[test]
fn a_size_that_was_refused_is_forgotten_when_less_is_asked_for() {
    let mut volume = asked(128);
    volume.status = Some(after(&volume, 0));
    volume.spec = asked(64).spec;
    let status = after(&volume, 0);
    assert_eq!((status.grow_to, unmet(&status)), (None, None));
}

#[test]
fn what_a_start_was_told_stays_while_it_lasts() {
    let mut volume = asked(128);
    let mut status = after(&volume, 64);
    let instance_id = InstanceId::generate();
    status.granted_for = Some(GrantedFor { workspace_uid: "u".into(), instance_id });
    volume.status = Some(status);
    let starting = after(&volume, 0);
    assert_eq!((starting.grow_to, unmet(&starting)), (Some(Bytes::mib(128)), Some("AtNextStart")));
    let grown = volume.status.as_mut().unwrap();
    (grown.size, grown.grow_to) = (Some(Bytes::mib(128)), None);
    assert_eq!(unmet(&after(&volume, 0)), None);
}

/// What was never granted has no bytes anywhere; whoever's it was has gone before it was bound.
#[test]
fn a_volume_that_was_made_for_nobody_goes() {
    let mut volume = asked(64);
    volume.status = Some(VolumeStatus::default());
    let action = |volume: &Volume, created_for| look(volume, created_for, room(64)).action;
    assert_eq!(action(&volume, Owner::Gone), Action::Rest, "somebody made it by hand");
    volume.metadata.labels = Some([(CREATED_FOR.to_owned(), "u".to_owned())].into());
    assert_eq!(action(&volume, Owner::Gone), Action::Withdraw);
    assert_eq!(action(&volume, Owner::Present { instance: None }), Action::Rest);
    volume.status.as_mut().unwrap().epoch = Some(Epoch(1));
    assert_eq!(action(&volume, Owner::Gone), Action::Rest, "it was granted: there may be data");
}

#[test]
fn what_was_in_a_lost_pool_is_lost_and_goes_without_a_node() {
    let look = |volume: &Volume| look(volume, Owner::Gone, room(0));
    let mut volume = asked(64);
    let holder = Holder { node: "a".parse().unwrap(), incarnation: Incarnation(1), epoch: Epoch(3), idle: false };
    let status = volume.status.as_mut().unwrap();
    (status.pool, status.epoch, status.holder) = (LOST.parse().ok(), Some(Epoch(3)), Some(holder));
    let status = *look(&volume).status.unwrap();
    assert_eq!((status.phase, &status.holder, status.epoch), (Some(VolumePhase::Lost), &None, Some(Epoch(3))));
    volume.status = Some(status);
    volume.metadata.deletion_timestamp = Some(Time(jiff::Timestamp::from_second(1).unwrap()));
    assert_eq!(look(&volume).action, Action::RemoveFinalizer);
    // Where the pool is only out of reach, the image must be removed first.
    let status = volume.status.as_mut().unwrap();
    (status.pool, status.conditions) = ("p".parse().ok(), Vec::new());
    assert_eq!(look(&volume).action, Action::Rest);
}
