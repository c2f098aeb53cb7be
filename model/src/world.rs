//! What there is, and what can happen.

use std::time::Duration;

use kibo_crds::{Epoch, Incarnation, InstanceId, NodeId, ObjectUid, PoolId};
use kibo_node_daemon::{
    clock::BootTime,
    launch::{Grant, PredecessorEnd, Taker},
    pool::{
        records::Records,
        watch::decide::{Pulse, Watched},
    },
};
use kibo_operator::right::Right;
use kibo_protocol::v1::ObjectUse;
use stateright::{Model, Property};

// What holds in every state.
pub const NEVER_TWO_WRITERS: &str = "never two writers, unless a host was wrongly declared dead";
pub const STOPS_WITHIN_A_PERIOD: &str = "who was wrongly declared dead stops within a period of the mark";
pub const TRUE_GRANTS_ARE_TAKEN: &str = "a true grant meets no holder that the control plane does not know of";
pub const ALWAYS: [&str; 3] = [NEVER_TWO_WRITERS, STOPS_WITHIN_A_PERIOD, TRUE_GRANTS_ARE_TAKEN];

// What the search must come to, or it would prove nothing.
pub const TAKEN_OVER: &str = "a disk is taken over after a right isolation";
pub const HANDED_OVER: &str = "a disk is handed over";
pub const TWO_WRITE: &str = "two write after a wrong isolation";
pub const KILLED: &str = "a guest is killed by its pool";
pub const STANDS_STILL: &str = "a guest stands still";

/// How far an Instance has come with its object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Ordered, and on the host's disk; a daemon that dies here begins anew.
    Begun,
    /// The records stand for it. Those who are dead by its grant are to be told.
    Listed {
        dead: Vec<(NodeId, Incarnation)>,
    },
    Told,
    /// Its own record is there.
    Linked,
    /// The records stood for it afterwards too.
    Ready,
    /// The guest has the image open.
    Runs,
    /// Its process is reaped, and nothing on its host has the image open any more. Where that is not the same (`io_uring`, in
    /// pools that no other host has mounted) the node waits for it, before a release and before each take.
    Reaped,
    /// The records say what became of its grant.
    Closed(ObjectUse),
}

/// An Instance on its host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Guest {
    pub taker: Taker,
    pub grant: Grant,
    pub step: Step,
    pub watched: Watched,
    /// Periods at whose end it wrote though its daemon could have read that its right was over.
    pub overtime: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own about a host")]
pub struct Host {
    /// The life that its disk knows of.
    pub life: Option<Incarnation>,
    /// It was booted since that life was seen.
    pub rebooted: bool,
    pub daemon: bool,
    pub session: bool,
    /// Whether it reaches the pool.
    pub pool: bool,
    pub guest: Option<Guest>,
    /// Its daemon has read the pool in this period.
    pub looked: bool,
}

impl Guest {
    /// Its process is gone. What was seen of it before says nothing any more, but that it was killed.
    pub(crate) fn reap(&mut self) {
        self.step = Step::Reaped;
        if *self.watched.pulse() != Pulse::Killed {
            self.watched = Watched::begin([pool()], time(0), false, freeze_after());
        }
    }
}

impl Host {
    fn frozen(&self) -> bool {
        self.guest.as_ref().is_some_and(|guest| matches!(guest.watched.pulse(), Pulse::Frozen { .. }))
    }

    pub(crate) fn runs(&self) -> bool {
        self.guest.as_ref().is_some_and(|guest| guest.step == Step::Runs)
    }

    /// Its guest may write at this moment.
    pub fn writes(&self) -> bool {
        self.pool && self.runs() && !self.frozen()
    }

    /// Nothing on it will write any more, attached to the pool or not.
    pub(crate) fn is_harmless(&self, mark: Option<Incarnation>) -> bool {
        let Some(guest) = &self.guest else { return true };
        matches!(guest.step, Step::Reaped | Step::Closed(_)) || (self.frozen() && mark >= Some(guest.taker.incarnation))
    }
}

