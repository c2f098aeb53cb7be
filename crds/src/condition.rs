//! The named conditions and how one is set.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::{Schema, SchemaGenerator, json_schema};

/// Every condition that a Kibotos resource can carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConditionType {
    // Workspace
    Available,
    Stopped,
    Placed,
    NodeReachable,
    GuestResponsive,
    PowerRequestConsumed,
    /// The node cannot go on with it before a person has helped; the message says how.
    Blocked,
    /// The guest stands still until something that its disks need is there again.
    Paused,
    /// A host that was declared dead ran on while another may have used the same disk.
    TwoWriters,
    /// Only while its writable layer (or, of a Volume, its image) has another size than was asked for: why.
    Resized,
    /// Only while the Volume that its spec names is not bound to it: why.
    VolumeBound,
    // Node
    Ready,
    Schedulable,
    Drained,
    ClockSynchronized,
    MemoryTight,
    /// A second host speaks with this node's identity.
    DuplicateHost,
    /// Its current incarnation was declared dead, and what it held is free.
    Isolated,
    /// The node is ahead of this control plane, which was put back to an older state.
    Quarantined,
    /// Instances run there whose Workspaces this control plane does not know.
    UnknownInstances,
    // StoragePool: nodes declare it with different markers.
    MarkerConflict,
    /// Of a StoragePool: an admin has declared its data lost.
    Lost,
    /// Of a StoragePool: there is no space left, and guests that write there wait for it.
    DiskFull,
    // Volume: whether its image exists, and whether a Workspace is bound.
    Created,
    Bound,
}

impl fmt::Display for ConditionType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A condition as observed at `generation`. `reason` is CamelCase, `message` is for people.
pub fn condition(
    kind: ConditionType,
    status: Option<bool>,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    now: &Time,
) -> Condition {
    let status = match status {
        Some(true) => "True",
        Some(false) => "False",
        None => "Unknown",
    };
    Condition {
        type_: kind.to_string(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        observed_generation: generation,
        last_transition_time: now.clone(),
    }
}

/// Puts `new` into `conditions`. The transition time moves only when the status changed, so that
/// setting the same condition twice leaves the list equal.
pub fn set_condition(conditions: &mut Vec<Condition>, mut new: Condition) {
    match conditions.iter_mut().find(|old| old.type_ == new.type_) {
        Some(old) => {
            if old.status == new.status {
                new.last_transition_time = old.last_transition_time.clone();
            }
            *old = new;
        }
        None => conditions.push(new),
    }
}

/// Schema of a bounded condition list, a map by type.
pub(crate) fn conditions_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 16,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": { "type": "string", "maxLength": 64 },
                "status": { "type": "string", "enum": ["True", "False", "Unknown"] },
                "observedGeneration": { "type": "integer", "format": "int64", "minimum": 0 },
                "lastTransitionTime": { "type": "string", "format": "date-time" },
                "reason": { "type": "string", "maxLength": 128 },
                "message": { "type": "string", "maxLength": 4096 },
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    #[test]
    fn the_transition_time_moves_only_with_the_status() {
        let at = |second| Time(Timestamp::from_second(second).unwrap());
        let mut conditions = Vec::new();
        let make = |status, second| condition(ConditionType::Ready, status, "R", "m", Some(1), &at(second));
        set_condition(&mut conditions, make(Some(true), 1));
        set_condition(&mut conditions, make(Some(true), 2));
        assert_eq!(conditions[0].last_transition_time, at(1));
        set_condition(&mut conditions, make(None, 3));
        assert_eq!((conditions.len(), &conditions[0].last_transition_time), (1, &at(3)));
    }
}
