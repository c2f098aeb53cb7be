//! Node: the registration of a host and what is true of it.

mod commands;
mod conditions;
mod controller;
mod host;
mod index;
pub(crate) mod isolation;
mod settings;
mod status;

pub use controller::{NodeControl, load, run};
pub(crate) use controller::{banished, log_watch_error};
pub use host::{InstanceUsage, host_usage, instance_usages};
pub use index::{Facts, NodeIndex, Void};
pub use settings::effective as effective_settings;
pub use status::{Live, Observed, Refused, Reported, compute as compute_status};
