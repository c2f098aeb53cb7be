//! Control sessions: opened by the nodes, held by the leader.

mod clock;
mod enroll;
mod hello;
pub mod hooks;
mod inbound;
mod lanes;
pub(crate) mod live;
mod open;
mod questions;
mod registry;
mod serve;
mod server;
mod service_account;
mod strangers;

pub(crate) use inbound::Pace;
pub use live::{Capacity, Confirmation, DeclaredPool, Settings};
pub use open::{Leading, revision_of};
pub(crate) use open::{read_node, spares_unknown};
pub use registry::{Accepted, CommandFailure, NoSession, NodeSnapshot, ObjectCommand, OfferFailure, Registry};
pub use server::{ServerError, SessionServer};
pub use service_account::{HostLabel, Policy as EnrollmentPolicy, ServiceAccount};
