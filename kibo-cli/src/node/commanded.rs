//! A Node as something that is commanded.

use jiff::Timestamp;
use kibo_crds::{CommandRecord, Node, Requested};
use kube::ResourceExt as _;

use super::{changes::changes, subject};
use crate::{
    command::Commanded,
    errors::{Kind, Subject},
};

impl Commanded for Node {
    const VERSION: &'static str = "registration_version";

    fn subject(name: &str) -> Subject {
        subject(name)
    }

    fn requested(&self) -> Vec<Requested> {
        self.spec.requested()
    }

    fn commands(&self) -> &[CommandRecord] {
        self.status.as_ref().map(|status| status.commands.as_slice()).unwrap_or_default()
    }

    fn changes(old: &Self, new: &Self, now: Timestamp) -> Vec<String> {
        changes(old, new, now)
    }

    /// What was asked for, and who the node is.
    fn changes_that_matter(old: &Self, new: &Self) -> bool {
        let session = |node: &Self| node.status.as_ref()?.session.as_ref().map(|session| session.id.clone());
        let admission = |node: &Self| node.status.as_ref()?.admission;
        old.spec != new.spec
            || old.labels() != new.labels()
            || session(old) != session(new)
            || admission(old) != admission(new)
    }

    fn advice(reason: &str, subject: &Subject) -> Option<(Kind, String)> {
        (reason == "HostStillWrites").then(|| {
            let next = format!(
                "see to it that the host is off, then isolate it again (with a new --command-id); if you know better: {} --confirm-host-cannot-write --force-despite-evidence",
                subject.command("isolate")
            );
            (Kind::FailedPrecondition, next)
        })
    }

    fn go_on(operation: &str, subject: &Subject) -> String {
        if operation == "drain" { format!("{} --wait", subject.command("drain")) } else { subject.command("get") }
    }
}
