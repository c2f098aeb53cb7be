//! Leaders that are killed, stopped and replaced: one acts at a time, and the newer one has the higher term.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use kibo_crds::Node;
use kibo_crds::node::NodeStatus;
use kibo_e2e::local::{Component, NAMESPACE};
use kibo_e2e::suite::host::{Host, dial, dial_port};
use kibo_e2e::suite::replica::Replica;
use kibo_e2e::suite::{Place, Suite, eventually};
use kibo_protocol::v1::SessionRefusal;
use kube::api::{Api, DeleteParams};
use rustix::process::Signal;

const SOON: Duration = Duration::from_secs(60);

async fn lease(place: &Place) -> Result<(String, i32)> {
    let api: Api<Lease> = Api::namespaced(place.client(), NAMESPACE);
    let spec = api.get("kibotos-operator").await?.spec.unwrap_or_default();
    Ok((spec.holder_identity.unwrap_or_default(), spec.lease_transitions.unwrap_or_default()))
}

async fn led_by(place: &Place, name: &str) -> Result<i32> {
    let probe = async || Ok(Some(lease(place).await?).filter(|(holder, _)| holder == name).map(|(_, term)| term));
    eventually(&format!("{name} leads"), SOON, probe).await
}

async fn status(place: &Place, id: &str) -> Result<NodeStatus> {
    Ok(place.all::<Node>().get(id).await?.status.unwrap_or_default())
}

fn is_alive(status: &NodeStatus) -> bool {
    status.session.as_ref().is_some_and(|session| session.alive)
}

/// A host that keeps trying, as daemons do, until a leader takes it.
async fn comes_back(place: &Place, host: &Host, port: u16) -> Result<kibo_e2e::suite::host::Session> {
    let probe = async || {
        let Ok(client) = dial_port(place, port).await else { return Ok(None) };
        Ok(host.through(client).open(Some(1)).await?.ok())
    };
    eventually("the host has a session again", SOON, probe).await
}

async fn a_killed_leader_is_followed_by_a_higher_term(place: &Place) -> Result<()> {
    let gone = Host::enroll(place, "gone").await?;
    let back = Host::enroll(place, "back").await?;
    let (lost, kept) = (gone.session(None).await?, back.session(None).await?);
    place.cluster().kill(&Component::Operator).await?;
    ensure!(is_alive(&status(place, "gone").await?));
    place.cluster().start(&Component::Operator).await?;
    drop(lost);

    let session = back.through(dial(place).await?).session(Some(1)).await?;
    session.confirm(&session.settings()).await?;
    ensure!(session.term > kept.term && session.ack.session_id != kept.ack.session_id);
    let probe = async || Ok((!is_alive(&status(place, "gone").await?)).then_some(()));
    eventually("the session that did not return is over", SOON, probe).await?;
    ensure!(is_alive(&status(place, "back").await?));
    Ok(())
}

async fn a_standby_refuses_and_takes_over(place: &Place) -> Result<()> {
    let host = Host::enroll(place, "handed-over").await?;
    let first = host.session(None).await?;
    let (holder, term) = lease(place).await?;
    ensure!(holder == "local", "{holder}");
    let mut second = Replica::start(place, "second")?;
    let standby = async || {
        let Ok(client) = dial_port(place, second.session).await else { return Ok(None) };
        Ok(host.through(client).open(Some(1)).await?.err())
    };
    let refused = eventually("the standby answers", SOON, standby).await?;
    ensure!(refused.reason() == SessionRefusal::NotLeader, "{refused:?}");

    // SIGTERM gives the lease back: no wait for its end.
    ensure!(place.cluster().stop(&Component::Operator).await?, "the leader did not end by itself");
    let taken = led_by(place, "second").await?;
    ensure!(taken == term + 1, "{taken} after {term}");
    let session = comes_back(place, &host, second.session).await?;
    ensure!(session.term > first.term);

    // A leader whose clock stood still ends at once, before it says a word to anybody.
    place.cluster().spawn(&Component::Operator).await?;
    second.signal(Signal::STOP)?;
    let taken = led_by(place, "local").await?;
    ensure!(taken == term + 2);
    second.signal(Signal::CONT)?;
    let ended = tokio::time::timeout(Duration::from_secs(5), second.process.wait()).await;
    let ended = ended.context("the stopped leader goes on")??;
    ensure!(ended.code() == Some(1), "{ended:?}: {}", second.log());
    ensure!(second.log().contains("not renewed in time") || second.log().contains("taken by another replica"));
    place.cluster().ready(&Component::Operator).await?;
    drop(comes_back(place, &host, place.cluster().ports().session).await?);
    Ok(())
}

async fn a_deleted_lease_does_not_set_the_term_back(place: &Place) -> Result<()> {
    let host = Host::enroll(place, "remembers").await?;
    let before = host.session(None).await?.term;
    let api: Api<Lease> = Api::namespaced(place.client(), NAMESPACE);
    place.cluster().stop(&Component::Operator).await?;
    api.delete("kibotos-operator", &DeleteParams::default()).await?;
    place.cluster().start(&Component::Operator).await?;
    let session = comes_back(place, &host, place.cluster().ports().session).await?;
    ensure!(session.term > before, "{} after {before}", session.term);
    Ok(())
}

/// One after the other, since they stop what they all speak with.
async fn leaders_come_and_go(place: Arc<Place>) -> Result<()> {
    a_killed_leader_is_followed_by_a_higher_term(&place).await.context("killed")?;
    a_standby_refuses_and_takes_over(&place).await.context("standby")?;
    a_deleted_lease_does_not_set_the_term_back(&place).await.context("deleted lease")
}

fn main() -> ExitCode {
    Suite::with_operator().test("leaders_come_and_go", leaders_come_and_go).run()
}
