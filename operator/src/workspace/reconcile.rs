//! Carries the decisions about Workspaces out.

use std::{sync::Arc, time::Duration};

use kibo_crds::{
    ConditionType, VOLUME_FINALIZER, Volume, WORKSPACE_FINALIZER, Workspace, WorkspaceId, WorkspaceTombstone,
    node::Holder,
    tombstone::WorkspaceTombstoneSpec,
    volume::{BoundTo, VolumeSpec},
    workspace::{PowerState, WorkspaceStatus},
};
use kibo_protocol::v1::{self, to_node::Message};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{DeleteParams, ObjectMeta, PostParams, Preconditions},
};
use serde_json::json;

use super::{
    decide::{self, Action, Decision, Object},
    draft::{News, Notice, news},
    launch,
    sight::{CREATED_FOR, Cluster as _, Sight},
    world::World,
};
use crate::{
    cache::Key,
    clock::now,
    growth,
    guarded::{self, WriteError},
    moving,
    session::ObjectCommand,
    space::{self, ByPool},
};

/// Steps in one go; more than that is a fault in the decisions.
const MAX_STEPS: usize = 24;
/// What went wrong at the API server or a node is tried again after this.
pub(crate) const RETRY: Duration = Duration::from_secs(2);
const OTHERS_WRITE: Duration = Duration::from_millis(200);
/// A message that was sent and not answered is sent again: messages are idempotent, and may be lost.
const RESEND: Duration = Duration::from_secs(30);
/// Words alone are not written more often than this.
pub(super) const WORDS_PAUSE: Duration = Duration::from_secs(30);

/// Nor where a Workspace could start, however often the nodes that reach its pools come and go.
const PLACE_PAUSE: Duration = Duration::from_secs(10);

/// How a step went.
#[derive(Debug)]
pub(crate) enum Step {
    /// Something changed: look again.
    Again,
    Rest,
    After(Duration),
}

/// An error of one step, for the log; the step is tried again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("failed to {0}: {1}")]
    Api(&'static str, Box<kube::Error>),
}

/// One Workspace, until there is nothing to do. Answers when to look again at the latest.
#[tracing::instrument(skip_all, fields(workspace = %key))]
pub async fn reconcile(world: Arc<World>, key: Key) -> Option<Duration> {
    for _ in 0..MAX_STEPS {
        match step(&world, &key).await {
            Ok(Step::Again) => {}
            Ok(Step::Rest) => return None,
            Ok(Step::After(delay)) => return Some(delay),
            Err(StepError::Write(WriteError::Conflict { .. } | WriteError::Gone { .. })) => {
                if let Err(error) = world.refresh_workspace(&key).await {
                    tracing::warn!(%error, "failed to read the Workspace anew");
                    return Some(RETRY);
                }
            }
            Err(error) => {
                tracing::warn!(%error, "a step failed and is tried again");
                // What an unknown write did must be known before the next decision.
                let _ = world.refresh_workspace(&key).await;
                return Some(RETRY);
            }
        }
    }
    tracing::error!("no end of steps: look at this Workspace again later");
    Some(RETRY * 10)
}

