//! The use right of one object (a writable layer or a Volume): who may write its bytes, since which grant.
//!
//! Epochs only grow. The next grant is possible when the last one was released or refused by its node,
//! or when the incarnation that holds it is void. `previous` always tells of the last holder before the
//! current one that may have written; a refused grant, which never touched the object, leaves it alone.

use kibo_crds::{
    Epoch, Incarnation, NodeId,
    node::{Holder, HolderEnd, PreviousHolder},
    volume::VolumeStatus,
    workspace::WorkspaceStatus,
};
use kibo_protocol::v1;

use crate::node::{Void, isolation};

/// What to do about a node that holds `object` and cannot be asked, for people.
pub fn waits_for(object: &str, node: &NodeId) -> String {
    format!(
        "waits for node {node}, which holds {object} and has no control session: bring the host back, or, when it is \
         off or cannot write to its storage any more, isolate it with {}",
        isolation::command(node)
    )
}

/// The use right as a status stores it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Right {
    pub epoch: Option<Epoch>,
    pub holder: Option<Holder>,
    pub previous: Option<PreviousHolder>,
}

/// How the current holder stands against the next grant.
#[derive(Clone, Debug, PartialEq)]
pub enum Standing {
    /// Nobody holds it, or the holder has recorded its release, or is void.
    Grantable,
    /// Only this node's word (or an isolation) ends it.
    Held(Holder),
}

/// Why there is no next grant.
#[derive(Debug, thiserror::Error)]
pub enum NotGranted {
    #[error("node {} holds it by the grant of epoch {}", .0.node, .0.epoch)]
    Held(Holder),
    /// It does not happen in a lifetime.
    #[error("the epoch has reached its end")]
    EpochExhausted,
}

impl NotGranted {
    /// CamelCase.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Held(_) => "HolderConflict",
            Self::EpochExhausted => "EpochExhausted",
        }
    }
}

/// A status with a use right.
pub trait HasRight {
    fn right(&self) -> Right;
    fn set_right(&mut self, right: Right);
}

macro_rules! has_right {
    ($($status:ty),*) => {$(
        impl HasRight for $status {
            fn right(&self) -> Right {
                Right { epoch: self.epoch, holder: self.holder.clone(), previous: self.previous_holder.clone() }
            }

            fn set_right(&mut self, right: Right) {
                self.epoch = right.epoch;
                self.holder = right.holder;
                self.previous_holder = right.previous;
            }
        }
    )*};
}
has_right!(WorkspaceStatus, VolumeStatus);

impl From<Void> for HolderEnd {
    fn from(void: Void) -> Self {
        match void {
            Void::IncarnationEnded => Self::IncarnationEnded,
            // Who is retired holds nothing, or was isolated; the stronger word makes the next holder fence.
            Void::Isolated | Void::Retired => Self::Isolated,
        }
    }
}

fn ended(holder: &Holder, ended: HolderEnd) -> PreviousHolder {
    PreviousHolder { node: holder.node.clone(), incarnation: holder.incarnation, epoch: holder.epoch, ended }
}

impl Right {
    pub fn standing(&self, void: impl Fn(&NodeId, Incarnation) -> Option<Void>) -> Standing {
        match &self.holder {
            Some(holder) if !holder.idle && void(&holder.node, holder.incarnation).is_none() => {
                Standing::Held(holder.clone())
            }
            _ => Standing::Grantable,
        }
    }

    /// The holder's incarnation is void: nobody holds the object. An idle holder keeps its right when its
    /// node only came back, since the release is on record and the bytes are there.
    #[must_use]
    pub fn voided(&self, void: impl Fn(&NodeId, Incarnation) -> Option<Void>) -> Option<Self> {
        let holder = self.holder.as_ref()?;
        let end = match (void(&holder.node, holder.incarnation)?, holder.idle) {
            (Void::IncarnationEnded, true) => return None,
            (_, true) => HolderEnd::Released,
            (void, false) => void.into(),
        };
        Some(Self { epoch: self.epoch, holder: None, previous: Some(ended(holder, end)) })
    }

    /// The pool was declared lost: nobody holds what was in it. `None`: nobody did.
    #[must_use]
    pub fn lost(&self) -> Option<Self> {
        let holder = self.holder.as_ref()?;
        Some(Self { epoch: self.epoch, holder: None, previous: Some(ended(holder, HolderEnd::PoolLost)) })
    }

