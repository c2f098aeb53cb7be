//! One session from its first message to its end.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kibo_crds::{Incarnation, InstanceId};
use kibo_protocol::v1::{self, FromNode, SessionRefusal, ToNode, from_node, to_node};
use rand::Rng as _;
use tokio::sync::{Semaphore, mpsc};
use tonic::{Status, Streaming};

use super::{
    hello::{Hello, Running, declared_pools},
    hooks::Absence,
    inbound::{Pace, bound, one_line},
    lanes,
    live::{ClockNews, OfferAnswer, ReportNews, Session},
    open::{Committed, Leading, Opened, Opening, Refusal, open, read_node},
};
use crate::node::compute_status;

/// A node confirms settings as soon as its admission uses them.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(5);
/// A node reads every record of its pools for it.
const INVENTORY_WITHIN: Duration = Duration::from_secs(60);
/// Events that wait to be taken in; the node keeps them all until they are acked.
const EVENT_QUEUE: usize = 4096;
/// Messages of one node, on the average of many; beyond it the node's stream is read slowly.
const MESSAGE_EVERY: Duration = Duration::from_millis(4);
const MESSAGES_AT_ONCE: u32 = 2000;
/// Why a session ends is told for so long to a node that does not read.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Attempts to compute the desired set before the session is given up.
const DESIRED_ATTEMPTS: u32 = 5;

/// The way to the node.
pub type Wire = mpsc::Sender<Result<ToNode, Status>>;

/// Tells the node why there is no session. A term that is lower than one that it obeyed goes unheard.
pub async fn refuse(wire: &Wire, term: u64, refusal: Refusal) {
    metrics::counter!("kibotos_sessions_refused_total", "reason" => refusal.reason.as_str_name()).increment(1);
    let refused = v1::SessionRefused { reason: refusal.reason.into(), message: refusal.message };
    // A node that is gone needs no answer.
    let _ = wire.send(Ok(ToNode { term, message: Some(to_node::Message::Refused(refused)) })).await;
}

/// The same to who said Hello.
pub async fn refuse_hello(wire: &Wire, term: u64, hello: &Hello, refusal: Refusal) {
    tracing::warn!(node = %hello.node, reason = refusal.reason.as_str_name(), message = refusal.message, "session refused");
    refuse(wire, term, refusal).await;
}

/// Opens the session and serves it until either side ends it.
pub async fn serve(
    leading: Arc<Leading>,
    hello: Hello,
    mut inbound: Streaming<FromNode>,
    wire: Wire,
    hellos: Arc<Semaphore>,
) {
    let term = leading.nodes.ctx.term.0;
    let mut opened = Box::pin(open(&leading, &hellos, &hello, None)).await;
    if let Ok(Opening::TakeInventory) = opened {
        opened = match take_inventory(&hello, term, &mut inbound, &wire).await {
            Ok(inventory) => Box::pin(open(&leading, &hellos, &hello, Some(&inventory))).await,
            Err(message) => Err(Refusal::new(SessionRefusal::ControlPlaneWentBack, message)),
        };
    }
    let opened = match opened {
        Ok(Opening::Opened(opened)) => *opened,
        // Asked once, and answered.
        Ok(Opening::TakeInventory) => return,
        Err(refusal) => return refuse_hello(&wire, term, &hello, refusal).await,
    };
    let Opened { committed: opened, turn } = opened;
    let session = opened.session.clone();
    metrics::gauge!("kibotos_sessions").increment(1);
    let acknowledged = acknowledge(&leading, &opened, &wire).await;
    drop(turn);
    if let Some(desired) = acknowledged {
        let writer = tokio::spawn(write(session.clone(), opened.queue, wire));
        tokio::spawn(tear_down_strangers(leading.clone(), session.clone(), hello.instances, desired));
        leading.nodes.ctx.registry.notify_move();
        read(&leading, &session, inbound).await;
        end(&leading, &session);
        let _ = writer.await;
    } else {
        end(&leading, &session);
    }
    metrics::gauge!("kibotos_sessions").decrement(1);
    kibo_failpoint::reach("session-ended").await;
    mark_ended(&leading, &session).await;
}

