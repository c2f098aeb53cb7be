//! Keeps the status of each Node, and tells its live session what the spec asks for.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use futures::{StreamExt as _, stream};
use kibo_crds::{
    ConditionType, Node, NodeId, OvercommitPolicy,
    node::{Admission, NodePhase, NodeStatus},
};
use kibo_protocol::v1::SessionRefusal;
use kube::{
    Api, Resource as _,
    api::ListParams,
    runtime::{
        Controller,
        controller::{self, Action, Config},
        events::{Event, EventType},
        reflector::ObjectRef,
        watcher,
    },
};
use tokio::sync::{broadcast, mpsc};

use super::{
    Facts, isolation,
    settings::effective,
    status::{Observed, compute, is_worth_a_write},
};
use crate::{
    clock::now,
    context::Ctx,
    guarded::{self, WriteError},
    session::{Confirmation, DeclaredPool, Pace, hooks::Usage, revision_of, spares_unknown},
    storage_pool::{self, Marker},
    watch::WatchBackoff,
    watchdog::Reach,
};

/// Every Node is looked at this often, also when nothing happened: conditions that go by time end then.
const PERIOD: Duration = Duration::from_secs(60);
/// What a node says at once in a new session is written together, if it comes within this time.
const FIRST_WORDS: Duration = Duration::from_secs(3);
/// So long a watch is waited for that has not shown yet what was written last; after it, what it shows counts.
const WATCH_LAG: Duration = Duration::from_secs(5);
/// A Node's status follows a busy allocation at this pace.
const PACE: Duration = Duration::from_secs(1);
/// And in a large fleet more slowly, so that a burst of starts is not slowed down by the words about it: all of them
/// together write so often.
const PACE_OF_ALL: Duration = Duration::from_millis(100);
/// However a host changes its word: so many writes at once, and then one each second.
const WRITES_AT_ONCE: u32 = 20;
const CONCURRENCY: u16 = 16;

/// What the controller and the session server share to write a Node's status.
pub struct NodeControl {
    pub ctx: Ctx,
    pub usage: Arc<dyn Usage>,
    pub(super) isolating: isolation::Running,
    pub(super) sightings: isolation::Sightings,
    /// Nodes as the watch shows them, for the room of the pools.
    pools: mpsc::UnboundedSender<Arc<Node>>,
    written: Mutex<HashMap<NodeId, Written>>,
}

/// The writes of one Node's status.
struct Written {
    last: Instant,
    /// The resourceVersion that the last one made.
    revision: Option<String>,
    /// The settings of which it says whether the node uses them. To say so answers a person and not the host.
    settings: Option<Confirmation>,
    /// Of those that follow from what the host says. What the operator writes for reasons of its own (a session, an
    /// isolation) does not count, or a node with a busy day would not say for minutes how it stands.
    word: Pace,
}

impl Written {
    fn new(now: Instant) -> Self {
        Self { last: now, revision: None, settings: None, word: Pace::new(PACE, WRITES_AT_ONCE, now) }
    }
}

impl NodeControl {
    /// Every Node that is looked at goes to `pools` too.
    pub fn new(ctx: Ctx, usage: Arc<dyn Usage>, pools: mpsc::UnboundedSender<Arc<Node>>) -> Self {
        Self {
            ctx,
            usage,
            isolating: isolation::Running::default(),
            sightings: isolation::Sightings::default(),
            pools,
            written: Mutex::default(),
        }
    }

    pub fn api(&self) -> Api<Node> {
        Api::all(self.ctx.client.clone())
    }

