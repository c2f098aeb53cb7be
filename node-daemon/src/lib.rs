//! Runs the microVMs of one host.
//!
//! The daemon opens one session to the operator, says what the host has, admits or refuses what it
//! is offered, and runs each Instance as a QEMU of its own. A VM survives the daemon: what runs is
//! found again by listing, and what was not yet told is in the [`spool`].

pub mod accelerator;
pub mod admission;
pub mod cli;
pub mod clock;
pub mod config;
mod daemon;
pub mod durable;
pub mod guest;
pub mod host;
pub mod instance;
pub mod launch;
pub mod log_store;
pub mod network;
pub mod pool;
pub mod session;
pub mod spool;
pub mod state;
pub mod vmm;
