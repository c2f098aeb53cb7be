//! Each rule of the custom resources, with an object that keeps it and one that breaks it, at the
//! real API server. A refusal must name the field, and say the rule in our words.

#![expect(clippy::needless_pass_by_value, reason = "the tables read better when their values are made in place")]

use std::process::ExitCode;
use std::sync::Arc;

use kibo_e2e::suite::{Place, Suite};
use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};

/// One object that is created, perhaps given a status, and perhaps changed.
struct Case {
    rule: &'static str,
    kind: &'static str,
    /// `None`: a name of its own for each case.
    name: Option<&'static str>,
    spec: Value,
    status: Option<Value>,
    /// A merge patch on the whole object; `status` in it goes to the status subresource.
    change: Option<Value>,
    expected: Expected,
}

enum Expected {
    Accepted,
    /// The last step is refused with a message that has all of these parts.
    Refused(&'static [&'static str]),
}

use Expected::{Accepted, Refused};

fn create(rule: &'static str, kind: &'static str, spec: Value, expected: Expected) -> Case {
    Case { rule, kind, name: None, spec, status: None, change: None, expected }
}

fn change(
    rule: &'static str,
    kind: &'static str,
    spec: Value,
    status: Value,
    change: Value,
    expected: Expected,
) -> Case {
    Case { rule, kind, name: None, spec, status: Some(status), change: Some(change), expected }
}

fn named(mut case: Case, name: &'static str) -> Case {
    case.name = Some(name);
    case
}

fn template(cpu: Value, memory: &str, layer: &str) -> Value {
    json!({"rootImage": "debian-12", "resources": {"cpu": cpu, "memory": memory}, "writableLayer": {"size": layer}})
}

fn template_with(field: &str, value: Value) -> Value {
    let mut spec = template(json!(1), "256Mi", "1Gi");
    spec[field] = value;
    spec
}

fn workspace(power: Value) -> Value {
    json!({"template": "t", "power": power})
}

fn volume(binding: Value) -> Value {
    json!({"template": "t", "volume": binding})
}

fn consumed(request: Value) -> Value {
    json!({"power": {"consumed": request, "consumedAt": "2026-01-01T00:00:00Z"}})
}

const EXECUTION: &str = r#"{"instanceId": "inst-01k6zzzzzzzzzzzzzzzzzzzzzz", "node": "node-1", "incarnation": 1,
    "cpuMilli": 1000, "memoryBytes": 1, "lastSeq": 0, "startedAt": "2026-01-01T00:00:00Z"}"#;

fn executing() -> Value {
    json!({"execution": serde_json::from_str::<Value>(EXECUTION).unwrap()})
}

fn session(alive: bool) -> Value {
    json!({"incarnation": 3, "session": {"id": "s", "alive": alive, "incarnation": 3, "bootId": "b",
        "version": "unreleased", "startedAt": "2026-01-01T00:00:00Z"}})
}

fn isolation(incarnation: u64, confirmed: bool) -> Value {
    json!({"spec": {"isolation": {"incarnation": incarnation, "confirmHostCannotWrite": confirmed}}})
}

