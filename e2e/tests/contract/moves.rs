//! When an object may be asked to move.

use serde_json::{Value, json};

use super::case::{Accepted, Case, Refused, change, create, executing};

fn moving(state: &str) -> Value {
    json!({"move": {"to": "a", "state": state, "startedAt": "2026-01-01T00:00:00Z"}})
}

pub fn moves() -> Vec<Case> {
    let volume = || json!({"size": "1Gi"});
    let workspace = || json!({"template": "t"});
    let to = |pool: &str| json!({"spec": {"move": {"to": pool, "requestId": "r"}}});
    let granted = json!({"grantedFor": {"workspaceUid": "w", "instanceId": "inst-01k6zzzzzzzzzzzzzzzzzzzzzz"}});
    let before = || json!({"size": "1Gi", "move": {"to": "a", "requestId": "r"}});
    let unfinished = &["spec.move", "the move before is not finished"];
    vec![
        create("from the start", "Volume", before(), Accepted),
        create("no name of a pool", "Volume", json!({"size": "1Gi", "move": {"to": "A pool"}}), Refused(&["move.to"])),
        change("a Volume that nobody uses", "Volume", volume(), Value::Null, to("b"), Accepted),
        change(
            "one that is in use",
            "Volume",
            volume(),
            granted,
            to("b"),
            Refused(&["only while no Workspace uses it"]),
        ),
        change("a layer that rests", "Workspace", workspace(), json!({"phase": "Stopped"}), to("b"), Accepted),
        change("a layer in use", "Workspace", workspace(), executing(), to("b"), Refused(&["holds no execution"])),
        change("an id used twice", "Volume", before(), Value::Null, to("b"), Refused(&["choose a new requestId"])),
        change("another while one waits", "Volume", volume(), moving("Pending"), to("b"), Accepted),
        change("another while one copies", "Volume", volume(), moving("Copying"), to("b"), Refused(unfinished)),
        change(
            "another while one is cleared away",
            "Workspace",
            workspace(),
            moving("Removing"),
            to("b"),
            Refused(unfinished),
        ),
        change("another afterwards", "Volume", volume(), moving("Finished"), to("b"), Accepted),
        change(
            "a copying one is taken back",
            "Volume",
            before(),
            moving("Copying"),
            json!({"spec": {"move": null}}),
            Accepted,
        ),
    ]
}