/// How often things may yet go wrong; it bounds the search.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Budget {
    pub isolations: u8,
    /// Of a host with all that runs on it.
    pub crashes: u8,
    pub daemon_crashes: u8,
    pub cuts_from_control: u8,
    pub cuts_from_pool: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub now: u64,
    /// As the status has it.
    pub right: Right,
    pub execution: Option<(NodeId, Incarnation, InstanceId)>,
    /// By host: the newest incarnation, and the newest that was isolated.
    pub minted: Vec<Incarnation>,
    pub isolated: Vec<Option<Incarnation>>,
    /// In the pool: the object's records, and the marks in the fence files.
    pub records: Records,
    pub marks: Vec<Option<Incarnation>>,
    pub hosts: Vec<Host>,
    pub left: Budget,
    /// A host was declared dead that could write, or could again.
    pub wrong: bool,
    /// A grant of the control plane met a holder that it did not know of.
    pub stuck: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A period ends.
    Tick,
    Grant(usize),
    /// The Go, or the desired set of a new session.
    Deliver(usize),
    Take(usize),
    Look(usize),
    /// The guest ends: by a stop, or by itself.
    End(usize),
    Close(usize),
    Report(usize),
    Isolate(usize),
    CrashHost(usize),
    CrashDaemon(usize),
    StartDaemon(usize),
    CutFromControl(usize),
    Connect(usize),
    CutFromPool(usize),
    AttachToPool(usize),
}

/// What is checked.
#[derive(Clone, Debug)]
pub struct Checked {
    pub hosts: usize,
    pub epochs: u64,
    pub periods: u64,
    pub budget: Budget,
    /// Off: the daemon reads neither marks nor records, as if the watch were not there.
    pub watches: bool,
}

/// After so many periods without a look a guest stands still.
const FREEZE_AFTER: u64 = 2;

pub(crate) fn time(periods: u64) -> BootTime {
    BootTime::from_boot(Duration::from_secs(periods))
}

pub(crate) fn freeze_after() -> Duration {
    Duration::from_secs(FREEZE_AFTER)
}

pub(crate) fn node(index: usize) -> NodeId {
    format!("n{index}").parse().expect("a name")
}

pub(crate) fn index(node: &NodeId) -> usize {
    node.as_str()[1..].parse().expect("our own name")
}

pub(crate) fn pool() -> PoolId {
    "p".parse().expect("a name")
}

pub(crate) fn object() -> ObjectUid {
    "6f9619ff-8b86-d011-b42d-00c04fc964ff".parse().expect("a uid")
}

/// One Instance for each grant.
pub(crate) fn instance(epoch: Epoch) -> InstanceId {
    format!("inst-{:026}", epoch.0).parse().expect("an id")
}

impl World {
    pub fn writers(&self) -> usize {
        self.hosts.iter().filter(|host| host.writes()).count()
    }

    /// Whether the right of this host's guest is over, by what the pool says.
    fn is_void(&self, at: usize) -> bool {
        let guest = self.hosts[at].guest.as_ref();
        guest.is_some_and(|guest| self.marks[at] >= Some(guest.taker.incarnation))
    }

    fn may_tick(&self) -> bool {
        self.hosts.iter().all(|host| !(host.daemon && host.pool && host.runs()) || host.looked)
    }

    fn tick(&mut self) {
        for at in 0..self.hosts.len() {
            let could_know = self.hosts[at].writes() && self.hosts[at].daemon && self.is_void(at);
            if let Some(guest) = self.hosts[at].guest.as_mut().filter(|_| could_know) {
                guest.overtime += 1;
            }
        }
        self.now += 1;
        let now = time(self.now);
        for host in &mut self.hosts {
            host.looked = false;
            let watches = host.daemon && host.runs();
            if let Some(guest) = host.guest.as_mut().filter(|_| watches) {
                // It stands still from here on: its pulse says so.
                let _ = guest.watched.tick(now);
            }
        }
    }
}

