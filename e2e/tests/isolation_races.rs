//! An isolation against everything that may happen at the same moment: the node comes back, the operator dies, an old
//! leader goes on. The operator is the real one; the hosts are played by hand, since theirs is only the session.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::coordination::v1::Lease;
use kibo_crds::node::{Admission, IsolationResult, IsolationState, NodePhase, NodeStatus};
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{Node, StoragePool, Volume, Workspace};
use kibo_e2e::local::{Component, NAMESPACE};
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::host::{Host, Session, dial, dial_port};
use kibo_e2e::suite::played::{acked, ended, host, next, ready, run, say};
use kibo_e2e::suite::replica::Replica;
use kibo_e2e::suite::{Place, Suite, condition, eventually, phase_of, why};
use kibo_failpoint::Action;
use kibo_protocol::v1::{EndReason, ObjectUse, SessionRefusal, to_node};
use kube::ResourceExt as _;
use kube::api::{Api, Patch, PatchParams};
use rustix::process::Signal;
use serde_json::{Value, json};

fn main() -> ExitCode {
    Suite::with_operator()
        .test("of_an_isolation_and_a_reconnect_exactly_one_wins_two_hundred_times", two_hundred_races)
        .test("a_retired_node_hears_of_its_isolation_first", retired_after_isolation)
        .test("a_revoked_node_leaves_its_pools_until_it_is_enrolled_again", revoked)
        .alone("an_event_that_is_being_taken_in_is_counted_as_it_ends", an_event_in_work)
        .alone("an_isolation_at_any_point_of_a_hello_has_one_winner", at_any_point_of_a_hello)
        .alone("the_operator_is_killed_at_every_step_of_isolate_drain_and_retire", operator_killed)
        .alone("a_leader_that_was_stopped_in_an_isolation_writes_nothing", stopped_leader)
        .run()
}

const SOON: Duration = Duration::from_secs(60);

async fn patch(place: &Place, id: &str, spec: Value) -> Result<Node, kube::Error> {
    let api: Api<Node> = place.all();
    api.patch(id, &PatchParams::default(), &Patch::Merge(json!({ "spec": spec }))).await
}

async fn isolate(place: &Place, id: &str, incarnation: u64, request: &str) -> Result<Node, kube::Error> {
    let isolation =
        json!({ "incarnation": incarnation, "confirmHostCannotWrite": true, "requestId": format!("{id}-{request}") });
    patch(place, id, json!({ "isolation": isolation })).await
}

async fn becomes(place: &Place, id: &str, what: &str, reached: impl Fn(&NodeStatus) -> bool) -> Result<NodeStatus> {
    let reached = |node: &Node| node.status.as_ref().is_some_and(&reached);
    let node = place.watched(place.all::<Node>(), id, what, SOON.as_secs(), reached).await?;
    node.status.context("it has a status")
}

fn is_alive(status: &NodeStatus) -> bool {
    status.session.as_ref().is_some_and(|session| session.alive)
}

async fn silent(place: &Place, id: &str) -> Result<NodeStatus> {
    becomes(place, id, "has no session", |status| !is_alive(status)).await
}

async fn finished(place: &Place, id: &str, incarnation: u64) -> Result<IsolationResult> {
    let of = |status: &NodeStatus| {
        status.isolation.clone().filter(|it| it.incarnation.0 == incarnation && it.state == IsolationState::Finished)
    };
    let status = becomes(place, id, "its isolation is finished", |status| of(status).is_some()).await?;
    of(&status).context("it was finished")
}

/// Volumes, layers and Workspaces.
fn counts(result: &IsolationResult) -> [Option<u32>; 3] {
    [result.released_volumes, result.released_layers, result.failed_workspaces]
}

async fn refused(host: &Host, incarnation: Option<u64>) -> Result<SessionRefusal> {
    Ok(host.open(incarnation).await?.err().context("the session was accepted")?.reason())
}

// ---- races ---------------------------------------------------------------------------------------

/// Rounds of each host; the first has a Workspace that runs there, which makes a round long.
const ROUNDS: [u64; 5] = [20, 45, 45, 45, 45];

