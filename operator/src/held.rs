//! How many objects each node holds, apart by whether their use right keeps the node from being empty.

use std::collections::{BTreeMap, HashMap};

use kibo_crds::{NodeId, PoolId, node::Holder};

/// What one node holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub in_use: u32,
    /// Released on record, and kept by the node for want of another one in the pool.
    pub idle: BTreeMap<PoolId, u32>,
}

/// The same for all nodes.
#[derive(Debug, Default)]
pub struct HeldByNode(HashMap<NodeId, Held>);

impl HeldByNode {
    pub fn of(&self, node: &NodeId) -> Held {
        self.0.get(node).cloned().unwrap_or_default()
    }

    pub fn add(&mut self, holder: &Holder, pool: Option<&PoolId>) {
        let count = self.count(holder, pool);
        *count = count.saturating_add(1);
    }

    pub fn subtract(&mut self, holder: &Holder, pool: Option<&PoolId>) {
        let count = self.count(holder, pool);
        *count = count.saturating_sub(1);
        if let Some(held) = self.0.get_mut(&holder.node) {
            held.idle.retain(|_, count| *count > 0);
            if *held == Held::default() {
                self.0.remove(&holder.node);
            }
        }
    }

    /// An object whose pool is not known counts as one in use: nothing says that another node could have it.
    fn count(&mut self, holder: &Holder, pool: Option<&PoolId>) -> &mut u32 {
        let held = self.0.entry(holder.node.clone()).or_default();
        match pool.filter(|_| holder.idle) {
            Some(pool) => held.idle.entry(pool.clone()).or_default(),
            None => &mut held.in_use,
        }
    }
}

#[cfg(test)]
mod tests {
    use kibo_crds::{Epoch, Incarnation};

    use super::*;

    #[test]
    fn what_is_added_and_taken_away_leaves_nothing() {
        let node: NodeId = "a".parse().unwrap();
        let pool: PoolId = "p".parse().unwrap();
        let holder = |idle| Holder { node: node.clone(), incarnation: Incarnation(1), epoch: Epoch(1), idle };
        let mut held = HeldByNode::default();
        held.add(&holder(false), Some(&pool));
        held.add(&holder(true), Some(&pool));
        held.add(&holder(true), None);
        assert_eq!(held.of(&node), Held { in_use: 2, idle: [(pool.clone(), 1)].into() });
        held.subtract(&holder(true), Some(&pool));
        held.subtract(&holder(false), Some(&pool));
        held.subtract(&holder(true), None);
        assert!(held.0.is_empty());
    }
}
