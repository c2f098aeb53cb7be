//! Where Workspaces go: room, spread, pins, and never more than a node has.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures::{StreamExt as _, TryStreamExt as _};
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{MilliCpu, Node, WORKSPACE_FINALIZER, Workspace};
use kibo_e2e::local::process::virtual_machines;
use kibo_e2e::suite::{Place, START, STOP, Suite, condition, eventually, execution, has_failed, is_available, why};
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde_json::json;

fn main() -> ExitCode {
    Suite::with_everything()
        .test("two_workspaces_go_to_two_nodes", spreads)
        .test("a_pin_is_kept_or_fails", pins)
        .test("what_is_too_large_fails_or_waits_as_asked", too_large)
        .test("a_new_workspace_is_the_operators_without_a_write", comes_with_its_finalizer)
        .test("of_twenty_at_once_exactly_those_run_that_fit", twenty_at_once)
        .run()
}

async fn spreads(place: Arc<Place>) -> Result<()> {
    place.node("2", "1Gi").await?;
    place.node("2", "1Gi").await?;
    for name in ["a", "b"] {
        place.create_workspace(name, json!({})).await?;
    }
    let a = execution(&place.available("a").await?)?.0;
    let b = execution(&place.available("b").await?)?.0;
    ensure!(a != b, "both are on {a}");
    Ok(())
}

async fn pins(place: Arc<Place>) -> Result<()> {
    let small = place.node("1", "512Mi").await?;
    let other = place.node("4", "2Gi").await?;
    place.create_workspace("first", json!({"power": {"state": "Running", "node": small}})).await?;
    let first = place.available("first").await?;
    ensure!(execution(&first)?.0 == small, "the pin is kept though {other} has more room");

    // The pinned node is full: it fails, and never falls back.
    place.create_workspace("second", json!({"power": {"state": "Running", "node": small}})).await?;
    let second = place.workspace("second", "has failed", 30, has_failed).await?;
    ensure!(why(&second).starts_with("ResourceExhausted"), "{}", why(&second));
    ensure!(second.status.is_some_and(|status| status.execution.is_none()));

    // A pin binds one start only.
    place.power("second", json!({"state": "Running", "requestId": "anywhere"})).await?;
    let second = place.available("second").await?;
    ensure!(execution(&second)?.0 == other);

    let unknown =
        place.kibo(&["workspace", "create", "third", "-t", &place.template_name(), "--node", "no-such-node"]).await?;
    ensure!(unknown.code != 0 && unknown.stderr.contains("no-such-node"), "{unknown:?}");
    Ok(())
}

/// The API server gives it its finalizer, and keeps those that it came with.
async fn comes_with_its_finalizer(place: Arc<Place>) -> Result<()> {
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let api: Api<Workspace> = place.api();
    for (own, wanted) in [(vec![], vec![WORKSPACE_FINALIZER]), (vec!["a.b/c"], vec!["a.b/c", WORKSPACE_FINALIZER])] {
        let mut workspace: Workspace = serde_json::from_value(place.workspace_manifest("new"))?;
        workspace.metadata.finalizers = Some(own.into_iter().map(str::to_owned).collect());
        // A policy counts a moment after it is stored.
        eventually("a new Workspace has the finalizer", Duration::from_secs(60), async || {
            let created = api.create(&dry_run, &workspace).await?;
            ensure!(created.finalizers() == wanted, "{:?}", created.finalizers());
            Ok(Some(()))
        })
        .await?;
    }
    Ok(())
}

async fn too_large(place: Arc<Place>) -> Result<()> {
    place.node("2", "1Gi").await?;
    let large = json!({"cpu": "3"});
    place
        .create_workspace(
            "fails",
            json!({"resources": large, "power": {"state": "Running", "whenUnplaceable": "Fail"}}),
        )
        .await?;
    let fails = place.workspace("fails", "has failed", 30, has_failed).await?;
    ensure!(why(&fails).starts_with("ResourceExhausted"), "{}", why(&fails));
    ensure!(why(&fails).to_lowercase().contains("cpu"), "it says what was short: {}", why(&fails));

    let by_kibo = place.kibo(&["workspace", "start", "fails"]).await?;
    ensure!(by_kibo.code == 15, "resource exhausted is 15: {by_kibo:?}");

    place.create_workspace("waits", json!({"resources": large})).await?;
    let waits = |it: &Workspace| condition(it, "Placed").is_some_and(|placed| placed.status == "False");
    let waiting = place.workspace("waits", "waits for a place", 30, waits).await?;
    ensure!(!waiting.is_power_request_consumed(), "a request that waits is not consumed");
    // Room appears: it starts by itself.
    let roomy = place.node("4", "1Gi").await?;
    let started = place.available("waits").await?;
    ensure!(execution(&started)?.0 == roomy);
    Ok(())
}

