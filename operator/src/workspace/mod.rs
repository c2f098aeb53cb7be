//! Workspace: start, stop and deletion, and the events of its Instances.
//!
//! [`decide`] says what the next step of a Workspace is, from what is stored and nothing else, so that a
//! leader that takes over between any two steps goes on where the last one stopped. [`event`] says what
//! the word of a node changes. The rest of the room carries that out.

pub mod adopt;
mod adopting;
pub mod commit;
mod controller;
pub mod decide;
pub mod draft;
pub mod event;
mod hooks;
pub mod index;
pub mod launch;
pub(crate) mod ledger;
mod placer;
pub(crate) mod reconcile;
pub mod sight;
mod start;
pub mod stopwatch;
mod sums;
mod transferring;
pub(crate) mod world;

pub use controller::{Ended, Room};
pub use hooks::Hooks;
pub use index::Workspaces;
pub use world::Settings;
