//! Hosts that are declared dead, with real daemons and guests: one whose daemon stands still, one that in truth writes
//! on, and one that was booted anew.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kibo_crds::Workspace;
use kibo_crds::node::{IsolationResult, IsolationState, Node, NodePhase, NodeStatus};
use kibo_crds::workspace::WorkspacePhase;
use kibo_e2e::local::process::virtual_machines;
use kibo_e2e::local::{Component, LocalPool};
use kibo_e2e::suite::proxy::Proxy;
use kibo_e2e::suite::typed::said;
use kibo_e2e::suite::{Place, STOP, Suite, condition, eventually, execution, phase_of, why};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_stopped_daemon_that_goes_on_after_an_isolation_destroys_everything_and_exits", stopped_daemon)
        .test("a_host_that_still_writes_is_isolated_only_by_who_knows_better", still_writes)
        .test("what_ran_on_a_host_that_was_booted_anew_can_start_at_once", booted_anew)
        .run()
}

const SOON: u64 = 60;
/// For its supervisor: start it again.
const ISOLATED: i32 = 3;

async fn becomes(place: &Place, id: &str, what: &str, reached: impl Fn(&NodeStatus) -> bool) -> Result<NodeStatus> {
    let reached = |node: &Node| node.status.as_ref().is_some_and(&reached);
    let node = place.watched(place.all::<Node>(), id, what, SOON, reached).await?;
    node.status.context("it has a status")
}

async fn silent(place: &Place, id: &str) -> Result<()> {
    let is_alive = |status: &NodeStatus| status.session.as_ref().is_some_and(|session| session.alive);
    becomes(place, id, "has no session", |status| !is_alive(status)).await.map(drop)
}

/// Ready in a session of this incarnation.
async fn ready_in(place: &Place, id: &str, incarnation: u64) -> Result<NodeStatus> {
    let is_ready = |status: &NodeStatus| {
        let session = status.session.as_ref().filter(|session| session.alive);
        status.phase == Some(NodePhase::Ready) && session.is_some_and(|it| it.incarnation.0 == incarnation)
    };
    becomes(place, id, &format!("is ready in incarnation {incarnation}"), is_ready).await
}

/// As a person does it, who is told the same as the status says.
async fn isolate(place: &Place, id: &str, request: &str, force: bool) -> Result<IsolationResult> {
    let command = ["node", "isolate", id, "--confirm-host-cannot-write", "--command-id", request];
    if force {
        said(place, &[&command[..], &["--force-despite-evidence"]].concat(), 0, "is isolated").await?;
    } else {
        said(place, &command, 13, "--force-despite-evidence").await?;
    }
    let of = |status: &NodeStatus| {
        let found = status.isolation.clone().filter(|it| it.state != IsolationState::InProgress);
        found.filter(|it| it.request_id.as_ref().is_some_and(|id| id.as_str() == request))
    };
    let status = becomes(place, id, "is isolated, or not", |status| of(status).is_some()).await?;
    of(&status).context("it was decided")
}

/// Volumes, layers and Workspaces.
fn counts(result: &IsolationResult) -> [Option<u32>; 3] {
    [result.released_volumes, result.released_layers, result.failed_workspaces]
}

fn isolated(status: &NodeStatus) -> (String, String) {
    let found = status.conditions.iter().find(|it| it.type_ == "Isolated");
    found.map(|it| (it.status.clone(), it.reason.clone())).unwrap_or_default()
}

async fn placed(place: &Place, name: &str, reason: &str) -> Result<String> {
    let is_so = |it: &Workspace| condition(it, "Placed").is_some_and(|it| it.reason == reason);
    let workspace = place.workspace(name, &format!("says {reason}"), SOON, is_so).await?;
    Ok(condition(&workspace, "Placed").map(|it| it.message.clone()).unwrap_or_default())
}

async fn start(place: &Place, name: &str, request: &str, node: &str) -> Result<Workspace> {
    place.power(name, json!({ "state": "Running", "requestId": request, "node": node })).await?;
    place.available(name).await
}

fn running(node: &str) -> Vec<String> {
    virtual_machines(node).into_iter().map(|vm| vm.instance).collect()
}

async fn nothing_runs(node: &str) -> Result<()> {
    let limit = Duration::from_secs(SOON);
    eventually("no VM is left", limit, async || Ok(running(node).is_empty().then_some(()))).await
}

/// The daemon of a node as a supervisor runs it: whoever starts it sees how it ends.
fn supervised(place: &Place, node: &str) -> Result<Child> {
    let (layout, log) = (place.cluster().layout(), place.cluster().log(&Component::Node(node.to_owned())));
    let log = std::fs::OpenOptions::new().append(true).open(log)?;
    let child = Command::new(place.cluster().programs().node_daemon())
        .args(["run", "--config"])
        .arg(layout.node(node).join("config.toml"))
        .env("KIBOTOS_LOCAL_STATE", layout.root())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(true)
        .spawn();
    child.context("failed to start the daemon")
}

