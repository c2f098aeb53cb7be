//! Why nobody takes a Workspace, in one sentence that a person can act on.

use std::{collections::BTreeMap, fmt};

use kibo_crds::{Bytes, MilliCpu, NodeId, PoolId};

use super::Demand;

/// The first thing that keeps a node out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exclusion {
    NoSession,
    /// Its session is being set up: desired set not sent, or settings not confirmed.
    NotReady,
    Draining,
    ClockSkewed,
    MemoryTight,
    Selector,
    NotAttached(PoolId),
    /// A pool that is new to the cluster.
    PoolBeingRegistered(PoolId),
    PoolUnavailable(PoolId),
    NoDefaultPool,
    PoolFull {
        pool: PoolId,
        free: Bytes,
    },
    /// There may be space, but the sizes of the disks add up to what may be allocated.
    PoolAllocated {
        pool: PoolId,
        left: Bytes,
    },
    NoSlot,
    Cpu {
        free: MilliCpu,
    },
    Memory {
        free: Bytes,
    },
    /// The node itself said no to this start.
    Refused(String),
}

/// Nobody takes the request: for each reason, how many nodes were out because of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unplaceable {
    nodes: u32,
    pin: Option<NodeId>,
    cpu: MilliCpu,
    memory: Bytes,
    selector: BTreeMap<String, String>,
    /// In the order in which they are told, with the largest amount that was free.
    reasons: BTreeMap<Reason, Tally>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reason {
    NoSession,
    NotReady,
    Draining,
    ClockSkewed,
    MemoryTight,
    Selector,
    NotAttached(PoolId),
    PoolBeingRegistered(PoolId),
    PoolUnavailable(PoolId),
    NoDefaultPool,
    PoolFull(PoolId),
    PoolAllocated(PoolId),
    NoSlot,
    Cpu,
    Memory,
    Refused,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Tally {
    nodes: u32,
    most_free: u64,
    words: String,
}

impl Unplaceable {
    pub(super) fn new(demand: &Demand) -> Self {
        Self {
            nodes: 0,
            pin: demand.pin.clone(),
            cpu: demand.cpu,
            memory: demand.memory,
            selector: demand.node_selector.clone(),
            reasons: BTreeMap::new(),
        }
    }

    pub(super) fn add(&mut self, exclusion: Exclusion) {
        let (reason, free, words) = match exclusion {
            Exclusion::NoSession => (Reason::NoSession, 0, String::new()),
            Exclusion::NotReady => (Reason::NotReady, 0, String::new()),
            Exclusion::Draining => (Reason::Draining, 0, String::new()),
            Exclusion::ClockSkewed => (Reason::ClockSkewed, 0, String::new()),
            Exclusion::MemoryTight => (Reason::MemoryTight, 0, String::new()),
            Exclusion::Selector => (Reason::Selector, 0, String::new()),
            Exclusion::NotAttached(pool) => (Reason::NotAttached(pool), 0, String::new()),
            Exclusion::PoolBeingRegistered(pool) => (Reason::PoolBeingRegistered(pool), 0, String::new()),
            Exclusion::PoolUnavailable(pool) => (Reason::PoolUnavailable(pool), 0, String::new()),
            Exclusion::NoDefaultPool => (Reason::NoDefaultPool, 0, String::new()),
            Exclusion::PoolFull { pool, free } => (Reason::PoolFull(pool), free.0, String::new()),
            Exclusion::PoolAllocated { pool, left } => (Reason::PoolAllocated(pool), left.0, String::new()),
            Exclusion::NoSlot => (Reason::NoSlot, 0, String::new()),
            Exclusion::Cpu { free } => (Reason::Cpu, free.0, String::new()),
            Exclusion::Memory { free } => (Reason::Memory, free.0, String::new()),
            Exclusion::Refused(words) => (Reason::Refused, 0, words),
        };
        self.nodes = self.nodes.saturating_add(1);
        let tally = self.reasons.entry(reason).or_default();
        tally.nodes = tally.nodes.saturating_add(1);
        tally.most_free = tally.most_free.max(free);
        if tally.words.is_empty() {
            tally.words = words;
        }
    }

    /// Whether a node was out only because it is being set up, which ends by itself.
    pub fn awaits_setup(&self) -> bool {
        self.reasons.keys().any(|reason| matches!(reason, Reason::NotReady | Reason::PoolBeingRegistered(_)))
    }

    fn clause(&self, reason: &Reason, tally: &Tally) -> String {
        let n = tally.nodes;
        match reason {
            Reason::NoSession => format!("{n} without a control session"),
            Reason::NotReady => format!("{n} still connecting or taking new settings over"),
            Reason::Draining => format!("{n} draining"),
            Reason::ClockSkewed => format!("{n} whose clock is off"),
            Reason::MemoryTight => format!("{n} short of free host memory"),
            Reason::Selector => {
                let labels: Vec<_> = self.selector.iter().map(|(key, value)| format!("{key}={value}")).collect();
                format!("{n} without the labels {}", labels.join(","))
            }
            Reason::NotAttached(pool) => format!("{n} not attached to storage pool {pool}"),
            Reason::PoolBeingRegistered(pool) => format!("{n} whose storage pool {pool} is being registered"),
            Reason::PoolUnavailable(pool) => format!("{n} that cannot reach storage pool {pool}"),
            Reason::NoDefaultPool => format!("{n} without a default storage pool"),
            Reason::PoolFull(pool) => {
                format!("{n} with too little space in storage pool {pool} (free: {})", shown(tally.most_free))
            }
            Reason::PoolAllocated(pool) => {
                let left = shown(tally.most_free);
                format!("{n} with too little capacity left in storage pool {pool} (not allocated: {left})")
            }
            Reason::NoSlot => format!("{n} without a free slot"),
            Reason::Cpu => {
                format!("{n} with too little CPU (needed: {}, most free: {})", self.cpu, MilliCpu(tally.most_free))
            }
            Reason::Memory => format!(
                "{n} with too little memory (needed: {}, most free: {})",
                shown(self.memory.0),
                shown(tally.most_free)
            ),
            Reason::Refused => format!("{n} that refused it ({})", tally.words),
        }
    }
}

/// Whole MiB, rounded down: exact byte counts do not help a reader.
fn shown(bytes: u64) -> String {
    Bytes(bytes - bytes % (1 << 20)).to_string()
}

impl fmt::Display for Unplaceable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nodes == 0 {
            return f.write_str("no node has a control session: start a node daemon, or look at `kibo node list`");
        }
        let clauses: Vec<_> = self.reasons.iter().map(|(reason, tally)| self.clause(reason, tally)).collect();
        let clauses = clauses.join(", ");
        match &self.pin {
            // With a single node the count reads as a list of one; say it plainly.
            Some(pin) => write!(f, "node {pin} cannot take it: {}", clauses.trim_start_matches("1 ")),
            None => write!(f, "no node can take it: of {} connected, {clauses}", self.nodes),
        }
    }
}
