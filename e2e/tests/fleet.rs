//! 500 nodes with one operator: the real client code of the daemon, and no virtual machines. Here stands what must be true
//! of them however fast the machine is; what it costs is measured by `hack/bench fleet`.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::jiff::Timestamp;
use kibo_crds::node::NodeStatus;
use kibo_crds::{Incarnation, Node};
use kibo_e2e::fleet::Fleet;
use kibo_e2e::local::Component;
use kibo_e2e::suite::replica::Replica;
use kibo_e2e::suite::{Place, Suite, eventually, wire};
use kube::api::ListParams;
use rustix::process::Signal;

const SIZE: usize = 500;
/// As long as usual: 500 daemons share this process, and the machine with two operators.
const LEASE_SECONDS: u64 = 15;
/// With as many nodes in this very process, on a busy machine.
const LOOK: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(180);

fn main() -> ExitCode {
    Suite::with_operator().test("five_hundred_nodes_follow_their_leader", five_hundred_nodes_follow_their_leader).run()
}

async fn five_hundred_nodes_follow_their_leader(place: Arc<Place>) -> Result<()> {
    let mut second = Replica::beside(place.cluster(), "second", LEASE_SECONDS)?;
    let ports = [place.cluster().ports().session, second.session];
    let endpoints = ports.map(|port| format!("https://127.0.0.1:{port}"));
    let fleet = Fleet::begin(place.cluster(), SIZE, &endpoints).await?;
    let first = all_live(&place, 0).await?;

    // One leader goes in order, and the other has everybody: each in the life that it was in.
    ensure!(place.cluster().stop(&Component::Operator).await?, "the leader did not end by itself");
    let term = all_live(&place, first).await?;
    ensure!(term > first, "{term} after {first}");
    let wrong: Vec<_> =
        second.log().lines().filter(|line| line.contains("session refused")).map(str::to_owned).collect();
    ensure!(wrong.is_empty(), "nobody is refused by a leader who knows them: {wrong:#?}");

    nothing_happens_and_little_is_written(&place).await?;
    fleet.end().await?;
    second.signal(Signal::TERM)?;
    second.process.wait().await?;
    place.cluster().start(&Component::Operator).await?;
    Ok(())
}

/// A look at everything, which is no small thing to ask for: one each second is enough.
async fn statuses(place: &Place) -> Result<BTreeMap<String, NodeStatus>> {
    tokio::time::sleep(LOOK).await;
    let nodes = place.all::<Node>().list(&ListParams::default()).await?.items;
    let named = |node: Node| Some((node.metadata.name?, node.status.unwrap_or_default()));
    Ok(nodes.into_iter().filter_map(named).filter(|(name, _)| name.starts_with("fleet-")).collect())
}

/// Waits until every node has a session with a leader of a later term and is a candidate, in its first life. Gives back
/// that leader's term.
async fn all_live(place: &Place, after: u64) -> Result<u64> {
    let is_settled = |status: &NodeStatus| {
        let is_true = |kind: &str| status.conditions.iter().any(|it| it.type_ == kind && it.status == "True");
        let is_later = status.term.is_some_and(|term| term.0 > after);
        let alive = status.session.as_ref().is_some_and(|session| session.alive);
        is_later && alive && status.report.is_some() && is_true("Ready") && is_true("Schedulable")
    };
    let probe = async || {
        let all = statuses(place).await?;
        let missing: Vec<_> = all.iter().filter(|(_, status)| !is_settled(status)).map(|(name, _)| name).collect();
        ensure!(
            missing.is_empty() && all.len() == SIZE,
            "{} of {} are not: {:?}",
            missing.len(),
            all.len(),
            missing.first()
        );
        Ok(Some(all))
    };
    let all = eventually("every node of the fleet is served", LIMIT, probe).await?;
    let moved = all.iter().find(|(_, status)| status.incarnation != Some(Incarnation(1)));
    ensure!(moved.is_none(), "a node was given another life: {moved:?}");
    all.values().filter_map(|status| status.term).map(|term| term.0).max().context("a term")
}

/// Until each node has reported once more: one write for each of them, and for some the last of its first ones.
async fn nothing_happens_and_little_is_written(place: &Place) -> Result<()> {
    let (before, begun) = (writes(place)?, Timestamp::now());
    let all_have_reported = async || {
        let all = statuses(place).await?;
        let is_new = |status: &NodeStatus| status.report.as_ref().is_some_and(|report| report.time.0 >= begun);
        let missing = all.values().filter(|status| !is_new(status)).count();
        ensure!(missing == 0, "{missing} have not");
        Ok(Some(()))
    };
    eventually("every node has reported once more", LIMIT, all_have_reported).await?;
    let (written, took) = (writes(place)? - before, Timestamp::now().duration_since(begun));
    // Each reports once a minute.
    let minutes = usize::try_from(took.as_secs())?.div_ceil(60) + 1;
    eprintln!("{SIZE} idle nodes: {written} writes in {took:#}");
    ensure!(written <= SIZE * minutes, "{written} writes in {took:#}");
    Ok(())
}

fn writes(place: &Place) -> Result<usize> {
    wire::status_writes(place, "nodes", |name| name.starts_with("fleet-"))
}
