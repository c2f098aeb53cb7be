//! Nodes that fall silent, in each of the ways in which that happens: their network drops everything, their daemon is
//! stopped, nothing but their word is missing. What runs there goes on, and is as it was when they are back.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Event;
use kibo_crds::node::NodePhase;
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{Node, Workspace};
use kibo_e2e::local::Component;
use kibo_e2e::suite::host::{Host, dial};
use kibo_e2e::suite::outside::addresses_of_host;
use kibo_e2e::suite::proxy::Proxy;
use kibo_e2e::suite::{Place, Suite, condition, eventually, execution, is_available, phase_of, played};
use kube::api::{Api, ListParams, Patch, PatchParams};
use rustix::process::Signal;
use serde_json::json;

/// As the operator is told: a node that is silent for so long is Unreachable. Less than it takes either side to see by
/// itself that a connection is dead.
const UNREACHABLE: Duration = Duration::from_secs(6);
const SOON: u64 = 60;

fn main() -> ExitCode {
    let names = format!("--session-name={}", addresses_of_host());
    Suite::with_everything()
        .operator_args(["--unreachable-seconds=6", "--offline-seconds=10", names.leak()])
        .test("a_node_whose_network_is_cut_is_offline_and_then_as_before", cut_network)
        .test("a_stopped_daemon_is_seen_though_its_connection_is_open", stopped_daemon)
        .alone("a_new_leader_gives_a_full_period", new_leader)
        .alone("workspaces_say_nothing_when_most_of_the_fleet_vanished_together", fleet_vanishes)
        .alone("a_leader_that_stood_still_blames_nobody", stalled_leader)
        .alone("nodes_are_back_soon_after_a_leader_took_over", handed_over)
        .run()
}

async fn becomes(place: &Place, id: &str, phase: NodePhase) -> Result<Node> {
    let is = |node: &Node| node.status.as_ref().is_some_and(|status| status.phase == Some(phase));
    place.watched(place.all(), id, &format!("is {phase:?}"), SOON, is).await
}

fn session(node: &Node) -> Result<(String, bool)> {
    let session = node.status.as_ref().and_then(|status| status.session.as_ref()).context("it had no session")?;
    Ok((session.id.clone(), session.alive))
}

/// Waits until a Workspace says that its node is, or is not, to be reached; its phase stays what it is.
async fn says(place: &Place, name: &str, value: &str, reason: &str) -> Result<Workspace> {
    let told =
        |it: &Workspace| condition(it, "NodeReachable").is_some_and(|it| it.status == value && it.reason == reason);
    let workspace = place.workspace(name, &format!("says NodeReachable {value} {reason}"), SOON, told).await?;
    ensure!(phase_of(&workspace) == Some(WorkspacePhase::Available), "{workspace:?}");
    Ok(workspace)
}

async fn cut_network(place: Arc<Place>) -> Result<()> {
    let outside = place.outside().await?;
    let proxy = Proxy::at(outside.host, place.cluster().ports().session).await?;
    let (namespace, endpoint) = (outside.name().to_owned(), proxy.endpoint());
    let id = place
        .node_with("2", "1Gi", |node| {
            (node.namespace, node.endpoint, node.network) = (Some(namespace), Some(endpoint), None);
        })
        .await?;
    for name in ["box", "dies"] {
        place.create_workspace(name, json!({})).await?;
    }
    let before = place.available("box").await?;
    let dies = place.available("dies").await?;
    let vm = place.vm(&before)?;
    place.sh("box", "echo here > /tmp/mark").await?;

    outside.cut().await?;
    let unreachable = becomes(&place, &id, NodePhase::Unreachable).await?;
    ensure!(!session(&unreachable)?.1, "nobody could isolate it: {unreachable:?}");
    // What happens meanwhile is told afterwards.
    place.vm(&dies)?.signal(Signal::KILL)?;
    becomes(&place, &id, NodePhase::Offline).await?;
    let offline = says(&place, "box", "False", "NodeOffline").await?;
    ensure!(condition(&offline, "NodeReachable").is_some_and(|it| it.message.contains(&id)), "{offline:?}");
    ensure!(execution(&offline)? == execution(&before)?);

    outside.mend().await?;
    let back = becomes(&place, &id, NodePhase::Ready).await?;
    let incarnation = |node: &Node| node.status.as_ref().and_then(|status| status.incarnation);
    ensure!(incarnation(&back) == incarnation(&unreachable), "it began a new life: {back:?}");
    let after = says(&place, "box", "True", "SessionAlive").await?;
    ensure!(execution(&after)? == execution(&before)? && place.vm(&after)? == vm);
    ensure!(place.sh("box", "cat /tmp/mark").await? == "here");
    let failed = place.phase("dies", WorkspacePhase::Failed, SOON).await?;
    ensure!(failed.status.as_ref().and_then(|status| status.reason.as_deref()) == Some("VmmExited"), "{failed:?}");
    let ends = told(&place, "dies", "VmmExited").await?;
    ensure!(ends == 1, "the end was told {ends} times");
    Ok(())
}

