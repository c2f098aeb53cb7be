//! Control sessions and enrollment: who is let in, who is not, and who wins a race. The operator is the real
//! one; the host is played by hand, since a good daemon does none of this.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kibo_crds::node::{NodePhase, NodeStatus};
use kibo_crds::{InstanceId, Node, StoragePool};
use kibo_e2e::local::Component;
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::host::{Host, Session, dial, issue};
use kibo_e2e::suite::{Place, Suite, eventually, played};
use kibo_failpoint::Action;
use kibo_protocol::Secret;
use kibo_protocol::v1::{self, SessionRefusal, from_node, to_node};
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use tonic::Code;

const SOON: Duration = Duration::from_secs(60);

async fn status(place: &Place, id: &str) -> Result<NodeStatus> {
    Ok(place.all::<Node>().get(id).await?.status.unwrap_or_default())
}

/// Waits until the status of a node is as it should be.
async fn becomes(
    place: &Place,
    id: &str,
    what: &str,
    reached: impl Fn(&NodeStatus) -> bool + Copy,
) -> Result<NodeStatus> {
    let probe = async || Ok(Some(status(place, id).await?).filter(reached));
    let outcome = eventually(&format!("node {id}: {what}"), SOON, probe).await;
    match outcome {
        Ok(status) => Ok(status),
        Err(error) => Err(error.context(format!("{:#?}", status(place, id).await?))),
    }
}

async fn patch(place: &Place, id: &str, spec: Value) -> Result<Node, kube::Error> {
    let api: Api<Node> = place.all();
    api.patch(id, &PatchParams::default(), &Patch::Merge(json!({ "spec": spec }))).await
}

fn isolation(incarnation: u64) -> Value {
    json!({ "isolation": { "incarnation": incarnation, "confirmHostCannotWrite": true } })
}

fn condition(status: &NodeStatus, kind: &str) -> (String, String) {
    let found = status.conditions.iter().find(|condition| condition.type_ == kind);
    found.map(|condition| (condition.status.clone(), condition.reason.clone())).unwrap_or_default()
}

async fn refused(host: &Host, incarnation: Option<u64>) -> Result<SessionRefusal> {
    let refusal = host.open(incarnation).await?.err().context("the session was accepted")?;
    Ok(refusal.reason())
}

fn is_alive(status: &NodeStatus) -> bool {
    status.session.as_ref().is_some_and(|session| session.alive)
}

async fn a_token_makes_one_node_once(place: Arc<Place>) -> Result<()> {
    let secret = Secret::generate()?;
    issue(&place, "once", &secret, Duration::from_secs(60)).await?;
    let request = |id: &str, secret: &Secret| v1::EnrollRequest {
        node_id: id.to_owned(),
        secret: secret.expose().to_vec(),
        version: "unreleased".to_owned(),
        service_account_token: String::new(),
    };
    let enroll = async |id: &str, secret: &Secret| {
        let mut client = dial(&place).await?;
        anyhow::Ok(client.enroll(request(id, secret)).await.map(|_| ()).map_err(|status| status.code()))
    };
    let wrong = Secret::generate()?;
    ensure!(enroll("nobody", &secret).await? == Err(Code::NotFound));
    ensure!(enroll("once", &wrong).await? == Err(Code::PermissionDenied));

    // Eight hosts with one token at the same moment.
    let attempts = futures::future::join_all((0..8).map(|_| enroll("once", &secret))).await;
    let outcomes = attempts.into_iter().collect::<Result<Vec<_>>>()?;
    ensure!(outcomes.iter().filter(|outcome| outcome.is_ok()).count() == 1, "{outcomes:?}");
    ensure!(outcomes.iter().all(|outcome| matches!(outcome, Ok(()) | Err(Code::AlreadyExists))), "{outcomes:?}");

    issue(&place, "late", &secret, Duration::ZERO).await?;
    ensure!(enroll("late", &secret).await? == Err(Code::FailedPrecondition));
    Ok(())
}

