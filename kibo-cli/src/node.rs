//! `kibo node`: the hosts that run Workspaces.

use std::{collections::BTreeMap, str::FromStr};

use clap::Subcommand;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kibo_crds::{
    Bytes, MilliCpu, Node, NodeId,
    node::{Amounts, NodeStatus},
};
use kube::{ResourceExt, api::ListParams};
use serde::Serialize;

use crate::{
    adopt::{Adopt, adopt},
    client::{Cluster, Listed, Paging, remark_next_page},
    errors::{On as _, Result, Subject},
    output::{
        ConditionView, OutputArgs, Page, Present, Table, conditions, is_telling, present, remark,
        words::{ABSENT, age, binary, cores, enum_word, instant, or_absent, when},
    },
};

#[derive(Subcommand, Debug)]
pub enum Command {
    /// List nodes with what they can give and have given
    #[command(alias = "ls")]
    List {
        /// Only those with these labels
        #[arg(short = 'l', long, value_name = "LABELS")]
        selector: Option<String>,
        #[command(flatten)]
        paging: Paging,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show one node
    Get {
        #[arg(value_name = "NODE")]
        name: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// End the quarantine of a node whose control plane was put back to an older state
    Adopt(Adopt),
}

pub async fn run(cluster: &Cluster, command: Command) -> Result<()> {
    match command {
        Command::List { selector, paging, output } => {
            let params = ListParams { label_selector: selector, ..ListParams::default() };
            let listed = paging.list(&cluster.cluster_wide::<Node>(), params, &subject("")).await?;
            if listed.items.is_empty() {
                remark(&format!("no nodes; a host becomes one with a token: {}", issue("NODE")));
            }
            let many = Many { listed, now: Cluster::now() };
            present(output.form(), &many)?;
            remark_next_page(&many.listed);
            Ok(())
        }
        Command::Adopt(args) => adopt(cluster, args).await,
        Command::Get { name, output } => {
            let node = cluster.cluster_wide::<Node>().get(&name).await.on(&subject(&name))?;
            let now = Cluster::now();
            let events = cluster.events(&node, now).await;
            present(output.form(), &One { node, events, now })
        }
    }
}

pub fn subject(name: &str) -> Subject {
    Subject::cluster("Node", name)
}

/// Fails when there is no such node. A user who may not read nodes passes: the operator decides.
pub async fn check_exists(cluster: &Cluster, id: &NodeId) -> Result<()> {
    cluster.check_exists::<Node>(&cluster.cluster_wide(), &subject(id.as_str())).await
}

/// A node in JSON.
#[derive(Serialize)]
struct View {
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
    report: Option<ReportView>,
    capacity: AmountsView,
    schedulable: AmountsView,
    allocated: AmountsView,
    overcommit: OvercommitView,
    slots: Option<u32>,
    pools: Vec<PoolView>,
    incarnation: Option<u64>,
    registration_version: Option<String>,
    created_at: Option<String>,
    conditions: Vec<ConditionView>,
}

#[derive(Serialize)]
struct SessionView {
    session_id: String,
    alive: bool,
    incarnation: u64,
    version: String,
    boot_id: String,
    started_at: String,
    ended_at: Option<String>,
}

#[derive(Serialize)]
struct ReportView {
    reported_at: String,
    instances: u32,
    held_objects: u32,
}

#[derive(Serialize)]
struct AmountsView {
    cpu_millis: Option<u64>,
    memory_bytes: Option<u64>,
}

/// The ratios that are set for this node; absent: those of the default OvercommitPolicy.
#[derive(Serialize)]
struct OvercommitView {
    cpu: Option<String>,
    memory: Option<String>,
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
struct Measured {
    cpu: Option<MilliCpu>,
    memory: Option<Bytes>,
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

fn is_isolated(status: &NodeStatus) -> bool {
    match (&status.isolation, status.incarnation) {
        (Some(isolation), Some(current)) => isolation.incarnation >= current,
        _ => false,
    }
}

impl From<&Node> for View {
    fn from(node: &Node) -> Self {
        let status = node.status.clone().unwrap_or_default();
        let overcommit = node.spec.overcommit.clone().unwrap_or_default();
        Self {
            node_id: node.name_any(),
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
                boot_id: session.boot_id,
                started_at: instant(&session.started_at),
                ended_at: session.ended_at.as_ref().map(instant),
            }),
            report: status.report.map(|report| ReportView {
                reported_at: instant(&report.time),
                instances: report.instances,
                held_objects: report.held_objects,
            }),
            capacity: Measured::from(status.capacity.as_ref()).into(),
            schedulable: Measured::from(status.schedulable.as_ref()).into(),
            allocated: Measured::from(status.allocated.as_ref()).into(),
            overcommit: OvercommitView {
                cpu: overcommit.cpu.map(|ratio| ratio.to_string()),
                memory: overcommit.memory.map(|ratio| ratio.to_string()),
            },
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
fn shares<T>(allocated: Option<T>, schedulable: Option<T>, show: fn(T) -> String) -> String {
    match (allocated.map(show), schedulable.map(show)) {
        (None, None) => ABSENT.to_owned(),
        (allocated, schedulable) => format!("{}/{}", or_absent(allocated), or_absent(schedulable)),
    }
}

struct One {
    node: Node,
    events: Table,
    now: Timestamp,
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
        page.fact_if("Enrollment", self.pending_grant(&status));
        page.fact("Release", status.session.as_ref().map(|session| session.version.clone()).unwrap_or_default());
        page.fact("Session", self.session(&status, wide));
        page.fact_if("Labels", Some(self.labels(&status)));
        page.fact_if("Drain", drain_requested(&self.node).then_some("requested"));
        page.fact_if("Isolated", is_isolated(&status).then_some("yes"));
        page.fact_if("Quarantine", status.quarantine.as_ref().map(|quarantine| quarantine.message.clone()));
        // A host that has never been here has reported nothing.
        if status.session.is_some() {
            self.amounts(&mut page, &status, wide);
        }
        if wide {
            page.fact("Admission", status.admission.as_ref().map(enum_word).unwrap_or_default());
            page.fact("Held objects", or_absent(status.report.as_ref().map(|report| report.held_objects)));
            page.fact("Incarnation", or_absent(status.incarnation));
            page.fact("Session ID", status.session.as_ref().map(|session| session.id.clone()).unwrap_or_default());
            page.fact("Boot ID", status.session.as_ref().map(|session| session.boot_id.clone()).unwrap_or_default());
            page.fact("Registration", self.node.resource_version().unwrap_or_default());
            page.fact("Created", when(self.node.creation_timestamp().as_ref(), self.now, wide));
        }
        page.section("Storage pools", pools(&status));
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
        let instances = or_absent(status.report.as_ref().map(|report| report.instances));
        let slots = status.slots.map(|slots| format!(" of {slots} slots")).unwrap_or_default();
        page.fact("Instances", instances + &slots);
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
        if status.used_secret_hash.as_ref() == Some(&grant.secret_hash) {
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

fn drain_requested(node: &Node) -> bool {
    node.spec.drain.as_ref().is_some_and(|drain| drain.requested)
}

/// The command that prints a token for a host that is to become this node.
fn issue(node: &str) -> String {
    format!("{} enrollment issue {node}", crate::errors::program())
}

/// CPU and memory in one line; one sign when neither is known.
fn both(cpu: &str, memory: &str) -> String {
    if cpu == ABSENT && memory == ABSENT { ABSENT.to_owned() } else { format!("{cpu} CPU, {memory} memory") }
}

fn pools(status: &NodeStatus) -> Table {
    let mut table = Table::new(["POOL", "DEFAULT", "AVAILABLE", "FREE/CAPACITY"]);
    for pool in &status.pools {
        table.row(vec![
            pool.id.to_string(),
            yes_no(pool.default).to_owned(),
            yes_no(pool.available).to_owned(),
            shares(pool.free, pool.capacity, binary),
        ]);
    }
    table
}

fn yes_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

struct Many {
    listed: Listed<Node>,
    now: Timestamp,
}

#[derive(Serialize)]
struct ManyView {
    nodes: Vec<View>,
    next_page_token: Option<String>,
}

impl Present for Many {
    fn view(&self) -> impl Serialize {
        ManyView {
            nodes: self.listed.items.iter().map(View::from).collect(),
            next_page_token: self.listed.next_page_token.clone(),
        }
    }

    fn names(&self) -> Vec<String> {
        self.listed.items.iter().map(ResourceExt::name_any).collect()
    }

    fn text(&self, wide: bool) -> String {
        let mut table = Table::new([
            "NODE",
            "STATUS",
            "RELEASE",
            "CLOCK",
            "INSTANCES",
            "CPU_ALLOC/SCHED",
            "MEM_ALLOC/SCHED",
            "MEM_TIGHT",
            "AGE",
        ]);
        if wide {
            table = table.columns(["INCARNATION", "REG_VERSION"]);
        }
        for node in &self.listed.items {
            let status = node.status.clone().unwrap_or_default();
            let schedulable = Measured::from(status.schedulable.as_ref());
            let allocated = Measured::from(status.allocated.as_ref());
            let mut row = vec![
                node.name_any(),
                status.phase.as_ref().map(enum_word).unwrap_or_default(),
                status.session.as_ref().map(|session| session.version.clone()).unwrap_or_default(),
                // Neither is measured yet.
                ABSENT.to_owned(),
                or_absent(status.report.as_ref().map(|report| report.instances)),
                shares(allocated.cpu, schedulable.cpu, cores),
                shares(allocated.memory, schedulable.memory, binary),
                ABSENT.to_owned(),
                age(node.creation_timestamp().as_ref(), self.now),
            ];
            if wide {
                row.push(or_absent(status.incarnation));
                row.push(node.resource_version().unwrap_or_default());
            }
            table.row(row);
        }
        table.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes() -> Vec<Node> {
        let ready = serde_json::json!({
            "metadata": { "name": "node-1", "resourceVersion": "77", "creationTimestamp": "1970-01-01T00:00:00Z" },
            "spec": { "drain": { "requested": true } },
            "status": {
                "phase": "Ready", "admission": "Admitted", "incarnation": 2,
                "session": {
                    "id": "s", "alive": true, "incarnation": 2, "bootId": "b", "version": "unreleased",
                    "startedAt": "1970-01-01T00:00:00Z",
                },
                "capacity": { "cpu": "4", "memory": "8Gi" },
                "schedulable": { "cpu": "8", "memory": "8Gi" },
                "allocated": { "cpu": "1500m", "memory": "320Mi" },
                "report": { "time": "1970-01-01T00:00:00Z", "instances": 2, "heldObjects": 3 },
                "isolation": { "incarnation": 1, "state": "Finished" }, "hostLabels": { "zone": "a" },
                "conditions": [
                    { "type": "Ready", "status": "True", "reason": "SessionLive", "message": "it lives", "lastTransitionTime": "1970-01-01T00:00:00Z" },
                    { "type": "Drained", "status": "False", "reason": "Draining", "message": "running here: 2", "lastTransitionTime": "1970-01-01T00:01:00Z" },
                ],
            },
        });
        let pending = serde_json::json!({ "metadata": { "name": "node-2" }, "spec": {} });
        [ready, pending].map(|json| serde_json::from_value(json).unwrap()).into()
    }

    #[test]
    fn the_table_of_nodes() {
        let now = Timestamp::from_second(90).unwrap();
        let many = Many { listed: Listed { items: nodes(), next_page_token: None }, now };
        let expected = "\
NODE     STATUS   RELEASE      CLOCK   INSTANCES   CPU_ALLOC/SCHED   MEM_ALLOC/SCHED   MEM_TIGHT   AGE   INCARNATION   REG_VERSION
node-1   READY    unreleased   -       2           1.5/8             320.0Mi/8.0Gi     -           90s   2             77
node-2   -        -            -       -           -                 -                 -           -     -             -
";
        assert_eq!(many.text(true), expected);
        assert!(!many.text(false).contains("REG_VERSION"));
    }

    #[test]
    fn the_page_of_a_node_shows_what_is_not_as_usual() {
        let now = Timestamp::from_second(90).unwrap();
        let [ready, pending] = nodes().try_into().unwrap();
        let expected = "\
Node:          node-1
Status:        READY
Release:       unreleased
Session:       alive for 90s
Labels:        zone=a (of the host)
Drain:         requested
Capacity:      4 CPU, 8.0Gi memory
Allocated:     1.5/8 CPU, 320.0Mi/8.0Gi memory
Instances:     2
Last report:   90s ago

Conditions:
  TYPE      STATUS   AGE   REASON     MESSAGE
  Drained   False    30s   Draining   running here: 2
";
        assert_eq!(One { node: ready, events: Table::default(), now }.text(false), expected);
        let expected = "\
Node:      node-2
Status:    -
Release:   -
Session:   -
";
        assert_eq!(One { node: pending, events: Table::default(), now }.text(false), expected);
    }

    #[test]
    fn the_json_of_a_node() {
        let view = serde_json::to_value(View::from(&nodes()[0])).unwrap();
        assert_eq!(view["node_id"], "node-1");
        assert_eq!(view["status"], "READY");
        assert_eq!(view["admission"], "ADMITTED");
        assert_eq!(view["drain_requested"], true);
        assert_eq!(view["isolated"], false, "an isolation of an older incarnation is over");
        assert_eq!(view["registration_version"], "77");
        assert_eq!(view["allocated"], serde_json::json!({ "cpu_millis": 1500, "memory_bytes": 335_544_320 }));
        assert_eq!(view["overcommit"], serde_json::json!({ "cpu": null, "memory": null }));
        assert_eq!(view["session"]["session_id"], "s");
        assert_eq!(view["report"]["held_objects"], 3);
        assert_eq!(view["host_labels"], serde_json::json!({ "zone": "a" }));
    }
}
