//! The life of a node, its commands, and counters that never fall.

use serde_json::{Value, json};

use super::case::{Accepted, Case, Refused, change, create, isolation, named, session};

pub fn counters() -> Vec<Case> {
    let status = |status: Value| json!({"status": status});
    vec![
        change(
            "a term grows",
            "Workspace",
            json!({"template": "t"}),
            json!({"term": 3}),
            status(json!({"term": 4})),
            Accepted,
        ),
        change(
            "a term does not fall",
            "Workspace",
            json!({"template": "t"}),
            json!({"term": 3}),
            status(json!({"term": 2})),
            Refused(&["term never falls"]),
        ),
        change(
            "a term is not lost",
            "Volume",
            json!({"size": "1Gi"}),
            json!({"term": 3}),
            status(json!({"term": null})),
            Refused(&["term never falls"]),
        ),
        change(
            "a layer's epoch does not fall",
            "Workspace",
            json!({"template": "t"}),
            json!({"epoch": 3}),
            status(json!({"epoch": 2})),
            Refused(&["epoch never falls"]),
        ),
        change(
            "a Volume's epoch does not fall",
            "Volume",
            json!({"size": "1Gi"}),
            json!({"epoch": 3}),
            status(json!({"epoch": 2})),
            Refused(&["epoch never falls"]),
        ),
        change(
            "an id stays",
            "Workspace",
            json!({"template": "t"}),
            json!({"id": "ws-01k6zzzzzzzzzzzzzzzzzzzzzz"}),
            status(json!({"id": "ws-01k6zzzzzzzzzzzzzzzzzzzzz0"})),
            Refused(&["status.id never changes"]),
        ),
        change(
            "a pool's marker stays",
            "StoragePool",
            json!({}),
            json!({"uid": "a"}),
            status(json!({"uid": "b"})),
            Refused(&["status.uid"]),
        ),
        change(
            "an incarnation does not fall",
            "Node",
            json!({}),
            session(false),
            status(json!({"incarnation": 2})),
            Refused(&["incarnation never falls"]),
        ),
    ]
}

