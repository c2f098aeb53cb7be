//! Between any two steps of create, start, stop, force-stop and delete: the operator or the daemon is killed, the API
//! server or etcd is killed and started again. Each operation ends as it was asked for, exactly once.
//!
//! There are as many Workspaces as steps. Each waits at a step of its own, so that one fault hits all of them, each
//! somewhere else. Then nobody is stopped any more, and what came of each is checked by what is on the host.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::TryStreamExt as _;
use futures::future::try_join_all;
use kibo_crds::node::Holder;
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{CommandResult, Volume, Workspace, WorkspaceTombstone};
use kibo_e2e::local::process::virtual_machines;
use kibo_e2e::local::{Component, cgroups_of, network_of};
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::{Place, Suite, eventually, execution, is_available, phase_of, why};
use kibo_failpoint::Action;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams};
use serde_json::json;

fn main() -> ExitCode {
    Suite::with_everything()
        .alone("the_operator_is_killed_between_any_two_steps", operator_killed)
        .alone("the_api_server_is_restarted_between_any_two_steps", api_server_restarted)
        .alone("etcd_is_restarted_between_any_two_steps", etcd_restarted)
        .alone("the_daemon_is_killed_between_any_two_steps", daemon_killed)
        .alone("a_daemon_that_dies_of_an_offer_or_a_go_runs_it_once", daemon_dies_in_its_session)
        .run()
}

/// Twelve guests that boot together on two cores take their time.
const LIMIT: Duration = Duration::from_secs(120);
/// What is cleared away after an end that was told already.
const CLEARED: Duration = Duration::from_secs(20);
const WORKSPACES: usize = 12;

/// In the operator, in their order.
const OPERATOR: Steps = Steps {
    create: &[
        "before-create-volume",
        "before-bind-volume",
        "before-start",
        "offer-sent",
        "offer-accepted",
        "volume-granted",
        "committed",
        "go-sent",
        "taken-applied",
        "available-applied",
    ],
    stop: &["before-stop", "stop-sent", "ended-applied-to-objects", "ended-applied"],
    start: &["before-start", "volume-granted", "committed", "go-sent"],
    force: &["before-stop", "stop-sent", "ended-applied-to-objects", "ended-applied"],
    delete: &[
        "before-stop",
        "stop-sent",
        "ended-applied-to-objects",
        "ended-applied",
        "before-delete-layer",
        "layer-removed",
        "before-delete-volume",
        "before-unbind-volume",
        "before-bury",
        "tombstone-made",
        "before-delete-volume-image",
        "volume-image-removed",
    ],
};

/// In the daemon. What it does in its session's own task is tested apart: who waits there holds all others up.
const DAEMON: Steps = Steps {
    create: &[
        "record-written",
        "holder-recorded",
        "image-made",
        "taken-told",
        "rules-made",
        "tap-made",
        "cgroup-made",
        "vm-started",
        "vm-recorded",
        "configuring-noted",
        "configuration-sent",
        "available-told",
    ],
    stop: &[
        "sync-asked",
        "ending-noted",
        "shutdown-sent",
        "vm-gone",
        "cgroup-removed",
        "network-detached",
        "object-released",
        "ended-told",
    ],
    start: &[
        "holder-recorded",
        "taken-told",
        "address-noted",
        "tap-made",
        "vm-started",
        "configuring-noted",
        "configuration-sent",
    ],
    force: &[
        "sync-asked",
        "ending-noted",
        "vm-killed",
        "vm-gone",
        "cgroup-removed",
        "network-detached",
        "object-released",
        "ended-told",
    ],
    delete: &["deletion-recorded", "image-removed", "holder-records-removed", "object-removed"],
};

struct Steps {
    create: &'static [&'static str],
    stop: &'static [&'static str],
    start: &'static [&'static str],
    force: &'static [&'static str],
    delete: &'static [&'static str],
}

async fn operator_killed(place: Arc<Place>) -> Result<()> {
    let nodes = [place.node("8", "4Gi").await?, place.node("8", "4Gi").await?];
    let all = Lives::new(&place, &nodes, &Component::Operator, Component::Operator)?;
    all.live(&OPERATOR).await
}

