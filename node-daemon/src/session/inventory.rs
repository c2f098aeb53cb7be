//! Everything that bears on what this node runs and holds, for its adoption by a control plane that was put back.

use std::sync::Arc;

use kibo_crds::{Incarnation, NodeId};
use kibo_protocol::v1;

use super::{control::InstanceControl, node::Node};
use crate::pool::{PoolObject, Pools};

/// Reads every record in every pool, in the background. A problem makes it say that it is not complete.
pub async fn take<I: InstanceControl>(node: &Arc<Node<I>>, quarantine_id: String) -> v1::Inventory {
    let node = Arc::clone(node);
    let taken = tokio::task::spawn_blocking(move || try_take(&node)).await;
    let inventory = taken.unwrap_or_else(|error| Err(error.to_string()));
    match inventory {
        Ok(inventory) => v1::Inventory { quarantine_id, ..inventory },
        Err(problem) => {
            tracing::warn!(problem, "this node cannot say now what it has");
            v1::Inventory { quarantine_id, problem, ..v1::Inventory::default() }
        }
    }
}

fn try_take<I: InstanceControl>(node: &Node<I>) -> Result<v1::Inventory, String> {
    // Before the pools: what is started is seen at least here, and what ends meanwhile is told by an event.
    let running = node.instances.inventory()?;
    let (objects, taken_in) = objects(&node.pools, &node.id)?;
    let mut instances: Vec<_> = running
        .into_iter()
        .map(|instance| {
            let acked = instance.launch.instance_id.parse().map(|id| node.spool.acked_seq(id)).unwrap_or_default();
            v1::InventoryInstance {
                launch: Some(instance.launch),
                state: instance.state.into(),
                available: instance.available,
                acked_seq: acked,
            }
        })
        .collect();
    for (instance, uid) in node.spool.ended().into_iter().filter(|(_, uid)| !uid.is_empty()) {
        // An end in the spool is the last word.
        instances.retain(|known| known.launch.as_ref().is_none_or(|known| known.instance_id != instance.to_string()));
        let workspace = Some(v1::WorkspaceRef { uid, ..v1::WorkspaceRef::default() });
        let launch = v1::Launch { instance_id: instance.to_string(), workspace, ..v1::Launch::default() };
        let state = v1::InstanceState::Ended.into();
        instances.push(v1::InventoryInstance { launch: Some(launch), state, ..v1::InventoryInstance::default() });
    }
    let highest = taken_in.max(node.incarnation()).unwrap_or_default().0;
    Ok(v1::Inventory { highest_incarnation: highest, instances, objects, ..v1::Inventory::default() })
}

/// All objects, and the highest incarnation of this node that any of their records names.
fn objects(pools: &Pools, own: &NodeId) -> Result<(Vec<v1::InventoryObject>, Option<Incarnation>), String> {
    let (mut all, mut highest) = (Vec::new(), None);
    for pool in pools.iter() {
        // A number that is marked as dead there must not be lived again.
        highest = pool.own_mark().map_err(|error| error.to_string())?.max(highest);
        for object in pool.objects().map_err(|error| error.to_string())? {
            let taken_by_us = object.last.iter().filter_map(|last| last.record.taker.as_ref());
            highest = taken_by_us.filter(|taker| taker.node == *own).map(|taker| taker.incarnation).max().max(highest);
            all.push(message(pool.id().to_string(), object));
        }
    }
    Ok((all, highest))
}

fn message(pool: String, object: PoolObject) -> v1::InventoryObject {
    let held = object.last.as_ref().is_some_and(|last| last.holds);
    // A deletion takes an object for nobody; it holds nothing that could be lost.
    let last = object.last.and_then(|last| Some((last.epoch, last.record.taker?)));
    let last = last.filter(|(_, taker)| !taker.is_deletion());
    v1::InventoryObject {
        pool,
        uid: object.uid.to_string(),
        highest_epoch: object.highest.0,
        held: held && last.is_some(),
        last: last.map(|(epoch, taker)| v1::HolderRecord {
            epoch: epoch.0,
            node_id: taker.node.to_string(),
            incarnation: taker.incarnation.0,
            instance_id: taker.instance().map(|instance| instance.to_string()).unwrap_or_default(),
        }),
        size_bytes: object.size.map(|size| size.0),
    }
}