pub fn nodes() -> Vec<Case> {
    let drained = json!({"conditions": [{"type": "Drained", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
    let retire = || json!({"spec": {"retirement": {}}});
    let drain = |requested: bool| json!({"drain": {"requested": requested}});
    vec![
        change("isolate a silent node", "Node", json!({}), session(false), isolation(3, true), Accepted),
        change(
            "isolate a live node",
            "Node",
            json!({}),
            session(true),
            isolation(3, true),
            Refused(&["spec.isolation", "live control session"]),
        ),
        change(
            "isolate another incarnation",
            "Node",
            json!({}),
            session(false),
            isolation(2, true),
            Refused(&["current status.incarnation"]),
        ),
        change(
            "isolate without the confirmation",
            "Node",
            json!({}),
            session(false),
            isolation(3, false),
            Refused(&["confirmHostCannotWrite must be true"]),
        ),
        change(
            "isolate without a word of the host",
            "Node",
            json!({}),
            session(false),
            json!({"spec": {"isolation": {"incarnation": 3}}}),
            Refused(&["confirmHostCannotWrite must be true"]),
        ),
        change(
            "retire a node that is not empty",
            "Node",
            json!({}),
            session(false),
            retire(),
            Refused(&["spec.retirement", "drained"]),
        ),
        change("retire a drained node", "Node", drain(true), drained.clone(), retire(), Accepted),
        change(
            "retire a node that never had a session",
            "Node",
            json!({}),
            json!({"admission": "Admitted"}),
            retire(),
            Accepted,
        ),
        change(
            "retire a drained node whose drain is cancelled",
            "Node",
            drain(false),
            drained.clone(),
            retire(),
            Refused(&["spec.retirement", "drain it"]),
        ),
        change(
            "retire a drained node and cancel its drain",
            "Node",
            drain(true),
            drained.clone(),
            json!({"spec": {"retirement": {}, "drain": {"requested": false}}}),
            Refused(&["spec.retirement", "drain it"]),
        ),
        change(
            "retire an isolated node",
            "Node",
            json!({}),
            json!({"incarnation": 3, "isolation": {"incarnation": 3, "state": "Finished"}}),
            retire(),
            Accepted,
        ),
        change(
            "retire a node whose isolation goes on",
            "Node",
            json!({}),
            json!({"incarnation": 3, "isolation": {"incarnation": 3, "state": "InProgress"}}),
            retire(),
            Refused(&["spec.retirement", "isolated"]),
        ),
        change(
            "nothing after retirement",
            "Node",
            json!({"retirement": {}, "drain": {"requested": true}}),
            drained,
            json!({"spec": {"drain": {"requested": false}}}),
            Refused(&["retired, which is final"]),
        ),
        change(
            "a drain's id again with another content",
            "Node",
            json!({"drain": {"requested": true, "requestId": "a"}}),
            Value::Null,
            json!({"spec": {"drain": {"requested": false}}}),
            Refused(&["already used"]),
        ),
        create(
            "a grant with a malformed hash",
            "Node",
            json!({"enrollment": {"secretHash": "abc", "expiresAt": "2026-01-01T00:00:00Z"}}),
            Refused(&["spec.enrollment.secretHash"]),
        ),
        named(create("a node id in capitals is refused", "Node", json!({}), Refused(&["Node-A"])), "Node-A"),
    ]
}

/// What replays of commands rest upon.
pub fn commands() -> Vec<Case> {
    let drain = |id: &str| json!({"drain": {"requested": true, "requestId": id}});
    let spec = |part: Value| json!({ "spec": part });
    let slots = |id: &str, slots: u32| {
        let digest = format!("{slots:016x}");
        json!({"slots": slots, "slotsRequest": {"requestId": id, "digest": digest}})
    };
    let recorded = |ids: &[&str]| {
        let record = |id: &&str| json!({"id": id, "operation": "drain", "digest": "0123456789abcdef", "result": "Succeeded", "startedAt": "2026-01-01T00:00:00Z"});
        json!({ "commands": ids.iter().map(record).collect::<Vec<_>>() })
    };
    vec![
        change(
            "a command after one that is on record",
            "Node",
            drain("a"),
            recorded(&["a"]),
            spec(drain("b")),
            Accepted,
        ),
        change(
            "a command in place of one that is not on record",
            "Node",
            drain("a"),
            recorded(&["b"]),
            spec(drain("c")),
            Refused(&["not in status.commands yet", "try again"]),
        ),
        change(
            "a drain is taken back before it is on record",
            "Node",
            drain("a"),
            Value::Null,
            json!({"spec": {"drain": null}}),
            Refused(&["not in status.commands yet"]),
        ),
        change("another part beside it", "Node", drain("a"), Value::Null, spec(slots("b", 3)), Accepted),
        change(
            "another part with the same id",
            "Node",
            drain("a"),
            Value::Null,
            spec(slots("a", 3)),
            Refused(&["same requestId", "id of its own"]),
        ),
        create(
            "two parts with the same id from the beginning",
            "Node",
            json!({"drain": {"requested": true, "requestId": "a"}, "revocation": {"requestId": "a"}}),
            Refused(&["same requestId"]),
        ),
        change(
            "an id that an older command has",
            "Node",
            drain("b"),
            recorded(&["a", "b"]),
            spec(drain("a")),
            Refused(&["already used by another command", "choose a new requestId"]),
        ),
        change(
            "an id that a command of another kind has",
            "Node",
            json!({}),
            recorded(&["a"]),
            spec(slots("a", 3)),
            Refused(&["already used by another command"]),
        ),
        change(
            "a changed command under its id",
            "Node",
            slots("a", 3),
            recorded(&["a"]),
            spec(slots("a", 4)),
            Refused(&["already used with another content"]),
        ),
    ]
}
