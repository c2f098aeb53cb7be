//! One live session: what the node said last, and the way to it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{
    Bytes, Incarnation, MilliCpu, NodeId, PoolId, Ratio, Term,
    node::{NodeClock, NodeSession},
    overcommit_policy::MemoryTightThresholds,
};
use kibo_protocol::v1::{self, to_node};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use super::{
    clock::{Clock, Moment},
    questions::Questions,
};
use crate::{
    clock::now,
    leader::History,
    node::{self, InstanceUsage, Live, Reported},
};

/// Messages that may wait for a node that does not read; one more ends the session.
const OUTBOUND_QUEUE: usize = 1024;

/// Between two looks at a session that awaits something.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// As many as a Node may have; a host that says more means no limit.
const MOST_SLOTS: u32 = 100_000;

/// What could not be measured is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    pub cpu: Option<MilliCpu>,
    pub memory: Option<Bytes>,
    pub max_instances: Option<u32>,
}

impl From<&v1::Capacity> for Capacity {
    fn from(capacity: &v1::Capacity) -> Self {
        Self {
            cpu: capacity.cpu_milli.map(MilliCpu),
            memory: capacity.memory_bytes.map(Bytes),
            max_instances: capacity.max_instances.map(|max| max.min(MOST_SLOTS)),
        }
    }
}

/// A pool as its node declared it, with a checked name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredPool {
    pub id: PoolId,
    pub uid: String,
    pub default: bool,
    pub available: bool,
    pub capacity: Option<Bytes>,
    pub free: Option<Bytes>,
    /// On the file system, by whatever is there.
    pub used: Option<Bytes>,
    /// Guests there that wait for space.
    pub waiting_guests: u32,
}

/// What the node's admission is to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub drain: bool,
    /// Absent: the node's own.
    pub slots: Option<u32>,
    pub cpu: Ratio,
    pub memory: Ratio,
    pub memory_tight: MemoryTightThresholds,
}

/// As a cluster has them to which nobody said anything.
impl Default for Settings {
    fn default() -> Self {
        let memory_tight = MemoryTightThresholds::default();
        Self { drain: false, slots: None, cpu: Ratio::ONE, memory: Ratio::ONE, memory_tight }
    }
}

/// What a report changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportNews {
    Nothing,
    /// What the node can take.
    Room,
    /// Which pools it reaches.
    Reach,
}

/// Settings on their way to the node.
#[derive(Clone, Copy, Debug)]
pub struct SentSettings {
    pub settings: Settings,
    pub revision: u64,
    pub sent_at: Instant,
    pub confirmed: bool,
}

/// How settings stand that were sent to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirmation {
    pub revision: u64,
    pub confirmed: bool,
}

/// The node's newest report.
#[derive(Clone, Debug)]
pub struct LastReport {
    pub report: v1::Report,
    pub time: Time,
    /// The settings in force were confirmed before this report was made.
    pub after_confirmation: bool,
}

impl LastReport {
    /// The node takes no new Workspace, since its host is short of memory.
    pub fn is_memory_tight(&self) -> bool {
        self.report.host.as_ref().is_some_and(|host| host.memory_tight == Some(true))
    }
}

/// What changes during a session.
#[derive(Debug)]
pub struct State {
    /// What a node selector sees.
    pub labels: BTreeMap<String, String>,
    pub pools: Vec<DeclaredPool>,
    pub settings: SentSettings,
    pub report: Option<LastReport>,
    /// The HelloAck with the desired set has gone out: the node may be a candidate.
    pub acknowledged: bool,
    pub last_assigned: Option<Instant>,
    /// How far the node's clock is off.
    pub clock: Clock,
    /// The node did something since the renewal of the Lease with this time: it is to remember a later one, which
    /// no backup contains that was made before.
    pub owed: Option<u64>,
}

/// A new measurement of the node's clock.
#[derive(Clone, Debug)]
pub struct ClockNews {
    pub clock: NodeClock,
    /// It opens or closes placement.
    pub moves: bool,
}

/// Why the operator ends a session; the node is told.
#[derive(Clone, Debug)]
pub struct Ending {
    pub reason: v1::SessionRefusal,
    pub message: String,
}

/// How an offer was answered.
#[derive(Debug)]
pub enum OfferAnswer {
    Accepted,
    Refused { reason: v1::RefuseReason, message: String },
}

