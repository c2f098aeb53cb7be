//! A pool on a network that stops answering: what uses it stands still and nothing else does, and goes on, or dies, by what
//! the pool says when it is back; or people give it up.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kibo_crds::node::{IsolationState, Node, NodeStatus};
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{StoragePool, Workspace};
use kibo_e2e::local::{Component, LocalPool, ProcessId};
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::proxy::Proxy;
use kibo_e2e::suite::remote::Remote;
use kibo_e2e::suite::{Place, STOP, Suite, condition, eventually, execution, phase_of, why};
use kibo_failpoint::Action;
use kibo_node_daemon::vmm::Cgroups;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_pool_that_hangs_stops_its_own_guests_until_it_is_back_or_is_given_up", hangs)
        .test("what_stood_still_while_its_disk_was_given_away_dies_when_the_pool_is_back", given_away)
        .run()
}

const SOON: u64 = 60;
/// From the return of the pool to the death of a guest.
const BOUND: Duration = Duration::from_secs(5);
/// A guest that runs uses some time in as long.
const STILL: Duration = Duration::from_secs(1);
/// The least that a daemon takes.
const FREEZE_AFTER: u32 = 5;

fn is_paused(workspace: &Workspace) -> bool {
    condition(workspace, "Paused").is_some_and(|it| it.status == "True" && it.reason == "PoolUnreadable")
}

async fn becomes(place: &Place, id: &str, what: &str, reached: impl Fn(&NodeStatus) -> bool) -> Result<()> {
    let reached = |node: &Node| node.status.as_ref().is_some_and(&reached);
    place.watched(place.all::<Node>(), id, what, SOON, reached).await.map(drop)
}

/// Whether the pool is as wanted by the word of its node.
async fn shows_pool(place: &Place, node: &str, pool: &str, available: bool) -> Result<()> {
    let is_so = |status: &NodeStatus| {
        let session = status.session.as_ref().is_some_and(|session| session.alive);
        session && status.pools.iter().any(|it| it.id.as_str() == pool && it.available == available)
    };
    becomes(place, node, &format!("shows pool {pool} with available={available}, in a session"), is_so).await
}

async fn stop(place: &Place, name: &str, request: &str) -> Result<()> {
    place.power(name, json!({ "state": "Stopped", "requestId": request })).await?;
    place.phase(name, WorkspacePhase::Stopped, STOP).await.map(drop)
}

async fn ends(place: &Place, daemon: &Component) -> Result<()> {
    let gone = async || Ok(place.cluster().process(daemon).is_none().then_some(()));
    eventually(&format!("{daemon} ends"), Duration::from_secs(SOON), gone).await
}

/// It was told to, and its threads get no time any more. That the kernel calls the cgroup frozen cannot be waited for: a
/// thread that hangs in the pool is not, and does nothing either.
async fn stands_still(node: &str, instance: &str, vm: &ProcessId) -> Result<()> {
    let cgroup = Cgroups::open(Path::new("/sys/fs/cgroup"), node)?.instance(instance);
    let used = || -> Result<u64> {
        let stat = procfs::process::Process::new(vm.pid)?.stat()?;
        Ok(stat.utime + stat.stime)
    };
    let mut last: Option<(Instant, u64)> = None;
    let is_still = || {
        let since = used().map(|used| {
            let now = (Instant::now(), used);
            let known = last.filter(|(_, known)| *known == used && cgroup.is_frozen()).unwrap_or(now);
            last = Some(known);
            now.0 - known.0
        });
        std::future::ready(since.map(|since| (since >= STILL).then_some(())))
    };
    eventually(&format!("{instance} stands still"), Duration::from_secs(SOON), is_still).await
}