impl Model for Checked {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let host = Host {
            life: Some(Incarnation(1)),
            rebooted: false,
            daemon: true,
            session: true,
            pool: true,
            guest: None,
            looked: false,
        };
        vec![World {
            now: 0,
            right: Right::default(),
            execution: None,
            minted: vec![Incarnation(1); self.hosts],
            isolated: vec![None; self.hosts],
            records: Records::default(),
            marks: vec![None; self.hosts],
            hosts: vec![host; self.hosts],
            left: self.budget.clone(),
            wrong: false,
            stuck: false,
        }]
    }

    fn actions(&self, _: &World, actions: &mut Vec<Action>) {
        use Action as A;
        actions.push(A::Tick);
        let of_hosts = [
            A::Grant,
            A::Deliver,
            A::Take,
            A::Look,
            A::End,
            A::Close,
            A::Report,
            A::Isolate,
            A::CrashHost,
            A::CrashDaemon,
            A::StartDaemon,
            A::CutFromControl,
            A::Connect,
            A::CutFromPool,
            A::AttachToPool,
        ];
        for host in 0..self.hosts {
            actions.extend(of_hosts.iter().map(|action: &fn(usize) -> A| action(host)));
        }
    }

    /// `None` where it cannot happen now.
    fn next_state(&self, last: &World, action: Action) -> Option<World> {
        let mut next = last.clone();
        let happened = match action {
            Action::Tick => {
                let may = next.now < self.periods && next.may_tick();
                may.then(|| next.tick())
            }
            Action::Grant(at) => next.grant(at, self.epochs),
            Action::Deliver(at) => next.deliver(at),
            Action::Isolate(at) => next.isolate(at),
            Action::Connect(at) => next.connect(at),
            Action::Report(at) => next.report(at),
            Action::CutFromControl(at) => next.cut_from_control(at),
            Action::Take(at) => next.take(at),
            Action::Look(at) => next.look(at, self.watches),
            Action::End(at) => next.end(at),
            Action::Close(at) => next.close(at),
            Action::CrashHost(at) => next.crash_host(at),
            Action::CrashDaemon(at) => next.crash_daemon(at),
            Action::StartDaemon(at) => next.start_daemon(at),
            Action::CutFromPool(at) => next.cut_from_pool(at),
            Action::AttachToPool(at) => next.attach_to_pool(at),
        };
        happened.filter(|()| next != *last).map(|()| next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(NEVER_TWO_WRITERS, |_, world: &World| world.wrong || world.writers() <= 1),
            Property::always(STOPS_WITHIN_A_PERIOD, |_, world: &World| !world.any(|guest| guest.overtime > 1)),
            Property::always(TRUE_GRANTS_ARE_TAKEN, |_, world: &World| world.wrong || !world.stuck),
            Property::sometimes(TAKEN_OVER, |_, world: &World| {
                !world.wrong && world.runs_after(PredecessorEnd::Isolated)
            }),
            Property::sometimes(HANDED_OVER, |_, world: &World| world.runs_after(PredecessorEnd::Released)),
            Property::sometimes(TWO_WRITE, |_, world: &World| world.writers() > 1),
            Property::sometimes(KILLED, |_, world: &World| world.any(|guest| *guest.watched.pulse() == Pulse::Killed)),
            Property::sometimes(STANDS_STILL, |_, world: &World| {
                world.any(|guest| matches!(guest.watched.pulse(), Pulse::Frozen { .. }))
            }),
        ]
    }
}

impl World {
    fn any(&self, is: impl Fn(&Guest) -> bool) -> bool {
        self.hosts.iter().any(|host| host.guest.as_ref().is_some_and(&is))
    }

    fn runs_after(&self, end: PredecessorEnd) -> bool {
        self.any(|guest| guest.step == Step::Runs && guest.grant.predecessor_end == end)
    }
}
