//! Node: the registration of a host and what is true of it.

mod index;

pub use index::{Facts, NodeIndex, Void};
