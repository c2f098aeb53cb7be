//! kube-scheduler's part: Nodes without kubelets, and Pods.

use std::{
    fs::{self, File},
    process::Stdio,
};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::json;
use tokio::process::{Child, Command};

use super::{
    arena::{Arena, NAME},
    contest::{Contest, Score},
};
use crate::site::MEMORY_MIB;

/// Nodes that are made at once.
const SIDE_BY_SIDE: usize = 16;

pub async fn play(arena: &Arena<'_>, nodes: u32, objects: u32) -> Result<Score> {
    let client = arena.client().await?;
    let api: Api<Node> = Api::all(client.clone());
    let make = async |number| {
        let node = node(number)?;
        api.create(&PostParams::default(), &node).await.context("failed to create a Node of Kubernetes").map(drop)
    };
    stream::iter(0..nodes).map(make).buffer_unordered(SIDE_BY_SIDE).try_collect::<()>().await?;
    let mut scheduler = start(arena)?;
    let pods: Api<Pod> = Api::namespaced(client, NAME);
    let contest = Contest { arena, api: pods.clone(), make: pod, is_placed };
    let score = contest.play(objects).await;
    scheduler.kill().await.context("failed to end kube-scheduler")?;
    // Nothing of it is left in the caches of the API server when the operator's turn comes.
    let at_once = DeleteParams::default().grace_period(0);
    pods.delete_collection(&at_once, &ListParams::default()).await?;
    api.delete_collection(&at_once, &ListParams::default()).await?;
    score
}

fn start(arena: &Arena<'_>) -> Result<Child> {
    let layout = arena.cluster.layout();
    let config = layout.root().join("kube-scheduler.json");
    let text = json!({
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": { "leaderElect": false },
        "clientConnection": { "kubeconfig": layout.kubeconfig(), "qps": 100_000, "burst": 100_000 },
    });
    fs::write(&config, text.to_string()).context("failed to write the configuration of kube-scheduler")?;
    let log = File::create(layout.root().join("kube-scheduler.log")).context("failed to make kube-scheduler's log")?;
    Command::new(arena.cluster.programs().kube_scheduler()?)
        .arg("--config")
        .arg(&config)
        // It serves nobody: only its placements are of interest.
        .args(["--secure-port", "0"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .context("failed to run kube-scheduler")
}

/// As large as the simulated nodes of the operator.
fn node(number: u32) -> Result<Node> {
    let amounts = json!({ "cpu": "16", "memory": "64Gi", "pods": "110" });
    Ok(serde_json::from_value(json!({
        "metadata": { "name": format!("node-{number}") },
        "status": {
            "capacity": amounts, "allocatable": amounts,
            "conditions": [{ "type": "Ready", "status": "True", "reason": "Simulated" }],
        },
    }))?)
}

fn pod(name: &str) -> Result<Pod> {
    let requests = json!({ "cpu": "1", "memory": format!("{MEMORY_MIB}Mi") });
    Ok(serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": {
            "containers": [{ "name": "main", "image": "none", "resources": { "requests": requests } }],
            "automountServiceAccountToken": false,
            // New Nodes are tainted until a controller has seen them, and here is none.
            "tolerations": [{ "operator": "Exists" }],
        },
    }))?)
}

fn is_placed(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some())
}
