//! What a stored Workspace is made of.

use anyhow::{Context as _, Result, ensure};
use kibo_crds::Workspace;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{
    report::{Aim, Section},
    site::Site,
    watch::Watch,
};

const EXPLAINED: &str = "\
A Workspace as JSON without spaces, which is what etcd keeps of it: one with a Volume that runs, and one without after it was \
started, stopped and started by commands with an id. Each of these stays on record for a day, the last 16 of them. What owners \
of fields are kept is the API server's own.";

const AIM: Aim = Aim::AtMost(2048.0);

/// The parts that are worth a line; the status has more.
const PARTS: [&[&str]; 8] = [
    &["metadata"],
    &["metadata", "managedFields"],
    &["spec"],
    &["status"],
    &["status", "conditions"],
    &["status", "commands"],
    &["status", "revisions"],
    &["status", "execution"],
];

/// `running` runs, with a Volume; `stopped` is stopped, without.
pub async fn measure(site: &Site, watch: &Watch, running: &str, stopped: &str) -> Result<Section> {
    for (number, state) in [(1, "Running"), (2, "Stopped"), (3, "Running")] {
        // As long as those that kibo makes.
        let id = format!("cmd-01k6{number:022}");
        let patch = json!({ "spec": { "power": { "state": state, "requestId": id } } });
        site.workspaces().await?.patch(stopped, &PatchParams::default(), &Patch::Merge(patch)).await?;
        match state {
            "Running" => drop(watch.available(&[stopped.to_owned()]).await?),
            _ => watch.stopped(stopped).await?,
        }
    }
    let (plain, commanded) = (stored(site, running).await?, stored(site, stopped).await?);
    let commands = commanded.pointer("/status/commands").and_then(Value::as_array).map_or(0, Vec::len);
    ensure!(commands == 3, "{commands} commands are on record");
    let header = ["", "runs, with a Volume", "after three commands", "aim", ""];
    let mut section = Section::new("A stored Workspace", EXPLAINED, header);
    let [aim, met] = AIM.cells(bytes(&commanded), shown);
    section.row("all", [shown(bytes(&plain)), shown(bytes(&commanded)), aim, met]);
    for part in PARTS {
        let pointer = format!("/{}", part.join("/"));
        let of = |object: &Value| object.pointer(&pointer).map_or_else(String::new, |part| shown(bytes(part)));
        section.row(&part.join("."), [of(&plain), of(&commanded)]);
    }
    Ok(section)
}

/// Its version is no part of what is stored.
async fn stored(site: &Site, name: &str) -> Result<Value> {
    let mut workspace: Workspace = site.workspaces().await?.get(name).await?;
    workspace.metadata.resource_version = None;
    serde_json::to_value(workspace).context("a Workspace is plain data")
}

fn bytes(value: &Value) -> f64 {
    super::as_float(value.to_string().len())
}

fn shown(bytes: f64) -> String {
    format!("{bytes:.0} B")
}
