//! A node as placement sees it, and whether it can take one request.

use std::collections::{BTreeMap, HashMap};

use kibo_crds::{Bytes, MilliCpu, NodeId, PoolId};

use super::{Demand, Disk, answer::Exclusion};

/// A node with a live session. What could not be measured is absent and no constraint.
#[derive(Clone, Debug)]
pub struct CandidateNode {
    pub id: NodeId,
    pub labels: BTreeMap<String, String>,
    /// A reason that keeps everything away, whatever it asks for.
    pub closed: Option<Exclusion>,
    /// Reported amounts times ratio.
    pub schedulable_cpu: Option<MilliCpu>,
    pub schedulable_memory: Option<Bytes>,
    pub slots: Option<u32>,
    /// Executions, and offers and commits in flight.
    pub used: Used,
    pub pools: Vec<CandidatePool>,
    /// When the node got its last Workspace, on any scale that grows; 0: never.
    pub last_assigned: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    pub cpu: MilliCpu,
    pub memory: Bytes,
    pub instances: u32,
}

#[derive(Clone, Debug)]
pub struct CandidatePool {
    pub id: PoolId,
    pub default: bool,
    pub access: PoolAccess,
    /// Free space minus what was promised to images that are not made yet.
    pub free: Option<Bytes>,
    /// What may be allocated there and is not; sizes count, not what disks occupy.
    pub unallocated: Option<Bytes>,
}

/// Whether a node can use a pool that it declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolAccess {
    /// The node reaches it, and it is the pool that the cluster knows by this id.
    Reached,
    /// Nobody declared it before, and the operator is about to write down its marker.
    BeingRegistered,
    /// The node does not reach it, or means another one by its id.
    OutOfReach,
}

/// Resolution of a share: large enough that one millicore of the largest host shows.
const SHARE_BITS: u32 = 32;

fn free_share(schedulable: Option<u64>, used: u64) -> u64 {
    match schedulable {
        None => 1 << SHARE_BITS,
        Some(0) => 0,
        Some(schedulable) => {
            let share = (u128::from(schedulable.saturating_sub(used)) << SHARE_BITS) / u128::from(schedulable);
            u64::try_from(share).unwrap_or(1 << SHARE_BITS)
        }
    }
}

impl CandidateNode {
    /// Free share of the scarcer resource, in units of 2^-32.
    pub(super) fn share(&self) -> u64 {
        let cpu = free_share(self.schedulable_cpu.map(|cpu| cpu.0), self.used.cpu.0);
        cpu.min(free_share(self.schedulable_memory.map(|memory| memory.0), self.used.memory.0))
    }

    /// The pool for each disk, or the first thing that keeps this node out.
    pub(super) fn admits(&self, demand: &Demand, promised: &Promised) -> Result<Vec<PoolId>, Exclusion> {
        if let Some(words) = demand.refusals.get(&self.id) {
            return Err(Exclusion::Refused(words.clone()));
        }
        let is_selected = demand.node_selector.iter().all(|(key, value)| self.labels.get(key) == Some(value));
        match &self.closed {
            // Without a session nobody knows all of its labels.
            Some(Exclusion::NoSession) => return Err(Exclusion::NoSession),
            // Before what may end by itself: nobody is to wait for a node that would not be taken then.
            _ if !is_selected => return Err(Exclusion::Selector),
            Some(closed) => return Err(closed.clone()),
            None => {}
        }
        let pools = self.pools_for(&demand.disks, promised)?;
        self.has_room(demand)?;
        Ok(pools)
    }

    fn has_room(&self, demand: &Demand) -> Result<(), Exclusion> {
        if self.slots.is_some_and(|slots| self.used.instances >= slots) {
            return Err(Exclusion::NoSlot);
        }
        let cpu = self.used.cpu.checked_add(demand.cpu);
        if let Some(schedulable) = self.schedulable_cpu
            && cpu.is_none_or(|needed| needed > schedulable)
        {
            return Err(Exclusion::Cpu { free: schedulable.saturating_sub(self.used.cpu) });
        }
        let memory = self.used.memory.checked_add(demand.memory);
        if let Some(schedulable) = self.schedulable_memory
            && memory.is_none_or(|needed| needed > schedulable)
        {
            return Err(Exclusion::Memory { free: schedulable.saturating_sub(self.used.memory) });
        }
        if cpu.is_none() || memory.is_none() || self.used.instances.checked_add(1).is_none() {
            return Err(Exclusion::NoSlot);
        }
        Ok(())
    }

