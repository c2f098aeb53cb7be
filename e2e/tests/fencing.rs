//! Who may write to a disk, with real daemons and guests on a pool that they share: a node whose disk was given away, and
//! a disk that goes from one node to another in good order.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kibo_crds::Workspace;
use kibo_crds::node::{HolderEnd, IsolationState, Node, NodeStatus};
use kibo_crds::workspace::WorkspacePhase;
use kibo_e2e::local::{Component, LocalPool};
use kibo_e2e::suite::proxy::Proxy;
use kibo_e2e::suite::{Place, STOP, Suite, condition, eventually, execution, phase_of, why};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

fn main() -> ExitCode {
    Suite::with_everything()
        .test("the_guest_of_a_node_that_is_cut_off_dies_when_its_disk_is_taken_and_the_other_has_all", taken_away)
        .test("a_disk_in_a_shared_pool_goes_to_any_member_after_a_stop_and_to_none_before", handover)
        .run()
}

const SOON: u64 = 60;
/// From the record of the new holder to the death of the old one's guest.
const BOUND: Duration = Duration::from_secs(5);

async fn becomes(place: &Place, id: &str, what: &str, reached: impl Fn(&NodeStatus) -> bool) -> Result<()> {
    let reached = |node: &Node| node.status.as_ref().is_some_and(&reached);
    place.watched(place.all::<Node>(), id, what, SOON, reached).await.map(drop)
}

async fn silent(place: &Place, id: &str) -> Result<()> {
    let is_alive = |status: &NodeStatus| status.session.as_ref().is_some_and(|session| session.alive);
    becomes(place, id, "has no session", |status| !is_alive(status)).await
}

/// Against what another member sees: the host writes on.
async fn isolate_wrongly(place: &Place, id: &str) -> Result<()> {
    let isolation =
        json!({ "incarnation": 1, "confirmHostCannotWrite": true, "forceDespiteEvidence": true, "requestId": "wrong" });
    let patch = Patch::Merge(json!({ "spec": { "isolation": isolation } }));
    place.all::<Node>().patch(id, &PatchParams::default(), &patch).await?;
    let is_done = |status: &NodeStatus| {
        status.isolation.as_ref().is_some_and(|isolation| isolation.state == IsolationState::Finished)
    };
    becomes(place, id, "is isolated", is_done).await
}

async fn start_on(place: &Place, name: &str, request: &str, node: &str) -> Result<Workspace> {
    place.power(name, json!({ "state": "Running", "requestId": request, "node": node })).await?;
    place.available(name).await
}

async fn stop(place: &Place, name: &str, request: &str) -> Result<Workspace> {
    place.power(name, json!({ "state": "Stopped", "requestId": request })).await?;
    place.phase(name, WorkspacePhase::Stopped, STOP).await
}

/// Two nodes on one pool, the first behind a way to the operator that can be cut.
struct Pair {
    proxy: Proxy,
    first: String,
    second: String,
    pool: PathBuf,
}

impl Pair {
    /// `far`: the pool as the first sees it.
    async fn begin(place: &Place, id: &str, path: PathBuf, far: PathBuf) -> Result<Self> {
        let proxy = Proxy::to(place.cluster().ports().session).await?;
        let endpoint = proxy.endpoint();
        let pool = |path| vec![LocalPool { id: id.to_owned(), path, default: true }];
        let first = place.node_with("1", "512Mi", |node| {
            node.endpoint = Some(endpoint);
            node.pools = pool(far);
        });
        let first = first.await?;
        let second = place.node_with("1", "512Mi", |node| node.pools = pool(path.clone())).await?;
        Ok(Self { proxy, first, second, pool: path })
    }

    fn object(&self, workspace: &Workspace) -> Result<PathBuf> {
        Ok(self.pool.join("objects").join(workspace.uid().context("it has a uid")?))
    }
}

/// Until one of the records of an object appears.
async fn recorded(record: PathBuf) -> Result<Instant> {
    let is_there = async || Ok(record.exists().then(Instant::now));
    eventually(&format!("{} is there", record.display()), Duration::from_secs(SOON), is_there).await
}

