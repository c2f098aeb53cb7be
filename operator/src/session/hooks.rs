//! What the session server asks of the other rooms. Workspaces implement the first three, streams the last.

use futures::stream::BoxStream;
use kibo_crds::{Bytes, Incarnation, InstanceId, MilliCpu, NodeId, PoolId};
use kibo_protocol::v1;
use tonic::async_trait;

use crate::evidence::Evidence;

/// A step that could not be taken now, such as a read that timed out. The session server tries again
/// with a backoff while the session lives.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Retry(pub String);

impl Retry {
    pub fn because(error: impl std::fmt::Display) -> Self {
        Self(error.to_string())
    }
}

/// What a quorum read says of an Instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// It is its Workspace's execution, or was just made so.
    Holds,
    /// Its Workspace has no such execution on this node.
    NotExecution,
    /// There is no Workspace with that uid.
    NoWorkspace,
}

/// What came of an adoption.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Workspaces whose executions run on the node.
    pub adopted: u32,
    /// Workspaces that were taken for running there, and had ended.
    pub ended: u32,
    /// Instances of Workspaces that do not exist: id, namespace and name.
    pub unknown: Vec<String>,
}

/// The executions that the control plane holds for a node.
#[async_trait]
pub trait DesiredSet: Send + Sync {
    /// Everything that is to run on the node in this incarnation. Called after the session was committed
    /// and entered into the registry, so that a commit that is missing here reaches the node as a message.
    async fn desired(&self, node: &NodeId, incarnation: Incarnation) -> Result<Vec<v1::Desired>, Retry>;

    /// Whether a quorum read of the Workspace with this uid proves that this Instance is not its execution
    /// on this node.
    async fn proves_absent(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        instance: InstanceId,
        workspace_uid: &str,
    ) -> Result<Absence, Retry>;

    /// Makes what a node proved to have what its Workspaces and Volumes say, before its session is committed.
    async fn adopt(&self, evidence: &Evidence) -> Result<Adopted, Retry>;

    /// The node came with this incarnation, which was committed: what older ones held is void.
    async fn incarnation_began(&self, node: &NodeId, incarnation: Incarnation);
}

/// Takes the events of Instances in.
#[async_trait]
pub trait EventIngest: Send + Sync {
    /// Writes the effect of one event. `Ok` means: committed, or nothing to do (seen before, or not of a
    /// current Instance); the node may forget it. Events of one Instance come one after the other, in order.
    async fn ingest(&self, node: &NodeId, incarnation: Incarnation, event: v1::InstanceEvent) -> Result<(), Retry>;
}

/// Hears how moves go.
pub trait MoveIngest: Send + Sync {
    fn moved(&self, node: &NodeId, progress: &v1::MoveProgress);
}

/// What the executions, holders and offers in flight add up to, from the leader's own records.
/// Who changes them calls [`crate::node::NodeIndex::touch`], so that the Node's status follows.
pub trait Usage: Send + Sync {
    fn of_node(&self, node: &NodeId) -> NodeUsage;
    /// The node is to become empty: what it keeps only for want of another node in the pool is looked at again.
    fn give_back(&self, node: &NodeId);
    fn of_pool(&self, pool: &PoolId) -> PoolUsage;
    /// Whether there is a Workspace or a Volume with this uid.
    fn owns(&self, uid: &str) -> bool;
    /// The pool was declared lost: whose disks were there is looked at again.
    fn pool_lost(&self, pool: &PoolId);
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeUsage {
    pub cpu: MilliCpu,
    /// Guest memory and the VMMs' own.
    pub memory: Bytes,
    pub executions: u32,
    /// Volumes and layers whose use right the node holds.
    pub held_objects: u32,
    /// Those of them that are not in use, and stay with the node because no other is attached to their pool.
    pub idle_objects: u32,
    /// Offers and commits in flight.
    pub in_flight: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    pub allocated: Bytes,
    pub objects: u32,
}

/// Takes the streams that nodes dial back.
#[async_trait]
pub trait StreamAcceptor: Send + Sync {
    /// A node dialled `Attach` and showed `hello`; its further frames come from `inbound`. The answer is
    /// what goes to the node, or why the stream is refused.
    async fn attach(
        &self,
        hello: v1::AttachHello,
        inbound: tonic::Streaming<v1::StreamFromNode>,
    ) -> Result<BoxStream<'static, Result<v1::StreamToNode, tonic::Status>>, tonic::Status>;

    /// The node said on its session that it will not dial.
    fn refused(&self, node: &NodeId, refused: v1::StreamRefused);

    /// The node's session ended: streams that were asked for and not dialled will not come.
    fn session_ended(&self, node: &NodeId);
}
