//! Objects that are moved from one storage pool to another: nobody uses them meanwhile, and whoever is killed, each ends
//! whole in one pool, and nothing is left in the other.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{MoveState, MoveStatus, Volume, Workspace};
use kibo_e2e::local::{Component, LocalNode, LocalPool};
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::{Place, Suite, eventually};
use kibo_failpoint::Action;
use kube::ResourceExt as _;
use kube::api::{Patch, PatchParams};
use serde_json::json;

fn main() -> ExitCode {
    Suite::with_everything()
        .alone("while_an_object_moves_nobody_uses_it_and_a_deletion_cancels_the_move", one_move)
        .alone("a_move_ends_as_it_should_wherever_the_operator_or_the_daemon_is_killed", killed)
        .run()
}

const LIMIT: Duration = Duration::from_secs(120);

/// In the operator, in their order.
const OPERATOR: &[&str] = &[
    "move-granted",
    "move-ordered",
    "move-copied",
    "move-committed",
    "grant-settled",
    "copy-discarded",
    "leftover-forgotten",
];

/// In the daemon.
const DAEMON: &[&str] = &[
    "move-source-taken",
    "move-target-taken",
    "move-copying",
    "move-synced",
    "move-verified",
    "move-named",
    "copy-put-aside",
    "copy-image-removed",
    "copy-records-removed",
    "copy-removed",
];

/// Gives a node a second pool, beside its own.
fn second_pool(node: &mut LocalNode) {
    let path = node.pools[0].path.with_file_name("second");
    node.pools.push(LocalPool { id: second(&node.id), path, default: false });
}

fn second(node: &str) -> String {
    format!("second-{node}")
}

fn first(node: &str) -> String {
    format!("local-{node}")
}

/// The pools of one node.
struct Pools<'a> {
    place: &'a Place,
    node: String,
}

impl Pools<'_> {
    fn objects(&self, pool: &str) -> PathBuf {
        let directory = if pool == first(&self.node) { "pool" } else { "second" };
        self.place.cluster().layout().node(&self.node).join(directory).join("objects")
    }

    fn image(&self, pool: &str, uid: &str) -> PathBuf {
        self.objects(pool).join(uid).join("image.raw")
    }

    /// The objects of a pool, without what outlives them by design.
    fn uids(&self, pool: &str) -> BTreeSet<String> {
        let is_more =
            |name: &String| names_in(&self.objects(pool).join(name)).iter().any(|it| !it.ends_with(".refused"));
        names_in(&self.objects(pool)).into_iter().filter(is_more).collect()
    }
}

