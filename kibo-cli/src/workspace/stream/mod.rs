//! What goes into a running guest and comes out of it: commands, files, connections, logs. All of it passes through
//! the aggregated API, so that a kubeconfig is all that it takes and RBAC on `workspaces/exec`, `files`,
//! `portforward` and `log` decides.

pub mod channels;
pub mod cp;
pub mod exec;
pub mod logs;
pub mod port_forward;
mod resume;
mod terminal;

use kibo_crds::{Workspace, workspace::WorkspacePhase};

use crate::{
    client::AGGREGATED_API,
    errors::{Error, Kind, Result, Subject},
    output::words::enum_word,
};

/// Where the aggregated API serves the parts of a Workspace.
pub fn path(subject: &Subject, subresource: &str) -> String {
    let namespace = subject.namespace.as_deref().unwrap_or_default();
    let name = &subject.name;
    format!("{AGGREGATED_API}/namespaces/{namespace}/workspaces/{name}/{subresource}")
}

fn phase(workspace: &Workspace) -> Option<WorkspacePhase> {
    workspace.status.as_ref()?.phase
}

/// Says at once, and with what to do, that nothing can be reached in a guest that does not run.
fn check_available(workspace: &Workspace, subject: &Subject, what: &str) -> Result<()> {
    let phase = phase(workspace);
    if phase == Some(WorkspacePhase::Available) {
        return Ok(());
    }
    let state = phase.as_ref().map_or_else(|| "not AVAILABLE yet".to_owned(), enum_word);
    let error = Error::new(Kind::FailedPrecondition, format!("{subject} is {state}, so {what}"));
    Err(match phase {
        Some(WorkspacePhase::Stopped | WorkspacePhase::Failed) => {
            error.next(format!("start it: {}", subject.command("start")))
        }
        Some(WorkspacePhase::Stopping | WorkspacePhase::Deleting) => {
            error.next(format!("see what it waits for: {}", subject.command("get")))
        }
        _ => error.next(format!("wait for it: {}", subject.command("wait"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paths_are_those_of_the_aggregated_api() {
        assert_eq!(
            path(&Subject::namespaced("Workspace", "dev", "team"), "exec"),
            "/apis/subresources.kibotos.dev/v1alpha1/namespaces/team/workspaces/dev/exec"
        );
    }
}
