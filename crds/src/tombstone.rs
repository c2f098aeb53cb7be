//! WorkspaceTombstone: what remains known of a deleted Workspace, for a while.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::{WorkspaceId, workspace::LastExecution};

/// The kept record of a deleted Workspace; its name is the Workspace's id.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kibotos.dev",
    version = "v1alpha1",
    kind = "WorkspaceTombstone",
    plural = "workspacetombstones",
    shortname = "wstomb",
    derive = "PartialEq",
    printcolumn(name = "Namespace", type_ = "string", json_path = ".spec.namespace"),
    printcolumn(name = "Workspace", type_ = "string", json_path = ".spec.name"),
    printcolumn(name = "Deleted", type_ = "date", json_path = ".spec.deletedAt"),
    printcolumn(name = "Last-Node", type_ = "string", json_path = ".spec.lastExecution.node")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf")
    .message("a tombstone is a record and never changes")
    .reason(Reason::FieldValueForbidden))]
pub struct WorkspaceTombstoneSpec {
    pub id: WorkspaceId,
    #[schemars(length(max = 63))]
    pub namespace: String,
    #[schemars(length(max = 253))]
    pub name: String,
    #[schemars(length(max = 36))]
    pub uid: String,
    #[schemars(length(max = 63))]
    pub template: String,
    pub deleted_at: Time,
    /// When the operator removes this record.
    pub expires_at: Time,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_execution: Option<LastExecution>,
}
