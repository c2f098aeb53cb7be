//! The page of one node.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kibo_crds::{
    MilliCpu, Node, Percent,
    node::{Admission, EffectiveOvercommit, HostUsage, NodeClock, NodeStatus, RatioSource},
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
        page.fact("Release", status.session.as_ref().map(|session| session.version.clone()).unwrap_or_default());
        page.fact("Revision", or_absent(status.session.as_ref().and_then(|session| session.source_revision.clone())));
        page.fact("Session", self.session(&status, wide));
        page.fact("Clock", or_absent(status.clock.as_ref().map(clock)));
        page.fact_if("Labels", Some(self.labels(&status)));
        page.fact_if("Drain", drain_requested(&self.node).then_some("requested"));
        page.fact_if("Isolated", is_isolated(&status).then_some("yes"));
        page.fact_if("Quarantine", status.quarantine.as_ref().map(|quarantine| quarantine.message.clone()));
        // A host that has never been here has reported nothing.
        if status.session.is_some() {
            self.amounts(&mut page, &status, wide);
        }
        if wide {
            page.fact("Incarnation", or_absent(status.incarnation));
            page.fact("Session ID", status.session.as_ref().map(|session| session.id.clone()).unwrap_or_default());
            page.fact("Boot ID", status.session.as_ref().map(|session| session.boot_id.clone()).unwrap_or_default());
            page.fact("Registration", self.node.resource_version().unwrap_or_default());
            page.fact("Created", when(self.node.creation_timestamp().as_ref(), self.now, wide));
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

    fn amounts(&self, page: &mut Page, status: &NodeStatus, wide: bool) {
        let (capacity, schedulable, allocated) = (
            Measured::from(status.capacity.as_ref()),
            Measured::from(status.schedulable.as_ref()),
            Measured::from(status.allocated.as_ref()),
        );
        page.fact("Capacity", both(&or_absent(capacity.cpu.map(cores)), &or_absent(capacity.memory.map(binary))));
        page.fact(
            "Allocated",
            both(&shares(allocated.cpu, schedulable.cpu, cores), &shares(allocated.memory, schedulable.memory, binary)),
        );
        page.fact_if("Overcommit", status.overcommit.as_ref().map(overcommit));
        let instances = or_absent(status.report.as_ref().map(|report| report.instances));
        let slots = status.slots.map(|slots| format!(" of {slots} slots")).unwrap_or_default();
        page.fact("Instances", instances + &slots);
        page.fact("Held objects", or_absent(status.report.as_ref().map(|report| report.held_objects)));
        page.fact("Last report", when(status.report.as_ref().map(|report| &report.time), self.now, wide));
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

    fn session(&self, status: &NodeStatus, wide: bool) -> String {
        match &status.session {
            Some(session) if session.alive && wide => {
                format!("alive, began {}", when(Some(&session.started_at), self.now, wide))
            }
            Some(session) if session.alive => format!("alive for {}", age(Some(&session.started_at), self.now)),
            Some(session) => format!("ended {}", when(session.ended_at.as_ref(), self.now, wide)),
            None => String::new(),
        }
    }
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

/// The offset, how wrong it may be, and what the host's kernel says of its clock.
fn clock(clock: &NodeClock) -> String {
    let kernel = match clock.kernel_synchronized {
        Some(true) => "synchronized",
        Some(false) => "not synchronized",
        None => ABSENT,
    };
    format!("{}, give or take {}ms, kernel: {kernel}", clock.shown, clock.uncertainty_millis)
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
    let mut table = Table::new(["ITEM", "VALUE"]);
    let mut row = |item: &str, value: String| table.row(vec![item.to_owned(), value]);
    let percent = |share: Option<Percent>| share.map(|share| format!("{share} %"));
    let pressure = |some: Option<Percent>, full: Option<Percent>| {
        format!("some {}, full {}", or_absent(percent(some)), or_absent(percent(full)))
    };
    let available = shares(usage.memory_available_bytes, usage.memory_total_bytes, binary);
    // Where no VM was ever started there is nothing to say of them.
    if usage.vm_memory_bytes.is_some() || usage.vm_cpu_milli.is_some() {
        row("VM CPU", or_absent(usage.vm_cpu_milli.map(cores)));
        row("VM memory", or_absent(usage.vm_memory_bytes.map(binary)));
    }
    row("Memory available", available);
    row(
        "Memory tight",
        match &usage.memory_tight_since {
            Some(since) => format!("yes, for {}", age(Some(since), now)),
            None => or_absent(usage.memory_available_bytes.map(|_| "no")),
        },
    );
    row("CPU idle", or_absent(percent(usage.cpu_idle)));
    row("CPU pressure", pressure(usage.cpu_pressure_some, usage.cpu_pressure_full));
    row("Memory pressure", pressure(usage.memory_pressure_some, usage.memory_pressure_full));
    table
}
