//! What becomes of a Workspace whose disk was in a storage pool that was declared lost.

use kibo_crds::{
    PoolId, Volume,
    workspace::{PowerRequest, WorkspacePhase},
};
use kube::ResourceExt as _;

use crate::{
    right::HasRight as _,
    workspace::{
        draft::{Draft, Notice, Wait},
        sight::Sight,
    },
};

/// Reason of a Workspace whose writable layer was in a pool that was declared lost.
pub const POOL_LOST: &str = "StoragePoolLost";

/// The pool of the writable layer, when it is lost.
pub(super) fn layer_pool(sight: &Sight<'_>, draft: &Draft<'_>) -> Option<PoolId> {
    let pool = &draft.status.writable_layer.as_ref()?.pool;
    sight.cluster.is_lost(pool).then(|| pool.clone())
}

/// Nobody holds what is lost, once nothing runs on it any more.
pub(super) fn let_go(sight: &Sight<'_>, draft: &mut Draft<'_>) {
    if draft.status.execution.is_none()
        && layer_pool(sight, draft).is_some()
        && let Some(right) = draft.status.right().lost()
    {
        draft.status.set_right(right);
    }
}

/// The layer is gone for good: the Workspace has failed, and so does every request to start it.
pub(super) fn fail(draft: &mut Draft<'_>, pool: &PoolId, start: Option<&PowerRequest>) {
    let message = format!(
        "its writable layer was in storage pool {pool}, which was declared lost: delete the Workspace (unbind its \
         Volume before, if it is to be kept), and create another"
    );
    if let Some(request) = start {
        draft.consume(request);
        draft.finish_commands(Some((POOL_LOST, &message)));
    }
    let is_told = draft.phase() == WorkspacePhase::Failed && draft.status.reason.as_deref() == Some(POOL_LOST);
    if !is_told {
        draft.notices.push(Notice::warning(POOL_LOST, &message));
    }
    draft.enter_because(WorkspacePhase::Failed, POOL_LOST, &message);
}

/// The Volume is gone for good, the layer is not: with another Volume the Workspace could start.
pub(super) fn volume(sight: &Sight<'_>, volume: &Volume) -> Option<Wait> {
    let pool = volume.status.as_ref()?.pool.as_ref().filter(|pool| sight.cluster.is_lost(pool))?;
    let message = format!(
        "Volume {} was in storage pool {pool}, which was declared lost: delete it, or bind another one",
        volume.name_any()
    );
    Some(Wait::placement("VolumeLost", message))
}