/// A session in the registry.
#[derive(Debug)]
pub struct Session {
    pub id: String,
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub boot_id: String,
    pub home: String,
    pub version: String,
    pub source_revision: String,
    pub started_at: Time,
    pub opened_at: Instant,
    pub term: Term,
    pub capacity: Capacity,
    /// After an adoption: that a Workspace does not exist is no proof that its Instance belongs to nobody.
    pub spares_unknown: bool,
    history: Arc<History>,
    /// The host's own; those that people gave the Node stand above them, in the state.
    host_labels: BTreeMap<String, String>,
    /// Cancelled when the session is over, for whatever reason.
    pub over: CancellationToken,
    /// The next look at it may be due sooner than it was.
    stirred: Notify,
    outbound: mpsc::Sender<v1::ToNode>,
    state: Mutex<State>,
    ending: Mutex<Option<Ending>>,
    pub offers: Questions<OfferAnswer>,
    pub commands: Questions<v1::ObjectResult>,
    pub looks: Questions<v1::FenceSeen>,
    pub listings: Questions<v1::PoolListing>,
}

/// Everything that a session is made from.
pub struct NewSession {
    pub id: String,
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub boot_id: String,
    pub home: String,
    pub version: String,
    pub source_revision: String,
    pub term: Term,
    pub capacity: Capacity,
    pub labels: BTreeMap<String, String>,
    pub pools: Vec<DeclaredPool>,
    pub settings: Settings,
    pub settings_revision: u64,
    pub spares_unknown: bool,
    pub history: Arc<History>,
    pub clock_period: Duration,
}

/// Whether it leaves something on the node that a backup from before does not know.
fn is_act(message: &to_node::Message) -> bool {
    use to_node::Message as M;
    matches!(
        message,
        M::Go(_)
            | M::Stop(_)
            | M::TearDown(_)
            | M::EventAck(_)
            | M::DeleteObject(_)
            | M::ConfirmNotTaken(_)
            | M::MoveObject(_)
            | M::DiscardCopy(_)
            | M::RemoveUnowned(_)
            | M::LostPools(_)
    )
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}

impl Session {
    /// The session, and the queue of what is to be sent to its node.
    pub fn new(new: NewSession) -> (Self, mpsc::Receiver<v1::ToNode>) {
        let (outbound, queue) = mpsc::channel(OUTBOUND_QUEUE);
        let now = Instant::now();
        let session = Self {
            id: new.id,
            node: new.node,
            incarnation: new.incarnation,
            boot_id: new.boot_id,
            home: new.home,
            version: new.version,
            source_revision: new.source_revision,
            started_at: crate::clock::now(),
            opened_at: now,
            term: new.term,
            capacity: new.capacity,
            spares_unknown: new.spares_unknown,
            history: new.history,
            host_labels: new.labels.clone(),
            over: CancellationToken::new(),
            stirred: Notify::new(),
            outbound,
            state: Mutex::new(State {
                labels: new.labels,
                pools: new.pools,
                settings: SentSettings {
                    settings: new.settings,
                    revision: new.settings_revision,
                    sent_at: now,
                    confirmed: false,
                },
                report: None,
                acknowledged: false,
                last_assigned: None,
                clock: Clock::new(new.clock_period, now),
                owed: None,
            }),
            ending: Mutex::default(),
            offers: Questions::default(),
            commands: Questions::default(),
            looks: Questions::default(),
            listings: Questions::default(),
        };
        (session, queue)
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Queues a message. A node that lets its queue fill up loses its session.
    pub fn send(&self, message: to_node::Message) -> bool {
        if self.over.is_cancelled() {
            return false;
        }
        if is_act(&message) {
            self.owe();
        }
        let message = v1::ToNode { term: self.term.0, message: Some(message) };
        match self.outbound.try_send(message) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                tracing::warn!(node = %self.node, session = %self.id, "the node does not read its messages: the session ends");
                self.over.cancel();
                false
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        }
    }

    /// The node is to remember a later moment than this one.
    fn owe(&self) {
        self.state().owed.get_or_insert(self.history.renewed());
        self.stirred.notify_one();
    }

