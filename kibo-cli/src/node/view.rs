//! A node in JSON, and what its forms share.

use std::{collections::BTreeMap, str::FromStr};

use kibo_crds::{
    Bytes, MilliCpu, Node, Percent,
    node::{Amounts, IsolationState, NodeStatus},
};
use kube::ResourceExt as _;
use serde::Serialize;

use crate::output::{
    ConditionView,
    words::{ABSENT, enum_word, instant, or_absent},
};

/// A node in JSON.
#[derive(Serialize)]
pub struct View {
    node_id: String,
    status: Option<String>,
    admission: Option<String>,
    drain_requested: bool,
    isolated: bool,
    /// The node is ahead of this control plane, which was put back: the id that an adoption names.
    quarantine_id: Option<String>,
    labels: BTreeMap<String, String>,
    host_labels: BTreeMap<String, String>,
    session: Option<SessionView>,
    clock: Option<ClockView>,
    report: Option<ReportView>,
    capacity: AmountsView,
    schedulable: AmountsView,
    allocated: AmountsView,
    overcommit: Option<OvercommitView>,
    memory_tight: Option<bool>,
    #[serde(flatten)]
    alone: Option<AloneView>,
    slots: Option<u32>,
    pools: Vec<PoolView>,
    incarnation: Option<u64>,
    registration_version: Option<String>,
    created_at: Option<String>,
    conditions: Vec<ConditionView>,
}

/// What is shown of one node, and would make a list long.
#[derive(Serialize)]
struct AloneView {
    host_usage: Option<HostUsageView>,
}

#[derive(Serialize)]
struct SessionView {
    session_id: String,
    alive: bool,
    incarnation: u64,
    version: String,
    source_revision: Option<String>,
    boot_id: String,
    started_at: String,
    ended_at: Option<String>,
}

/// The host's clock against the operator's; absent without a live session.
#[derive(Serialize)]
struct ClockView {
    /// Node minus operator.
    offset_millis: i64,
    uncertainty_millis: u64,
    kernel_synchronized: Option<bool>,
    over: bool,
    measured_at: String,
}

#[derive(Serialize)]
struct ReportView {
    reported_at: String,
    instances: u32,
    held_objects: u32,
    /// Of the settings that the node's admission used when it reported.
    reported_version: Option<String>,
}

#[derive(Serialize)]
struct AmountsView {
    cpu_millis: Option<u64>,
    memory_bytes: Option<u64>,
}

/// The ratios in force, and where each is set: `DEFAULT` or `NODE`; absent before the first session.
#[derive(Serialize)]
struct OvercommitView {
    cpu: String,
    cpu_source: String,
    memory: String,
    memory_source: String,
}

/// One sample of the host; what could not be read is absent. Shares are in percent.
#[derive(Serialize)]
pub struct HostUsageView {
    sampled_at: String,
    vm_cpu_millis: Option<u64>,
    vm_memory_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
    memory_total_bytes: Option<u64>,
    memory_tight: Option<bool>,
    memory_tight_since: Option<String>,
    cpu_idle: Option<String>,
    cpu_pressure_some: Option<String>,
    cpu_pressure_full: Option<String>,
    memory_pressure_some: Option<String>,
    memory_pressure_full: Option<String>,
}

impl HostUsageView {
    pub fn of(status: &NodeStatus) -> Option<Self> {
        let usage = status.host_usage.as_ref()?;
        let share = |percent: Option<Percent>| percent.map(|percent| percent.to_string());
        Some(Self {
            sampled_at: instant(&usage.sampled_at),
            vm_cpu_millis: usage.vm_cpu_milli.map(|cpu| cpu.0),
            vm_memory_bytes: usage.vm_memory_bytes.map(|memory| memory.0),
            memory_available_bytes: usage.memory_available_bytes.map(|memory| memory.0),
            memory_total_bytes: usage.memory_total_bytes.map(|memory| memory.0),
            memory_tight: memory_tight(status),
            memory_tight_since: usage.memory_tight_since.as_ref().map(instant),
            cpu_idle: share(usage.cpu_idle),
            cpu_pressure_some: share(usage.cpu_pressure_some),
            cpu_pressure_full: share(usage.cpu_pressure_full),
            memory_pressure_some: share(usage.memory_pressure_some),
            memory_pressure_full: share(usage.memory_pressure_full),
        })
    }
}

#[derive(Serialize)]
struct PoolView {
    pool_id: String,
    default: bool,
    available: bool,
    capacity_bytes: Option<u64>,
    free_bytes: Option<u64>,
}

/// The amounts of a status as numbers; what is absent or unreadable stays absent.
#[derive(Clone, Copy, Default)]
pub struct Measured {
    pub cpu: Option<MilliCpu>,
    pub memory: Option<Bytes>,
}

