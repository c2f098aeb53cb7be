//! The decision itself: no clock, no I/O.

use std::{collections::BTreeMap, fmt};

use kibo_crds::{Bytes, MilliCpu, PoolId};
use kibo_protocol::v1::RefuseReason;

use super::Settings;
use crate::config::Resources;

/// What an Instance needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    pub cpu: MilliCpu,
    /// Guest memory and the VMM's own.
    pub memory: Bytes,
    /// Every pool that holds one of its objects, with the bytes that may have to be made there.
    pub objects: BTreeMap<PoolId, Bytes>,
}

/// What Instances and reservations use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocated {
    pub cpu: MilliCpu,
    pub memory: Bytes,
    pub instances: u32,
}

/// One pool with what is not promised yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSpace {
    /// Why it cannot be used.
    pub problem: Option<String>,
    /// Absent: not measured, and then no constraint.
    pub free: Option<Bytes>,
}

/// Everything that a decision looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub settings: Option<Settings>,
    pub resources: Resources,
    pub allocated: Allocated,
    pub pools: BTreeMap<PoolId, PoolSpace>,
    pub has_root_image: bool,
    /// The host has too little memory left, whatever was allocated.
    pub is_memory_tight: bool,
}

impl View {
    /// The most CPU and memory that may be allocated: capacity times ratio.
    pub fn limits(&self, settings: &Settings) -> (MilliCpu, Bytes) {
        (settings.cpu_ratio.of_cpu(self.resources.cpu), settings.memory_ratio.of_memory(self.resources.memory))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A new placement.
    Offer,
    /// The control plane has written it already: a drain that came since does not undo it.
    Committed,
}

/// Why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: RefuseReason,
    /// For people.
    pub message: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

fn refuse(reason: RefuseReason, message: String) -> Result<(), Refusal> {
    Err(Refusal { reason, message })
}

/// Whether the demand fits.
pub fn decide(demand: &Demand, view: &View, purpose: Purpose) -> Result<(), Refusal> {
    let Some(settings) = view.settings else {
        return refuse(RefuseReason::Stale, "the node has no settings yet".into());
    };
    if settings.drain && purpose == Purpose::Offer {
        return refuse(RefuseReason::Draining, "the node is draining".into());
    }
    if !view.has_root_image {
        return refuse(RefuseReason::RootImageMissing, "the node does not have the root image".into());
    }
    if view.is_memory_tight {
        return refuse(RefuseReason::MemoryTight, "the host is short of free memory".into());
    }
    slots(view, &settings)?;
    amounts(demand, view, &settings)?;
    demand.objects.iter().try_for_each(|(pool, to_make)| space(pool, *to_make, view))
}

fn slots(view: &View, settings: &Settings) -> Result<(), Refusal> {
    let slots = settings.slots.into_iter().chain(view.resources.max_instances).min();
    match slots {
        Some(slots) if view.allocated.instances >= slots => {
            refuse(RefuseReason::NoSlot, format!("all {slots} slots are taken"))
        }
        _ => Ok(()),
    }
}

fn amounts(demand: &Demand, view: &View, settings: &Settings) -> Result<(), Refusal> {
    let allocated = view.allocated;
    let (cpu, memory) = view.limits(settings);
    if allocated.cpu.checked_add(demand.cpu).is_none_or(|sum| sum > cpu) {
        let message = format!("cpu {} does not fit: {} of {cpu} are allocated", demand.cpu, allocated.cpu);
        return refuse(RefuseReason::Cpu, message);
    }
    if allocated.memory.checked_add(demand.memory).is_none_or(|sum| sum > memory) {
        let message = format!("memory {} does not fit: {} of {memory} are allocated", demand.memory, allocated.memory);
        return refuse(RefuseReason::Memory, message);
    }
    Ok(())
}

fn space(pool: &PoolId, to_make: Bytes, view: &View) -> Result<(), Refusal> {
    let Some(space) = view.pools.get(pool) else {
        return refuse(RefuseReason::PoolUnavailable, format!("the node has no storage pool {pool}"));
    };
    if let Some(problem) = &space.problem {
        return refuse(RefuseReason::PoolUnavailable, format!("the storage pool {pool} is not available: {problem}"));
    }
    match space.free {
        Some(free) if to_make > free => refuse(
            RefuseReason::PoolFull,
            format!("the storage pool {pool} has {free} left, but {to_make} are needed for what must be made"),
        ),
        _ => Ok(()),
    }
}
