//! The state of one tick: nodes in the order of preference, charged as assignments are made.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    rc::Rc,
};

use kibo_crds::{Bytes, NodeId, PoolId};

use super::{
    Assignment, Demand, Disk, Strategy,
    answer::{Exclusion, Unplaceable},
    node::CandidateNode,
};

/// Sorts the preferred node first; ties go to the one that waited longest for a Workspace, then by name.
type Rank = (u64, u64, NodeId);

pub(super) struct Board {
    strategy: Strategy,
    nodes: BTreeMap<NodeId, CandidateNode>,
    order: BTreeSet<Rank>,
    /// Attached nodes of each pool: space is charged to all of them.
    members: HashMap<PoolId, Rc<[NodeId]>>,
    /// Room only shrinks within a tick, so what fit nowhere does not fit later either.
    unplaceable: HashMap<Demand, Unplaceable>,
    clock: u64,
}

impl Board {
    pub(super) fn new(nodes: Vec<CandidateNode>, strategy: Strategy) -> Self {
        let clock = nodes.iter().map(|node| node.last_assigned).max().unwrap_or(0);
        let mut members: BTreeMap<PoolId, Vec<NodeId>> = BTreeMap::new();
        for node in &nodes {
            for pool in &node.pools {
                members.entry(pool.id.clone()).or_default().push(node.id.clone());
            }
        }
        let nodes: BTreeMap<_, _> = nodes.into_iter().map(|node| (node.id.clone(), node)).collect();
        // Closed nodes admit nothing, so they are never looked at before an answer counts them.
        let order = nodes.values().filter(|node| node.closed.is_none()).map(|node| rank(strategy, node)).collect();
        let members = members.into_iter().map(|(pool, nodes)| (pool, nodes.into())).collect();
        Self { strategy, nodes, order, members, unplaceable: HashMap::new(), clock }
    }

    pub(super) fn assign(&mut self, demand: &Demand) -> Result<Assignment, Unplaceable> {
        if let Some(known) = self.unplaceable.get(demand) {
            return Err(known.clone());
        }
        let chosen = match &demand.pin {
            Some(pin) => self.nodes.get(pin).and_then(|node| Some((pin.clone(), node.admits(demand).ok()?))),
            None => self.order.iter().find_map(|(_, _, id)| Some((id.clone(), self.nodes[id].admits(demand).ok()?))),
        };
        let Some((node, pools)) = chosen else {
            let answer = self.explain(demand);
            self.unplaceable.insert(demand.clone(), answer.clone());
            return Err(answer);
        };
        self.charge(&node, demand, &pools);
        Ok(Assignment { node, pools })
    }

    fn explain(&self, demand: &Demand) -> Unplaceable {
        let mut answer = Unplaceable::new(demand);
        match &demand.pin {
            Some(pin) => {
                let exclusion =
                    self.nodes.get(pin).map_or(Some(Exclusion::NoSession), |node| node.admits(demand).err());
                answer.add(exclusion.unwrap_or(Exclusion::NoSession));
            }
            None => self.nodes.values().filter_map(|node| node.admits(demand).err()).for_each(|e| answer.add(e)),
        }
        answer
    }

    fn charge(&mut self, id: &NodeId, demand: &Demand, pools: &[PoolId]) {
        self.clock += 1;
        if let Some(node) = self.nodes.get_mut(id) {
            self.order.remove(&rank(self.strategy, node));
            node.charge(demand, self.clock);
            self.order.insert(rank(self.strategy, node));
        }
        for (pool, disk) in pools.iter().zip(&demand.disks) {
            self.charge_pool(pool, disk);
        }
    }

    fn charge_pool(&mut self, pool: &PoolId, disk: &Disk) {
        let (size, reserved) = (disk.to_allocate(), disk.to_reserve());
        if size == Bytes(0) && reserved == Bytes(0) {
            return;
        }
        let members = self.members.get(pool).cloned().unwrap_or_else(|| Rc::from([]));
        for member in members.iter() {
            let pools = self.nodes.get_mut(member).map(|node| node.pools.as_mut_slice()).unwrap_or_default();
            for attached in pools.iter_mut().filter(|attached| attached.id == *pool) {
                attached.free = attached.free.map(|free| free.saturating_sub(size));
                attached.unallocated = attached.unallocated.map(|left| left.saturating_sub(reserved));
            }
        }
    }
}

fn rank(strategy: Strategy, node: &CandidateNode) -> Rank {
    let share = match strategy {
        Strategy::Spread => u64::MAX - node.share(),
        Strategy::Pack => node.share(),
    };
    (share, node.last_assigned, node.id.clone())
}
