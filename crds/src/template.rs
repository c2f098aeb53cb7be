//! Template: what a Workspace is made from. It never changes; a new version is a new Template.

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{CpuQuantity, MemoryQuantity, SizeQuantity};

/// A root image with what runs in it, and the sizes of a Workspace that names none.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kibotos.dev",
    version = "v1alpha1",
    kind = "Template",
    plural = "templates",
    shortname = "ktpl",
    category = "kibo",
    derive = "PartialEq",
    printcolumn(name = "Root-Image", type_ = "string", json_path = ".spec.rootImage"),
    printcolumn(name = "CPU", type_ = "string", json_path = ".spec.resources.cpu"),
    printcolumn(name = "Memory", type_ = "string", json_path = ".spec.resources.memory"),
    printcolumn(name = "Layer", type_ = "string", json_path = ".spec.writableLayer.size"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("size(self.metadata.name) <= 63")
        .message("the name of a Template must be at most 63 characters")
        .reason(Reason::FieldValueInvalid),
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf")
    .message("a Template is immutable: create one with another name")
    .reason(Reason::FieldValueForbidden))]
pub struct TemplateSpec {
    /// Name of a read-only root image that the nodes have.
    #[schemars(regex(pattern = "^[a-z0-9]([-._a-z0-9]*[a-z0-9])?$"), length(max = 63))]
    pub root_image: String,
    pub resources: TemplateResources,
    pub writable_layer: TemplateLayer,
    /// What runs in the guest; absent: nothing but what is executed later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<Entrypoint>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateResources {
    pub cpu: CpuQuantity,
    pub memory: MemoryQuantity,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateLayer {
    pub size: SizeQuantity,
}

/// A process of the guest whose output is the Workspace's log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Entrypoint {
    /// Program and arguments; not run through a shell.
    #[schemars(length(min = 1, max = 64), inner(length(max = 4096)))]
    pub command: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "env_schema")]
    pub env: BTreeMap<String, String>,
    /// Absolute; absent: `/`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^/"), length(max = 4096))]
    pub working_dir: Option<String>,
    #[serde(default)]
    pub restart: RestartPolicy,
}

fn env_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "maxProperties": 128,
        "additionalProperties": { "type": "string", "maxLength": 4096 },
    })
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RestartPolicy {
    Never,
    OnFailure,
    #[default]
    Always,
}
