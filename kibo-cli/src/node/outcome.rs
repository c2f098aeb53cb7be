//! What a command answers: its record, which a replay shows as it was.

use kibo_crds::CommandRecord;
use serde::Serialize;

use crate::output::{
    Present,
    words::{enum_word, instant},
};

/// A command that succeeded.
pub struct Outcome {
    pub node: String,
    pub record: CommandRecord,
    /// For people; without a line feed at its end.
    pub text: String,
}

#[derive(Serialize)]
struct View<'a> {
    node_id: &'a str,
    command_id: &'a str,
    operation: &'a str,
    result: String,
    /// Of an isolation: Volumes whose use right was released.
    #[serde(skip_serializing_if = "Option::is_none")]
    released_volumes: Option<u32>,
    /// Retained layers whose use right was released.
    #[serde(skip_serializing_if = "Option::is_none")]
    released_layers: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed_workspaces: Option<u32>,
    /// Of an adoption: Workspaces whose executions were taken back.
    #[serde(skip_serializing_if = "Option::is_none")]
    adopted: Option<u32>,
    /// Executions that had ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    ended: Option<u32>,
    /// Instances whose Workspaces the control plane does not know.
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown_instances: Option<u32>,
    started_at: String,
    finished_at: Option<String>,
}

impl Present for Outcome {
    fn view(&self) -> impl Serialize {
        let count = |name: &str| self.record.counts.get(name).copied();
        View {
            node_id: &self.node,
            command_id: self.record.id.as_str(),
            operation: &self.record.operation,
            result: enum_word(&self.record.result),
            released_volumes: count("releasedVolumes"),
            released_layers: count("releasedLayers"),
            failed_workspaces: count("failedWorkspaces"),
            adopted: count("adopted"),
            ended: count("ended"),
            unknown_instances: count("unknown"),
            started_at: instant(&self.record.started_at),
            finished_at: self.record.finished_at.as_ref().map(instant),
        }
    }

    fn names(&self) -> Vec<String> {
        vec![self.node.clone()]
    }

    fn text(&self, _wide: bool) -> String {
        format!("{}\n", self.text)
    }
}
