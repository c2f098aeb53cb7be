//! What is doubled, flooded, or goes all at once: the rest must not notice.

use std::fs;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kibo_crds::Workspace;
use kibo_crds::workspace::WorkspacePhase;
use kibo_e2e::local::Component;
use kibo_e2e::local::process::virtual_machines;
use kibo_e2e::suite::memory::resident;
use kibo_e2e::suite::{Place, START, STOP, Suite, eventually, execution};
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

const SOON: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_second_daemon_of_a_node_is_refused_and_boots_nothing", second_daemon)
        .test("a_guest_that_floods_its_host_is_contained", flood)
        .test("a_lost_state_directory_makes_no_second_writer", lost_state)
        .test("a_damaged_event_journal_stops_no_daemon", damaged_journal)
        .alone("a_namespace_goes_with_ten_workspaces_in_it", namespace)
        .run()
}

/// A daemon of the node with a state directory of its own, beside the one that runs.
fn beside(place: &Place, node: &str, state: &Path, log: &Path) -> Result<Child> {
    let layout = place.cluster().layout();
    let config = fs::read_to_string(layout.node(node).join("config.toml"))?;
    let own = layout.node(node).join("state");
    let config =
        config.replace(&format!("{:?}", own.display().to_string()), &format!("{:?}", state.display().to_string()));
    // It is on the first one's host, whose range only one of them can have.
    let mut config: toml::Table = config.parse()?;
    config.remove("network");
    let path = state.with_extension("toml");
    fs::write(&path, config.to_string())?;
    let log = fs::File::create(log)?;
    let child = Command::new(place.cluster().programs().node_daemon())
        .args(["run", "--config"])
        .arg(&path)
        .env("KIBOTOS_LOCAL_STATE", layout.root())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(true)
        .spawn();
    child.context("failed to start a second daemon")
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (kind, target) = (entry.file_type()?, to.join(entry.file_name()));
        if kind.is_dir() {
            copy(&entry.path(), &target)?;
        } else if kind.is_file() {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

async fn says(log: &Path, words: &str) -> Result<()> {
    eventually(&format!("{} says {words:?}", log.display()), SOON, || async {
        Ok(fs::read_to_string(log)?.contains(words).then_some(()))
    })
    .await
}

async fn second_daemon(place: Arc<Place>) -> Result<()> {
    let node = place.node("1", "512Mi").await?;
    let dir = place.cluster().layout().node(&node);
    let (log, copied) = (dir.join("second.log"), dir.join("copied"));

    // Nothing runs yet: the copy of the state directory opens a session, or tries to.
    copy(&dir.join("state"), &copied)?;
    let mut second = beside(&place, &node, &copied, &log)?;
    says(&log, "SESSION_REFUSAL_DUPLICATE").await?;
    second.kill().await?;
    let is_shown = |it: &kibo_crds::Node| {
        let conditions = it.status.iter().flat_map(|status| &status.conditions);
        conditions.into_iter().any(|condition| condition.type_ == "DuplicateHost" && condition.status == "True")
    };
    place.watched(place.all::<kibo_crds::Node>(), &node, "shows the duplicate", 30, is_shown).await?;

    place.create_workspace("w", json!({})).await?;
    let workspace = place.available("w").await?;
    let (vm, (_, instance)) = (place.vm(&workspace)?, execution(&workspace)?);
    place.sh("w", "echo kept > /root/note").await?;

    // A copy with the Instance in it, which would find that it does not run: it must not let go of its disk.
    fs::remove_dir_all(&copied)?;
    copy(&dir.join("state"), &copied)?;
    let mut second = beside(&place, &node, &copied, &log)?;
    let ended = tokio::time::timeout(SOON, second.wait()).await.context("the copy runs on")??;
    let said = fs::read_to_string(&log)?;
    ensure!(!ended.success() && said.contains("is a copy of another daemon's"), "{ended}: {said}");

    // One that knows nothing but the node's name and an old token.
    let mut second = beside(&place, &node, &dir.join("empty"), &log)?;
    says(&log, "was used already").await?;
    second.kill().await?;

    ensure!(vm.is_alive() && place.sh("w", "cat /root/note").await? == "kept", "the first goes on");
    let running: Vec<String> = virtual_machines(&node).into_iter().map(|vm| vm.instance).collect();
    ensure!(running == [instance], "something else was booted: {running:?}");
    let records = dir.join("pool/objects").join(workspace.metadata.uid.context("no uid")?);
    let released = fs::read_dir(records)?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    ensure!(!released.into_iter().any(|name| name.ends_with(".released")), "the disk was let go of");
    Ok(())
}

/// Without its state a daemon knows neither its key nor how to talk to the guests that run. It ends them, which it finds
/// by the list of processes, and comes back as an empty host once somebody has confirmed that the old one writes no more.
async fn lost_state(place: Arc<Place>) -> Result<()> {
    let node = place.node("1", "512Mi").await?;
    let (dir, component) = (place.cluster().layout().node(&node), Component::Node(node.clone()));
    place.create_workspace("w", json!({})).await?;
    let workspace = place.available("w").await?;
    let (vm, (_, instance)) = (place.vm(&workspace)?, execution(&workspace)?);
    place.sh("w", "echo kept > /root/note; sync").await?;

    place.cluster().kill(&component).await?;
    fs::remove_dir_all(dir.join("state"))?;
    place.cluster().spawn(&component).await?;
    says(
        &place.cluster().log(&component),
        &format!("killing a VM of this node that has no directory name=\"{instance}\""),
    )
    .await?;
    eventually("the guest is ended", SOON, async || Ok((!vm.is_alive()).then_some(()))).await?;
    // It is not let in, with whatever token: nobody has said that the life before this one is over.
    says(&place.cluster().log(&component), "has lived, and another host may still run what it held").await?;

    place.cluster().kill(&component).await?;
    let silent = |it: &kibo_crds::Node| {
        it.status.as_ref().and_then(|status| status.session.as_ref()).is_none_or(|session| !session.alive)
    };
    place.watched(place.all::<kibo_crds::Node>(), &node, "has no session", 30, silent).await?;
    let isolation = json!({ "spec": { "isolation": { "incarnation": 1, "confirmHostCannotWrite": true } } });
    let nodes = place.all::<kibo_crds::Node>();
    nodes.patch(&node, &PatchParams::default(), &Patch::Merge(isolation)).await?;
    place.phase("w", WorkspacePhase::Failed, 30).await?;
    fs::write(dir.join("enroll.token"), place.kibo(&["enrollment", "issue", &node]).await?.ok()?)?;
    place.cluster().start(&component).await?;

    place.power("w", json!({ "state": "Running", "requestId": "again" })).await?;
    let again = place.available("w").await?;
    ensure!(execution(&again)?.1 != instance, "the same Instance");
    ensure!(place.sh("w", "cat /root/note").await? == "kept", "the disk is another one");
    let running: Vec<String> = virtual_machines(&node).into_iter().map(|vm| vm.instance).collect();
    ensure!(running == [execution(&again)?.1], "these run: {running:?}");
    Ok(())
}

/// Takes PID 1's own descriptor of the channel, since nobody else can open it, and writes into it what comes.
const FLOOD_CHANNEL: &str = r#"
my ($port) = grep { (readlink("/proc/1/fd/$_") // "") =~ m{/dev/vport} } map { m{(\d+)$} } glob("/proc/1/fd/*");
die "PID 1 has no port" unless defined $port;
my $pidfd = syscall(434, 1, 0); die "pidfd_open: $!" if $pidfd < 0;
my $fd = syscall(438, $pidfd, int($port), 0); die "pidfd_getfd: $!" if $fd < 0;
open(my $channel, ">&=", $fd) or die "open: $!";
open(my $noise, "<", "/dev/urandom") or die "urandom: $!";
my $until = time + 20;
while (time < $until) {
    sysread($noise, my $some, 65536);
    my $zeros = "\0" x 65536;
    my $ones = "\1" x 65536;
    for my $piece ($some, $zeros, $ones) { syswrite($channel, $piece); }
}
"#;

async fn flood(place: Arc<Place>) -> Result<()> {
    /// More than a daemon needs for two guests, and far less than what the guest sends.
    const GROWTH_MIB: u64 = 64;
    let node = place.node("3", "1Gi").await?;
    let mut template = place.template();
    template["metadata"]["name"] = json!(format!("{}-loud", place.namespace()));
    template["spec"]["entrypoint"] =
        json!({ "command": ["/bin/sh", "-c", "yes 'and another line of no interest'"], "restart": "Always" });
    place.create(template.clone()).await?;
    place.create_workspace("quiet", json!({})).await?;
    place.create_workspace("loud", json!({ "template": template["metadata"]["name"] })).await?;
    for name in ["quiet", "loud"] {
        place.available(name).await?;
    }
    let daemon = place.cluster().process(&Component::Node(node.clone())).context("no daemon")?.pid;
    let resident_mib = || Ok::<_, anyhow::Error>(resident(daemon)? >> 20);
    let before = resident_mib()?;
    place.sh("loud", &format!("cat > /tmp/flood.pl <<'EOF'\n{FLOOD_CHANNEL}\nEOF")).await?;
    let in_background = "setsid sh -c 'yes console > /dev/console' > /dev/null 2>&1 & \
                         setsid perl /tmp/flood.pl > /tmp/flood.out 2>&1 & sleep 0";
    place.sh("loud", in_background).await?;
    let (begun, mut highest, mut answers) = (Instant::now(), before, 0);
    while begun.elapsed() < Duration::from_secs(20) {
        let asked = Instant::now();
        ensure!(place.sh("quiet", "echo here").await? == "here");
        ensure!(asked.elapsed() < Duration::from_secs(15), "the neighbour answered after {:?}", asked.elapsed());
        highest = highest.max(resident_mib()?);
        answers += 1;
    }
    eprintln!(
        "daemon: {before} MiB before, at most {highest} MiB during the flood; the neighbour answered {answers} times"
    );
    ensure!(highest <= before + GROWTH_MIB, "the daemon grew from {before} to {highest} MiB");
    // When it is over the guest is reached again, by the same daemon.
    let flooded = async || Ok(Some(place.sh("loud", "cat /tmp/flood.out").await?));
    let said = eventually("the flooding guest answers again", SOON * 2, flooded).await?;
    ensure!(said.is_empty(), "it could not flood: {said}");
    ensure!(
        place.cluster().process(&Component::Node(node)).is_some_and(|it| it.pid == daemon),
        "the daemon was restarted"
    );
    Ok(())
}

/// The disk has changed what the node had noted of its Instances: it comes back, and they end as they are asked to.
async fn damaged_journal(place: Arc<Place>) -> Result<()> {
    let node = place.node("2", "1Gi").await?;
    let component = Component::Node(node.clone());
    let mut journals = Vec::new();
    for name in ["first", "last"] {
        place.create_workspace(name, json!({})).await?;
        let (_, instance) = execution(&place.available(name).await?)?;
        journals.push(place.cluster().layout().node(&node).join(format!("state/spool/{instance}.events")));
    }
    place.cluster().kill(&component).await?;
    for (journal, in_the_middle) in journals.iter().zip([true, false]) {
        let mut bytes = fs::read(journal)?;
        let at = if in_the_middle { 10 } else { bytes.len() - 1 };
        bytes[at] ^= 0x40;
        fs::write(journal, bytes)?;
    }
    place.cluster().start(&component).await?;
    for (name, journal) in ["first", "last"].iter().zip(&journals) {
        ensure!(journal.with_extension("events.damaged").exists(), "{name}: nothing was put aside");
        ensure!(place.sh(name, "echo here").await? == "here", "{name}: it runs on");
        place.power(name, json!({ "state": "Stopped" })).await?;
        place.phase(name, WorkspacePhase::Stopped, STOP).await?;
        let is_gone = async || Ok((!journal.exists()).then_some(()));
        eventually(&format!("the end of {name} was told"), SOON, is_gone).await?;
    }
    Ok(())
}

/// Ten in every state: running, with Volumes, stopped, never started, waiting for a place, and just being started.
async fn namespace(place: Arc<Place>) -> Result<()> {
    let node = place.node("6", "2Gi").await?;
    let volume = json!({ "new": { "size": "64Mi" }, "mountPath": "/data" });
    let stopped = json!({ "state": "Stopped", "requestId": "never" });
    let kept = json!({ "apiVersion": "kibotos.dev/v1alpha1", "kind": "Volume", "metadata": { "name": "kept" },
                       "spec": { "size": "64Mi" } });
    place.create(kept).await?;
    let specs: [(&str, Value); 10] = [
        ("runs-1", json!({})),
        ("runs-2", json!({ "volume": volume })),
        ("runs-3", json!({ "volume": { "claim": "kept", "mountPath": "/data" } })),
        ("stopped", json!({ "volume": volume })),
        ("never-1", json!({ "power": stopped })),
        ("never-2", json!({ "power": stopped, "volume": volume })),
        ("waits-1", json!({ "nodeSelector": { "no": "where" } })),
        ("waits-2", json!({ "nodeSelector": { "no": "where" }, "volume": volume })),
        ("starts-1", json!({ "volume": volume })),
        ("starts-2", json!({})),
    ];
    for (name, spec) in specs.iter().filter(|(name, _)| !name.starts_with("starts")) {
        place.create_workspace(name, spec.clone()).await?;
    }
    for name in ["runs-1", "runs-2", "runs-3", "stopped"] {
        place.available(name).await?;
    }
    place.power("stopped", json!({ "state": "Stopped", "requestId": "s" })).await?;
    place.phase("stopped", WorkspacePhase::Stopped, START).await?;
    for (name, spec) in specs.iter().filter(|(name, _)| name.starts_with("starts")) {
        place.create_workspace(name, spec.clone()).await?;
    }
    let begun = |it: &Workspace| it.status.as_ref().is_some_and(|status| status.execution.is_some());
    place.workspace("starts-1", "has an execution", START, begun).await?;

    place.all::<Namespace>().delete(place.namespace(), &DeleteParams::default()).await?;
    let is_going = async || {
        let found = place.api::<Workspace>().get_opt("runs-3").await?;
        Ok(found.is_none_or(|it| it.metadata.deletion_timestamp.is_some()).then_some(()))
    };
    eventually("the deletion reaches the Workspaces", SOON, is_going).await?;
    place.cluster().kill(&Component::Operator).await?;
    place.cluster().start(&Component::Operator).await?;
    place.gone(place.all::<Namespace>(), place.namespace(), 150).await?;
    let running: Vec<String> = virtual_machines(&node).into_iter().map(|vm| vm.instance).collect();
    ensure!(running.is_empty(), "still running: {running:?}");
    let objects = place.cluster().layout().node(&node).join("pool/objects");
    let left = fs::read_dir(objects)?.count();
    ensure!(left == 0, "{left} objects are left in the pool");
    Ok(())
}