fn names_in(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn layer_move(workspace: &Workspace) -> Option<&MoveStatus> {
    workspace.status.as_ref()?.r#move.as_ref()
}

fn volume_move(volume: &Volume) -> Option<&MoveStatus> {
    volume.status.as_ref()?.r#move.as_ref()
}

async fn one_move(place: Arc<Place>) -> Result<()> {
    let node = place.node_with("4", "2Gi", second_pool).await?;
    let pools = Pools { place: &place, node: node.clone() };
    let (here, there) = (first(&node), second(&node));
    let volume = json!({"new": {"size": "64Mi"}, "mountPath": "/data", "deleteWithWorkspace": true});
    place.create_workspace("w", json!({"volume": volume, "writableLayer": {"size": "64Mi"}})).await?;
    place.available("w").await?;
    place.sh("w", "echo kept > /data/note; echo layer > /root/note; sync").await?;
    let move_volume = ["storage-pool", "move", "volume/w", "--to", there.as_str()];

    let used = place.kibo(&move_volume).await?;
    ensure!(used.code == 13 && used.stderr.contains("only while no Workspace uses it"), "{used:?}");
    place.kibo(&["workspace", "stop", "w"]).await?.ok()?;
    let nowhere = place.kibo(&["storage-pool", "move", "volume/w", "--to", "nowhere"]).await?;
    let names = format!("no node is attached to both storage pools: {here} is attached to {node}; nowhere to no node");
    ensure!(nowhere.code == 13 && nowhere.stderr.contains(&names), "{nowhere:?}");

    // While it is copied it is not used, and whoever wants to is told.
    let points = Failpoints::of(place.cluster(), &Component::Node(node.clone()))?;
    points.arm(&["move-copying"], Action::Wait)?;
    place.kibo(&[&move_volume[..], &["--no-wait"]].concat()).await?.ok()?;
    points.all_reached(&["move-copying"], LIMIT).await?;
    let start = place.kibo(&["workspace", "start", "w"]).await?;
    ensure!(
        start.code != 0 && start.stderr.contains(&format!("the Volume is being moved to storage pool {there}")),
        "{start:?}"
    );
    let again = place.kibo(&["storage-pool", "move", "volume/w", "--to", &here]).await?;
    ensure!(again.code == 13 && again.stderr.contains("the move before is not finished"), "{again:?}");
    points.clear()?;
    let moved = |it: &Volume| volume_move(it).is_some_and(|it| it.state == MoveState::Finished);
    let volume = place.watched(place.api::<Volume>(), "w", "is moved", LIMIT.as_secs(), moved).await?;
    let status = volume.status.clone().unwrap_or_default();
    ensure!(status.pool.as_ref().is_some_and(|pool| pool.as_str() == there), "{status:?}");
    let uid = volume.uid().context("it has a uid")?;
    ensure!(pools.uids(&there) == [uid.clone()].into() && !pools.uids(&here).contains(&uid), "it is in one pool");

    // The layer goes too, and both are what they were.
    place.kibo(&["storage-pool", "move", "workspace/w", "--to", &there]).await?.ok()?;
    place.kibo(&["workspace", "start", "w"]).await?.ok()?;
    ensure!(place.sh("w", "cat /data/note /root/note").await? == "kept\nlayer");
    eventually("the old pool is empty", LIMIT, async || Ok(pools.uids(&here).is_empty().then_some(()))).await?;

    // A deletion cancels it, and does not wait for the copying to be rid of the object.
    place.kibo(&["workspace", "stop", "w"]).await?.ok()?;
    points.arm(&["move-copying"], Action::Wait)?;
    let back = json!({"spec": {"move": {"to": here, "requestId": "back"}}});
    place.api::<Volume>().patch("w", &PatchParams::default(), &Patch::Merge(&back)).await?;
    points.all_reached(&["move-copying"], LIMIT).await?;
    // Whoever decided that ends with its decision.
    let deciding = Failpoints::of(place.cluster(), &Component::Operator)?;
    deciding.arm(&["move-given-up"], Action::Abort)?;
    place.kibo(&["workspace", "delete", "w", "--no-wait"]).await?.ok()?;
    let ended = async || Ok(place.cluster().process(&Component::Operator).is_none().then_some(()));
    eventually("the operator ends", LIMIT, ended).await?;
    deciding.clear()?;
    place.cluster().start(&Component::Operator).await?;
    let given_up = |it: &Volume| volume_move(it).is_some_and(|it| it.state == MoveState::Clearing);
    place.watched(place.api::<Volume>(), "w", "is not moved any more", LIMIT.as_secs(), given_up).await?;
    points.clear()?;
    place.gone(place.api::<Workspace>(), "w", LIMIT.as_secs()).await?;
    place.gone(place.api::<Volume>(), "w", LIMIT.as_secs()).await?;
    for pool in [&here, &there] {
        ensure!(pools.uids(pool).is_empty(), "left in {pool}: {:?}", pools.uids(pool));
    }
    Ok(())
}

/// Each of as many layers as there are points waits at another one.
async fn killed(place: Arc<Place>) -> Result<()> {
    let node = place.node_with("16", "8Gi", second_pool).await?;
    let daemon = Component::Node(node.clone());
    let pools = Pools { place: &place, node: node.clone() };
    let names: Vec<String> = (0..OPERATOR.len().max(DAEMON.len())).map(|number| format!("w{number}")).collect();
    let spec = json!({"writableLayer": {"size": "64Mi"}});
    try_join_all(names.iter().map(|name| place.create_workspace(name, spec.clone()))).await?;
    for name in &names {
        place.available(name).await?;
        place.sh(name, &format!("echo {name} > /root/note; sync")).await?;
    }
    try_join_all(names.iter().map(|name| place.power(name, json!({"state": "Stopped", "requestId": "stop"})))).await?;
    for name in &names {
        place.phase(name, WorkspacePhase::Stopped, LIMIT.as_secs()).await?;
    }
    let (here, there) = (first(&node), second(&node));
    let all = Moves { place: &place, pools: &pools, names: &names };
    all.with_fault(&here, &there, OPERATOR, &Component::Operator).await.context("the operator is killed")?;
    all.with_fault(&there, &here, DAEMON, &daemon).await.context("the daemon is killed")?;
    // What was moved twice is what it was.
    place.power("w0", json!({"state": "Running", "requestId": "again"})).await?;
    place.available("w0").await?;
    ensure!(place.sh("w0", "cat /root/note").await? == "w0");
    Ok(())
}

struct Moves<'a> {
    place: &'a Place,
    pools: &'a Pools<'a>,
    names: &'a [String],
}

