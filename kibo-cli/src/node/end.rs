//! `kibo node isolate` and `retire`: what cannot be taken back.

use clap::Args;
use kibo_crds::{
    CommandRecord, Node,
    node::{Admission, NodeCommand},
    refusals,
};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::{Recorded, Submission, WriteArgs, outcome::Outcome};
use crate::{
    client::Cluster,
    command::{FinalWriteArgs, Question, confirm},
    errors::{Error, Kind, Result, Subject, program},
    output::{OutputArgs, present},
};

#[derive(Args, Debug)]
pub struct Isolate {
    #[arg(value_name = "NODE")]
    node: String,
    /// You assert it: the host is off, or it can no longer write to any of its storage pools. If that is wrong,
    /// the disks that it writes are corrupted
    #[arg(long, required = true)]
    confirm_host_cannot_write: bool,
    /// Isolate it although another node has seen it write to a shared storage pool lately
    #[arg(long)]
    force_despite_evidence: bool,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Debug)]
pub struct Retire {
    #[arg(value_name = "NODE")]
    node: String,
    /// Do not ask
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    write: FinalWriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn isolate(cluster: &Cluster, args: Isolate) -> Result<()> {
    let force_despite_evidence = args.force_despite_evidence;
    let submission = Submission::new(cluster, &args.node, &NodeCommand::Isolate { force_despite_evidence }, args.write);
    let patch = |node: &Node| {
        let incarnation = node.status.as_ref().and_then(|status| status.incarnation).ok_or_else(|| {
            let text = format!("{} has never had a session, so there is nothing of it to isolate", submission.subject);
            let next = if is_pending(node) { take_back(node) } else { submission.subject.command("retire") };
            Error::new(Kind::FailedPrecondition, text).next(format!("if its host never comes: {next}"))
        })?;
        Ok(json!({ "spec": { "isolation": {
            "incarnation": incarnation,
            "confirmHostCannotWrite": args.confirm_host_cannot_write,
            "forceDespiteEvidence": force_despite_evidence,
            "requestId": submission.id,
        }}}))
    };
    let Recorded { record, .. } = submission.run(patch).await?;
    let text = isolated(&submission.subject, &record);
    present(args.output.form(), &Outcome { node: args.node, record, text })
}

fn isolated(subject: &Subject, record: &CommandRecord) -> String {
    let count = |name: &str, one: &str| {
        let count = record.counts.get(name).copied().unwrap_or_default();
        format!("{count} {one}{}", if count == 1 { "" } else { "s" })
    };
    format!(
        "{subject} is isolated: {} and {} released, {} failed",
        count("releasedVolumes", "Volume"),
        count("releasedLayers", "retained layer"),
        count("failedWorkspaces", "Workspace")
    )
}

pub async fn retire(cluster: &Cluster, args: Retire) -> Result<()> {
    let submission = Submission::new(cluster, &args.node, &NodeCommand::Retire, args.write);
    if !args.yes {
        confirm(&Question {
            subject: &submission.subject,
            act: "Retire",
            consequence: "for ever? Its name is never used again.",
            outcome: "is retired for ever",
            verb: "retire",
        })?;
    }
    let patch = |node: &Node| -> Result<Value> {
        if is_pending(node) {
            let text = format!("no host has become {} yet, so there is nothing to retire", submission.subject);
            return Err(Error::new(Kind::FailedPrecondition, text)
                .next(format!("take its token back, and nobody becomes it: {}", take_back(node))));
        }
        Ok(json!({ "spec": {
            "retirement": { "requestId": submission.id },
            // A grant would make a host of a node that is no more.
            "enrollment": null,
        }}))
    };
    let recorded = submission.run(patch).await.map_err(|error| advise(error, &submission.subject));
    let Recorded { record, .. } = recorded?;
    let text = format!("{} is RETIRED", submission.subject);
    present(args.output.form(), &Outcome { node: args.node, record, text })
}

/// Nobody has shown its token. The API refuses to retire such a Node: it can be deleted.
fn is_pending(node: &Node) -> bool {
    let admission = node.status.as_ref().and_then(|status| status.admission);
    admission.is_none_or(|admission| admission == Admission::Pending)
}

fn take_back(node: &Node) -> String {
    format!("{} enrollment revoke {}", program(), node.name_any())
}

fn advise(error: Error, subject: &Subject) -> Error {
    if error.kind == Kind::FailedPrecondition && error.message.contains(refusals::CANNOT_BE_RETIRED) {
        return error.next(format!(
            "empty it: {} --wait; or, when its host is off: {} --confirm-host-cannot-write",
            subject.command("drain"),
            subject.command("isolate")
        ));
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_isolation_is_told_in_its_counts() {
        let record: CommandRecord = serde_json::from_value(json!({
            "id": "a", "operation": "isolate", "digest": "", "result": "Succeeded", "startedAt": "2026-01-01T00:00:00Z",
            "counts": { "releasedVolumes": 2, "releasedLayers": 1 },
        }))
        .unwrap();
        assert_eq!(
            isolated(&super::super::subject("n"), &record),
            "Node \"n\" is isolated: 2 Volumes and 1 retained layer released, 0 Workspaces failed"
        );
    }
}
