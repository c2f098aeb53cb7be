//! StoragePool: which nodes reach a pool, and whether they mean the same one.

mod index;

pub use index::PoolIndex;