/// Whoever wins, the other has lost all of it: after a reconnect the Workspace is what it was, and after an isolation the
/// node is told and the Workspace has failed.
async fn two_hundred_races(place: Arc<Place>) -> Result<()> {
    place.ensure_template().await?;
    let won = [AtomicU32::new(0), AtomicU32::new(0)];
    let begun = std::time::Instant::now();
    let lanes = ROUNDS.iter().enumerate().map(|(lane, rounds)| race(&place, lane, *rounds, &won));
    try_join_all(lanes).await?;
    let [isolated, connected] = won.map(AtomicU32::into_inner);
    eprintln!("the isolation won {isolated} times, the reconnect {connected} times, in {:.0?}", begun.elapsed());
    ensure!(u64::from(isolated + connected) == ROUNDS.iter().sum::<u64>());
    ensure!(isolated > 0 && connected > 0, "that was no race");
    Ok(())
}

async fn race(place: &Place, lane: usize, rounds: u64, won: &[AtomicU32; 2]) -> Result<()> {
    let id = format!("race-{lane}");
    let host = host(place, &id).await?;
    let workspace = (lane == 0).then_some("box");
    let mut incarnation = new_life(place, &host, workspace, "first").await?;
    for round in 0..rounds {
        silent(place, &id).await?;
        // A session takes two round trips more, so the isolation gives it a start of 0 to 70 ms.
        let late = Duration::from_millis(round % 15 * 5);
        let isolate = async {
            tokio::time::sleep(late).await;
            isolate(place, &id, incarnation, &format!("r{round}")).await
        };
        let (isolated, connected) = tokio::join!(isolate, host.open(Some(incarnation)));
        let connected = connected?;
        let outcome = format!("round {round} of {id}: {:?}, accepted: {}", isolated.as_ref().err(), connected.is_ok());
        ensure!(isolated.is_ok() != connected.is_ok(), "{outcome}");
        match connected {
            Ok(session) => {
                won[1].fetch_add(1, Ordering::Relaxed);
                let refusal = isolated.err().map(|error| error.to_string()).unwrap_or_default();
                ensure!(refusal.contains("live control session"), "{outcome}");
                ensure!(session.ack.desired.len() == usize::from(workspace.is_some()), "{outcome}: {:?}", session.ack);
                if let Some(name) = workspace {
                    let kept = place.api::<Workspace>().get(name).await?;
                    let execution = kept.status.as_ref().and_then(|status| status.execution.as_ref());
                    let runs = execution.is_some_and(|it| it.incarnation.0 == incarnation && it.node.as_str() == id);
                    ensure!(runs && phase_of(&kept) == Some(WorkspacePhase::Available), "{outcome}: {}", why(&kept));
                }
            }
            Err(refusal) => {
                won[0].fetch_add(1, Ordering::Relaxed);
                ensure!(refusal.reason() == SessionRefusal::Isolated, "{outcome}: {refusal:?}");
                let result = finished(place, &id, incarnation).await?;
                let held = Some(u32::from(workspace.is_some()));
                ensure!(counts(&result) == [Some(0), held, held], "{outcome}: {result:?}");
                if let Some(name) = workspace {
                    let failed = place.api::<Workspace>().get(name).await?;
                    ensure!(why(&failed).starts_with("Unavailable"), "{outcome}: {}", why(&failed));
                }
                incarnation = new_life(place, &host, workspace, &format!("after-{round}")).await?;
            }
        }
    }
    Ok(())
}

/// The next life of the host, in which the Workspace is started; the session ends with it.
async fn new_life(place: &Place, host: &Host, workspace: Option<&str>, request: &str) -> Result<u64> {
    let Some(name) = workspace else { return Ok(host.session(None).await?.ack.incarnation) };
    let mut session = ready(place, host, None).await?;
    let power = json!({ "state": "Running", "node": host.id, "requestId": request });
    if place.api::<Workspace>().get_opt(name).await?.is_some() {
        place.power(name, power).await?;
    } else {
        place.create_workspace(name, json!({ "power": power })).await?;
    }
    run(place, &mut session, name).await?;
    Ok(session.ack.incarnation)
}

/// Before the session is committed the isolation wins, and afterwards it is refused.
async fn at_any_point_of_a_hello(place: Arc<Place>) -> Result<()> {
    let points = Failpoints::of(place.cluster(), &Component::Operator)?;
    let outcome = each_point_of_a_hello(&place, &points).await;
    points.clear()?;
    outcome
}

