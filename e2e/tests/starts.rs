//! Starts, ends and deletions as a node sees them: offers that are refused or overtaken, events that come
//! twice, lives that end. The operator is the real one; the nodes are played by hand, since a good daemon
//! on a good day does little of this.

use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{Node, Volume, Workspace};
use kibo_e2e::suite::host::Session;
use kibo_e2e::suite::played::{
    accept, acked, available, ended, go, host, next, objects, offer, ready, refuse, run, say, taken,
};
use kibo_e2e::suite::{Place, Suite, condition, eventually, phase_of, why};
use kibo_protocol::v1::{self, EndReason, ObjectUse, from_node, instance_event, to_node};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

const SOON: u64 = 20;

async fn stored(place: &Place, name: &str) -> Result<Workspace> {
    Ok(place.api::<Workspace>().get(name).await?)
}

async fn delete(place: &Place, name: &str) -> Result<()> {
    place.api::<Workspace>().delete(name, &DeleteParams::default()).await?;
    Ok(())
}

fn fail() -> serde_json::Value {
    json!({ "power": { "state": "Running", "requestId": "first", "whenUnplaceable": "Fail" } })
}

async fn a_refused_start_goes_elsewhere_at_once(place: Arc<Place>) -> Result<()> {
    let (one, two) = (host(&place, "refuse-1").await?, host(&place, "refuse-2").await?);
    let (mut one, mut two) = (ready(&place, &one, None).await?, ready(&place, &two, None).await?);
    place.create_workspace("box", fail()).await?;
    let first = tokio::select! {
        offered = offer(&mut one) => { refuse(&one, &offered?, "no such image").await?; "one" }
        offered = offer(&mut two) => { refuse(&two, &offered?, "no such image").await?; "two" }
    };
    let refused = Instant::now();
    let other = if first == "one" { &mut two } else { &mut one };
    let second = offer(other).await?;
    eprintln!("the next node is asked {:?} after the refusal of the first", refused.elapsed());
    refuse(other, &second, "no such image").await?;
    let box_ = place.phase("box", WorkspacePhase::Failed, SOON).await?;
    let message = why(&box_);
    ensure!(
        message.starts_with("ResourceExhausted:") && message.contains("2 that refused it (no such image)"),
        "{message}"
    );
    let commands = box_.status.unwrap_or_default().commands;
    ensure!(commands.len() == 1 && format!("{:?}", commands[0].result) == "Failed", "{commands:?}");
    Ok(())
}

async fn a_start_that_waits_gets_the_room_that_appears(place: Arc<Place>) -> Result<()> {
    let host = host(&place, "room-1").await?;
    let mut session = ready(&place, &host, None).await?;
    let half = json!({ "resources": { "cpu": "3" } });
    place.create_workspace("first", half.clone()).await?;
    let launch = run(&place, &mut session, "first").await?;
    place.create_workspace("second", half).await?;
    let waits = |it: &Workspace| condition(it, "Placed").is_some_and(|it| it.reason == "ResourceExhausted");
    let second = place.workspace("second", "waits", SOON, waits).await?;
    ensure!(condition(&second, "Placed").is_some_and(|it| it.message.contains("too little CPU")), "{}", why(&second));
    ensure!(!second.is_power_request_consumed(), "the request stands");
    say(&session, &launch, 3, ended(&launch, EndReason::OutOfMemory, ObjectUse::Released)).await?;
    let next = run(&place, &mut session, "second").await?;
    ensure!(next.workspace.unwrap_or_default().name == "second");
    let first = stored(&place, "first").await?;
    ensure!(
        phase_of(&first) == Some(WorkspacePhase::Stopped) && why(&first).starts_with("OutOfMemory"),
        "{}",
        why(&first)
    );
    Ok(())
}

async fn a_deletion_overtakes_an_offer(place: Arc<Place>) -> Result<()> {
    let host = host(&place, "overtake-1").await?;
    let mut session = ready(&place, &host, None).await?;
    place.create_workspace("box", json!({})).await?;
    let offered = offer(&mut session).await?;
    delete(&place, "box").await?;
    accept(&session, &offered).await?;
    let revoked = next(&mut session, |message| match message {
        to_node::Message::Revoke(revoke) => Some(Ok(revoke.offer_id)),
        to_node::Message::Go(_) => Some(Err(anyhow::anyhow!("it was started"))),
        _ => None,
    });
    ensure!(revoked.await?? == offered.offer_id);
    place.gone(place.api::<Workspace>(), "box", SOON).await
}