impl Moves<'_> {
    async fn with_fault(&self, from: &str, to: &str, points: &[&str], victim: &Component) -> Result<()> {
        let cluster = self.place.cluster();
        let kept = self.keep(from).await?;
        let failpoints = Failpoints::of(cluster, victim)?;
        failpoints.arm(points, Action::Wait)?;
        let request = json!({"spec": {"move": {"to": to, "requestId": format!("to-{to}")}}});
        let api = self.place.api::<Workspace>();
        let (params, patch) = (PatchParams::default(), Patch::Merge(&request));
        try_join_all(self.names.iter().map(|name| api.patch(name, &params, &patch))).await?;
        let reached = failpoints.all_reached(points, LIMIT).await;
        cluster.kill(victim).await?;
        failpoints.clear()?;
        cluster.start(victim).await?;
        reached?;
        let is_moved =
            |it: &Workspace| layer_move(it).is_some_and(|it| it.state == MoveState::Finished && it.to.as_str() == to);
        for name in self.names {
            let seconds = LIMIT.as_secs();
            let moved = self.place.watched(api.clone(), name, "is moved", seconds, is_moved).await?;
            let status = moved.status.unwrap_or_default();
            let layer = status.writable_layer.context("it has a layer")?;
            ensure!(layer.pool.as_str() == to, "{name}: {layer:?}");
            ensure!(status.holder.as_ref().is_none_or(|holder| holder.idle), "{name}: {:?}", status.holder);
        }
        ensure!(self.pools.uids(from).is_empty(), "left in {from}: {:?}", self.pools.uids(from));
        for (uid, old) in &kept {
            let new = self.pools.image(to, uid);
            let same = Command::new("cmp").arg(old).arg(&new).status()?;
            ensure!(same.success(), "{} is not what it was", new.display());
            let files = names_in(&self.pools.objects(to).join(uid));
            let is_known = |name: &String| name == "image.raw" || name.starts_with("holder.");
            ensure!(files.iter().all(is_known), "left beside the image: {files:?}");
            fs::remove_file(old)?;
        }
        Ok(())
    }

    /// Other names for the images, so that there is something to compare with when they were moved.
    async fn keep(&self, pool: &str) -> Result<Vec<(String, PathBuf)>> {
        let mut kept = Vec::new();
        for name in self.names {
            let uid = self.place.api::<Workspace>().get(name).await?.uid().context("it has a uid")?;
            let other = self.pools.objects(pool).parent().context("it is in a pool")?.join(format!("kept-{uid}"));
            fs::hard_link(self.pools.image(pool, &uid), &other)?;
            kept.push((uid, other));
        }
        Ok(kept)
    }
}
