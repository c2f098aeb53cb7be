//! Ratios and memory: how much a node takes, and when it takes nothing more. Real daemons; the host's memory is what a
//! test writes into the files that its daemon reads.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{Node, OvercommitPolicy, Ratio};
use kibo_e2e::local::{Component, LocalNode, cgroups_of};
use kibo_e2e::suite::host_files::HostFiles;
use kibo_e2e::suite::typed::{result, said};
use kibo_e2e::suite::{Place, Suite, eventually, execution, has_failed, is_available, why};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

/// For what the operator and a daemon do by themselves.
const SOON: u64 = 60;

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_ratio_closes_and_opens_a_node_and_evicts_nothing", ratios)
        .test("a_host_that_is_short_of_memory_takes_nothing_new", memory_tight)
        .test("what_a_host_does_not_tell_is_absent", unreadable)
        .test("a_node_that_does_not_confirm_its_ratios_takes_nothing", unconfirmed)
        .test("a_guest_that_the_kernel_kills_for_memory_is_stopped_and_starts_again", out_of_memory)
        .test("a_ratio_that_changes_a_hundred_times_is_never_exceeded", changing_ratio)
        .alone("the_default_reaches_every_node_within_its_session", default_ratios)
        .run()
}

async fn becomes(place: &Place, id: &str, what: &str, reached: impl Fn(&Node) -> bool) -> Result<Node> {
    place.watched(place.all::<Node>(), id, what, SOON, reached).await
}

fn condition<'a>(node: &'a Node, kind: &str) -> Option<&'a Condition> {
    node.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == kind)
}

fn is(node: &Node, kind: &str, status: &str) -> bool {
    condition(node, kind).is_some_and(|condition| condition.status == status)
}

/// The node has confirmed these ratios, and takes Workspaces.
fn takes_with(node: &Node, cpu: &str, memory: &str) -> bool {
    let ratios = node.status.as_ref().and_then(|status| status.overcommit.as_ref());
    is(node, "Schedulable", "True")
        && ratios.is_some_and(|ratios| ratios.cpu.to_string() == cpu && ratios.memory.to_string() == memory)
}

fn running(node: &str) -> Value {
    json!({ "power": { "state": "Running", "node": node, "whenUnplaceable": "Fail" } })
}

/// A pinned start that is refused, and why.
async fn is_refused(place: &Place, name: &str, node: &str) -> Result<String> {
    place.create_workspace(name, running(node)).await?;
    let failed = place.workspace(name, "has failed", SOON, has_failed).await?;
    ensure!(why(&failed).starts_with("ResourceExhausted"), "{}", why(&failed));
    Ok(why(&failed))
}

async fn start(place: &Place, name: &str, request: &str, node: &str) -> Result<()> {
    let power = json!({ "state": "Running", "requestId": request, "node": node, "whenUnplaceable": "Fail" });
    place.power(name, power).await
}

