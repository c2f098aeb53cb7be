//! Moving an object (a Volume, a writable layer) to another storage pool.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Bytes, CommandId, Epoch, Incarnation, NodeId, PoolId, node::Holder};

/// Of a whole object: a move that is under way is not replaced by another one.
pub(crate) const ONE_MOVE_AT_A_TIME: &str = "(has(self.spec.move) == has(oldSelf.spec.move) && (!has(self.spec.move) || self.spec.move == oldSelf.spec.move)) || !has(self.spec.move) || !(has(self.status) && has(self.status.move) && self.status.move.state in ['Copying', 'Removing', 'Cancelling', 'Clearing'])";

/// One request to move an object. Taking it away cancels it, as long as the object is still where it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.requestId) || !has(oldSelf.requestId) || self.requestId != oldSelf.requestId || self == oldSelf")
        .message("move.requestId was already used with another pool: choose a new requestId")
        .reason(Reason::FieldValueForbidden),
)]
pub struct MoveRequest {
    /// The pool that the object is to be in.
    pub to: PoolId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
}

/// What became of the newest request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct MoveStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<CommandId>,
    pub to: PoolId,
    pub state: MoveState,
    /// Where the object was when the move began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<PoolId>,
    /// The node that copies, and that removes what is left over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<Incarnation>,
    /// Of the grant under which it is copied; what is left over in a pool is of this epoch or an older one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    /// The pool with bytes that have to be removed yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leftover: Option<PoolId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied_bytes: Option<Bytes>,
    /// What the image occupies; its size may be larger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<Bytes>,
    pub started_at: Time,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Time>,
    /// Why it waits, was refused or failed: CamelCase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub reason: Option<String>,
    /// The same for people, with what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub message: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MoveState {
    /// Accepted, and waits for its turn or its node; the object may be used.
    Pending,
    /// The object cannot be used.
    Copying,
    /// The object is in the new pool and may be used; the old copy is being removed.
    Removing,
    /// The object stays where it is, and can be used once the copying has stopped.
    Cancelling,
    /// The object is where it was and may be used; what was copied is being removed.
    Clearing,
    Finished,
    Failed,
    Cancelled,
}

impl MoveState {
    /// Nothing is left to be done.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Finished | Self::Failed | Self::Cancelled)
    }

    /// A node copies or stops copying: nobody else may use the object.
    pub fn holds(self) -> bool {
        matches!(self, Self::Copying | Self::Cancelling)
    }
}

impl MoveStatus {
    /// The node that removes what is left over. It is not empty before that is done, though nothing gives it a right to
    /// the object any more.
    pub fn remover(&self) -> Option<Holder> {
        let is_given_up = matches!(self.state, MoveState::Cancelling | MoveState::Clearing);
        let removes = (is_given_up || self.state == MoveState::Removing) && self.leftover.is_some();
        let (node, incarnation) = (self.node.clone()?, self.incarnation?);
        removes.then(|| Holder { node, incarnation, epoch: self.epoch.unwrap_or_default(), idle: false })
    }

    /// Whether this is about that request.
    pub fn answers(&self, request: &MoveRequest) -> bool {
        self.to == request.to && self.request_id == request.request_id
    }
}
