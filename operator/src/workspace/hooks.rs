//! What the session server and the node room ask of Workspaces.

use std::sync::Arc;

use kibo_crds::{Bytes, Incarnation, InstanceId, NodeId, PoolId, Workspace, workspace::WorkspacePhase};
use kibo_protocol::v1::{self, instance_event::Kind};
use kube::{ResourceExt as _, api::ListParams};
use tonic::async_trait;

use super::{adopting, decide::running::stop_mode, draft::Outcome, event, launch, sight::Cluster as _, world::World};
use crate::{
    cache::Key,
    clock::now,
    evidence::Evidence,
    guarded::WriteError,
    session::hooks::{Absence, Adopted, DesiredSet, EventIngest, MoveIngest, NodeUsage, PoolUsage, Retry, Usage},
};

/// Conflicts in a row before the session tries again later.
const ATTEMPTS: usize = 8;

/// The doors of this room.
#[derive(Clone)]
pub struct Hooks(pub(super) Arc<World>);

#[async_trait]
impl DesiredSet for Hooks {
    async fn desired(&self, node: &NodeId, incarnation: Incarnation) -> Result<Vec<v1::Desired>, Retry> {
        let world = &self.0;
        let keys = world.workspaces.project(|index| index.keys_of(node));
        let workspaces = keys.iter().filter_map(|key| world.workspaces.get(key));
        Ok(workspaces.filter_map(|workspace| desired(world, &workspace, node, incarnation)).collect())
    }

    async fn proves_absent(
        &self,
        node: &NodeId,
        _incarnation: Incarnation,
        instance: InstanceId,
        workspace_uid: &str,
    ) -> Result<Absence, Retry> {
        let world = &self.0;
        if world.ledger.is_starting(instance) {
            return Ok(Absence::Holds);
        }
        let holds = |workspace: &Workspace| {
            let execution = workspace.status.as_ref().and_then(|status| status.execution.as_ref());
            execution.is_some_and(|execution| execution.instance_id == instance && execution.node == *node)
        };
        if let Some(known) = world.workspaces.by_uid(workspace_uid) {
            let key = Key::of(&*known);
            world.refresh_workspace(&key).await.map_err(Retry::because)?;
            return Ok(match world.workspaces.by_uid(workspace_uid) {
                Some(workspace) if holds(&workspace) => Absence::Holds,
                Some(_) => Absence::NotExecution,
                None => Absence::NoWorkspace,
            });
        }
        // No Workspace with this uid: then none may name the Instance at all.
        let _turn = world.turn().await;
        let params = ListParams::default().fields(&format!("status.execution.instanceId={instance}"));
        let api: kube::Api<Workspace> = kube::Api::all(world.ctx.client.clone());
        let found = api.list(&params).await.map_err(Retry::because)?;
        Ok(if found.items.iter().any(holds) { Absence::Holds } else { Absence::NoWorkspace })
    }

    async fn adopt(&self, evidence: &Evidence) -> Result<Adopted, Retry> {
        adopting::adopt(&self.0, evidence).await
    }

    async fn incarnation_began(&self, node: &NodeId, _incarnation: Incarnation) {
        self.0.wake_node(node);
    }
}

fn desired(world: &World, workspace: &Workspace, node: &NodeId, incarnation: Incarnation) -> Option<v1::Desired> {
    let status = workspace.status.as_ref()?;
    let execution = status.execution.as_ref().filter(|e| e.node == *node && e.incarnation == incarnation)?;
    let (template, volume) = (world.template_of(workspace), world.volume_of(workspace));
    let launch = launch::launch(workspace, template.as_deref(), volume.as_deref())?;
    let stop = match status.phase {
        Some(WorkspacePhase::Stopping) => Some(stop_mode(status.power.as_ref().map(|power| &power.consumed))),
        Some(WorkspacePhase::Deleting) => Some(v1::StopMode::Force),
        _ => None,
    };
    world.tell(execution.instance_id);
    Some(v1::Desired { launch: Some(launch), stop: stop.map(Into::into) })
}

#[async_trait]
impl EventIngest for Hooks {
    async fn ingest(&self, node: &NodeId, _incarnation: Incarnation, event: v1::InstanceEvent) -> Result<(), Retry> {
        // Objects of others first: when this stops half-way, the event comes again and finds them done.
        for state in event::object_states(&event) {
            volume_fact(&self.0, node, state).await?;
        }
        if let Some(Kind::Ended(_)) = event.kind {
            kibo_failpoint::reach("ended-applied-to-objects").await;
        }
        workspace_event(&self.0, node, &event).await?;
        // Its effect stands, and the node was not told.
        match event.kind {
            Some(Kind::ObjectsTaken(_)) => kibo_failpoint::reach("taken-applied").await,
            Some(Kind::Available(_)) => kibo_failpoint::reach("available-applied").await,
            Some(Kind::Ended(_)) => kibo_failpoint::reach("ended-applied").await,
            _ => {}
        }
        Ok(())
    }
}

async fn volume_fact(world: &World, node: &NodeId, state: &v1::ObjectState) -> Result<(), Retry> {
    for _ in 0..ATTEMPTS {
        let Some(volume) = world.volumes.by_uid(&state.uid) else { return Ok(()) };
        let mut status = volume.status.clone().unwrap_or_default();
        let others = status.pool.as_ref().is_some_and(|pool| world.others_reach(pool, node));
        event::volume_fact(&mut status, node, state.into(), others);
        if Some(&status) == volume.status.as_ref() {
            return Ok(());
        }
        crate::volume::decide::complete(&volume, &mut status, None, &now());
        match world.write_volume(&volume, status).await {
            Ok(()) => return Ok(()),
            Err(WriteError::Conflict { .. } | WriteError::Gone { .. }) => {
                world.refresh_volume(&Key::of(&*volume)).await.map_err(Retry::because)?;
            }
            Err(error) => return Err(Retry::because(error)),
        }
    }
    Err(Retry("the Volume changes too fast".into()))
}

