//! What is measured, a file for each.

mod bare_port;
mod decisions;
mod fleet;
mod large;
mod memory;
mod moving;
mod object;
mod placement;
mod ratio;
mod start;
mod storage;
mod streams;
mod takeover;
mod ten;
mod writes;

use anyhow::Result;
use clap::ValueEnum;
use jiff::Timestamp;

pub use self::placement::Sizes;
use crate::{report::Section, site::Site};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Figure {
    /// From kubectl apply to AVAILABLE, beside a bare boot
    Start,
    /// Ten starts at once, beside ten bare boots at once
    Ten,
    /// Of the operator, the node-daemon, and a VM beyond its guest
    Memory,
    /// To the API server, for a start, an idle minute and a stop
    Writes,
    /// From a changed overcommit ratio to the node's confirmation
    Ratio,
    /// Bytes into and out of a guest, beside the bare virtio-serial channel
    Streams,
    /// What a guest gets from its disk, beside the same guest under a bare QEMU
    Storage,
    /// From an isolation to AVAILABLE on another node, beside a bare boot
    Takeover,
    /// 4 GiB into a guest and out of it again: how fast, and what it takes of memory
    Large,
    /// An image from one storage pool to another, beside cp
    Move,
    /// 500 nodes that do nothing: how soon a new leader has them, and what they cost
    Fleet,
    /// Places found in a second for 5000 requests on 5000 nodes
    Decisions,
    /// Placements in a second with the API server, beside kube-scheduler
    Placement,
}

/// How much of it.
#[derive(Clone, Debug)]
pub struct Extent {
    /// Starts beside as many bare boots.
    pub pairs: u32,
    /// Size of the large file.
    pub large_mib: u32,
    pub placement: Sizes,
}

impl Figure {
    pub async fn measure(self, site: &Site, extent: &Extent) -> Result<Vec<Section>> {
        match self {
            Self::Start => start::measure(site, extent.pairs).await,
            Self::Ten => ten::measure(site).await,
            Self::Memory => memory::measure(site).await,
            Self::Writes => writes::measure(site).await,
            Self::Ratio => ratio::measure(site).await,
            Self::Streams => streams::measure(site).await,
            Self::Storage => Box::pin(storage::measure(site)).await,
            Self::Takeover => Box::pin(takeover::measure(site)).await,
            Self::Large => Box::pin(large::measure(site, extent.large_mib)).await,
            Self::Move => moving::measure(site).await,
            Self::Fleet => fleet::measure(site).await,
            Self::Decisions => decisions::measure(),
            Self::Placement => placement::measure(site, &extent.placement).await,
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "a count, rounded for people")]
fn as_float(count: impl TryInto<u64>) -> f64 {
    count.try_into().unwrap_or_default() as f64
}

/// Milliseconds between two moments.
fn between(from: Timestamp, to: Timestamp) -> f64 {
    to.duration_since(from).as_secs_f64() * 1000.0
}
