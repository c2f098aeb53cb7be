//! How long a changed ratio keeps a node closed.

use std::pin::pin;

use anyhow::{Context as _, Result};
use futures::TryStreamExt as _;
use jiff::Timestamp;
use kibo_crds::Node;
use kube::{
    Api,
    api::{Patch, PatchParams},
    runtime::{WatchStreamExt as _, watcher},
};
use serde_json::json;

use super::between;
use crate::{
    report::{Aim, Section, millis},
    site::{NAME, Site},
    spread::Spread,
};

const CHANGES: u32 = 100;

const EXPLAINED: &str = "\
From the moment in which an overcommit ratio of a node is changed, before the request to the API server, to the one in which a \
watch on the Node shows that the node itself admits by it and takes Workspaces again; a hundred changes, one after the other. \
The node's confirmation is a message of some milliseconds; the rest is the two writes to the API server and the two watches.";

pub async fn measure(site: &Site) -> Result<Vec<Section>> {
    let nodes: Api<Node> = Api::all(site.client().await?);
    let config = watcher::Config::default().fields(&format!("metadata.name={NAME}"));
    let mut shown = pin!(watcher(nodes.clone(), config).default_backoff().applied_objects());
    let mut measured = Vec::new();
    for change in 0..CHANGES {
        let ratio = if change % 2 == 0 { "2" } else { "1" };
        let patch = Patch::Merge(json!({ "spec": { "overcommit": { "cpu": ratio } } }));
        let begun = Timestamp::now();
        nodes.patch(NAME, &PatchParams::default(), &patch).await.context("failed to change the ratio")?;
        while !is_confirmed(&shown.try_next().await?.context("the watch ended")?, ratio) {}
        measured.push(between(begun, Timestamp::now()));
    }
    nodes.patch(NAME, &PatchParams::default(), &Patch::Merge(json!({ "spec": { "overcommit": null } }))).await?;

    let header = ["", "median", "min", "max", "aim", ""];
    let mut section = Section::new("A changed ratio", EXPLAINED, header);
    let spread = Spread::of(measured);
    section.row(
        "change to confirmation",
        spread.cells(millis).into_iter().chain(Aim::AtMost(100.0).cells(spread.median, millis)),
    );
    Ok(vec![section])
}

fn is_confirmed(node: &Node, ratio: &str) -> bool {
    let Some(status) = &node.status else { return false };
    let is_open = status.conditions.iter().any(|it| it.type_ == "Schedulable" && it.status == "True");
    is_open && status.overcommit.as_ref().is_some_and(|overcommit| overcommit.cpu.to_string() == ratio)
}