async fn workspace_event(world: &World, node: &NodeId, event: &v1::InstanceEvent) -> Result<(), Retry> {
    let mut is_fresh = false;
    for _ in 0..ATTEMPTS {
        let Some(workspace) = world.workspaces.by_uid(&event.workspace_uid) else { return Ok(()) };
        let key = Key::of(&*workspace);
        let execution = workspace.status.as_ref().and_then(|status| status.execution.as_ref());
        let is_current = execution.is_some_and(|execution| execution.instance_id.to_string() == event.instance_id);
        if !is_current && !is_fresh && matches!(event.kind, Some(Kind::Ended(_))) {
            // It is dropped for good: only the stored object says that it is not current.
            world.refresh_workspace(&key).await.map_err(Retry::because)?;
            is_fresh = true;
            continue;
        }
        let pool = workspace.status.as_ref().and_then(|status| status.writable_layer.as_ref()).map(|layer| &layer.pool);
        let others = pool.is_some_and(|pool| world.others_reach(pool, node));
        let Outcome { status, notices } = event::apply(&workspace, node, event, others, now());
        let Some(status) = status else { return Ok(()) };
        let to = status.phase;
        match world.write_workspace(&workspace, *status).await {
            Ok(()) => {
                note(world, node, &workspace, event, to);
                world.publish(&*workspace, notices).await;
                return Ok(());
            }
            Err(WriteError::Conflict { .. } | WriteError::Gone { .. }) => {
                world.refresh_workspace(&key).await.map_err(Retry::because)?;
            }
            Err(error) => return Err(Retry::because(error)),
        }
    }
    Err(Retry("the Workspace changes too fast".into()))
}

/// Measures and logs what came of an event, and keeps a node that could not start in time from being asked again at once.
fn note(world: &World, node: &NodeId, workspace: &Workspace, event: &v1::InstanceEvent, to: Option<WorkspacePhase>) {
    if let (Some(kind), Ok(instance)) = (&event.kind, event.instance_id.parse()) {
        world.stopwatch.told(instance, kind);
    }
    if let Some(Kind::Ended(ended)) = &event.kind {
        tracing::info!(
            workspace = %Key::of(workspace), %node, instance = event.instance_id,
            reason = ?ended.reason(), message = ended.message, ?to, "the Instance ended"
        );
        if let Ok(instance) = event.instance_id.parse() {
            world.forget_told(instance);
        }
        if ended.reason() == v1::EndReason::NotStarted {
            let words = if ended.message.is_empty() { "it did not start it in time" } else { &ended.message };
            world.avoid(&workspace.uid().unwrap_or_default(), node, words);
        }
    }
}

impl MoveIngest for Hooks {
    fn moved(&self, node: &NodeId, progress: &v1::MoveProgress) {
        crate::moving::progress(&self.0, node, progress);
    }
}

impl Usage for Hooks {
    fn of_node(&self, node: &NodeId) -> NodeUsage {
        let world = &self.0;
        let in_flight = world.ledger.in_flight(node);
        let (used, layers) = world.workspaces.project(|index| (index.used(node), index.held_layers(node)));
        let volumes = world.volumes.project(|index| index.held(node));
        let idle_objects = layers.idle.values().chain(volumes.idle.values()).copied().fold(0, u32::saturating_add);
        NodeUsage {
            cpu: used.cpu,
            memory: used.memory,
            executions: used.instances,
            held_objects: layers.in_use.saturating_add(volumes.in_use).saturating_add(idle_objects),
            idle_objects,
            in_flight,
        }
    }

    fn give_back(&self, node: &NodeId) {
        let world = &self.0;
        let layers = world.workspaces.project(|index| index.held_layers(node));
        let volumes = world.volumes.project(|index| index.held(node));
        if layers.idle.keys().chain(volumes.idle.keys()).any(|pool| world.ctx.pools.has_other_member(pool, node)) {
            world.wake_node(node);
        }
    }

    fn owns(&self, uid: &str) -> bool {
        self.0.workspaces.by_uid(uid).is_some() || self.0.volumes.by_uid(uid).is_some()
    }

    fn pool_lost(&self, pool: &PoolId) {
        let world = &self.0;
        for key in world.workspaces.keys() {
            let status = world.workspaces.get(&key).and_then(|workspace| workspace.status.clone());
            if status.and_then(|status| status.writable_layer).is_some_and(|layer| layer.pool == *pool) {
                world.bells.workspaces.push(key);
            }
        }
        for key in world.volumes.keys() {
            let status = world.volumes.get(&key).and_then(|volume| volume.status.clone());
            if status.is_some_and(|status| status.pool.as_ref() == Some(pool)) {
                world.bells.volumes.push(key);
            }
        }
    }

    fn of_pool(&self, pool: &PoolId) -> PoolUsage {
        let layers = self.0.workspaces.project(|index| index.pool(pool));
        let volumes = self.0.volumes.project(|index| index.pool(pool));
        PoolUsage {
            allocated: layers.allocated.checked_add(volumes.allocated).unwrap_or(Bytes(u64::MAX)),
            objects: layers.objects.saturating_add(volumes.objects),
        }
    }
}