async fn step(world: &Arc<World>, key: &Key) -> Result<Step, StepError> {
    let Some(workspace) = world.workspaces.get(key) else {
        world.forget(key);
        return Ok(Step::Rest);
    };
    let (template, volume) = (world.template_of(&workspace), world.volume_of(&workspace));
    let sight = sight(world, &workspace, template.as_deref(), volume.as_deref());
    let more = |decided: &Decision| more(&workspace, decided.outcome.status.as_deref());
    let (decided, claim) = world.ledger.in_turn(&*workspace, || decide::decide(&sight), more);
    let Decision { outcome, action, moving, word, is_undecided } = decided;
    if is_undecided {
        return Ok(await_others().await);
    }
    let (mut workspace, mut wrote, mut unsaid) = (workspace, false, None);
    if let Some(status) = outcome.status {
        let is_first_start = matches!(action, Action::Start(_)) && workspace.status.is_none();
        let pause = match workspace.status.as_ref().map(|stored| news(stored, &status)) {
            Some(News::Words) => Some(WORDS_PAUSE),
            Some(News::Place) => Some(PLACE_PAUSE),
            Some(News::Facts) | None => None,
        };
        if is_first_start {
            // What is new is stored with the start's commit, or with the answer that no node takes it.
            workspace = Arc::new(Workspace { status: Some((*status).clone()), ..(*workspace).clone() });
            unsaid = Some(*status);
        } else if let Some(rest) = pause.and_then(|pause| world.words_rest(key, pause)) {
            world.bells.workspaces.push_after(key.clone(), rest);
        } else {
            log_decision(&workspace, &status, &action);
            let stored = workspace.status.as_ref().and_then(|status| status.r#move.as_ref());
            let (before, after) = moving::points(stored, status.r#move.as_ref());
            moving::reach(before).await;
            if !moving::is_open(status.r#move.as_ref()) {
                world.hearsay.forget(workspace.metadata.uid.as_deref().unwrap_or_default());
            }
            let ends = status.execution.is_none() && workspace.status.as_ref().is_some_and(|it| it.execution.is_some());
            if claim.is_some() {
                kibo_failpoint::reach("space-claimed").await;
            }
            world.write_workspace(&workspace, *status).await?;
            if ends {
                kibo_failpoint::reach("execution-voided").await;
            }
            moving::reach(after).await;
            world.worded(key.clone());
            world.publish(&*workspace, outcome.notices).await;
            wrote = true;
        }
    }
    drop(claim);
    if wrote && matches!(action, Action::Start(_)) {
        // A start is guarded by the version that it was decided on, which is not the one just written.
        return Ok(Step::Again);
    }
    let workspace = if wrote { world.workspaces.get(key) } else { Some(workspace) };
    let Some(workspace) = workspace else { return Ok(Step::Rest) };
    if matches!(action, Action::Start(_)) {
        // Before it is placed: room that appears while nobody has taken it yet is not missed.
        world.wait_for_room(key.clone());
    }
    let moves = match moving {
        Some(action) => {
            moving::act(world, moving::Whose::Workspace(key.clone()), launch::layer(&workspace), action).await
        }
        None => Step::Rest,
    };
    if let Some(word) = word {
        Box::pin(act(world, &workspace, template.as_deref(), volume.as_deref(), word)).await?;
    }
    let step = act(world, &workspace, template.as_deref(), volume.as_deref(), action).await?;
    let step = if matches!(step, Step::Rest) && !wrote { moves } else { step };
    if let Some(status) = unsaid
        && let Some(stored) = world.workspaces.get(key).filter(|stored| stored.status.is_none())
    {
        // It was neither: it waits for something else.
        world.write_workspace(&stored, status).await?;
    }
    let rests = matches!(step, Step::Rest | Step::After(_));
    if matches!(step, Step::Rest) && wrote {
        return Ok(Step::Again);
    }
    let is_pending = !workspace.is_power_request_consumed()
        && workspace.power_request().state == PowerState::Running
        && workspace.metadata.deletion_timestamp.is_none();
    if rests && (is_pending || has_unmet_wish(&workspace)) {
        world.wait_for_room(key.clone());
    }
    Ok(step)
}

/// What others are about to take of a pool decides whether there is room: one write of theirs tells.
pub(crate) async fn await_others() -> Step {
    kibo_failpoint::reach("space-awaited").await;
    Step::After(OTHERS_WRITE)
}

/// What the layer is about to take of pools beside what is stored.
fn more(workspace: &Workspace, status: Option<&WorkspaceStatus>) -> ByPool {
    let Some(status) = status else { return ByPool::new() };
    let before = workspace.status.iter().flat_map(space::of_layer);
    space::more(before, space::of_layer(status))
}

/// Whether its spec asks for a Volume or a size that it did not get and may get yet.
fn has_unmet_wish(workspace: &Workspace) -> bool {
    let conditions = workspace.status.iter().flat_map(|status| &status.conditions);
    let mut unmet = conditions.filter(|it| it.status == "False" && it.reason != growth::AT_NEXT_START);
    unmet.any(|it| [ConditionType::Resized, ConditionType::VolumeBound].iter().any(|kind| it.type_ == kind.to_string()))
}

fn log_decision(workspace: &Workspace, status: &WorkspaceStatus, action: &Action) {
    let phase = |status: Option<&WorkspaceStatus>| status.and_then(|status| status.phase);
    let (from, to) = (phase(workspace.status.as_ref()), phase(Some(status)));
    if from != to {
        let action = format!("{action:?}").split([' ', '{', '(']).next().unwrap_or_default().to_owned();
        tracing::info!(?from, ?to, reason = status.reason, action, "phase");
    }
}

pub(super) fn sight<'a>(
    world: &'a World,
    workspace: &'a Workspace,
    template: Option<&'a kibo_crds::Template>,
    volume: Option<&'a Volume>,
) -> Sight<'a> {
    Sight {
        workspace,
        template,
        volume,
        others_bound: others_bound(world, workspace),
        cluster: world,
        now: now(),
        fresh_id: WorkspaceId::generate(),
        vm_overhead: world.ctx.vm_overhead,
    }
}

