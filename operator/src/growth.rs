//! The size of an image that exists against the one that was asked for. Pure.
//!
//! Images only grow: the control plane accepts a size that the pool can hold, and the node that takes the object next
//! makes it so. What was accepted is stored (`growTo`), so that an Offer, a Go and a desired set all say the same.

use kibo_crds::{Bytes, PoolId};

use crate::space::{Fit, Room};

/// Reason of a growth that waits for the next start.
pub const AT_NEXT_START: &str = "AtNextStart";
/// Reason of a growth that the pool cannot hold.
pub const RESOURCE_EXHAUSTED: &str = "ResourceExhausted";

/// An image, and what is asked of it.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    pub what: &'a str,
    pub pool: &'a PoolId,
    pub size: Bytes,
    /// What was accepted before.
    pub accepted: Option<Bytes>,
    /// Absent: nobody asks for a size of its own.
    pub wanted: Option<Bytes>,
}

/// What comes of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Growth {
    pub grow_to: Option<Bytes>,
    /// Reason and message for the condition, while the image has not the size that was asked for.
    pub unmet: Option<(&'static str, String)>,
    /// It is to be judged again, and nothing is to be said of it before: whether there is room depends on what is about to be
    /// stored.
    pub is_undecided: bool,
}

impl Growth {
    fn refused(asked: &Asked<'_>, left: Bytes, needed: Bytes) -> Self {
        let Asked { what, pool, size, .. } = asked;
        let (left, needed) = (whole_mib(left), whole_mib(needed));
        let message = format!(
            "storage pool {pool} has {left} left, and {what} would need {needed} more: make room there, or ask for less \
             (it has {size})"
        );
        Self { grow_to: asked.accepted, unmet: Some((RESOURCE_EXHAUSTED, message)), is_undecided: false }
    }

    pub fn is_refused(&self) -> bool {
        self.unmet.as_ref().is_some_and(|(reason, _)| *reason == RESOURCE_EXHAUSTED)
    }
}

/// Whether the image is to grow. `room` is what the pool has left; `None`: not known, and no obstacle.
pub fn judge(asked: &Asked<'_>, room: impl FnOnce() -> Option<Room>) -> Growth {
    let Asked { what, size, accepted, .. } = asked;
    let Some(wanted) = asked.wanted.filter(|wanted| wanted > size) else { return Growth::default() };
    // What was accepted stays so: room that has gone since is missed by the start.
    let is_accepted = accepted.is_some_and(|accepted| wanted <= accepted);
    // What was accepted counts as allocated already, as does what is to be made.
    let needed = wanted.saturating_sub(accepted.unwrap_or(*size).max(*size));
    let room = if is_accepted { None } else { room() };
    match room.map(|room| (room.fit(needed), room)) {
        Some((Fit::Undecided, _)) => Growth { grow_to: *accepted, unmet: None, is_undecided: true },
        Some((Fit::No, room)) => Growth::refused(asked, room.left, needed),
        Some((Fit::Yes, _)) | None => {
            let message = format!("{what} grows from {size} to {wanted} at the next start");
            Growth { grow_to: Some(wanted), unmet: Some((AT_NEXT_START, message)), is_undecided: false }
        }
    }
}

fn whole_mib(bytes: Bytes) -> Bytes {
    Bytes(bytes.0 - bytes.0 % (1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(size: u32, accepted: Option<u32>, wanted: Option<u32>, room: Option<u32>) -> (Option<Bytes>, String) {
        let pool: PoolId = "p".parse().unwrap();
        let asked = Asked {
            what: "the writable layer",
            pool: &pool,
            size: Bytes::mib(size),
            accepted: accepted.map(Bytes::mib),
            wanted: wanted.map(Bytes::mib),
        };
        let growth = judge(&asked, || room.map(|left| Room { left: Bytes::mib(left), at_most: Bytes::mib(left) }));
        (growth.grow_to, growth.unmet.map(|(reason, _)| reason.to_owned()).unwrap_or_default())
    }

    #[test]
    fn an_image_grows_to_what_its_pool_can_hold_and_never_shrinks() {
        let grows = |mib| (Some(Bytes::mib(mib)), AT_NEXT_START.to_owned());
        let agrees = (None, String::new());
        assert_eq!(judged(10, None, None, Some(100)), agrees, "nobody asks");
        assert_eq!(judged(10, None, Some(10), Some(0)), agrees, "it has that size");
        assert_eq!(judged(10, None, Some(5), Some(100)), agrees, "what exists does not shrink");
        assert_eq!(judged(10, None, Some(30), Some(20)), grows(30), "only what is added needs room");
        assert_eq!(judged(10, None, Some(31), Some(20)), (None, RESOURCE_EXHAUSTED.into()));
        assert_eq!(judged(10, None, Some(30), None), grows(30), "nobody can say what is free");
    }

    #[test]
    fn what_depends_on_others_is_not_judged() {
        let pool: PoolId = "p".parse().unwrap();
        let judged = |wanted| {
            let (size, accepted, wanted) = (Bytes::mib(10), Some(Bytes::mib(15)), Some(Bytes::mib(wanted)));
            let asked = Asked { what: "the writable layer", pool: &pool, size, accepted, wanted };
            judge(&asked, || Some(Room { left: Bytes::mib(5), at_most: Bytes::mib(20) }))
        };
        assert_eq!(judged(20).grow_to, Some(Bytes::mib(20)));
        let undecided = Growth { grow_to: Some(Bytes::mib(15)), unmet: None, is_undecided: true };
        assert_eq!((judged(21), judged(35)), (undecided.clone(), undecided));
        assert!(judged(36).is_refused() && judged(36).unmet.is_some_and(|(_, words)| words.contains("has 5Mi left")));
    }

    #[test]
    fn what_was_accepted_stays_so_and_can_be_lowered() {
        let grows = |mib| (Some(Bytes::mib(mib)), AT_NEXT_START.to_owned());
        assert_eq!(judged(10, Some(30), Some(30), Some(0)), grows(30));
        assert_eq!(judged(10, Some(30), Some(20), Some(0)), grows(20));
        assert_eq!(judged(10, Some(30), Some(10), Some(0)), (None, String::new()));
        let refused = (Some(Bytes::mib(30)), RESOURCE_EXHAUSTED.to_owned());
        assert_eq!(judged(10, Some(30), Some(90), Some(59)), refused, "a refusal leaves what was accepted");
        assert_eq!(judged(10, Some(30), Some(90), Some(60)), grows(90), "which counts already");
    }
}