fn amounts() -> Vec<Case> {
    let ok = |rule, cpu, memory, layer| create(rule, "Template", template(cpu, memory, layer), Accepted);
    let bad = |rule, cpu, memory, layer, parts| create(rule, "Template", template(cpu, memory, layer), Refused(parts));
    vec![
        ok("the smallest cpu", json!("1m"), "128Mi", "16Mi"),
        ok("cpu as a number", json!(2), "256Mi", "1Gi"),
        ok("cpu with a fraction in quotes", json!("0.5"), "256Mi", "1Gi"),
        bad("cpu below 1m", json!("0"), "256Mi", "1Gi", &["spec.resources.cpu", "cpu must be at least 1m"]),
        bad("cpu below 1m, as a number", json!(0), "256Mi", "1Gi", &["spec.resources.cpu", "cpu must be at least 1m"]),
        bad("cpu in parts of a millicore", json!("0.0005"), "256Mi", "1Gi", &["spec.resources.cpu", "cpu must be"]),
        bad("cpu beyond any host", json!("1025"), "256Mi", "1Gi", &["cpu must be at most 1024"]),
        bad("cpu that is no quantity", json!("many"), "256Mi", "1Gi", &["spec.resources.cpu", "must be a quantity"]),
        bad("negative cpu", json!("-1"), "256Mi", "1Gi", &["cpu must be at least 1m"]),
        bad(
            "memory below 128Mi",
            json!(1),
            "127Mi",
            "1Gi",
            &["spec.resources.memory", "memory must be at least 128Mi"],
        ),
        ok("memory with a fraction that is whole MiB", json!(1), "1.5Gi", "0.5Gi"),
        bad("a fraction that is not whole MiB", json!(1), "1.0001Gi", "1Gi", &["memory must be a whole number of MiB"]),
        bad("memory not in whole MiB", json!(1), "200000k", "1Gi", &["memory must be a whole number of MiB"]),
        bad(
            "a layer not in whole MiB",
            json!(1),
            "256Mi",
            "1000M",
            &["spec.writableLayer.size", "a whole number of MiB"],
        ),
        bad("a layer below 16Mi", json!(1), "256Mi", "15Mi", &["size must be at least 16Mi"]),
    ]
}

fn ratios() -> Vec<Case> {
    let node = |cpu: &str| json!({"overcommit": {"cpu": cpu}});
    let mut cases: Vec<_> = ["16", "0", "2.5", "0.001", "16.000", "1.10"]
        .into_iter()
        .map(|ratio| create("a ratio in range", "Node", node(ratio), Accepted))
        .collect();
    for ratio in ["16.001", "1.0001", "-1", "1e3", "", "NaN", "17", "1."] {
        cases.push(create(
            "a ratio out of range or form",
            "Node",
            node(ratio),
            Refused(&["spec.overcommit.cpu", "from 0 to 16"]),
        ));
    }
    let policy = || json!({"cpu": "2", "memory": "1"});
    cases.push(named(create("the one policy", "OvercommitPolicy", policy(), Accepted), "default"));
    cases.push(named(create("another policy", "OvercommitPolicy", policy(), Refused(&["named default"])), "second"));
    cases
}

