//! Where a Workspace can start whose node was isolated, and why not elsewhere.

use std::collections::BTreeSet;

use kibo_crds::{NodeId, PoolId};

use crate::workspace::{draft::Draft, draft::Wait, sight::Sight};

const CAN_START: &str = "CanStart";
const OUT_OF_REACH: &str = "PoolOutOfReach";
/// Names in one sentence; the rest is a number.
const NAMED: usize = 3;

/// For the condition Placed. `None`: what is stored stands, since the nodes of a new leader are on their way.
pub(super) fn place(sight: &Sight<'_>, draft: &Draft<'_>) -> Option<Wait> {
    let volume = sight.volume.and_then(|volume| volume.status.as_ref()?.pool.clone());
    let layer = draft.status.writable_layer.as_ref().map(|layer| layer.pool.clone());
    let pools: BTreeSet<PoolId> = layer.into_iter().chain(volume).collect();
    let reach = |pool: &PoolId| -> BTreeSet<NodeId> {
        sight.cluster.reachable_members(pool).into_iter().map(|(node, _)| node).collect()
    };
    let Some((first, others)) = pools.iter().next().zip(Some(pools.iter().skip(1))) else {
        return Some(Wait::placement(CAN_START, "nothing of it is stored on any node: it can start on every node"));
    };
    let everywhere = others.fold(reach(first), |nodes, pool| &nodes & &reach(pool));
    let stored = named("storage pool", "storage pools", &pools);
    if everywhere.is_empty() && sight.cluster.is_settling() {
        return None;
    }
    if everywhere.is_empty() {
        let members: BTreeSet<NodeId> = pools.iter().flat_map(|pool| sight.cluster.members(pool)).collect();
        let who = if members.is_empty() {
            "it has no members".to_owned()
        } else {
            named("its member is", "its members are", &members)
        };
        let message = format!(
            "its disks are in {stored}, which no node with a control session reaches ({who}): it can start when one of \
             them returns, or when another host that is attached to it joins"
        );
        return Some(Wait::placement(OUT_OF_REACH, message));
    }
    let who = named("node", "nodes", &everywhere);
    let message = format!("can start on {who}, where its disks are in reach ({stored}); no other node reaches them");
    Some(Wait::placement(CAN_START, message))
}

fn named<T: ToString>(one: &str, many: &str, names: &BTreeSet<T>) -> String {
    let kind = if names.len() == 1 { one } else { many };
    let first: Vec<_> = names.iter().take(NAMED).map(ToString::to_string).collect();
    match names.len().saturating_sub(NAMED) {
        0 => format!("{kind} {}", first.join(", ")),
        more => format!("{kind} {} and {more} more", first.join(", ")),
    }
}
