//! `kibo node adopt`: after the control plane was put back to an older state, what becomes of a node that is ahead of it.

use std::fmt::Write as _;

use clap::Args;
use kibo_crds::{
    Node,
    node::{Adoption, AdoptionAction, AdoptionResult, UnknownInstances},
};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};

use crate::{
    cli::WaitArgs,
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    node::subject,
    output::print,
    wait::{Look, Wait},
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
    wait: WaitArgs,
}

pub async fn adopt(cluster: &Cluster, args: Adopt) -> Result<()> {
    let api = cluster.cluster_wide::<Node>();
    let subject = subject(&args.node);
    let node = api.get(&args.node).await.on(&subject)?;
    let adoption = adoption(&node, args.destroy, args.destroy_unknown, &subject)?;
    let patch = serde_json::json!({
        "metadata": { "resourceVersion": node.resource_version() },
        "spec": { "adoption": {
            "quarantine": adoption.quarantine,
            "action": adoption.action,
            "unknown": adoption.unknown,
            "requestId": null,
        }},
    });
    api.patch(&args.node, &PatchParams::default(), &Patch::Merge(patch)).await.on(&subject)?;
    if !args.wait.wanted() {
        return print(&format!("{subject}: adoption requested\n"));
    }
    let done = outcome(cluster, api, &subject, &adoption).await?;
    print(&text(&subject, &done))
}

/// Names exactly the accident that the node is in, or was adopted from.
fn adoption(node: &Node, destroy: bool, destroy_unknown: bool, subject: &Subject) -> Result<Adoption> {
    let status = node.status.clone().unwrap_or_default();
    let adopted = || status.adoption.filter(|_| destroy_unknown).map(|adoption| adoption.quarantine);
    let quarantine = status.quarantine.map(|quarantine| quarantine.id).or_else(adopted).ok_or_else(|| {
        let text = format!("{subject} is not in quarantine: it is not ahead of this control plane");
        Error::new(Kind::FailedPrecondition, text).next(format!("see how it stands: {}", subject.command("get")))
    })?;
    Ok(Adoption {
        quarantine,
        action: if destroy { AdoptionAction::Destroy } else { AdoptionAction::Adopt },
        unknown: if destroy_unknown { UnknownInstances::Destroy } else { UnknownInstances::Keep },
        request_id: None,
    })
}

async fn outcome(cluster: &Cluster, api: Api<Node>, subject: &Subject, wanted: &Adoption) -> Result<AdoptionResult> {
    let wait = Wait {
        api,
        subject,
        goal: "to be adopted",
        timeout: cluster.timeout,
        remains: "the adoption goes on when the node opens its next session",
        go_on: subject.command("get"),
    };
    wait.until(|seen| look(seen, wanted, subject)).await
}

fn look(seen: Option<&Node>, wanted: &Adoption, subject: &Subject) -> Result<Look<AdoptionResult>> {
    let node = seen.ok_or_else(|| Error::gone(subject))?;
    let status = node.status.clone().unwrap_or_default();
    let ordered = node.spec.adoption.as_ref();
    if ordered.is_none_or(|ordered| ordered.quarantine != wanted.quarantine || ordered.action != wanted.action) {
        let text = format!("{subject}: another adoption was ordered in place of this one");
        return Err(Error::new(Kind::Aborted, text).next(format!("see which: {}", subject.command("get"))));
    }
    let is_alive = status.has_live_session();
    let done = status.adoption.filter(|done| done.quarantine == wanted.quarantine && done.unknown == wanted.unknown);
    match done {
        Some(done) if is_alive && status.quarantine.is_none() => Ok(Look::Done(done)),
        _ => Ok(Look::Waiting(
            status.quarantine.map_or_else(|| "the node opens its session".to_owned(), |quarantine| quarantine.message),
        )),
    }
}

fn text(subject: &Subject, done: &AdoptionResult) -> String {
    let mut text = match done.action {
        AdoptionAction::Adopt => format!(
            "{subject} is adopted: {} executions taken back, {} had ended since the backup\n",
            done.adopted, done.ended
        ),
        AdoptionAction::Destroy => {
            format!("{subject} is adopted with nothing running: {} executions have ended\n", done.ended)
        }
    };
    if done.unknown_count > 0 && done.unknown == UnknownInstances::Keep {
        let _ = writeln!(
            text,
            "{} Instances belong to Workspaces that this control plane does not know, and run on: {}\n\
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

    fn node(status: &serde_json::Value) -> Node {
        serde_json::from_value(serde_json::json!({
            "metadata": { "name": "n" },
            "spec": { "adoption": { "quarantine": "q-1", "action": "Adopt", "unknown": "Keep" } },
            "status": status,
        }))
        .unwrap()
    }

    fn quarantine() -> serde_json::Value {
        serde_json::json!({ "id": "q-2", "message": "m", "instances": 1, "since": "1970-01-01T00:00:00Z" })
    }

    fn adopted() -> serde_json::Value {
        serde_json::json!({
            "quarantine": "q-1", "incarnation": 1, "action": "Adopt", "unknown": "Keep", "adopted": 2, "ended": 1,
            "unknownCount": 1, "unknownInstances": ["inst-1 (ns/w)"], "finishedAt": "1970-01-01T00:00:00Z",
        })
    }

    #[test]
    fn an_adoption_names_the_accident_that_the_node_is_in() {
        let subject = subject("n");
        let named = |status: serde_json::Value, destroy, unknown| {
            adoption(&node(&status), destroy, unknown, &subject).map(|it| it.quarantine).map_err(|it| it.kind)
        };
        assert_eq!(named(serde_json::json!({ "quarantine": quarantine() }), false, false), Ok("q-2".to_owned()));
        let after = serde_json::json!({ "adoption": adopted() });
        assert_eq!(named(after.clone(), false, true), Ok("q-1".to_owned()), "unknown ones, after the adoption");
        assert_eq!(named(after, false, false), Err(Kind::FailedPrecondition));
        assert_eq!(named(serde_json::json!({}), true, false), Err(Kind::FailedPrecondition));
    }

    #[test]
    fn it_is_done_when_the_session_is_open() {
        let subject = subject("n");
        let wanted = node(&serde_json::json!({})).spec.adoption.unwrap();
        let session = serde_json::json!({
            "id": "s", "alive": true, "incarnation": 1, "bootId": "b", "version": "v", "startedAt": "1970-01-01T00:00:00Z",
        });
        let waiting = node(&serde_json::json!({ "quarantine": quarantine() }));
        assert_eq!(look(Some(&waiting), &wanted, &subject).unwrap(), Look::Waiting("m".into()));
        let done = node(&serde_json::json!({ "session": session, "adoption": adopted() }));
        let Look::Done(done) = look(Some(&done), &wanted, &subject).unwrap() else { panic!("not done") };
        let text = text(&subject, &done);
        assert!(text.contains("2 executions taken back, 1 had ended") && text.contains("inst-1 (ns/w)"), "{text}");
    }
}