    /// Everything that the status of `node` follows from, now.
    pub fn observe<'a>(&self, id: &NodeId, node: &'a Node) -> Observed<'a> {
        // In this order: see `is_opening`.
        let opening = self.ctx.registry.is_opening(id);
        let live = self.ctx.registry.get(id).map(|session| session.view());
        let reach = self.ctx.watchdog.reach(id);
        let refused = self.ctx.registry.refusal(id);
        let is_new = |pool: &&DeclaredPool| {
            pool.default && pool.available && self.ctx.pools.marker(&pool.id, &pool.uid) == Marker::Unregistered
        };
        let unregistered = live.iter().flat_map(|live| &live.pools).find(is_new).map(|pool| pool.id.clone());
        // A host that says Hello and is refused has no session.
        let is_refused = refused.as_ref().is_some_and(|refused| !refused.duplicate);
        Observed {
            node,
            // Whose registration has ended is not waited for.
            orphaned: live.is_none()
                && !opening
                && (reach != Reach::Reachable || is_refused || banished(node).is_some()),
            live,
            reach,
            periods: self.ctx.watchdog.periods(),
            refused,
            wanted: effective(&node.spec, &self.ctx.overcommit.get()),
            usage: self.usage.of_node(id),
            unregistered,
            now: now(),
        }
    }

    /// Time left for the first words of a new session.
    fn first_words(&self, id: &NodeId) -> Option<Duration> {
        let session = self.ctx.registry.get(id)?;
        FIRST_WORDS.checked_sub(session.opened_at.elapsed()).filter(|_| !session.has_said_all())
    }

    /// Time left until the next write that follows usage alone.
    fn paced(&self, id: &NodeId) -> Option<Duration> {
        let pace = pace(self.ctx.nodes.fleet());
        let written = self.written.lock().expect("no holder of this lock panics");
        written.get(id).and_then(|written| pace.checked_sub(written.last.elapsed()))
    }

    /// Time left until the next write of any kind.
    fn held_back(&self, id: &NodeId) -> Option<Duration> {
        let written = self.written.lock().expect("no holder of this lock panics");
        written.get(id).map(|written| written.word.wait(Instant::now())).filter(|wait| !wait.is_zero())
    }

    /// How the settings of the live session stand, if that is not written yet.
    fn unsaid_settings(&self, id: &NodeId) -> Option<Confirmation> {
        let confirmation = self.ctx.registry.get(id)?.confirmation();
        let written = self.written.lock().expect("no holder of this lock panics");
        (written.get(id).and_then(|written| written.settings) != Some(confirmation)).then_some(confirmation)
    }

    /// Time left for the watch to show what was written last, when `node` is older: what is decided on it would be refused
    /// as a conflict, and many nodes that come back together would pay for each decision twice.
    fn outdated(&self, id: &NodeId, node: &Node) -> Option<Duration> {
        let written = self.written.lock().expect("no holder of this lock panics");
        let last = written.get(id)?;
        let (seen, made) = (node.metadata.resource_version.as_deref(), last.revision.as_deref());
        let is_older = revision_of(seen)? < revision_of(made)?;
        WATCH_LAG.checked_sub(last.last.elapsed()).filter(|_| is_older)
    }

    fn with_written<T>(&self, id: &NodeId, note: impl FnOnce(&mut Written, Instant) -> T) -> T {
        let now = Instant::now();
        let mut all = self.written.lock().expect("no holder of this lock panics");
        note(all.entry(id.clone()).or_insert_with(|| Written::new(now)), now)
    }

    /// Whether it is new: what was decided on an older object than the stored one may be what was written already.
    fn note_write(&self, id: &NodeId, node: &Node) -> bool {
        self.with_written(id, |written, now| {
            written.last = now;
            let before = std::mem::replace(&mut written.revision, node.metadata.resource_version.clone());
            before != written.revision
        })
    }

    /// Writes the status that was decided on for `node`, and says what is new.
    pub async fn write(&self, id: &NodeId, node: &Node, status: NodeStatus) -> Result<Node, WriteError> {
        let written = guarded::replace_status(&self.api(), node, status, self.ctx.term).await;
        let written = written.inspect_err(|error| self.ctx.end_if_overtaken(error))?;
        self.ctx.nodes.observe(&written);
        metrics::counter!("kibotos_status_writes_total", "kind" => "Node").increment(1);
        if self.note_write(id, &written) {
            announce(id, node, &written, &self.ctx).await;
        }
        Ok(written)
    }
}

