//! What a decision about a Workspace looks at.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{Bytes, Incarnation, InstanceId, NodeId, PoolId, Template, Volume, Workspace, WorkspaceId};

use crate::{moving::Heard, node::Void, space::Room, transfer::Wish};

/// Label of a Volume that was made with a Workspace; its value is that Workspace's uid.
pub const CREATED_FOR: &str = "kibotos.dev/created-for";

/// The cluster around a Workspace.
pub trait Cluster: Sync {
    /// Whether what this incarnation of a node holds no longer counts.
    fn void(&self, node: &NodeId, incarnation: Incarnation) -> Option<Void>;
    /// Incarnation of the node's live session, once it has its desired set.
    fn session(&self, node: &NodeId) -> Option<Incarnation>;
    /// Whether this incarnation of a node is reachable: `false` once its silence is to be said, `None` while nothing is
    /// known.
    fn is_reachable(&self, node: &NodeId, incarnation: Incarnation) -> Option<bool> {
        if self.session(node) == Some(incarnation) { Some(true) } else { self.is_offline(node).then_some(false) }
    }
    /// Whether the watchdog wants Workspaces to say that the node is silent.
    fn is_offline(&self, node: &NodeId) -> bool;
    /// The leader is new and its nodes may just be on their way: say nothing about a missing session yet.
    fn is_settling(&self) -> bool;
    /// Whether a node other than this one is a member of the pool, if it reaches it just now or not.
    fn others_reach(&self, pool: &PoolId, node: &NodeId) -> bool;
    /// Nodes with a live session that reach the pool now, by name.
    fn reachable_members(&self, pool: &PoolId) -> Vec<(NodeId, Incarnation)>;
    /// Whether the pool was declared lost: nothing in it is ever used again.
    fn is_lost(&self, pool: &PoolId) -> bool;
    /// All members of the pool, by name.
    fn members(&self, pool: &PoolId) -> Vec<NodeId>;
    /// What may still be put into the pool; `None` while no node that reaches it can say.
    fn room_in(&self, _pool: &PoolId) -> Option<Room> {
        None
    }
    /// Whether the node of this execution has been told of it in its current session.
    fn was_told(&self, instance: InstanceId) -> bool;
    /// What a node may put into a pool, as far as that is known.
    fn free_in(&self, _node: &NodeId, _pool: &PoolId) -> Option<Room> {
        None
    }
    /// What was heard of the move of this object.
    fn heard(&self, _uid: &str) -> Heard {
        Heard::default()
    }
    /// What somebody asks for of this Workspace's disks.
    fn transfer(&self, _uid: &str) -> Option<Wish> {
        None
    }
}

/// Everything that a decision depends on.
pub struct Sight<'a> {
    pub workspace: &'a Workspace,
    pub template: Option<&'a Template>,
    /// The Volume that `spec.volume` names.
    pub volume: Option<&'a Volume>,
    /// Names of other Volumes that it binds: from before its spec named this one, or none.
    pub others_bound: Vec<String>,
    pub cluster: &'a dyn Cluster,
    pub now: Time,
    /// Becomes the id of a Workspace that has none.
    pub fresh_id: WorkspaceId,
    /// What a VM needs beyond its guest's memory.
    pub vm_overhead: Bytes,
}

/// Commands are kept this long after they finished.
pub const COMMANDS_KEPT: Duration = Duration::from_hours(24);
/// And no more than these.
pub const MAX_COMMANDS: usize = 16;
