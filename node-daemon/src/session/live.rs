//! One session, from the Hello to its end.

use std::{sync::Arc, time::Duration};

use futures::StreamExt as _;
use kibo_protocol::{
    quarantine_id,
    v1::{self, from_node::Message},
};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Streaming, transport::Channel};

use super::{
    ack,
    backoff::End,
    control::InstanceControl,
    handle::Handler,
    hello, inventory,
    node::Node,
    outbox::{EventSender, Outbox},
    report::{self, Reporter},
    streams::Way,
};
use crate::state::Credentials;

/// The operator lists everything before it answers the first Hello of its term.
const ACK_WITHIN: Duration = Duration::from_secs(30);
const OPEN_WITHIN: Duration = Duration::from_secs(10);
/// How often the node looks whether a report is due.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Unless the operator says otherwise.
const HEARTBEAT: Duration = Duration::from_secs(5);
const SHORTEST_HEARTBEAT: Duration = Duration::from_millis(100);
/// A desired set of thousands of Instances is one message.
const MAX_MESSAGE: usize = 64 << 20;

pub async fn run<I: InstanceControl>(
    node: &Arc<Node<I>>,
    credentials: &Credentials,
    way: Way,
    channel: Channel,
) -> End {
    let (outbox, messages) = Outbox::new();
    let hello = first_message(node, credentials);
    let runs_anything = node.instances.list().iter().any(|it| it.state != v1::InstanceState::Ended);
    if hello.incarnation.is_none() && runs_anything {
        let text =
            "Instances run here of which this node does not know in which life they began: it cannot begin a new one";
        return End::Local(text.into());
    }
    let sent = ack::Sent {
        incarnation: hello.incarnation.map(kibo_crds::Incarnation),
        cluster_id: hello.cluster_id.clone(),
        quarantine: quarantine_id(&hello),
    };
    outbox.send(Message::Hello(hello));
    // Whoever still works for this session when it has ended (a move, a command that hangs) does not keep it open.
    let ended = CancellationToken::new();
    let messages = ReceiverStream::new(messages).take_until(ended.clone().cancelled_owned());
    let _ends = ended.drop_guard();
    let mut client = v1::node_control_client::NodeControlClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let mut inbound = match timeout(OPEN_WITHIN, client.session(messages)).await {
        Err(_) => return End::Lost("the operator did not open the session in time".into()),
        // As a replica answers that does not lead.
        Ok(Err(status)) if status.code() == Code::Unavailable => {
            return End::Refused { reason: v1::SessionRefusal::NotLeader, message: said(&status) };
        }
        Ok(Err(status)) => return End::Lost(format!("the operator closed the session: {}", said(&status))),
        Ok(Ok(response)) => response.into_inner(),
    };
    let mut first = match answer(&mut inbound).await {
        Ok(message) => message,
        Err(end) => return end,
    };
    if let Some(v1::to_node::Message::TakeInventory(asked)) = &first.message {
        if asked.quarantine_id != sent.quarantine {
            return End::Disobeyed("the operator asks for another quarantine than this node is in".into());
        }
        outbox.send(Message::Inventory(inventory::take(node, sent.quarantine.clone()).await));
        first = match answer(&mut inbound).await {
            Ok(message) => message,
            Err(end) => return end,
        };
    }
    let mut handler = match accept(node, &first, &sent, outbox.clone(), way) {
        Ok(handler) => handler,
        Err(end) => return end,
    };
    // One that has just been given a life which a pool takes for dead gets no other one by asking again.
    let may_renew = sent.incarnation.is_some() || node.may_begin_anew().is_none();
    let end = serve(node, &mut handler, &mut inbound, &outbox, Pace { heartbeat: heartbeat(&first), may_renew }).await;
    handler.close(&end);
    end
}

/// What the operator answers to the Hello, and to the inventory.
async fn answer(inbound: &mut Streaming<v1::ToNode>) -> Result<v1::ToNode, End> {
    match timeout(ACK_WITHIN, next(inbound)).await {
        Err(_) => Err(End::Lost("the operator did not answer the Hello in time".into())),
        Ok(answer) => answer,
    }
}

fn first_message<I: InstanceControl>(node: &Node<I>, credentials: &Credentials) -> v1::Hello {
    hello::hello(&hello::Facts {
        credentials,
        record: &node.state.get(),
        boot_id: &node.boot_id,
        home: node.dir.identity(),
        node: &node.config.node,
        resources: node.config.resources,
        pools: &node.pools,
        listed: &node.instances.list(),
        spool: &node.spool,
        renews: node.renews() && !node.is_busy(),
    })
}

fn said(status: &tonic::Status) -> String {
    format!("{} ({})", status.message(), status.code())
}

