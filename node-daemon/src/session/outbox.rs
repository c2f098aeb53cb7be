//! What goes to the operator.

use std::collections::BTreeMap;

use kibo_crds::InstanceId;
use kibo_protocol::v1::{self, from_node::Message};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::spool::EventSpool;

/// Messages that wait for the connection. More than this means that the operator does not read.
pub const CAPACITY: usize = 1024;
/// Events on their way that are not acknowledged.
const EVENTS_IN_FLIGHT: usize = 256;
/// Events in one message.
const BATCH: usize = 64;

/// The sending half of a session. Never waits: an operator that does not read loses the session.
#[derive(Clone)]
pub struct Outbox {
    sender: mpsc::Sender<v1::FromNode>,
    broken: CancellationToken,
}

impl Outbox {
    pub fn new() -> (Self, mpsc::Receiver<v1::FromNode>) {
        let (sender, receiver) = mpsc::channel(CAPACITY);
        (Self { sender, broken: CancellationToken::new() }, receiver)
    }

    pub fn send(&self, message: Message) {
        if self.sender.try_send(v1::FromNode { message: Some(message) }).is_err() {
            self.broken.cancel();
        }
    }

    /// Ends when a message could not be sent.
    pub async fn broken(&self) {
        self.broken.cancelled().await;
    }
}

/// Which events this session has sent: each once, in the order of its Instance.
#[derive(Debug, Default)]
pub struct EventSender {
    sent: BTreeMap<InstanceId, u64>,
}

impl EventSender {
    /// The next events to send, given all that are not acknowledged.
    pub fn next(&mut self, unacked: Vec<v1::InstanceEvent>) -> Vec<v1::InstanceEvent> {
        let mut in_flight = 0;
        let mut fresh = Vec::new();
        for event in unacked {
            let Ok(instance) = event.instance_id.parse::<InstanceId>() else { continue };
            let sent = self.sent.get(&instance).copied().unwrap_or(0);
            if event.seq <= sent {
                in_flight += 1;
            } else {
                fresh.push((instance, event));
            }
        }
        fresh.truncate(EVENTS_IN_FLIGHT.saturating_sub(in_flight));
        for (instance, event) in &fresh {
            self.sent.insert(*instance, event.seq);
        }
        fresh.into_iter().map(|(_, event)| event).collect()
    }

    /// Sends what may be sent now.
    pub fn pump(&mut self, spool: &EventSpool, outbox: &Outbox) {
        for events in self.next(spool.unacked()).chunks(BATCH) {
            outbox.send(Message::Events(v1::Events { events: events.to_vec() }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(instance: InstanceId, seq: u64) -> v1::InstanceEvent {
        v1::InstanceEvent { instance_id: instance.to_string(), seq, ..Default::default() }
    }

    #[test]
    fn each_event_is_sent_once_in_order_and_within_the_window() {
        let instance = InstanceId::generate();
        let mut sender = EventSender::default();
        let unacked: Vec<_> = (1..=300).map(|seq| event(instance, seq)).collect();
        let first = sender.next(unacked.clone());
        assert_eq!(first.iter().map(|event| event.seq).collect::<Vec<_>>(), (1..=256).collect::<Vec<_>>());
        assert!(sender.next(unacked.clone()).is_empty());
        // 100 are acknowledged: the rest may go.
        let rest = sender.next(unacked[100..].to_vec());
        assert_eq!(rest.iter().map(|event| event.seq).collect::<Vec<_>>(), (257..=300).collect::<Vec<_>>());
    }

    #[test]
    fn a_full_outbox_breaks_the_session_instead_of_waiting() {
        let (outbox, _receiver) = Outbox::new();
        for _ in 0..=CAPACITY {
            outbox.send(Message::Report(v1::Report::default()));
        }
        assert!(outbox.broken.is_cancelled());
    }
}