/// Between two writes of one Node that follow usage alone. A report is written down as often as a Node is looked at.
fn pace(fleet: usize) -> Duration {
    PACE_OF_ALL.saturating_mul(u32::try_from(fleet).unwrap_or(u32::MAX)).clamp(PACE, PERIOD)
}

/// Takes in the facts of all Nodes, by one quorum read, before anything is decided on them.
pub async fn load(ctx: &Ctx) -> Result<(), kube::Error> {
    let api = Api::<Node>::all(ctx.client.clone());
    let mut params = ListParams::default().limit(500);
    loop {
        let page = api.list(&params).await?;
        for node in &page.items {
            ctx.nodes.observe(node);
            expect(ctx, node);
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(()),
        }
    }
}

/// A node that has lived has a full period from now on to say something.
fn expect(ctx: &Ctx, node: &Node) {
    let session = node.status.as_ref().and_then(|status| status.session.as_ref());
    if let (Some(id), Some(session)) = (node.metadata.name.as_deref().and_then(|name| name.parse().ok()), session) {
        ctx.watchdog.expect(&id, session.alive);
    }
}

/// Runs until the leadership ends.
pub async fn run(controller: Controller<Node>, control: Arc<NodeControl>) {
    let ctx = control.ctx.clone();
    let nodes = controller.store();
    let ahead = isolation::look_ahead(control.clone(), nodes.clone());
    ctx.tasks.spawn(ctx.stop.clone().run_until_cancelled_owned(ahead));
    let overcommit = ctx.overcommit.clone();
    let all_nodes = move |policy: OvercommitPolicy| {
        let changed = overcommit.observe(&policy);
        let nodes = if changed { nodes.state() } else { Vec::new() };
        nodes.into_iter().map(|node| ObjectRef::from_obj(&*node)).collect::<Vec<_>>()
    };
    controller
        .trigger_backoff(WatchBackoff::default())
        .with_config(Config::default().concurrency(CONCURRENCY))
        .watches(Api::<OvercommitPolicy>::all(ctx.client.clone()), watcher::Config::default(), all_nodes)
        .reconcile_on(touched(ctx.nodes.touched()))
        .graceful_shutdown_on(ctx.stop.clone().cancelled_owned())
        .run(reconcile, retry, control)
        .for_each(async |outcome| log_watch_error(outcome.err()))
        .await;
}

/// What a reconcile returned went through `retry`; a watch that fails is said here.
pub fn log_watch_error<E: std::error::Error>(error: Option<controller::Error<E, watcher::Error>>) {
    if let Some(controller::Error::QueueError(error)) = error {
        tracing::warn!(%error, "a watch failed, trying again");
    }
}

