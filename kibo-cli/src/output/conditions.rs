//! Conditions, as a table and in JSON.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde::Serialize;

use super::{
    Table,
    words::{age, instant, word},
};

/// A condition in JSON.
#[derive(Debug, Serialize)]
pub struct ConditionView {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: String,
    message: String,
    last_transition_at: String,
}

impl From<&Condition> for ConditionView {
    fn from(condition: &Condition) -> Self {
        Self {
            kind: word(&condition.type_),
            status: word(&condition.status),
            reason: word(&condition.reason),
            message: condition.message.clone(),
            last_transition_at: instant(&condition.last_transition_time),
        }
    }
}

/// The given conditions, under their Kubernetes names, since `kubectl wait` takes those.
pub fn conditions<'a>(conditions: impl IntoIterator<Item = &'a Condition>, now: Timestamp) -> Table {
    let mut table = Table::new(["TYPE", "STATUS", "AGE", "REASON", "MESSAGE"]);
    for condition in conditions {
        table.row(vec![
            condition.type_.clone(),
            condition.status.clone(),
            age(Some(&condition.last_transition_time), now),
            condition.reason.clone(),
            condition.message.replace('\n', " "),
        ]);
    }
    table
}
