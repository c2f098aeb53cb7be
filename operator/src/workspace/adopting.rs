//! Carries an adoption out: Volumes first, then the Workspaces that use them. Each write is guarded, so that whatever
//! happens meanwhile is decided on anew; doing it all again changes nothing.

use std::sync::Arc;

use kibo_crds::{Volume, Workspace};

use super::{
    adopt::{self, Fate},
    draft::Outcome,
    sight::Cluster as _,
    world::World,
};
use crate::{
    cache::Key,
    clock::now,
    evidence::Evidence,
    guarded::WriteError,
    session::hooks::{Adopted, Retry},
};

/// Conflicts in a row before the node has to come again.
const ATTEMPTS: usize = 8;

pub async fn adopt(world: &Arc<World>, evidence: &Evidence) -> Result<Adopted, Retry> {
    let volumes = world.volumes.keys().into_iter().filter_map(|key| world.volumes.get(&key));
    for volume in volumes.filter(|volume| adopt::concerns_volume(volume, evidence)) {
        adopt_volume(world, &volume, evidence).await?;
    }
    let mut adopted = Adopted::default();
    let workspaces = world.workspaces.keys().into_iter().filter_map(|key| world.workspaces.get(&key));
    for workspace in workspaces.filter(|workspace| adopt::concerns_workspace(workspace, evidence)) {
        match adopt_workspace(world, &workspace, evidence).await? {
            Fate::None => {}
            Fate::Adopted => adopted.adopted += 1,
            Fate::Ended => adopted.ended += 1,
        }
    }
    let is_unknown = |uid: &str| world.workspaces.by_uid(uid).is_none();
    let unknown = evidence.running.values().filter(|instance| is_unknown(&instance.workspace_uid));
    adopted.unknown = unknown.map(|instance| format!("{} ({})", instance.instance, instance.workspace)).collect();
    Ok(adopted)
}

async fn adopt_volume(world: &World, volume: &Volume, evidence: &Evidence) -> Result<(), Retry> {
    let key = Key::of(volume);
    for _ in 0..ATTEMPTS {
        let Some(volume) = world.volumes.get(&key) else { return Ok(()) };
        let pool = volume.status.as_ref().and_then(|status| status.pool.clone());
        let others = pool.is_some_and(|pool| world.others_reach(&pool, &evidence.node));
        let status = adopt::volume(&volume, evidence, others, &now());
        if Some(&status) == volume.status.as_ref() {
            return Ok(());
        }
        match world.write_volume(&volume, status).await {
            Ok(()) => return Ok(()),
            Err(WriteError::Conflict { .. } | WriteError::Gone { .. }) => {
                world.refresh_volume(&key).await.map_err(Retry::because)?;
            }
            Err(error) => return Err(Retry::because(error)),
        }
    }
    Err(Retry(format!("Volume {key} changes too fast")))
}

async fn adopt_workspace(world: &World, workspace: &Workspace, evidence: &Evidence) -> Result<Fate, Retry> {
    let key = Key::of(workspace);
    for _ in 0..ATTEMPTS {
        let Some(workspace) = world.workspaces.get(&key) else { return Ok(Fate::None) };
        let volume = world.volume_of(&workspace);
        let layer = workspace.status.as_ref().and_then(|status| status.writable_layer.as_ref());
        let others = layer.is_some_and(|layer| world.others_reach(&layer.pool, &evidence.node));
        let (fate, outcome) = adopt::workspace(&workspace, volume.as_deref(), evidence, others, &now());
        let Outcome { status, notices } = outcome;
        let Some(status) = status else { return Ok(fate) };
        tracing::info!(workspace = %key, node = %evidence.node, ?fate, phase = ?status.phase, "adopting");
        match world.write_workspace(&workspace, *status).await {
            Ok(()) => {
                world.publish(&*workspace, notices).await;
                return Ok(fate);
            }
            Err(WriteError::Conflict { .. } | WriteError::Gone { .. }) => {
                world.refresh_workspace(&key).await.map_err(Retry::because)?;
            }
            Err(error) => return Err(Retry::because(error)),
        }
    }
    Err(Retry(format!("Workspace {key} changes too fast")))
}