    /// The next grant; never over somebody whose word or end is not known.
    pub fn granted(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        void: impl Fn(&NodeId, Incarnation) -> Option<Void>,
    ) -> Result<Self, NotGranted> {
        if let Standing::Held(holder) = self.standing(&void) {
            return Err(NotGranted::Held(holder));
        }
        let previous = match &self.holder {
            Some(holder) if holder.idle => Some(ended(holder, HolderEnd::Released)),
            Some(holder) => void(&holder.node, holder.incarnation).map(|void| ended(holder, void.into())),
            None => self.previous.clone(),
        };
        let epoch = self.epoch.unwrap_or_default().next().ok_or(NotGranted::EpochExhausted)?;
        let holder = Holder { node: node.clone(), incarnation, epoch, idle: false };
        Ok(Self { epoch: Some(epoch), holder: Some(holder), previous })
    }

    fn is_held_by(&self, node: &NodeId, epoch: Epoch) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.node == *node && holder.epoch == epoch)
    }

    /// The node has recorded the release of this epoch. Where nobody else reaches the pool the right stays
    /// with the node, idle. `None`: nothing changes.
    #[must_use]
    pub fn released(&self, node: &NodeId, epoch: Epoch, others_reach_it: bool) -> Option<Self> {
        let holder = self.holder.as_ref().filter(|_| self.is_held_by(node, epoch))?;
        if others_reach_it {
            return Some(Self { epoch: self.epoch, holder: None, previous: Some(ended(holder, HolderEnd::Released)) });
        }
        (!holder.idle).then(|| Self { holder: Some(Holder { idle: true, ..holder.clone() }), ..self.clone() })
    }

    /// An idle right that its node need not keep any more, since others are attached to the pool. `None`: nothing changes.
    #[must_use]
    pub fn given_back(&self, others_reach: impl Fn(&NodeId) -> bool) -> Option<Self> {
        let holder = self.holder.as_ref().filter(|holder| holder.idle && others_reach(&holder.node))?;
        self.released(&holder.node, holder.epoch, true)
    }

    /// The node never took this epoch and will not. `None`: nothing changes.
    #[must_use]
    pub fn refused(&self, node: &NodeId, epoch: Epoch) -> Option<Self> {
        let holder = self.holder.as_ref().filter(|_| self.is_held_by(node, epoch))?;
        let previous = self.previous.clone().unwrap_or_else(|| ended(holder, HolderEnd::Refused));
        Some(Self { epoch: self.epoch, holder: None, previous: Some(previous) })
    }

    /// What a node said about one epoch. `None`: it changes nothing.
    #[must_use]
    pub fn after(&self, node: &NodeId, epoch: Epoch, used: v1::ObjectUse, others_reach_it: bool) -> Option<Self> {
        match used {
            v1::ObjectUse::Released => self.released(node, epoch, others_reach_it),
            v1::ObjectUse::Refused => self.refused(node, epoch),
            v1::ObjectUse::Held | v1::ObjectUse::Unspecified => None,
        }
    }

    /// The current grant as it goes to its node.
    pub fn grant(&self) -> Option<v1::Grant> {
        let holder = self.holder.as_ref()?;
        let (predecessor_epoch, end) = match &self.previous {
            None => (0, v1::PredecessorEnd::None),
            Some(previous) => (
                previous.epoch.0,
                match previous.ended {
                    HolderEnd::Released => v1::PredecessorEnd::Released,
                    HolderEnd::Refused => v1::PredecessorEnd::Refused,
                    // What is in a lost pool is granted to nobody.
                    HolderEnd::Isolated | HolderEnd::PoolLost => v1::PredecessorEnd::Isolated,
                    HolderEnd::IncarnationEnded => v1::PredecessorEnd::IncarnationEnded,
                },
            ),
        };
        Some(v1::Grant { epoch: holder.epoch.0, predecessor_epoch, predecessor_end: end.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeId {
        name.parse().unwrap()
    }

    fn nothing_void(_: &NodeId, _: Incarnation) -> Option<Void> {
        None
    }

    #[expect(clippy::unnecessary_wraps, reason = "one of several answers to the same question")]
    fn isolated(_: &NodeId, _: Incarnation) -> Option<Void> {
        Some(Void::Isolated)
    }

    fn first() -> Right {
        Right::default().granted(&node("a"), Incarnation(1), nothing_void).unwrap()
    }

    fn predecessor(right: &Right) -> (u64, v1::PredecessorEnd) {
        let grant = right.grant().unwrap();
        (grant.predecessor_epoch, grant.predecessor_end())
    }

    #[test]
    fn an_idle_right_is_given_back_where_others_are_attached() {
        let held = first();
        assert_eq!(held.given_back(|_| true), None, "it is in use");
        let idle = held.released(&node("a"), Epoch(1), false).unwrap();
        assert_eq!(idle.given_back(|_| false), None);
        let free = idle.given_back(|holder| *holder == node("a")).unwrap();
        assert_eq!((free.epoch, free.holder.as_ref()), (Some(Epoch(1)), None));
        assert_eq!(free.previous.unwrap().ended, HolderEnd::Released);
    }

    #[test]
    fn only_the_nodes_word_or_a_void_incarnation_ends_a_grant() {
        let held = first();
        assert!(matches!(held.standing(nothing_void), Standing::Held(_)));
        let over_it = held.granted(&node("b"), Incarnation(5), nothing_void);
        assert!(matches!(over_it, Err(NotGranted::Held(holder)) if holder.node == node("a")));
        assert_eq!(held.standing(isolated), Standing::Grantable);
        assert_eq!(held.released(&node("b"), Epoch(1), true), None, "another node's word");
        assert_eq!(held.released(&node("a"), Epoch(2), true), None, "another epoch");
        assert_eq!(held.after(&node("a"), Epoch(1), v1::ObjectUse::Held, true), None);
        let released = held.released(&node("a"), Epoch(1), true).unwrap();
        assert_eq!(released.standing(nothing_void), Standing::Grantable);
    }

    #[test]
    fn each_grant_names_its_predecessor_and_how_it_ended() {
        let none = nothing_void;
        let (a, b) = (node("a"), node("b"));
        let to_b = |right: &Right| right.granted(&b, Incarnation(5), none).unwrap();
        assert_eq!(predecessor(&first()), (0, v1::PredecessorEnd::None));
        for (right, expected) in [
            (first().released(&a, Epoch(1), true), (1, v1::PredecessorEnd::Released)),
            (first().released(&a, Epoch(1), false), (1, v1::PredecessorEnd::Released)),
            (first().refused(&a, Epoch(1)), (1, v1::PredecessorEnd::Refused)),
            (first().voided(isolated), (1, v1::PredecessorEnd::Isolated)),
            (first().voided(|_, _| Some(Void::IncarnationEnded)), (1, v1::PredecessorEnd::IncarnationEnded)),
        ] {
            let next = to_b(&right.unwrap());
            assert_eq!((predecessor(&next), next.epoch), (expected, Some(Epoch(2))));
        }
        let over_void = first().granted(&b, Incarnation(5), isolated).unwrap();
        assert_eq!(predecessor(&over_void), (1, v1::PredecessorEnd::Isolated));
    }

    #[test]
    fn a_refused_grant_does_not_hide_who_wrote_before() {
        let over_isolated = first().granted(&node("b"), Incarnation(5), isolated).unwrap();
        let refused = over_isolated.refused(&node("b"), Epoch(2)).unwrap();
        let third = refused.granted(&node("c"), Incarnation(1), nothing_void).unwrap();
        assert_eq!(predecessor(&third), (1, v1::PredecessorEnd::Isolated));
        assert_eq!(third.epoch, Some(Epoch(3)));
    }

    #[test]
    fn an_idle_holder_outlives_its_incarnation_but_no_isolation() {
        let idle = first().released(&node("a"), Epoch(1), false).unwrap();
        assert_eq!(idle.voided(|_, _| Some(Void::IncarnationEnded)), None);
        let isolated = idle.voided(isolated).unwrap();
        assert_eq!(isolated.previous.unwrap().ended, HolderEnd::Released);
        assert_eq!(isolated.holder, None);
    }

    #[test]
    fn the_same_word_twice_changes_nothing() {
        let idle = first().released(&node("a"), Epoch(1), false).unwrap();
        assert_eq!(idle.released(&node("a"), Epoch(1), false), None);
        let released = first().released(&node("a"), Epoch(1), true).unwrap();
        assert_eq!(released.released(&node("a"), Epoch(1), true), None);
        let refused = first().refused(&node("a"), Epoch(1)).unwrap();
        assert_eq!(refused.refused(&node("a"), Epoch(1)), None);
    }
}
