//! What a Workspace may ask for, and when.

use serde_json::{Value, json};

use super::case::{
    Accepted, Case, Refused, change, consumed, create, executing, named, template, template_with, volume, workspace,
};

pub fn immutability() -> Vec<Case> {
    let t = || template(json!(1), "256Mi", "1Gi");
    vec![
        change(
            "a Template stays",
            "Template",
            t(),
            Value::Null,
            json!({"spec": {"rootImage": "debian-13"}}),
            Refused(&["spec", "immutable"]),
        ),
        change(
            "a label of a Template may change",
            "Template",
            t(),
            Value::Null,
            json!({"metadata": {"labels": {"a": "b"}}}),
            Accepted,
        ),
        change(
            "spec.template stays",
            "Workspace",
            json!({"template": "t"}),
            Value::Null,
            json!({"spec": {"template": "u"}}),
            Refused(&["spec.template is immutable"]),
        ),
        change(
            "a Volume's pool stays",
            "Volume",
            json!({"size": "1Gi", "pool": "a"}),
            Value::Null,
            json!({"spec": {"pool": "b"}}),
            Refused(&["spec.pool is immutable"]),
        ),
        change(
            "a Volume's pool is not set later",
            "Volume",
            json!({"size": "1Gi"}),
            Value::Null,
            json!({"spec": {"pool": "b"}}),
            Refused(&["spec.pool is immutable"]),
        ),
        change(
            "a Volume grows",
            "Volume",
            json!({"size": "1Gi"}),
            Value::Null,
            json!({"spec": {"size": "2Gi"}}),
            Accepted,
        ),
        change(
            "a Volume does not shrink",
            "Volume",
            json!({"size": "1Gi"}),
            Value::Null,
            json!({"spec": {"size": "512Mi"}}),
            Refused(&["spec.size can only grow"]),
        ),
        change(
            "a layer does not shrink",
            "Workspace",
            json!({"template": "t", "writableLayer": {"size": "2Gi"}}),
            Value::Null,
            json!({"spec": {"writableLayer": {"size": "1Gi"}}}),
            Refused(&["spec.writableLayer.size", "can only grow"]),
        ),
        change(
            "resources stay while it runs",
            "Workspace",
            json!({"template": "t"}),
            executing(),
            json!({"spec": {"resources": {"cpu": 2}}}),
            Refused(&["spec.resources", "holds no execution"]),
        ),
        change(
            "resources change while it is stopped",
            "Workspace",
            json!({"template": "t"}),
            json!({"phase": "Stopped"}),
            json!({"spec": {"resources": {"cpu": 2}}}),
            Accepted,
        ),
        change(
            "the layer stays while it runs",
            "Workspace",
            json!({"template": "t"}),
            executing(),
            json!({"spec": {"writableLayer": {"size": "2Gi"}}}),
            Refused(&["spec.writableLayer", "holds no execution"]),
        ),
    ]
}

pub fn bindings() -> Vec<Case> {
    let path = |path: &str| volume(json!({"claim": "v", "mountPath": path}));
    let refused_path = &["spec.volume.mountPath", "must be an absolute path"];
    vec![
        create("a claim", "Workspace", path("/data"), Accepted),
        create(
            "a new Volume",
            "Workspace",
            volume(json!({"new": {"size": "1Gi"}, "mountPath": "/var/lib/x"})),
            Accepted,
        ),
        create(
            "claim and new",
            "Workspace",
            volume(json!({"claim": "v", "new": {"size": "1Gi"}, "mountPath": "/data"})),
            Refused(&["spec.volume", "exactly one of"]),
        ),
        create(
            "neither claim nor new",
            "Workspace",
            volume(json!({"mountPath": "/data"})),
            Refused(&["spec.volume", "exactly one of"]),
        ),
        create("a relative mount path", "Workspace", path("data"), Refused(refused_path)),
        create("the root as mount path", "Workspace", path("/"), Refused(refused_path)),
        create("a mount path that climbs", "Workspace", path("/a/../etc"), Refused(refused_path)),
        create("a mount path with a space", "Workspace", path("/a b"), Refused(refused_path)),
        create(
            "a root image with a slash",
            "Template",
            template_with("rootImage", json!("../x")),
            Refused(&["spec.rootImage"]),
        ),
        create(
            "an entrypoint without a program",
            "Template",
            template_with("entrypoint", json!({"command": []})),
            Refused(&["spec.entrypoint.command"]),
        ),
        create(
            "a relative working directory",
            "Template",
            template_with("entrypoint", json!({"command": ["/bin/true"], "workingDir": "x"})),
            Refused(&["spec.entrypoint.workingDir"]),
        ),
        create(
            "an unknown restart policy",
            "Template",
            template_with("entrypoint", json!({"command": ["/bin/true"], "restart": "Sometimes"})),
            Refused(&["spec.entrypoint.restart", "Sometimes"]),
        ),
        named(
            create(
                "a name of 64 characters",
                "Workspace",
                json!({"template": "t"}),
                Refused(&["at most 63 characters"]),
            ),
            "a123456789012345678901234567890123456789012345678901234567890123",
        ),
    ]
}