/// Volumes that this Workspace binds, without the one that its spec names.
fn others_bound(world: &World, workspace: &Workspace) -> Vec<String> {
    let uid = workspace.uid().unwrap_or_default();
    let named = workspace.spec.volume.as_ref().map(|binding| decide::idle::volume_name(binding, &workspace.name_any()));
    let bound = world.volumes.project(|index| index.bound_to(&uid));
    bound.into_iter().map(|key| key.name).filter(|name| Some(name) != named.as_ref()).collect()
}

async fn act(
    world: &Arc<World>,
    workspace: &Workspace,
    template: Option<&kibo_crds::Template>,
    volume: Option<&Volume>,
    action: Action,
) -> Result<Step, StepError> {
    if let Some(point) = action.failpoint() {
        kibo_failpoint::reach(point).await;
    }
    match action {
        Action::Rest => Ok(Step::Rest),
        Action::AddFinalizer => add_finalizer(world, workspace).await,
        Action::CreateVolume => create_volume(world, workspace).await,
        Action::BindVolume => bind_volume(world, workspace, volume).await,
        Action::Start(start) => Box::pin(super::start::start(world, workspace, template, volume, *start)).await,
        Action::Go => {
            go(world, workspace, template, volume).await;
            Ok(Step::Rest)
        }
        Action::Stop { node, incarnation, instance, mode } => {
            let objects = objects(workspace, volume);
            let stop = v1::Stop { instance_id: instance.to_string(), mode: mode.into(), objects };
            // A session that is gone is heard of by its own bell.
            let _ = world.ctx.registry.send(&node, incarnation, Message::Stop(stop));
            kibo_failpoint::reach("stop-sent").await;
            Ok(Step::After(RESEND))
        }
        Action::Settle { object: Object::Layer, holder } => {
            let step = settle_layer(world, workspace, volume, &holder).await?;
            kibo_failpoint::reach("grant-settled").await;
            Ok(step)
        }
        Action::Settle { object: Object::Volume, holder } => match volume {
            Some(volume) => crate::volume::reconcile::settle(world, volume, &holder).await,
            None => Ok(Step::Again),
        },
        Action::DeleteLayer { holder } => delete_layer(world, workspace, volume, &holder).await,
        Action::DeleteVolume => match volume {
            Some(volume) => delete_volume(world, volume, None).await,
            None => Ok(Step::Again),
        },
        Action::UnbindVolume => match volume {
            Some(volume) => unbind_volume(world, volume).await,
            None => Ok(Step::Again),
        },
        Action::ReleaseVolume(name) => release_volume(world, workspace, &name).await,
        Action::Bury => bury(world, workspace).await,
        Action::Transfer { id, step } => super::transferring::act(world, workspace, volume, id, step).await,
    }
}

fn objects(workspace: &Workspace, volume: Option<&Volume>) -> Vec<v1::Object> {
    launch::layer(workspace).into_iter().chain(volume.and_then(launch::volume_object)).collect()
}

/// Tells the node that the commit stands.
pub(super) async fn go(
    world: &World,
    workspace: &Workspace,
    template: Option<&kibo_crds::Template>,
    volume: Option<&Volume>,
) {
    let Some(execution) = workspace.status.as_ref().and_then(|status| status.execution.as_ref()) else { return };
    let Some(launch) = launch::launch(workspace, template, volume) else { return };
    let go = v1::Go { offer_id: execution.instance_id.to_string(), launch: Some(launch) };
    world.tell(execution.instance_id);
    if world.ctx.registry.send(&execution.node, execution.incarnation, Message::Go(go)).is_err() {
        // The desired set of its next session tells it.
        world.forget_told(execution.instance_id);
    }
    kibo_failpoint::reach("go-sent").await;
}

async fn add_finalizer(world: &World, workspace: &Workspace) -> Result<Step, StepError> {
    let mut finalizers = workspace.finalizers().to_vec();
    finalizers.push(WORKSPACE_FINALIZER.to_owned());
    patch_finalizers(world, workspace, &finalizers).await
}

async fn patch_finalizers(world: &World, workspace: &Workspace, finalizers: &[String]) -> Result<Step, StepError> {
    let _turn = world.turn().await;
    let api = world.workspace_api(&Key::of(workspace).namespace);
    let patched = guarded::patch_metadata(&api, workspace, json!({ "finalizers": finalizers })).await;
    world.noted(patched, |patched| world.workspaces.observe(patched))?;
    Ok(Step::Again)
}

