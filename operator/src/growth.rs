//! The size of an image that exists against the one that was asked for. Pure.
//!
//! Images only grow: the control plane accepts a size that the pool can hold, and the node that takes the object next
//! makes it so. What was accepted is stored (`growTo`), so that an Offer, a Go and a desired set all say the same.

use kibo_crds::{Bytes, PoolId};

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
}

impl Growth {
    pub fn is_refused(&self) -> bool {
        self.unmet.as_ref().is_some_and(|(reason, _)| *reason == RESOURCE_EXHAUSTED)
    }
}

/// Whether the image is to grow. `room` is what the pool has left; `None`: not known, and no obstacle.
pub fn judge(asked: &Asked<'_>, room: impl FnOnce() -> Option<Bytes>) -> Growth {
    let Asked { what, pool, size, .. } = asked;
    let Some(wanted) = asked.wanted.filter(|wanted| wanted > size) else { return Growth::default() };
    // What was accepted stays so: room that has gone since is missed by the start.
    let is_accepted = asked.accepted.is_some_and(|accepted| wanted <= accepted);
    // What was accepted counts as allocated already, as does what is to be made.
    let needed = wanted.saturating_sub(asked.accepted.unwrap_or(*size).max(*size));
    if !is_accepted && let Some(room) = room().filter(|room| needed > *room) {
        let (room, needed) = (whole_mib(room), whole_mib(needed));
        let message = format!(
            "storage pool {pool} has {room} left, and {what} would need {needed} more: make room there, or ask for less \
             (it has {size})"
        );
        return Growth { grow_to: asked.accepted, unmet: Some((RESOURCE_EXHAUSTED, message)) };
    }
    let message = format!("{what} grows from {size} to {wanted} at the next start");
    Growth { grow_to: Some(wanted), unmet: Some((AT_NEXT_START, message)) }
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
        let growth = judge(&asked, || room.map(Bytes::mib));
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