    fn pools_for(&self, disks: &[Disk], promised: &Promised) -> Result<Vec<PoolId>, Exclusion> {
        let (mut claimed, mut allocated) = (BTreeMap::<&PoolId, Bytes>::new(), BTreeMap::<&PoolId, Bytes>::new());
        let mut pools = Vec::with_capacity(disks.len());
        for disk in disks {
            let (pool, size) = match disk {
                Disk::In { pool, to_allocate } => (self.pool(pool)?, *to_allocate),
                Disk::New { pool: Some(pool), size } => (self.pool(pool)?, *size),
                Disk::New { pool: None, size } => {
                    (self.pools.iter().find(|pool| pool.default).ok_or(Exclusion::NoDefaultPool)?, *size)
                }
            };
            match pool.access {
                PoolAccess::Reached => {}
                PoolAccess::BeingRegistered => return Err(Exclusion::PoolBeingRegistered(pool.id.clone())),
                PoolAccess::OutOfReach => return Err(Exclusion::PoolUnavailable(pool.id.clone())),
            }
            let promised = promised.of(&pool.id);
            let (free, unallocated) = (
                pool.free.map(|free| free.saturating_sub(promised.occupied)),
                pool.unallocated.map(|left| left.saturating_sub(promised.allocated)),
            );
            let full = |free| Exclusion::PoolFull { pool: pool.id.clone(), free };
            let claim = claimed.entry(&pool.id).or_default();
            *claim = claim.checked_add(size).ok_or_else(|| full(free.unwrap_or_default()))?;
            // An image that exists in full needs nothing, also in a pool that is over-promised.
            if let Some(free) = free
                && size > Bytes(0)
                && *claim > free
            {
                return Err(full(free));
            }
            let new = allocated.entry(&pool.id).or_default();
            *new = new.checked_add(disk.to_reserve()).ok_or_else(|| full(free.unwrap_or_default()))?;
            if let Some(unallocated) = unallocated
                && disk.to_reserve() > Bytes(0)
                && *new > unallocated
            {
                return Err(Exclusion::PoolAllocated { pool: pool.id.clone(), left: unallocated });
            }
            pools.push(pool.id.clone());
        }
        Ok(pools)
    }

    fn pool(&self, id: &PoolId) -> Result<&CandidatePool, Exclusion> {
        self.pools.iter().find(|pool| pool.id == *id).ok_or_else(|| Exclusion::NotAttached(id.clone()))
    }

    /// Charges an admitted request; space in its pools is [`Promised`] to all of their members.
    pub(super) fn charge(&mut self, demand: &Demand, last_assigned: u64) {
        self.used.cpu.0 = self.used.cpu.0.saturating_add(demand.cpu.0);
        self.used.memory.0 = self.used.memory.0.saturating_add(demand.memory.0);
        self.used.instances = self.used.instances.saturating_add(1);
        self.last_assigned = last_assigned;
    }
}

/// What was promised in each pool within a tick: all of its members see one file system.
#[derive(Debug, Default)]
pub(super) struct Promised(HashMap<PoolId, Promise>);

#[derive(Clone, Copy, Debug, Default)]
struct Promise {
    occupied: Bytes,
    allocated: Bytes,
}

impl Promised {
    fn of(&self, pool: &PoolId) -> Promise {
        self.0.get(pool).copied().unwrap_or_default()
    }

    pub(super) fn add(&mut self, pool: &PoolId, disk: &Disk) {
        let (occupies, allocates) = (disk.to_allocate(), disk.to_reserve());
        if occupies == Bytes(0) && allocates == Bytes(0) {
            return;
        }
        let promise = self.0.entry(pool.clone()).or_default();
        promise.occupied.0 = promise.occupied.0.saturating_add(occupies.0);
        promise.allocated.0 = promise.allocated.0.saturating_add(allocates.0);
    }
}

impl Disk {
    /// What the disk will still take from its pool.
    pub fn to_allocate(&self) -> Bytes {
        match self {
            Self::In { to_allocate, .. } => *to_allocate,
            Self::New { size, .. } => *size,
        }
    }

    /// What the disk adds to the sizes that are allocated in its pool.
    pub fn to_reserve(&self) -> Bytes {
        match self {
            Self::In { .. } => Bytes(0),
            Self::New { size, .. } => *size,
        }
    }
}
