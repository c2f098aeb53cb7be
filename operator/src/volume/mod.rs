//! Volume: a disk with a life of its own.
//!
//! Workspaces bind, grant and mount Volumes; this room keeps what is stored true when none does: phases,
//! grants that nobody uses any more, bindings of Workspaces that are gone, and the deletion.

pub mod decide;
pub mod index;
pub mod reconcile;

pub use index::Volumes;
