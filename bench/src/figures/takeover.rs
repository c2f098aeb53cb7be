//! A Workspace whose host died, on another node of the same pool.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use jiff::Timestamp;
use kibo_crds::{
    Workspace,
    node::{Node, NodePhase},
    workspace::WorkspacePhase,
};
use kibo_e2e::{
    local::{Component, LocalPool},
    suite,
};
use kibo_node_daemon::pool;
use kube::{
    Api, Resource,
    api::{DeleteParams, Patch, PatchParams},
    runtime::wait::await_condition,
};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::between;
use crate::{
    bare::Bare,
    report::{Aim, Section, millis, ratio},
    site::{NAME, Site, workspace},
    spread::Spread,
};

const ROUNDS: usize = 5;
const AIM: Aim = Aim::AtMost(1.2);
const LIMIT: Duration = Duration::from_secs(300);
const WORKSPACE: &str = "taken";
const POOL: &str = "takeover";
const SURVIVOR: &str = "survivor";

const EXPLAINED: &str = "\
A host dies with a Workspace whose disk is in a pool that another node has too: its daemon and its VM are killed. When its Node \
is Unreachable its isolation is ordered; from that moment to the one in which a watch shows the Workspace as Available on the \
other node, beside a bare boot from a copy of the disk as the dead host left it (the guest has a file system to recover in both), \
in turns.";

/// In milliseconds.
struct Round {
    isolated: f64,
    started: f64,
    bare: f64,
}

pub async fn measure(site: &Site) -> Result<Vec<Section>> {
    let bare = Bare::new(site)?;
    attach(site, SURVIVOR).await?;
    let mut rounds = Vec::new();
    // What is read from disk for the first time is nobody's cost.
    for number in 0..=ROUNDS {
        let round = round(site, &bare, &format!("dies-{number}")).await?;
        if number > 0 {
            rounds.push(round);
        }
    }
    site.clear().await?;
    site.cluster().stop(&Component::Node(SURVIVOR.to_owned())).await?;

    let mut section = Section::new("A takeover", EXPLAINED, ["", "median", "min", "max", "aim", ""]);
    let spread = |part: fn(&Round) -> f64| Spread::of(rounds.iter().map(part));
    section.row("isolation ordered to carried out", spread(|round| round.isolated).cells(millis));
    section.row("start ordered to Available", spread(|round| round.started).cells(millis));
    section.row("bare boot", spread(|round| round.bare).cells(millis));
    let whole = spread(|round| (round.isolated + round.started) / round.bare);
    section.row("ratio", whole.cells(ratio).into_iter().chain(AIM.cells(whole.median, ratio)));
    Ok(vec![section])
}

/// A node with the pool that they share.
async fn attach(site: &Site, id: &str) -> Result<()> {
    let mut node = site.cluster().usual_node(id, "64", "64Gi", false);
    let path = site.directory(POOL);
    fs::create_dir_all(&path)?;
    node.pools = vec![LocalPool { id: POOL.to_owned(), path, default: true }];
    let component = site.cluster().add_node(node)?;
    site.cluster().start(&component).await?;
    Ok(())
}

async fn round(site: &Site, bare: &Bare, dies: &str) -> Result<Round> {
    attach(site, dies).await?;
    let (workspaces, nodes) = (site.workspaces().await?, Api::<Node>::all(site.client().await?));
    let on = |node: &str, request: &str| json!({ "state": "Running", "node": node, "requestId": request });
    site.apply(&[workspace(WORKSPACE, json!({ "power": on(dies, "first") }))]).await?;
    runs_on(&workspaces, dies).await?;

    site.cluster().kill(&Component::Node(dies.to_owned())).await?;
    site.cluster().end_virtual_machines(dies).await?;
    let left = copy_of_disk(site)?;
    // Nobody declares a host dead that is not known to be silent.
    let phase = |node: &Node| node.status.as_ref().and_then(|status| status.phase);
    until(&nodes, dies, "is Unreachable", |node| phase(node) == Some(NodePhase::Unreachable)).await?;

    let ordered = Timestamp::now();
    let isolation = json!({ "incarnation": 1, "confirmHostCannotWrite": true, "requestId": "bench" });
    patch(&nodes, dies, &json!({ "spec": { "isolation": isolation } })).await?;
    let has_failed = |it: &Workspace| suite::phase_of(it) == Some(WorkspacePhase::Failed);
    until(&workspaces, WORKSPACE, "is free", has_failed).await?;
    let isolated = Timestamp::now();
    patch(&workspaces, WORKSPACE, &json!({ "spec": { "power": on(SURVIVOR, "second") } })).await?;
    runs_on(&workspaces, SURVIVOR).await?;
    let seen = Timestamp::now();

    workspaces.delete(WORKSPACE, &DeleteParams::default()).await?;
    site.clear().await?;
    let times = bare.boot_from(&left).await?.times;
    let (isolated, started) = (between(ordered, isolated), between(isolated, seen));
    Ok(Round { isolated, started, bare: between(times.begun, times.ready) })
}

/// Of the only one that there is in the pool.
fn copy_of_disk(site: &Site) -> Result<PathBuf> {
    let objects = site.directory(POOL).join("objects");
    let mut disks = fs::read_dir(&objects)?;
    let disk = disks.next().with_context(|| format!("no disk is in {}", objects.display()))??.path();
    ensure!(disks.next().is_none(), "more than one disk is in {}", objects.display());
    let copy = site.directory("left.raw");
    let copied = Command::new("cp").arg("--sparse=always").arg(disk.join(pool::IMAGE)).arg(&copy).status()?;
    ensure!(copied.success(), "cp failed");
    fs::File::open(&copy)?.sync_all()?;
    Ok(copy)
}

async fn patch<K>(api: &Api<K>, name: &str, change: &serde_json::Value) -> Result<()>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.map(drop).context("failed to patch")
}

async fn runs_on(workspaces: &Api<Workspace>, node: &str) -> Result<()> {
    let runs_there = |it: &Workspace| {
        let execution = it.status.as_ref().and_then(|status| status.execution.as_ref());
        suite::is_available(it) && execution.is_some_and(|execution| execution.node.as_str() == node)
    };
    until(workspaces, WORKSPACE, &format!("runs on {node} in {NAME}"), runs_there).await
}

async fn until<K>(api: &Api<K>, name: &str, what: &str, reached: impl Fn(&K) -> bool) -> Result<()>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
    K::DynamicType: Default,
{
    let condition = |object: Option<&K>| object.is_some_and(&reached);
    match tokio::time::timeout(LIMIT, await_condition(api.clone(), name, condition)).await {
        Ok(seen) => ensure!(seen?.is_some(), "{name} is gone"),
        Err(_) => bail!("{name}: {what}: not within {LIMIT:?}"),
    }
    Ok(())
}
