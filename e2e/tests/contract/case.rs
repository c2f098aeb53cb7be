//! One case, and what cases are made from.

use serde_json::{Value, json};

/// One object that is created, perhaps given a status, and perhaps changed.
pub struct Case {
    pub rule: &'static str,
    pub kind: &'static str,
    /// `None`: a name of its own for each case.
    pub name: Option<&'static str>,
    pub spec: Value,
    pub status: Option<Value>,
    /// A merge patch on the whole object; `status` in it goes to the status subresource.
    pub change: Option<Value>,
    pub expected: Expected,
}

pub enum Expected {
    Accepted,
    /// The last step is refused with a message that has all of these parts.
    Refused(&'static [&'static str]),
}

pub use Expected::{Accepted, Refused};

pub fn create(rule: &'static str, kind: &'static str, spec: Value, expected: Expected) -> Case {
    Case { rule, kind, name: None, spec, status: None, change: None, expected }
}

pub fn change(
    rule: &'static str,
    kind: &'static str,
    spec: Value,
    status: Value,
    change: Value,
    expected: Expected,
) -> Case {
    Case { rule, kind, name: None, spec, status: Some(status), change: Some(change), expected }
}

pub fn named(mut case: Case, name: &'static str) -> Case {
    case.name = Some(name);
    case
}

pub fn template(cpu: Value, memory: &str, layer: &str) -> Value {
    json!({"rootImage": "debian-12", "resources": {"cpu": cpu, "memory": memory}, "writableLayer": {"size": layer}})
}

pub fn template_with(field: &str, value: Value) -> Value {
    let mut spec = template(json!(1), "256Mi", "1Gi");
    spec[field] = value;
    spec
}

pub fn workspace(power: Value) -> Value {
    json!({"template": "t", "power": power})
}

pub fn volume(binding: Value) -> Value {
    json!({"template": "t", "volume": binding})
}

pub fn consumed(request: Value) -> Value {
    json!({"power": {"consumed": request, "consumedAt": "2026-01-01T00:00:00Z"}})
}

pub const EXECUTION: &str = r#"{"instanceId": "inst-01k6zzzzzzzzzzzzzzzzzzzzzz", "node": "node-1", "incarnation": 1,
    "cpuMilli": 1000, "memoryBytes": 1, "lastSeq": 0, "startedAt": "2026-01-01T00:00:00Z"}"#;

pub fn executing() -> Value {
    json!({"execution": serde_json::from_str::<Value>(EXECUTION).unwrap()})
}

pub fn session(alive: bool) -> Value {
    json!({"incarnation": 3, "session": {"id": "s", "alive": alive, "incarnation": 3, "bootId": "b",
        "version": "unreleased", "startedAt": "2026-01-01T00:00:00Z"}})
}

pub fn isolation(incarnation: u64, confirmed: bool) -> Value {
    json!({"spec": {"isolation": {"incarnation": incarnation, "confirmHostCannotWrite": confirmed}}})
}
