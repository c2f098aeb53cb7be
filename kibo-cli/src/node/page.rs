//! The page of one node.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kibo_crds::{
    MilliCpu, Node, Percent,
    node::{Admission, Amounts, EffectiveOvercommit, HostUsage, NodeClock, NodeSession, NodeStatus, RatioSource},
};
use kube::ResourceExt as _;
use serde::Serialize;

use super::{
    issue,
    view::{Measured, View, drain_requested, is_isolated, shares, yes_no},
};
use crate::output::{
    Page, Present, Table, conditions, is_telling,
    words::{ABSENT, age, binary, cores, enum_word, instant, or_absent, when},
};

pub struct One {
    pub node: Node,
    pub events: Table,
    pub now: Timestamp,
}

impl Present for One {
    fn view(&self) -> impl Serialize {
        View::from(&self.node)
    }

    fn names(&self) -> Vec<String> {
        vec![self.node.name_any()]
    }

    fn text(&self, wide: bool) -> String {
        let status = self.node.status.clone().unwrap_or_default();
        let mut page = Page::default();
        page.fact("Node", self.node.name_any());
        page.state("Status", status.phase.as_ref().map(enum_word).unwrap_or_default());
        page.fact("Admission", or_absent(status.admission.as_ref().map(enum_word)));
        page.fact_if("Enrollment", self.pending_grant(&status));
        page.fact_if("Labels", Some(self.labels(&status)));
        page.fact_if("Drain", drain_requested(&self.node).then_some("requested"));
        page.fact_if("Isolated", is_isolated(&status).then_some("yes"));
        page.fact_if("Quarantine", status.quarantine.as_ref().map(|quarantine| quarantine.message.clone()));
        match &status.session {
            Some(_) => amounts(&mut page, &status),
            // A host that has never been here has reported nothing.
            None => page.fact("Latest session", ""),
        }
        if wide {
            page.fact("Registration version", self.node.resource_version().unwrap_or_default());
            page.fact("Created", when(self.node.creation_timestamp().as_ref(), self.now, wide));
        }
        if let Some(session) = &status.session {
            page.section("Latest session", self.session(session, status.clock.as_ref(), wide));
            page.section("Latest full report", self.report(&status, wide));
        }
        if let Some(usage) = &status.host_usage {
            page.section("Host usage", host_usage(usage, self.now));
        }
        if wide && status.session.is_some() {
            page.section("Overcommit figures", figures(&status));
        }
        // One whose registration has ended is no member of any.
        if !matches!(status.admission, Some(Admission::Retired | Admission::Revoked)) {
            page.section("Storage pools", pools(&status));
        }
        let shown = status.conditions.iter().filter(|condition| wide || Self::is_telling(condition, &status));
        page.section("Conditions", conditions(shown, self.now));
        page.section("Events", self.events.clone());
        page.render()
    }
}

impl One {
    /// That a node is not schedulable because it is not ready is said once.
    fn is_telling(condition: &Condition, status: &NodeStatus) -> bool {
        let follows = condition.type_ == "Schedulable"
            && condition.status == "False"
            && status.conditions.iter().any(|it| it.type_ == "Ready" && it.status == "False");
        is_telling(condition) && !follows
    }

    /// The labels that placement sees: what the Node carries wins over what its host says of itself.
    fn labels(&self, status: &NodeStatus) -> String {
        let own = self.node.labels().iter().map(|(key, value)| format!("{key}={value}"));
        let host = status.host_labels.iter().filter(|(key, _)| !self.node.labels().contains_key(*key));
        let host = host.map(|(key, value)| format!("{key}={value} (of the host)"));
        own.chain(host).collect::<Vec<_>>().join("\n")
    }

    /// A token that was issued and that no host has used.
    fn pending_grant(&self, status: &NodeStatus) -> Option<String> {
        let grant = self.node.spec.enrollment.as_ref()?;
        let spec = &self.node.spec;
        let is_void = spec.retirement.is_some() || spec.revocation.is_some();
        if is_void || status.used_secret_hash.as_ref() == Some(&grant.secret_hash) {
            return None;
        }
        let until = instant(&grant.expires_at);
        Some(if grant.expires_at.0 > self.now {
            format!("a token was issued and works until {until}")
        } else {
            format!("a token was issued and has expired at {until}; issue another: {}", issue(&self.node.name_any()))
        })
    }

