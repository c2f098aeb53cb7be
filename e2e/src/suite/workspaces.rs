//! What the tests say about Workspaces: manifests, commands inside, and what of them is on the host.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kibo_crds::Workspace;
use kibo_crds::workspace::WorkspacePhase;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use super::place::Place;
use super::wait::eventually;
use crate::local::process::virtual_machines;
use crate::local::{ProcessId, cgroups_of, network_of};

/// Seconds that a start may take, with other guests booting on the same two cores.
pub const START: u64 = 90;

/// Seconds that a stop may take.
pub const STOP: u64 = 60;

impl Place {
    /// The name of this test's Template: there is one once a Workspace was created.
    pub fn template_name(&self) -> String {
        self.namespace().to_owned()
    }

    /// A Template of a small guest: the least memory that is allowed.
    pub fn template(&self) -> Value {
        json!({
            "apiVersion": "kibotos.dev/v1alpha1", "kind": "Template",
            "metadata": {"name": self.template_name()},
            "spec": {
                "rootImage": "debian-12",
                "resources": {"cpu": "1", "memory": "128Mi"},
                "writableLayer": {"size": "256Mi"},
            },
        })
    }

    /// A Workspace of this test's Template, on this test's nodes.
    pub fn workspace_manifest(&self, name: &str) -> Value {
        let (key, value) = self.selector();
        json!({
            "apiVersion": "kibotos.dev/v1alpha1", "kind": "Workspace",
            "metadata": {"name": name},
            "spec": {"template": self.template_name(), "nodeSelector": {key: value}},
        })
    }

    /// Creates the Template, unless it is there.
    pub async fn ensure_template(&self) -> Result<()> {
        match self.create(self.template()).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            outcome => outcome.map(drop).context("failed to create the Template"),
        }
    }

    /// Creates a Workspace with something more in its spec.
    pub async fn create_workspace(&self, name: &str, spec: Value) -> Result<()> {
        self.ensure_template().await?;
        let mut manifest = self.workspace_manifest(name);
        if let (Some(all), Value::Object(more)) = (manifest["spec"].as_object_mut(), spec) {
            all.extend(more);
        }
        self.create(manifest).await.map(drop).with_context(|| format!("failed to create Workspace {name}"))
    }

    /// Replaces the power request of a Workspace.
    pub async fn power(&self, name: &str, power: Value) -> Result<()> {
        // A merge keeps what it does not name: what the new request does not have is taken away.
        let mut replaced = json!({"requestId": null, "stopMode": null, "node": null, "whenUnplaceable": null});
        if let (Some(all), Value::Object(given)) = (replaced.as_object_mut(), power) {
            all.extend(given);
        }
        let api: Api<Workspace> = self.api();
        api.patch(name, &PatchParams::default(), &Patch::Merge(json!({"spec": {"power": replaced}}))).await?;
        Ok(())
    }

    /// Waits until a Workspace is available, and says at once when it has failed instead.
    pub async fn available(&self, name: &str) -> Result<Workspace> {
        // An earlier failure stands until the new request is consumed.
        let settled = |it: &Workspace| is_available(it) || (has_failed(it) && it.is_power_request_consumed());
        let workspace = self.workspace(name, "is available", START, settled).await?;
        ensure!(is_available(&workspace), "{name} failed: {}", why(&workspace));
        Ok(workspace)
    }

    /// Waits until a Workspace is in this phase and its request is consumed.
    pub async fn phase(&self, name: &str, phase: WorkspacePhase, seconds: u64) -> Result<Workspace> {
        let reached = |it: &Workspace| phase_of(it) == Some(phase) && it.is_power_request_consumed();
        self.workspace(name, &format!("is {phase:?}"), seconds, reached).await
    }

    /// Runs a shell line in a Workspace and gives what it printed.
    pub async fn sh(&self, name: &str, line: &str) -> Result<String> {
        let ran = self.kibo(&["workspace", "exec", name, "--", "sh", "-c", line]).await?;
        Ok(ran.ok().with_context(|| format!("in {name}: {line}"))?.trim_end().to_owned())
    }

    /// The QEMU process of a Workspace's execution.
    pub fn vm(&self, workspace: &Workspace) -> Result<ProcessId> {
        let (node, instance) = execution(workspace)?;
        let found = virtual_machines(&node).into_iter().find(|vm| vm.instance == instance);
        Ok(found.with_context(|| format!("no process of {instance}"))?.id)
    }

    /// Waits until nothing of an Instance is on the host any more.
    pub async fn no_trace_of(&self, node: &str, instance: &str) -> Result<()> {
        let limit = Duration::from_secs(10);
        eventually(&format!("nothing is left of {instance}"), limit, || async {
            let traces = self.traces_of(node, instance);
            ensure!(traces.is_empty(), "still there: {}", traces.join(", "));
            Ok(Some(()))
        })
        .await
    }

    fn traces_of(&self, node: &str, instance: &str) -> Vec<String> {
        let vms = virtual_machines(node).into_iter().filter(|vm| vm.instance == instance);
        let directory = self.cluster().layout().node(node).join("state/instances").join(instance);
        let cgroups = cgroups_of(node).into_iter().filter(|path| path.ends_with(instance));
        let paths = cgroups.chain(directory.exists().then_some(directory));
        let found = vms.map(|vm| format!("process {}", vm.id.pid)).chain(paths.map(|path| path.display().to_string()));
        found.chain(network_of(instance)).collect()
    }
}

pub fn phase_of(workspace: &Workspace) -> Option<WorkspacePhase> {
    workspace.status.as_ref()?.phase
}

/// Whether the condition Available holds, and the request in force is what brought it about.
pub fn is_available(workspace: &Workspace) -> bool {
    condition(workspace, "Available").is_some_and(|it| it.status == "True") && workspace.is_power_request_consumed()
}

pub fn has_failed(workspace: &Workspace) -> bool {
    phase_of(workspace) == Some(WorkspacePhase::Failed)
}

pub fn condition<'a>(workspace: &'a Workspace, kind: &str) -> Option<&'a Condition> {
    workspace.status.as_ref()?.conditions.iter().find(|it| it.type_ == kind)
}

/// The reason and message of a status, in one text for an assertion.
pub fn why(workspace: &Workspace) -> String {
    let status = workspace.status.clone().unwrap_or_default();
    format!("{}: {}", status.reason.unwrap_or_default(), status.message.unwrap_or_default())
}

/// The node and the id of a Workspace's execution.
pub fn execution(workspace: &Workspace) -> Result<(String, String)> {
    let status = workspace.status.as_ref().context("it has no status")?;
    let execution = status.execution.as_ref().context("it holds no execution")?;
    Ok((execution.node.to_string(), execution.instance_id.to_string()))
}
