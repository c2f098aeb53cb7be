//! Isolation: somebody outside asserts that a host is off or cannot write any more, and what it held becomes free.
//!
//! From the commit of the spec nobody opens a session in that incarnation. Then another member of a shared pool looks
//! whether the host still writes: if so, the isolation is refused and nothing of it happens. Otherwise what names the
//! incarnation is counted, the counts are stored, and from that write on all of it is void: Workspaces and Volumes let
//! go of it, each by its own guarded write. Every step begins from what is stored, so a leader that dies anywhere
//! leaves the next one to go on, and nothing is counted twice.

mod ahead;
mod carry_out;
mod census;
mod evidence;
mod plan;
mod shared;

pub use ahead::{Sightings, run as look_ahead};
pub use carry_out::{Running, ensure};
pub use plan::{Fence, carried_out, fence, verdict};

/// What somebody types who knows that the host is off.
pub fn command(node: &(impl std::fmt::Display + ?Sized)) -> String {
    format!("`kibo node isolate {node} --confirm-host-cannot-write`")
}