async fn each_point_of_a_hello(place: &Place, points: &Failpoints) -> Result<()> {
    let host = Host::enroll(place, "halfway").await?;
    let mut incarnation = host.session(None).await?.ack.incarnation;
    for (point, isolation_wins) in
        [("hello-received", true), ("hello-decided", true), ("hello-committed", false), ("hello-entered", false)]
    {
        silent(place, &host.id).await?;
        points.arm(&[point], Action::Wait)?;
        let opening = tokio::spawn({
            let host = host.clone();
            async move { host.open(Some(incarnation)).await }
        });
        points.all_reached(&[point], SOON).await?;
        let isolated = isolate(place, &host.id, incarnation, point).await;
        points.clear()?;
        let opened = opening.await??;
        ensure!(isolated.is_ok() == isolation_wins, "{point}: {:?}", isolated.err());
        ensure!(opened.is_ok() != isolation_wins, "{point}: the Hello was answered otherwise");
        if let Err(refusal) = opened {
            ensure!(refusal.reason() == SessionRefusal::Isolated, "{point}: {refusal:?}");
            incarnation = host.session(None).await?.ack.incarnation;
        }
    }
    Ok(())
}

/// An event that was being taken in when its session ended is counted as it ends, and not by half.
async fn an_event_in_work(place: Arc<Place>) -> Result<()> {
    let points = Failpoints::of(place.cluster(), &Component::Operator)?;
    let outcome = isolated_with_an_event_in_work(&place, &points).await;
    points.clear()?;
    outcome
}

async fn isolated_with_an_event_in_work(place: &Place, points: &Failpoints) -> Result<()> {
    let host = host(place, "mid-word").await?;
    let mut session = ready(place, &host, None).await?;
    let volume = json!({ "new": { "size": "64Mi" }, "mountPath": "/data" });
    let power = json!({ "state": "Running", "node": "mid-word" });
    place.create_workspace("box", json!({ "power": power, "volume": volume })).await?;
    let launch = run(place, &mut session, "box").await?;
    points.arm(&["ended-applied-to-objects"], Action::Wait)?;
    say(&session, &launch, 3, ended(&launch, EndReason::GuestShutdown, ObjectUse::Released)).await?;
    points.all_reached(&["ended-applied-to-objects"], SOON).await?;
    drop(session);
    silent(place, "mid-word").await?;
    isolate(place, "mid-word", 1, "i").await?;
    let begun = |status: &NodeStatus| status.isolation.is_some();
    becomes(place, "mid-word", "its isolation has begun", begun).await?;
    points.clear()?;
    let result = finished(place, "mid-word", 1).await?;
    ensure!(counts(&result) == [Some(1), Some(1), Some(0)], "it had ended before: {result:?}");
    let stopped = place.api::<Workspace>().get("box").await?;
    ensure!(phase_of(&stopped) == Some(WorkspacePhase::Stopped), "{}", why(&stopped));
    Ok(())
}

// ---- what the host hears -------------------------------------------------------------------------

async fn retired_after_isolation(place: Arc<Place>) -> Result<()> {
    let host = host(&place, "bygone").await?;
    drop(ready(&place, &host, None).await?);
    silent(&place, "bygone").await?;
    let early = patch(&place, "bygone", json!({ "retirement": {} })).await.err().context("retired as it is")?;
    ensure!(early.to_string().contains("isolate it when its host is down"), "{early}");
    isolate(&place, "bygone", 1, "i").await?;
    finished(&place, "bygone", 1).await?;
    patch(&place, "bygone", json!({ "retirement": {} })).await?;
    becomes(&place, "bygone", "is retired", |status| status.phase == Some(NodePhase::Retired)).await?;
    no_member(&place, "local-bygone").await?;
    ensure!(refused(&host, Some(1)).await? == SessionRefusal::Isolated, "it must destroy what it runs");
    ensure!(refused(&host, None).await? == SessionRefusal::Retired, "there is no next life");
    for spec in [json!({ "drain": { "requested": true } }), json!({ "isolation": { "requestId": "again" } })] {
        let refusal = patch(&place, "bygone", spec).await.err().context("it was taken")?;
        ensure!(refusal.to_string().contains("retired, which is final"), "{refusal}");
    }
    Ok(())
}