impl From<Option<&Amounts>> for Measured {
    fn from(amounts: Option<&Amounts>) -> Self {
        fn read<T: FromStr>(text: Option<&String>) -> Option<T> {
            text.and_then(|text| text.parse().ok())
        }
        Self { cpu: read(amounts.and_then(|a| a.cpu.as_ref())), memory: read(amounts.and_then(|a| a.memory.as_ref())) }
    }
}

impl From<Measured> for AmountsView {
    fn from(measured: Measured) -> Self {
        Self { cpu_millis: measured.cpu.map(|cpu| cpu.0), memory_bytes: measured.memory.map(|memory| memory.0) }
    }
}

pub fn is_isolated(status: &NodeStatus) -> bool {
    match (&status.isolation, status.incarnation) {
        // One that was refused, since the host still wrote, is not in effect.
        (Some(isolation), Some(current)) => {
            isolation.incarnation >= current && isolation.state != IsolationState::Refused
        }
        _ => false,
    }
}

impl View {
    /// As one of a list.
    pub fn one_of_many(node: &Node) -> Self {
        Self { alone: None, ..Self::from(node) }
    }
}

impl From<&Node> for View {
    fn from(node: &Node) -> Self {
        let status = node.status.clone().unwrap_or_default();
        let alone = Some(AloneView { host_usage: HostUsageView::of(&status) });
        Self {
            node_id: node.name_any(),
            memory_tight: memory_tight(&status),
            alone,
            isolated: is_isolated(&status),
            quarantine_id: status.quarantine.as_ref().map(|quarantine| quarantine.id.clone()),
            status: status.phase.as_ref().map(enum_word),
            admission: status.admission.as_ref().map(enum_word),
            drain_requested: drain_requested(node),
            labels: node.labels().clone(),
            host_labels: status.host_labels,
            session: status.session.map(|session| SessionView {
                session_id: session.id,
                alive: session.alive,
                incarnation: session.incarnation.0,
                version: session.version,
                source_revision: session.source_revision,
                boot_id: session.boot_id,
                started_at: instant(&session.started_at),
                ended_at: session.ended_at.as_ref().map(instant),
            }),
            clock: status.clock.map(|clock| ClockView {
                offset_millis: clock.offset_millis,
                uncertainty_millis: clock.uncertainty_millis,
                kernel_synchronized: clock.kernel_synchronized,
                over: clock.over,
                measured_at: instant(&clock.measured_at),
            }),
            report: status.report.map(|report| ReportView {
                reported_at: instant(&report.time),
                instances: report.instances,
                held_objects: report.held_objects,
                reported_version: report.settings_revision.map(|revision| revision.to_string()),
            }),
            capacity: Measured::from(status.capacity.as_ref()).into(),
            schedulable: Measured::from(status.schedulable.as_ref()).into(),
            allocated: Measured::from(status.allocated.as_ref()).into(),
            overcommit: status.overcommit.as_ref().map(|overcommit| OvercommitView {
                cpu: overcommit.cpu.to_string(),
                cpu_source: enum_word(&overcommit.cpu_source),
                memory: overcommit.memory.to_string(),
                memory_source: enum_word(&overcommit.memory_source),
            }),
            slots: status.slots,
            pools: status
                .pools
                .iter()
                .map(|pool| PoolView {
                    pool_id: pool.id.to_string(),
                    default: pool.default,
                    available: pool.available,
                    capacity_bytes: pool.capacity.map(|bytes| bytes.0),
                    free_bytes: pool.free.map(|bytes| bytes.0),
                })
                .collect(),
            incarnation: status.incarnation.map(|incarnation| incarnation.0),
            registration_version: node.resource_version(),
            created_at: node.creation_timestamp().as_ref().map(instant),
            conditions: status.conditions.iter().map(Into::into).collect(),
        }
    }
}

/// `allocated/schedulable`, each absent when it is not known.
pub fn shares<T>(allocated: Option<T>, schedulable: Option<T>, show: fn(T) -> String) -> String {
    match (allocated.map(show), schedulable.map(show)) {
        (None, None) => ABSENT.to_owned(),
        (allocated, schedulable) => format!("{}/{}", or_absent(allocated), or_absent(schedulable)),
    }
}

/// Whether the node takes no new Workspace because its host is short of memory; `None`: it is not known.
pub fn memory_tight(status: &NodeStatus) -> Option<bool> {
    let usage = status.host_usage.as_ref()?;
    let is_known = usage.memory_available_bytes.is_some() || usage.memory_tight_since.is_some();
    is_known.then_some(usage.memory_tight_since.is_some())
}

pub fn yes_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

pub fn drain_requested(node: &Node) -> bool {
    node.spec.drain.as_ref().is_some_and(|drain| drain.requested)
}
