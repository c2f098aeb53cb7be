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

use super::{
    evidence::look,
    shared::{Members, Shared},
};
use crate::node::NodeControl;

/// Between two looks at the same node, at most.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Between two rounds, however many sessions end.
const PAUSE: Duration = Duration::from_secs(5);
/// Looks that are further apart do not belong together: where a pool could not be read in between, as when its storage was
/// away, a count stood still for that reason perhaps.
const GAP: Duration = Duration::from_secs(25);
/// Looks under way at once: when a whole room of hosts is gone, its neighbours have other work too.
const AT_ONCE: usize = 16;

/// Since when the counts of absent nodes are known to stand where they do.
#[derive(Debug, Default)]
pub struct Sightings(Mutex<BTreeMap<(NodeId, PoolId), Sighting>>);

/// A fence file that says the same from the first of some looks to the last. Both are when they were answered: it was
/// read before.
#[derive(Clone, Debug)]
struct Sighting {
    file: FenceFile,
    first: Instant,
    last: Instant,
}

impl Sightings {
    /// How long it certainly said what it said to a look that was asked for at `asked`.
    pub(super) fn unmoved_for(&self, node: &NodeId, pool: &PoolId, now: &FenceFile, asked: Instant) -> Duration {
        let seen = self.0.lock().expect("no holder of this lock panics");
        let same = seen.get(&(node.clone(), pool.clone())).filter(|seen| seen.file == *now);
        let joined = same.filter(|seen| asked.saturating_duration_since(seen.last) <= GAP);
        joined.map_or(Duration::ZERO, |seen| asked.saturating_duration_since(seen.first))
    }

    fn see(&self, node: NodeId, pool: PoolId, file: FenceFile, answered: Instant) {
        let mut seen = self.0.lock().expect("no holder of this lock panics");
        let new = Sighting { file, first: answered, last: answered };
        let known = seen.entry((node, pool)).or_insert_with(|| new.clone());
        if known.file == new.file && answered.saturating_duration_since(known.last) <= GAP {
            known.last = answered;
        } else {
            *known = new;
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
    for turn in 0_usize.. {
        round(&control, &nodes.state(), turn).await;
        tokio::time::sleep(PAUSE).await;
        let waited = tokio::time::timeout(LOOK_EVERY.saturating_sub(PAUSE), moves.changed()).await;
        if matches!(waited, Ok(Err(_))) {
            return;
        }
    }
}

async fn round(control: &Arc<NodeControl>, nodes: &[Arc<Node>], turn: usize) {
    let sessions = control.ctx.registry.snapshot();
    let present: BTreeSet<_> = sessions.iter().map(|session| &session.id).collect();
    let is_absent = |id: &NodeId| !present.contains(id) && control.ctx.nodes.facts(id).is_awaited();
    let absent: Vec<_> = nodes
        .iter()
        .filter_map(|node| Some((node.metadata.name.as_deref()?.parse::<NodeId>().ok()?, node)))
        .filter(|(id, _)| is_absent(id))
        .collect();
    control.sightings.keep(&absent.iter().map(|(id, _)| id.clone()).collect());
    let members = Members::of(&sessions);
    let looks = absent.iter().flat_map(|(id, node)| {
        let of_node = |shared: Shared| Some((id.clone(), shared.pool, shared.members.into_iter().next()?));
        members.sharing(id, node, turn).into_iter().filter_map(of_node).collect::<Vec<_>>()
    });
    stream::iter(looks)
        .for_each_concurrent(AT_ONCE, async |(node, pool, member)| {
            // Who cannot say is asked again, or another one is.
            if let Ok(Some(file)) = look(control, &node, &pool, &member).await {
                control.sightings.see(node, pool, file, Instant::now());
            }
        })
        .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_known_to_stand_from_the_first_answer_to_the_last_question() {
        let (sightings, begun) = (Sightings::default(), Instant::now());
        let (node, pool): (NodeId, PoolId) = ("a".parse().unwrap(), "p".parse().unwrap());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let file = |heartbeat| FenceFile { incarnation: 7, heartbeat };
        let see = |seconds, heartbeat| sightings.see(node.clone(), pool.clone(), file(heartbeat), at(seconds));
        let seconds = |heartbeat, asked| sightings.unmoved_for(&node, &pool, &file(heartbeat), at(asked)).as_secs();
        assert_eq!(seconds(1, 60), 0);
        see(0, 1);
        see(10, 3);
        see(20, 3);
        assert_eq!((seconds(1, 30), seconds(3, 30), seconds(4, 30)), (0, 20, 0));
        assert_eq!(seconds(3, 9), 0, "the question came before the answer that is known");
        assert_eq!(seconds(3, 46), 0, "nobody could look since");
        see(50, 3);
        assert_eq!(seconds(3, 60), 10, "nor in between");
        let other: PoolId = "q".parse().unwrap();
        assert_eq!(sightings.unmoved_for(&node, &other, &file(3), at(60)), Duration::ZERO);
        sightings.keep(&BTreeSet::from(["b".parse().unwrap()]));
        assert_eq!(seconds(3, 60), 0, "it came back");
    }
}
