//! A Workspace in JSON, and what its page and the table share.

use std::collections::BTreeMap;

use kibo_crds::{Workspace, workspace::WorkspaceStatus};
use kube::ResourceExt as _;
use serde::Serialize;

use crate::output::{
    ConditionView,
    words::{enum_word, instant, word},
};

/// A Workspace in JSON.
#[derive(Serialize)]
pub struct View {
    workspace_id: Option<String>,
    name: String,
    namespace: Option<String>,
    state: Option<String>,
    reason: Option<String>,
    message: Option<String>,
    template: String,
    resources: ResourcesView,
    writable_layer: LayerView,
    volume: Option<VolumeView>,
    node_id: Option<String>,
    execution: Option<ExecutionView>,
    last_execution: Option<LastExecutionView>,
    power: PowerView,
    revisions: Option<RevisionsView>,
    node_selector: BTreeMap<String, String>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    created_at: Option<String>,
    deletion_requested_at: Option<String>,
    conditions: Vec<ConditionView>,
    commands: Vec<CommandView>,
}

/// What is asked for; absent: what the Template says.
#[derive(Serialize)]
struct ResourcesView {
    cpu: Option<String>,
    memory: Option<String>,
}

#[derive(Serialize)]
pub struct LayerView {
    /// Of the layer that there is, else of the one that is asked for.
    pub size: Option<String>,
    /// What the next start makes it.
    pub grows_to: Option<String>,
    pub pool_id: Option<String>,
    pub created: bool,
}

#[derive(Serialize)]
struct VolumeView {
    name: String,
    mount_path: String,
    delete_with_workspace: bool,
}

#[derive(Serialize)]
struct ExecutionView {
    instance_id: String,
    node_id: String,
    incarnation: u64,
    cpu_millis: u64,
    memory_bytes: u64,
    started_at: String,
    address: Option<String>,
}

#[derive(Serialize)]
struct LastExecutionView {
    instance_id: String,
    node_id: String,
    incarnation: u64,
    reason: String,
    ended_at: String,
}

/// The newest request to start or stop, and whether it was acted upon.
#[derive(Serialize)]
pub struct PowerView {
    pub state: String,
    pub command_id: Option<String>,
    pub stop_mode: Option<String>,
    pub node_id: Option<String>,
    pub when_unplaceable: Option<String>,
    pub consumed: bool,
}

#[derive(Serialize)]
struct RevisionsView {
    labels: u64,
    annotations: u64,
    resources: u64,
    binding: u64,
}

#[derive(Serialize)]
struct CommandView {
    command_id: String,
    operation: String,
    result: String,
    reason: Option<String>,
    message: Option<String>,
    started_at: String,
    finished_at: Option<String>,
}

impl From<&Workspace> for View {
    fn from(workspace: &Workspace) -> Self {
        let (spec, status) = (&workspace.spec, workspace.status.clone().unwrap_or_default());
        Self {
            workspace_id: status.id.map(|id| id.to_string()),
            name: workspace.name_any(),
            namespace: workspace.namespace(),
            state: status.phase.as_ref().map(enum_word),
            reason: status.reason.as_deref().map(word),
            message: status.message.clone(),
            template: spec.template.clone(),
            resources: ResourcesView {
                cpu: spec.resources.as_ref().and_then(|r| r.cpu.as_ref()).map(ToString::to_string),
                memory: spec.resources.as_ref().and_then(|r| r.memory.as_ref()).map(ToString::to_string),
            },
            writable_layer: layer_view(workspace, &status),
            volume: spec.volume.as_ref().map(|volume| VolumeView {
                name: volume_name(workspace).unwrap_or_default(),
                mount_path: volume.mount_path.clone(),
                delete_with_workspace: volume.delete_with_workspace,
            }),
            node_id: status.execution.as_ref().map(|execution| execution.node.to_string()),
            execution: status.execution.as_ref().map(|execution| ExecutionView {
                instance_id: execution.instance_id.to_string(),
                node_id: execution.node.to_string(),
                incarnation: execution.incarnation.0,
                cpu_millis: execution.cpu_milli.0,
                memory_bytes: execution.memory_bytes.0,
                started_at: instant(&execution.started_at),
                address: execution.address.clone(),
            }),
            last_execution: status.last_execution.as_ref().map(|last| LastExecutionView {
                instance_id: last.instance_id.to_string(),
                node_id: last.node.to_string(),
                incarnation: last.incarnation.0,
                reason: word(&last.reason),
                ended_at: instant(&last.ended_at),
            }),
            power: power_view(workspace),
            revisions: status.revisions.as_ref().map(|revisions| RevisionsView {
                labels: revisions.labels.revision,
                annotations: revisions.annotations.revision,
                resources: revisions.resources.revision,
                binding: revisions.binding.revision,
            }),
            node_selector: spec.node_selector.clone(),
            labels: workspace.labels().clone(),
            annotations: spec.annotations.clone(),
            created_at: workspace.creation_timestamp().as_ref().map(instant),
            deletion_requested_at: workspace.metadata.deletion_timestamp.as_ref().map(instant),
            conditions: status.conditions.iter().map(Into::into).collect(),
            commands: status
                .commands
                .iter()
                .map(|command| CommandView {
                    command_id: command.id.to_string(),
                    operation: word(&command.operation),
                    result: enum_word(&command.result),
                    reason: command.reason.as_deref().map(word),
                    message: command.message.clone(),
                    started_at: instant(&command.started_at),
                    finished_at: command.finished_at.as_ref().map(instant),
                })
                .collect(),
        }
    }
}

pub fn layer_view(workspace: &Workspace, status: &WorkspaceStatus) -> LayerView {
    let (wanted, made) = (workspace.spec.writable_layer.as_ref(), status.writable_layer.as_ref());
    LayerView {
        size: made
            .map(|layer| layer.size.to_string())
            .or(wanted.and_then(|layer| layer.size.as_ref()).map(ToString::to_string)),
        grows_to: made.and_then(|layer| layer.grow_to).map(|size| size.to_string()),
        pool_id: made
            .map(|layer| &layer.pool)
            .or(wanted.and_then(|layer| layer.pool.as_ref()))
            .map(ToString::to_string),
        created: made.is_some_and(|layer| layer.created),
    }
}

pub fn power_view(workspace: &Workspace) -> PowerView {
    let request = workspace.power_request();
    PowerView {
        state: enum_word(&request.state),
        command_id: request.request_id.as_ref().map(ToString::to_string),
        stop_mode: request.stop_mode.as_ref().map(enum_word),
        node_id: request.node.as_ref().map(ToString::to_string),
        when_unplaceable: request.when_unplaceable.as_ref().map(enum_word),
        consumed: workspace.is_power_request_consumed(),
    }
}

/// The bound Volume; one that is made with the Workspace has its name.
pub fn volume_name(workspace: &Workspace) -> Option<String> {
    let binding = workspace.spec.volume.as_ref()?;
    Some(binding.claim.clone().unwrap_or_else(|| workspace.name_any()))
}

/// The id, which the operator gives in its first look, else the name.
pub fn id_or_name(workspace: &Workspace) -> String {
    let id = workspace.status.as_ref().and_then(|status| status.id);
    id.map_or_else(|| workspace.name_any(), |id| id.to_string())
}