    /// When it is to be looked at again, having been looked at then: often while something is awaited, or an idle fleet
    /// would cost as much as a busy one.
    pub fn next_look(&self, looked: Instant) -> Instant {
        let soon = looked + LOOK_EVERY;
        let state = self.state();
        let rests = state.settings.confirmed && state.owed.is_none();
        rests.then(|| state.clock.rests_until()).flatten().map_or(soon, |due| due.max(soon))
    }

    /// Until the next look may be due sooner than it was.
    pub async fn stirred(&self) {
        self.stirred.notified().await;
    }

    /// Tells the node a moment to remember, when it did something and the Lease was renewed since.
    pub fn settle_moment(&self) {
        let is_due = {
            let mut state = self.state();
            let is_due = state.owed.is_some_and(|since| self.history.renewed() > since);
            if is_due {
                state.owed = None;
            }
            is_due
        };
        if is_due {
            self.send(to_node::Message::Moment(self.history.now()));
        }
    }

    /// Now, for the HelloAck.
    pub fn moment(&self) -> v1::Moment {
        // The session itself was written after that renewal.
        self.owe();
        self.history.now()
    }

    /// Ends the session; the node hears why. Only the first reason counts.
    pub fn end(&self, reason: v1::SessionRefusal, message: impl Into<String>) {
        lock(&self.ending).get_or_insert_with(|| Ending { reason, message: message.into() });
        self.close();
    }

    /// Ends the session without a word: the connection is gone. Whoever waits for an answer learns it at once.
    pub fn close(&self) {
        self.over.cancel();
        self.offers.close();
        self.commands.close();
        self.looks.close();
        self.listings.close();
    }

    pub fn ending(&self) -> Option<Ending> {
        lock(&self.ending).clone()
    }

    /// Puts the labels of the Node over those of its host. Returns whether anything changed.
    pub fn relabel(&self, node: Option<&BTreeMap<String, String>>) -> bool {
        let mut labels = self.host_labels.clone();
        labels.extend(node.cloned().unwrap_or_default());
        let mut state = self.state();
        let changed = state.labels != labels;
        state.labels = labels;
        changed
    }

    /// Sends settings when they differ from those that were sent last. The revision only grows.
    pub fn push_settings(&self, settings: Settings, at_least: u64) -> bool {
        let message = {
            let mut state = self.state();
            if state.settings.settings == settings {
                return false;
            }
            let revision = at_least.max(state.settings.revision + 1);
            state.settings = SentSettings { settings, revision, sent_at: Instant::now(), confirmed: false };
            // A report from before says nothing about these: a drain waits for the next one.
            if let Some(last) = &mut state.report {
                last.after_confirmation = false;
            }
            if !state.acknowledged {
                // The HelloAck that is about to go out carries them.
                return true;
            }
            settings_message(&state.settings)
        };
        self.stirred.notify_one();
        self.send(to_node::Message::Settings(message));
        true
    }

    /// The node's admission uses the settings of this revision. Returns whether that is news.
    pub fn confirm_settings(&self, revision: u64) -> bool {
        let mut state = self.state();
        let news = !state.settings.confirmed && state.settings.revision == revision;
        state.settings.confirmed |= news;
        news
    }

    /// The HelloAck goes out: from now on the node may be a candidate, and its confirmation is awaited.
    pub fn acknowledge(&self) -> v1::Settings {
        let mut state = self.state();
        state.acknowledged = true;
        state.settings.sent_at = Instant::now();
        settings_message(&state.settings)
    }

    /// Takes a report in.
    pub fn take_report(&self, report: v1::Report, pools: Vec<DeclaredPool>) -> ReportNews {
        let mut state = self.state();
        let confirms = report.settings_revision == state.settings.revision;
        let was_tight = state.report.as_ref().is_some_and(LastReport::is_memory_tight);
        // With it the settings are confirmed, if they were not before.
        let last = LastReport { report, time: now(), after_confirmation: confirms };
        let turned = last.is_memory_tight() != was_tight;
        let reach = |pools: &[DeclaredPool]| -> Vec<_> {
            pools.iter().map(|pool| (pool.id.clone(), pool.uid.clone(), pool.default, pool.available)).collect()
        };
        let news = if reach(&state.pools) != reach(&pools) {
            ReportNews::Reach
        } else if (confirms && !state.settings.confirmed) || state.pools != pools || turned {
            ReportNews::Room
        } else {
            ReportNews::Nothing
        };
        state.settings.confirmed |= confirms;
        state.pools = pools;
        state.report = Some(last);
        news
    }

