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

/// Whether a condition tells a reader something: what is as it should be goes without saying.
pub fn is_telling(condition: &Condition) -> bool {
    let (status, reason) = (condition.status.as_str(), condition.reason.as_str());
    match condition.type_.as_str() {
        // What the state says already.
        "Available" | "Stopped" | "Bound" => false,
        "Schedulable" => (status, reason) != ("True", "Schedulable"),
        "Ready" => status != "True",
        // That nothing is known of a clock without a session goes without saying.
        "ClockSynchronized" => status == "False",
        "Drained" => reason != "NotRequested",
        "MemoryTight" | "DuplicateHost" | "MarkerConflict" | "Quarantined" | "DiskFull" | "Lost" | "Paused"
        | "TwoWriters" => status != "False",
        "Placed" | "NodeReachable" | "GuestResponsive" | "PowerRequestConsumed" | "Created" => {
            status != "True" && !condition.message.is_empty()
        }
        _ => true,
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

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    #[test]
    fn what_is_as_it_should_be_goes_without_saying() {
        let told = |kind: &str, status: &str, reason: &str| {
            is_telling(&Condition {
                type_: kind.into(),
                status: status.into(),
                reason: reason.into(),
                message: "m".into(),
                observed_generation: None,
                last_transition_time: Time(Timestamp::UNIX_EPOCH),
            })
        };
        assert!(!told("Ready", "True", "SessionLive") && told("Ready", "False", "NoSession"));
        assert!(!told("Schedulable", "True", "Schedulable") && told("Schedulable", "True", "NoDefaultPool"));
        assert!(!told("Drained", "False", "NotRequested") && told("Drained", "False", "Draining"));
        assert!(!told("MarkerConflict", "False", "OneMarker") && told("MarkerConflict", "True", "AnotherMarker"));
        assert!(!told("Placed", "True", "Placed") && told("Placed", "False", "ResourceExhausted"));
        assert!(told("SomethingNew", "True", "Because"), "what this release does not know is shown");
    }
}
