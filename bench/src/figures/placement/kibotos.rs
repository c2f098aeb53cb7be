//! The operator's part: nodes that take what they are offered, and Workspaces.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kibo_crds::{Node, Template, Workspace};
use kibo_e2e::{
    fleet::{Fleet, ROOT_IMAGE},
    suite::eventually,
};
use kube::{
    Api,
    api::{ListParams, PostParams},
};
use serde_json::json;

use super::{
    arena::{Arena, NAME},
    contest::{Contest, Score},
};
use crate::site::MEMORY_MIB;

/// Until the last node takes Workspaces.
const SET_UP_WITHIN: Duration = Duration::from_secs(900);
/// Looking at thousands of Nodes is no small thing to ask for.
const LOOK: Duration = Duration::from_secs(2);

pub async fn play(arena: &Arena<'_>, nodes: u32, objects: u32) -> Result<Score> {
    let client = arena.client().await?;
    let templates: Api<Template> = Api::all(client.clone());
    let template = serde_json::from_value(json!({
        "metadata": { "name": NAME },
        "spec": {
            "rootImage": ROOT_IMAGE,
            "resources": { "cpu": "1", "memory": format!("{MEMORY_MIB}Mi") },
            "writableLayer": { "size": "256Mi" },
        },
    }))?;
    templates.create(&PostParams::default(), &template).await.context("failed to create the Template")?;
    let endpoint = format!("https://127.0.0.1:{}", arena.cluster.ports().session);
    let fleet = Fleet::begin(&arena.cluster, usize::try_from(nodes)?, &[endpoint]).await?;
    all_take_workspaces(&Api::all(client.clone()), nodes).await?;
    let contest = Contest { arena, api: Api::namespaced(client, NAME), make: workspace, is_placed };
    let score = contest.play(objects).await;
    fleet.end().await?;
    score
}

async fn all_take_workspaces(api: &Api<Node>, nodes: u32) -> Result<()> {
    let probe = async || {
        tokio::time::sleep(LOOK).await;
        let all = api.list(&ListParams::default()).await?.items;
        let conditions = |node: &Node| node.status.clone().unwrap_or_default().conditions;
        let is_schedulable =
            |node: &&Node| conditions(node).iter().any(|it| it.type_ == "Schedulable" && it.status == "True");
        let ready = all.iter().filter(is_schedulable).count();
        ensure!(ready == usize::try_from(nodes)?, "{ready} of {nodes} do");
        Ok(Some(()))
    };
    eventually("all nodes take Workspaces", SET_UP_WITHIN, probe).await
}

fn workspace(name: &str) -> Result<Workspace> {
    Ok(serde_json::from_value(json!({ "metadata": { "name": name }, "spec": { "template": NAME } }))?)
}

fn is_placed(workspace: &Workspace) -> bool {
    workspace.status.as_ref().is_some_and(|status| status.execution.is_some())
}