async fn a_daemon_keeps_its_incarnation_and_an_empty_host_gets_the_next(place: Arc<Place>) -> Result<()> {
    let host = Host::enroll(&place, "lives").await?;
    let first = host.session(None).await?;
    ensure!(first.ack.incarnation == 1 && first.ack.revision > 0 && !first.ack.cluster_id.is_empty());
    let stored = status(&place, "lives").await?;
    ensure!(is_alive(&stored) && stored.session.as_ref().map(|s| s.id.clone()) == Some(first.ack.session_id.clone()));
    ensure!(stored.term.map(|term| term.0) == Some(first.term));
    drop(first);
    becomes(&place, "lives", "the session is over", |status| !is_alive(status)).await?;

    ensure!(host.session(Some(1)).await?.ack.incarnation == 1);
    becomes(&place, "lives", "the session is over", |status| !is_alive(status)).await?;
    ensure!(host.session(None).await?.ack.incarnation == 2);
    becomes(&place, "lives", "the session is over", |status| !is_alive(status)).await?;
    // A host that was set back to an older state hears that its life is over.
    ensure!(refused(&host, Some(1)).await? == SessionRefusal::Isolated);
    Ok(())
}

async fn the_same_life_replaces_its_session_and_another_host_does_not(place: Arc<Place>) -> Result<()> {
    let host = Host::enroll(&place, "double").await?;
    let mut first = host.session(None).await?;
    let clone = Host { boot_id: "boot-of-the-clone".to_owned(), ..host.clone() };
    ensure!(refused(&clone, Some(1)).await? == SessionRefusal::Duplicate);
    ensure!(refused(&clone, None).await? == SessionRefusal::Duplicate);
    let shown =
        becomes(&place, "double", "the duplicate is shown", |status| condition(status, "DuplicateHost").0 == "True");
    ensure!(is_alive(&shown.await?));

    let second = host.session(Some(1)).await?;
    let told = loop {
        match first.receive().await? {
            Some(to_node::Message::Refused(refused)) => break refused.reason(),
            Some(_) => {}
            None => anyhow::bail!("the replaced session was not told why"),
        }
    };
    ensure!(told == SessionRefusal::Replaced);
    drop(first);
    let stored = status(&place, "double").await?.session.context("a session")?;
    ensure!(stored.id == second.ack.session_id && stored.alive, "the old session's end touched the new one");
    Ok(())
}

async fn an_isolation_shuts_the_incarnation_out_and_ends_with_the_next(place: Arc<Place>) -> Result<()> {
    let host = Host::enroll(&place, "cut-off").await?;
    let session = host.session(None).await?;
    let early = patch(&place, "cut-off", isolation(1)).await.err().context("isolated with a live session")?;
    ensure!(early.to_string().contains("live control session"), "{early}");
    drop(session);
    becomes(&place, "cut-off", "the session is over", |status| !is_alive(status)).await?;

    patch(&place, "cut-off", isolation(1)).await?;
    becomes(&place, "cut-off", "it is isolated", |status| status.phase == Some(NodePhase::Isolated)).await?;
    ensure!(refused(&host, Some(1)).await? == SessionRefusal::Isolated);
    let session = host.session(None).await?;
    ensure!(session.ack.incarnation == 2);
    becomes(&place, "cut-off", "it is ready again", |status| status.phase == Some(NodePhase::Ready)).await?;
    Ok(())
}

