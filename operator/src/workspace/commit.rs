//! The one write that makes an execution: execution, own holder, consumed request and phase together.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{
    ConditionType, Incarnation, InstanceId, NodeId, PoolId, SequenceNumber, Volume, Workspace,
    volume::{GrantedFor, VolumeStatus},
    workspace::{Execution, LayerStatus, WorkspacePhase, WorkspaceStatus},
};
use kube::ResourceExt as _;

use super::{decide::Start, draft::Draft, launch::Amounts, sight::Cluster};
use crate::right::{HasRight as _, NotGranted};

/// Where a start goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub instance: InstanceId,
    /// The pool of the layer, then that of the Volume.
    pub pools: Vec<PoolId>,
}

/// The status of the Workspace once it runs there.
pub fn workspace_status(
    workspace: &Workspace,
    start: &Start,
    place: &Place,
    amounts: Amounts,
    cluster: &dyn Cluster,
    now: Time,
) -> Result<WorkspaceStatus, NotGranted> {
    let mut draft = Draft::new(workspace, now.clone());
    let right = draft.status.right().granted(&place.node, place.incarnation, |node, inc| cluster.void(node, inc))?;
    draft.status.set_right(right);
    draft.status.execution = Some(Execution {
        instance_id: place.instance,
        node: place.node.clone(),
        incarnation: place.incarnation,
        cpu_milli: start.demand.cpu,
        memory_bytes: start.demand.memory,
        last_seq: SequenceNumber(0),
        started_at: now,
        address: None,
    });
    if let Some(pool) = place.pools.first() {
        let layer = LayerStatus { pool: pool.clone(), size: amounts.layer, grow_to: None, created: false };
        draft.status.writable_layer.get_or_insert(layer);
    }
    draft.consume(&start.request);
    // Whoever starts it has read it.
    draft.forget(ConditionType::TwoWriters);
    draft.enter(WorkspacePhase::Starting);
    // It has just accepted.
    draft.node_is_reachable(true);
    let stored = workspace.status.clone().unwrap_or_default();
    Ok(draft.finish().status.map_or(stored, |status| *status))
}

/// The status of the Volume once it is granted for that execution.
pub fn volume_status(
    volume: &Volume,
    workspace: &Workspace,
    place: &Place,
    cluster: &dyn Cluster,
) -> Result<VolumeStatus, NotGranted> {
    let mut status = volume.status.clone().unwrap_or_default();
    let right = status.right().granted(&place.node, place.incarnation, |node, inc| cluster.void(node, inc))?;
    status.set_right(right);
    if status.pool.is_none() {
        status.pool = place.pools.get(1).cloned();
    }
    let workspace_uid = workspace.uid().unwrap_or_default();
    status.granted_for = Some(GrantedFor { workspace_uid, instance_id: place.instance });
    Ok(status)
}
