//! What somebody asks of a Node, and how it is told again: each command has an id, an operation and a digest of its
//! input, of which the same three mean the same command.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{AdoptionAction, NodeSpec, UnknownInstances};
use crate::{CommandId, Order, Ratio, Requested, digest};

/// One command with everything that its caller gave. What is read at the time (an incarnation, the labels before) is
/// no input: a replay finds other values there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "operation", rename_all = "kebab-case")]
pub enum NodeCommand {
    Issue,
    Revoke,
    Drain,
    CancelDrain,
    #[serde(rename_all = "camelCase")]
    Isolate {
        force_despite_evidence: bool,
    },
    Retire,
    SetSlots {
        /// Absent: what the node's own configuration says.
        slots: Option<u32>,
    },
    Label {
        /// Absent values: labels that are removed.
        changes: BTreeMap<String, Option<String>>,
    },
    /// Absent ratios: those of the default OvercommitPolicy.
    SetOvercommit {
        cpu: Option<Ratio>,
        memory: Option<Ratio>,
    },
    Adopt {
        action: AdoptionAction,
        unknown: UnknownInstances,
    },
}

impl Order for NodeCommand {
    fn operation(&self) -> &'static str {
        match self {
            Self::Issue => "issue",
            Self::Revoke => "revoke",
            Self::Drain => "drain",
            Self::CancelDrain => "cancel-drain",
            Self::Isolate { .. } => "isolate",
            Self::Retire => "retire",
            Self::SetSlots { .. } => "set-slots",
            Self::Label { .. } => "label",
            Self::SetOvercommit { .. } => "set-overcommit",
            Self::Adopt { .. } => "adopt",
        }
    }

    fn digest(&self) -> String {
        digest(self)
    }
}

impl NodeSpec {
    /// Every command with an id that stands in this spec: of each kind the newest.
    pub fn requested(&self) -> Vec<Requested> {
        let of = |id: Option<&CommandId>, command: NodeCommand| id.map(|id| Requested::new(id, &command));
        let changed = |request: Option<&super::ChangeRequest>, operation| {
            request.map(|request| Requested {
                id: request.request_id.clone(),
                operation,
                digest: request.digest.clone(),
            })
        };
        let drain = self.drain.as_ref().and_then(|drain| {
            of(drain.request_id.as_ref(), if drain.requested { NodeCommand::Drain } else { NodeCommand::CancelDrain })
        });
        let isolate = self.isolation.as_ref().and_then(|isolation| {
            let force_despite_evidence = isolation.force_despite_evidence;
            of(isolation.request_id.as_ref(), NodeCommand::Isolate { force_despite_evidence })
        });
        let overcommit = self.overcommit.as_ref().and_then(|overcommit| {
            let command = NodeCommand::SetOvercommit { cpu: overcommit.cpu, memory: overcommit.memory };
            of(overcommit.request_id.as_ref(), command)
        });
        let adopt = self.adoption.as_ref().and_then(|adoption| {
            let command = NodeCommand::Adopt { action: adoption.action, unknown: adoption.unknown };
            of(adoption.request_id.as_ref(), command)
        });
        [
            of(self.enrollment.as_ref().and_then(|it| it.request_id.as_ref()), NodeCommand::Issue),
            of(self.revocation.as_ref().and_then(|it| it.request_id.as_ref()), NodeCommand::Revoke),
            drain,
            isolate,
            of(self.retirement.as_ref().and_then(|it| it.request_id.as_ref()), NodeCommand::Retire),
            changed(self.slots_request.as_ref(), "set-slots"),
            changed(self.label_request.as_ref(), "label"),
            overcommit,
            adopt,
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{ChangeRequest, Drain};

    #[test]
    fn the_digest_is_of_what_the_caller_gave() {
        let isolate = |force_despite_evidence| NodeCommand::Isolate { force_despite_evidence }.digest();
        assert_ne!(isolate(false), isolate(true));
        assert_ne!(NodeCommand::Drain.digest(), NodeCommand::CancelDrain.digest());
        assert_ne!(NodeCommand::SetSlots { slots: None }.digest(), NodeCommand::SetSlots { slots: Some(0) }.digest());
        // It is stored: what an older release wrote must be found again.
        assert_eq!(NodeCommand::Drain.digest(), digest(&serde_json::json!({ "operation": "drain" })));
    }

    #[test]
    fn a_spec_tells_the_commands_that_stand_in_it() {
        let slots = NodeCommand::SetSlots { slots: Some(4) };
        let spec = NodeSpec {
            drain: Some(Drain { requested: false, request_id: Some("a".parse().unwrap()) }),
            slots: Some(4),
            slots_request: Some(ChangeRequest { request_id: "b".parse().unwrap(), digest: slots.digest() }),
            ..NodeSpec::default()
        };
        let expected = [("a", NodeCommand::CancelDrain), ("b", slots)];
        let expected = expected.map(|(id, command)| Requested::new(&id.parse().unwrap(), &command));
        assert_eq!(spec.requested(), expected);
        assert_eq!(NodeSpec::default().requested(), []);
    }
}
