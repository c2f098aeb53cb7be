//! The watchdog: which nodes were heard of lately, by the clock of this process and never by an open connection.
//!
//! A node that says nothing for a while is Unreachable, then Offline. That is said and nothing more: what runs there
//! goes on, and no right is taken from it by a timer. A session whose node fell silent ends, so that an isolation
//! can be declared and nothing is placed there, also when its connection hangs open.
//!
//! A new leader gives every node a full period first, and so does one that notices that it stood still itself.

mod decide;

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use kibo_crds::NodeId;
use tokio::sync::broadcast;

use crate::context::Ctx;
use decide::Ledger;
pub use decide::{Periods, Reach};

/// The leader's watchdog; cheap to clone.
#[derive(Clone)]
pub struct Watchdog {
    ledger: Arc<Mutex<Ledger>>,
    told: broadcast::Sender<NodeId>,
}

impl Watchdog {
    pub fn new(periods: Periods) -> Self {
        let ledger = Ledger::new(periods, Instant::now());
        Self { ledger: Arc::new(Mutex::new(ledger)), told: broadcast::channel(4096).0 }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().expect("no holder of this lock panics")
    }

    pub fn periods(&self) -> Periods {
        self.ledger().periods()
    }

    /// A node that has lived before this leadership; `was_here`: its session was alive when it began.
    pub fn expect(&self, node: &NodeId, was_here: bool) {
        self.ledger().expect(node.clone(), was_here);
    }

    /// The node said something in its current session.
    pub fn heard(&self, node: &NodeId) {
        if self.ledger().heard(node, Instant::now()) {
            tracing::info!(%node, "the node is heard of again");
        }
    }

    pub fn reach(&self, node: &NodeId) -> Reach {
        self.ledger().reach(node)
    }

    /// Whether the node is Offline and its Workspaces are to say so.
    pub fn is_told(&self, node: &NodeId) -> bool {
        self.ledger().is_told(node)
    }

    /// Nodes whose Workspaces are to say from now on that they are offline.
    pub fn told(&self) -> broadcast::Receiver<NodeId> {
        self.told.subscribe()
    }
}

/// Looks until the leadership ends.
pub async fn run(ctx: Ctx) {
    let watchdog = &ctx.watchdog;
    let periods = watchdog.periods();
    let mut tick = tokio::time::interval(periods.look());
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut last, mut held_back) = (Instant::now(), 0);
    // What waited to be said before this leadership began is said now.
    watchdog.ledger().excuse(last);
    loop {
        tick.tick().await;
        let now = Instant::now();
        if periods.is_stall(now - last) {
            tracing::warn!(
                seconds = (now - last).as_secs_f32(),
                "this process stood still: no silence of a node counts from before"
            );
            watchdog.ledger().excuse(now);
        }
        last = now;
        let found = watchdog.ledger().look(now, |node| ctx.nodes.facts(node).is_awaited());
        for (node, reach) in found.fell {
            fell(&ctx, &node, reach);
        }
        for node in found.told {
            // Nobody listening is fine.
            let _ = watchdog.told.send(node);
        }
        if found.held_back > held_back {
            tracing::warn!(
                nodes = found.held_back,
                "a large part of the fleet vanished together: the Workspaces there do not say so, look at the network of the operator first"
            );
        }
        held_back = found.held_back;
    }
}

fn fell(ctx: &Ctx, node: &NodeId, reach: Reach) {
    if reach == Reach::Offline {
        metrics::counter!("kibotos_nodes_offline_total").increment(1);
    }
    // In the order of every end: out of the registry, closed, and then what is stored.
    if let Some(session) = ctx.registry.get(node)
        && ctx.registry.remove(&session)
    {
        tracing::warn!(%node, session = session.id, "nothing was heard of the node, though its connection is open: the session ends");
        session.close();
    }
    tracing::warn!(%node, ?reach, "the node is silent");
    ctx.nodes.touch(node);
}
