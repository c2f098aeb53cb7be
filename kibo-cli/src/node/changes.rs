//! What is different between two looks at a Node, for the person whose expected version is an old one. Pure.

use jiff::Timestamp;
use kibo_crds::{
    Node,
    node::{NodeSession, NodeSpec, NodeStatus},
};
use kube::ResourceExt as _;

use crate::output::words::{ABSENT, age, enum_word, or_absent};

/// One phrase for each part that differs; never empty, since the version does.
pub fn changes(old: &Node, new: &Node, now: Timestamp) -> Vec<String> {
    let mut changes = Vec::new();
    let (before, after) = (old.status.clone().unwrap_or_default(), new.status.clone().unwrap_or_default());
    requests(&old.spec, &new.spec, &mut changes);
    if old.labels() != new.labels() {
        changes.push("its labels".to_owned());
    }
    words("admission", before.admission.as_ref(), after.admission.as_ref(), &mut changes);
    words("status", before.phase.as_ref(), after.phase.as_ref(), &mut changes);
    session(before.session.as_ref(), after.session.as_ref(), now, &mut changes);
    if before.allocated != after.allocated {
        changes.push("what is allocated there".to_owned());
    }
    if before.report != after.report {
        changes.push("a new report".to_owned());
    }
    if before.isolation != after.isolation {
        let state = or_absent(after.isolation.as_ref().map(|isolation| enum_word(&isolation.state)));
        changes.push(format!("its isolation is {state}"));
    }
    if before.commands != after.commands {
        changes.push(commands(&before, &after));
    }
    if changes.is_empty() {
        changes.push(if before == after { "its metadata" } else { "its conditions" }.to_owned());
    }
    changes
}

fn requests(old: &NodeSpec, new: &NodeSpec, changes: &mut Vec<String>) {
    let wants = |spec: &NodeSpec| spec.drain.as_ref().is_some_and(|drain| drain.requested);
    match (wants(old), wants(new)) {
        (false, true) => changes.push("a drain was requested".to_owned()),
        (true, false) => changes.push("its drain was cancelled".to_owned()),
        _ => {}
    }
    if old.isolation != new.isolation {
        changes.push("an isolation was declared".to_owned());
    }
    if old.retirement != new.retirement {
        changes.push("it was retired".to_owned());
    }
    if old.revocation != new.revocation {
        let text = if new.revocation.is_some() { "it was revoked" } else { "its revocation was replaced" };
        changes.push(text.to_owned());
    }
    if old.enrollment != new.enrollment {
        let text = if new.enrollment.is_some() { "a new token was issued" } else { "its token was revoked" };
        changes.push(text.to_owned());
    }
    if old.slots != new.slots {
        let slots = |slots: Option<u32>| slots.map_or_else(|| "default".to_owned(), |slots| slots.to_string());
        changes.push(format!("slots {} -> {}", slots(old.slots), slots(new.slots)));
    }
    if old.overcommit != new.overcommit {
        changes.push("its overcommit ratios".to_owned());
    }
    if old.adoption != new.adoption {
        changes.push("an adoption was ordered".to_owned());
    }
}

fn words<T: serde::Serialize + PartialEq>(what: &str, old: Option<&T>, new: Option<&T>, changes: &mut Vec<String>) {
    if old != new {
        let word = |value: Option<&T>| value.map_or_else(|| ABSENT.to_owned(), enum_word);
        changes.push(format!("{what} {} -> {}", word(old), word(new)));
    }
}

fn session(old: Option<&NodeSession>, new: Option<&NodeSession>, now: Timestamp, changes: &mut Vec<String>) {
    let Some(new) = new else { return };
    if old.is_none_or(|old| old.id != new.id) {
        let began = age(Some(&new.started_at), now);
        changes.push(format!("a new session (incarnation {}, {began} ago)", new.incarnation));
    }
    if !new.alive && old.is_none_or(|old| old.id != new.id || old.alive) {
        changes.push("its session ended".to_owned());
    }
}

fn commands(old: &NodeStatus, new: &NodeStatus) -> String {
    let new = new.commands.iter().filter(|it| !old.commands.iter().any(|known| known.id == it.id));
    let names: Vec<_> = new.map(|record| format!("{} {}", record.operation, record.id)).collect();
    if names.is_empty() { "the state of its commands".to_owned() } else { format!("commands: {}", names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(spec: &serde_json::Value, status: &serde_json::Value) -> Node {
        serde_json::from_value(serde_json::json!({ "metadata": { "name": "n" }, "spec": spec, "status": status }))
            .unwrap()
    }

    #[test]
    fn each_difference_has_its_words() {
        let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        let session = |id: &str, alive: bool| {
            serde_json::json!({ "phase": "Ready", "session": {
                "id": id, "alive": alive, "incarnation": 2, "bootId": "b", "version": "v",
                "startedAt": "1970-01-01T00:00:00Z",
            }})
        };
        let table = [
            (json("{}"), json("{}"), json("{}"), json("{}"), "its metadata"),
            (
                json("{}"),
                json(r#"{"phase":"Ready"}"#),
                json(r#"{"drain":{"requested":true},"slots":3}"#),
                json(r#"{"phase":"Draining"}"#),
                "a drain was requested; slots default -> 3; status READY -> DRAINING",
            ),
            (json("{}"), session("a", true), json("{}"), session("b", true), "a new session (incarnation 2, 90s ago)"),
            (json("{}"), session("a", true), json("{}"), session("a", false), "its session ended"),
            (
                json("{}"),
                json("{}"),
                json("{}"),
                json(
                    r#"{"commands":[{"id":"x","operation":"drain","digest":"","result":"Succeeded","startedAt":"1970-01-01T00:00:00Z"}]}"#,
                ),
                "commands: drain x",
            ),
        ];
        for (old_spec, old_status, new_spec, new_status, expected) in table {
            let (old, new) = (node(&old_spec, &old_status), node(&new_spec, &new_status));
            let now = Timestamp::from_second(90).unwrap();
            assert_eq!(changes(&old, &new, now).join("; "), expected);
        }
    }
}