async fn api_server_restarted(place: Arc<Place>) -> Result<()> {
    let nodes = [place.node("8", "4Gi").await?, place.node("8", "4Gi").await?];
    let all = Lives::new(&place, &nodes, &Component::Operator, Component::ApiServer)?;
    all.live(&OPERATOR).await
}

async fn etcd_restarted(place: Arc<Place>) -> Result<()> {
    let nodes = [place.node("8", "4Gi").await?, place.node("8", "4Gi").await?];
    let all = Lives::new(&place, &nodes, &Component::Operator, Component::Etcd)?;
    all.live(&OPERATOR).await
}

async fn daemon_killed(place: Arc<Place>) -> Result<()> {
    let node = place.node("16", "8Gi").await?;
    let daemon = Component::Node(node.clone());
    let all = Lives::new(&place, &[node], &daemon, daemon.clone())?;
    all.live(&DAEMON).await
}

/// Workspaces that go through all operations together.
struct Lives<'a> {
    place: &'a Place,
    nodes: Vec<String>,
    names: Vec<String>,
    /// Who waits between two steps.
    points: Failpoints,
    /// What is killed and started again meanwhile.
    victim: Component,
}

impl<'a> Lives<'a> {
    fn new(place: &'a Place, nodes: &[String], steps_of: &Component, victim: Component) -> Result<Self> {
        let names = (0..WORKSPACES).map(|number| format!("w{number}")).collect();
        let points = Failpoints::of(place.cluster(), steps_of)?;
        Ok(Self { place, nodes: nodes.to_vec(), names, points, victim })
    }

    async fn live(&self, steps: &Steps) -> Result<()> {
        let outcome = self.all_operations(steps).await;
        // A test that failed must not leave anybody waiting.
        self.points.clear()?;
        outcome
    }

    async fn all_operations(&self, steps: &Steps) -> Result<()> {
        template(self.place).await?;
        self.hit("create", steps.create, self.create()).await?;
        self.run(&self.names, 1).await.context("create")?;

        let stopped = &self.names[..steps.stop.len()];
        self.hit("stop", steps.stop, self.power(stopped, "stop", json!({"state": "Stopped"}))).await?;
        self.stopped(stopped, "stop").await.context("stop")?;

        self.hit("start", steps.start, self.power(stopped, "start", json!({"state": "Running"}))).await?;
        self.run(stopped, 2).await.context("start")?;

        let forced = &self.names[..steps.force.len()];
        let force = self.power(forced, "force", json!({"state": "Stopped", "stopMode": "Force"}));
        self.hit("force", steps.force, force).await?;
        self.stopped(forced, "force").await.context("force")?;

        let known = self.place.api::<Workspace>().list(&ListParams::default()).await?.items;
        self.hit("delete", steps.delete, self.delete()).await?;
        self.gone(&known).await.context("delete")
    }

    /// Begins an operation, waits until there is a Workspace between any two of its steps, and lets the fault happen.
    async fn hit(&self, what: &str, steps: &[&str], begin: impl Future<Output = Result<()>>) -> Result<()> {
        let begun = std::time::Instant::now();
        self.points.arm(steps, Action::Wait)?;
        begin.await.with_context(|| format!("failed to begin {what}"))?;
        self.points.all_reached(steps, LIMIT).await.with_context(|| what.to_owned())?;
        let reached = begun.elapsed();
        let cluster = self.place.cluster();
        cluster.kill(&self.victim).await?;
        self.points.clear()?;
        cluster.start(&self.victim).await?;
        eprintln!("{what}: everybody waits after {reached:.1?}, {} is back after {:.1?}", self.victim, begun.elapsed());
        Ok(())
    }

    async fn create(&self) -> Result<()> {
        let volume = json!({"new": {"size": "16Mi"}, "mountPath": "/data", "deleteWithWorkspace": true});
        let spec = json!({"volume": volume});
        try_join_all(self.names.iter().map(|name| self.place.create_workspace(name, spec.clone()))).await.map(drop)
    }

    async fn power(&self, names: &[String], request: &str, mut power: serde_json::Value) -> Result<()> {
        power["requestId"] = json!(request);
        try_join_all(names.iter().map(|name| self.place.power(name, power.clone()))).await.map(drop)
    }

