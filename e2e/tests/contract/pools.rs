//! Storage pools: their capacity, their loss, their commands.

use serde_json::{Value, json};

use super::case::{Accepted, Case, Refused, change, create};

pub fn pools() -> Vec<Case> {
    let lost = |id: &str| json!({"confirmDataIsGone": true, "requestId": id});
    let member = |available: bool| json!({"members": [{"node": "node-1", "available": available}]});
    let spec = |spec: Value| json!({"spec": spec});
    let record = |id: &str| {
        json!({"commands": [{"id": id, "operation": "set-capacity", "digest": "0123456789abcdef",
            "result": "Succeeded", "startedAt": "2026-01-01T00:00:00Z"}]})
    };
    let request = |id: &str| json!({"requestId": id, "digest": "0123456789abcdef"});
    vec![
        create("a capacity may be larger than any disk", "StoragePool", json!({"capacity": "2Pi"}), Accepted),
        create(
            "a capacity is whole MiB",
            "StoragePool",
            json!({"capacity": "100M"}),
            Refused(&["whole number of MiB"]),
        ),
        change(
            "a pool that nobody reaches can be given up",
            "StoragePool",
            json!({}),
            member(false),
            spec(json!({"lost": lost("a")})),
            Accepted,
        ),
        change(
            "a pool that a member reaches cannot",
            "StoragePool",
            json!({}),
            member(true),
            spec(json!({"lost": lost("a")})),
            Refused(&["spec.lost", "a member node reaches the pool"]),
        ),
        change(
            "a loss is confirmed",
            "StoragePool",
            json!({}),
            json!(null),
            spec(json!({"lost": {"confirmDataIsGone": false}})),
            Refused(&["confirmDataIsGone must be true"]),
        ),
        change(
            "a loss is not taken back",
            "StoragePool",
            json!({"lost": lost("a")}),
            json!(null),
            spec(json!({"lost": null})),
            Refused(&["declared lost, which is final"]),
        ),
        change(
            "a loss stays the same",
            "StoragePool",
            json!({"lost": lost("a")}),
            json!(null),
            spec(json!({"lost": lost("b")})),
            Refused(&["declared lost, which is final"]),
        ),
        change(
            "a command that is not on record is not replaced",
            "StoragePool",
            json!({"capacityRequest": request("a")}),
            json!(null),
            spec(json!({"capacityRequest": request("b")})),
            Refused(&["not in status.commands yet"]),
        ),
        change(
            "a command that is on record is",
            "StoragePool",
            json!({"capacityRequest": request("a")}),
            record("a"),
            spec(json!({"capacityRequest": request("b")})),
            Accepted,
        ),
        change(
            "an id names one command",
            "StoragePool",
            json!({}),
            record("a"),
            spec(json!({"capacityRequest": request("a")})),
            Refused(&["requestId was already used"]),
        ),
    ]
}