async fn hangs(place: Arc<Place>) -> Result<()> {
    let remote = place.remote()?;
    let path = remote.pool();
    let node = place.node_with("4", "1536Mi", |node| {
        node.pools.push(LocalPool { id: "far".to_owned(), path, default: false });
        node.freeze_after_seconds = Some(FREEZE_AFTER);
    });
    let node = node.await?;
    let binding = json!({ "new": { "size": "64Mi", "pool": "far" }, "mountPath": "/data" });
    for name in ["w", "forced"] {
        place.create_workspace(name, json!({ "volume": binding })).await?;
    }
    place.create_workspace("near", json!({})).await?;
    let (workspace, forced, _) =
        tokio::try_join!(place.available("w"), place.available("forced"), place.available("near"))?;
    let (w, forced) = (Guest::of(&place, &workspace)?, Guest::of(&place, &forced)?);
    place.sh("w", "echo kept > /data/note; echo too > /root/note; sync").await?;
    place.sh("w", "(while :; do date >> /data/noise; sync; done) > /dev/null 2>&1 &").await?;
    shows_pool(&place, &node, "far", true).await?;

    remote.hang();
    stands_still(&node, &w.instance, &w.vm).await?;
    let paused = place.workspace("w", "says that it stands still", SOON, is_paused).await?;
    let words = condition(&paused, "Paused").map(|it| it.message.clone()).unwrap_or_default();
    ensure!(words.contains("storage pool far"), "{words}");
    ensure!(phase_of(&paused) == Some(WorkspacePhase::Available) && w.vm.is_alive(), "{}", why(&paused));
    ensure!(place.sh("near", "echo lives").await? == "lives");

    remote.go_on();
    place.workspace("w", "goes on", SOON, |it| condition(it, "Paused").is_none()).await?;
    ensure!(place.sh("w", "cat /data/note").await? == "kept" && w.vm.is_alive(), "the same guest");
    Box::pin(for_good(&place, &node, &remote, &[w, forced])).await?;
    ensure!(place.sh("near", "echo lives").await? == "lives");
    stop(&place, "near", "end").await
}

/// A guest with its process.
struct Guest {
    instance: String,
    vm: ProcessId,
}

impl Guest {
    fn of(place: &Place, workspace: &Workspace) -> Result<Self> {
        Ok(Self { instance: execution(workspace)?.1, vm: place.vm(workspace)? })
    }
}

/// It does not come back, and people decide. A process that waits in it, as that of the first guest does, cannot end before
/// its host lets go of it.
async fn for_good(place: &Place, node: &str, remote: &Remote, guests: &[Guest; 2]) -> Result<()> {
    remote.hang();
    for guest in guests {
        stands_still(node, &guest.instance, &guest.vm).await?;
    }
    place.power("forced", json!({ "state": "Stopped", "stopMode": "Force", "requestId": "force" })).await?;
    // The daemon does everything for the others as long as that takes.
    place.create_workspace("later", json!({})).await?;
    place.available("later").await?;
    stop(place, "later", "end").await?;
    place.api::<Workspace>().delete("later", &DeleteParams::default()).await?;
    place.gone(place.api::<Workspace>(), "later", SOON).await?;
    let still = place.api::<Workspace>().get("w").await?;
    ensure!(is_paused(&still) && execution(&still)?.1 == guests[0].instance, "{}", why(&still));
    place.workspace("forced", "says what its end waits for", SOON, waits_for_far).await?;
    shows_pool(place, node, "far", false).await?;
    let shown = place.kibo(&["node", "get", node]).await?.ok()?;
    let far =
        shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).find(|it| it.first() == Some(&"far"));
    ensure!(far.is_some_and(|it| it.get(2) == Some(&"no")), "not AVAILABLE: {shown}");

    let reaches = |it: &StoragePool| it.status.iter().flat_map(|it| &it.members).any(|member| member.available);
    place.watched(place.all::<StoragePool>(), "far", "is out of reach", SOON, |it| !reaches(it)).await?;
    place.kibo(&["storage-pool", "declare-lost", "far", "--confirm-data-is-gone", "--yes"]).await?.ok()?;
    let hangs = place.workspace("w", "says what its end waits for", SOON, waits_for_far).await?;
    let words = condition(&hangs, "Blocked").map(|it| it.message.clone()).unwrap_or_default();
    ensure!(words.contains("its process hangs in the kernel of the host") && guests[0].vm.is_alive(), "{words}");
    ensure!(place.sh("near", "echo lives").await? == "lives");

    remote.give_up();
    place.phase("forced", WorkspacePhase::Stopped, STOP).await?;
    let ended = place.workspace("w", "has failed", SOON, |it| phase_of(it) == Some(WorkspacePhase::Failed)).await?;
    ensure!(why(&ended).contains("storage pool far, which was declared lost"), "{}", why(&ended));
    for guest in guests {
        place.no_trace_of(node, &guest.instance).await?;
    }
    // With what was elsewhere it goes on.
    let refused = place.kibo(&["workspace", "start", "w"]).await?;
    ensure!(refused.code == 13 && refused.stderr.contains("declared lost"), "{refused:?}");
    place.kibo(&["workspace", "unbind", "w"]).await?.ok()?;
    place.kibo(&["workspace", "start", "w"]).await?.ok()?;
    ensure!(place.sh("w", "cat /root/note").await? == "too");
    stop(place, "w", "end").await
}