pub fn power() -> Vec<Case> {
    let running = || json!({"state": "Running"});
    let stopped = || json!({"state": "Stopped"});
    let to = |power: Value| json!({"spec": {"power": power}});
    let order = &["spec.power", "not consumed yet"];
    vec![
        create(
            "stopMode with Running",
            "Workspace",
            workspace(json!({"state": "Running", "stopMode": "Force"})),
            Refused(&["spec.power", "stopMode goes with state Stopped"]),
        ),
        create(
            "a pin with Stopped",
            "Workspace",
            workspace(json!({"state": "Stopped", "node": "n"})),
            Refused(&["spec.power", "go with state Running"]),
        ),
        create(
            "a pin that waits",
            "Workspace",
            workspace(json!({"state": "Running", "node": "n", "whenUnplaceable": "Wait"})),
            Refused(&["implies whenUnplaceable Fail"]),
        ),
        create(
            "an id with a space",
            "Workspace",
            workspace(json!({"state": "Running", "requestId": "a b"})),
            Refused(&["spec.power.requestId"]),
        ),
        change(
            "a new request after the last is consumed",
            "Workspace",
            workspace(running()),
            consumed(running()),
            to(stopped()),
            Accepted,
        ),
        change(
            "the implied start counts",
            "Workspace",
            json!({"template": "t"}),
            consumed(running()),
            to(stopped()),
            Accepted,
        ),
        change(
            "a start over a stop that is not consumed",
            "Workspace",
            workspace(stopped()),
            consumed(running()),
            to(running()),
            Refused(order),
        ),
        change(
            "a second start before the first is consumed",
            "Workspace",
            workspace(json!({"state": "Running", "requestId": "a"})),
            json!({"phase": "Creating"}),
            to(json!({"requestId": "b"})),
            Refused(order),
        ),
        change(
            "a stop takes a waiting start back",
            "Workspace",
            workspace(running()),
            json!({"phase": "Creating"}),
            to(stopped()),
            Accepted,
        ),
        change(
            "force over a normal stop",
            "Workspace",
            workspace(json!({"state": "Stopped", "requestId": "a"})),
            consumed(running()),
            to(json!({"requestId": "b", "stopMode": "Force"})),
            Accepted,
        ),
        change(
            "a normal stop over a normal stop",
            "Workspace",
            workspace(json!({"state": "Stopped", "requestId": "a"})),
            consumed(running()),
            to(json!({"requestId": "b"})),
            Refused(order),
        ),
        change(
            "force over force",
            "Workspace",
            workspace(json!({"state": "Stopped", "requestId": "a", "stopMode": "Force"})),
            consumed(running()),
            to(json!({"requestId": "b"})),
            Refused(order),
        ),
        change(
            "an id again with another state",
            "Workspace",
            workspace(json!({"state": "Running", "requestId": "a"})),
            consumed(json!({"state": "Running", "requestId": "a"})),
            to(stopped()),
            Refused(&["already used"]),
        ),
        change(
            "another stopMode without a new id",
            "Workspace",
            workspace(json!({"state": "Stopped", "requestId": "a"})),
            consumed(running()),
            to(json!({"stopMode": "Force"})),
            Refused(&["already used"]),
        ),
        change(
            "another stopMode without any id",
            "Workspace",
            workspace(stopped()),
            consumed(running()),
            to(json!({"stopMode": "Force"})),
            Refused(&["give it a new requestId"]),
        ),
        change(
            "another node without a new id",
            "Workspace",
            workspace(running()),
            consumed(running()),
            to(json!({"node": "n"})),
            Refused(&["give it a new requestId"]),
        ),
    ]
}
