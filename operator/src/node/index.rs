//! The facts about Nodes that void executions and holders.
//!
//! Each of them only ever grows, so observations may come in any order and from any source: the watch,
//! a quorum read, an own commit.

use std::{
    collections::HashMap,
    sync::{Arc, RwLock},
};

use kibo_crds::{Incarnation, Node, NodeId, node::Admission};
use kibo_protocol::SecretHash;
use tokio::sync::broadcast;

use super::isolation;

/// What is known of one Node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The newest incarnation; absent before the first session.
    pub incarnation: Option<Incarnation>,
    /// The highest incarnation whose isolation was decided; see [`super::isolation`].
    pub isolated: Option<Incarnation>,
    pub retired: bool,
}

/// Why an execution or holder of some incarnation no longer counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Void {
    /// The incarnation was isolated: a grant that follows must say so.
    Isolated,
    /// The node came back in a newer incarnation, so it proved that nothing of this one runs.
    IncarnationEnded,
    /// The node is retired, which it can be only with nothing left or isolated.
    Retired,
}

impl Facts {
    pub fn of(node: &Node) -> Self {
        let status = node.status.as_ref();
        Self {
            incarnation: status.and_then(|s| s.incarnation),
            isolated: isolation::carried_out(node),
            retired: node.spec.retirement.is_some() || status.and_then(|s| s.admission) == Some(Admission::Retired),
        }
    }

    /// Whether the node has lived and may say something again in its current life.
    pub fn is_awaited(&self) -> bool {
        !self.retired && self.incarnation.is_some_and(|current| self.isolated.is_none_or(|isolated| isolated < current))
    }

    fn merge(&mut self, other: Self) {
        self.incarnation = self.incarnation.max(other.incarnation);
        self.isolated = self.isolated.max(other.isolated);
        self.retired |= other.retired;
    }

    /// Whether what `incarnation` of this node held is void, and why. Isolation comes first, since the next
    /// holder has to fence the old one.
    pub fn void(&self, incarnation: Incarnation) -> Option<Void> {
        if self.isolated.is_some_and(|isolated| isolated >= incarnation) {
            Some(Void::Isolated)
        } else if self.incarnation.is_some_and(|current| current > incarnation) {
            Some(Void::IncarnationEnded)
        } else if self.retired {
            Some(Void::Retired)
        } else {
            None
        }
    }
}

/// Facts for each Node of the cluster, and the bell that tells that something about a Node moved.
#[derive(Clone)]
pub struct NodeIndex {
    facts: Arc<RwLock<HashMap<NodeId, Facts>>>,
    /// The key that each Node was last seen with. Nothing is let in by it: it only tells who is likely to be a stranger.
    keys: Arc<RwLock<HashMap<NodeId, SecretHash>>>,
    touched: broadcast::Sender<NodeId>,
    changed: broadcast::Sender<NodeId>,
}

impl Default for NodeIndex {
    fn default() -> Self {
        Self {
            facts: Arc::default(),
            keys: Arc::default(),
            touched: broadcast::channel(4096).0,
            changed: broadcast::channel(4096).0,
        }
    }
}

impl NodeIndex {
    /// Facts of a Node; the default when it is unknown, so nothing of it is void.
    pub fn facts(&self, node: &NodeId) -> Facts {
        self.facts.read().expect("no holder of this lock panics").get(node).copied().unwrap_or_default()
    }

    /// Shorthand for [`Facts::void`].
    pub fn void(&self, node: &NodeId, incarnation: Incarnation) -> Option<Void> {
        self.facts(node).void(incarnation)
    }

    /// Nodes that have lived and may come back.
    pub fn expected(&self) -> Vec<NodeId> {
        let facts = self.facts.read().expect("no holder of this lock panics");
        facts
            .iter()
            .filter(|(_, facts)| facts.incarnation.is_some() && !facts.retired)
            .map(|(id, _)| id.clone())
            .collect()
    }

    /// How many of these there are.
    pub fn fleet(&self) -> usize {
        let facts = self.facts.read().expect("no holder of this lock panics");
        facts.values().filter(|facts| facts.incarnation.is_some() && !facts.retired).count()
    }

    /// Takes in what some read or write of the Node showed.
    pub fn observe(&self, node: &Node) {
        let Some(id) = node.metadata.name.as_deref().and_then(|name| name.parse::<NodeId>().ok()) else { return };
        let key = node.status.as_ref().and_then(|status| status.key_hash.as_deref()?.parse().ok());
        if let Some(key) = key.filter(|key| !self.knows_key(&id, key)) {
            self.keys.write().expect("no holder of this lock panics").insert(id.clone(), key);
        }
        let changed = {
            let mut all = self.facts.write().expect("no holder of this lock panics");
            let facts = all.entry(id.clone()).or_default();
            let before = *facts;
            facts.merge(Facts::of(node));
            before != *facts
        };
        if changed {
            // Nobody listening is fine.
            let _ = self.changed.send(id);
        }
    }

    /// Whether this is the key that the Node was last seen with.
    pub fn knows_key(&self, node: &NodeId, key: &SecretHash) -> bool {
        self.keys.read().expect("no holder of this lock panics").get(node) == Some(key)
    }

    /// Nodes whose facts moved. A receiver that lagged must look at all of its objects.
    pub fn changed(&self) -> broadcast::Receiver<NodeId> {
        self.changed.subscribe()
    }

    /// Says that the usage of a Node (executions, holders, offers) changed: its status is computed anew.
    pub fn touch(&self, node: &NodeId) {
        let _ = self.touched.send(node.clone());
    }

    pub(crate) fn touched(&self) -> broadcast::Receiver<NodeId> {
        self.touched.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_voids_a_holder() {
        let facts = |incarnation, isolated, retired| Facts {
            incarnation: Some(Incarnation(incarnation)),
            isolated: Option::map(isolated, Incarnation),
            retired,
        };
        for (facts, incarnation, expected) in [
            (facts(3, None, false), 3, None),
            (facts(3, None, false), 2, Some(Void::IncarnationEnded)),
            (facts(3, Some(3), false), 3, Some(Void::Isolated)),
            (facts(4, Some(3), false), 3, Some(Void::Isolated)),
            (facts(4, Some(3), false), 4, None),
            (facts(3, None, true), 3, Some(Void::Retired)),
            (Facts::default(), 1, None),
        ] {
            assert_eq!(facts.void(Incarnation(incarnation)), expected, "{facts:?} {incarnation}");
        }
    }

    #[test]
    fn an_older_observation_takes_nothing_back() {
        let index = NodeIndex::default();
        let at = |incarnation| {
            let mut node = Node::new("node-1", kibo_crds::node::NodeSpec::default());
            node.status =
                Some(kibo_crds::node::NodeStatus { incarnation: Some(Incarnation(incarnation)), ..Default::default() });
            node
        };
        index.observe(&at(2));
        index.observe(&at(1));
        assert_eq!(index.facts(&"node-1".parse().unwrap()).incarnation, Some(Incarnation(2)));
    }
}