async fn no_member(place: &Place, pool: &str) -> Result<()> {
    let gone = |pool: &StoragePool| pool.status.as_ref().is_some_and(|status| status.members.is_empty());
    place.watched(place.all::<StoragePool>(), pool, "has no member", SOON.as_secs(), gone).await.map(drop)
}

async fn revoked(place: Arc<Place>) -> Result<()> {
    let host = host(&place, "revoked").await?;
    let mut session = ready(&place, &host, None).await?;
    place.create_workspace("box", json!({ "power": { "state": "Running", "node": "revoked" } })).await?;
    run(&place, &mut session, "box").await?;
    patch(&place, "revoked", json!({ "revocation": { "requestId": "revoke" } })).await?;
    let told = next(&mut session, |message| match message {
        to_node::Message::Refused(refused) => Some(refused.reason()),
        _ => None,
    });
    ensure!(told.await? == SessionRefusal::Revoked);
    drop(session);
    let status = silent(&place, "revoked").await?;
    ensure!(status.admission == Some(Admission::Revoked), "{:?}", status.admission);
    no_member(&place, "local-revoked").await?;
    ensure!(refused(&host, Some(1)).await? == SessionRefusal::Revoked);
    let kept = place.api::<Workspace>().get("box").await?;
    ensure!(phase_of(&kept) == Some(WorkspacePhase::Available), "nobody said that its host is down: {}", why(&kept));
    // When its host is gone for good, that is said as of any other node.
    isolate(&place, "revoked", 1, "i").await?;
    let result = finished(&place, "revoked", 1).await?;
    ensure!(counts(&result) == [Some(0), Some(1), Some(1)], "{result:?}");
    let phase = place.all::<Node>().get("revoked").await?.status.and_then(|status| status.phase);
    ensure!(phase == Some(NodePhase::Revoked), "{phase:?}");
    Ok(())
}

// ---- an operator that dies -----------------------------------------------------------------------

/// Each waits for one host, and others pass it.
const ISOLATION: [&str; 8] = [
    "isolation-begun",
    "isolation-looked",
    "isolation-listed",
    "isolation-counted",
    "execution-voided",
    "volume-voided",
    "isolation-released",
    "isolation-finished",
];
const DRAIN: [&str; 3] = ["settings-sent", "before-drained", "drained-stored"];
const RETIREMENT: [&str; 4] =
    ["before-banishment", "before-end-of-registration", "end-of-registration-stored", "session-ended"];

/// There are as many hosts as steps, each halted at a step of its own, and one kill that hits all of them.
async fn operator_killed(place: Arc<Place>) -> Result<()> {
    place.ensure_template().await?;
    let points = Failpoints::of(place.cluster(), &Component::Operator)?;
    let outcome = async {
        killed_in_isolation(&place, &points).await.context("isolate")?;
        killed_in_drain_and_retirement(&place, &points).await.context("drain and retire")
    }
    .await;
    points.clear()?;
    outcome
}

async fn kill(place: &Place, points: &Failpoints, steps: &[&str]) -> Result<()> {
    points.all_reached(steps, SOON).await?;
    place.cluster().kill(&Component::Operator).await?;
    points.clear()?;
    place.cluster().start(&Component::Operator).await?;
    Ok(())
}

