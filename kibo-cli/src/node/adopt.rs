//! `kibo node adopt`: after the control plane was put back to an older state, what becomes of a node that is ahead of it.

use std::fmt::Write as _;

use clap::Args;
use kibo_crds::{
    CommandRecord, Node,
    node::{AdoptionAction, AdoptionResult, NodeCommand, NodeStatus, UnknownInstances},
};
use serde_json::{Value, json};

use super::{Recorded, Submission, WriteArgs, outcome::Outcome};
use crate::{
    cli::WaitArgs,
    client::Cluster,
    errors::{Error, Kind, Result, Subject},
    output::{OutputArgs, present, print},
};

#[derive(Args, Debug)]
pub struct Adopt {
    #[arg(value_name = "NODE")]
    node: String,
    /// Destroy everything that runs there, in place of taking it back; the disks stay
    #[arg(long)]
    destroy: bool,
    /// Destroy Instances whose Workspaces the control plane does not know; else they run on, and the node names them
    #[arg(long, conflicts_with = "destroy")]
    destroy_unknown: bool,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    wait: WaitArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn adopt(cluster: &Cluster, args: Adopt) -> Result<()> {
    let action = if args.destroy { AdoptionAction::Destroy } else { AdoptionAction::Adopt };
    let unknown = if args.destroy_unknown { UnknownInstances::Destroy } else { UnknownInstances::Keep };
    let command = NodeCommand::Adopt { action, unknown };
    let submission = Submission::new(cluster, &args.node, &command, args.write);
    let patch = |node: &Node| -> Result<Value> {
        let status = node.status.clone().unwrap_or_default();
        let quarantine = quarantine(status, args.destroy_unknown, &submission.subject)?;
        let request = &submission.id;
        Ok(json!({ "spec": { "adoption": {
            "quarantine": quarantine, "action": action, "unknown": unknown, "requestId": request,
        }}}))
    };
    if !args.wait.wanted() {
        submission.submit(patch).await?;
        return print(&format!("{}: adoption requested\n", submission.subject));
    }
    let Recorded { object, record } = submission.run(patch).await?;
    let text = text(&submission.subject, action, &record, object.status.and_then(|status| status.adoption).as_ref());
    present(args.output.form(), &Outcome { node: args.node, record, text })
}

/// The accident that the node is in; for what is unknown there also the one that it was adopted from.
fn quarantine(status: NodeStatus, destroy_unknown: bool, subject: &Subject) -> Result<String> {
    let adopted = || status.adoption.filter(|_| destroy_unknown).map(|adoption| adoption.quarantine);
    status.quarantine.map(|quarantine| quarantine.id).or_else(adopted).ok_or_else(|| {
        let text = format!("{subject} is not in quarantine: it is not ahead of this control plane");
        Error::new(Kind::FailedPrecondition, text).next(format!("see how it stands: {}", subject.command("get")))
    })
}

/// The counts are on record; which Instances are unknown is told while the adoption is the newest one.
fn text(subject: &Subject, action: AdoptionAction, record: &CommandRecord, newest: Option<&AdoptionResult>) -> String {
    let count = |name: &str| record.counts.get(name).copied().unwrap_or_default();
    let mut text = match action {
        AdoptionAction::Adopt => format!(
            "{subject} is adopted: {} executions taken back, {} had ended since the backup",
            count("adopted"),
            count("ended")
        ),
        AdoptionAction::Destroy => {
            format!("{subject} is adopted with nothing running: {} executions have ended", count("ended"))
        }
    };
    let newest = newest.filter(|done| done.request_id.as_ref() == Some(&record.id));
    if let Some(done) = newest.filter(|done| done.unknown_count > 0 && done.unknown == UnknownInstances::Keep) {
        let _ = write!(
            text,
            "\n{} Instances belong to Workspaces that this control plane does not know, and run on: {}\n\
             destroy them: {} --destroy-unknown",
            done.unknown_count,
            done.unknown_instances.join(", "),
            subject.command("adopt")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::subject;

    fn status(status: Value) -> NodeStatus {
        serde_json::from_value(status).unwrap()
    }

    fn adopted() -> Value {
        json!({
            "quarantine": "q-1", "incarnation": 1, "action": "Adopt", "unknown": "Keep", "requestId": "a",
            "adopted": 2, "ended": 1, "unknownCount": 1, "unknownInstances": ["inst-1 (ns/w)"],
            "finishedAt": "1970-01-01T00:00:00Z",
        })
    }

    #[test]
    fn an_adoption_names_the_accident_that_the_node_is_in() {
        let named = |it: Value, destroy_unknown| {
            quarantine(status(it), destroy_unknown, &subject("n")).map_err(|error| error.kind)
        };
        let accident = json!({ "id": "q-2", "message": "m", "instances": 1, "since": "1970-01-01T00:00:00Z" });
        assert_eq!(named(json!({ "quarantine": accident }), false), Ok("q-2".to_owned()));
        let after = json!({ "adoption": adopted() });
        assert_eq!(named(after.clone(), true), Ok("q-1".to_owned()), "unknown ones, after the adoption");
        assert_eq!(named(after, false), Err(Kind::FailedPrecondition));
        assert_eq!(named(json!({}), false), Err(Kind::FailedPrecondition));
    }

    #[test]
    fn what_came_of_it_is_told_from_its_record() {
        let record = |id: &str| -> CommandRecord {
            serde_json::from_value(json!({
                "id": id, "operation": "adopt", "digest": "", "result": "Succeeded",
                "startedAt": "1970-01-01T00:00:00Z", "counts": { "adopted": 2, "ended": 1, "unknown": 1 },
            }))
            .unwrap()
        };
        let newest = status(json!({ "adoption": adopted() })).adoption;
        let told = |id| text(&subject("n"), AdoptionAction::Adopt, &record(id), newest.as_ref());
        assert!(told("a").contains("2 executions taken back, 1 had ended"), "{}", told("a"));
        assert!(told("a").contains("inst-1 (ns/w)"), "{}", told("a"));
        assert!(!told("b").contains("inst-1"), "of another adoption: {}", told("b"));
    }
}