fn immutability() -> Vec<Case> {
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
            "spec.volume stays",
            "Workspace",
            json!({"template": "t"}),
            Value::Null,
            json!({"spec": {"volume": {"claim": "v", "mountPath": "/data"}}}),
            Refused(&["spec.volume is immutable"]),
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
            Refused(&["writableLayer.size can only grow"]),
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

fn bindings() -> Vec<Case> {
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

fn power() -> Vec<Case> {
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

fn counters() -> Vec<Case> {
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

fn nodes() -> Vec<Case> {
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
fn commands() -> Vec<Case> {
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

fn resource(kind: &str) -> ApiResource {
    let plural = match kind {
        "OvercommitPolicy" => "overcommitpolicies".to_owned(),
        kind => format!("{}s", kind.to_lowercase()),
    };
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(kibo_crds::GROUP, kibo_crds::VERSION, kind), &plural)
}

fn api(client: &Client, kind: &str) -> Api<DynamicObject> {
    match kind {
        "Workspace" | "Volume" => Api::namespaced_with(client.clone(), "default", &resource(kind)),
        _ => Api::all_with(client.clone(), &resource(kind)),
    }
}

/// Takes a case through its steps; the last one is the one that is judged.
async fn attempt(client: &Client, case: &Case, name: &str) -> Result<(), kube::Error> {
    let api = api(client, case.kind);
    let patch = |value: Value| Patch::Merge(value);
    let params = PatchParams::default();
    // Retirement needs a status first, so an object that begins retired gets there by steps.
    let mut spec = case.spec.clone();
    let retirement = spec.as_object_mut().and_then(|spec| spec.remove("retirement"));
    let object = serde_json::from_value(json!({
        "apiVersion": "kibotos.dev/v1alpha1", "kind": case.kind, "metadata": {"name": name}, "spec": spec,
    }))
    .map_err(kube::Error::SerdeError)?;
    let created = api.create(&PostParams::default(), &object).await;
    if case.change.is_none() {
        return created.map(drop);
    }
    created.unwrap_or_else(|error| panic!("{}: the object to change is refused: {error}", case.rule));
    if let Some(status) = case.status.clone().filter(|status| !status.is_null()) {
        let status = api.patch_status(name, &params, &patch(json!({"status": status}))).await;
        status.unwrap_or_else(|error| panic!("{}: the status is refused: {error}", case.rule));
    }
    if let Some(retirement) = retirement {
        let retired = api.patch(name, &params, &patch(json!({"spec": {"retirement": retirement}}))).await;
        retired.unwrap_or_else(|error| panic!("{}: the retirement is refused: {error}", case.rule));
    }
    let change = case.change.clone().unwrap_or_default();
    if change.get("status").is_some() {
        api.patch_status(name, &params, &patch(change)).await.map(drop)
    } else {
        api.patch(name, &params, &patch(change)).await.map(drop)
    }
}

fn judge(case: &Case, outcome: Result<(), kube::Error>) -> Option<String> {
    let (rule, kind) = (case.rule, case.kind);
    match (&case.expected, outcome) {
        (Accepted, Ok(())) => None,
        (Accepted, Err(error)) => Some(format!("{kind}, {rule}: refused, though it is allowed: {error}")),
        (Refused(_), Ok(())) => Some(format!("{kind}, {rule}: accepted, though it is not allowed")),
        (Refused(parts), Err(kube::Error::Api(status))) if parts.iter().all(|part| status.message.contains(part)) => {
            None
        }
        (Refused(parts), Err(error)) => Some(format!("{kind}, {rule}: refused without saying {parts:?}: {error}")),
    }
}

/// A node that was admitted cannot be deleted, a typo can. A policy takes a moment until it is in
/// force, so the typo's twin is tried until it is refused.
async fn keeps_admitted_nodes(client: &Client) {
    let nodes = api(client, "Node");
    let node = |name: &str| {
        serde_json::from_value(json!({
            "apiVersion": "kibotos.dev/v1alpha1", "kind": "Node", "metadata": {"name": name}, "spec": {},
        }))
        .unwrap()
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let refusal = loop {
        nodes.create(&PostParams::default(), &node("kept")).await.unwrap();
        let status = json!({"status": {"admission": "Admitted"}});
        nodes.patch_status("kept", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
        match nodes.delete("kept", &DeleteParams::default()).await {
            Err(error) => break error,
            Ok(_) => assert!(std::time::Instant::now() < deadline, "an admitted node can be deleted"),
        }
    };
    let text = refusal.to_string();
    assert!(text.contains("Node kept was admitted") && text.contains("retire it instead"), "{text}");
    nodes.create(&PostParams::default(), &node("typo")).await.unwrap();
    nodes.delete("typo", &DeleteParams::default()).await.unwrap();
}

fn main() -> ExitCode {
    Suite::with_control_plane()
        .test("every_rule_of_the_contract_holds_at_the_api_server", every_rule)
        .test("an_admitted_node_cannot_be_deleted", |place| async move {
            keeps_admitted_nodes(&place.client()).await;
            Ok(())
        })
        .run()
}

async fn every_rule(place: Arc<Place>) -> anyhow::Result<()> {
    let client = place.client();
    let cases: Vec<Case> = [amounts(), ratios(), immutability(), bindings(), power(), counters(), nodes(), commands()]
        .into_iter()
        .flatten()
        .collect();
    let mut wrong = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let own = format!("case-{index}");
        let outcome = attempt(&client, case, case.name.unwrap_or(&own)).await;
        wrong.extend(judge(case, outcome));
    }
    anyhow::ensure!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    Ok(())
}