async fn killed_in_isolation(place: &Place, points: &Failpoints) -> Result<()> {
    let ids: Vec<String> = (0..ISOLATION.len()).map(|number| format!("dies-{number}")).collect();
    try_join_all(ids.iter().map(|id| busy(place, id))).await?;
    points.arm(&ISOLATION, Action::Wait)?;
    try_join_all(ids.iter().map(|id| isolate(place, id, 1, "i"))).await?;
    kill(place, points, &ISOLATION).await?;
    for id in &ids {
        let result = finished(place, id, 1).await.with_context(|| id.clone())?;
        ensure!(counts(&result) == [Some(1), Some(2), Some(1)], "{id}: {result:?}");
        ensure!(result.request_id.is_some_and(|request| request.as_str() == format!("{id}-i")));
        let runs = place.api::<Workspace>().get(&format!("runs-{id}")).await?;
        ensure!(why(&runs).starts_with("Unavailable"), "{}", why(&runs));
        let commands = runs.status.clone().unwrap_or_default().commands;
        ensure!(commands.iter().any(|it| it.id.as_str() == "stop" && it.reason.as_deref() == Some("Unavailable")));
        let rests = place.api::<Workspace>().get(&format!("rests-{id}")).await?;
        ensure!(phase_of(&rests) == Some(WorkspacePhase::Stopped), "{}", why(&rests));
        for workspace in [runs, rests] {
            let status = workspace.status.clone().unwrap_or_default();
            ensure!(status.execution.is_none() && status.holder.is_none(), "{}: {status:?}", workspace.name_any());
            ensure!(status.epoch.is_some_and(|epoch| epoch.0 == 1), "the epoch stays: {:?}", status.epoch);
        }
        let volume = place.api::<Volume>().get(&format!("runs-{id}")).await?.status.unwrap_or_default();
        ensure!(volume.holder.is_none() && volume.granted_for.is_none(), "{volume:?}");
        ensure!(volume.previous_holder.is_some_and(|it| format!("{:?}", it.ended) == "Isolated"));
    }
    Ok(())
}

/// A host with one Workspace that runs, with a Volume, and was asked to stop, and one that rests; then it is gone.
async fn busy(place: &Place, id: &str) -> Result<()> {
    let host = host(place, id).await?;
    let mut session = ready(place, &host, None).await?;
    let (runs, rests) = (format!("runs-{id}"), format!("rests-{id}"));
    let volume = json!({ "new": { "size": "64Mi" }, "mountPath": "/data" });
    let power = json!({ "state": "Running", "node": id, "requestId": "start" });
    place.create_workspace(&rests, json!({ "power": power })).await?;
    let launch = run(place, &mut session, &rests).await?;
    place.power(&rests, json!({ "state": "Stopped", "requestId": "rest" })).await?;
    next(&mut session, |message| matches!(message, to_node::Message::Stop(_)).then_some(())).await?;
    say(&session, &launch, 3, ended(&launch, EndReason::Stopped, ObjectUse::Released)).await?;
    acked(&mut session, &launch, 3).await?;
    place.create_workspace(&runs, json!({ "power": power, "volume": volume })).await?;
    run(place, &mut session, &runs).await?;
    drop(session);
    silent(place, id).await?;
    place.power(&runs, json!({ "state": "Stopped", "requestId": "stop" })).await?;
    let stopping = |it: &Workspace| phase_of(it) == Some(WorkspacePhase::Stopping);
    place.workspace(&runs, "is asked to stop", SOON.as_secs(), stopping).await.map(drop)
}

async fn killed_in_drain_and_retirement(place: &Place, points: &Failpoints) -> Result<()> {
    let ids: Vec<String> = (0..RETIREMENT.len()).map(|number| format!("ends-{number}")).collect();
    let hosts = try_join_all(ids.iter().map(|id| host(place, id))).await?;
    let mut sessions = try_join_all(hosts.iter().map(|host| ready(place, host, None))).await?;
    points.arm(&DRAIN, Action::Wait)?;
    try_join_all(ids.iter().map(|id| patch(place, id, json!({ "drain": { "requested": true, "requestId": "d" } }))))
        .await?;
    try_join_all(sessions.iter_mut().map(obey_drain)).await?;
    kill(place, points, &DRAIN).await?;
    drop(sessions);
    let mut again = Vec::new();
    for host in &hosts {
        let host = host.through(dial(place).await?);
        let come = async || Ok(host.open(Some(1)).await?.ok());
        let session = eventually("the node comes back", SOON, come).await?;
        ensure!(session.settings().drain, "{}: the drain is forgotten", host.id);
        session.confirm(&session.settings()).await?;
        session.report(&session.settings(), &host.pools).await?;
        becomes(place, &host.id, "is drained", |status| status.phase == Some(NodePhase::Drained)).await?;
        again.push((host, session));
    }
    points.arm(&RETIREMENT, Action::Wait)?;
    try_join_all(ids.iter().map(|id| patch(place, id, json!({ "retirement": { "requestId": "r" } })))).await?;
    kill(place, points, &RETIREMENT).await?;
    for (host, session) in again {
        drop(session);
        let host = host.through(dial(place).await?);
        let refusal = async || Ok(refused(&host, Some(1)).await.ok().filter(|it| *it != SessionRefusal::NotLeader));
        let told = eventually("the node is told", SOON, refusal).await?;
        ensure!(told == SessionRefusal::Retired, "{}: {told:?}", host.id);
        let over = |node: &Node| {
            let status = node.status.clone().unwrap_or_default();
            status.phase == Some(NodePhase::Retired) && !is_alive(&status)
        };
        place.watched(place.all::<Node>(), &host.id, "is retired, and its session over", SOON.as_secs(), over).await?;
        no_member(place, &format!("local-{}", host.id)).await?;
    }
    Ok(())
}