async fn next(inbound: &mut Streaming<v1::ToNode>) -> Result<v1::ToNode, End> {
    match inbound.message().await {
        Ok(Some(message)) => Ok(message),
        Ok(None) => Err(End::Lost("the operator ended the session".into())),
        Err(status) => Err(End::Lost(format!("the session broke: {}", said(&status)))),
    }
}

/// Checks the term and the answer, and writes down what follows before anything is done.
fn accept<I: InstanceControl>(
    node: &Arc<Node<I>>,
    first: &v1::ToNode,
    sent: &ack::Sent,
    outbox: Outbox,
    way: Way,
) -> Result<Handler<I>, End> {
    let ack = match &first.message {
        Some(v1::to_node::Message::HelloAck(ack)) => ack,
        Some(v1::to_node::Message::Refused(refused)) => return Err(refusal(refused)),
        _ => return Err(End::Disobeyed("the operator's first message is no answer to the Hello".into())),
    };
    let record = node.state.get();
    if ack::adopts(sent, ack).map_err(End::Disobeyed)? {
        tracing::warn!(
            quarantine = sent.quarantine,
            term = first.term,
            "an admin adopted this node: it takes up with the control plane that was put back"
        );
    } else {
        ack::check_term(record.highest_term, first.term).map_err(End::Disobeyed)?;
    }
    let mut accepted = ack::accept(&record, sent, &node.boot_id, ack).map_err(End::Disobeyed)?;
    accepted.highest_term = kibo_crds::Term(first.term);
    node.state.update(|record| *record = accepted).map_err(|error| End::Local(error.to_string()))?;
    node.lose_pools(&ack.lost_pools).map_err(|error| End::Local(error.to_string()))?;
    node.enters_session(Duration::from_millis(ack.return_within_millis.into()));
    let incarnation = kibo_crds::Incarnation(ack.incarnation);
    node.pools.live(Some(incarnation));
    tracing::info!(
        session = ack.session_id,
        %incarnation,
        term = first.term,
        desired = ack.desired.len(),
        "the session is open"
    );
    Handler::begin(Arc::clone(node), incarnation, outbox, way, ack)
}

/// How often the operator wants to hear that this node lives.
fn heartbeat(first: &v1::ToNode) -> Duration {
    match &first.message {
        Some(v1::to_node::Message::HelloAck(ack)) if ack.heartbeat_millis > 0 => {
            Duration::from_millis(ack.heartbeat_millis.into()).max(SHORTEST_HEARTBEAT)
        }
        _ => HEARTBEAT,
    }
}

pub fn refusal(refused: &v1::SessionRefused) -> End {
    End::Refused { reason: refused.reason(), message: refused.message.clone() }
}

/// What a session does by the clock.
#[derive(Clone, Copy)]
struct Pace {
    heartbeat: Duration,
    /// It ends when this node may begin a new life.
    may_renew: bool,
}

async fn serve<I: InstanceControl>(
    node: &Arc<Node<I>>,
    handler: &mut Handler<I>,
    inbound: &mut Streaming<v1::ToNode>,
    outbox: &Outbox,
    pace: Pace,
) -> End {
    let mut events = EventSender::default();
    let mut changes = node.spool.changes();
    let mut reporter = Reporter::default();
    let mut turns = node.host.turns();
    let mut look = interval(LOOK_EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut beat = interval(pace.heartbeat);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    handler.start_desired().await;
    changes.mark_changed();
    loop {
        tokio::select! {
            message = next(inbound) => {
                let ended = match message {
                    Ok(message) => handler.handle(message).await,
                    Err(end) => Err(end),
                };
                if let Err(end) = ended {
                    return end;
                }
            }
            // The sender lives as long as the spool.
            _ = changes.changed() => {
                changes.mark_unchanged();
                events.pump(&node.spool, outbox);
            }
            _ = look.tick() => {
                if let Some(why) = node.may_begin_anew().filter(|_| pace.may_renew && node.may_renew()) {
                    node.renew();
                    return End::Lost(why);
                }
                if let Some(report) = reporter.due(report::report(node), Instant::now()) {
                    outbox.send(Message::Report(report));
                }
            }
            // It opens or closes the node for new Workspaces. The sender lives as long as the node.
            _ = turns.changed() => outbox.send(Message::Report(reporter.now(report::report(node), Instant::now()))),
            // In this loop and nowhere else: it says that what the operator sends is acted upon.
            _ = beat.tick() => outbox.send(Message::Heartbeat(v1::Heartbeat {})),
            () = outbox.broken() => return End::Lost("the operator does not read what this node sends".into()),
        }
    }
}
