//! What breaks, and what must hold then: each fault is made, none is mocked.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kibo_crds::Workspace;
use kibo_crds::workspace::WorkspacePhase;
use kibo_e2e::local::Component;
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::{Place, START, STOP, Suite, execution, has_failed, is_available, phase_of, why};
use kibo_failpoint::Action;
use kube::api::DeleteParams;
use serde_json::json;

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_killed_vm_is_seen_within_three_seconds", killed_vm)
        .test("a_killed_daemon_finds_its_guest_again", killed_daemon)
        .test("a_vm_that_ended_without_its_daemon_is_reported", vm_ends_without_daemon)
        .test("each_failure_has_a_reason_of_its_own", reasons)
        .test("a_disk_that_is_full_is_said_and_waited_for", full_disk)
        .alone("a_killed_operator_finishes_what_was_asked", killed_operator)
        .alone("a_restarted_api_server_loses_nothing", restarted_apiserver)
        .run()
}

const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";

async fn killed_vm(place: Arc<Place>) -> Result<()> {
    place.node("1", "512Mi").await?;
    place.create_workspace("w", json!({})).await?;
    let first = place.available("w").await?;
    place.sh("w", "echo kept > /root/note && sync").await?;
    let (node, instance) = execution(&first)?;

    let killed = Instant::now();
    place.vm(&first)?.kill().await?;
    let failed = place.workspace("w", "has failed", 10, has_failed).await?;
    ensure!(killed.elapsed() < Duration::from_secs(3), "seen after {:?}", killed.elapsed());
    ensure!(!why(&failed).starts_with(':'), "a failure says why: {}", why(&failed));
    ensure!(failed.status.as_ref().is_some_and(|status| status.execution.is_none()), "it holds no execution");
    place.no_trace_of(&node, &instance).await?;

    place.power("w", json!({"state": "Running", "requestId": "again"})).await?;
    place.available("w").await?;
    ensure!(place.sh("w", "cat /root/note").await? == "kept");
    Ok(())
}

async fn killed_daemon(place: Arc<Place>) -> Result<()> {
    let node = Component::Node(place.node("1", "512Mi").await?);
    place.create_workspace("w", json!({})).await?;
    let before = place.available("w").await?;
    let boot = place.sh("w", BOOT_ID).await?;
    let incarnation = |it: &Workspace| it.status.as_ref()?.execution.as_ref().map(|execution| execution.incarnation);

    place.cluster().kill(&node).await?;
    ensure!(place.vm(&before)?.is_alive(), "the guest runs on without its daemon");
    place.cluster().start(&node).await?;
    let after = place.available("w").await?;
    ensure!(execution(&after)? == execution(&before)?, "it is the same Instance");
    ensure!(incarnation(&after) == incarnation(&before), "a daemon's restart is no new incarnation");
    ensure!(place.sh("w", BOOT_ID).await? == boot, "it is the same boot of the guest");

    // The adopted guest is stopped and started like any other.
    place.power("w", json!({"state": "Stopped"})).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;
    let (id, instance) = execution(&before)?;
    place.no_trace_of(&id, &instance).await
}

/// The daemon is away when the guest ends: it must find that out, and lose no event over it.
async fn vm_ends_without_daemon(place: Arc<Place>) -> Result<()> {
    let node = Component::Node(place.node("1", "512Mi").await?);
    place.create_workspace("w", json!({})).await?;
    let first = place.available("w").await?;
    let vm = place.vm(&first)?;
    place.cluster().kill(&node).await?;
    vm.kill().await?;
    place.cluster().start(&node).await?;
    let failed = place.workspace("w", "has failed", 15, has_failed).await?;
    ensure!(failed.status.as_ref().is_some_and(|status| status.execution.is_none()), "it holds no execution");
    let (id, instance) = execution(&first)?;
    place.no_trace_of(&id, &instance).await?;
    place.power("w", json!({"state": "Running", "requestId": "again"})).await?;
    place.available("w").await.map(drop)
}

/// The operator dies in the middle of a create, a stop and a delete; each ends as asked.
async fn killed_operator(place: Arc<Place>) -> Result<()> {
    place.node("2", "1Gi").await?;
    let operator = Component::Operator;
    place.create_workspace("w", json!({})).await?;
    let begun = |it: &Workspace| it.status.as_ref().is_some_and(|status| status.execution.is_some());
    place.workspace("w", "has an execution", START, begun).await?;
    place.cluster().kill(&operator).await?;
    place.cluster().start(&operator).await?;
    let first = place.available("w").await?;

    place.power("w", json!({"state": "Stopped"})).await?;
    let stopping = |it: &Workspace| matches!(phase_of(it), Some(WorkspacePhase::Stopping | WorkspacePhase::Stopped));
    place.workspace("w", "stops", STOP, stopping).await?;
    place.cluster().kill(&operator).await?;
    place.cluster().start(&operator).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;
    let (node, instance) = execution(&first)?;
    place.no_trace_of(&node, &instance).await?;

    place.power("w", json!({"state": "Running"})).await?;
    let second = place.available("w").await?;
    place.api::<Workspace>().delete("w", &DeleteParams::default()).await?;
    place.cluster().kill(&operator).await?;
    place.cluster().start(&operator).await?;
    place.gone(place.api::<Workspace>(), "w", STOP).await?;
    let (node, instance) = execution(&second)?;
    place.no_trace_of(&node, &instance).await
}