/// How often people were told something about a Workspace.
async fn told(place: &Place, name: &str, reason: &str) -> Result<i32> {
    let events: Api<Event> = place.api();
    let of = ListParams::default().fields(&format!("involvedObject.name={name},reason={reason}"));
    let events = events.list(&of).await?;
    Ok(events
        .iter()
        .map(|event| event.count.unwrap_or(1).max(event.series.as_ref().and_then(|it| it.count).unwrap_or(1)))
        .sum())
}

async fn stopped_daemon(place: Arc<Place>) -> Result<()> {
    let id = place.node("1", "512Mi").await?;
    let daemon = Component::Node(id.clone());
    place.create_workspace("box", json!({})).await?;
    let before = place.available("box").await?;
    let began = session(&place.all::<Node>().get(&id).await?)?.0;

    place.cluster().pause(&daemon)?;
    let unreachable = becomes(&place, &id, NodePhase::Unreachable).await?;
    ensure!(session(&unreachable)? == (began.clone(), false), "{unreachable:?}");
    let log = std::fs::read_to_string(place.cluster().log(&Component::Operator))?;
    let by_its_word = |line: &str| line.contains(&began) && line.contains("though its connection is open");
    ensure!(log.lines().any(by_its_word), "its session did not end by the watchdog");
    becomes(&place, &id, NodePhase::Offline).await?;
    says(&place, "box", "False", "NodeOffline").await?;

    place.cluster().resume(&daemon)?;
    let back = becomes(&place, &id, NodePhase::Ready).await?;
    ensure!(session(&back)?.0 != began);
    let after = says(&place, "box", "True", "SessionAlive").await?;
    ensure!(execution(&after)? == execution(&before)? && is_available(&after));
    Ok(())
}

async fn new_leader(place: Arc<Place>) -> Result<()> {
    let host = Host::enroll(&place, "watched").await?;
    let session = host.session(None).await?;
    session.confirm(&session.settings()).await?;
    becomes(&place, "watched", NodePhase::Ready).await?;
    // Nearly its whole period passes under the old leader, and the rest while there is none.
    session.fall_silent();
    place.cluster().kill(&Component::Operator).await?;
    place.cluster().start(&Component::Operator).await?;
    let leads = Instant::now();
    becomes(&place, "watched", NodePhase::Unreachable).await?;
    let waited = leads.elapsed();
    // It was seen a moment after it led.
    ensure!(waited > UNREACHABLE / 2, "a new leader gave {waited:?} only");
    let stored = becomes(&place, "watched", NodePhase::Offline).await?;

    // What one leader found stands under the next, until the node says something.
    place.cluster().kill(&Component::Operator).await?;
    place.cluster().start(&Component::Operator).await?;
    let slots = json!({"spec": {"slots": 3}});
    let asked = place.all::<Node>().patch("watched", &PatchParams::default(), &Patch::Merge(slots)).await?;
    let term = |node: &Node| node.status.as_ref().and_then(|status| status.term);
    let has_seen = |node: &Node| {
        let status = node.status.clone().unwrap_or_default();
        status.observed_generation == asked.metadata.generation && term(node) > term(&stored)
    };
    let seen = place.watched(place.all(), "watched", "is written by the new leader", SOON, has_seen).await?;
    ensure!(seen.status.as_ref().and_then(|status| status.phase) == Some(NodePhase::Offline), "{seen:?}");
    let host = host.through(dial(&place).await?);
    let _session = host.session(Some(1)).await?;
    becomes(&place, "watched", NodePhase::Ready).await?;
    Ok(())
}

