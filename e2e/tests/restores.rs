//! The control plane is put back to an older backup while guests run: nothing is torn down, and an admin decides.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{Node, Volume, Workspace};
use kibo_e2e::local::{Component, ProcessId};
use kibo_e2e::suite::{Place, STOP, Suite, eventually, execution, phase_of};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(60);
const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";
const CONTROL_PLANE: [Component; 3] = [Component::Etcd, Component::ApiServer, Component::ControllerManager];

fn main() -> ExitCode {
    Suite::with_everything()
        .alone("an_older_control_plane_tears_nothing_down_and_an_adoption_brings_all_back", adoption)
        .run()
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Copies what etcd has, while it stands.
async fn back_up(place: &Place) -> Result<()> {
    let cluster = place.cluster();
    cluster.stop(&Component::Etcd).await?;
    copy(&cluster.layout().etcd_data(), &cluster.layout().root().join("backup"))?;
    cluster.start(&Component::Etcd).await?;
    Ok(cluster.ready(&Component::ApiServer).await?)
}

/// The whole control plane is lost, and comes back from the copy.
async fn put_back(place: &Place) -> Result<()> {
    let cluster = place.cluster();
    cluster.kill(&Component::Operator).await?;
    for component in CONTROL_PLANE.iter().rev() {
        cluster.stop(component).await?;
    }
    let data = cluster.layout().etcd_data();
    fs::remove_dir_all(&data)?;
    copy(&cluster.layout().root().join("backup"), &data)?;
    for component in CONTROL_PLANE.iter().chain([&Component::Operator]) {
        cluster.start(component).await?;
    }
    Ok(())
}

/// What the node's daemon has on its disk about the control plane.
fn latest_moment(place: &Place, node: &str) -> Result<u64> {
    let path = place.cluster().layout().node(node).join("state/node.json");
    let record: Value = serde_json::from_slice(&fs::read(path)?)?;
    Ok(record["latest"]["renewedUnixMicros"].as_u64().unwrap_or_default())
}

/// Waits until the node remembers a moment after the last thing that it did for these Workspaces, so that nothing
/// more is on the way to it.
async fn remembers(place: &Place, node: &str, workspaces: &[&str]) -> Result<()> {
    // The operator renews its Lease every 10 s, and tells a node that did something with the next renewal.
    const RENEWAL: Duration = Duration::from_secs(12);
    let mut last = 0;
    for name in workspaces {
        let workspace = place.api::<Workspace>().get(name).await?;
        let conditions = workspace.status.iter().flat_map(|status| &status.conditions);
        let transitions = conditions.map(|condition| condition.last_transition_time.0.as_microsecond());
        last = transitions.max().unwrap_or_default().max(last);
    }
    let (last, second) = (u64::try_from(last)?, 1_000_000);
    // A condition says the second only: a moment within it may be from before or after.
    let mut seen = (0, Instant::now());
    eventually("the node remembers a later moment", SOON, || {
        let latest = latest_moment(place, node);
        let is_steady = latest.as_ref().is_ok_and(|latest| *latest == seen.0) && seen.1.elapsed() > RENEWAL;
        if let Ok(latest) = &latest
            && *latest != seen.0
        {
            seen = (*latest, Instant::now());
        }
        async move { Ok(latest.map(|latest| latest > last + second || (latest > last && is_steady))?.then_some(())) }
    })
    .await
}

fn node_condition(node: &Node, kind: &str) -> (String, String) {
    let conditions = node.status.iter().flat_map(|status| &status.conditions);
    let found = conditions.into_iter().find(|condition| condition.type_ == kind);
    found.map(|condition| (condition.status.clone(), condition.message.clone())).unwrap_or_default()
}

async fn node_shows(place: &Place, node: &str, kind: &'static str, status: &'static str) -> Result<String> {
    let shows = move |node: &Node| node_condition(node, kind).0 == status;
    let node = place.watched(place.all::<Node>(), node, &format!("{kind} is {status}"), 60, shows).await?;
    Ok(node_condition(&node, kind).1)
}

fn epochs(workspace: &Workspace, volume: &Volume) -> (u64, u64) {
    let epoch = |epoch: Option<kibo_crds::Epoch>| epoch.unwrap_or_default().0;
    (
        epoch(workspace.status.as_ref().and_then(|status| status.epoch)),
        epoch(volume.status.as_ref().and_then(|status| status.epoch)),
    )
}

async fn epochs_of(place: &Place, name: &str) -> Result<(u64, u64)> {
    Ok(epochs(&place.api::<Workspace>().get(name).await?, &place.api::<Volume>().get(name).await?))
}

/// A Template whose guests count up on their Volumes.
async fn counting_template(place: &Place) -> Result<()> {
    let count = "n=$(cat /data/n 2>/dev/null || echo 0); while :; do n=$((n+1)); echo $n > /data/new; \
                 mv /data/new /data/n; sleep 0.1; done";
    let mut template = place.template();
    template["spec"]["entrypoint"] = json!({ "command": ["/bin/sh", "-c", count], "restart": "Always" });
    place.create(template).await?;
    Ok(())
}

async fn count_of(place: &Place, name: &str) -> Result<u64> {
    place.sh(name, "cat /data/n").await?.parse().context("no count")
}

async fn stop(place: &Place, name: &str, id: &str) -> Result<()> {
    place.power(name, json!({ "state": "Stopped", "requestId": id })).await?;
    place.phase(name, WorkspacePhase::Stopped, STOP).await.map(drop)
}

async fn start(place: &Place, name: &str, id: &str) -> Result<Workspace> {
    place.power(name, json!({ "state": "Running", "requestId": id })).await?;
    place.available(name).await
}

/// What runs: its process, and which boot of the guest it is.
struct Runs {
    vm: ProcessId,
    boot: String,
    instance: String,
}

async fn runs(place: &Place, name: &str) -> Result<Runs> {
    let workspace = place.available(name).await?;
    let (vm, (_, instance)) = (place.vm(&workspace)?, execution(&workspace)?);
    Ok(Runs { vm, boot: place.sh(name, BOOT_ID).await?, instance })
}

async fn adoption(place: Arc<Place>) -> Result<()> {
    let ahead = place.node("6", "3Gi").await?;
    let beside = place.node_with("2", "1Gi", |node| drop(node.labels.insert("role".into(), "beside".into()))).await?;
    counting_template(&place).await?;
    let on = |node: &str| json!({ "state": "Running", "requestId": "first", "node": node });
    let volume = json!({ "new": { "size": "64Mi" }, "mountPath": "/data", "deleteWithWorkspace": true });
    for name in ["same", "again", "ended", "later", "beside"] {
        let node = if name == "beside" { &beside } else { &ahead };
        place.create_workspace(name, json!({ "volume": volume, "power": on(node) })).await?;
    }
    for name in ["same", "again", "ended", "later", "beside"] {
        place.available(name).await?;
    }
    stop(&place, "later", "second").await?;
    remembers(&place, &beside, &["beside"]).await?;
    back_up(&place).await?;

    stop(&place, "again", "a2").await?;
    place.power("again", json!({ "state": "Running", "requestId": "a3", "node": ahead })).await?;
    stop(&place, "ended", "e2").await?;
    place.power("later", json!({ "state": "Running", "requestId": "l3", "node": ahead })).await?;
    place.create_workspace("unknown", json!({ "volume": volume, "power": on(&ahead) })).await?;
    let mut before = BTreeMap::new();
    for name in ["same", "again", "later", "unknown", "beside"] {
        before.insert(name, runs(&place, name).await?);
    }
    let epochs_before = epochs_of(&place, "again").await?;
    let count = count_of(&place, "same").await?;
    remembers(&place, &ahead, &["again", "ended", "later", "unknown"]).await?;

    put_back(&place).await?;
    let message = node_shows(&place, &ahead, "Quarantined", "True").await?;
    ensure!(message.contains(&format!("kibo node adopt {ahead}")), "it says what to do: {message}");
    let answers = async || Ok(Some(place.sh("beside", BOOT_ID).await?));
    let boot = eventually("a node that is not ahead goes on", SOON, answers).await?;
    ensure!(boot == before["beside"].boot, "it is another boot of the guest");
    for (name, runs) in &before {
        ensure!(runs.vm.is_alive(), "the guest of {name} was torn down");
    }
    let stale = json!({ "spec": { "adoption": { "quarantine": "q-0000000000000000", "action": "Adopt" } } });
    let stale = place.kubectl(&["patch", "knode", &ahead, "--type=merge", "-p", &stale.to_string()]).await?;
    ensure!(stale.code != 0 && stale.stderr.contains("read the node again"), "another accident: {stale:?}");

    let adopt = ["node", "adopt", &ahead, "--command-id", "adopt-1"];
    let told = place.kibo(&adopt).await?.ok()?;
    ensure!(told.contains("3 executions taken back, 1 had ended") && told.contains("/unknown)"), "{told}");
    let replay = place.kibo(&adopt).await?.ok()?;
    ensure!(replay == told, "the same command again gives the same outcome: {replay} after {told}");
    let other = place.kibo(&[adopt.as_slice(), &["--destroy-unknown"]].concat()).await?;
    ensure!(other.code == 14 && other.stderr.contains("with another input"), "{other:?}");
    for name in ["same", "again", "later"] {
        let now = runs(&place, name).await?;
        let was = &before[name];
        ensure!(now.boot == was.boot && now.vm == was.vm && now.instance == was.instance, "{name} is another one");
    }
    ensure!(count_of(&place, "same").await? > count, "it counts on");
    let ended = place.phase("ended", WorkspacePhase::Stopped, 10).await?;
    ensure!(ended.status.as_ref().and_then(|it| it.reason.as_deref()) == Some("EndedAfterBackup"), "{ended:#?}");
    let shown = place.kibo(&["workspace", "get", "again"]).await?.ok()?;
    ensure!(shown.contains("AVAILABLE") && shown.contains(&ahead), "{shown}");
    let epochs_now = epochs_of(&place, "again").await?;
    ensure!(epochs_now >= epochs_before, "an epoch fell: {epochs_now:?} after {epochs_before:?}");

    for name in ["again", "later", "ended"] {
        stop(&place, name, "s9").await?;
        place.power(name, json!({ "state": "Running", "requestId": "s10", "node": ahead })).await?;
    }
    for name in ["again", "later", "ended"] {
        place.available(name).await?;
    }
    let epochs_after = epochs_of(&place, "again").await?;
    ensure!(epochs_after.0 > epochs_now.0 && epochs_after.1 > epochs_now.1, "{epochs_after:?} after {epochs_now:?}");

    let message = node_shows(&place, &ahead, "UnknownInstances", "True").await?;
    ensure!(message.contains("--destroy-unknown"), "it says what to do: {message}");
    ensure!(before["unknown"].vm.is_alive(), "what nobody knows runs on");
    place.kibo(&["node", "adopt", &ahead, "--destroy-unknown"]).await?.ok()?;
    place.no_trace_of(&ahead, &before["unknown"].instance).await?;
    ensure!(before["same"].vm.is_alive(), "what is known goes on");

    destroyed(&place, &ahead).await?;
    // Since the first time this one has been steered by a leader that is no more, too.
    node_shows(&place, &beside, "Quarantined", "True").await?;
    place.kibo(&["node", "adopt", &beside]).await?.ok()?;
    ensure!(place.sh("beside", BOOT_ID).await? == before["beside"].boot, "it is the same boot of the guest");
    Ok(())
}

/// The same backup once more: this time all that runs on the node is given up, and its disks are not.
async fn destroyed(place: &Place, ahead: &str) -> Result<()> {
    let same = runs(place, "same").await?;
    let count = count_of(place, "same").await?;
    let epochs_before = epochs_of(place, "again").await?;
    remembers(place, ahead, &["again", "ended", "later"]).await?;
    put_back(place).await?;
    node_shows(place, ahead, "Quarantined", "True").await?;
    ensure!(same.vm.is_alive(), "the adoption of the last accident does not count for this one");
    let daemon = Component::Node(ahead.to_owned());
    place.kibo(&["node", "adopt", ahead, "--destroy", "--no-wait"]).await?.ok()?;
    eventually("the daemon has destroyed all and ended", SOON, || async {
        Ok(place.cluster().process(&daemon).is_none().then_some(()))
    })
    .await?;
    ensure!(!same.vm.is_alive(), "it runs on");
    // As its supervisor would.
    place.cluster().start(&daemon).await?;
    let stopped = place.workspace("same", "is stopped", 30, |it| phase_of(it) == Some(WorkspacePhase::Stopped)).await?;
    ensure!(stopped.status.as_ref().is_some_and(|status| status.execution.is_none()));
    start(place, "same", "z1").await?;
    ensure!(count_of(place, "same").await? >= count, "the disk is the same");
    start(place, "again", "z2").await?;
    let epochs_now = epochs_of(place, "again").await?;
    ensure!(epochs_now.0 > epochs_before.0 && epochs_now.1 > epochs_before.1, "{epochs_now:?} after {epochs_before:?}");
    Ok(())
}