fn waits_for_far(workspace: &Workspace) -> bool {
    let blocked = condition(workspace, "Blocked").filter(|it| it.status == "True");
    blocked.is_some_and(|it| it.message.contains("storage pool far: the pool's file system does not answer"))
}

/// The first node is behind a network to its pool and to the operator; the second is at the pool's server.
async fn given_away(place: Arc<Place>) -> Result<()> {
    let remote = place.remote()?;
    let proxy = Proxy::to(place.cluster().ports().session).await?;
    let pool = |path| vec![LocalPool { id: "both".to_owned(), path, default: true }];
    let (endpoint, far, near) = (proxy.endpoint(), pool(remote.pool()), pool(remote.pool_at_the_server()));
    let first = place.node_with("1", "512Mi", |node| {
        (node.endpoint, node.pools, node.freeze_after_seconds) = (Some(endpoint), far, Some(FREEZE_AFTER));
    });
    let first = first.await?;
    let second = place.node_with("1", "512Mi", |node| node.pools = near).await?;
    place.create_workspace("w", json!({ "power": { "state": "Running", "node": first } })).await?;
    let workspace = place.available("w").await?;
    let (vm, (_, instance)) = (place.vm(&workspace)?, execution(&workspace)?);
    place.sh("w", "echo kept > /root/note; sync").await?;

    proxy.cut();
    remote.hang();
    stands_still(&first, &instance, &vm).await?;
    let is_alive = |status: &NodeStatus| status.session.as_ref().is_some_and(|session| session.alive);
    becomes(&place, &first, "has no session", |status| !is_alive(status)).await?;
    // Rightly: the other member sees that its count stands still.
    let isolation = json!({ "incarnation": 1, "confirmHostCannotWrite": true, "requestId": "hung" });
    let patch = Patch::Merge(json!({ "spec": { "isolation": isolation } }));
    place.all::<Node>().patch(&first, &PatchParams::default(), &patch).await?;
    let is_done = |status: &NodeStatus| {
        status.isolation.as_ref().is_some_and(|isolation| isolation.state == IsolationState::Finished)
    };
    becomes(&place, &first, "is isolated", is_done).await?;
    // The one that takes it over dies twice on the way: when the first is marked as dead, and with its own record.
    let daemon = Component::Node(second.clone());
    let points = Failpoints::of(place.cluster(), &daemon)?;
    points.arm(&["victims-marked"], Action::Abort)?;
    place.power("w", json!({ "state": "Running", "requestId": "elsewhere", "node": second })).await?;
    ends(&place, &daemon).await?;
    points.clear()?;
    points.arm(&["holder-recorded"], Action::Abort)?;
    place.cluster().spawn(&daemon).await?;
    ends(&place, &daemon).await?;
    points.clear()?;
    place.cluster().start(&daemon).await?;
    let elsewhere = place.available("w").await?;
    ensure!(execution(&elsewhere)?.0 == second && place.sh("w", "cat /root/note").await? == "kept");
    ensure!(vm.is_alive(), "nobody could tell it anything yet");

    remote.go_on();
    ensure!(vm.ended_within(BOUND).await, "it goes on with a disk that is somebody else's");
    ensure!(place.sh("w", "echo new >> /root/note; sync; cat /root/note").await? == "kept\nnew");
    proxy.mend();
    let component = Component::Node(first.clone());
    ends(&place, &component).await?;
    place.no_trace_of(&first, &instance).await?;
    place.cluster().start(&component).await?;
    ensure!(place.sh("w", "cat /root/note").await? == "kept\nnew");
    // Its end is told in the session that has begun: it had stood still, and was rightly declared dead.
    let log = std::fs::read_to_string(place.cluster().log(&component))?;
    ensure!(
        log.lines().any(|line| line.contains(&instance) && line.contains("FENCED_WHILE_STILL")),
        "it had stood still"
    );
    let told = place.cluster().layout().node(&first).join("state/spool").join(format!("{instance}.events"));
    let is_acked = async || Ok((!told.exists()).then_some(()));
    eventually("its events are acknowledged", Duration::from_secs(SOON), is_acked).await?;
    let now = place.api::<Workspace>().get("w").await?;
    ensure!(condition(&now, "TwoWriters").is_none(), "{:?}", condition(&now, "TwoWriters"));
    place.power("w", json!({ "state": "Stopped", "requestId": "end" })).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await.map(drop).context("it stops where it runs")
}
