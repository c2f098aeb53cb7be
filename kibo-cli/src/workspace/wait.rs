//! `kibo workspace wait`.

use std::{fmt, str::FromStr};

use clap::Args;
use kibo_crds::{Workspace, workspace::WorkspacePhase};
use kube::{Api, ResourceExt as _};

use super::{
    power::{failed, waits_for},
    target,
};
use crate::{
    client::Cluster,
    errors::{Error, Kind, Result, Subject},
    output::{print, words::enum_word},
    wait::{Look, Wait},
};

#[derive(Args, Debug)]
pub struct WaitFor {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// available, stopped, failed, deleted, or condition=TYPE[=STATUS]
    #[arg(long = "for", value_name = "WHAT", default_value = "available")]
    goal: Goal,
}

/// What is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Goal {
    Phase(WorkspacePhase),
    Deleted,
    Condition { kind: String, status: String },
}

impl FromStr for Goal {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(condition) = text.strip_prefix("condition=") {
            let (kind, status) = condition.split_once('=').unwrap_or((condition, "True"));
            let status = ["True", "False", "Unknown"].iter().find(|known| known.eq_ignore_ascii_case(status));
            let status = status.ok_or("the status of a condition is True, False or Unknown")?;
            return Ok(Self::Condition { kind: kind.to_owned(), status: (*status).to_owned() });
        }
        Ok(match text.to_ascii_lowercase().as_str() {
            "available" => Self::Phase(WorkspacePhase::Available),
            "stopped" => Self::Phase(WorkspacePhase::Stopped),
            "failed" => Self::Phase(WorkspacePhase::Failed),
            "deleted" => Self::Deleted,
            _ => return Err("must be available, stopped, failed, deleted or condition=TYPE[=STATUS]".to_owned()),
        })
    }
}

/// As it is typed.
impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Phase(phase) => f.write_str(&enum_word(phase).to_ascii_lowercase()),
            Self::Deleted => f.write_str("deleted"),
            Self::Condition { kind, status } => write!(f, "condition={kind}={status}"),
        }
    }
}

impl Goal {
    fn text(&self) -> String {
        match self {
            Self::Phase(phase) => format!("to be {}", enum_word(phase)),
            Self::Deleted => "to be gone".to_owned(),
            Self::Condition { kind, status } => format!("to have the condition {kind}={status}"),
        }
    }
}

pub async fn wait(cluster: &Cluster, args: WaitFor) -> Result<()> {
    let (workspace, subject) = match target::fetch(cluster, &args.workspace).await {
        Err(error) if error.kind == Kind::NotFound && args.goal == Goal::Deleted => return Ok(()),
        fetched => fetched?,
    };
    let api: Api<Workspace> = cluster.namespaced(&workspace.namespace().unwrap_or_default());
    let uid = workspace.uid();
    let goal = args.goal.text();
    let wait = Wait {
        api,
        subject: &subject,
        goal: &goal,
        timeout: cluster.timeout,
        remains: "nothing was changed by waiting",
        go_on: format!("{} --for {} --timeout 30m", subject.command("wait"), args.goal),
    };
    wait.until(|seen| look(seen.filter(|workspace| workspace.uid() == uid), &args.goal, &subject)).await?;
    print(&format!("{subject} {}\n", goal.replacen("to be", "is", 1).replacen("to have", "has", 1)))
}

fn look(seen: Option<&Workspace>, goal: &Goal, subject: &Subject) -> Result<Look<()>> {
    let Some(workspace) = seen else {
        return match goal {
            Goal::Deleted => Ok(Look::Done(())),
            _ => Err(Error::new(Kind::FailedPrecondition, format!("{subject} was deleted meanwhile"))),
        };
    };
    let status = workspace.status.clone().unwrap_or_default();
    let reached = match goal {
        Goal::Phase(phase) => status.phase == Some(*phase),
        Goal::Deleted => false,
        Goal::Condition { kind, status: wanted } => {
            status.conditions.iter().any(|condition| condition.type_ == *kind && condition.status == *wanted)
        }
    };
    if reached {
        return Ok(Look::Done(()));
    }
    // A Workspace stays failed or stopped until somebody asks for something else.
    let settled = workspace.is_power_request_consumed();
    match (goal, status.phase) {
        (Goal::Phase(_), Some(WorkspacePhase::Failed)) if settled => {
            Err(failed(subject, "has failed", status.reason.as_deref(), status.message.as_deref()))
        }
        (Goal::Phase(WorkspacePhase::Available), Some(WorkspacePhase::Stopped)) if settled => {
            Err(Error::new(Kind::FailedPrecondition, format!("{subject} is STOPPED and nobody has asked to start it"))
                .next(format!("start it: {}", subject.command("start"))))
        }
        _ => Ok(Look::Waiting(waits_for(workspace))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn see(goal: &str, status: &Value) -> Result<Look<()>> {
        let workspace: Workspace = serde_json::from_value(json!({
            "metadata": { "name": "dev", "namespace": "default" }, "spec": { "template": "t" }, "status": status,
        }))
        .unwrap();
        look(Some(&workspace), &goal.parse().unwrap(), &Subject::namespaced("Workspace", "dev", "default"))
    }

    #[test]
    fn goals_are_read() {
        assert_eq!("AVAILABLE".parse(), Ok(Goal::Phase(WorkspacePhase::Available)));
        let condition = |status: &str| Goal::Condition { kind: "Placed".into(), status: status.into() };
        assert_eq!("condition=Placed".parse(), Ok(condition("True")));
        assert_eq!("condition=Placed=false".parse(), Ok(condition("False")));
        for text in ["available", "stopped", "failed", "deleted", "condition=Placed=False"] {
            assert_eq!(text.parse::<Goal>().unwrap().to_string(), text, "as it was typed");
        }
        assert!("ready".parse::<Goal>().is_err() && "condition=Placed=maybe".parse::<Goal>().is_err());
    }

    #[test]
    fn a_wait_ends_with_its_goal_or_when_the_goal_is_out_of_reach() {
        let power = json!({ "consumed": { "state": "Running" }, "consumedAt": "2026-01-01T00:00:00Z" });
        assert_eq!(see("available", &json!({ "phase": "Available" })).unwrap(), Look::Done(()));
        assert!(matches!(see("available", &json!({ "phase": "Failed" })), Ok(Look::Waiting(_))));
        let failed = json!({ "phase": "Failed", "reason": "ResourceExhausted", "power": power });
        assert_eq!(see("available", &failed).unwrap_err().kind, Kind::ResourceExhausted);
        let stopped = json!({ "phase": "Stopped", "power": power });
        assert_eq!(see("available", &stopped).unwrap_err().kind, Kind::FailedPrecondition);
        assert_eq!(see("stopped", &stopped).unwrap(), Look::Done(()));
        let subject = Subject::namespaced("Workspace", "dev", "default");
        assert_eq!(look(None, &Goal::Deleted, &subject).unwrap(), Look::Done(()));
        assert!(look(None, &Goal::Phase(WorkspacePhase::Stopped), &subject).is_err());
    }
}