    /// What its Instances used when it reported last.
    pub fn usages(&self) -> Vec<InstanceUsage> {
        let state = self.state();
        state.report.as_ref().map(|last| node::instance_usages(&last.report, &last.time)).unwrap_or_default()
    }

    /// What the Node's status is computed from.
    pub fn view(&self) -> Live {
        let state = self.state();
        let report = state.report.as_ref().map(|last| Reported {
            time: last.time.clone(),
            instances: last.report.instances,
            after_confirmation: last.after_confirmation,
            settings_revision: last.report.settings_revision,
            host: last.report.host.as_ref().map(|host| node::host_usage(host, &last.time)),
        });
        Live {
            session: NodeSession {
                id: self.id.clone(),
                alive: true,
                incarnation: self.incarnation,
                boot_id: self.boot_id.clone(),
                version: self.version.clone(),
                source_revision: (!self.source_revision.is_empty()).then(|| self.source_revision.clone()),
                started_at: self.started_at.clone(),
                ended_at: None,
            },
            capacity: self.capacity,
            host_labels: self.host_labels.clone(),
            pools: state.pools.clone(),
            settings: state.settings.settings,
            settings_confirmed: state.settings.confirmed,
            clock: state.clock.current().cloned(),
            report,
        }
    }

    /// Sends the probe of the clock that is due, if any, and says what is new.
    pub fn probe_clock(&self) -> Option<ClockNews> {
        self.with_clock(|clock| clock.tick(Moment::now(), &now()))
    }

    /// Takes the answer to a probe in, and says what is new.
    pub fn take_clock(&self, reading: &v1::ClockReading) -> Option<ClockNews> {
        self.with_clock(|clock| clock.take(reading, Moment::now(), &now()))
    }

    fn with_clock(&self, act: impl FnOnce(&mut Clock) -> Option<v1::ClockProbe>) -> Option<ClockNews> {
        let (probe, news) = {
            let mut state = self.state();
            let before = state.clock.current().cloned();
            let probe = act(&mut state.clock);
            let after = state.clock.current().filter(|after| before.as_ref() != Some(*after));
            let was_over = before.as_ref().map(|clock| clock.over);
            let news = after.map(|clock| ClockNews { moves: was_over != Some(clock.over), clock: clock.clone() });
            (probe, news)
        };
        if let Some(probe) = probe {
            self.send(to_node::Message::ClockProbe(probe));
        }
        news
    }

    /// Whether everything has come that a node says at once in a new session.
    pub fn has_said_all(&self) -> bool {
        let state = self.state();
        state.settings.confirmed && state.clock.current().is_some() && state.report.is_some()
    }

    pub fn confirmation(&self) -> Confirmation {
        let SentSettings { revision, confirmed, .. } = self.state().settings;
        Confirmation { revision, confirmed }
    }

    /// How long the settings have been waiting for their confirmation.
    pub fn unconfirmed_for(&self) -> Option<Duration> {
        let state = self.state();
        (!state.settings.confirmed).then(|| state.settings.sent_at.elapsed())
    }
}

/// Settings as they go over the wire.
pub fn settings_message(sent: &SentSettings) -> v1::Settings {
    v1::Settings {
        revision: sent.revision,
        drain: sent.settings.drain,
        slots: sent.settings.slots,
        cpu_ratio: sent.settings.cpu.thousandths(),
        memory_ratio: sent.settings.memory.thousandths(),
        memory_tight_below: Some(sent.settings.memory_tight.enter_below_percent.into()),
        memory_tight_until_above: Some(sent.settings.memory_tight.leave_above_percent.into()),
    }
}

#[cfg(test)]
impl NewSession {
    /// Of a node that said no more than it must.
    pub fn plain(node: NodeId, incarnation: Incarnation) -> Self {
        Self {
            id: "session".to_owned(),
            node,
            incarnation,
            boot_id: String::new(),
            home: String::new(),
            version: String::new(),
            source_revision: String::new(),
            term: Term(1),
            capacity: Capacity::default(),
            labels: BTreeMap::default(),
            pools: Vec::new(),
            settings: Settings::default(),
            settings_revision: 1,
            spares_unknown: false,
            clock_period: Duration::from_secs(60),
            history: Arc::default(),
        }
    }
}

#[cfg(test)]
#[path = "live_tests.rs"]
mod tests;
