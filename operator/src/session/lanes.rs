//! Events of one Instance one after the other, those of different Instances side by side.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt as _, stream::FuturesUnordered};
use kibo_crds::InstanceId;
use kibo_protocol::v1::{self, InstanceEvent, to_node};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::{hooks::EventIngest, live::Session, registry::Registry};

/// Events of one session that are kept or in work; beyond it the node's stream is not read.
const KEPT: usize = 4096;
/// Instances of one session whose events are taken in side by side.
const SIDE_BY_SIDE: usize = 64;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Takes events in until the session is over. An event is acked after its effect was committed; what was
/// not acked comes again with the node's next session.
pub async fn run(
    session: Arc<Session>,
    registry: Registry,
    ingest: Arc<dyn EventIngest>,
    tasks: TaskTracker,
    mut events: mpsc::Receiver<InstanceEvent>,
) {
    // An entry stands for one event in work; what waits behind it is its queue.
    let mut lanes: HashMap<String, VecDeque<InstanceEvent>> = HashMap::new();
    let mut working = FuturesUnordered::new();
    let mut queued = 0;
    // A task of its own: a session that ends does not cut a commit in two.
    let start = |event| {
        let handle = tasks.spawn(take_in(session.clone(), registry.clone(), ingest.clone(), event));
        async move { handle.await.ok() }
    };
    loop {
        tokio::select! {
            () = session.over.cancelled() => return,
            event = events.recv(), if queued < KEPT && working.len() < SIDE_BY_SIDE => {
                let Some(event) = event else { return };
                if event.instance_id.parse::<InstanceId>().is_err() {
                    tracing::warn!(node = %session.node, "an event of something that is no Instance is dropped");
                } else if let Some(queue) = lanes.get_mut(&event.instance_id) {
                    queue.push_back(event);
                    queued += 1;
                } else {
                    lanes.insert(event.instance_id.clone(), VecDeque::new());
                    working.push(start(event));
                }
            }
            Some(done) = working.next(), if !working.is_empty() => {
                let Some(instance) = done else {
                    tracing::error!(node = %session.node, "taking an event in panicked: the session ends, and the event comes again");
                    session.over.cancel();
                    return;
                };
                match lanes.get_mut(&instance).and_then(VecDeque::pop_front) {
                    Some(event) => {
                        queued -= 1;
                        working.push(start(event));
                    }
                    None => {
                        lanes.remove(&instance);
                    }
                }
            }
        }
    }
}

/// One event until it is committed or the session is over. Gives back the Instance's id.
async fn take_in(
    session: Arc<Session>,
    registry: Registry,
    ingest: Arc<dyn EventIngest>,
    event: InstanceEvent,
) -> String {
    let instance = event.instance_id.clone();
    // In this order: whoever finds the session over and nothing in work knows that nothing will be.
    let _in_work = registry.take_in(&session.node);
    if session.over.is_cancelled() {
        return instance;
    }
    let seq = event.seq;
    let mut pause = FIRST_PAUSE;
    while let Err(retry) = ingest.ingest(&session.node, session.incarnation, event.clone()).await {
        tracing::warn!(node = %session.node, instance, seq, %retry, "failed to take an event in, trying again");
        metrics::counter!("kibotos_event_retries_total").increment(1);
        tokio::select! {
            () = session.over.cancelled() => return instance,
            () = tokio::time::sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
        }
    }
    metrics::counter!("kibotos_events_total").increment(1);
    session.send(to_node::Message::EventAck(v1::EventAck { instance_id: instance.clone(), seq }));
    instance
}