async fn ratios(place: Arc<Place>) -> Result<()> {
    let node = place.node("1", "512Mi").await?;
    place.create_workspace("first", running(&node)).await?;
    place.available("first").await?;

    let before = is_refused(&place, "second", &node).await?;
    ensure!(before.contains("too little CPU"), "{before}");
    said(&place, &["node", "overcommit", "set", &node, "--cpu", "2.5"], 0, "cpu x 2.5, memory as the cluster").await?;
    becomes(&place, &node, "takes with 2.5", |node| takes_with(node, "2.5", "1")).await?;
    let shown = result(&place, &["node", "get", &node]).await?;
    let expected = json!({ "cpu": "2.5", "cpu_source": "NODE", "memory": "1", "memory_source": "DEFAULT" });
    ensure!(shown["overcommit"] == expected && shown["schedulable"]["cpu_millis"] == 2500, "{shown:#}");
    start(&place, "second", "room", &node).await?;
    place.available("second").await?;

    // Below what is allocated: nothing is evicted, and nothing comes.
    said(&place, &["node", "overcommit", "set", &node, "--cpu", "0.5"], 0, "cpu x 0.5").await?;
    becomes(&place, &node, "takes with 0.5", |node| takes_with(node, "0.5", "1")).await?;
    let closed = is_refused(&place, "third", &node).await?;
    ensure!(closed.contains("too little CPU"), "{closed}");
    for name in ["first", "second"] {
        let kept = place.workspace(name, "is there", SOON, |_| true).await?;
        ensure!(is_available(&kept), "{}", why(&kept));
    }

    // Given again with its id it is done once; what it was given with is refused when it has changed.
    let version = shown["registration_version"].as_str().context("a version")?.to_owned();
    let set = ["node", "overcommit", "set", &node, "--cpu", "default", "--memory", "default", "--command-id", "again"];
    said(&place, &set, 10, "--expected-version").await?;
    said(&place, &[&set[..], &["--expected-version", &version]].concat(), 14, "has changed since version").await?;
    let api = place.all::<Node>();
    for bad in ["16.001", "1.0001", "-1", "1e3", "", "NaN"] {
        let patch = Patch::Merge(json!({ "spec": { "overcommit": { "cpu": bad, "requestId": null } } }));
        let error = api.patch(&node, &PatchParams::default(), &patch).await.err();
        let error = error.with_context(|| format!("{bad:?} was taken"))?.to_string();
        ensure!(error.contains("decimal from 0 to 16"), "{bad:?}: {error}");
        let args = ["node", "overcommit", "set", &node, &format!("--cpu={bad}")];
        said(&place, &args, 10, "must be a decimal from 0 to 16").await?;
    }
    for good in ["16", "0", "0.001", "2.5"] {
        let patch = Patch::Merge(json!({ "spec": { "overcommit": { "cpu": good, "requestId": null } } }));
        api.patch(&node, &PatchParams::default(), &patch).await.with_context(|| good.to_owned())?;
    }
    becomes(&place, &node, "takes again", |node| takes_with(node, "2.5", "1")).await?;
    Ok(())
}

/// A node that reads its host's memory in these files, and has more room than others.
async fn host(place: &Place, name: &str) -> Result<(String, HostFiles)> {
    let files = place.host_files(name)?;
    let change = |node: &mut LocalNode| node.proc = Some(files.root().to_owned());
    Ok((place.node_with("8", "2Gi", change).await?, files))
}

async fn memory_tight(place: Arc<Place>) -> Result<()> {
    let (tight, files) = host(&place, "tight").await?;
    becomes(&place, &tight, "has memory", |node| is(node, "MemoryTight", "False")).await?;
    let other = place.node("2", "512Mi").await?;
    place.create_workspace("first", running(&other)).await?;
    place.available("first").await?;
    // The operator prefers the emptier node and does not know yet: the node itself refuses, and the other one gets it.
    files.memory(99)?;
    place.create_workspace("moves-on", json!({})).await?;
    let placed = place.available("moves-on").await?;
    ensure!(execution(&placed)?.0 == other, "a node that is short of memory took it");
    // That was told at once, and stands until there is more than enough.
    let since = becomes(&place, &tight, "is tight", |node| is(node, "MemoryTight", "True")).await?;
    ensure!(is(&since, "Schedulable", "False"), "{:?}", condition(&since, "Schedulable"));
    said(&place, &["node", "list"], 0, "yes").await?;
    files.memory(149)?;
    let refused = is_refused(&place, "waits", &tight).await?;
    ensure!(refused.contains("short of free host memory"), "{refused}");
    // Nobody is left.
    place.create_workspace("nowhere", json!({ "power": { "state": "Running", "whenUnplaceable": "Fail" } })).await?;
    let nowhere = place.workspace("nowhere", "has failed", SOON, has_failed).await?;
    ensure!(why(&nowhere).contains("1 short of free host memory"), "{}", why(&nowhere));
    let shown = result(&place, &["node", "get", &tight]).await?;
    ensure!(shown["host_usage"]["memory_tight"] == true, "{shown:#}");
    ensure!(shown["host_usage"]["memory_tight_since"].is_string(), "{shown:#}");

    files.memory(151)?;
    becomes(&place, &tight, "has memory again", |node| is(node, "MemoryTight", "False")).await?;
    start(&place, "waits", "again", &tight).await?;
    place.available("waits").await?;
    Ok(())
}