/// Asks a node that is to be adopted for everything that it has.
async fn take_inventory(
    hello: &Hello,
    term: u64,
    inbound: &mut Streaming<FromNode>,
    wire: &Wire,
) -> Result<v1::Inventory, String> {
    let ask = v1::TakeInventory { quarantine_id: hello.quarantine.clone() };
    let gone = || "the session ended before the node said what it has".to_owned();
    wire.send(Ok(ToNode { term, message: Some(to_node::Message::TakeInventory(ask)) })).await.map_err(|_| gone())?;
    let answer = tokio::time::timeout(INVENTORY_WITHIN, inbound.message()).await;
    match answer {
        Ok(Ok(Some(FromNode { message: Some(from_node::Message::Inventory(inventory)) }))) => {
            if inventory.quarantine_id != hello.quarantine {
                return Err("the node has seen something in between: it is asked again".to_owned());
            }
            if !inventory.problem.is_empty() {
                return Err(format!("the node cannot say what it has: {}", one_line(&inventory.problem)));
            }
            Ok(inventory)
        }
        Ok(Ok(Some(_))) => Err("the node did not say what it has, but something else".to_owned()),
        Ok(Ok(None) | Err(_)) => Err(gone()),
        Err(_) => Err("the node did not say in time what it has: a storage pool may hang".to_owned()),
    }
}

/// Sends the HelloAck before anything else. Gives back the Instances that are to run.
async fn acknowledge(leading: &Leading, opened: &Committed, wire: &Wire) -> Option<Vec<String>> {
    let session = &opened.session;
    let desired = desired(leading, session).await?;
    let instances = desired.iter().filter_map(|desired| Some(desired.launch.as_ref()?.instance_id.clone())).collect();
    let ack = v1::HelloAck {
        session_id: session.id.clone(),
        incarnation: session.incarnation.0,
        cluster_id: leading.nodes.ctx.cluster_id.clone(),
        revision: opened.revision,
        settings: Some(session.acknowledge()),
        desired,
        moment: Some(session.moment()),
        adopts: opened.adopts.clone(),
        heartbeat_millis: millis(leading.nodes.ctx.watchdog.periods().heartbeat()),
        return_within_millis: millis(return_within(leading.nodes.ctx.nodes.fleet())),
        lost_pools: leading.nodes.ctx.pools.lost(),
    };
    let message = ToNode { term: session.term.0, message: Some(to_node::Message::HelloAck(ack)) };
    wire.send(Ok(message)).await.ok()?;
    Some(instances)
}

