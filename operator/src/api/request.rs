//! What a request is about, and where its Workspace can be reached.

use std::fmt;

use kibo_crds::{Incarnation, InstanceId, NodeId, Workspace, workspace::WorkspacePhase};

use super::status::ApiError;

/// A part of a Workspace that is not an object of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subresource {
    Exec,
    PortForward,
    FilesRead,
    FilesWrite,
    Log,
    Export,
    Import,
    CancelExport,
    CancelImport,
}

impl Subresource {
    /// What clients may use, for discovery. A WebSocket begins with GET.
    pub const DISCOVERY: [(&str, &[&str]); 6] = [
        ("workspaces/exec", &["create", "get"]),
        ("workspaces/export", &["create", "delete", "get"]),
        ("workspaces/files", &["get", "update"]),
        ("workspaces/import", &["create", "delete", "get"]),
        ("workspaces/log", &["get"]),
        ("workspaces/portforward", &["create", "get"]),
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Exec => "exec",
            Self::PortForward => "portforward",
            Self::FilesRead | Self::FilesWrite => "files",
            Self::Log => "log",
            Self::Export | Self::CancelExport => "export",
            Self::Import | Self::CancelImport => "import",
        }
    }

    /// What a user must be allowed. A command or a connection changes things, and a write does, however the request
    /// is made: all of them begin with GET. An export keeps the disks from being used, and has all that is in them: who
    /// only reads objects takes none.
    pub fn verb(self) -> &'static str {
        match self {
            Self::Exec | Self::PortForward | Self::Export | Self::Import => "create",
            Self::CancelExport | Self::CancelImport => "delete",
            Self::FilesWrite => "update",
            Self::FilesRead | Self::Log => "get",
        }
    }
}

impl fmt::Display for Subresource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a command can run.
#[derive(Debug, PartialEq, Eq)]
pub struct Running {
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub instance: InstanceId,
}

/// Where the Workspace runs now; a guest that is not Available takes no command.
pub fn running(workspace: &Workspace) -> Result<Running, ApiError> {
    let status = workspace.status.as_ref();
    let phase = status.and_then(|status| status.phase);
    match status.and_then(|status| status.execution.as_ref()) {
        Some(execution) if phase == Some(WorkspacePhase::Available) => Ok(Running {
            node: execution.node.clone(),
            incarnation: execution.incarnation,
            instance: execution.instance_id,
        }),
        _ => Err(not_running(workspace, phase)),
    }
}

/// The node that has the newest log of the Workspace. It is there from the first start on.
pub fn log_keeper(workspace: &Workspace) -> Result<NodeId, ApiError> {
    let status = workspace.status.as_ref();
    let now = status.and_then(|status| status.execution.as_ref()).map(|execution| &execution.node);
    let last = status.and_then(|status| status.last_execution.as_ref()).map(|execution| &execution.node);
    now.or(last).cloned().ok_or_else(|| not_running(workspace, status.and_then(|status| status.phase)))
}

fn not_running(workspace: &Workspace, phase: Option<WorkspacePhase>) -> ApiError {
    let name = workspace.metadata.name.clone().unwrap_or_default();
    let said = workspace.status.as_ref().and_then(|status| status.message.as_deref()).unwrap_or_default();
    let advice = match phase {
        None | Some(WorkspacePhase::Creating | WorkspacePhase::Starting | WorkspacePhase::Available) => {
            format!(
                "wait until it is Available, for example with kubectl wait --for=condition=Available workspace/{name}"
            )
        }
        Some(WorkspacePhase::Stopping) => "wait until it is Stopped, then start it".to_owned(),
        Some(WorkspacePhase::Stopped) => format!("start it first, for example with kibo workspace start {name}"),
        Some(WorkspacePhase::Failed) => format!("start it again, for example with kibo workspace start {name}"),
        Some(WorkspacePhase::Deleting) => "it is being deleted, so nothing of it can be reached".to_owned(),
    };
    let advice = if said.is_empty() { advice } else { format!("{advice} (its status says: {said})") };
    ApiError::NotRunning { name, phase, advice }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use kibo_crds::{
        Bytes, MilliCpu, SequenceNumber,
        workspace::{Execution, LastExecution, WorkspaceSpec, WorkspaceStatus},
    };

    use super::*;

    fn time() -> Time {
        Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH)
    }

    fn execution(node: &str) -> Execution {
        Execution {
            instance_id: InstanceId::generate(),
            node: node.parse().unwrap(),
            incarnation: Incarnation(3),
            cpu_milli: MilliCpu(1000),
            memory_bytes: Bytes(1 << 28),
            last_seq: SequenceNumber(0),
            started_at: time(),
            address: None,
        }
    }

    fn workspace(phase: Option<WorkspacePhase>, execution: Option<Execution>) -> Workspace {
        let spec: WorkspaceSpec = serde_json::from_value(serde_json::json!({ "template": "debian-12" })).unwrap();
        let mut workspace = Workspace::new("dev", spec);
        workspace.status = Some(WorkspaceStatus { phase, execution, ..WorkspaceStatus::default() });
        workspace
    }

    #[test]
    fn a_command_runs_only_in_an_available_guest() {
        use WorkspacePhase as P;
        let on_node = || Some(execution("node-1"));
        for (phase, execution, word) in [
            (None, None, "not seen"),
            (Some(P::Creating), None, "Creating"),
            (Some(P::Starting), on_node(), "Starting"),
            (Some(P::Stopping), on_node(), "Stopping"),
            (Some(P::Stopped), None, "kibo workspace start dev"),
            (Some(P::Failed), None, "start it again"),
            (Some(P::Deleting), on_node(), "being deleted"),
        ] {
            let error = running(&workspace(phase, execution)).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        let place = running(&workspace(Some(P::Available), on_node())).unwrap();
        assert_eq!((place.node.as_str(), place.incarnation), ("node-1", Incarnation(3)));
    }

    #[test]
    fn the_log_is_where_the_workspace_runs_or_ran_last() {
        let last = |workspace: &mut Workspace| {
            workspace.status.as_mut().unwrap().last_execution = Some(LastExecution {
                instance_id: InstanceId::generate(),
                node: "node-2".parse().unwrap(),
                incarnation: Incarnation(1),
                ended_at: time(),
                reason: "Stopped".to_owned(),
            });
        };
        let mut starting = workspace(Some(WorkspacePhase::Starting), Some(execution("node-1")));
        last(&mut starting);
        assert_eq!(log_keeper(&starting).unwrap().as_str(), "node-1");
        let mut stopped = workspace(Some(WorkspacePhase::Stopped), None);
        last(&mut stopped);
        assert_eq!(log_keeper(&stopped).unwrap().as_str(), "node-2");
        assert!(log_keeper(&workspace(Some(WorkspacePhase::Creating), None)).is_err());
    }

    #[test]
    fn what_the_status_says_is_passed_on() {
        let mut failed = workspace(Some(WorkspacePhase::Failed), None);
        failed.status.as_mut().unwrap().message = Some("the root image is not one".to_owned());
        assert!(running(&failed).unwrap_err().to_string().contains("the root image is not one"));
    }
}