async fn settings_follow_the_spec_and_must_be_confirmed(place: Arc<Place>) -> Result<()> {
    let host = Host::enroll(&place, "obedient").await?;
    let mut session = host.session(None).await?;
    session.confirm(&session.settings()).await?;
    ensure!(!session.settings().drain && session.settings().cpu_ratio == 1000);

    patch(&place, "obedient", json!({ "drain": { "requested": true }, "overcommit": { "cpu": "2.5" } })).await?;
    let settings = next_settings(&mut session).await?;
    ensure!(settings.drain && settings.cpu_ratio == 2500 && settings.revision > session.settings().revision);
    becomes(&place, "obedient", "it drains", |status| status.phase == Some(NodePhase::Draining)).await?;
    session.confirm(&settings).await?;
    session.report(&settings, &[]).await?;
    let drained =
        becomes(&place, "obedient", "it is drained", |status| status.phase == Some(NodePhase::Drained)).await?;
    ensure!(drained.schedulable.and_then(|amounts| amounts.cpu).as_deref() == Some("10"));

    // Not confirmed: the session is dropped, and with the next one they come again.
    patch(&place, "obedient", json!({ "drain": { "requested": false } })).await?;
    ensure!(!next_settings(&mut session).await?.drain);
    while session.receive().await?.is_some() {}
    becomes(&place, "obedient", "the session is over", |status| !is_alive(status)).await?;
    ensure!(!host.session(Some(1)).await?.settings().drain);
    Ok(())
}

async fn next_settings(session: &mut Session) -> Result<v1::Settings> {
    loop {
        match session.receive().await?.context("the session ended")? {
            to_node::Message::Settings(settings) => return Ok(settings),
            other => ensure!(matches!(other, to_node::Message::EventAck(_)), "{other:?}"),
        }
    }
}

async fn a_control_plane_that_went_back_steers_nobody(place: Arc<Place>) -> Result<()> {
    let host = Host::enroll(&place, "older").await?;
    let first = host.session(None).await?;
    let (cluster, revision, term) = (first.ack.cluster_id.clone(), first.ack.revision, first.term);
    drop(first);
    becomes(&place, "older", "the session is over", |status| !is_alive(status)).await?;
    let hello = |cluster: &str, revision: u64, term: u64| v1::Hello {
        cluster_id: cluster.to_owned(),
        highest_revision: revision,
        highest_term: term,
        ..host.hello(Some(1))
    };
    for seen in [hello("another", revision, term), hello(&cluster, 1 << 40, term), hello(&cluster, revision, term + 1)]
    {
        let refused = host.say(from_node::Message::Hello(seen)).await?.err().context("accepted")?;
        ensure!(refused.reason() == SessionRefusal::ControlPlaneWentBack, "{refused:?}");
    }
    becomes(&place, "older", "it is said why", |status| condition(status, "Ready").1 == "ControlPlaneWentBack").await?;
    let seen = host.say(from_node::Message::Hello(hello(&cluster, revision, term))).await?;
    ensure!(seen.is_ok());
    Ok(())
}

async fn who_does_not_begin_with_a_hello_is_closed(place: Arc<Place>) -> Result<()> {
    let host = Host::enroll(&place, "rude").await?;
    let accept = from_node::Message::Accept(v1::Accept { offer_id: "x".to_owned() });
    let refused = host.say(accept).await?.err().context("accepted")?;
    ensure!(refused.reason() == SessionRefusal::InvalidHello);
    let silent = host.keep_silent().await?;
    ensure!(
        matches!(&silent, Some(to_node::Message::Refused(refused)) if refused.reason() == SessionRefusal::InvalidHello),
        "{silent:?}"
    );

    let stranger = Host { key: Secret::generate()?, ..host.clone() };
    ensure!(refused_after(&stranger).await? == SessionRefusal::WrongKey);
    let unknown = Host { id: "unknown".to_owned(), ..host };
    ensure!(refused_after(&unknown).await? == SessionRefusal::UnknownNode);
    Ok(())
}

async fn refused_after(host: &Host) -> Result<SessionRefusal> {
    refused(host, None).await
}

