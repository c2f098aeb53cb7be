//! Which Nodes declare which pools, so that a look at one pool does not go through the whole fleet.

use std::collections::{BTreeSet, HashMap};

use kibo_crds::{Node, PoolId};

/// What each Node declared when it was last seen, both ways round.
#[derive(Debug, Default)]
pub struct Declared {
    by_node: HashMap<String, Seen>,
    by_pool: HashMap<PoolId, BTreeSet<String>>,
}

#[derive(Debug, Default)]
struct Seen {
    version: u128,
    pools: BTreeSet<PoolId>,
}

impl Declared {
    /// Takes a version of the Node in. The pools that it concerns: those that it declares, and those that it declared
    /// before; none when it is not new.
    pub fn see(&mut self, node: &Node) -> BTreeSet<PoolId> {
        let name = node.metadata.name.clone().unwrap_or_default();
        let seen = self.by_node.entry(name.clone()).or_default();
        let version = version(node);
        if version <= seen.version {
            return BTreeSet::new();
        }
        seen.version = version;
        let pools = node.status.iter().flat_map(|status| &status.pools).map(|pool| pool.id.clone());
        let before = std::mem::replace(&mut seen.pools, pools.collect());
        for gone in before.difference(&seen.pools) {
            if let Some(nodes) = self.by_pool.get_mut(gone) {
                nodes.remove(&name);
            }
        }
        for pool in &seen.pools {
            self.by_pool.entry(pool.clone()).or_default().insert(name.clone());
        }
        before.union(&seen.pools).cloned().collect()
    }

    /// In the order of their names.
    pub fn nodes_of(&self, pool: &PoolId) -> Vec<String> {
        self.by_pool.get(pool).into_iter().flatten().cloned().collect()
    }
}

/// Versions of one object are comparable numbers.
fn version(node: &Node) -> u128 {
    node.metadata.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, version: u32, pools: &[&str]) -> Node {
        let pool = |id: &&str| serde_json::json!({ "id": id, "uid": "u", "default": false, "available": true });
        let pools: Vec<_> = pools.iter().map(pool).collect();
        serde_json::from_value(serde_json::json!({
            "metadata": { "name": name, "resourceVersion": version.to_string() }, "spec": {}, "status": { "pools": pools },
        }))
        .unwrap()
    }

    fn ids(pools: &[&str]) -> BTreeSet<PoolId> {
        pools.iter().map(|id| id.parse().unwrap()).collect()
    }

    #[test]
    fn a_node_concerns_the_pools_that_it_declares_and_those_that_it_gave_up() {
        let mut declared = Declared::default();
        assert_eq!(declared.see(&node("b", 5, &["one", "two"])), ids(&["one", "two"]));
        assert_eq!(declared.see(&node("a", 6, &["two"])), ids(&["two"]));
        assert_eq!(declared.nodes_of(&"two".parse().unwrap()), ["a", "b"]);
        assert_eq!(declared.see(&node("b", 10, &["one"])), ids(&["one", "two"]));
        assert_eq!(declared.nodes_of(&"two".parse().unwrap()), ["a"]);
    }

    #[test]
    fn what_is_not_new_concerns_nobody() {
        let mut declared = Declared::default();
        declared.see(&node("a", 10, &["one"]));
        assert_eq!(declared.see(&node("a", 10, &["one"])), ids(&[]), "looked at once more");
        assert_eq!(declared.see(&node("a", 9, &["two"])), ids(&[]), "an older one, seen late");
        assert_eq!(declared.nodes_of(&"one".parse().unwrap()), ["a"]);
    }
}