async fn a_session_that_ends_before_the_commit_is_no_loss(place: Arc<Place>) -> Result<()> {
    let (one, two) = (host(&place, "lost-1").await?, host(&place, "lost-2").await?);
    let (mut one, mut two) = (ready(&place, &one, None).await?, ready(&place, &two, None).await?);
    place.create_workspace("box", fail()).await?;
    let mut other = tokio::select! {
        offered = offer(&mut one) => { offered?; drop(one); two }
        offered = offer(&mut two) => { offered?; drop(two); one }
    };
    run(&place, &mut other, "box").await.map(drop)
}

async fn an_event_has_its_effect_once(place: Arc<Place>) -> Result<()> {
    let host = host(&place, "once-1").await?;
    let mut session = ready(&place, &host, None).await?;
    place.create_workspace("box", json!({})).await?;
    let launch = run(&place, &mut session, "box").await?;
    let before = stored(&place, "box").await?;
    ensure!(before.status.as_ref().is_some_and(|s| s.writable_layer.as_ref().is_some_and(|layer| layer.created)));
    for seq in [1, 2] {
        say(&session, &launch, seq, if seq == 1 { taken(&launch) } else { available() }).await?;
        acked(&mut session, &launch, seq).await?;
    }
    ensure!(stored(&place, "box").await?.resource_version() == before.resource_version(), "a replay wrote something");
    let mut stranger = launch.clone();
    "inst-00000000000000000000000000".clone_into(&mut stranger.instance_id);
    let stranger_ended =
        instance_event::Kind::Ended(v1::Ended { reason: EndReason::VmmExited.into(), ..v1::Ended::default() });
    say(&session, &stranger, 1, stranger_ended).await?;
    acked(&mut session, &stranger, 1).await?;
    ensure!(stored(&place, "box").await?.resource_version() == before.resource_version(), "a stranger's end counted");
    say(&session, &launch, 3, ended(&launch, EndReason::VmmExited, ObjectUse::Released)).await?;
    acked(&mut session, &launch, 3).await?;
    let failed = stored(&place, "box").await?;
    ensure!(why(&failed) == "VmmExited: played END_REASON_VMM_EXITED", "acked after the commit: {}", why(&failed));
    Ok(())
}

async fn a_go_that_came_too_late_is_placed_again(place: Arc<Place>) -> Result<()> {
    let host = host(&place, "late-1").await?;
    let mut session = ready(&place, &host, None).await?;
    let volume = json!({ "volume": { "new": { "size": "64Mi" }, "mountPath": "/data" } });
    place.create_workspace("box", volume).await?;
    let offered = offer(&mut session).await?;
    accept(&session, &offered).await?;
    let first = go(&mut session).await?;
    say(&session, &first, 1, ended(&first, EndReason::NotStarted, ObjectUse::Refused)).await?;
    // The node that was late is left alone for a while.
    let again = tokio::time::timeout(Duration::from_secs(60), async {
        loop {
            if let Ok(offered) = offer(&mut session).await {
                break offered;
            }
        }
    });
    let offered = again.await?;
    accept(&session, &offered).await?;
    let second = go(&mut session).await?;
    ensure!(second.instance_id != first.instance_id);
    let epochs = |launch: &v1::Launch| objects(launch, ObjectUse::Held).iter().map(|o| o.epoch).collect::<Vec<_>>();
    ensure!(
        (epochs(&first), epochs(&second)) == (vec![1, 1], vec![2, 2]),
        "{:?} {:?}",
        epochs(&first),
        epochs(&second)
    );
    Ok(())
}

async fn a_new_life_of_the_node_fails_what_ran_in_the_old_one(place: Arc<Place>) -> Result<()> {
    let host = host(&place, "life-1").await?;
    let mut session = ready(&place, &host, None).await?;
    let volume = json!({ "volume": { "new": { "size": "64Mi" }, "mountPath": "/data" } });
    place.create_workspace("box", volume).await?;
    let first = run(&place, &mut session, "box").await?;
    drop(session);
    let session =
        eventually("the old session is over", Duration::from_secs(SOON), async || Ok(host.open(None).await?.ok()));
    let mut session = session.await?;
    session.confirm(&session.settings()).await?;
    ensure!(session.ack.desired.is_empty(), "nothing of the old life is desired");
    let failed = place.phase("box", WorkspacePhase::Failed, SOON).await?;
    ensure!(why(&failed).starts_with("NodeRestarted"), "{}", why(&failed));
    place.power("box", json!({ "state": "Running", "requestId": "again" })).await?;
    let second = run(&place, &mut session, "box").await?;
    let grants: Vec<_> = second.layer.iter().chain(second.volumes.iter().filter_map(|v| v.object.as_ref())).collect();
    for object in &grants {
        let grant = object.grant.as_ref().context("no grant")?;
        ensure!(grant.epoch == 2 && grant.predecessor_epoch == 1, "{grant:?}");
        ensure!(grant.predecessor_end() == v1::PredecessorEnd::IncarnationEnded, "{grant:?}");
        ensure!(object.must_exist, "what was made must be there");
    }
    ensure!(grants.len() == 2 && second.instance_id != first.instance_id);
    Ok(())
}

