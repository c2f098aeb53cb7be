//! What objects take of storage pools, stored or about to be. Pure.

use std::collections::BTreeMap;

use kibo_crds::{Bytes, PoolId, volume::VolumeStatus, workspace::WorkspaceStatus};

use crate::moving;

/// What is taken of one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Of its capacity: the sizes that images have, or may grow to.
    pub allocated: Bytes,
    /// Of its free space: what is about to be written.
    pub promised: Bytes,
}

impl Taken {
    /// Of an image that is about to be made.
    pub fn all(size: Bytes) -> Self {
        Self { allocated: size, promised: size }
    }

    pub fn add(&mut self, other: Self) {
        self.allocated.0 = self.allocated.0.saturating_add(other.allocated.0);
        self.promised.0 = self.promised.0.saturating_add(other.promised.0);
    }

    #[must_use]
    pub fn less(self, other: Self) -> Self {
        let allocated = self.allocated.saturating_sub(other.allocated);
        Self { allocated, promised: self.promised.saturating_sub(other.promised) }
    }
}

/// What may still be put into a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Room {
    pub left: Bytes,
    /// The same if the growths and moves that were found to fit, and are not stored yet, came to nothing.
    pub at_most: Bytes,
}

/// Whether something fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    Yes,
    /// That depends on what is about to be stored.
    Undecided,
    No,
}

impl Room {
    pub fn fit(self, needed: Bytes) -> Fit {
        if needed <= self.left {
            Fit::Yes
        } else if needed <= self.at_most {
            Fit::Undecided
        } else {
            Fit::No
        }
    }
}

pub type ByPool = BTreeMap<PoolId, Taken>;

pub fn add_all(sums: &mut ByPool, amounts: impl IntoIterator<Item = (PoolId, Taken)>) {
    for (pool, taken) in amounts {
        sums.entry(pool).or_default().add(taken);
    }
}

/// What the layer of a Workspace takes where it is, and where it is being moved to. Promised is all of an image that is
/// not made, and what one grows by that is being started.
pub fn of_layer(status: &WorkspaceStatus) -> impl Iterator<Item = (PoolId, Taken)> + use<> {
    let layer = status.writable_layer.as_ref().map(|layer| {
        let allocated = layer.grow_to.unwrap_or(layer.size);
        let promised = match (layer.created, &status.execution) {
            (false, _) => allocated,
            (true, Some(_)) => allocated.saturating_sub(layer.size),
            (true, None) => Bytes(0),
        };
        let claim = moving::claim(status.r#move.as_ref(), layer.size, allocated);
        ((layer.pool.clone(), Taken { allocated, promised }), claim)
    });
    let (there, claim) = layer.unzip();
    there.into_iter().chain(claim.flatten().map(of_claim))
}

/// The same of a Volume; `size` is that of its image, or the one that it is to be made with.
pub fn of_volume(status: &VolumeStatus, size: Bytes) -> impl Iterator<Item = (PoolId, Taken)> + use<> {
    let allocated = status.grow_to.unwrap_or(size);
    let there = status.pool.clone().map(|pool| {
        let promised = match (status.size, &status.granted_for) {
            (None, _) => size,
            (Some(made), Some(_)) => status.grow_to.unwrap_or(made).saturating_sub(made),
            (Some(_), None) => Bytes(0),
        };
        (pool, Taken { allocated, promised })
    });
    there.into_iter().chain(moving::claim(status.r#move.as_ref(), size, allocated).map(of_claim))
}

fn of_claim(claim: moving::Claim) -> (PoolId, Taken) {
    (claim.pool, Taken { allocated: claim.allocated, promised: claim.promised })
}

/// What is taken after a decision and was not before it.
pub fn more(
    before: impl IntoIterator<Item = (PoolId, Taken)>,
    after: impl IntoIterator<Item = (PoolId, Taken)>,
) -> ByPool {
    let (mut old, mut new) = (ByPool::new(), ByPool::new());
    add_all(&mut old, before);
    add_all(&mut new, after);
    let mut more = ByPool::new();
    for (pool, taken) in new {
        let taken = taken.less(old.get(&pool).copied().unwrap_or_default());
        if taken != Taken::default() {
            more.insert(pool, taken);
        }
    }
    more
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn volume(status: serde_json::Value) -> VolumeStatus {
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn a_growth_and_a_move_take_more_and_a_start_of_neither_does_not() {
        let mib = |allocated, promised| Taken { allocated: Bytes::mib(allocated), promised: Bytes::mib(promised) };
        let pool = |id: &str| id.parse::<PoolId>().unwrap();
        let size = Bytes::mib(10);
        let made = volume(json!({ "pool": "p", "size": size }));
        let grown = VolumeStatus { grow_to: Some(Bytes::mib(30)), ..made.clone() };
        let more = |old: &VolumeStatus, new: &VolumeStatus| more(of_volume(old, size), of_volume(new, size));
        assert_eq!(more(&made, &made), ByPool::new());
        assert_eq!(more(&made, &grown), [(pool("p"), mib(20, 0))].into());
        assert_eq!(more(&grown, &made), ByPool::new(), "one that was lowered");
        let moving = json!({ "to": "q", "state": "Copying", "startedAt": "2026-01-01T00:00:00Z", "copiedBytes": 0 });
        let moved = VolumeStatus { r#move: Some(serde_json::from_value(moving).unwrap()), ..made.clone() };
        assert_eq!(more(&made, &moved), [(pool("q"), mib(10, 10))].into());
        assert_eq!(more(&moved, &made), ByPool::new());
        let both = VolumeStatus { grow_to: Some(Bytes::mib(30)), ..moved };
        assert_eq!(more(&grown, &both), [(pool("q"), mib(30, 10))].into(), "it is to grow there");
        let unmade = volume(json!({ "pool": "p" }));
        assert_eq!(more(&VolumeStatus::default(), &unmade), [(pool("p"), mib(10, 10))].into());
    }
}
