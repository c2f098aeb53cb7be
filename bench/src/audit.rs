//! What the API server wrote down: every write, by whom, of what, from when to when.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read as _, Seek as _, SeekFrom},
    path::PathBuf,
};

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use serde_json::Value;

/// All writes with their times, and nothing else; also those of Leases, which other local clusters leave out.
pub const POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  verbs: [create, update, patch, delete, deletecollection]
- level: None
";

/// One write.
#[derive(Clone, Debug)]
pub struct Write {
    pub user: String,
    pub verb: String,
    /// As `workspaces/status`.
    pub resource: String,
    pub name: String,
    pub received: Timestamp,
    pub done: Timestamp,
}

/// The audit log from some point on.
pub struct Audit {
    path: PathBuf,
    from: u64,
}

impl Audit {
    /// What is written from now on.
    pub fn begin(path: PathBuf) -> Result<Self> {
        let from = std::fs::metadata(&path).with_context(|| format!("failed to look at {}", path.display()))?.len();
        Ok(Self { path, from })
    }

    pub fn writes(&self) -> Result<Vec<Write>> {
        let mut text = String::new();
        let mut file = File::open(&self.path).with_context(|| format!("failed to open {}", self.path.display()))?;
        file.seek(SeekFrom::Start(self.from))?;
        file.read_to_string(&mut text)?;
        let entries = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        Ok(entries.filter_map(|entry| write_of(&entry)).collect())
    }
}

/// How many writes of each kind: user, verb and resource.
pub fn counts(writes: &[Write]) -> BTreeMap<(String, String), u64> {
    let mut counts = BTreeMap::new();
    for write in writes {
        *counts.entry((write.user.clone(), format!("{} {}", write.verb, write.resource))).or_default() += 1;
    }
    counts
}

fn write_of(entry: &Value) -> Option<Write> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let time = |value: &Value| value.as_str()?.parse().ok();
    let object = &entry["objectRef"];
    let group = text(&object["apiGroup"]);
    // Questions that are asked by a create; nothing is stored.
    if ["authentication.k8s.io", "authorization.k8s.io"].contains(&group.as_str()) {
        return None;
    }
    let (resource, sub) = (text(&object["resource"]), text(&object["subresource"]));
    // Also a connection to a stream is a create.
    if group == "subresources.kibotos.dev" {
        return None;
    }
    let user = text(&entry["user"]["username"]);
    Some(Write {
        user: user.rsplit(':').next().unwrap_or_default().to_owned(),
        verb: text(&entry["verb"]),
        resource: if sub.is_empty() { resource } else { format!("{resource}/{sub}") },
        name: text(&object["name"]),
        received: time(&entry["requestReceivedTimestamp"])?,
        done: time(&entry["stageTimestamp"])?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_named_by_user_verb_and_resource() {
        let entry = serde_json::json!({
            "verb": "update",
            "user": { "username": "system:serviceaccount:kibotos-system:kibotos-operator" },
            "objectRef": { "resource": "workspaces", "subresource": "status", "name": "a", "apiGroup": "kibotos.dev" },
            "requestReceivedTimestamp": "2026-11-29T22:00:00.000001Z",
            "stageTimestamp": "2026-11-29T22:00:00.004001Z",
        });
        let write = write_of(&entry).unwrap();
        assert_eq!((write.user.as_str(), write.resource.as_str()), ("kibotos-operator", "workspaces/status"));
        assert_eq!(counts(&[write.clone(), write]).into_values().collect::<Vec<_>>(), [2]);
    }
}