fn touched(receiver: broadcast::Receiver<NodeId>) -> impl stream::Stream<Item = ObjectRef<Node>> {
    stream::unfold(receiver, async |mut receiver| {
        loop {
            match receiver.recv().await {
                Ok(node) => return Some((ObjectRef::new(node.as_str()), receiver)),
                // What was missed is caught up with at the next period.
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    })
}

#[expect(clippy::needless_pass_by_value, reason = "the controller calls it so")]
fn retry(node: Arc<Node>, error: &WriteError, _: Arc<NodeControl>) -> Action {
    match error {
        WriteError::Conflict { .. } => Action::requeue(Duration::from_millis(50)),
        WriteError::Gone { .. } | WriteError::StaleTerm { .. } => Action::await_change(),
        WriteError::Refused { .. } | WriteError::Unknown { .. } => {
            tracing::error!(node = node.metadata.name.as_deref(), %error, "failed to write the status of a node");
            Action::requeue(Duration::from_secs(5))
        }
    }
}

#[tracing::instrument(
    name = "reconcile",
    skip_all,
    fields(kind = "Node", name = node.metadata.name.as_deref(), revision = node.metadata.resource_version.as_deref())
)]
async fn reconcile(node: Arc<Node>, control: Arc<NodeControl>) -> Result<Action, WriteError> {
    metrics::counter!("kibotos_reconciles_total", "kind" => "Node").increment(1);
    // The API server refuses a name that is no node id.
    let Some(id) = node.metadata.name.as_deref().and_then(|name| name.parse::<NodeId>().ok()) else {
        return Ok(Action::await_change());
    };
    control.ctx.nodes.observe(&node);
    if let Some(left) = control.outdated(&id, &node) {
        return Ok(Action::requeue(left));
    }
    // Nobody listening is fine.
    let _ = control.pools.send(node.clone());
    if node.status.as_ref().is_some_and(NodeStatus::has_live_session) {
        expect(&control.ctx, &node);
    }
    let observed = control.observe(&id, &node);
    if !observed.wanted.drain && is_drained(&node) {
        // Before anything can be placed there again: a retirement believes the condition.
        control.write(&id, &node, compute(&observed)).await?;
        return Ok(Action::requeue(Duration::ZERO));
    }
    steer(&id, &node, &control).await;
    isolation::ensure(&control, &id, &node);
    let declared = node.status.iter().flat_map(|status| &status.pools).map(|pool| &pool.id);
    let registered = storage_pool::ensure(&control.ctx, declared).await;
    let again = match &registered {
        Ok(()) => PERIOD,
        Err(error) => {
            tracing::warn!(%error, "failed to register a storage pool, trying again");
            Duration::from_secs(1)
        }
    };
    // Before what it is written with: it may be confirmed in between.
    let answer = control.unsaid_settings(&id);
    let observed = control.observe(&id, &node);
    if observed.wanted.drain {
        control.usage.give_back(&id);
    }
    let status = compute(&observed);
    if !is_worth_a_write(node.status.as_ref(), &status) {
        return Ok(Action::requeue(again));
    }
    if let Some(left) = control.first_words(&id) {
        return Ok(Action::requeue(left));
    }
    if answer.is_none()
        && let Some(left) = control.held_back(&id)
    {
        return Ok(Action::requeue(left));
    }
    if is_usage_alone(node.status.as_ref(), &status)
        && let Some(left) = control.paced(&id)
    {
        return Ok(Action::requeue(left));
    }
    let points = failpoints(node.status.as_ref(), &status);
    if let Some((before, _)) = points {
        kibo_failpoint::reach(before).await;
    }
    control.write(&id, &node, status).await?;
    control.with_written(&id, |written, now| match answer {
        Some(confirmation) => written.settings = Some(confirmation),
        None => written.word.count(now),
    });
    if let Some((_, after)) = points {
        kibo_failpoint::reach(after).await;
    }
    Ok(Action::requeue(again))
}

/// As it is stored; of a retired node it stays true.
fn is_drained(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| &status.conditions);
    let drained = ConditionType::Drained.to_string();
    node.spec.retirement.is_none() && conditions.into_iter().any(|it| it.type_ == drained && it.status == "True")
}

/// The points before and after a write that ends an operation.
fn failpoints(old: Option<&NodeStatus>, new: &NodeStatus) -> Option<(&'static str, &'static str)> {
    let became = |is: fn(&NodeStatus) -> bool| is(new) && !old.is_some_and(is);
    if became(|status| status.phase == Some(NodePhase::Drained)) {
        Some(("before-drained", "drained-stored"))
    } else if became(|status| matches!(status.admission, Some(Admission::Retired | Admission::Revoked))) {
        Some(("before-end-of-registration", "end-of-registration-stored"))
    } else {
        None
    }
}