async fn an_isolation_frees_what_its_node_held(place: Arc<Place>) -> Result<()> {
    let host = host(&place, "isolate-1").await?;
    let mut session = ready(&place, &host, None).await?;
    place.create_workspace("box", json!({})).await?;
    run(&place, &mut session, "box").await?;
    drop(session);
    let closed = |node: &Node| node.status.as_ref().and_then(|s| s.session.as_ref()).is_some_and(|s| !s.alive);
    place.watched(place.all::<Node>(), "isolate-1", "is offline", SOON, closed).await?;
    place.power("box", json!({ "state": "Stopped", "requestId": "stop" })).await?;
    let waits = |it: &Workspace| condition(it, "NodeReachable").is_some_and(|it| it.reason == "NodeUnreachable");
    let waiting = place.workspace("box", "says what its stop waits for", SOON, waits).await?;
    ensure!(why(&waiting).contains("`kibo node isolate isolate-1 --confirm-host-cannot-write`"), "{}", why(&waiting));
    let isolation = json!({ "spec": { "isolation": { "incarnation": 1, "confirmHostCannotWrite": true } } });
    place.all::<Node>().patch("isolate-1", &PatchParams::default(), &Patch::Merge(isolation)).await?;
    let failed = place.phase("box", WorkspacePhase::Failed, SOON).await?;
    ensure!(why(&failed).starts_with("Unavailable"), "{}", why(&failed));
    let status = failed.status.unwrap_or_default();
    ensure!(status.holder.is_none() && status.execution.is_none());
    ensure!(status.previous_holder.is_some_and(|it| format!("{:?}", it.ended) == "Isolated"));
    Ok(())
}

async fn a_deletion_removes_layer_and_volume_through_a_member(place: Arc<Place>) -> Result<()> {
    let host = host(&place, "remove-1").await?;
    let mut session = ready(&place, &host, None).await?;
    let volume = json!({ "volume": { "new": { "size": "64Mi" }, "mountPath": "/data", "deleteWithWorkspace": true } });
    place.create_workspace("box", volume).await?;
    let launch = run(&place, &mut session, "box").await?;
    let id = stored(&place, "box").await?.status.and_then(|status| status.id).context("no id")?;
    delete(&place, "box").await?;
    let mode =
        next(&mut session, |message| if let to_node::Message::Stop(stop) = message { Some(stop.mode()) } else { None });
    ensure!(mode.await? == v1::StopMode::Force);
    say(&session, &launch, 3, ended(&launch, EndReason::ForceStopped, ObjectUse::Released)).await?;
    let mut deleted: HashMap<String, u64> = HashMap::new();
    while deleted.len() < 2 {
        let command = next(&mut session, |message| match message {
            to_node::Message::DeleteObject(delete) => Some(delete),
            _ => None,
        });
        let command = command.await?;
        let object = command.object.unwrap_or_default();
        let epoch = object.grant.map_or(0, |grant| grant.epoch);
        deleted.insert(object.uid.clone(), epoch);
        let result =
            v1::ObjectResult { command_id: command.command_id, uid: object.uid, epoch, ok: true, ..Default::default() };
        session.send(from_node::Message::ObjectResult(result)).await?;
    }
    ensure!(deleted.values().all(|epoch| *epoch == 2), "a deletion has a grant of its own: {deleted:?}");
    place.gone(place.api::<Workspace>(), "box", SOON).await?;
    place.gone(place.api::<Volume>(), "box", SOON).await?;
    let tombstone = place.all::<kibo_crds::WorkspaceTombstone>().get(&id.to_string()).await?;
    ensure!(tombstone.spec.last_execution.is_some_and(|last| last.node.as_str() == "remove-1"));
    Ok(())
}

