//! StoragePool: which nodes reach a pool, and whether they mean the same one.

mod commands;
mod controller;
mod declared;
mod index;
mod status;
mod unowned;

pub use controller::{PoolControl, ensure, run};
pub use index::{Marker, PoolIndex};
pub use unowned::run as run_unowned;