/// Brings what the spec asks for to the live session.
async fn steer(id: &NodeId, node: &Node, control: &NodeControl) {
    let Some(session) = control.ctx.registry.get(id) else { return };
    if let Some((reason, message)) = banished(node) {
        kibo_failpoint::reach("before-banishment").await;
        control.ctx.registry.remove(&session);
        session.end(reason, message);
        return;
    }
    // A Node as it was before this session says nothing of the adoption that the session began with.
    let stored = node.status.as_ref().and_then(|status| status.session.as_ref());
    let is_of_this_session = stored.is_some_and(|stored| stored.id == session.id);
    if is_of_this_session && session.spares_unknown && !spares_unknown(node) {
        // The next session looks at its Instances anew.
        control.ctx.registry.remove(&session);
        session
            .end(SessionRefusal::NotLeader, "an admin ordered that unknown Instances are destroyed: come back at once");
        return;
    }
    if session.relabel(node.metadata.labels.as_ref()) {
        control.ctx.registry.notify();
    }
    let wanted = effective(&node.spec, &control.ctx.overcommit.get());
    let revision = revision_of(node.metadata.resource_version.as_deref()).unwrap_or_default();
    if session.push_settings(wanted, revision) {
        tracing::info!(node = %id, drain = wanted.drain, cpu = %wanted.cpu, memory = %wanted.memory, "settings sent");
        control.ctx.registry.notify();
        kibo_failpoint::reach("settings-sent").await;
    }
}

/// Whether the registration has ended, and what the host is told then.
pub fn banished(node: &Node) -> Option<(SessionRefusal, &'static str)> {
    if Facts::of(node).retired {
        return Some((SessionRefusal::Retired, "this node is retired for ever: use a new node id for this host"));
    }
    let is_revoked = node.status.as_ref().and_then(|status| status.admission) == Some(Admission::Revoked);
    (is_revoked || node.spec.revocation.is_some())
        .then_some((SessionRefusal::Revoked, "the enrollment of this node was revoked: an admin may issue a new one"))
}

/// Whether nothing but the allocation differs, and what the node says of it.
fn is_usage_alone(old: Option<&NodeStatus>, new: &NodeStatus) -> bool {
    old.is_some_and(|old| {
        let mut same = new.clone();
        same.allocated.clone_from(&old.allocated);
        if let (Some(report), Some(old)) = (&mut same.report, &old.report) {
            (report.instances, report.held_objects) = (old.instances, old.held_objects);
        }
        !is_worth_a_write(Some(old), &same)
    })
}

/// One line for each change of phase, and an event where somebody should look.
async fn announce(id: &NodeId, old: &Node, new: &Node, ctx: &Ctx) {
    let phase = |node: &Node| node.status.as_ref().and_then(|status| status.phase);
    let (before, now) = (phase(old), phase(new));
    if before != now {
        tracing::info!(node = %id, ?before, ?now, "the node's phase changed");
    }
    for (reason, note) in news(old, new) {
        let event = Event {
            type_: EventType::Warning,
            reason,
            note: Some(note),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        if let Err(error) = ctx.recorder.publish(&event, &new.object_ref(&())).await {
            tracing::warn!(node = %id, %error, "failed to record an event");
        }
    }
}

/// What a person should know that was not so before: reason and text of the condition.
fn news(old: &Node, new: &Node) -> Vec<(String, String)> {
    let found = |node: &Node, kind: ConditionType, status: &str| {
        let conditions = node.status.iter().flat_map(|s| &s.conditions);
        conditions.into_iter().find(|c| c.type_ == kind.to_string() && c.status == status).cloned()
    };
    let became = |kind: ConditionType, from: &str, to: &str| {
        found(old, kind, from)?;
        found(new, kind, to).map(|condition| (condition.reason, condition.message))
    };
    let duplicate = found(old, ConditionType::DuplicateHost, "True").is_none();
    let duplicate = duplicate.then(|| found(new, ConditionType::DuplicateHost, "True")).flatten();
    let lost = became(ConditionType::Ready, "True", "False");
    let quarantined = found(old, ConditionType::Quarantined, "True").is_none();
    let quarantined = quarantined.then(|| found(new, ConditionType::Quarantined, "True")).flatten();
    let quarantined = quarantined.map(|condition| (condition.reason, condition.message));
    lost.into_iter()
        .chain(quarantined)
        .chain(duplicate.map(|condition| (condition.reason, condition.message)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_fleet_writes_of_each_node_less_often() {
        let seconds = |fleet| pace(fleet).as_secs();
        assert_eq!([0, 1, 50, 500, 600, 100_000].map(seconds), [1, 1, 5, 50, 60, 60]);
    }
}