/// The first node sees the pool through a network file system that believes for 30 s what it was told of names, missing
/// names and attributes: none of that may hide a mark.
async fn taken_away(place: Arc<Place>) -> Result<()> {
    let remote = place.remote()?;
    let pair = Pair::begin(&place, "taken", remote.pool_at_the_server(), remote.pool()).await?;
    remote.caches_names()?;
    let Pair { proxy, first, second, .. } = &pair;
    let binding = json!({ "new": { "size": "64Mi" }, "mountPath": "/data" });
    place.create_workspace("w", json!({ "power": { "state": "Running", "node": first }, "volume": binding })).await?;
    let workspace = place.available("w").await?;
    let (vm, (_, instance)) = (place.vm(&workspace)?, execution(&workspace)?);
    place.sh("w", "echo layer > /root/note; echo volume > /data/note; sync").await?;
    // It writes on, whatever anybody says of its host.
    place.sh("w", "(while :; do date >> /data/noise; sync; done) > /dev/null 2>&1 &").await?;

    proxy.cut();
    silent(&place, first).await?;
    isolate_wrongly(&place, first).await?;
    ensure!(vm.is_alive(), "nobody has taken its disks yet");
    place.power("w", json!({ "state": "Running", "requestId": "elsewhere", "node": second })).await?;
    let taken = recorded(pair.object(&workspace)?.join("holder.2")).await?;
    ensure!(vm.ended_within(BOUND).await, "the first guest writes {:?} after its disk was taken", taken.elapsed());
    let elsewhere = place.available("w").await?;
    ensure!(execution(&elsewhere)?.0 == *second, "{}", why(&elsewhere));
    ensure!(place.sh("w", "cat /root/note /data/note").await? == "layer\nvolume");
    let previous = elsewhere.status.as_ref().and_then(|status| status.previous_holder.clone()).context("a holder")?;
    ensure!((previous.node.as_str(), previous.ended) == (first.as_str(), HolderEnd::Isolated), "{previous:?}");

    // What happened is visible once its node can tell it.
    proxy.mend();
    let component = Component::Node(first.clone());
    let gone = async || Ok(place.cluster().process(&component).is_none().then_some(()));
    eventually("the daemon of the first exits", Duration::from_secs(SOON), gone).await?;
    place.no_trace_of(first, &instance).await?;
    place.cluster().start(&component).await?;
    let is_told = |it: &Workspace| condition(it, "TwoWriters").is_some_and(|it| it.status == "True");
    let told = place.workspace("w", "says that two wrote", SOON, is_told).await?;
    let words = condition(&told, "TwoWriters").map(|it| it.message.clone()).unwrap_or_default();
    ensure!(words.contains(&instance) && words.contains(first) && words.contains("storage pool taken"), "{words}");
    ensure!(phase_of(&told) == Some(WorkspacePhase::Available), "{}", why(&told));
    ensure!(place.sh("w", "cat /root/note").await? == "layer", "the guest that has the disk now goes on");

    stop(&place, "w", "end").await?;
    // Whoever starts it again has read it; the first node may have it as any other.
    let again = start_on(&place, "w", "back", first).await?;
    ensure!(condition(&again, "TwoWriters").is_none() && execution(&again)?.0 == *first, "{}", why(&again));
    ensure!(place.sh("w", "cat /root/note /data/note").await? == "layer\nvolume");
    stop(&place, "w", "end-again").await.map(drop)
}

async fn handover(place: Arc<Place>) -> Result<()> {
    let path = place.cluster().layout().root().join("handed");
    let pair = Pair::begin(&place, "handed", path.clone(), path).await?;
    let Pair { proxy, first, second, .. } = &pair;
    place.create_workspace("w", json!({ "power": { "state": "Running", "node": first } })).await?;
    place.available("w").await?;
    place.sh("w", "echo kept > /root/note").await?;
    let stopped = stop(&place, "w", "s1").await?;
    let status = stopped.status.unwrap_or_default();
    let previous = status.previous_holder.context("who held it is remembered")?;
    ensure!(status.holder.is_none(), "another member reaches the pool: {:?}", status.holder);
    ensure!((previous.node.as_str(), previous.ended) == (first.as_str(), HolderEnd::Released), "{previous:?}");

    let moved = start_on(&place, "w", "r1", second).await?;
    ensure!(execution(&moved)?.0 == *second && place.sh("w", "cat /root/note").await? == "kept");
    stop(&place, "w", "s2").await?;

    // What a node holds that nobody can reach is nobody else's.
    let held = start_on(&place, "w", "r2", first).await?;
    let (vm, (_, instance)) = (place.vm(&held)?, execution(&held)?);
    proxy.cut();
    silent(&place, first).await?;
    place.power("w", json!({ "state": "Stopped", "requestId": "s3" })).await?;
    let says_why =
        |it: &Workspace| it.status.as_ref().is_some_and(|it| it.reason.as_deref() == Some("NodeUnreachable"));
    let waits = place.workspace("w", "says what it waits for", SOON, says_why).await?;
    let command = format!("`kibo node isolate {first} --confirm-host-cannot-write`");
    ensure!(why(&waits).contains(&command), "{}", why(&waits));
    place.power("w", json!({ "state": "Running", "requestId": "r3", "node": second })).await?;
    let kept = place.api::<Workspace>().get("w").await?;
    ensure!(execution(&kept)? == (first.clone(), instance) && vm.is_alive(), "{}", why(&kept));
    let records = fs::read_dir(pair.object(&kept)?)?;
    let names: Vec<_> = records.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    ensure!(!names.contains(&"holder.4".to_owned()), "{names:?}");
    proxy.mend();
    place.available("w").await?;
    ensure!(place.sh("w", "cat /root/note").await? == "kept", "stopped on the first, started on the second");
    stop(&place, "w", "s4").await?;

    // A member deletes it that never had it last.
    let last = place.api::<Workspace>().get("w").await?.status.unwrap_or_default();
    let had_it_last = last.previous_holder.map(|it| it.node.to_string()).unwrap_or_default();
    place.cluster().kill(&Component::Node(had_it_last)).await?;
    place.api::<Workspace>().delete("w", &DeleteParams::default()).await?;
    place.gone(place.api::<Workspace>(), "w", SOON).await?;
    let left = fs::read_dir(pair.pool.join("objects"))?.count();
    ensure!(left == 0, "{left} objects are left");
    Ok(())
}
