//! Whether a pool was declared lost, which is for ever: a pool that comes back is not written to.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Shared by everybody who would write to the pool.
#[derive(Clone, Debug, Default)]
pub struct Loss(Arc<AtomicBool>);

impl Loss {
    pub fn of(declared: bool) -> Self {
        Self(Arc::new(AtomicBool::new(declared)))
    }

    pub fn is_declared(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Whether that is news.
    pub fn declare(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}