async fn fleet_vanishes(place: Arc<Place>) -> Result<()> {
    // Nodes of other tests are history to a new leader.
    place.cluster().stop(&Component::Operator).await?;
    place.cluster().start(&Component::Operator).await?;
    let mut fleet = Vec::new();
    for number in 0..6 {
        let host = played::host(&place, &format!("rack-{number}")).await?;
        let session = played::ready(&place, &host, None).await?;
        fleet.push((host, session));
    }
    place.create_workspace("box", json!({"power": {"state": "Running", "node": "rack-0"}})).await?;
    played::run(&place, &mut fleet[0].1, "box").await?;
    for (_, session) in &fleet {
        session.fall_silent();
    }
    becomes(&place, "rack-0", NodePhase::Offline).await?;
    let operator = place.cluster().log(&Component::Operator);
    let said = async || {
        Ok(std::fs::read_to_string(&operator)?.contains("a large part of the fleet vanished together").then_some(()))
    };
    eventually("the operator says so", Duration::from_secs(SOON), said).await?;
    says(&place, "box", "True", "SessionAlive").await?;

    // Most of them are back: what is still away is an accident of its own.
    let mut back = Vec::new();
    for (host, _) in &fleet[2..] {
        back.push(host.session(Some(1)).await?);
    }
    says(&place, "box", "False", "NodeOffline").await?;
    Ok(())
}

async fn stalled_leader(place: Arc<Place>) -> Result<()> {
    let id = place.node("1", "512Mi").await?;
    let (operator, daemon) = (Component::Operator, Component::Node(id.clone()));
    let began = session(&place.all::<Node>().get(&id).await?)?.0;
    let log = |component: &Component| std::fs::read_to_string(place.cluster().log(component));
    place.cluster().pause(&operator)?;
    // Longer than a node may be silent: its daemon gives the connection up after that.
    let noticed = async || Ok(log(&daemon)?.contains("no session: ").then_some(()));
    let noticed = eventually("the daemon misses its operator", Duration::from_secs(SOON), noticed).await;
    place.cluster().resume(&operator)?;
    noticed?;
    let is_new = |node: &Node| session(node).is_ok_and(|(id, alive)| alive && id != began);
    place.watched(place.all(), &id, "has a session again", SOON, is_new).await?;
    let log = log(&operator)?;
    ensure!(log.contains("this process stood still"), "the operator did not notice");
    let blamed = |line: &&str| line.contains("the node is silent") && line.contains(&id);
    ensure!(log.lines().find(blamed).is_none(), "{:?}", log.lines().find(blamed));
    Ok(())
}

async fn handed_over(place: Arc<Place>) -> Result<()> {
    let id = place.node("1", "512Mi").await?;
    let before = place.all::<Node>().get(&id).await?;
    let (began, term) = (session(&before)?.0, before.status.as_ref().and_then(|status| status.term));
    let log = |component: &Component| std::fs::read_to_string(place.cluster().log(component));
    let told = log(&Component::Node(id.clone()))?.matches("this operator leads no more").count();
    ensure!(place.cluster().stop(&Component::Operator).await?, "the leader did not end by itself");
    let says_so = log(&Component::Node(id.clone()))?.matches("this operator leads no more").count();
    ensure!(says_so > told, "the leader ended without a word to its node");

    place.cluster().start(&Component::Operator).await?;
    let elected = Instant::now();
    let is_new = |node: &Node| session(node).is_ok_and(|(id, alive)| alive && id != began);
    let after = place.watched(place.all(), &id, "has a session with the new leader", SOON, is_new).await?;
    eprintln!("back {:?} after the new leader was ready", elected.elapsed());
    ensure!(elected.elapsed() < Duration::from_secs(5), "{:?}", elected.elapsed());
    ensure!(after.status.and_then(|status| status.term) > term);
    Ok(())
}
