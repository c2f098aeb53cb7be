//! StoragePool: which nodes reach a pool, and whether they mean the same one.

mod controller;
mod index;
mod status;

pub use controller::{PoolControl, ensure, run};
pub use index::{Marker, PoolIndex};
