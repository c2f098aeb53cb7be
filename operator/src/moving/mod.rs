//! Moves of objects (Volumes, writable layers) between storage pools. `docs/moving.md` has the protocol.
//!
//! [`decide`] is the next step of a move, pure, for both kinds of objects; their own rooms write what it says together
//! with everything else. [`Heard`] is what nodes said of moves in this leadership, and nothing that could not be asked
//! for again.

mod decide;
mod heard;
mod shell;
#[cfg(test)]
mod tests;

use kibo_crds::{Bytes, MoveState, MoveStatus, PoolId};

pub use decide::{Action, Decision, Sight, decide, taken_back};
pub use heard::{Discarded, Heard, Hearsay, Removal, Word};
pub(crate) use shell::{Whose, act, points, progress, reach};

/// What a move takes in the pool that it goes to, before the object is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    pub pool: PoolId,
    /// What the object may grow to.
    pub allocated: Bytes,
    /// What is not written yet.
    pub promised: Bytes,
}

/// `size` is that of the image, `allocated` what it may grow to.
pub fn claim(moving: Option<&MoveStatus>, size: Bytes, allocated: Bytes) -> Option<Claim> {
    let moving = moving.filter(|moving| moving.state == MoveState::Copying)?;
    let total = moving.total_bytes.unwrap_or(size);
    let promised = total.saturating_sub(moving.copied_bytes.unwrap_or_default());
    Some(Claim { pool: moving.to.clone(), allocated, promised })
}

/// Whether something of it is left to be done.
pub fn is_open(moving: Option<&MoveStatus>) -> bool {
    moving.is_some_and(|moving| !moving.state.is_over())
}

/// The object is in `pool`, as a node proves against a store that was put back: a move there was committed.
pub fn adopted(moving: Option<&mut MoveStatus>, pool: &PoolId) {
    if let Some(moving) = moving.filter(|moving| moving.state.holds() && moving.to == *pool) {
        (moving.state, moving.leftover) = (MoveState::Removing, moving.from.clone());
        (moving.reason, moving.message) = (None, None);
    }
}

/// Why an object cannot be used now, for people; `None`: it can.
pub fn stands_in_the_way(object: &str, moving: Option<&MoveStatus>) -> Option<String> {
    let moving = moving.filter(|moving| moving.state.holds())?;
    let to = &moving.to;
    let by = moving.node.as_ref().map(|node| format!(" by node {node}")).unwrap_or_default();
    if moving.state == MoveState::Cancelling {
        return Some(format!("{object} was being moved to storage pool {to}{by}, which is just being given up"));
    }
    let far = match (moving.copied_bytes, moving.total_bytes) {
        (Some(copied), Some(total)) if total > Bytes(0) => {
            format!(", {} % done", u128::from(copied.0) * 100 / u128::from(total.0))
        }
        _ => String::new(),
    };
    Some(format!("{object} is being moved to storage pool {to}{by}{far}: it can be used when that is finished"))
}