/// Room for twelve on two nodes, twenty at once: no moment may show a node with more than it has.
async fn twenty_at_once(place: Arc<Place>) -> Result<()> {
    const ALL: usize = 20;
    const ROOM: usize = 12;
    let nodes = [place.node("6", "8Gi").await?, place.node("6", "8Gi").await?];
    place.ensure_template().await?;
    let watching = tokio::spawn(never_over(place.clone(), ROOM / nodes.len()));
    let power = json!({"power": {"state": "Running", "whenUnplaceable": "Fail"}});
    let names: Vec<String> = (0..ALL).map(|number| format!("w{number}")).collect();
    let created = names.iter().map(|name| place.create_workspace(name, power.clone()));
    futures::future::try_join_all(created).await?;

    let limit = Duration::from_secs(START * 3);
    let all = eventually("every Workspace runs or has failed", limit, || async {
        ensure!(!watching.is_finished(), "a node had more than it has room for");
        let list = place.api::<Workspace>().list(&ListParams::default()).await?.items;
        let settled = list.iter().all(|it| is_available(it) || has_failed(it));
        Ok((settled && list.len() == ALL).then_some(list))
    })
    .await;
    if watching.is_finished() {
        watching.await?.context("watching the nodes")?;
        bail!("the watch ended");
    }
    watching.abort();
    let (running, failed): (Vec<_>, Vec<_>) = all?.into_iter().partition(is_available);
    ensure!(running.len() == ROOM && failed.len() == ALL - ROOM, "{} run, {} failed", running.len(), failed.len());
    for workspace in &failed {
        ensure!(why(workspace).starts_with("ResourceExhausted"), "{}", why(workspace));
    }
    for node in &nodes {
        let vms = virtual_machines(node).len();
        ensure!(vms == ROOM / nodes.len(), "{vms} VMs on {node}");
        let status = place.all::<Node>().get(node).await?.status.unwrap_or_default();
        ensure!(status.allocated.as_ref().and_then(|it| it.cpu.as_deref()) == Some("6"), "{:?}", status.allocated);
    }

    // The room of one that ends is given again. Force: how twelve guests stop is another test's matter.
    let name_of = |it: &Workspace| it.metadata.name.clone().unwrap_or_default();
    let (ends, starts) = (name_of(&running[0]), name_of(&failed[0]));
    place.power(&ends, json!({"state": "Stopped", "requestId": "end", "stopMode": "Force"})).await?;
    place.phase(&ends, WorkspacePhase::Stopped, STOP).await?;
    place.power(&starts, json!({"state": "Running", "requestId": "again", "whenUnplaceable": "Fail"})).await?;
    place.available(&starts).await?;
    Ok(())
}

/// Watches all Workspaces of the test and returns an error at the first moment at which the
/// executions of a node together have more than `cores`, by the API or on the host.
async fn never_over(place: Arc<Place>, cores: usize) -> Result<()> {
    let mut held: BTreeMap<String, (String, MilliCpu)> = BTreeMap::new();
    let mut changes =
        watcher(place.api::<Workspace>(), watcher::Config::default()).default_backoff().applied_objects().boxed();
    while let Some(workspace) = changes.try_next().await? {
        let name = workspace.metadata.name.clone().unwrap_or_default();
        match workspace.status.and_then(|status| status.execution) {
            Some(execution) => held.insert(name, (execution.node.to_string(), execution.cpu_milli)),
            None => held.remove(&name),
        };
        let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
        for (node, cpu) in held.values() {
            *sums.entry(node).or_default() += cpu.0;
        }
        for (node, sum) in sums {
            ensure!(sum <= cores as u64 * 1000, "{node} holds {sum} millicores of {cores} cores");
            let vms = virtual_machines(node).len();
            ensure!(vms <= cores, "{vms} VMs run on {node}, which has {cores} cores");
        }
    }
    bail!("the watch ended")
}
