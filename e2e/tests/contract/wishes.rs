//! What a stopped Workspace, or a Volume, may be asked to become.

use serde_json::{Value, json};

use super::case::{Accepted, Case, Refused, change, executing, volume};

/// Sizes of what exists, and of what was refused; bindings of what does not run.
pub fn wishes() -> Vec<Case> {
    let layer = |size: &str| json!({"template": "t", "writableLayer": {"size": size}});
    let to = |size: &str| json!({"spec": {"writableLayer": {"size": size}}});
    let made = json!({"writableLayer": {"pool": "p", "size": 1 << 30, "created": true}});
    let claim = |name: &str| json!({"claim": name, "mountPath": "/data"});
    let in_use = json!({"grantedFor": {"workspaceUid": "u", "instanceId": "inst-01k6zzzzzzzzzzzzzzzzzzzzzz"}});
    let grows_only = &["spec.writableLayer.size", "can only grow"];
    vec![
        change("a layer grows", "Workspace", layer("1Gi"), made.clone(), to("2Gi"), Accepted),
        change("a size that was refused is lowered", "Workspace", layer("9Ti"), made.clone(), to("1Gi"), Accepted),
        change("but not below what exists", "Workspace", layer("9Ti"), made.clone(), to("1023Mi"), Refused(grows_only)),
        change(
            "also from the Template's",
            "Workspace",
            json!({"template": "t"}),
            made,
            to("512Mi"),
            Refused(grows_only),
        ),
        change(
            "a request of the same name with another size",
            "Workspace",
            json!({"template": "t", "writableLayer": {"size": "1Gi", "requestId": "a"}}),
            Value::Null,
            to("2Gi"),
            Refused(&["requestId was already used with another size"]),
        ),
        change(
            "a Volume's refused size is lowered",
            "Volume",
            json!({"size": "9Ti"}),
            json!({"size": 1 << 30}),
            json!({"spec": {"size": "1Gi"}}),
            Accepted,
        ),
        change(
            "a Volume does not shrink below its image",
            "Volume",
            json!({"size": "9Ti"}),
            json!({"size": 1 << 30}),
            json!({"spec": {"size": "512Mi"}}),
            Refused(&["spec.size", "can only grow"]),
        ),
        change(
            "a Volume in use keeps its size",
            "Volume",
            json!({"size": "1Gi"}),
            in_use,
            json!({"spec": {"size": "2Gi"}}),
            Refused(&["spec.size", "no Workspace runs with the Volume"]),
        ),
        change(
            "a binding while it is stopped",
            "Workspace",
            json!({"template": "t"}),
            json!({"phase": "Stopped"}),
            json!({"spec": {"volume": claim("v")}}),
            Accepted,
        ),
        change(
            "no binding any more",
            "Workspace",
            volume(claim("v")),
            json!({"phase": "Stopped"}),
            json!({"spec": {"volume": null}}),
            Accepted,
        ),
        change(
            "a binding while it runs",
            "Workspace",
            volume(claim("v")),
            executing(),
            json!({"spec": {"volume": {"mountPath": "/other"}}}),
            Refused(&["spec.volume", "holds no execution"]),
        ),
        change(
            "a binding before the import is complete",
            "Workspace",
            json!({"template": "t", "import": {"archive": "ab".repeat(32)}, "volume": claim("v")}),
            json!({"phase": "Creating"}),
            json!({"spec": {"volume": {"claim": "w"}}}),
            Refused(&["spec.volume", "import is complete"]),
        ),
        change(
            "and afterwards",
            "Workspace",
            json!({"template": "t", "import": {"archive": "ab".repeat(32)}, "volume": claim("v")}),
            json!({"phase": "Stopped", "imported": true}),
            json!({"spec": {"volume": {"claim": "w"}}}),
            Accepted,
        ),
        change(
            "another archive",
            "Workspace",
            json!({"template": "t", "import": {"archive": "ab".repeat(32)}}),
            json!({"phase": "Creating"}),
            json!({"spec": {"import": {"archive": "cd".repeat(32)}}}),
            Refused(&["import is for the creation"]),
        ),
        change(
            "a new Volume later",
            "Workspace",
            json!({"template": "t"}),
            Value::Null,
            json!({"spec": {"volume": {"new": {"size": "1Gi"}, "mountPath": "/data"}}}),
            Refused(&["volume.new is for the creation"]),
        ),
        change(
            "a claim in place of the new Volume",
            "Workspace",
            volume(json!({"new": {"size": "1Gi"}, "mountPath": "/data"})),
            Value::Null,
            json!({"spec": {"volume": {"new": null, "claim": "v"}}}),
            Accepted,
        ),
        change(
            "another path for the new Volume",
            "Workspace",
            volume(json!({"new": {"size": "1Gi"}, "mountPath": "/data"})),
            Value::Null,
            json!({"spec": {"volume": {"mountPath": "/other", "deleteWithWorkspace": true}}}),
            Accepted,
        ),
    ]
}
