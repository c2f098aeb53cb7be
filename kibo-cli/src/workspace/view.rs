//! How a Workspace is shown: as a page, as a row, in JSON.

use std::{collections::BTreeMap, fmt::Write as _};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kibo_crds::{
    Template, Volume, Workspace,
    workspace::{WorkspacePhase, WorkspaceStatus},
};
use kube::ResourceExt as _;
use serde::Serialize;

use super::power::obstacle;
use crate::{
    client::{Cluster, Listed},
    output::{
        ConditionView, Page, Present, Table, conditions, is_telling,
        words::{age, binary, cores, enum_word, instant, or_absent, when, word},
    },
};

/// A Workspace in JSON.
#[derive(Serialize)]
struct View {
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
struct LayerView {
    size: Option<String>,
    pool_id: Option<String>,
    created: bool,
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
struct PowerView {
    state: String,
    command_id: Option<String>,
    stop_mode: Option<String>,
    node_id: Option<String>,
    when_unplaceable: Option<String>,
    consumed: bool,
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

fn layer_view(workspace: &Workspace, status: &WorkspaceStatus) -> LayerView {
    let (wanted, made) = (workspace.spec.writable_layer.as_ref(), status.writable_layer.as_ref());
    LayerView {
        size: wanted
            .and_then(|layer| layer.size.as_ref())
            .map(ToString::to_string)
            .or(made.map(|layer| layer.size.to_string())),
        pool_id: made
            .map(|layer| &layer.pool)
            .or(wanted.and_then(|layer| layer.pool.as_ref()))
            .map(ToString::to_string),
        created: made.is_some_and(|layer| layer.created),
    }
}

fn power_view(workspace: &Workspace) -> PowerView {
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

/// The state, since when where it lasts, and why.
fn state(status: &WorkspaceStatus, now: Timestamp) -> String {
    let mut text = or_absent(status.phase.as_ref().map(enum_word));
    let lasting = status.phase.and_then(|phase| match phase {
        WorkspacePhase::Available => Some("Available"),
        WorkspacePhase::Stopped => Some("Stopped"),
        _ => None,
    });
    let since = status.conditions.iter().find(|it| Some(it.type_.as_str()) == lasting && it.status == "True");
    if let Some(since) = since {
        let _ = write!(text, " for {}", age(Some(&since.last_transition_time), now));
    }
    if let Some(reason) = &status.reason {
        let _ = write!(text, " ({})", word(reason));
    }
    if let Some(message) = &status.message {
        let _ = write!(text, "\n{message}");
    }
    text
}

/// What the state itself does not say.
fn waits(status: &WorkspaceStatus) -> Option<String> {
    let settled = [WorkspacePhase::Available, WorkspacePhase::Stopped, WorkspacePhase::Failed];
    match status.phase {
        None => Some("the operator, which has not seen it yet".to_owned()),
        Some(phase) if settled.contains(&phase) || status.message.is_some() => None,
        Some(_) => obstacle(status).map(str::to_owned),
    }
}

/// A Workspace with what else its page shows.
pub struct One {
    workspace: Workspace,
    template: Option<Template>,
    volume: Option<Volume>,
    events: Table,
    now: Timestamp,
}

impl One {
    /// Reads what belongs to the page. Somebody who may not read it gets the page without.
    pub async fn gather(cluster: &Cluster, workspace: Workspace) -> Self {
        let now = Cluster::now();
        let namespace = workspace.namespace().unwrap_or_default();
        let volume = async {
            let name = volume_name(&workspace)?;
            cluster.namespaced::<Volume>(&namespace).get_opt(&name).await.ok().flatten()
        };
        let template =
            async { cluster.cluster_wide::<Template>().get_opt(&workspace.spec.template).await.ok().flatten() };
        let (volume, template, events) = tokio::join!(volume, template, cluster.events(&workspace, now));
        Self { workspace, template, volume, events, now }
    }

    /// An amount of the Workspace's own, or the Template's.
    fn amount(&self, own: Option<String>, of_template: impl Fn(&Template) -> String) -> String {
        own.unwrap_or_else(|| match &self.template {
            Some(template) => format!("{} (Template)", of_template(template)),
            None => "what the Template says".to_owned(),
        })
    }

    fn layer(&self, status: &WorkspaceStatus) -> String {
        let view = layer_view(&self.workspace, status);
        let size = self.amount(view.size, |template| template.spec.writable_layer.size.to_string());
        let place = match (view.pool_id, view.created) {
            (Some(pool), true) => format!(" in pool {pool}"),
            (Some(pool), false) => format!(", not made yet, in pool {pool}"),
            (None, _) => ", not made yet".to_owned(),
        };
        format!("{size}{place}")
    }

    fn volume(&self) -> String {
        let (Some(binding), Some(name)) = (&self.workspace.spec.volume, volume_name(&self.workspace)) else {
            return String::new();
        };
        let mut text = format!("{name} at {}", binding.mount_path);
        if let Some(volume) = &self.volume {
            let _ = write!(text, ", {}", volume.spec.size);
            match volume.status.as_ref().and_then(|status| status.pool.as_ref()) {
                Some(pool) => _ = write!(text, " in pool {pool}"),
                None => text.push_str(", not made yet"),
            }
        } else if let Some(new) = &binding.new {
            let _ = write!(text, ", {}, not made yet", new.size);
        }
        if binding.delete_with_workspace {
            text.push_str("; deleted with the Workspace");
        }
        text
    }

    fn last_request(&self) -> String {
        let view = power_view(&self.workspace);
        let mut text = view.state;
        if let Some(mode) = view.stop_mode {
            let _ = write!(text, " ({mode})");
        }
        if let Some(node) = view.node_id {
            let _ = write!(text, " on {node}");
        }
        if !view.consumed {
            text.push_str(", not acted upon yet");
        }
        text
    }

    fn resources(&self, page: &mut Page, status: &WorkspaceStatus) {
        let own = self.workspace.spec.resources.as_ref();
        let cpu = own.and_then(|r| r.cpu.as_ref()).map(ToString::to_string);
        let memory = own.and_then(|r| r.memory.as_ref()).map(ToString::to_string);
        page.fact("CPU", self.amount(cpu, |template| template.spec.resources.cpu.to_string()));
        page.fact("Memory", self.amount(memory, |template| template.spec.resources.memory.to_string()));
        page.fact("Writable layer", self.layer(status));
        page.fact_if("Volume", Some(self.volume()));
    }
}

/// Whether a condition says what the state has not said.
fn adds(condition: &Condition, status: &WorkspaceStatus) -> bool {
    is_telling(condition) && Some(&condition.message) != status.message.as_ref()
}

impl Present for One {
    fn view(&self) -> impl Serialize {
        View::from(&self.workspace)
    }

    fn names(&self) -> Vec<String> {
        vec![id_or_name(&self.workspace)]
    }

    fn text(&self, wide: bool) -> String {
        let status = self.workspace.status.clone().unwrap_or_default();
        let mut page = Page::default();
        page.fact("Name", self.workspace.name_any());
        page.fact("Namespace", self.workspace.namespace().unwrap_or_default());
        page.fact("ID", or_absent(status.id));
        page.state("State", state(&status, self.now));
        page.fact_if("Waits for", waits(&status));
        page.fact("Node", or_absent(status.execution.as_ref().map(|execution| &execution.node)));
        page.fact_if("Address", status.execution.as_ref().and_then(|execution| execution.address.clone()));
        if wide {
            page.fact("Instance", or_absent(status.execution.as_ref().map(|execution| execution.instance_id)));
        }
        if let (None, Some(last)) = (&status.execution, &status.last_execution) {
            let ended = when(Some(&last.ended_at), self.now, wide);
            page.fact("Last run", format!("on {}, ended {ended}: {}", last.node, word(&last.reason)));
        }
        // What was asked for and done is seen at the state.
        if wide || !self.workspace.is_power_request_consumed() {
            page.fact("Last request", self.last_request());
        }
        page.fact("Template", &self.workspace.spec.template);
        self.resources(&mut page, &status);
        let pairs = |map: &BTreeMap<String, String>| {
            map.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join("\n")
        };
        page.fact_if("Node selector", Some(pairs(&self.workspace.spec.node_selector)));
        page.fact_if("Labels", Some(pairs(self.workspace.labels())));
        page.fact_if("Annotations", Some(pairs(&self.workspace.spec.annotations)));
        page.fact("Created", when(self.workspace.creation_timestamp().as_ref(), self.now, wide));
        if let Some(execution) = &status.execution {
            page.fact("Started", when(Some(&execution.started_at), self.now, wide));
        }
        if wide {
            self.details(&mut page, &status);
        }
        let shown = status.conditions.iter().filter(|condition| wide || adds(condition, &status));
        page.section("Conditions", conditions(shown, self.now));
        page.section("Events", self.events.clone());
        page.render()
    }
}

impl One {
    fn details(&self, page: &mut Page, status: &WorkspaceStatus) {
        let execution = status.execution.as_ref();
        page.fact("Allocated CPU", or_absent(execution.map(|execution| cores(execution.cpu_milli))));
        page.fact("Allocated memory", or_absent(execution.map(|execution| binary(execution.memory_bytes))));
        let holder = status.holder.as_ref();
        page.fact("Layer held by", or_absent(holder.map(|holder| &holder.node)));
        page.fact("Layer epoch", or_absent(status.epoch));
        page.fact("UID", self.workspace.uid().unwrap_or_default());
    }
}

/// The id, which the operator gives in its first look, else the name.
fn id_or_name(workspace: &Workspace) -> String {
    let id = workspace.status.as_ref().and_then(|status| status.id);
    id.map_or_else(|| workspace.name_any(), |id| id.to_string())
}

/// A list of Workspaces.
pub struct Many {
    pub listed: Listed<Workspace>,
    /// They come from several namespaces.
    pub namespaces: bool,
    pub now: Timestamp,
}

#[derive(Serialize)]
struct ManyView {
    workspaces: Vec<View>,
    next_page_token: Option<String>,
}

impl Present for Many {
    fn view(&self) -> impl Serialize {
        ManyView {
            workspaces: self.listed.items.iter().map(View::from).collect(),
            next_page_token: self.listed.next_page_token.clone(),
        }
    }

    fn names(&self) -> Vec<String> {
        self.listed.items.iter().map(id_or_name).collect()
    }

    fn text(&self, wide: bool) -> String {
        let mut table = Table::new(["NAME", "STATE", "REASON", "TEMPLATE", "AGE"]);
        if self.namespaces {
            table = table.column_before("NAMESPACE");
        }
        if wide {
            table = table.columns(["ID", "INSTANCE", "NODE", "VOLUME"]);
        }
        for workspace in &self.listed.items {
            let status = workspace.status.clone().unwrap_or_default();
            let mut row = vec![
                workspace.name_any(),
                status.phase.as_ref().map(enum_word).unwrap_or_default(),
                status.reason.as_deref().map(word).unwrap_or_default(),
                workspace.spec.template.clone(),
                age(workspace.creation_timestamp().as_ref(), self.now),
            ];
            if self.namespaces {
                row.insert(0, workspace.namespace().unwrap_or_default());
            }
            if wide {
                row.push(or_absent(status.id));
                row.push(or_absent(status.execution.as_ref().map(|execution| execution.instance_id)));
                row.push(or_absent(status.execution.as_ref().map(|execution| &execution.node)));
                row.push(volume_name(workspace).unwrap_or_default());
            }
            table.row(row);
        }
        table.render()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn available() -> Workspace {
        serde_json::from_value(json!({
            "metadata": { "name": "dev", "namespace": "default", "creationTimestamp": "1970-01-01T00:00:00Z" },
            "spec": {
                "template": "debian-12",
                "volume": { "new": { "size": "1Gi" }, "mountPath": "/data" },
                "power": { "state": "Running", "requestId": "a", "whenUnplaceable": "Fail" },
            },
            "status": {
                "id": "ws-01kb8z4w3w0000000000000000", "phase": "Available",
                "power": {
                    "consumed": { "state": "Running", "requestId": "a", "whenUnplaceable": "Fail" },
                    "consumedAt": "1970-01-01T00:00:01Z",
                },
                "execution": {
                    "instanceId": "inst-01kb8z4w3w0000000000000001", "node": "node-1", "incarnation": 1,
                    "cpuMilli": 1000, "memoryBytes": 335_544_320, "lastSeq": 2, "startedAt": "1970-01-01T00:00:02Z",
                },
                "writableLayer": { "pool": "local-a", "size": 1_073_741_824, "created": true },
                "conditions": [
                    { "type": "Available", "status": "True", "reason": "GuestReady", "message": "", "lastTransitionTime": "1970-01-01T00:00:03Z" },
                    { "type": "NodeReachable", "status": "False", "reason": "NodeOffline", "message": "node-1 is silent", "lastTransitionTime": "1970-01-01T00:00:03Z" },
                ],
            },
        }))
        .unwrap()
    }

    fn failed() -> Workspace {
        serde_json::from_value(json!({
            "metadata": { "name": "big", "namespace": "team" },
            "spec": { "template": "debian-12" },
            "status": { "phase": "Failed", "reason": "ResourceExhausted", "message": "no node has 1Ti of memory" },
        }))
        .unwrap()
    }

    fn now() -> Timestamp {
        Timestamp::from_second(120).unwrap()
    }

    #[test]
    fn the_table_of_workspaces() {
        let listed = Listed { items: vec![available(), failed()], next_page_token: None };
        let mut many = Many { listed, namespaces: false, now: now() };
        let expected = "\
NAME   STATE       REASON               TEMPLATE    AGE
dev    AVAILABLE   -                    debian-12   2m
big    FAILED      RESOURCE_EXHAUSTED   debian-12   -
";
        assert_eq!(many.text(false), expected);
        many.namespaces = true;
        let expected = "\
NAMESPACE   NAME   STATE       REASON               TEMPLATE    AGE   ID                              INSTANCE                          NODE     VOLUME
default     dev    AVAILABLE   -                    debian-12   2m    ws-01kb8z4w3w0000000000000000   inst-01kb8z4w3w0000000000000001   node-1   dev
team        big    FAILED      RESOURCE_EXHAUSTED   debian-12   -     -                               -                                 -        -
";
        assert_eq!(many.text(true), expected);
        assert_eq!(many.names(), ["ws-01kb8z4w3w0000000000000000", "big"]);
    }

    #[test]
    fn the_page_says_what_it_is_where_it_runs_and_what_is_wrong() {
        let mut events = Table::new(["AGE", "TYPE", "REASON", "MESSAGE"]);
        events.row(["2m", "Normal", "Started", "on node-1"].map(str::to_owned).into());
        let one = One { workspace: available(), template: None, volume: None, events, now: now() };
        let expected = "\
Name:             dev
Namespace:        default
ID:               ws-01kb8z4w3w0000000000000000
State:            AVAILABLE for 117s
Node:             node-1
Template:         debian-12
CPU:              what the Template says
Memory:           what the Template says
Writable layer:   1Gi in pool local-a
Volume:           dev at /data, 1Gi, not made yet
Created:          2m ago
Started:          118s ago

Conditions:
  TYPE            STATUS   AGE    REASON        MESSAGE
  NodeReachable   False    117s   NodeOffline   node-1 is silent

Events:
  AGE   TYPE     REASON    MESSAGE
  2m    Normal   Started   on node-1
";
        assert_eq!(one.text(false), expected);
    }

    #[test]
    fn a_failed_workspace_says_why() {
        let one = One { workspace: failed(), template: None, volume: None, events: Table::default(), now: now() };
        assert!(
            one.text(false).contains(
                "State:            FAILED (RESOURCE_EXHAUSTED)\n                  no node has 1Ti of memory\n"
            ),
            "{}",
            one.text(false)
        );
    }

    #[test]
    fn the_json_of_a_workspace() {
        let view = serde_json::to_value(View::from(&available())).unwrap();
        assert_eq!(view["workspace_id"], "ws-01kb8z4w3w0000000000000000");
        assert_eq!(view["state"], "AVAILABLE");
        assert_eq!(view["reason"], json!(null));
        assert_eq!(view["node_id"], "node-1");
        assert_eq!(view["execution"]["cpu_millis"], 1000);
        assert_eq!(view["writable_layer"], json!({ "size": "1Gi", "pool_id": "local-a", "created": true }));
        assert_eq!(view["volume"], json!({ "name": "dev", "mount_path": "/data", "delete_with_workspace": false }));
        assert_eq!(
            view["power"],
            json!({
                "state": "RUNNING", "command_id": "a", "stop_mode": null, "node_id": null,
                "when_unplaceable": "FAIL", "consumed": true,
            })
        );
        assert_eq!(view["conditions"][1]["type"], "NODE_REACHABLE");
        assert_eq!(view["conditions"][1]["reason"], "NODE_OFFLINE");
    }
}