async fn unreadable(place: Arc<Place>) -> Result<()> {
    let files = place.host_files("dumb")?;
    files.write("meminfo", "MemTotal: many kB\n")?;
    files.write("stat", "cpu garbage\n")?;
    files.write("pressure/cpu", "some avg60=\n")?;
    std::fs::remove_file(files.root().join("pressure/memory"))?;
    let id = place.node_with("2", "512Mi", |node| node.proc = Some(files.root().to_owned())).await?;
    // What is not known stands in nobody's way.
    place.create_workspace("runs", running(&id)).await?;
    place.available("runs").await?;
    becomes(&place, &id, "has told its sample", |node| is(node, "MemoryTight", "Unknown")).await?;
    let shown = result(&place, &["node", "get", &id]).await?;
    for item in ["memory_available_bytes", "cpu_idle", "cpu_pressure_some", "memory_pressure_full", "memory_tight"] {
        ensure!(shown["host_usage"][item].is_null(), "{item}: {shown:#}");
    }
    let page = place.kibo(&["node", "get", &id]).await?.ok()?;
    let lines: Vec<_> = page.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for line in ["Memory available -", "Memory tight -", "CPU idle -", "CPU pressure some -, full -"] {
        ensure!(lines.iter().any(|it| it == line), "{line}: {page}");
    }
    Ok(())
}

async fn unconfirmed(place: Arc<Place>) -> Result<()> {
    let id = place.node("2", "512Mi").await?;
    becomes(&place, &id, "takes Workspaces", |node| takes_with(node, "1", "1")).await?;
    let session =
        |node: &Node| node.status.as_ref()?.session.as_ref().map(|session| (session.id.clone(), session.alive));
    let before = session(&place.all::<Node>().get(&id).await?).context("it has a session")?.0;
    let daemon = Component::Node(id.clone());
    place.cluster().pause(&daemon)?;
    let patch = Patch::Merge(json!({ "spec": { "overcommit": { "cpu": "4" } } }));
    let patched = place.all::<Node>().patch(&id, &PatchParams::default(), &patch).await;
    let refused = match patched {
        Ok(_) => is_refused(&place, "waits", &id).await,
        Err(error) => Err(error.into()),
    };
    let dropped = becomes(&place, &id, "loses its session", |node| {
        session(node).is_some_and(|(id, alive)| id == before && !alive)
    })
    .await;
    place.cluster().resume(&daemon)?;
    let refused = refused?;
    ensure!(refused.contains("new settings") || refused.contains("without a control session"), "{refused}");
    dropped?;
    let back = becomes(&place, &id, "takes with 4", |node| takes_with(node, "4", "1")).await?;
    ensure!(session(&back).is_some_and(|(id, _)| id != before), "it confirms in a new session");
    start(&place, "waits", "again", &id).await?;
    place.available("waits").await?;
    Ok(())
}

/// What the cgroup of an Instance may use: as much as it does now, and so many bytes more.
fn limit_memory(node: &str, instance: &str, more: u64) -> Result<()> {
    let files = |cgroup: &Path| {
        let v1 = (cgroup.join("memory.usage_in_bytes"), cgroup.join("memory.limit_in_bytes"));
        [v1, (cgroup.join("memory.current"), cgroup.join("memory.max"))]
    };
    let cgroups = cgroups_of(node).into_iter().filter(|cgroup| cgroup.ends_with(instance));
    let found = cgroups.flat_map(|cgroup| files(&cgroup)).find(|(used, _)| used.is_file());
    let (used, limit) = found.with_context(|| format!("no memory cgroup of {instance}"))?;
    let used: u64 = std::fs::read_to_string(&used)?.trim().parse()?;
    std::fs::write(&limit, (used + more).to_string()).with_context(|| format!("cannot write {}", limit.display()))
}

