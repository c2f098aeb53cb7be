//! The main job, by kubectl only and by kibo only: a Workspace becomes available, runs commands, is
//! stopped and started with its data kept, and leaves nothing when it is deleted.

use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{Volume, Workspace, WorkspaceTombstone};
use kibo_e2e::suite::{Place, STOP, Suite, eventually, execution};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_workspace_lives_by_kubectl_alone", by_kubectl)
        .test("a_workspace_lives_by_kibo_alone", by_kibo)
        .test("what_was_synced_is_there_after_a_normal_stop", synced_data_survives)
        .test("a_volume_outlives_its_workspace", a_volume_outlives_its_workspace)
        .test("commands_get_their_input_and_give_their_status", commands)
        .test("the_log_is_what_the_entrypoint_wrote", log)
        .run()
}

const WRITE: &str = "echo layer > /root/note && echo volume > /data/note && sync";
const READ: &str = "cat /root/note /data/note";
const READ_BACK: &str = "layer\nvolume";

async fn by_kubectl(place: Arc<Place>) -> Result<()> {
    place.node("2", "1Gi").await?;
    let mut workspace = place.workspace_manifest("w");
    workspace["spec"]["volume"] = json!({"new": {"size": "64Mi"}, "mountPath": "/data", "deleteWithWorkspace": true});
    let manifests = format!("{}\n---\n{workspace}\n", place.template());
    place.kubectl_with(&["apply", "-f", "-"], &manifests).await?.ok()?;
    let available = ["wait", "workspace/w", "--for=condition=Available", "--timeout=90s"];
    place.kubectl(&available).await?.ok()?;
    let first = place.available("w").await?;

    let exec = |line| ["kibo", "workspace", "exec", "w", "--", "sh", "-c", line];
    place.kubectl(&exec(WRITE)).await?.ok()?;
    place
        .kubectl(&["patch", "workspace", "w", "--type=merge", "-p", r#"{"spec":{"power":{"state":"Stopped"}}}"#])
        .await?
        .ok()?;
    place.kubectl(&["wait", "workspace/w", "--for=condition=Stopped", "--timeout=60s"]).await?.ok()?;
    let (node, instance) = execution(&first)?;
    place.no_trace_of(&node, &instance).await?;

    place
        .kubectl(&["patch", "workspace", "w", "--type=merge", "-p", r#"{"spec":{"power":{"state":"Running"}}}"#])
        .await?
        .ok()?;
    place.kubectl(&available).await?.ok()?;
    let second = place.available("w").await?;
    ensure!(execution(&second)?.1 != instance, "a start makes a new Instance");
    let read = place.kubectl(&exec(READ)).await?.ok()?;
    ensure!(read.trim() == READ_BACK, "after the start: {read}");

    place.kubectl(&["delete", "workspace", "w", "--timeout=60s"]).await?.ok()?;
    place.gone(place.api::<Volume>(), "w", 30).await?;
    let (node, instance) = execution(&second)?;
    place.no_trace_of(&node, &instance).await?;
    let id = second.status.and_then(|status| status.id).context("it had an id")?;
    let tombstone = place.all::<WorkspaceTombstone>().get(&id.to_string()).await?;
    ensure!(tombstone.spec.name == "w", "{tombstone:?}");
    no_objects_left(&place, &node)
}

/// The pool of a node holds no image of a deleted object.
fn no_objects_left(place: &Place, node: &str) -> Result<()> {
    let pool = place.cluster().layout().node(node).join("pool");
    let mut images = Vec::new();
    let mut pending = vec![pool];
    while let Some(dir) = pending.pop() {
        for entry in std::fs::read_dir(&dir)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                pending.push(entry.path());
            } else if entry.file_name().to_string_lossy().contains("image") {
                images.push(entry.path());
            }
        }
    }
    ensure!(images.is_empty(), "left in the pool: {images:?}");
    Ok(())
}

async fn by_kibo(place: Arc<Place>) -> Result<()> {
    place.node("2", "1Gi").await?;
    let template = place.template_name();
    let create_template =
        ["template", "create", &template, "--image", "debian-12", "--memory", "128Mi", "--layer-size", "256Mi"];
    place.kibo(&create_template).await?.ok()?;
    place.kibo(&["volume", "create", "v", "--size", "64Mi"]).await?.ok()?;
    let selector = format!("test={}", place.namespace());
    let create =
        ["workspace", "create", "w", "--template", &template, "--volume", "v:/data", "--node-selector", &selector];
    place.kibo(&create).await?.ok()?;
    let shown = json_of(&place.kibo(&["workspace", "get", "w", "--json"]).await?.ok()?)?;
    ensure!(shown["result"]["state"] == "AVAILABLE", "{shown}");

    place.sh("w", WRITE).await?;
    place.kibo(&["workspace", "stop", "w"]).await?.ok()?;
    let stopped = place.kibo(&["workspace", "list"]).await?.ok()?;
    ensure!(stopped.contains("STOPPED"), "{stopped}");
    place.kibo(&["workspace", "start", "w"]).await?.ok()?;
    ensure!(place.sh("w", READ).await? == READ_BACK);

    // The id names it as well as the name does.
    let id = place.kibo(&["workspace", "list", "-q"]).await?.ok()?;
    let by_id = place.kibo(&["workspace", "exec", id.trim(), "--", "true"]).await?;
    ensure!(by_id.code == 0, "{by_id:?}");

    let refused = place.kibo(&["volume", "delete", "v"]).await?;
    ensure!(refused.code == 13, "a bound Volume is a failed precondition: {refused:?}");
    place.kibo(&["workspace", "delete", "w"]).await?.ok()?;
    ensure!(place.kibo(&["workspace", "get", "w"]).await?.code == 12, "a deleted Workspace is not found");
    place.kibo(&["volume", "delete", "v"]).await?.ok()?;
    place.gone(place.api::<Volume>(), "v", 30).await?;
    place.kibo(&["template", "delete", &template]).await?.ok()?;
    Ok(())
}

fn json_of(text: &str) -> Result<Value> {
    serde_json::from_str(text).with_context(|| format!("no JSON: {text}"))
}

/// A writer that goes on through the stop: each line that it was told is synced must be there.
async fn synced_data_survives(place: Arc<Place>) -> Result<()> {
    place.node("1", "512Mi").await?;
    place.create_workspace("w", json!({})).await?;
    place.available("w").await?;
    // Each number is reported only after the sync of its line has returned.
    let writer =
        "cd /root; i=0; while :; do i=$((i+1)); echo $i >> log; sync log; echo $i > told.new; mv told.new told; done";
    place.sh("w", &format!("nohup sh -c '{writer}' >/dev/null 2>&1 & sleep 2")).await?;
    let told: u64 = place.sh("w", "cat /root/told").await?.parse()?;
    ensure!(told > 0, "the writer writes");

    place.power("w", json!({"state": "Stopped"})).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;
    place.power("w", json!({"state": "Running"})).await?;
    place.available("w").await?;
    let last: u64 = place.sh("w", "tail -n 1 /root/log").await?.parse()?;
    let told_last: u64 = place.sh("w", "cat /root/told").await?.parse()?;
    ensure!(last >= told, "{told} was told before the stop, and the log ends with {last}");
    ensure!(last >= told_last, "{told_last} was told at the end, and the log ends with {last}");
    let lines: u64 = place.sh("w", "wc -l < /root/log").await?.parse()?;
    ensure!(lines == last, "{lines} lines, the last is {last}: none in between is missing");
    Ok(())
}

async fn a_volume_outlives_its_workspace(place: Arc<Place>) -> Result<()> {
    place.node("2", "1Gi").await?;
    let volume = json!({
        "apiVersion": "kibotos.dev/v1alpha1", "kind": "Volume", "metadata": {"name": "v"}, "spec": {"size": "64Mi"},
    });
    place.create(volume).await?;
    let bound = json!({"volume": {"claim": "v", "mountPath": "/data"}});
    place.create_workspace("one", bound.clone()).await?;
    place.available("one").await?;
    place.sh("one", "echo kept > /data/note && sync").await?;

    // A second one that wants it meanwhile does not get it.
    place.create_workspace("two", bound).await?;
    let waits =
        |it: &Workspace| it.status.as_ref().is_some_and(|status| status.execution.is_none() && status.reason.is_some());
    place.workspace("two", "says why it does not start", 30, waits).await?;
    place.kibo(&["workspace", "delete", "one"]).await?.ok()?;
    place.power("two", json!({"state": "Running", "requestId": "again"})).await.ok();
    place.available("two").await?;
    ensure!(place.sh("two", "cat /data/note").await? == "kept");
    Ok(())
}

async fn commands(place: Arc<Place>) -> Result<()> {
    place.node("1", "512Mi").await?;
    place.create_workspace("w", json!({})).await?;
    place.available("w").await?;
    let with_input = place.kibo_with(&["workspace", "exec", "-i", "w", "--", "tr", "a-z", "A-Z"], "shout\n").await?;
    ensure!(with_input.code == 0 && with_input.stdout == "SHOUT\n", "{with_input:?}");
    let status = place.kibo(&["workspace", "exec", "w", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]).await?;
    ensure!(status.code == 7 && status.stdout == "out\n" && status.stderr.contains("err"), "{status:?}");
    let signal = place.kibo(&["workspace", "exec", "w", "--", "sh", "-c", "kill -9 $$"]).await?;
    ensure!(signal.code == 137, "{signal:?}");
    let missing = place.kibo(&["workspace", "exec", "w", "--", "no-such-program"]).await?;
    ensure!(missing.code == 127 && missing.stderr.contains("no-such-program"), "as a shell says it: {missing:?}");
    let no_program = place.kibo(&["workspace", "exec", "w", "--", "/etc/passwd"]).await?;
    ensure!(no_program.code == 126 && no_program.stderr.contains("/etc/passwd"), "{no_program:?}");
    a_reader_that_leaves_ends_the_command(&place).await?;
    // More than any buffer on the way holds.
    let large = place.kibo(&["workspace", "exec", "w", "--", "sh", "-c", "yes | head -c 3000000"]).await?.ok()?;
    ensure!(large.len() == 3_000_000, "{} bytes came", large.len());
    ensure!(place.sh("w", "hostname || cat /proc/sys/kernel/hostname").await? == "w");
    Ok(())
}

/// `kibo … exec … | head`: nobody reads on, so kibo ends, and with it the command in the guest.
async fn a_reader_that_leaves_ends_the_command(place: &Place) -> Result<()> {
    let mut kibo = tokio::process::Command::new(place.cluster().programs().kibo())
        .args(["workspace", "exec", "w", "-n", place.namespace(), "--", "yes"])
        .env("KUBECONFIG", place.cluster().layout().kubeconfig())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut first = [0; 2];
    let mut output = kibo.stdout.take().context("its output")?;
    output.read_exact(&mut first).await?;
    ensure!(&first == b"y\n", "{first:?}");
    drop(output);
    let status = tokio::time::timeout(Duration::from_secs(30), kibo.wait()).await.context("kibo ends")??;
    ensure!(status.code() == Some(141), "as one that a broken pipe ends: {status}");
    eventually("the command has ended in the guest", Duration::from_secs(20), || async {
        let running = place.sh("w", "grep -lx yes /proc/[0-9]*/comm || true").await?;
        Ok(running.trim().is_empty().then_some(()))
    })
    .await
}

async fn log(place: Arc<Place>) -> Result<()> {
    place.node("1", "512Mi").await?;
    let mut template = place.template();
    template["spec"]["entrypoint"] =
        json!({"command": ["/bin/sh", "-c", "echo first; echo second >&2; exec sleep infinity"]});
    place.create(template).await?;
    place.create_workspace("w", json!({})).await?;
    place.available("w").await?;
    let both = |text: String| (text.contains("first") && text.contains("second")).then_some(());
    kibo_e2e::suite::eventually("the log has both lines", std::time::Duration::from_secs(10), || async {
        Ok(both(place.kibo(&["workspace", "logs", "w"]).await?.ok()?))
    })
    .await
}