/// Confirms the drain, and reports that nothing is left.
async fn obey_drain(session: &mut Session) -> Result<()> {
    let settings = loop {
        match session.receive().await?.context("the session ended")? {
            to_node::Message::Settings(settings) if settings.drain => break settings,
            _ => {}
        }
    };
    session.confirm(&settings).await?;
    session.report(&settings, &[]).await
}

// ---- an old leader -------------------------------------------------------------------------------

/// It has counted what the node holds and is stopped before it stores that; the next leader does all of it.
async fn stopped_leader(place: Arc<Place>) -> Result<()> {
    let own = Component::Operator;
    place.ensure_template().await?;
    let played = host(&place, "overtaken").await?;
    place.cluster().stop(&own).await?;
    let mut first = Replica::start(&place, "first")?;
    led_by(&place, "first").await?;
    let points = Failpoints::of(place.cluster(), &own)?;
    let come = async || Ok(ready(&place, &played.through(dial_port(&place, first.session).await?), None).await.ok());
    let mut session = eventually("the first leader serves", SOON, come).await?;
    place.create_workspace("box", json!({ "power": { "state": "Running", "node": "overtaken" } })).await?;
    run(&place, &mut session, "box").await?;
    let term = session.term;
    drop(session);
    silent(&place, "overtaken").await?;
    points.arm(&["isolation-listed"], Action::Wait)?;
    isolate(&place, "overtaken", 1, "i").await?;
    points.all_reached(&["isolation-listed"], SOON).await?;

    first.signal(Signal::STOP)?;
    place.cluster().spawn(&own).await?;
    led_by(&place, "local").await?;
    let result = finished(&place, "overtaken", 1).await?;
    ensure!(counts(&result) == [Some(0), Some(1), Some(1)], "{result:?}");
    let again = played.through(dial(&place).await?);
    let come = async || Ok(again.open(None).await?.ok());
    let session = eventually("the node comes back", SOON, come).await?;
    ensure!(session.term > term && session.ack.incarnation == 2, "term {} after {term}", session.term);
    // Or its session ends, and with it what the Workspace says.
    session.confirm(&session.settings()).await?;
    let becomes_ready =
        becomes(&place, "overtaken", "is back", |status| status.phase == Some(NodePhase::Ready)).await?;
    let can_start = |it: &Workspace| condition(it, "Placed").is_some_and(|it| it.reason == "CanStart");
    let stored = place.workspace("box", "says where it can start", SOON.as_secs(), can_start).await?;

    points.clear()?;
    first.signal(Signal::CONT)?;
    let ended = tokio::time::timeout(SOON, first.process.wait()).await.context("the stopped leader goes on")??;
    ensure!(ended.code() == Some(1), "{ended:?}: {}", first.log());
    let node = place.all::<Node>().get("overtaken").await?.status.unwrap_or_default();
    ensure!(node.isolation == becomes_ready.isolation && node.term == becomes_ready.term, "{node:?}");
    ensure!(place.api::<Workspace>().get("box").await?.status == stored.status, "the stopped leader wrote");
    place.cluster().ready(&own).await?;
    Ok(())
}

async fn led_by(place: &Place, name: &str) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(place.client(), NAMESPACE);
    let leads = async || {
        let holder = leases.get("kibotos-operator").await?.spec.and_then(|spec| spec.holder_identity);
        Ok((holder.as_deref() == Some(name)).then_some(()))
    };
    eventually(&format!("{name} leads"), Duration::from_secs(40), leads).await
}
