//! A StoragePool as something that is commanded.

use jiff::Timestamp;
use kibo_crds::{CommandRecord, Requested, StoragePool};

use super::subject;
use crate::{command::Commanded, errors::Subject, output::words::or_absent};

impl Commanded for StoragePool {
    const VERSION: &'static str = "version";

    fn subject(name: &str) -> Subject {
        subject(name)
    }

    fn requested(&self) -> Vec<Requested> {
        self.spec.requested()
    }

    fn commands(&self) -> &[CommandRecord] {
        self.status.as_ref().map(|status| status.commands.as_slice()).unwrap_or_default()
    }

    fn changes(old: &Self, new: &Self, _now: Timestamp) -> Vec<String> {
        let mut changes = Vec::new();
        let (before, after) = (old.status.clone().unwrap_or_default(), new.status.clone().unwrap_or_default());
        if old.spec.capacity != new.spec.capacity {
            let capacity = |pool: &Self| or_absent(pool.spec.capacity.as_ref());
            changes.push(format!("capacity {} -> {}", capacity(old), capacity(new)));
        }
        if old.spec.lost != new.spec.lost {
            changes.push("it was declared lost".to_owned());
        }
        if before.members != after.members {
            changes.push("its members".to_owned());
        }
        if before.commands != after.commands {
            changes.push("its commands".to_owned());
        }
        if changes.is_empty() {
            changes.push("what its nodes report".to_owned());
        }
        changes
    }

    fn changes_that_matter(old: &Self, new: &Self) -> bool {
        old.spec != new.spec
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_difference_has_its_words() {
        let pool = |spec: serde_json::Value, status: serde_json::Value| -> StoragePool {
            serde_json::from_value(serde_json::json!({ "metadata": { "name": "p" }, "spec": spec, "status": status }))
                .unwrap()
        };
        let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        let old = pool(json("{}"), json("{}"));
        let new = pool(json(r#"{"capacity":"1Gi","lost":{"confirmDataIsGone":true}}"#), json("{}"));
        let changes = StoragePool::changes(&old, &new, Timestamp::UNIX_EPOCH);
        assert_eq!(changes.join("; "), "capacity - -> 1Gi; it was declared lost");
        let reported = pool(json("{}"), json(r#"{"free":"1Gi"}"#));
        assert_eq!(StoragePool::changes(&old, &reported, Timestamp::UNIX_EPOCH), ["what its nodes report"]);
        assert!(StoragePool::changes_that_matter(&old, &new) && !StoragePool::changes_that_matter(&old, &reported));
    }
}
