//! How a Workspace is shown.

use jiff::Timestamp;
use kibo_crds::{
    Workspace,
    workspace::{WorkspacePhase, WorkspaceStatus},
};
use serde_json::json;

use super::{page::One, table::Many, view::View};
use crate::{
    client::Listed,
    output::{Present as _, Table},
};

fn available() -> Workspace {
    serde_json::from_value(json!({
            "metadata": { "name": "dev", "namespace": "default", "creationTimestamp": "1970-01-01T00:00:00Z" },
            "spec": {
                "template": "debian-12",
                "volume": { "new": { "size": "1Gi" }, "mountPath": "/data" },
                "power": { "state": "Running", "requestId": "a", "whenUnplaceable": "Fail" },
            },
            "status": {
                "id": "ws-01kb8z4w3w0000000000000000", "phase": "Available",
                "power": {
                    "consumed": { "state": "Running", "requestId": "a", "whenUnplaceable": "Fail" },
                    "consumedAt": "1970-01-01T00:00:01Z",
                },
                "execution": {
                    "instanceId": "inst-01kb8z4w3w0000000000000001", "node": "node-1", "incarnation": 1,
                    "cpuMilli": 1000, "memoryBytes": 335_544_320, "lastSeq": 2, "startedAt": "1970-01-01T00:00:02Z",
                },
                "writableLayer": { "pool": "local-a", "size": 1_073_741_824, "created": true },
                "conditions": [
                    { "type": "Available", "status": "True", "reason": "GuestReady", "message": "", "lastTransitionTime": "1970-01-01T00:00:03Z" },
                    { "type": "NodeReachable", "status": "False", "reason": "NodeOffline", "message": "node-1 is silent", "lastTransitionTime": "1970-01-01T00:00:03Z" },
                ],
            },
        }))
        .unwrap()
}

fn failed() -> Workspace {
    serde_json::from_value(json!({
        "metadata": { "name": "big", "namespace": "team" },
        "spec": { "template": "debian-12" },
        "status": { "phase": "Failed", "reason": "ResourceExhausted", "message": "no node has 1Ti of memory" },
    }))
    .unwrap()
}

fn now() -> Timestamp {
    Timestamp::from_second(120).unwrap()
}

#[test]
fn the_table_of_workspaces() {
    let listed = Listed { items: vec![available(), failed()], next_page_token: None };
    let mut many = Many { listed, namespaces: false, now: now() };
    let expected = "\
NAME   STATE       REASON               TEMPLATE    AGE
dev    AVAILABLE   -                    debian-12   2m
big    FAILED      RESOURCE_EXHAUSTED   debian-12   -
";
    assert_eq!(many.text(false), expected);
    many.namespaces = true;
    let expected = "\
NAMESPACE   NAME   STATE       REASON               TEMPLATE    AGE   ID                              INSTANCE                          NODE     VOLUME
default     dev    AVAILABLE   -                    debian-12   2m    ws-01kb8z4w3w0000000000000000   inst-01kb8z4w3w0000000000000001   node-1   dev
team        big    FAILED      RESOURCE_EXHAUSTED   debian-12   -     -                               -                                 -        -
";
    assert_eq!(many.text(true), expected);
    assert_eq!(many.names(), ["ws-01kb8z4w3w0000000000000000", "big"]);
}

#[test]
fn the_page_says_what_it_is_where_it_runs_and_what_is_wrong() {
    let mut events = Table::new(["AGE", "TYPE", "REASON", "MESSAGE"]);
    events.row(["2m", "Normal", "Started", "on node-1"].map(str::to_owned).into());
    let one = One { workspace: available(), template: None, volume: None, events, now: now() };
    let expected = "\
Name:             dev
Namespace:        default
ID:               ws-01kb8z4w3w0000000000000000
State:            AVAILABLE for 117s
Node:             node-1
Template:         debian-12
CPU:              what the Template says
Memory:           what the Template says
Writable layer:   1Gi in pool local-a
Volume:           dev at /data, 1Gi, not made yet
Created:          2m ago
Started:          118s ago

Conditions:
  TYPE            STATUS   AGE    REASON        MESSAGE
  NodeReachable   False    117s   NodeOffline   node-1 is silent

Events:
  AGE   TYPE     REASON    MESSAGE
  2m    Normal   Started   on node-1
";
    assert_eq!(one.text(false), expected);
}

#[test]
fn the_node_is_that_of_the_execution_absent_without_one_and_unknown_to_an_older_control_plane() {
    let shown = |change: fn(&mut WorkspaceStatus)| {
        let mut workspace = available();
        change(workspace.status.as_mut().unwrap());
        let one = One { workspace, template: None, volume: None, events: Table::default(), now: now() };
        let lines = one.text(true);
        let line = |name: &str| lines.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        (line("Node:"), line("Instance:"))
    };
    let is = |node: &str, instance: &str| (node.to_owned(), instance.to_owned());
    assert_eq!(shown(|_| ()), is("node-1", "inst-01kb8z4w3w0000000000000001"));
    assert_eq!(shown(|status| status.execution = None), is("unknown", "-"));
    let stopped = |status: &mut WorkspaceStatus| {
        (status.execution, status.phase) = (None, Some(WorkspacePhase::Stopped));
    };
    assert_eq!(shown(stopped), is("-", "-"));
}

#[test]
fn a_failed_workspace_says_why() {
    let one = One { workspace: failed(), template: None, volume: None, events: Table::default(), now: now() };
    assert!(
        one.text(false)
            .contains("State:            FAILED (RESOURCE_EXHAUSTED)\n                  no node has 1Ti of memory\n"),
        "{}",
        one.text(false)
    );
}

#[test]
fn the_json_of_a_workspace() {
    let view = serde_json::to_value(View::from(&available())).unwrap();
    assert_eq!(view["workspace_id"], "ws-01kb8z4w3w0000000000000000");
    assert_eq!(view["state"], "AVAILABLE");
    assert_eq!(view["reason"], json!(null));
    assert_eq!(view["node_id"], "node-1");
    assert_eq!(view["execution"]["cpu_millis"], 1000);
    assert_eq!(
        view["writable_layer"],
        json!({ "size": "1Gi", "grows_to": null, "pool_id": "local-a", "created": true })
    );
    assert_eq!(view["volume"], json!({ "name": "dev", "mount_path": "/data", "delete_with_workspace": false }));
    assert_eq!(
        view["power"],
        json!({
            "state": "RUNNING", "command_id": "a", "stop_mode": null, "node_id": null,
            "when_unplaceable": "FAIL", "consumed": true,
        })
    );
    assert_eq!(view["conditions"][1]["type"], "NODE_REACHABLE");
    assert_eq!(view["conditions"][1]["reason"], "NODE_OFFLINE");
}
