//! What happens to an Instance while nobody hears of it is told later, and has its effect once.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::events::v1::Event;
use kibo_crds::Node;
use kibo_crds::workspace::WorkspacePhase;
use kibo_e2e::local::Component;
use kibo_e2e::local::process::virtual_machines;
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::proxy::Proxy;
use kibo_e2e::suite::{Place, STOP, Suite, eventually, execution, phase_of, why};
use kibo_failpoint::Action;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams};
use serde_json::json;

const SOON: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    Suite::with_everything()
        .alone("an_event_is_stored_once_whoever_dies_on_its_way", an_event_is_stored_once_whoever_dies_on_its_way)
        .run()
}

/// Told to begin, it waits until nobody is there to hear of it; then it ends, and its guest's kernel with it.
const ENTRYPOINT: &str = "until [ -e /root/begin ]; do sleep 0.2; done; sleep 6; \
    (sleep 3; echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger) & exit 3";

async fn an_event_is_stored_once_whoever_dies_on_its_way(place: Arc<Place>) -> Result<()> {
    let proxy = Proxy::to(place.cluster().ports().session).await?;
    let endpoint = proxy.endpoint();
    let id = place.node_with("1", "512Mi", |node| node.endpoint = Some(endpoint)).await?;
    let node = Component::Node(id.clone());
    let mut template = place.template();
    template["spec"]["entrypoint"] = json!({"command": ["/bin/sh", "-c", ENTRYPOINT], "restart": "Never"});
    place.create(template).await?;
    place.create_workspace("w", json!({})).await?;
    let running = place.available("w").await?;
    let (_, instance) = execution(&running)?;
    place.sh("w", "touch /root/begin").await?;

    // Cut off: the entrypoint ends, the guest ends, and the daemon dies and comes back.
    proxy.cut();
    let is_over = |node: &Node| {
        let session = node.status.as_ref().and_then(|status| status.session.as_ref());
        session.is_some_and(|session| !session.alive)
    };
    place.watched(place.all::<Node>(), &id, "its session is over", SOON.as_secs(), is_over).await?;
    let is_gone = async || Ok(virtual_machines(&id).is_empty().then_some(()));
    eventually("the guest has ended", SOON, is_gone).await?;
    let stored = place.workspace("w", "is as it was", 1, |it| phase_of(it) == Some(WorkspacePhase::Available)).await?;
    ensure!(execution(&stored)?.1 == instance, "nobody has heard of it");
    place.cluster().kill(&node).await?;
    place.cluster().spawn(&node).await?;

    // The first leader stores the end and dies before it says so; the next one is told again.
    let points = Failpoints::of(place.cluster(), &Component::Operator)?;
    points.arm(&["ended-applied"], Action::Wait)?;
    proxy.mend();
    points.all_reached(&["ended-applied"], SOON).await?;
    let first = place.phase("w", WorkspacePhase::Failed, STOP).await?;
    ensure!(why(&first).starts_with("GuestPanicked"), "{}", why(&first));
    place.cluster().kill(&Component::Operator).await?;
    points.clear()?;
    place.cluster().start(&Component::Operator).await?;
    let spool = place.cluster().layout().node(&id).join("state/spool");
    let is_told = async || Ok(std::fs::read_dir(&spool)?.next().is_none().then_some(()));
    eventually("every event is acknowledged", SOON, is_told).await?;

    let last = place.api::<kibo_crds::Workspace>().get("w").await?;
    ensure!(last.resource_version() == first.resource_version(), "the second telling wrote something: {last:#?}");
    for reason in ["EntrypointExited", "GuestPanicked"] {
        let told = times(&place, reason).await?;
        ensure!(told == 1, "{reason} was told {told} times");
    }
    let traces = place.no_trace_of(&id, &instance).await;
    traces.context("the Instance ended while its daemon was cut off")
}

/// How often a reason was recorded for the Workspace.
async fn times(place: &Place, reason: &str) -> Result<i32> {
    let api: Api<Event> = place.api();
    let events = api.list(&ListParams::default()).await?.items.into_iter();
    let of_reason = events.filter(|event| event.reason.as_deref() == Some(reason));
    Ok(of_reason.map(|event| event.series.map_or(1, |series| series.count)).sum())
}
