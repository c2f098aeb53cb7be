//! The page of one Workspace.

use std::{collections::BTreeMap, fmt::Write as _};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kibo_crds::{
    Template, Volume, Workspace,
    workspace::{Egress, WorkspacePhase, WorkspaceStatus},
};
use kube::ResourceExt as _;
use serde::Serialize;

use super::{
    power::obstacle,
    view::{View, id_or_name, layer_view, power_view, volume_name},
};
use crate::{
    client::Cluster,
    output::{
        Page, Present, Table, conditions, is_telling,
        words::{age, binary, cores, enum_word, or_absent, when, word},
    },
};

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

/// Where it runs. One that runs, of which the control plane does not say where, is served by an older release.
fn node(status: &WorkspaceStatus) -> String {
    match (&status.execution, status.phase) {
        (None, Some(WorkspacePhase::Available)) => "unknown".to_owned(),
        (execution, _) => or_absent(execution.as_ref().map(|execution| &execution.node)),
    }
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
    pub workspace: Workspace,
    pub template: Option<Template>,
    pub volume: Option<Volume>,
    pub events: Table,
    pub now: Timestamp,
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
        let growth = view.grows_to.map(|size| format!(", {size} from the next start on")).unwrap_or_default();
        format!("{size}{place}{growth}")
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
        page.fact_if("Move of the layer", crate::moving::fact(status.r#move.as_ref()));
        page.fact_if("Volume", Some(self.volume()));
        page.fact_if("Transfer", crate::transfer::fact(status.transfer.as_ref()));
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
        page.fact("Node", node(&status));
        let is_cut_off = self.workspace.spec.network.as_ref().and_then(|network| network.egress) == Some(Egress::Deny);
        page.fact_if("Egress", is_cut_off.then(|| "denied: it reaches nothing beyond its host".to_owned()));
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
