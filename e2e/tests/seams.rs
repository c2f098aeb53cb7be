//! What happens exactly between two steps: a session that is cut, requests that come together, a leader that was stopped
//! for longer than its lease, a disk that does not take an event.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::future::{join, join_all};
use k8s_openapi::api::coordination::v1::Lease;
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{CommandResult, Volume, Workspace};
use kibo_e2e::local::process::virtual_machines;
use kibo_e2e::local::{Component, NAMESPACE};
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::proxy::Proxy;
use kibo_e2e::suite::replica::Replica;
use kibo_e2e::suite::{Place, START, STOP, Suite, eventually, execution, is_available, phase_of, why};
use kibo_failpoint::Action;
use kube::api::{Api, DeleteParams};
use rustix::process::Signal;
use serde_json::json;

fn main() -> ExitCode {
    Suite::with_everything()
        .alone("a_session_that_is_cut_before_its_go_is_no_loss", cut_before_the_go)
        .alone("a_session_that_is_cut_after_the_commit_runs_it_once", cut_after_the_commit)
        .test("of_those_that_want_a_volume_at_once_one_gets_it", one_gets_the_volume)
        .test("a_start_and_a_deletion_at_once_leave_nothing", started_and_deleted)
        .test("a_start_and_a_force_stop_at_once_have_one_outcome", started_and_forced)
        .test("force_ends_a_vm_whose_daemon_cannot_store_an_event", forced_while_an_event_waits)
        .alone("a_leader_that_was_stopped_writes_over_nothing", stopped_leader)
        .run()
}

const SOON: Duration = Duration::from_secs(20);
const NEAR: &str = "before Go it goes elsewhere at once";

/// A node behind a way that can be cut, the first choice, and one that is always there.
async fn two_nodes(place: &Place) -> Result<(Proxy, String, String)> {
    let proxy = Proxy::to(place.cluster().ports().session).await?;
    let endpoint = proxy.endpoint();
    let first = place.node_with("8", "4Gi", |node| node.endpoint = Some(endpoint)).await?;
    let second = place.node("8", "4Gi").await?;
    // With one Workspace on the second, the first has more room left.
    place.create_workspace("ballast", json!({"power": {"state": "Running", "node": second}})).await?;
    place.available("ballast").await?;
    Ok((proxy, first, second))
}

fn with_volume() -> serde_json::Value {
    json!({"volume": {"new": {"size": "16Mi"}, "mountPath": "/data"}})
}

/// Stops a start at a step and cuts the session of the node that it goes to.
async fn cut_at(place: &Place, points: &Failpoints, proxy: &Proxy, point: &str, node: &str) -> Result<()> {
    points.arm(&[point], Action::Wait)?;
    place.create_workspace(point, with_volume()).await?;
    points.all_reached(&[point], SOON).await?;
    proxy.cut();
    let ended = |it: &kibo_crds::Node| {
        let session = it.status.as_ref().and_then(|status| status.session.as_ref());
        session.is_some_and(|session| !session.alive)
    };
    place.watched(place.all(), node, "has no session", SOON.as_secs(), ended).await?;
    points.clear()?;
    Ok(())
}

async fn cut_before_the_go(place: Arc<Place>) -> Result<()> {
    let (proxy, first, second) = two_nodes(&place).await?;
    let points = Failpoints::of(place.cluster(), &Component::Operator)?;
    for point in ["offer-sent", "offer-accepted", "volume-granted"] {
        cut_at(&place, &points, &proxy, point, &first).await?;
        let running = place.available(point).await.with_context(|| format!("{point}: {NEAR}"))?;
        let (node, instance) = execution(&running)?;
        ensure!(node == second, "{point}: it runs on {node}, whose session was cut");
        proxy.mend();
        place.cluster().ready(&Component::Node(first.clone())).await?;
        ensure!(virtual_machines(&first).is_empty(), "{point}: it runs twice");
        place.api::<Workspace>().delete(point, &DeleteParams::default()).await?;
        place.gone(place.api::<Workspace>(), point, STOP).await?;
        place.no_trace_of(&second, &instance).await?;
    }
    Ok(())
}