    async fn delete(&self) -> Result<()> {
        let api = self.place.api::<Workspace>();
        let params = DeleteParams::default();
        try_join_all(self.names.iter().map(|name| api.delete(name, &params))).await?;
        Ok(())
    }

    /// They run, each on one VM that is the stored one, and their entrypoints ran so often in all.
    async fn run(&self, names: &[String], times: u32) -> Result<()> {
        let all = futures::stream::iter(names.iter().map(Ok));
        all.try_for_each_concurrent(4, async |name| {
            self.place.workspace(name, "is available", LIMIT.as_secs(), is_available).await?;
            self.has_run(name, times).await.with_context(|| name.clone())
        })
        .await?;
        self.host_agrees().await
    }

    /// Its entrypoint, which Available may be a moment ahead of, ran so often in all; the layer is the one of its first run.
    async fn has_run(&self, name: &str, times: u32) -> Result<()> {
        // Not for ever, so that a failure says what it found.
        let wait = format!(
            "n=0; until [ $(wc -l < /data/runs) -ge {times} ] || [ $n -ge 600 ]; do n=$((n+1)); sleep 0.1; done 2>/dev/null"
        );
        let note = if times == 1 { "echo kept > /root/note; sync" } else { "true" };
        let found = self.place.sh(name, &format!("{wait}; {note}; cat /root/note; wc -l < /data/runs")).await?;
        ensure!(found == format!("kept\n{times}"), "layer and number of its runs: {found:?}");
        Ok(())
    }

    /// They are stopped, hold nothing, and the request has one result.
    async fn stopped(&self, names: &[String], request: &str) -> Result<()> {
        for name in names {
            let seconds = LIMIT.as_secs();
            let stopped = self.place.phase(name, WorkspacePhase::Stopped, seconds).await?;
            let status = stopped.status.clone().unwrap_or_default();
            ensure!(status.execution.is_none() && is_free(status.holder.as_ref()), "{name}: {status:?}");
            let results: Vec<_> =
                status.commands.iter().filter(|it| it.id.as_str() == request).map(|it| it.result).collect();
            ensure!(results == [CommandResult::Succeeded], "{name}: {results:?}");
            let volume = self.place.api::<Volume>().get(name).await?.status.unwrap_or_default();
            ensure!(is_free(volume.holder.as_ref()), "{name}: {volume:?}");
        }
        self.host_agrees().await
    }

    /// Nothing is left but a record of each.
    async fn gone(&self, known: &[Workspace]) -> Result<()> {
        for name in &self.names {
            self.place.gone(self.place.api::<Workspace>(), name, LIMIT.as_secs()).await?;
            self.place.gone(self.place.api::<Volume>(), name, LIMIT.as_secs()).await?;
        }
        for workspace in known {
            let id = workspace.status.as_ref().and_then(|status| status.id).context("it had an id")?;
            let tombstone = self.place.all::<WorkspaceTombstone>().get(&id.to_string()).await?;
            ensure!(tombstone.spec.name == workspace.name_any());
        }
        self.host_agrees().await?;
        for node in &self.nodes {
            let objects = self.place.cluster().layout().node(node).join("pool/objects");
            for object in names_in(&objects) {
                // What a node says for good about a grant that it never took outlives the object, which went elsewhere.
                let left: Vec<_> =
                    names_in(&objects.join(&object)).into_iter().filter(|name| !name.ends_with(".refused")).collect();
                ensure!(left.is_empty(), "left of object {object} on {node}: {left:?}");
            }
        }
        Ok(())
    }