/// 20 at once on two nodes with room for 12: 12 run, 8 are refused, and no node is over at any time.
async fn no_more_is_promised_than_there_is(place: Arc<Place>) -> Result<()> {
    let mut players = Vec::new();
    for id in ["crowd-1", "crowd-2"] {
        let host = host(&place, id).await?;
        let session = ready(&place, &host, None).await?;
        players.push(tokio::spawn(play_all(session)));
    }
    // Of 4 cores and 4 GiB each: six of 600m fit.
    let spec = || {
        let mut spec = fail();
        spec["resources"] = json!({ "cpu": "600m", "memory": "128Mi" });
        spec
    };
    place.ensure_template().await?;
    let names: Vec<_> = (0..20).map(|n| format!("crowd-{n}")).collect();
    futures::future::try_join_all(names.iter().map(|name| place.create_workspace(name, spec()))).await?;
    let settled = |it: &Workspace| matches!(phase_of(it), Some(WorkspacePhase::Available | WorkspacePhase::Failed));
    let settle = names.iter().map(|name| place.workspace(name, "is settled", 60, settled));
    let all = futures::future::try_join_all(settle).await?;
    let (ran, failed): (Vec<_>, Vec<_>) = all.iter().partition(|it| phase_of(it) == Some(WorkspacePhase::Available));
    ensure!((ran.len(), failed.len()) == (12, 8), "{} run, {} failed", ran.len(), failed.len());
    ensure!(failed.iter().all(|it| why(it).starts_with("ResourceExhausted")), "{}", why(failed[0]));
    let on = |node: &str| {
        let executions = ran.iter().filter_map(|it| it.status.as_ref()?.execution.as_ref());
        executions.filter(|execution| execution.node.as_str() == node).count()
    };
    ensure!((on("crowd-1"), on("crowd-2")) == (6, 6), "they spread: {} and {}", on("crowd-1"), on("crowd-2"));
    for player in players {
        player.abort();
    }
    Ok(())
}

/// A node that accepts and runs whatever it is offered.
async fn play_all(mut session: Session) -> Result<()> {
    while let Ok(Some(message)) = session.receive().await {
        match message {
            to_node::Message::Settings(settings) => session.confirm(&settings).await?,
            to_node::Message::Offer(offered) => accept(&session, &offered).await?,
            to_node::Message::Go(go) => {
                let launch = go.launch.unwrap_or_default();
                say(&session, &launch, 1, taken(&launch)).await?;
                say(&session, &launch, 2, available()).await?;
            }
            _ => {}
        }
    }
    Ok(())
}

async fn labels_that_people_give_a_node_count_at_once(place: Arc<Place>) -> Result<()> {
    let host = host(&place, "label-1").await?;
    let mut session = ready(&place, &host, None).await?;
    let (key, value) = place.selector();
    place.create_workspace("box", json!({ "nodeSelector": { key: value, "disk": "fast" } })).await?;
    let waits = |it: &Workspace| condition(it, "Placed").is_some_and(|it| it.message.contains("disk=fast"));
    place.workspace("box", "misses a label", SOON, waits).await?;
    let labels = Patch::Merge(json!({ "metadata": { "labels": { "disk": "fast" } } }));
    place.all::<Node>().patch("label-1", &PatchParams::default(), &labels).await?;
    run(&place, &mut session, "box").await.map(drop)
}

fn main() -> ExitCode {
    Suite::with_operator()
        .test("a_refused_start_goes_elsewhere_at_once", a_refused_start_goes_elsewhere_at_once)
        .test("a_start_that_waits_gets_the_room_that_appears", a_start_that_waits_gets_the_room_that_appears)
        .test("a_deletion_overtakes_an_offer", a_deletion_overtakes_an_offer)
        .test("a_session_that_ends_before_the_commit_is_no_loss", a_session_that_ends_before_the_commit_is_no_loss)
        .test("an_event_has_its_effect_once", an_event_has_its_effect_once)
        .test("a_go_that_came_too_late_is_placed_again", a_go_that_came_too_late_is_placed_again)
        .test(
            "a_new_life_of_the_node_fails_what_ran_in_the_old_one",
            a_new_life_of_the_node_fails_what_ran_in_the_old_one,
        )
        .test("an_isolation_frees_what_its_node_held", an_isolation_frees_what_its_node_held)
        .test(
            "a_deletion_removes_layer_and_volume_through_a_member",
            a_deletion_removes_layer_and_volume_through_a_member,
        )
        .test("no_more_is_promised_than_there_is", no_more_is_promised_than_there_is)
        .test("labels_that_people_give_a_node_count_at_once", labels_that_people_give_a_node_count_at_once)
        .run()
}