/// A committed execution is its node's: only that one can say what became of it.
async fn cut_after_the_commit(place: Arc<Place>) -> Result<()> {
    let (proxy, first, second) = two_nodes(&place).await?;
    let points = Failpoints::of(place.cluster(), &Component::Operator)?;
    for point in ["committed", "go-sent"] {
        cut_at(&place, &points, &proxy, point, &first).await?;
        let stored = place.api::<Workspace>().get(point).await?;
        let (node, instance) = execution(&stored)?;
        ensure!(node == first, "{point}: committed to {node}");
        proxy.mend();
        let running = place.workspace(point, "is available", START, is_available).await?;
        ensure!(execution(&running)? == (first.clone(), instance.clone()), "{point}: it is another Instance");
        let vms: BTreeSet<_> =
            [&first, &second].iter().flat_map(|id| virtual_machines(id)).map(|vm| vm.instance).collect();
        ensure!(vms.len() == 2 && vms.contains(&instance), "{point}: {vms:?}");
        place.api::<Workspace>().delete(point, &DeleteParams::default()).await?;
        place.gone(place.api::<Workspace>(), point, STOP).await?;
    }
    Ok(())
}

async fn one_gets_the_volume(place: Arc<Place>) -> Result<()> {
    place.node("4", "2Gi").await?;
    let volume = json!({
        "apiVersion": "kibotos.dev/v1alpha1", "kind": "Volume", "metadata": {"name": "v"}, "spec": {"size": "16Mi"},
    });
    place.create(volume).await?;
    place.ensure_template().await?;
    let names = ["a", "b", "c"];
    let bound = json!({
        "volume": {"claim": "v", "mountPath": "/data"},
        "power": {"state": "Running", "requestId": "first", "whenUnplaceable": "Fail"},
    });
    for created in join_all(names.iter().map(|name| place.create_workspace(name, bound.clone()))).await {
        created?;
    }
    let settled = |it: &Workspace| is_available(it) || phase_of(it) == Some(WorkspacePhase::Failed);
    let all = join_all(names.iter().map(|name| place.workspace(name, "is settled", START, settled))).await;
    let all = all.into_iter().collect::<Result<Vec<_>>>()?;
    let (runs, lost): (Vec<_>, Vec<_>) = all.iter().partition(|it| is_available(it));
    ensure!(runs.len() == 1, "{} run", runs.len());
    let winner = runs[0].metadata.name.clone().unwrap_or_default();
    let bound_to = place.api::<Volume>().get("v").await?.status.and_then(|status| status.bound_to);
    ensure!(bound_to.is_some_and(|bound| bound.name == winner));
    for loser in lost {
        let said = why(loser);
        ensure!(said.starts_with("VolumeInUse") && said.contains(&format!("Workspace {winner}")), "{said}");
        ensure!(loser.status.as_ref().is_some_and(|status| status.execution.is_none()));
    }
    Ok(())
}

async fn started_and_deleted(place: Arc<Place>) -> Result<()> {
    let node = place.node("4", "2Gi").await?;
    let power = json!({"power": {"state": "Stopped"}});
    for round in 0..6 {
        let name = format!("w{round}");
        place.create_workspace(&name, power.clone()).await?;
        place.phase(&name, WorkspacePhase::Stopped, STOP).await?;
        let api = place.api::<Workspace>();
        let params = DeleteParams::default();
        let start = place.power(&name, json!({"state": "Running", "requestId": "start"}));
        let (started, deleted) = join(start, api.delete(&name, &params)).await;
        deleted?;
        if let Err(lost) = started {
            ensure!(lost.to_string().contains("not found"), "{lost:#}");
        }
        place.gone(place.api::<Workspace>(), &name, STOP).await?;
    }
    eventually("no VM is left", SOON, async || Ok(virtual_machines(&node).is_empty().then_some(()))).await
}