    /// The session that lives, or the last one. A clock is known only while one lives.
    fn session(&self, session: &NodeSession, clock: Option<&NodeClock>, wide: bool) -> Table {
        let NodeSession { id, alive, incarnation, boot_id, version, source_revision, started_at, ended_at } = session;
        let mut items = Items::new();
        items.row(
            "Alive",
            match alive {
                true if wide => format!("yes, began {}", when(Some(started_at), self.now, wide)),
                true => format!("yes, for {}", age(Some(started_at), self.now)),
                false => format!("no, ended {}", when(ended_at.as_ref(), self.now, wide)),
            },
        );
        items.row("Release", version.clone());
        items.row("Revision", or_absent(source_revision.as_ref()));
        items.row("Clock", or_absent(clock.map(|clock| &clock.shown)));
        items.row("Clock uncertainty", or_absent(clock.map(|clock| format!("{} ms", clock.uncertainty_millis))));
        items.row("Kernel clock", or_absent(clock.and_then(|clock| clock.kernel_synchronized).map(synchronized)));
        if wide {
            items.row("Incarnation", incarnation.to_string());
            items.row("Session ID", id.clone());
            items.row("Boot ID", boot_id.clone());
        }
        items.0
    }

    /// What the node said last of all that it has.
    fn report(&self, status: &NodeStatus, wide: bool) -> Table {
        let report = status.report.as_ref();
        let (schedulable, allocated) =
            (Measured::from(status.schedulable.as_ref()), Measured::from(status.allocated.as_ref()));
        let slots = status.slots.map(|slots| format!(" of {slots} slots")).unwrap_or_default();
        let mut items = Items::new();
        items.row("Reported", when(report.map(|report| &report.time), self.now, wide));
        items.row("Allocated CPU", shares(allocated.cpu, schedulable.cpu, cores));
        items.row("Allocated memory", shares(allocated.memory, schedulable.memory, binary));
        items.row("Instances", or_absent(report.map(|report| report.instances)) + &slots);
        items.row("Held objects", or_absent(report.map(|report| report.held_objects)));
        if wide {
            items.row("Reported version", or_absent(report.and_then(|report| report.settings_revision)));
        }
        items.0
    }
}

/// What the host has, and what placement makes of it.
fn amounts(page: &mut Page, status: &NodeStatus) {
    let shown = |amounts: Option<&Amounts>| {
        let Measured { cpu, memory } = Measured::from(amounts);
        both(&or_absent(cpu.map(cores)), &or_absent(memory.map(binary)))
    };
    page.fact("Capacity", shown(status.capacity.as_ref()));
    page.fact("Schedulable", shown(status.schedulable.as_ref()));
    page.fact_if("Overcommit", status.overcommit.as_ref().map(overcommit));
}

/// A table of things by their names.
struct Items(Table);

impl Items {
    fn new() -> Self {
        Self(Table::new(["ITEM", "VALUE"]))
    }

    fn row(&mut self, item: &str, value: String) {
        self.0.row(vec![item.to_owned(), value]);
    }
}

/// What the host's kernel says of its clock.
fn synchronized(yes: bool) -> &'static str {
    if yes { "synchronized" } else { "not synchronized" }
}

/// Each ratio with where it is set.
fn overcommit(overcommit: &EffectiveOvercommit) -> String {
    let EffectiveOvercommit { cpu, cpu_source, memory, memory_source } = overcommit;
    let source = |source: RatioSource| match source {
        RatioSource::Default => "cluster-wide default",
        RatioSource::Node => "of this node",
    };
    format!("CPU x {cpu} ({}), memory x {memory} ({})", source(*cpu_source), source(*memory_source))
}