async fn out_of_memory(place: Arc<Place>) -> Result<()> {
    let node = place.node("2", "1Gi").await?;
    place.create_workspace("other", running(&node)).await?;
    let mut greedy = running(&node);
    greedy["resources"] = json!({ "memory": "256Mi" });
    place.create_workspace("greedy", greedy).await?;
    let (other, greedy) = (place.available("other").await?, place.available("greedy").await?);
    let (vm, (_, instance)) = (place.vm(&other)?, execution(&greedy)?);
    limit_memory(&node, &instance, 8 << 20)?;
    let eats = ["workspace", "exec", "greedy", "--", "sh", "-c", "head -c 100M /dev/zero | tail"];
    let ran = place.kibo(&eats).await?;
    ensure!(ran.code != 0, "{ran:?}");
    let ended = place.phase("greedy", WorkspacePhase::Stopped, SOON).await?;
    ensure!(why(&ended).starts_with("OutOfMemory"), "{}", why(&ended));
    let shown = place.kibo(&["workspace", "get", "greedy"]).await?.ok()?;
    ensure!(shown.contains("was killed: give the Workspace more memory"), "{shown}");
    let kept = place.workspace("other", "is there", SOON, |_| true).await?;
    ensure!(is_available(&kept) && place.vm(&kept)? == vm, "the other guest was disturbed: {}", why(&kept));

    start(&place, "greedy", "again", &node).await?;
    place.available("greedy").await?;
    uses_are_told(&place, &node).await
}

/// What each Workspace uses of what is kept for it, as soon as its node has reported it.
async fn uses_are_told(place: &Place, node: &str) -> Result<()> {
    let told = async || {
        let top = result(place, &["top", "workspaces", "--node", node]).await?;
        let rows = top["workspaces"].as_array().cloned().unwrap_or_default();
        ensure!(rows.len() == 2, "{top:#}");
        Ok(rows.iter().all(|row| row["memory_used_bytes"].is_u64() && row["cpu_used_millis"].is_u64()).then_some(rows))
    };
    let rows = eventually("the node has told what its VMs use", Duration::from_secs(120), told).await?;
    for row in &rows {
        let (used, kept) = (row["memory_used_bytes"].as_u64(), row["memory_allocated_bytes"].as_u64());
        // An emulator's translated code counts as well, so it may be more than what is kept.
        ensure!(used > Some(32 << 20) && kept >= Some(192 << 20), "{row:#}");
    }
    let usage =
        place.kubectl(&["get", "workspaceusages", "other", "-o", "jsonpath={.used.memoryBytes}"]).await?.ok()?;
    usage.trim().parse::<u64>().with_context(|| format!("no amount: {usage}"))?;
    let figures = place.kibo(&["node", "get", node, "--wide"]).await?.ok()?;
    ensure!(figures.contains("given out of the host"), "{figures}");
    Ok(())
}

/// Follows the log of a node with one core: under which ratio each Workspace of a quarter of a core was admitted, in
/// thousandths, after what was confirmed and what ran at that moment. Gives back how many were, by ratio.
fn check_admissions(place: &Place, node: &str) -> Result<BTreeMap<u64, usize>> {
    let log = std::fs::read_to_string(place.cluster().log(&Component::Node(node.to_owned())))?;
    let mut in_force = None;
    let mut running: BTreeSet<&str> = BTreeSet::new();
    let mut admitted = BTreeMap::new();
    for line in log.lines() {
        let word = |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        let number = |name: &str| -> Result<u64> {
            Ok(word(name).with_context(|| format!("no {name} in {line}"))?.trim_matches('"').parse()?)
        };
        if line.contains("settings applied") {
            let ratio: Ratio = word("cpu_ratio").context("no cpu_ratio")?.parse()?;
            in_force = Some((number("revision")?, u64::from(ratio.thousandths())));
        } else if line.contains(" admitted ") {
            let (revision, ratio) = in_force.context("nothing was admitted before the first settings")?;
            ensure!(number("settings")? == revision && number("cpu_limit")? == ratio, "{line} under {in_force:?}");
            let counted = 250 * (u64::try_from(running.len())? + 1);
            ensure!(counted <= number("cpu")? && number("cpu")? <= ratio, "{line} while {running:?} run");
            *admitted.entry(ratio).or_default() += 1;
        } else if line.contains("from=Booting") {
            running.extend(word("instance"));
        }
    }
    Ok(admitted)
}

