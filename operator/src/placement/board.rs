//! The state of one tick: nodes in the order of preference, charged as assignments are made.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kibo_crds::{NodeId, PoolId};

use super::{
    Assignment, Demand, Strategy,
    answer::{Exclusion, Unplaceable},
    node::{CandidateNode, Promised},
};

/// Sorts the preferred node first; ties go to the one that waited longest for a Workspace, then by name.
type Rank = (u64, u64, NodeId);

pub(super) struct Board {
    strategy: Strategy,
    nodes: BTreeMap<NodeId, CandidateNode>,
    order: BTreeSet<Rank>,
    promised: Promised,
    /// Room only shrinks within a tick, so what fit nowhere does not fit later either.
    unplaceable: HashMap<Demand, Unplaceable>,
    clock: u64,
}

impl Board {
    pub(super) fn new(nodes: Vec<CandidateNode>, strategy: Strategy) -> Self {
        let clock = nodes.iter().map(|node| node.last_assigned).max().unwrap_or(0);
        let nodes: BTreeMap<_, _> = nodes.into_iter().map(|node| (node.id.clone(), node)).collect();
        // Closed nodes admit nothing, so they are never looked at before an answer counts them.
        let order = nodes.values().filter(|node| node.closed.is_none()).map(|node| rank(strategy, node)).collect();
        Self { strategy, nodes, order, promised: Promised::default(), unplaceable: HashMap::new(), clock }
    }

    pub(super) fn assign(&mut self, demand: &Demand) -> Result<Assignment, Unplaceable> {
        if let Some(known) = self.unplaceable.get(demand) {
            return Err(known.clone());
        }
        let chosen = match &demand.pin {
            Some(pin) => {
                self.nodes.get(pin).and_then(|node| Some((pin.clone(), node.admits(demand, &self.promised).ok()?)))
            }
            None => self
                .order
                .iter()
                .find_map(|(_, _, id)| Some((id.clone(), self.nodes[id].admits(demand, &self.promised).ok()?))),
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
                let exclusion = self
                    .nodes
                    .get(pin)
                    .map_or(Some(Exclusion::NoSession), |node| node.admits(demand, &self.promised).err());
                answer.add(exclusion.unwrap_or(Exclusion::NoSession));
            }
            None => self
                .nodes
                .values()
                .filter_map(|node| node.admits(demand, &self.promised).err())
                .for_each(|e| answer.add(e)),
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
            self.promised.add(pool, disk);
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