async fn create_volume(world: &World, workspace: &Workspace) -> Result<Step, StepError> {
    let Some(new) = workspace.spec.volume.as_ref().and_then(|binding| binding.new.clone()) else {
        return Ok(Step::Rest);
    };
    let key = Key::of(workspace);
    let mut volume = Volume::new(&key.name, VolumeSpec { size: new.size, pool: new.pool, r#move: None });
    volume.metadata = ObjectMeta {
        name: Some(key.name.clone()),
        labels: Some([(CREATED_FOR.to_owned(), workspace.uid().unwrap_or_default())].into()),
        finalizers: Some(vec![VOLUME_FINALIZER.to_owned()]),
        ..ObjectMeta::default()
    };
    let created = {
        let _turn = world.turn().await;
        world.volume_api(&key.namespace).create(&PostParams::default(), &volume).await
    };
    match created {
        Ok(created) => {
            world.volumes.observe(created);
        }
        Err(kube::Error::Api(status)) if status.code == 409 => {
            world.refresh_volume(&key).await.map_err(|error| StepError::Api("read the Volume", Box::new(error)))?;
        }
        Err(error) => return Err(StepError::Api("create the Volume", Box::new(error))),
    }
    Ok(Step::Again)
}

/// First come, first served: the guarded write decides.
async fn bind_volume(world: &World, workspace: &Workspace, volume: Option<&Volume>) -> Result<Step, StepError> {
    let Some(volume) = volume else { return Ok(Step::Again) };
    let mut status = volume.status.clone().unwrap_or_default();
    status.bound_to = Some(BoundTo { name: workspace.name_any(), uid: workspace.uid().unwrap_or_default() });
    write_volume(world, volume, status).await
}

/// It keeps its data and is free for others.
async fn release_volume(world: &World, workspace: &Workspace, name: &str) -> Result<Step, StepError> {
    let key = Key::new(&Key::of(workspace).namespace, name);
    let uid = workspace.uid();
    let bound = |volume: &Volume| volume.status.as_ref().and_then(|status| status.bound_to.clone()).map(|it| it.uid);
    let Some(volume) = world.volumes.get(&key).filter(|volume| bound(volume) == uid) else { return Ok(Step::Again) };
    let step = unbind_volume(world, &volume).await?;
    kibo_failpoint::reach("volume-let-go").await;
    Ok(step)
}

async fn unbind_volume(world: &World, volume: &Volume) -> Result<Step, StepError> {
    let mut status = volume.status.clone().unwrap_or_default();
    status.bound_to = None;
    write_volume(world, volume, status).await
}

/// Writes a Volume's status for a Workspace; a lost race is looked at again.
pub(crate) async fn write_volume(
    world: &World,
    volume: &Volume,
    mut status: kibo_crds::volume::VolumeStatus,
) -> Result<Step, StepError> {
    crate::volume::decide::complete(volume, &mut status, None, &now());
    match world.write_volume(volume, status).await {
        Ok(()) => Ok(Step::Again),
        Err(WriteError::Conflict { .. } | WriteError::Gone { .. }) => {
            let key = Key::of(volume);
            world.refresh_volume(&key).await.map_err(|error| StepError::Api("read the Volume", Box::new(error)))?;
            Ok(Step::Again)
        }
        Err(error) => Err(error.into()),
    }
}

/// With a version, only as long as nobody has changed it since.
pub(crate) async fn delete_volume(
    world: &World,
    volume: &Volume,
    resource_version: Option<String>,
) -> Result<Step, StepError> {
    let key = Key::of(volume);
    let preconditions = Preconditions { uid: volume.uid(), resource_version };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let deleted = {
        let _turn = world.turn().await;
        world.volume_api(&key.namespace).delete(&key.name, &params).await
    };
    match deleted {
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
        Err(error) => return Err(StepError::Api("delete the Volume", Box::new(error))),
        Ok(_) => {}
    }
    world.refresh_volume(&key).await.map_err(|error| StepError::Api("read the Volume", Box::new(error)))?;
    Ok(Step::Again)
}

/// Asks the holder's node what became of a grant of the layer.
async fn settle_layer(
    world: &Arc<World>,
    workspace: &Workspace,
    volume: Option<&Volume>,
    holder: &Holder,
) -> Result<Step, StepError> {
    let Some(object) = launch::layer(workspace) else { return Ok(Step::After(RESEND)) };
    let command = v1::ConfirmNotTaken { command_id: command_id(), object: Some(object) };
    let command = ObjectCommand::ConfirmNotTaken(command);
    let result = match world.ctx.registry.object_command(&holder.node, holder.incarnation, command).await {
        Ok(result) => result,
        Err(error) => {
            tracing::warn!(%error, "the holder of the layer did not answer");
            return Ok(Step::After(RETRY));
        }
    };
    let mut status = workspace.status.clone().unwrap_or_default();
    let before = status.clone();
    let others = status.writable_layer.as_ref().is_some_and(|layer| world.others_reach(&layer.pool, &holder.node));
    let fact = super::event::ObjectFact { epoch: holder.epoch, used: result.r#use(), size: None };
    super::event::layer_fact(&mut status, &holder.node, fact, others);
    if status != before {
        world.write_workspace(workspace, status).await?;
        return Ok(Step::Again);
    }
    tracing::warn!(node = %holder.node, message = result.message, "the layer is still held: asking for its release");
    stop_last(world, workspace, volume, holder);
    Ok(Step::After(RETRY * 2))
}

/// The node answers with an Ended event that says how the objects stand.
fn stop_last(world: &World, workspace: &Workspace, volume: Option<&Volume>, holder: &Holder) {
    let last = workspace.status.as_ref().and_then(|status| status.last_execution.as_ref());
    if let Some(last) = last.filter(|last| last.node == holder.node) {
        let mode = v1::StopMode::Force.into();
        let stop = v1::Stop { instance_id: last.instance_id.to_string(), mode, objects: objects(workspace, volume) };
        let _ = world.ctx.registry.send(&holder.node, holder.incarnation, Message::Stop(stop));
    }
}

async fn delete_layer(
    world: &Arc<World>,
    workspace: &Workspace,
    volume: Option<&Volume>,
    holder: &Holder,
) -> Result<Step, StepError> {
    let Some(object) = launch::layer(workspace) else { return Ok(Step::Again) };
    let command = v1::DeleteObject { command_id: command_id(), object: Some(object) };
    let command = ObjectCommand::Delete(command);
    match world.ctx.registry.object_command(&holder.node, holder.incarnation, command).await {
        Ok(result) if result.ok => {
            kibo_failpoint::reach("layer-removed").await;
            let status = decide::layer_deleted(workspace, &holder.node, holder.epoch);
            world.write_workspace(workspace, status).await?;
            Ok(Step::Again)
        }
        Ok(result) => {
            tracing::warn!(node = %holder.node, message = result.message, failure = ?result.failure(), "the layer could not be removed");
            let message = format!("node {}: {}", holder.node, result.message);
            world.publish(workspace, vec![Notice::warning("LayerNotRemoved", &message)]).await;
            match result.failure() {
                // This grant may be closed for good; the node's word on it makes way for the next one.
                v1::ObjectFailure::HolderConflict => settle_layer(world, workspace, volume, holder).await,
                v1::ObjectFailure::InUse => {
                    stop_last(world, workspace, volume, holder);
                    Ok(Step::After(RETRY))
                }
                _ => Ok(Step::After(RETRY * 5)),
            }
        }
        Err(error) => {
            tracing::warn!(%error, "the removal of the layer was not answered");
            Ok(Step::After(RETRY))
        }
    }
}

pub(crate) fn command_id() -> String {
    ulid::Ulid::new().to_string()
}

async fn bury(world: &World, workspace: &Workspace) -> Result<Step, StepError> {
    let status = workspace.status.clone().unwrap_or_default();
    if let Some(id) = status.id {
        let deleted_at = now();
        let ttl = jiff::SignedDuration::try_from(world.settings.tombstone_ttl).unwrap_or(jiff::SignedDuration::MAX);
        let expires_at = deleted_at.0.checked_add(ttl).unwrap_or(jiff::Timestamp::MAX);
        let spec = WorkspaceTombstoneSpec {
            id,
            namespace: workspace.namespace().unwrap_or_default(),
            name: workspace.name_any(),
            uid: workspace.uid().unwrap_or_default(),
            template: workspace.spec.template.clone(),
            deleted_at,
            expires_at: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(expires_at),
            last_execution: status.last_execution,
        };
        let tombstone = WorkspaceTombstone::new(&id.to_string(), spec);
        let _turn = world.turn().await;
        let api: Api<WorkspaceTombstone> = Api::all(world.ctx.client.clone());
        match api.create(&PostParams::default(), &tombstone).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(StepError::Api("record the deletion", Box::new(error))),
            Ok(_) => {}
        }
    }
    kibo_failpoint::reach("tombstone-made").await;
    let finalizers: Vec<_> =
        workspace.meta().finalizers.iter().flatten().filter(|name| *name != WORKSPACE_FINALIZER).cloned().collect();
    tracing::info!("deleted");
    patch_finalizers(world, workspace, &finalizers).await?;
    Ok(Step::Rest)
}