async fn a_pool_with_another_marker_is_another_pool(place: Arc<Place>) -> Result<()> {
    let pool = |uid: &str| v1::Pool {
        id: "e2e-markers".to_owned(),
        uid: uid.to_owned(),
        default: true,
        available: true,
        capacity_bytes: Some(1 << 30),
        free_bytes: Some(1 << 29),
        ..v1::Pool::default()
    };
    let one = Host { pools: vec![pool("uid-1")], ..Host::enroll(&place, "marker-1").await? };
    let two = Host { pools: vec![pool("uid-2")], ..Host::enroll(&place, "marker-2").await? };
    let _one = one.session(None).await?;
    let pools: Api<StoragePool> = place.all();
    let first = async || {
        let pool = pools.get_opt("e2e-markers").await?.and_then(|pool| pool.status);
        Ok(pool.filter(|status| status.uid.as_deref() == Some("uid-1") && status.members.len() == 1))
    };
    let status = eventually("the pool has its first member", SOON, first).await?;
    ensure!(status.free.as_deref() == Some("512Mi"), "{status:?}");
    let _two = two.session(None).await?;
    let conflict = async || {
        let status = pools.get("e2e-markers").await?.status.unwrap_or_default();
        let found = status.conditions.iter().any(|c| c.type_ == "MarkerConflict" && c.status == "True");
        Ok(found.then_some(status))
    };
    let status = eventually("the conflict is shown", SOON, conflict).await?;
    ensure!(status.members.len() == 1 && status.members[0].node.as_str() == "marker-1", "{status:?}");
    Ok(())
}

async fn what_nobody_holds_is_torn_down_and_its_events_are_acked(place: Arc<Place>) -> Result<()> {
    let host = Host::enroll(&place, "strangers").await?;
    drop(host.session(None).await?);
    becomes(&place, "strangers", "the session is over", |status| !is_alive(status)).await?;
    let instance = |state: v1::InstanceState| v1::Instance {
        instance_id: InstanceId::generate().to_string(),
        workspace_uid: "6f9619ff-8b86-d011-b42d-00c04fc964ff".to_owned(),
        state: state.into(),
        last_seq: 3,
    };
    let (runs, ended) = (instance(v1::InstanceState::Running), instance(v1::InstanceState::Ended));
    let hello = v1::Hello { instances: vec![runs.clone(), ended.clone()], ..host.hello(Some(1)) };
    let mut session = host
        .say(from_node::Message::Hello(hello))
        .await?
        .map_err(|refused| anyhow::anyhow!("refused: {}", refused.message))?;
    session.confirm(&session.settings()).await?;
    ensure!(session.ack.desired.is_empty());
    let events = [3, 1, 2].map(|seq| v1::InstanceEvent {
        instance_id: ended.instance_id.clone(),
        workspace_uid: ended.workspace_uid.clone(),
        seq,
        unix_nanos: 0,
        kind: Some(v1::instance_event::Kind::GuestResponsive(v1::GuestResponsive {})),
    });
    session.send(from_node::Message::Events(v1::Events { events: events.to_vec() })).await?;
    let (mut torn_down, mut acked) = (Vec::new(), Vec::new());
    while torn_down.is_empty() || acked.len() < 3 {
        match session.receive().await?.context("the session ended")? {
            to_node::Message::TearDown(tear_down) => torn_down.push(tear_down.instance_id),
            to_node::Message::EventAck(ack) => acked.push((ack.instance_id, ack.seq)),
            other => ensure!(matches!(other, to_node::Message::Settings(_)), "{other:?}"),
        }
    }
    ensure!(torn_down == [runs.instance_id], "{torn_down:?}");
    let in_order = [3, 1, 2].map(|seq| (ended.instance_id.clone(), seq));
    ensure!(acked == in_order, "not in the order in which they were sent: {acked:?}");
    Ok(())
}

