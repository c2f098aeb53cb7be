use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{Bytes, MilliCpu, Node};

use super::{list::Many, page::One, view::View};
use crate::{
    client::Listed,
    output::{Present as _, Table},
};

fn nodes() -> Vec<Node> {
    let ready = serde_json::json!({
        "metadata": { "name": "node-1", "resourceVersion": "77", "creationTimestamp": "1970-01-01T00:00:00Z" },
        "spec": { "drain": { "requested": true } },
        "status": {
            "phase": "Ready", "admission": "Admitted", "incarnation": 2,
            "session": {
                "id": "s", "alive": true, "incarnation": 2, "bootId": "b", "version": "unreleased", "sourceRevision": "1f2e3d",
                "startedAt": "1970-01-01T00:00:00Z",
            },
            "clock": {
                "offsetMillis": -1234, "uncertaintyMillis": 2, "kernelSynchronized": false, "over": false,
                "shown": "-1.2s", "measuredAt": "1970-01-01T00:00:00Z",
            },
            "capacity": { "cpu": "4", "memory": "8Gi" },
            "schedulable": { "cpu": "8", "memory": "8Gi" },
            "allocated": { "cpu": "1500m", "memory": "320Mi" },
            "overcommit": { "cpu": "2", "cpuSource": "Node", "memory": "1", "memorySource": "Default" },
            "hostUsage": {
                "sampledAt": "1970-01-01T00:01:20Z", "memoryAvailableBytes": 838_860_800_u64, "memoryTotalBytes": 8_589_934_592_u64,
                "memoryTightSince": "1970-01-01T00:00:30Z", "cpuIdle": "97.31", "cpuPressureSome": "1.5",
                "cpuPressureFull": "0", "memoryPressureSome": "0",
            },
            "report": { "time": "1970-01-01T00:00:00Z", "instances": 2, "heldObjects": 3, "settingsRevision": 70 },
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
node-1   READY    unreleased   -1.2s   2           1.5/8             320.0Mi/8.0Gi     yes         90s   2             77
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
Admission:     ADMITTED
Labels:        zone=a (of the host)
Drain:         requested
Capacity:      4 CPU, 8.0Gi memory
Schedulable:   8 CPU, 8.0Gi memory
Overcommit:    CPU x 2 (of this node), memory x 1 (cluster-wide default)

Latest session:
  ITEM                VALUE
  Alive               yes, for 90s
  Release             unreleased
  Revision            1f2e3d
  Clock               -1.2s
  Clock uncertainty   2 ms
  Kernel clock        not synchronized

Latest full report:
  ITEM               VALUE
  Reported           90s ago
  Allocated CPU      1.5/8
  Allocated memory   320.0Mi/8.0Gi
  Instances          2
  Held objects       3

Host usage:
  ITEM               VALUE
  Memory available   800.0Mi/8.0Gi
  Memory tight       yes, for 60s
  CPU idle           97.31 %
  CPU pressure       some 1.5 %, full 0 %
  Memory pressure    some 0 %, full -

Conditions:
  TYPE      STATUS   AGE   REASON     MESSAGE
  Drained   False    30s   Draining   running here: 2
";
    assert_eq!(One { node: ready, events: Table::default(), now }.text(false), expected);
    let expected = "\
Node:             node-2
Status:           -
Admission:        -
Latest session:   -
";
    assert_eq!(One { node: pending, events: Table::default(), now }.text(false), expected);
}

#[test]
fn what_tells_one_state_of_the_registration_from_another_is_on_the_wide_page_alone() {
    let mut node = nodes().remove(0);
    let page = |node: &Node, wide| {
        let one = One { node: node.clone(), events: Table::default(), now: Timestamp::from_second(90).unwrap() };
        let lines = one.text(wide);
        lines.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
    };
    for line in ["Registration version: 77", "Incarnation 2", "Session ID s", "Reported version 70"] {
        assert!(page(&node, true).iter().any(|it| it == line), "{line}: {:#?}", page(&node, true));
        assert!(!page(&node, false).iter().any(|it| it == line), "{line}: {:#?}", page(&node, false));
    }
    // Without a session nothing is known of a clock.
    let status = node.status.as_mut().unwrap();
    let session = status.session.as_mut().unwrap();
    (session.alive, session.ended_at) = (false, Some(Time(Timestamp::from_second(60).unwrap())));
    (status.clock, status.host_usage) = (None, None);
    let shown = page(&node, false);
    for line in ["Alive no, ended 30s ago", "Clock -", "Clock uncertainty -", "Kernel clock -"] {
        assert!(shown.iter().any(|it| it == line), "{line}: {shown:#?}");
    }
    assert!(!shown.iter().any(|it| it == "Host usage:"), "{shown:#?}");
}

#[test]
fn the_wide_page_has_the_figures_by_which_a_ratio_is_set() {
    let mut node = nodes().remove(0);
    let status = node.status.as_mut().unwrap();
    let usage = status.host_usage.as_mut().unwrap();
    (usage.vm_cpu_milli, usage.vm_memory_bytes) = (Some(MilliCpu(300)), Some(Bytes::mib(80)));
    status.allocated = Some(serde_json::from_value(serde_json::json!({ "cpu": "6", "memory": "320Mi" })).unwrap());
    let page = |node| One { node, events: Table::default(), now: Timestamp::from_second(90).unwrap() }.text(true);
    let expected = "
Overcommit figures:
  FIGURE                   CPU           MEMORY
  ratio                    2             1
  given out of the host    6/4 (150 %)   320.0Mi/8.0Gi (3 %)
  used by VMs of that      0.3/6 (5 %)   80.0Mi/320.0Mi (25 %)
  given out and not used   5.7           240.0Mi
  left on the host         97.31 %       800.0Mi
";
    let shown = page(node.clone());
    assert!(shown.contains(expected), "{shown}");
    node.status.as_mut().unwrap().host_usage = None;
    let shown = page(node);
    for line in
        ["used by VMs of that      -/6", "given out and not used   -             -", "left on the host         -"]
    {
        assert!(shown.contains(line), "{line}: {shown}");
    }
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
    let ratios = serde_json::json!({ "cpu": "2", "cpu_source": "NODE", "memory": "1", "memory_source": "DEFAULT" });
    assert_eq!(view["overcommit"], ratios);
    let usage = &view["host_usage"];
    assert_eq!((&usage["memory_tight"], &usage["cpu_idle"]), (&true.into(), &"97.31".into()));
    assert_eq!(
        (&usage["vm_cpu_millis"], &usage["memory_pressure_full"]),
        (&serde_json::Value::Null, &serde_json::Value::Null)
    );
    assert_eq!(view["session"]["session_id"], "s");
    assert_eq!(view["clock"]["offset_millis"], -1234);
    assert_eq!(view["report"]["held_objects"], 3);
    assert_eq!(view["report"]["reported_version"], "70");
    // What a host uses is shown of one node; of many, whether it is short of memory.
    let many = Many { listed: Listed { items: nodes(), next_page_token: None }, now: Timestamp::UNIX_EPOCH };
    let listed = serde_json::to_value(many.view()).unwrap();
    assert_eq!(listed["nodes"][0].get("host_usage"), None);
    assert_eq!((&view["memory_tight"], &listed["nodes"][0]["memory_tight"]), (&true.into(), &true.into()));
    assert_eq!(view["host_labels"], serde_json::json!({ "zone": "a" }));
}
