//! Control sessions: opened by the nodes, held by the leader.

pub mod hooks;
pub(crate) mod live;
mod registry;

pub use live::{Capacity, DeclaredPool, Settings};
pub use registry::{Accepted, CommandFailure, NoSession, NodeSnapshot, ObjectCommand, OfferFailure, Registry};
