//! The host itself, as its kernel shows it.

pub mod clock;
mod proc;
mod tight;
mod usage;
mod vms;

pub use tight::Thresholds;
pub use usage::Host;
pub use vms::VmUsage;
