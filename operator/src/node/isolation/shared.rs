//! Who else reaches the pools of a node.

use std::collections::BTreeMap;

use kibo_crds::{Node, NodeId, PoolId};

use crate::session::NodeSnapshot;

/// So many members of one pool are asked before it is given up.
const MEMBERS_ASKED: usize = 3;

/// A pool that the host shares, and who is asked about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    pub pool: PoolId,
    pub members: Vec<NodeId>,
}

/// The nodes with a session that reach a pool, by its id and its marker.
pub struct Members<'a>(BTreeMap<(&'a PoolId, &'a str), Vec<&'a NodeId>>);

impl<'a> Members<'a> {
    pub fn of(sessions: &'a [NodeSnapshot]) -> Self {
        let mut members: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for session in sessions.iter().filter(|session| session.desired_sent) {
            for pool in session.pools.iter().filter(|pool| pool.available) {
                members.entry((&pool.id, pool.uid.as_str())).or_default().push(&session.id);
            }
        }
        for nodes in members.values_mut() {
            nodes.sort();
        }
        Self(members)
    }

    /// The pools of a node that others reach under the same marker. `turn`: whom to ask first, so that one who does not
    /// answer is not asked first for ever.
    pub fn sharing(&self, victim: &NodeId, node: &Node, turn: usize) -> Vec<Shared> {
        let pools = node.status.iter().flat_map(|status| &status.pools).filter(|pool| !pool.uid.is_empty());
        pools
            .filter_map(|pool| {
                let all = self.0.get(&(&pool.id, pool.uid.as_str()))?;
                let from = turn.checked_rem(all.len())?;
                let others = all.iter().cycle().skip(from).take(all.len()).filter(|member| **member != victim);
                let members: Vec<_> = others.take(MEMBERS_ASKED).map(|member| (*member).clone()).collect();
                (!members.is_empty()).then(|| Shared { pool: pool.id.clone(), members })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use kibo_crds::{
        Incarnation,
        node::{NodePool, NodeSpec, NodeStatus},
    };

    use super::*;
    use crate::session::{Capacity, DeclaredPool, Settings};

    fn session(id: &str, pools: &[(&str, &str, bool)]) -> NodeSnapshot {
        let pool = |(id, uid, available): &(&str, &str, bool)| DeclaredPool {
            id: id.parse().unwrap(),
            uid: (*uid).to_owned(),
            default: false,
            available: *available,
            capacity: None,
            free: None,
            used: None,
            waiting_guests: 0,
        };
        NodeSnapshot {
            id: id.parse().unwrap(),
            incarnation: Incarnation(1),
            session_id: "s".into(),
            labels: std::collections::BTreeMap::new(),
            capacity: Capacity::default(),
            settings: Settings::default(),
            settings_confirmed: true,
            desired_sent: true,
            pools: pools.iter().map(pool).collect(),
            last_assigned: None,
            clock_over: Some(false),
            memory_tight: false,
        }
    }

    #[test]
    fn those_who_reach_the_same_pool_are_asked() {
        let mut node = Node::new("a", NodeSpec::default());
        let pool = |id: &str, uid: &str| NodePool {
            id: id.parse().unwrap(),
            uid: uid.into(),
            default: false,
            available: true,
            capacity: None,
            free: None,
            used: None,
            waiting_guests: 0,
        };
        let pools = vec![pool("own", "u-own"), pool("shared", "u-1"), pool("other", "u-2")];
        node.status = Some(NodeStatus { pools, ..NodeStatus::default() });
        let sessions = [
            session("a", &[("shared", "u-1", true)]),
            session("d", &[("shared", "u-1", true)]),
            session("b", &[("shared", "u-1", true), ("own", "another", true)]),
            session("c", &[("shared", "u-1", false), ("other", "u-2", true)]),
        ];
        let members = Members::of(&sessions);
        let named = |turn| {
            let found = members.sharing(&"a".parse().unwrap(), &node, turn);
            let words =
                |it: &Shared| format!("{}: {}", it.pool, it.members.iter().map(NodeId::as_str).collect::<String>());
            found.iter().map(words).collect::<Vec<_>>()
        };
        assert_eq!(named(0), ["shared: bd", "other: c"]);
        assert_eq!(named(2), ["shared: db", "other: c"]);
        assert_eq!(named(3), named(0));
    }
}
