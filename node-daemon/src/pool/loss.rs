//! Whether a pool was declared lost, which is for ever: a pool that comes back is not written to.

use std::sync::Arc;

use tokio::sync::watch;

/// Shared by everybody who would write to the pool.
#[derive(Clone, Debug)]
pub struct Loss(Arc<watch::Sender<bool>>);

impl Loss {
    pub fn of(declared: bool) -> Self {
        Self(Arc::new(watch::Sender::new(declared)))
    }

    pub fn is_declared(&self) -> bool {
        *self.0.borrow()
    }

    /// Whether that is news.
    pub fn declare(&self) -> bool {
        !self.0.send_replace(true)
    }

    /// Returns when it is.
    pub async fn declared(&self) {
        let mut declared = self.0.subscribe();
        // The sender lives as long as this one.
        let _ = declared.wait_for(|declared| *declared).await;
    }
}
