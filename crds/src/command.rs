//! Commands that carry an id, and what came of them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::CommandId;

/// What came of a command that carried an id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct CommandRecord {
    pub id: CommandId,
    #[schemars(length(max = 32))]
    pub operation: String,
    /// First 16 hexadecimal digits of the SHA-256 of the input.
    #[schemars(length(max = 16))]
    pub digest: String,
    pub result: CommandResult,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub message: Option<String>,
    pub started_at: Time,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Time>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CommandResult {
    Processing,
    Succeeded,
    Failed,
}
