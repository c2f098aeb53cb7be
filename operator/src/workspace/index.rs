//! Sums and lookups over all Workspaces, kept in step with the objects themselves.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kibo_crds::{Bytes, InstanceId, NodeId, PoolId, Workspace, workspace::WorkspacePhase};

use crate::{
    cache::{Cache, Key, Projection},
    held::{Held, HeldByNode},
    moving,
    placement::Used,
    session::hooks::PoolUsage,
    space,
    workspace::decide::UNAVAILABLE,
};

pub type Workspaces = Cache<Workspace, ByNode>;

/// What executions and layers add up to. A node's allocation is this sum and nothing else.
#[derive(Default)]
pub struct ByNode {
    /// Workspaces whose execution or layer is on a node.
    keys: HashMap<NodeId, BTreeSet<Key>>,
    used: HashMap<NodeId, Used>,
    held_layers: HeldByNode,
    instances: HashMap<InstanceId, Key>,
    pools: HashMap<PoolId, PoolUsage>,
    /// Space promised to layers whose images are not made, or not grown, yet.
    promised: HashMap<PoolId, Bytes>,
    deleting: BTreeSet<Key>,
    stranded: BTreeSet<Key>,
    moving: BTreeSet<Key>,
}

impl ByNode {
    pub fn keys_of(&self, node: &NodeId) -> Vec<Key> {
        self.keys.get(node).into_iter().flatten().cloned().collect()
    }

    pub fn used(&self, node: &NodeId) -> Used {
        self.used.get(node).copied().unwrap_or_default()
    }

    pub fn held_layers(&self, node: &NodeId) -> Held {
        self.held_layers.of(node)
    }

    pub fn key_of(&self, instance: InstanceId) -> Option<Key> {
        self.instances.get(&instance).cloned()
    }

    pub fn pool(&self, pool: &PoolId) -> PoolUsage {
        self.pools.get(pool).copied().unwrap_or_default()
    }

    /// Workspaces on their way out.
    pub fn deleting(&self) -> Vec<Key> {
        self.deleting.iter().cloned().collect()
    }

    /// Workspaces that failed because their node was isolated.
    pub fn stranded(&self) -> Vec<Key> {
        self.stranded.iter().cloned().collect()
    }

    /// Workspaces whose layers are being moved.
    pub fn moving(&self) -> Vec<Key> {
        self.moving.iter().cloned().collect()
    }

    pub fn promised_in(&self, pool: &PoolId) -> Bytes {
        self.promised.get(pool).copied().unwrap_or_default()
    }

    pub fn promised(&self) -> impl Iterator<Item = (&PoolId, Bytes)> {
        self.promised.iter().map(|(pool, bytes)| (pool, *bytes))
    }
}

/// Nodes that a Workspace's execution and layer name.
pub fn nodes_of(workspace: &Workspace) -> BTreeSet<&NodeId> {
    let status = workspace.status.as_ref();
    let execution = status.and_then(|status| status.execution.as_ref()).map(|execution| &execution.node);
    let holder = status.and_then(|status| status.holder.as_ref()).map(|holder| &holder.node);
    execution.into_iter().chain(holder).collect()
}

fn is_stranded(workspace: &Workspace) -> bool {
    let status = workspace.status.as_ref();
    status.is_some_and(|it| it.phase == Some(WorkspacePhase::Failed) && it.reason.as_deref() == Some(UNAVAILABLE))
}

impl Projection<Workspace> for ByNode {
    fn replace(&mut self, key: &Key, old: Option<&Workspace>, new: Option<&Workspace>) {
        if let Some(old) = old {
            self.subtract(key, old);
            self.deleting.remove(key);
            self.stranded.remove(key);
            self.moving.remove(key);
        }
        if new.is_some_and(|new| new.metadata.deletion_timestamp.is_some()) {
            self.deleting.insert(key.clone());
        }
        if new.and_then(|new| new.status.as_ref()).is_some_and(|it| moving::is_open(it.r#move.as_ref())) {
            self.moving.insert(key.clone());
        }
        if new.is_some_and(is_stranded) {
            self.stranded.insert(key.clone());
        }
        if let Some(new) = new {
            self.add(key, new);
        }
    }
}

impl ByNode {
    fn add(&mut self, key: &Key, workspace: &Workspace) {
        for node in nodes_of(workspace) {
            self.keys.entry(node.clone()).or_default().insert(key.clone());
        }
        let Some(status) = &workspace.status else { return };
        if let Some(execution) = &status.execution {
            let used = self.used.entry(execution.node.clone()).or_default();
            used.cpu.0 = used.cpu.0.saturating_add(execution.cpu_milli.0);
            used.memory.0 = used.memory.0.saturating_add(execution.memory_bytes.0);
            used.instances += 1;
            self.instances.insert(execution.instance_id, key.clone());
        }
        if let Some(remover) = status.r#move.as_ref().and_then(kibo_crds::MoveStatus::remover) {
            self.held_layers.add(&remover, None);
        }
        if let Some(holder) = &status.holder {
            self.held_layers.add(holder, status.writable_layer.as_ref().map(|layer| &layer.pool));
        }
        if let Some(layer) = &status.writable_layer {
            self.pools.entry(layer.pool.clone()).or_default().objects += 1;
        }
        for (pool, taken) in space::of_layer(status) {
            let usage = self.pools.entry(pool.clone()).or_default();
            usage.allocated.0 = usage.allocated.0.saturating_add(taken.allocated.0);
            let promised = self.promised.entry(pool).or_default();
            promised.0 = promised.0.saturating_add(taken.promised.0);
        }
    }

    fn subtract(&mut self, key: &Key, workspace: &Workspace) {
        for node in nodes_of(workspace) {
            if let Some(keys) = self.keys.get_mut(node) {
                keys.remove(key);
            }
        }
        let Some(status) = &workspace.status else { return };
        if let Some(execution) = &status.execution {
            if let Some(used) = self.used.get_mut(&execution.node) {
                used.cpu = used.cpu.saturating_sub(execution.cpu_milli);
                used.memory = used.memory.saturating_sub(execution.memory_bytes);
                used.instances = used.instances.saturating_sub(1);
            }
            self.instances.remove(&execution.instance_id);
        }
        if let Some(remover) = status.r#move.as_ref().and_then(kibo_crds::MoveStatus::remover) {
            self.held_layers.subtract(&remover, None);
        }
        if let Some(holder) = &status.holder {
            self.held_layers.subtract(holder, status.writable_layer.as_ref().map(|layer| &layer.pool));
        }
        if let Some(layer) = &status.writable_layer {
            let pool = self.pools.entry(layer.pool.clone()).or_default();
            pool.objects = pool.objects.saturating_sub(1);
        }
        for (pool, taken) in space::of_layer(status) {
            let usage = self.pools.entry(pool.clone()).or_default();
            usage.allocated = usage.allocated.saturating_sub(taken.allocated);
            let promised = self.promised.entry(pool).or_default();
            *promised = promised.saturating_sub(taken.promised);
        }
    }
}

/// Adds amounts per pool up.
pub fn add_all<'a>(sums: &mut BTreeMap<PoolId, Bytes>, amounts: impl IntoIterator<Item = (&'a PoolId, Bytes)>) {
    for (pool, bytes) in amounts {
        let sum = sums.entry(pool.clone()).or_default();
        sum.0 = sum.0.saturating_add(bytes.0);
    }
}