/// By what a ratio is set: how much of the host is given out, and how much of that is in use.
fn figures(status: &NodeStatus) -> Table {
    let (capacity, allocated) = (Measured::from(status.capacity.as_ref()), Measured::from(status.allocated.as_ref()));
    let usage = status.host_usage.as_ref();
    let used = Measured {
        cpu: usage.and_then(|usage| usage.vm_cpu_milli),
        memory: usage.and_then(|usage| usage.vm_memory_bytes),
    };
    let ratios = status.overcommit.as_ref();
    let unused_cpu = allocated.cpu.zip(used.cpu).map(|(all, used)| MilliCpu(all.0.saturating_sub(used.0)));
    let unused_memory = allocated.memory.zip(used.memory).map(|(all, used)| all.saturating_sub(used));
    let mut table = Table::new(["FIGURE", "CPU", "MEMORY"]);
    let mut row = |figure: &str, cpu: String, memory: String| table.row(vec![figure.to_owned(), cpu, memory]);
    row("ratio", or_absent(ratios.map(|it| it.cpu)), or_absent(ratios.map(|it| it.memory)));
    row(
        "given out of the host",
        part(allocated.cpu, capacity.cpu, cores, |cpu| cpu.0),
        part(allocated.memory, capacity.memory, binary, |bytes| bytes.0),
    );
    row(
        "used by VMs of that",
        part(used.cpu, allocated.cpu, cores, |cpu| cpu.0),
        part(used.memory, allocated.memory, binary, |bytes| bytes.0),
    );
    row("given out and not used", or_absent(unused_cpu.map(cores)), or_absent(unused_memory.map(binary)));
    let idle = usage.and_then(|usage| usage.cpu_idle).map(|idle| format!("{idle} %"));
    let available = usage.and_then(|usage| usage.memory_available_bytes).map(binary);
    row("left on the host", or_absent(idle), or_absent(available));
    table
}

/// `part/whole (percent)`; more than the whole is more than 100.
fn part<T: Copy>(part: Option<T>, whole: Option<T>, show: fn(T) -> String, amount: fn(T) -> u64) -> String {
    let percent = part.zip(whole).and_then(|(part, whole)| {
        (u128::from(amount(part)) * 100).checked_div(u128::from(amount(whole))).map(|percent| format!(" ({percent} %)"))
    });
    shares(part, whole, show) + &percent.unwrap_or_default()
}

/// CPU and memory in one line; one sign when neither is known.
fn both(cpu: &str, memory: &str) -> String {
    if cpu == ABSENT && memory == ABSENT { ABSENT.to_owned() } else { format!("{cpu} CPU, {memory} memory") }
}

fn pools(status: &NodeStatus) -> Table {
    let is_heard = status.has_live_session();
    let mut table = Table::new(["POOL", "DEFAULT", "AVAILABLE", "FREE/CAPACITY"]);
    for pool in &status.pools {
        table.row(vec![
            pool.id.to_string(),
            yes_no(pool.default).to_owned(),
            if is_heard { yes_no(pool.available) } else { ABSENT }.to_owned(),
            shares(pool.free.filter(|_| is_heard), pool.capacity, binary),
        ]);
    }
    table
}

/// What the host's last sample shows. For people: nothing is decided by it.
fn host_usage(usage: &HostUsage, now: Timestamp) -> Table {
    let mut items = Items::new();
    let percent = |share: Option<Percent>| share.map(|share| format!("{share} %"));
    let pressure = |some: Option<Percent>, full: Option<Percent>| {
        format!("some {}, full {}", or_absent(percent(some)), or_absent(percent(full)))
    };
    let available = shares(usage.memory_available_bytes, usage.memory_total_bytes, binary);
    // Where no VM was ever started there is nothing to say of them.
    if usage.vm_memory_bytes.is_some() || usage.vm_cpu_milli.is_some() {
        items.row("VM CPU", or_absent(usage.vm_cpu_milli.map(cores)));
        items.row("VM memory", or_absent(usage.vm_memory_bytes.map(binary)));
    }
    items.row("Memory available", available);
    items.row(
        "Memory tight",
        match &usage.memory_tight_since {
            Some(since) => format!("yes, for {}", age(Some(since), now)),
            None => or_absent(usage.memory_available_bytes.map(|_| "no")),
        },
    );
    items.row("CPU idle", or_absent(percent(usage.cpu_idle)));
    items.row("CPU pressure", pressure(usage.cpu_pressure_some, usage.cpu_pressure_full));
    items.row("Memory pressure", pressure(usage.memory_pressure_some, usage.memory_pressure_full));
    items.0
}