fn signal(daemon: &Child, signal: Signal) -> Result<()> {
    let pid = daemon.id().and_then(|id| Pid::from_raw(id.cast_signed())).context("the daemon has ended")?;
    Ok(kill_process(pid, signal)?)
}

async fn exits(mut daemon: Child) -> Result<()> {
    let ended = tokio::time::timeout(Duration::from_secs(SOON), daemon.wait()).await;
    let ended = ended.context("the daemon goes on")??;
    ensure!(ended.code() == Some(ISOLATED), "{ended:?}");
    Ok(())
}

async fn stopped_daemon(place: Arc<Place>) -> Result<()> {
    let node = place.node("2", "1Gi").await?;
    let component = Component::Node(node.clone());
    for name in ["w", "goes"] {
        place.create_workspace(name, json!({})).await?;
    }
    let (workspace, goes) = (place.available("w").await?, place.available("goes").await?);
    let (vm, (_, instance)) = (place.vm(&workspace)?, execution(&workspace)?);
    place.sh("w", "echo kept > /root/note; sync").await?;

    place.cluster().stop(&component).await?;
    silent(&place, &node).await?;
    let daemon = supervised(&place, &node)?;
    ready_in(&place, &node, 1).await?;
    signal(&daemon, Signal::STOP)?;
    silent(&place, &node).await?;
    let said = place.kibo(&["node", "isolate", &node, "--confirm-host-cannot-write"]).await?.ok()?;
    let result = place.all::<Node>().get(&node).await?.status.and_then(|it| it.isolation).context("no result")?;
    ensure!(counts(&result) == [Some(0), Some(2), Some(2)], "{result:?}: {said}");
    ensure!(result.evidence.is_none(), "nobody shares its pool: {result:?}");
    let failed = place.phase("w", WorkspacePhase::Failed, SOON).await?;
    ensure!(why(&failed).starts_with("Unavailable"), "{}", why(&failed));
    let words = placed(&place, "w", "PoolOutOfReach").await?;
    ensure!(words.contains(&format!("local-{node}")) && words.contains(&format!("its member is {node}")), "{words}");
    ensure!(vm.is_alive(), "nobody was there to end it");
    // Nobody reaches its disk, so its deletion waits for the host.
    place.kibo(&["workspace", "delete", "goes", "--no-wait"]).await?.ok()?;
    let waits =
        |it: &Workspace| it.status.iter().flat_map(|status| &status.conditions).any(|it| it.reason == "NoPoolMember");
    place.workspace("goes", "waits for its pool", SOON, waits).await?;

    signal(&daemon, Signal::CONT)?;
    exits(daemon).await?;
    ensure!(!vm.is_alive(), "it was to be destroyed");
    place.no_trace_of(&node, &instance).await?;
    // As its supervisor does.
    place.cluster().start(&component).await?;
    let back = ready_in(&place, &node, 2).await?;
    ensure!(isolated(&back) == ("False".to_owned(), "Returned".to_owned()), "{:?}", isolated(&back));
    placed(&place, "w", "CanStart").await?;
    place.gone(place.api::<Workspace>(), "goes", SOON).await?;
    ensure!(!object(&place.cluster().layout().node(&node).join("pool"), &goes)?.exists(), "its disk is there still");
    let again = start(&place, "w", "again", &node).await?;
    ensure!(execution(&again)?.1 != instance && place.sh("w", "cat /root/note").await? == "kept");
    Ok(())
}

/// The directory of a Workspace's layer in a pool.
fn object(pool: &Path, workspace: &Workspace) -> Result<PathBuf> {
    Ok(pool.join("objects").join(workspace.metadata.uid.as_deref().context("it has a uid")?))
}

