//! Placement: which node gets which Workspace. Pure and in memory; no clock, no randomness, no I/O.
//!
//! A batch of requests is decided in one tick over a copy of what the nodes can take. Each assignment
//! is charged to that copy at once, so that no two requests of a batch are promised the same room. The
//! copy starts with what executions hold and what offers and commits in flight were promised.

mod answer;
mod board;
mod node;

use std::collections::BTreeMap;

use kibo_crds::{Bytes, MilliCpu, NodeId, PoolId};

pub use answer::{Exclusion, Unplaceable};
pub use node::{CandidateNode, CandidatePool, PoolAccess, Used};

/// How one of several candidates is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Strategy {
    /// The node with the largest free share of its scarcer resource.
    #[default]
    Spread,
    /// The node with the smallest one, so that others stay empty.
    Pack,
}

/// Where the bytes of an object are, or may be made.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Disk {
    /// In this pool; `to_allocate` is what its image does not occupy yet.
    In { pool: PoolId, to_allocate: Bytes },
    /// To be made: in this pool, or in the default pool of the node.
    New { pool: Option<PoolId>, size: Bytes },
}

/// What a Workspace asks of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Demand {
    pub cpu: MilliCpu,
    /// Guest memory and the VMM's own.
    pub memory: Bytes,
    /// The writable layer first, then the Volumes.
    pub disks: Vec<Disk>,
    /// Labels that the node must carry.
    pub node_selector: BTreeMap<String, String>,
    /// The only candidate.
    pub pin: Option<NodeId>,
    /// Nodes that have refused this start, with their words.
    pub refusals: BTreeMap<NodeId, String>,
}

/// The node for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    pub node: NodeId,
    /// The pool for each disk, in the order of the demand.
    pub pools: Vec<PoolId>,
}

/// Decides a batch, in the order of its requests. The same input gives the same answers.
pub fn decide(
    nodes: Vec<CandidateNode>,
    demands: &[Demand],
    strategy: Strategy,
) -> Vec<Result<Assignment, Unplaceable>> {
    let mut board = board::Board::new(nodes, strategy);
    demands.iter().map(|demand| board.assign(demand)).collect()
}

#[cfg(test)]
mod tests;