/// Overwrites the program of PID 1 in its memory: a signal alone does not reach it.
const KILL_THE_AGENT: &str = "a=$(sed -n '/r-xp/{s/-.*//p;q}' /proc/1/maps); \
    dd if=/dev/zero of=/proc/1/mem bs=4096 seek=$((0x$a / 4096)) count=64 conv=notrunc";
const PANIC: &str = "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger";

async fn reasons(place: Arc<Place>) -> Result<()> {
    let guest = place.cluster().programs().guest.clone().context("there is a guest")?;
    let images = place.cluster().layout().root().join("images-of-reasons");
    std::fs::create_dir_all(&images)?;
    for image in std::fs::read_dir(guest.join("images"))? {
        let image = image?;
        std::os::unix::fs::symlink(image.path(), images.join(image.file_name()))?;
    }
    std::fs::write(images.join("corrupt.erofs"), vec![0x5a; 1 << 20])?;
    place.node_with("4", "2Gi", |node| node.images = Some(images)).await?;
    let template = async |name: &str, part: &str, value: serde_json::Value| {
        let mut template = place.template();
        template["metadata"]["name"] = json!(format!("{}-{name}", place.template_name()));
        template["spec"][part] = value;
        place.create(template).await?;
        place.create_workspace(name, json!({"template": format!("{}-{name}", place.template_name())})).await
    };
    template("corrupt", "rootImage", json!("corrupt")).await?;
    template("exits", "entrypoint", json!({"command": ["/bin/sh", "-c", "exit 3"], "restart": "Never"})).await?;
    // More than the host's disk has: as when it is full.
    template("full", "writableLayer", json!({"size": "60Ti"})).await?;
    for (name, script) in [("agent", KILL_THE_AGENT), ("panics", PANIC)] {
        place.create_workspace(name, json!({})).await?;
        place.available(name).await?;
        // It ends with the guest.
        let _ = place.kibo(&["workspace", "exec", name, "--", "sh", "-c", script]).await?;
    }
    for (name, expected, says) in [
        ("agent", "GuestAgentDied: ", "the agent in the guest died"),
        ("panics", "GuestPanicked: ", "sysrq"),
        ("exits", "EntrypointExited: ", "exit status 3"),
        ("corrupt", "GuestConfigureFailed: ", "root image"),
        ("full", "ResourceExhausted: ", "space"),
    ] {
        let told = |it: &Workspace| why(it).starts_with(expected) && why(it).contains(says);
        place.workspace(name, &format!("says {expected}"), START, told).await?;
    }
    Ok(())
}

/// The pool's disk fills up between the Go and the making of the image; and it is full before anybody is asked.
async fn full_disk(place: Arc<Place>) -> Result<()> {
    const GIB: u64 = 1 << 30;
    let disk = place.disk(8 * GIB)?;
    let node = place.node_with("2", "1Gi", |node| node.pools[0].path = disk.pool()).await?;
    let points = Failpoints::of(place.cluster(), &Component::Node(node))?;
    points.arm(&["go-received"], Action::Wait)?;
    place.create_workspace("caught", json!({})).await?;
    points.all_reached(&["go-received"], Duration::from_secs(START)).await?;
    disk.fill(GIB / 64)?;
    points.clear()?;
    let told = |it: &Workspace| has_failed(it) && why(it).starts_with("StorageFailed: ") && why(it).contains("free");
    let failed = place.workspace("caught", "says that there is no space", START, told).await?;
    ensure!(failed.status.as_ref().is_some_and(|status| status.execution.is_none()), "it holds no execution");

    place.create_workspace("waits", json!({})).await?;
    let told = |it: &Workspace| why(it).starts_with("ResourceExhausted: ") && why(it).contains("space");
    place.workspace("waits", "says that there is no space", START, told).await?;
    disk.empty()?;
    place.available("waits").await?;
    place.power("caught", json!({"state": "Running", "requestId": "again"})).await?;
    place.available("caught").await?;
    Ok(())
}

async fn restarted_apiserver(place: Arc<Place>) -> Result<()> {
    place.node("1", "512Mi").await?;
    place.create_workspace("w", json!({})).await?;
    let begun = |it: &Workspace| it.status.as_ref().is_some_and(|status| status.execution.is_some());
    place.workspace("w", "has an execution", START, begun).await?;
    place.cluster().kill(&Component::ApiServer).await?;
    place.cluster().start(&Component::ApiServer).await?;
    let running = place.workspace("w", "is available", START, is_available).await?;
    ensure!(place.vm(&running)?.is_alive());
    Ok(())
}
