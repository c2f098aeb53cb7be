//! The operator: the only writer of every `status`.
//!
//! One replica leads (module [`leader`]) and only that one acts. Each room decides in pure functions
//! over what was observed, and applies the decision in a thin shell.

pub mod api;
pub mod cache;
pub mod cli;
mod clock;
pub mod cluster;
mod commands;
pub mod context;
pub mod crd_apply;
pub mod evidence;
pub mod growth;
pub mod guarded;
pub mod health;
pub mod held;
pub mod leader;
pub mod moving;
pub mod node;
pub mod overcommit;
pub mod placement;
pub mod queue;
pub mod right;
pub mod run;
pub mod session;
pub mod space;
pub mod storage_pool;
pub mod streams;
pub mod tls;
pub mod tombstone;
pub mod transfer;
pub mod volume;
mod watch;
pub mod watchdog;
pub mod workspace;
