//! Taking a Workspace's disks out into an archive, and making a Workspace from one.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Epoch, Incarnation, InstanceId, NodeId};

/// Where the disks of a new Workspace come from. It cannot be started before they are complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Import {
    /// SHA-256 of the archive's beginning, in hexadecimal digits: an archive with another one is not taken.
    #[schemars(regex(pattern = "^[0-9a-f]{64}$"), length(max = 64))]
    pub archive: String,
    /// The archive has the bytes of the Volume too, which `volume.new` asks for.
    #[serde(default)]
    pub volume: bool,
}

/// The transfer that is under way, or the last one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct TransferStatus {
    /// Names it in the grants of its objects.
    pub id: InstanceId,
    pub kind: TransferKind,
    pub state: TransferState,
    /// Who asked for it.
    #[schemars(length(max = 256))]
    pub user: String,
    /// The node that reads or writes the disks.
    pub node: NodeId,
    pub incarnation: Incarnation,
    /// Of the grant of the writable layer.
    pub epoch: Epoch,
    pub started_at: Time,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Time>,
    /// Why nothing came of it: CamelCase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub reason: Option<String>,
    /// The same for people, with what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub message: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TransferKind {
    Export,
    Import,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TransferState {
    /// The disks are granted to the node for it, and nobody else may use them.
    Running,
    /// All that it was for is done; the node is being asked to let go of them.
    Completing,
    /// Nothing comes of it any more; the same.
    Ending,
    Finished,
    Failed,
}

impl TransferState {
    /// The node is being asked to let go of the disks.
    pub fn is_letting_go(self) -> bool {
        matches!(self, Self::Completing | Self::Ending)
    }

    /// Nothing is left to be done.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Finished | Self::Failed)
    }
}