/// A leader takes about two hundred nodes back in a second without anybody waiting in line.
fn return_within(fleet: usize) -> Duration {
    let fleet = u64::try_from(fleet).unwrap_or(u64::MAX);
    Duration::from_millis(fleet.saturating_mul(5)).clamp(Duration::from_millis(250), Duration::from_secs(30))
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

async fn desired(leading: &Leading, session: &Session) -> Option<Vec<v1::Desired>> {
    for attempt in 1..=DESIRED_ATTEMPTS {
        match leading.desired.desired(&session.node, session.incarnation).await {
            Ok(desired) => return Some(desired),
            Err(retry) => tracing::warn!(node = %session.node, %retry, attempt, "failed to compute the desired set"),
        }
        tokio::select! {
            () = session.over.cancelled() => return None,
            () = tokio::time::sleep(Duration::from_millis(200) * attempt) => {}
        }
    }
    None
}

/// Passes on what is queued; the reason of an end goes last.
async fn write(session: Arc<Session>, mut queue: mpsc::Receiver<ToNode>, wire: Wire) {
    loop {
        let message = tokio::select! {
            biased;
            () = session.over.cancelled() => break,
            message = queue.recv() => message,
        };
        let Some(message) = message else { break };
        // A node that does not read keeps nobody waiting.
        let sent = session.over.run_until_cancelled(wire.send(Ok(message))).await;
        if !matches!(sent, Some(Ok(()))) {
            session.over.cancel();
            break;
        }
    }
    if let Some(ending) = session.ending() {
        let refusal = refuse(&wire, session.term.0, Refusal::new(ending.reason, ending.message));
        let _ = tokio::time::timeout(LAST_WORDS, refusal).await;
    }
}

/// Takes in what the node says, until the session is over.
async fn read(leading: &Arc<Leading>, session: &Arc<Session>, mut inbound: Streaming<FromNode>) {
    let ctx = &leading.nodes.ctx;
    let (events, queue) = mpsc::channel(EVENT_QUEUE);
    let lanes = lanes::run(session.clone(), ctx.registry.clone(), leading.events.clone(), ctx.tasks.clone(), queue);
    tokio::spawn(lanes);
    // Not all nodes in the same moment, when one change of the policy went unconfirmed.
    let confirmed_within = CONFIRMED_WITHIN + Duration::from_millis(rand::rng().random_range(0..1000));
    // The first look begins the first measurement of the clock.
    let mut look = Instant::now();
    let mut pace = Pace::new(MESSAGE_EVERY, MESSAGES_AT_ONCE, Instant::now());
    loop {
        let wait = pace.wait(Instant::now());
        tokio::select! {
            () = session.over.cancelled() => return,
            () = ctx.stop.cancelled() => {
                session.end(SessionRefusal::NotLeader, "this operator leads no more: come back soon");
                return;
            }
            () = session.stirred() => look = look.min(session.next_look(Instant::now())),
            () = tokio::time::sleep_until(look.into()) => {
                session.settle_moment();
                if let Some(news) = session.probe_clock() {
                    measured(leading, session, &news);
                }
                if session.unconfirmed_for().is_some_and(|waited| waited > confirmed_within) {
                    tracing::warn!(node = %session.node, session = session.id, "the node did not confirm its settings: the session ends and they are sent again with the next one");
                    return;
                }
                look = session.next_look(Instant::now());
            }
            message = paced(wait, &mut inbound) => match message {
                Ok(Some(FromNode { message: Some(mut message) })) => {
                    pace.count(Instant::now());
                    if !ctx.registry.is_current(session) {
                        return;
                    }
                    bound(&mut message);
                    handle(leading, session, &events, message).await;
                }
                Ok(Some(FromNode { message: None })) => {
                    tracing::debug!(node = %session.node, "a message of a kind that this operator does not know");
                }
                Ok(None) => return,
                Err(status) => {
                    tracing::info!(node = %session.node, session = session.id, error = status.message(), "the connection of a session broke");
                    return;
                }
            }
        }
    }
}

/// The next message, not before its time: a node that talks without end waits for its own words.
async fn paced(wait: Duration, inbound: &mut Streaming<FromNode>) -> Result<Option<FromNode>, Status> {
    // A sleep of nothing would still take up to a millisecond.
    if !wait.is_zero() {
        tokio::time::sleep(wait).await;
    }
    inbound.message().await
}

async fn handle(
    leading: &Leading,
    session: &Session,
    events: &mpsc::Sender<v1::InstanceEvent>,
    message: from_node::Message,
) {
    let ctx = &leading.nodes.ctx;
    ctx.watchdog.heard(&session.node);
    match message {
        from_node::Message::Hello(_) => {
            tracing::warn!(node = %session.node, "a second hello in one session is ignored");
        }
        from_node::Message::FenceSeen(seen) => {
            let look_id = seen.look_id.clone();
            if !session.looks.answer(&look_id, seen) {
                tracing::debug!(node = %session.node, "a look at a fence that nobody waits for any more");
            }
        }
        from_node::Message::PoolListing(listing) => {
            let list_id = listing.list_id.clone();
            if !session.listings.answer(&list_id, listing) {
                tracing::debug!(node = %session.node, "a list of a pool that nobody waits for any more");
            }
        }
        from_node::Message::Inventory(_) => {
            tracing::warn!(node = %session.node, "an answer that nobody asked for is ignored");
        }
        from_node::Message::ClockReading(reading) => {
            if let Some(news) = session.take_clock(&reading) {
                measured(leading, session, &news);
            }
        }
        // That it came is all that it says.
        from_node::Message::Heartbeat(_) => {}
        from_node::Message::Accept(accept) => {
            session.offers.answer(&accept.offer_id, OfferAnswer::Accepted);
        }
        from_node::Message::Refuse(refuse) => {
            let answer = OfferAnswer::Refused { reason: refuse.reason(), message: refuse.message };
            session.offers.answer(&refuse.offer_id, answer);
        }
        from_node::Message::Events(batch) => {
            // A daemon has fewer on the way than there is room for, so it never waits here. Whoever has more is not
            // listened to meanwhile, and what it said before is no sign that it lives now. Ends with the session; what
            // was not acked comes again.
            for event in batch.events {
                if events.send(event).await.is_err() {
                    return;
                }
            }
        }
        from_node::Message::Report(report) => match declared_pools(&report.pools) {
            Ok(pools) => {
                match session.take_report(report, pools) {
                    ReportNews::Nothing => {}
                    ReportNews::Room => ctx.registry.notify(),
                    ReportNews::Reach => ctx.registry.notify_move(),
                }
                ctx.nodes.touch(&session.node);
            }
            Err(error) => tracing::warn!(node = %session.node, %error, "a report is ignored"),
        },
        from_node::Message::SettingsApplied(applied) => {
            if session.confirm_settings(applied.revision) {
                ctx.registry.notify();
                ctx.nodes.touch(&session.node);
            }
        }
        from_node::Message::ObjectResult(result) => {
            let command_id = result.command_id.clone();
            if !session.commands.answer(&command_id, result) {
                tracing::debug!(node = %session.node, "the result of a command that nobody waits for any more");
            }
        }
        from_node::Message::MoveProgress(progress) => leading.moves.moved(&session.node, &progress),
        from_node::Message::StreamRefused(refused) => leading.streams.refused(&session.node, refused),
    }
}

fn measured(leading: &Leading, session: &Session, news: &ClockNews) {
    let ctx = &leading.nodes.ctx;
    if news.moves {
        tracing::info!(node = %session.node, offset = news.clock.shown, takes_workspaces = !news.clock.over, "the node's clock was measured");
        ctx.registry.notify();
    }
    ctx.nodes.touch(&session.node);
}

/// In this order: out of the registry, closed; `alive=false` comes after it.
fn end(leading: &Leading, session: &Session) {
    let registry = &leading.nodes.ctx.registry;
    let was_current = registry.remove(session);
    session.close();
    // Streams that were asked for on a session that took this one's place go on.
    if was_current || registry.get(&session.node).is_none() {
        leading.streams.session_ended(&session.node);
    }
    tracing::info!(node = %session.node, session = session.id, "session ended");
}

/// Writes that the session is over, unless a newer one took its place or a newer leader does it.
async fn mark_ended(leading: &Leading, session: &Session) {
    let ctx = &leading.nodes.ctx;
    let api = leading.nodes.api();
    let mut pause = Duration::from_millis(50);
    while !ctx.stop.is_cancelled() {
        if let Ok((node, _)) = read_node(&api, &session.node).await {
            let Some(node) = node else { return };
            let stored = node.status.as_ref().and_then(|status| status.session.as_ref());
            if stored.is_none_or(|stored| stored.id != session.id || !stored.alive) {
                return;
            }
            let observed = leading.nodes.observe(&session.node, &node);
            let status = compute_status(&crate::node::Observed { live: None, orphaned: true, ..observed });
            match leading.nodes.write(&session.node, &node, status).await {
                Err(error) if error.is_retryable() => {}
                Ok(_) | Err(_) => return,
            }
        }
        tokio::select! {
            () = ctx.stop.cancelled() => return,
            () = tokio::time::sleep(pause) => pause = (pause * 2).min(Duration::from_secs(5)),
        }
    }
}

/// What runs on the node and is not in its desired set is torn down, once a quorum read of that one
/// Workspace proves that it does not belong there.
async fn tear_down_strangers(
    leading: Arc<Leading>,
    session: Arc<Session>,
    running: Vec<Running>,
    desired: Vec<String>,
) {
    let is_stranger = |running: &Running| !running.ended && !desired.contains(&running.instance.to_string());
    for stranger in running.into_iter().filter(is_stranger) {
        if !is_proven_absent(&leading, &session, session.incarnation, stranger.instance, &stranger.workspace_uid).await
        {
            continue;
        }
        tracing::warn!(node = %session.node, instance = %stranger.instance, workspace_uid = stranger.workspace_uid, "the node runs an Instance that no Workspace holds: it is torn down");
        metrics::counter!("kibotos_tear_downs_total").increment(1);
        session.send(to_node::Message::TearDown(v1::TearDown {
            instance_id: stranger.instance.to_string(),
            reason: "no Workspace holds this Instance as its execution on this node".to_owned(),
        }));
    }
}

/// Asks until there is an answer or the session is over.
async fn is_proven_absent(
    leading: &Leading,
    session: &Session,
    incarnation: Incarnation,
    instance: InstanceId,
    workspace_uid: &str,
) -> bool {
    let mut pause = Duration::from_millis(200);
    loop {
        match leading.desired.proves_absent(&session.node, incarnation, instance, workspace_uid).await {
            Ok(Absence::NoWorkspace) if session.spares_unknown => {
                tracing::warn!(node = %session.node, %instance, workspace_uid, "an Instance whose Workspace is not known goes on, as its adoption says");
                return false;
            }
            Ok(absence) => return absence != Absence::Holds,
            Err(retry) => {
                tracing::warn!(node = %session.node, %instance, %retry, "cannot prove yet whether an Instance belongs to the node");
            }
        }
        tokio::select! {
            () = session.over.cancelled() => return false,
            () = tokio::time::sleep(pause) => pause = (pause * 2).min(Duration::from_secs(10)),
        }
    }
}
