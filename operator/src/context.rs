//! What every room of the leader shares. It lives exactly as long as one leadership.

use std::{sync::Arc, time::Duration};

use kibo_crds::{Bytes, Term};
use kube::{Client, runtime::events::Recorder};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    guarded::WriteError, leader::History, node::NodeIndex, overcommit::OvercommitIndex, session::Registry,
    storage_pool::PoolIndex, watchdog::Watchdog,
};

/// The leader's surroundings. Cheap to clone as an [`Arc`].
pub struct Context {
    pub client: Client,
    /// Namespace of the operator's own objects.
    pub namespace: String,
    /// Number of this leadership; every status write carries it.
    pub term: Term,
    /// The leaderships up to this one.
    pub history: Arc<History>,
    /// Random id of this cluster, made once.
    pub cluster_id: String,
    /// The live control sessions.
    pub registry: Registry,
    /// What voids executions and holders, for each Node.
    pub nodes: NodeIndex,
    /// Which nodes were heard of lately.
    pub watchdog: Watchdog,
    /// How often the clock of each node is measured.
    pub clock_period: Duration,
    /// Markers and members of the StoragePools.
    pub pools: PoolIndex,
    /// The cluster-wide ratios.
    pub overcommit: OvercommitIndex,
    pub recorder: Recorder,
    /// What a VM needs beyond its guest's memory; counts in the allocation.
    pub vm_overhead: Bytes,
    /// Cancelled when this leadership ends; everything spawned must end then.
    pub stop: CancellationToken,
    /// Spawn what must have ended before the Lease is given back on this tracker.
    pub tasks: TaskTracker,
}

pub type Ctx = Arc<Context>;

impl Context {
    /// Ends this leadership when a write showed that a newer one exists.
    pub fn end_if_overtaken(&self, error: &WriteError) {
        if matches!(error, WriteError::StaleTerm { .. }) && !self.stop.is_cancelled() {
            tracing::error!(%error, "a newer leader writes: this one ends");
            self.stop.cancel();
        }
    }
}