    /// Processes, cgroups and directories on the host are those of the stored executions, one of each.
    async fn host_agrees(&self) -> Result<()> {
        eventually("the host has what the executions say", CLEARED, || async {
            let listed = self.place.api::<Workspace>().list(&ListParams::default()).await?.items;
            let mut stored: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
            for (node, instance) in listed.iter().filter_map(|it| execution(it).ok()) {
                stored.entry(node).or_default().insert(instance);
            }
            for node in &self.nodes {
                let stored = stored.remove(node).unwrap_or_default();
                let vms: Vec<String> = virtual_machines(node).into_iter().map(|vm| vm.instance).collect();
                ensure!(vms.len() == stored.len(), "{node} runs {vms:?} and {stored:?} are stored");
                ensure!(vms.into_iter().collect::<BTreeSet<_>>() == stored, "{node} runs others than {stored:?}");
                // Of each its tap and its rules.
                let cables: Vec<_> = stored.iter().map(|it| network_of(it)).filter(|it| it.len() != 2).collect();
                ensure!(cables.is_empty(), "{node}: not a tap and rules each: {cables:?}");
                let cgroups: BTreeSet<String> = cgroups_of(node).iter().filter_map(|path| file_name(path)).collect();
                ensure!(cgroups == stored, "{node} has cgroups {cgroups:?} for {stored:?}");
                let instances = self.place.cluster().layout().node(node).join("state/instances");
                ensure!(names_in(&instances) == stored, "{node} keeps {:?} for {stored:?}", names_in(&instances));
            }
            ensure!(stored.is_empty(), "elsewhere: {stored:?}");
            let status = listed.iter().filter_map(|it| it.status.as_ref());
            for ended in status.filter_map(|status| status.last_execution.as_ref()) {
                let left = network_of(&ended.instance_id.to_string());
                ensure!(left.is_empty(), "of {}: {left:?}", ended.instance_id);
            }
            Ok(Some(()))
        })
        .await
    }
}

/// Nobody may write: the right is given back, or rests with a node that has recorded its release.
fn is_free(holder: Option<&Holder>) -> bool {
    holder.is_none_or(|holder| holder.idle)
}

fn file_name(path: &Path) -> Option<String> {
    path.file_name().and_then(OsStr::to_str).map(str::to_owned)
}

fn names_in(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// A guest whose entrypoint leaves a line for each time that it was run.
async fn template(place: &Place) -> Result<()> {
    let mut template = place.template();
    let entrypoint = "echo run >> /data/runs && sync /data/runs && exec sleep infinity";
    template["spec"]["entrypoint"] = json!({"command": ["/bin/sh", "-c", entrypoint]});
    template["spec"]["writableLayer"]["size"] = json!("64Mi");
    place.create(template).await?;
    Ok(())
}

/// The two steps that a daemon does in its session.
async fn daemon_dies_in_its_session(place: Arc<Place>) -> Result<()> {
    let node = place.node("4", "2Gi").await?;
    let daemon = Component::Node(node.clone());
    let lives = Lives::new(&place, &[node], &daemon, daemon.clone())?;
    template(&place).await?;
    let volume = json!({"volume": {"new": {"size": "16Mi"}, "mountPath": "/data"}});
    let gone = async || Ok(place.cluster().process(&daemon).is_none().then_some(()));
    let dies = async || eventually("the daemon dies", LIMIT, gone).await;
    for point in ["offer-decided", "go-received"] {
        lives.points.arm(&[point], Action::Abort)?;
        place.create_workspace(point, volume.clone()).await?;
        dies().await?;
        ensure!(lives.points.clear()? == BTreeSet::from([point.to_owned()]));
        place.cluster().start(&daemon).await?;
        lives.run(&[point.to_owned()], 1).await.context(point)?;
    }
    // The end of an entrypoint is told, also by a daemon that does not know any more whether it was.
    let mut exits = place.template();
    let name = format!("{}-exits", place.template_name());
    exits["metadata"]["name"] = json!(name);
    exits["spec"]["entrypoint"] = json!({"command": ["/bin/sh", "-c", "exit 3"], "restart": "Never"});
    place.create(exits).await?;
    lives.points.arm(&["exit-told"], Action::Abort)?;
    place.create_workspace("exits", json!({"template": name})).await?;
    dies().await?;
    lives.points.clear()?;
    place.cluster().start(&daemon).await?;
    let told = |it: &Workspace| why(it).starts_with("EntrypointExited: ") && why(it).contains("exit status 3");
    place.workspace("exits", "says how its entrypoint ended", LIMIT.as_secs(), told).await?;

    let phases: Vec<_> = place.api::<Workspace>().list(&ListParams::default()).await?.iter().map(phase_of).collect();
    ensure!(phases == [Some(WorkspacePhase::Available); 3], "{phases:?}");
    Ok(())
}