async fn a_fleet_comes_at_once(place: Arc<Place>) -> Result<()> {
    const HOSTS: usize = 60;
    let begun = std::time::Instant::now();
    let enroll = (0..HOSTS).map(|index| {
        let place = place.clone();
        async move { Host::enroll(&place, &format!("fleet-{index}")).await }
    });
    let hosts = futures::future::try_join_all(enroll).await?;
    let enrolled = begun.elapsed();
    let sessions = futures::future::try_join_all(hosts.iter().map(|host| host.session(None))).await?;
    eprintln!("{HOSTS} hosts: enrolled after {enrolled:?}, all sessions open after {:?}", begun.elapsed());
    for session in &sessions {
        session.confirm(&session.settings()).await?;
    }
    let ready = async || {
        let nodes = place.all::<Node>().list(&kube::api::ListParams::default()).await?;
        let is_ready = |node: &&Node| {
            node.metadata.name.as_deref().is_some_and(|name| name.starts_with("fleet-"))
                && node.status.as_ref().is_some_and(|status| status.phase == Some(NodePhase::Ready) && is_alive(status))
        };
        Ok((nodes.iter().filter(is_ready).count() == HOSTS).then_some(()))
    };
    eventually("the whole fleet is ready", SOON, ready).await
}

/// Who sees a node Ready may ask for it by its name, though the operator has still to write down its pool.
async fn a_start_waits_for_a_new_pool(place: Arc<Place>) -> Result<()> {
    let points = Failpoints::of(place.cluster(), &Component::Operator)?;
    points.arm(&["before-pool-registered"], Action::Wait)?;
    let outcome = start_on_a_new_node(&place, &points).await;
    points.clear()?;
    outcome
}

async fn start_on_a_new_node(place: &Place, points: &Failpoints) -> Result<()> {
    let host = played::host(place, "newcomer").await?;
    let mut session = host.session(None).await?;
    session.confirm(&session.settings()).await?;
    session.report(&session.settings(), &host.pools).await?;
    points.all_reached(&["before-pool-registered"], SOON).await?;
    place.create_workspace("box", json!({ "power": { "state": "Running", "node": "newcomer" } })).await?;
    let waits = |status: &NodeStatus| {
        condition(status, "Schedulable") == ("False".to_owned(), "PoolBeingRegistered".to_owned())
    };
    let status = becomes(place, "newcomer", "says what it waits for", waits).await?;
    ensure!(status.phase == Some(NodePhase::Ready), "{:?}", status.phase);
    points.clear()?;
    played::run(place, &mut session, "box").await?;
    Ok(())
}

fn main() -> ExitCode {
    Suite::with_operator()
        .test("a_token_makes_one_node_once", a_token_makes_one_node_once)
        .test(
            "a_daemon_keeps_its_incarnation_and_an_empty_host_gets_the_next",
            a_daemon_keeps_its_incarnation_and_an_empty_host_gets_the_next,
        )
        .test(
            "the_same_life_replaces_its_session_and_another_host_does_not",
            the_same_life_replaces_its_session_and_another_host_does_not,
        )
        .test(
            "an_isolation_shuts_the_incarnation_out_and_ends_with_the_next",
            an_isolation_shuts_the_incarnation_out_and_ends_with_the_next,
        )
        .test("settings_follow_the_spec_and_must_be_confirmed", settings_follow_the_spec_and_must_be_confirmed)
        .test("a_control_plane_that_went_back_steers_nobody", a_control_plane_that_went_back_steers_nobody)
        .test("who_does_not_begin_with_a_hello_is_closed", who_does_not_begin_with_a_hello_is_closed)
        .test(
            "what_nobody_holds_is_torn_down_and_its_events_are_acked",
            what_nobody_holds_is_torn_down_and_its_events_are_acked,
        )
        .test("a_fleet_comes_at_once", a_fleet_comes_at_once)
        .test("a_pool_with_another_marker_is_another_pool", a_pool_with_another_marker_is_another_pool)
        .alone("a_start_on_a_node_that_has_just_come_waits_for_its_pool", a_start_waits_for_a_new_pool)
        .run()
}