async fn changing_ratio(place: Arc<Place>) -> Result<()> {
    const WORKSPACES: usize = 8;
    const RATIOS: [&str; 5] = ["0", "1", "0.25", "2", "0.5"];
    let node = place.node("1", "4Gi").await?;
    place.ensure_template().await?;
    let nodes = place.all::<Node>();
    let ratio = async |cpu: &str| {
        let patch = Patch::Merge(json!({ "spec": { "overcommit": { "cpu": cpu } } }));
        nodes.patch(&node, &PatchParams::default(), &patch).await.with_context(|| format!("ratio {cpu}"))
    };
    // Each wants a quarter of what the node has; they wait for their turn, and some of them go again.
    let names: Vec<_> = (0..WORKSPACES).map(|number| format!("load-{number}")).collect();
    let create = async {
        for name in &names {
            place.create_workspace(name, json!({ "resources": { "cpu": "0.25" } })).await?;
        }
        Ok(())
    };
    let change = async {
        for turn in 0..100 {
            let patched = ratio(RATIOS[turn % RATIOS.len()]).await?;
            let wanted = patched.metadata.generation;
            // As fast as the node confirms.
            becomes(&place, &node, "has confirmed its ratio", |node| {
                let schedulable = condition(node, "Schedulable");
                schedulable.is_some_and(|it| it.observed_generation >= wanted && it.reason != "SettingsUnconfirmed")
            })
            .await?;
        }
        anyhow::Ok(())
    };
    tokio::try_join!(create, change)?;
    ratio("2").await?;
    for name in &names {
        place.available(name).await?;
    }
    let admitted = check_admissions(&place, &node)?;
    ensure!(admitted.values().sum::<usize>() >= WORKSPACES && admitted.len() > 1, "by ratio: {admitted:?}");
    Ok(())
}

async fn default_ratios(place: Arc<Place>) -> Result<()> {
    let (first, second) = (place.node("2", "512Mi").await?, place.node("2", "512Mi").await?);
    said(&place, &["node", "overcommit", "set", &second, "--memory", "2"], 0, "memory x 2").await?;
    let session = async |id: &str| -> Result<Option<String>> {
        Ok(place.all::<Node>().get(id).await?.status.and_then(|status| status.session).map(|session| session.id))
    };
    let sessions = (session(&first).await?, session(&second).await?);
    let shown = result(&place, &["node", "overcommit", "get"]).await?;
    ensure!(shown["cpu"] == "1" && shown["memory_tight_enter_below_percent"] == 10, "{shown:#}");
    let version = shown["version"].as_str().context("a version")?;
    let set = ["node", "overcommit", "set-default", "--cpu", "4", "--memory", "1.5", "--command-id", "wide"];
    let set = [&set[..], &["--expected-version", version]].concat();
    said(&place, &set, 0, "cluster-wide ratios: cpu 4, memory 1.5").await?;
    said(&place, &set, 0, "cluster-wide ratios: cpu 4, memory 1.5").await?;
    said(
        &place,
        &[
            "node",
            "overcommit",
            "set-default",
            "--cpu",
            "3",
            "--memory",
            "1",
            "--command-id",
            "wide",
            "--expected-version",
            version,
        ],
        14,
        "other ratios",
    )
    .await?;
    said(
        &place,
        &["node", "overcommit", "set-default", "--cpu", "3", "--expected-version", version],
        14,
        "have changed since version",
    )
    .await?;
    becomes(&place, &first, "takes with the default", |node| takes_with(node, "4", "1.5")).await?;
    becomes(&place, &second, "keeps its own", |node| takes_with(node, "4", "2")).await?;
    ensure!((session(&first).await?, session(&second).await?) == sessions, "a session was cut");

    let api = place.all::<OvercommitPolicy>();
    let wrong = json!({ "spec": { "memoryTight": { "enterBelowPercent": 15, "leaveAbovePercent": 15 } } });
    let error = api.patch("default", &PatchParams::default(), &Patch::Merge(&wrong)).await.err().context("taken")?;
    ensure!(error.to_string().contains("must be less than leaveAbovePercent"), "{error}");
    let back = json!({ "spec": { "cpu": "1", "memory": "1", "request": null } });
    api.patch("default", &PatchParams::default(), &Patch::Merge(&back)).await?;
    becomes(&place, &first, "takes as before", |node| takes_with(node, "1", "1")).await?;
    Ok(())
}