/// The first node is cut off from the operator alone: its daemon counts on in the pool that both share.
async fn still_writes(place: Arc<Place>) -> Result<()> {
    let proxy = Proxy::to(place.cluster().ports().session).await?;
    let (endpoint, path) = (proxy.endpoint(), place.cluster().layout().root().join("both"));
    let both = |default| LocalPool { id: "both".to_owned(), path: path.clone(), default };
    let first = place.node_with("2", "1Gi", |node| {
        node.endpoint = Some(endpoint);
        node.pools = vec![both(true)];
    });
    let first = first.await?;
    let second = place.node_with("1", "512Mi", |node| node.pools.push(both(false))).await?;
    for name in ["w", "goes"] {
        place.create_workspace(name, json!({ "power": { "state": "Running", "node": first } })).await?;
    }
    let (workspace, goes) = (place.available("w").await?, place.available("goes").await?);
    let goes = object(&path, &goes)?;
    let (vm, (_, instance)) = (place.vm(&workspace)?, execution(&workspace)?);
    place.sh("w", "echo kept > /root/note; sync").await?;

    proxy.cut();
    silent(&place, &first).await?;
    let refused = isolate(&place, &first, "early", false).await?;
    ensure!(refused.state == IsolationState::Refused && counts(&refused) == [None; 3], "{refused:?}");
    let evidence = refused.evidence.unwrap_or_default();
    ensure!(evidence.contains(&format!("node {second} saw the count of node {first} in storage pool both move")));
    let status = place.all::<Node>().get(&first).await?.status.unwrap_or_default();
    ensure!(isolated(&status) == ("False".to_owned(), "HostStillWrites".to_owned()), "{:?}", isolated(&status));
    let kept = place.api::<Workspace>().get("w").await?;
    ensure!(phase_of(&kept) == Some(WorkspacePhase::Available) && execution(&kept)?.1 == instance, "{}", why(&kept));

    proxy.mend();
    ready_in(&place, &first, 1).await?;
    ensure!(place.sh("w", "cat /root/note").await? == "kept" && vm.is_alive(), "the same guest");

    proxy.cut();
    silent(&place, &first).await?;
    let forced = isolate(&place, &first, "forced", true).await?;
    ensure!(forced.state == IsolationState::Finished && counts(&forced) == [Some(0), Some(2), Some(2)], "{forced:?}");
    let words = placed(&place, "w", "CanStart").await?;
    ensure!(words.contains(&format!("node {second},")) && words.contains("storage pool both"), "{words}");
    // The other member deletes, too, what is in the pool that both share: nobody waits for the first.
    ensure!(goes.exists(), "no disk at {}", goes.display());
    place.kibo(&["workspace", "delete", "goes"]).await?.ok()?;
    ensure!(!goes.exists(), "its disk is there still");

    proxy.mend();
    nothing_runs(&first).await?;
    let component = Component::Node(first.clone());
    let limit = Duration::from_secs(SOON);
    let gone = async || Ok(place.cluster().process(&component).is_none().then_some(()));
    eventually("the daemon exits", limit, gone).await?;
    let elsewhere = start(&place, "w", "elsewhere", &second).await?;
    ensure!(execution(&elsewhere)?.0 == second && place.sh("w", "cat /root/note").await? == "kept");
    place.cluster().start(&component).await?;
    let back = ready_in(&place, &first, 2).await?;
    ensure!(isolated(&back) == ("False".to_owned(), "Returned".to_owned()), "{:?}", isolated(&back));
    ensure!(running(&first).is_empty(), "{:?}", running(&first));
    place.power("w", json!({ "state": "Stopped", "requestId": "end", "stopMode": "Force" })).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await.map(drop)
}

async fn booted_anew(place: Arc<Place>) -> Result<()> {
    let node = place.node("1", "512Mi").await?;
    let component = Component::Node(node.clone());
    place.create_workspace("w", json!({})).await?;
    let workspace = place.available("w").await?;
    let (_, instance) = execution(&workspace)?;
    place.sh("w", "echo kept > /root/note; sync").await?;

    // What a boot does: everything is gone at once, and the kernel has another id.
    place.cluster().kill(&component).await?;
    place.cluster().end_virtual_machines(&node).await?;
    let boot_id: PathBuf = place.cluster().layout().node(&node).join("boot-id");
    std::fs::write(&boot_id, "5dd2c8b0-6a4c-4d06-9f1e-3f1e5a6f2b77\n")?;
    let nodes: Vec<_> = place.cluster().recorded().nodes;
    let mut booted = nodes.into_iter().find(|it| it.id == node).context("it is recorded")?;
    booted.boot_id = Some(boot_id);
    place.cluster().add_node(booted)?;
    place.cluster().spawn(&component).await?;

    let failed = place.phase("w", WorkspacePhase::Failed, SOON).await?;
    ensure!(why(&failed).starts_with("NodeRestarted"), "{}", why(&failed));
    place.cluster().ready(&component).await?;
    let back: Value = serde_json::to_value(place.all::<Node>().get(&node).await?.status)?;
    ensure!(back["incarnation"] == json!(2) && back.get("isolation").is_none(), "{back}");
    place.no_trace_of(&node, &instance).await?;
    let again = start(&place, "w", "again", &node).await?;
    ensure!(execution(&again)?.1 != instance && place.sh("w", "cat /root/note").await? == "kept");
    Ok(())
}
