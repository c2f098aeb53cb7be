//! Nodes without a session are looked at ahead of any isolation, so that whoever declares one dead a while later does
//! not wait until it was watched: when a host dies at night, that wait would be longer than the start elsewhere.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{StreamExt as _, stream};
use kibo_crds::{Node, NodeId, PoolId};
use kibo_protocol::v1::FenceFile;
use kube::runtime::reflector::Store;
use tokio::time::Instant;

use super::evidence::look;
use crate::{node::NodeControl, session::NodeSnapshot};

/// Between two looks at the same node.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Between two rounds, however many sessions end.
const PAUSE: Duration = Duration::from_secs(1);
/// Looks under way at once: when a whole room of hosts is gone, its neighbours have other work too.
const AT_ONCE: usize = 16;
/// So many members of one pool are asked before it is given up.
const MEMBERS_ASKED: usize = 3;

/// A pool that the host shares, and who else reaches it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shared {
    pub pool: PoolId,
    pub members: Vec<NodeId>,
}

/// The pools of a node that others with a session reach under the same marker.
pub(super) fn shared(victim: &NodeId, node: &Node, sessions: &[NodeSnapshot]) -> Vec<Shared> {
    let pools = node.status.iter().flat_map(|status| &status.pools).filter(|pool| !pool.uid.is_empty());
    pools
        .filter_map(|pool| {
            let reaches = |session: &&NodeSnapshot| {
                let has_it = |it: &crate::session::DeclaredPool| it.id == pool.id && it.uid == pool.uid && it.available;
                session.id != *victim && session.desired_sent && session.pools.iter().any(has_it)
            };
            let mut members: Vec<_> = sessions.iter().filter(reaches).map(|session| session.id.clone()).collect();
            members.sort();
            members.truncate(MEMBERS_ASKED);
            (!members.is_empty()).then(|| Shared { pool: pool.id.clone(), members })
        })
        .collect()
}

/// Since when the counts of absent nodes are known to stand where they do.
#[derive(Debug, Default)]
pub struct Sightings(Mutex<BTreeMap<(NodeId, PoolId), Sighting>>);

/// A fence file as it was seen first.
#[derive(Clone, Debug)]
struct Sighting {
    file: FenceFile,
    at: Instant,
}

impl Sightings {
    /// Since when it has been known to say what it says in `now`.
    pub(super) fn unmoved_since(&self, node: &NodeId, pool: &PoolId, now: &FenceFile) -> Option<Instant> {
        let seen = self.0.lock().expect("no holder of this lock panics");
        seen.get(&(node.clone(), pool.clone())).filter(|seen| seen.file == *now).map(|seen| seen.at)
    }

    fn see(&self, node: NodeId, pool: PoolId, file: FenceFile, at: Instant) {
        let mut seen = self.0.lock().expect("no holder of this lock panics");
        let first = seen.entry((node, pool)).or_insert_with(|| Sighting { file: file.clone(), at });
        if first.file != file {
            *first = Sighting { file, at };
        }
    }

    /// Who is back, or needs no isolation any more, is forgotten.
    fn keep(&self, absent: &BTreeSet<NodeId>) {
        self.0.lock().expect("no holder of this lock panics").retain(|(node, _), _| absent.contains(node));
    }
}

/// Looks until the leadership ends.
pub async fn run(control: Arc<NodeControl>, nodes: Store<Node>) {
    let mut moves = control.ctx.registry.moves();
    loop {
        round(&control, &nodes.state()).await;
        tokio::time::sleep(PAUSE).await;
        let waited = tokio::time::timeout(LOOK_EVERY, moves.changed()).await;
        if matches!(waited, Ok(Err(_))) {
            return;
        }
    }
}

async fn round(control: &Arc<NodeControl>, nodes: &[Arc<Node>]) {
    let sessions = control.ctx.registry.snapshot();
    let present: BTreeSet<_> = sessions.iter().map(|session| &session.id).collect();
    let is_absent = |id: &NodeId| !present.contains(id) && control.ctx.nodes.facts(id).is_awaited();
    let absent: Vec<_> = nodes
        .iter()
        .filter_map(|node| Some((node.metadata.name.as_deref()?.parse::<NodeId>().ok()?, node)))
        .filter(|(id, _)| is_absent(id))
        .collect();
    control.sightings.keep(&absent.iter().map(|(id, _)| id.clone()).collect());
    let looks = absent.iter().flat_map(|(id, node)| {
        let of_node = |shared: Shared| Some((id.clone(), shared.pool, shared.members.into_iter().next()?));
        shared(id, node, &sessions).into_iter().filter_map(of_node).collect::<Vec<_>>()
    });
    stream::iter(looks)
        .for_each_concurrent(AT_ONCE, async |(node, pool, member)| {
            let at = Instant::now();
            // Who cannot say is asked again; what was seen before stays true.
            if let Ok(Some(file)) = look(control, &node, &pool, &member).await {
                control.sightings.see(node, pool, file, at);
            }
        })
        .await;
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
        let found = shared(&"a".parse().unwrap(), &node, &sessions);
        let named: Vec<_> = found
            .iter()
            .map(|it| (it.pool.as_str(), it.members.iter().map(NodeId::as_str).collect::<Vec<_>>()))
            .collect();
        assert_eq!(named, [("shared", vec!["b", "d"]), ("other", vec!["c"])]);
    }

    #[test]
    fn a_count_is_known_to_stand_since_it_was_first_seen_there() {
        let (sightings, begun) = (Sightings::default(), Instant::now());
        let (node, pool): (NodeId, PoolId) = ("a".parse().unwrap(), "p".parse().unwrap());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let file = |heartbeat| FenceFile { incarnation: 7, heartbeat };
        let since = |heartbeat| sightings.unmoved_since(&node, &pool, &file(heartbeat));
        assert_eq!(since(1), None);
        for (seconds, heartbeat) in [(0, 1), (10, 3), (20, 3)] {
            sightings.see(node.clone(), pool.clone(), file(heartbeat), at(seconds));
        }
        assert_eq!((since(1), since(3), since(4)), (None, Some(at(10)), None));
        let other: PoolId = "q".parse().unwrap();
        assert_eq!(sightings.unmoved_since(&node, &other, &file(3)), None);
        sightings.keep(&BTreeSet::from(["b".parse().unwrap()]));
        assert_eq!(since(3), None, "it came back");
    }
}
