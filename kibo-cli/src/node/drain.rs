//! `kibo node drain` and `cancel-drain`.

use clap::Args;
use kibo_crds::{
    Node,
    node::{Admission, NodeCommand, NodePhase},
};
use serde_json::json;

use super::{Submission, WriteArgs, outcome::Outcome, view::drain_requested};
use crate::{
    client::Cluster,
    errors::{Error, Kind, Result, Subject},
    output::{OutputArgs, present, words::enum_word},
    wait::Look,
};

#[derive(Args, Debug)]
pub struct Drain {
    #[arg(value_name = "NODE")]
    node: String,
    /// Wait until the node is DRAINED: nothing runs there, and nothing is held there
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Debug)]
pub struct CancelDrain {
    #[arg(value_name = "NODE")]
    node: String,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn drain(cluster: &Cluster, args: Drain) -> Result<()> {
    let submission = Submission::new(cluster, &args.node, &NodeCommand::Drain, args.write);
    let record = submission.run(request(&submission, true)).await?.record;
    let mut text = format!("{}: drain requested", submission.subject);
    if args.wait {
        let wait = submission.wait("to be DRAINED", "the drain stays requested, and kibo does not submit it again");
        wait.until(|seen| look(seen, &submission.subject)).await?;
        text = format!("{} is DRAINED", submission.subject);
    }
    present(args.output.form(), &Outcome { node: args.node, record, text })
}

pub async fn cancel_drain(cluster: &Cluster, args: CancelDrain) -> Result<()> {
    let submission = Submission::new(cluster, &args.node, &NodeCommand::CancelDrain, args.write);
    let record = submission.run(request(&submission, false)).await?.record;
    let text = format!("{}: drain cancelled", submission.subject);
    present(args.output.form(), &Outcome { node: args.node, record, text })
}

fn request(submission: &Submission, requested: bool) -> impl Fn(&Node) -> Result<serde_json::Value> {
    move |_| Ok(json!({ "spec": { "drain": { "requested": requested, "requestId": submission.id } } }))
}

/// How far a drain has come. What the status says counts only once it has seen the whole spec.
fn look(seen: Option<&Node>, subject: &Subject) -> Result<Look<()>> {
    let over = |how: &str| {
        Error::new(Kind::FailedPrecondition, format!("{subject} {how}, so it does not become DRAINED"))
            .next(format!("look at it: {}", subject.command("get")))
    };
    let node = seen.ok_or_else(|| over("was deleted"))?;
    if !drain_requested(node) {
        return Err(over("is not to be drained any more: the drain was cancelled"));
    }
    let status = node.status.clone().unwrap_or_default();
    match status.admission {
        Some(Admission::Revoked) => return Err(over("was revoked")),
        Some(Admission::Retired) => return Err(over("was retired")),
        _ => {}
    }
    let is_current = status.observed_generation >= node.metadata.generation;
    if is_current && status.phase == Some(NodePhase::Drained) {
        return Ok(Look::Done(()));
    }
    let word = status.phase.as_ref().map(enum_word).unwrap_or_default();
    let obstacle = status.conditions.iter().find(|condition| {
        let wanted = if status.phase == Some(NodePhase::Draining) { "Drained" } else { "Ready" };
        condition.type_ == wanted && condition.status != "True"
    });
    Ok(Look::Waiting(match obstacle {
        Some(condition) => format!("{word}: {}", condition.message),
        None => word,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(spec: &serde_json::Value, status: &serde_json::Value) -> Result<Look<()>> {
        let node = json!({ "metadata": { "name": "n", "generation": 2 }, "spec": spec, "status": status });
        look(Some(&serde_json::from_value(node).unwrap()), &super::super::subject("n"))
    }

    #[test]
    fn a_drain_ends_when_it_is_done_or_cannot_be() {
        let wanted = json!({ "drain": { "requested": true } });
        let drained = json!({ "phase": "Drained", "observedGeneration": 2 });
        assert!(matches!(seen(&wanted, &drained), Ok(Look::Done(()))));
        let before = json!({ "phase": "Drained", "observedGeneration": 1 });
        assert!(matches!(seen(&wanted, &before), Ok(Look::Waiting(_))), "that was an earlier drain");
        for (spec, status) in [
            (json!({ "drain": { "requested": false } }), drained.clone()),
            (wanted.clone(), json!({ "phase": "Revoked", "admission": "Revoked" })),
            (wanted.clone(), json!({ "phase": "Retired", "admission": "Retired" })),
        ] {
            assert_eq!(seen(&spec, &status).unwrap_err().kind, Kind::FailedPrecondition, "{spec} {status}");
        }
        assert!(look(None, &super::super::subject("n")).is_err());
    }

    #[test]
    fn what_it_waits_for_is_said() {
        let condition = |kind: &str, message: &str| json!({ "type": kind, "status": "False", "reason": "R", "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z" });
        let status = |phase: &str| json!({ "phase": phase, "conditions": [condition("Ready", "no session"), condition("Drained", "held: 1")] });
        let wanted = json!({ "drain": { "requested": true } });
        assert_eq!(seen(&wanted, &status("Draining")).unwrap(), Look::Waiting("DRAINING: held: 1".into()));
        assert_eq!(seen(&wanted, &status("Offline")).unwrap(), Look::Waiting("OFFLINE: no session".into()));
    }
}
