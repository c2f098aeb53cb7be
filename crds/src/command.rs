//! Commands that carry an id, and what came of them.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{CommandId, short_digest};

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
    /// What the command did, in numbers: those of an isolation by the names of `status.isolation`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "counts_schema")]
    pub counts: BTreeMap<String, u32>,
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

fn counts_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "maxProperties": 8,
        "additionalProperties": { "type": "integer", "format": "int64", "minimum": 0 },
    })
}

/// A command with everything that its caller gave. What is read at the time is no input: a replay finds other values
/// there.
pub trait Order {
    /// As a command record has it.
    fn operation(&self) -> &'static str;
    /// First 16 hexadecimal digits of the SHA-256 of the input.
    fn digest(&self) -> String;
}

/// A command that stands in a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requested {
    pub id: CommandId,
    pub operation: &'static str,
    pub digest: String,
}

impl Requested {
    pub fn new(id: &CommandId, order: &impl Order) -> Self {
        Self { id: id.clone(), operation: order.operation(), digest: order.digest() }
    }
}

/// First 16 hexadecimal digits of the SHA-256 of the content's JSON, as records and revisions have it.
pub fn digest(content: &impl Serialize) -> String {
    short_digest(serde_json::to_vec(content).unwrap_or_default())
}