async fn started_and_forced(place: Arc<Place>) -> Result<()> {
    let node = place.node("4", "2Gi").await?;
    place.create_workspace("w", json!({"power": {"state": "Stopped"}})).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;
    for round in 0..4 {
        let (start, force) = (format!("start-{round}"), format!("force-{round}"));
        let (started, forced) = join(
            place.power("w", json!({"state": "Running", "requestId": start})),
            place.power("w", json!({"state": "Stopped", "requestId": force, "stopMode": "Force"})),
        )
        .await;
        for refused in [started.as_ref().err(), forced.as_ref().err()].into_iter().flatten() {
            ensure!(format!("{refused:#}").contains("not consumed"), "{refused:#}");
        }
        ensure!(started.is_ok() || forced.is_ok(), "one of two requests is taken");
        // What was taken last is what is done.
        let settled = |it: &Workspace| {
            let commands = it.status.iter().flat_map(|status| &status.commands);
            let open = commands.clone().any(|command| command.result == CommandResult::Processing);
            let last = it.spec.power.as_ref().and_then(|power| power.request_id.as_ref());
            let has_last = commands.clone().any(|command| Some(&command.id) == last);
            it.is_power_request_consumed() && has_last && !open
        };
        let workspace = place.workspace("w", "is settled", START, settled).await?;
        let asked = workspace.power_request().request_id.map(|id| id.to_string());
        let expected = usize::from(asked.as_deref() == Some(start.as_str()));
        let running = usize::from(workspace.status.as_ref().is_some_and(|status| status.execution.is_some()));
        ensure!(running == expected, "{asked:?} was asked last, and it holds {running} executions");
        eventually("the host agrees", SOON, async || Ok((virtual_machines(&node).len() == expected).then_some(())))
            .await?;
        for command in workspace.status.iter().flat_map(|status| &status.commands) {
            let says_why = command.result == CommandResult::Succeeded || command.message.is_some();
            ensure!(says_why, "{command:?}");
        }
        if running == 1 {
            let stop = json!({"state": "Stopped", "requestId": format!("end-{round}"), "stopMode": "Force"});
            place.power("w", stop).await?;
            place.phase("w", WorkspacePhase::Stopped, STOP).await?;
        }
    }
    Ok(())
}

/// As on a state disk that is full or hangs: the event of the guest's coming up is not stored for as long.
async fn forced_while_an_event_waits(place: Arc<Place>) -> Result<()> {
    let node = place.node("1", "512Mi").await?;
    let points = Failpoints::of(place.cluster(), &Component::Node(node.clone()))?;
    points.arm(&["before-available-told"], Action::Wait)?;
    place.create_workspace("w", json!({})).await?;
    points.all_reached(&["before-available-told"], Duration::from_secs(START)).await?;
    ensure!(virtual_machines(&node).len() == 1);
    place.power("w", json!({"state": "Stopped", "requestId": "force", "stopMode": "Force"})).await?;
    eventually("the VM is gone", SOON, async || Ok(virtual_machines(&node).is_empty().then_some(()))).await?;
    points.clear()?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await.map(drop)
}

/// The leader is stopped between its decision and its write, until another one has led and done the work.
async fn stopped_leader(place: Arc<Place>) -> Result<()> {
    let own = Component::Operator;
    place.cluster().stop(&own).await?;
    let mut first = Replica::start(&place, "first")?;
    let leases: Api<Lease> = Api::namespaced(place.client(), NAMESPACE);
    let holder = async || anyhow::Ok(leases.get("kibotos-operator").await?.spec.and_then(|spec| spec.holder_identity));
    let led_by = async |name: &str| {
        let leads = async || Ok((holder().await?.as_deref() == Some(name)).then_some(()));
        eventually(&format!("{name} leads"), Duration::from_secs(40), leads).await
    };
    led_by("first").await?;
    let proxy = Proxy::to(first.session).await?;
    let endpoint = proxy.endpoint();
    let node = place.node_with("2", "1Gi", |node| node.endpoint = Some(endpoint)).await?;
    let points = Failpoints::of(place.cluster(), &own)?;
    points.arm(&["offer-accepted"], Action::Wait)?;
    place.create_workspace("w", json!({})).await?;
    points.all_reached(&["offer-accepted"], SOON).await?;

    first.signal(Signal::STOP)?;
    place.cluster().spawn(&own).await?;
    led_by("local").await?;
    proxy.lead_to(place.cluster().ports().session);
    let running = place.available("w").await?;

    ensure!(points.clear()?.contains("offer-accepted"));
    first.signal(Signal::CONT)?;
    let ended = tokio::time::timeout(SOON, first.process.wait()).await.context("the stopped leader goes on")??;
    ensure!(ended.code() == Some(1), "{ended:?}: {}", first.log());
    let after = place.api::<Workspace>().get("w").await?;
    ensure!(after.status == running.status, "the stopped leader wrote: {:?}", after.status);
    ensure!(virtual_machines(&node).len() == 1);
    place.cluster().ready(&own).await?;
    Ok(())
}
