//! Keeps the status of each StoragePool. The objects themselves come with the nodes that declare them.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use futures::{StreamExt as _, stream};
use kibo_crds::{Node, PoolId, StoragePool, storage_pool::StoragePoolSpec};
use kibo_protocol::v1::{self, to_node};
use kube::{
    Api,
    api::PostParams,
    runtime::{
        Controller,
        controller::{Action, Config},
        reflector::{ObjectRef, Store},
    },
};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::{
    declared::Declared,
    status::{compute, declaration, is_more_than_readings},
};
use crate::{
    clock::now,
    context::Ctx,
    guarded::{self, WriteError},
    node::log_watch_error,
    session::hooks::Usage,
    watch::WatchBackoff,
};

const PERIOD: Duration = Duration::from_secs(60);
/// Readings such as free space are written at this pace.
const PACE: Duration = Duration::from_secs(30);

/// What the controller works with.
pub struct PoolControl {
    ctx: Ctx,
    usage: Arc<dyn Usage>,
    nodes: Store<Node>,
    declared: Mutex<Declared>,
    /// Before all Nodes are known, a pool would seem to have lost its members.
    nodes_known: watch::Sender<bool>,
    written: Mutex<HashMap<String, Instant>>,
    /// What an earlier leader wrote counts as written then.
    began: Instant,
    /// Number of members that the nodes of a pool were last told of.
    told: Mutex<HashMap<String, usize>>,
    /// Lost pools whose Workspaces and Volumes were looked at again.
    lost: Mutex<BTreeSet<PoolId>>,
}

impl PoolControl {
    pub fn new(ctx: Ctx, usage: Arc<dyn Usage>, nodes: Store<Node>) -> Self {
        Self {
            ctx,
            usage,
            nodes,
            declared: Mutex::default(),
            nodes_known: watch::Sender::new(false),
            written: Mutex::default(),
            began: Instant::now(),
            told: Mutex::default(),
            lost: Mutex::default(),
        }
    }

    /// The store of the Nodes has its first list: from now on the pools are looked at.
    pub fn nodes_are_known(&self) {
        for node in self.nodes.state() {
            self.declared().see(&node);
        }
        self.nodes_known.send_replace(true);
    }

    fn declared(&self) -> MutexGuard<'_, Declared> {
        self.declared.lock().expect("no holder of this lock panics")
    }

    /// The Nodes that declare the pool, by name.
    fn nodes_of(&self, pool: &PoolId) -> Vec<Arc<Node>> {
        let names = self.declared().nodes_of(pool);
        names.iter().filter_map(|name| self.nodes.get(&ObjectRef::new(name))).collect()
    }

    fn paced(&self, name: &str) -> Option<Duration> {
        let written = self.written.lock().expect("no holder of this lock panics");
        let at = written.get(name).unwrap_or(&self.began);
        PACE.checked_sub(at.elapsed())
    }

    /// What was in a lost pool is looked at again, once. All nodes are told, since any of them may declare it one day; then
    /// those that use it all the same.
    fn tell_lost(&self, id: &PoolId) {
        let is_news = self.lost.lock().expect("no holder of this lock panics").insert(id.clone());
        if is_news {
            self.usage.pool_lost(id);
        }
        let uses = |pool: &crate::session::DeclaredPool| pool.id == *id && pool.available;
        for node in self.ctx.registry.snapshot().iter().filter(|node| is_news || node.pools.iter().any(uses)) {
            let lost = v1::LostPools { ids: self.ctx.pools.lost() };
            // Without a session it hears it with the next one.
            let _ = self.ctx.registry.send(&node.id, node.incarnation, to_node::Message::LostPools(lost));
        }
    }

    /// A new pool makes its first member a candidate, and a node that is being drained may give back what it kept for
    /// want of another member: each looks again when their number has changed and the index shows it.
    fn tell_members(&self, pool: &StoragePool) {
        let members = pool.status.iter().flat_map(|status| &status.members);
        let count = members.clone().count();
        let name = pool.metadata.name.clone().unwrap_or_default();
        let before = self.told.lock().expect("no holder of this lock panics").insert(name, count);
        if before != Some(count) {
            members.for_each(|member| self.ctx.nodes.touch(&member.node));
            // What waits for this pool may be placed now.
            self.ctx.registry.notify();
        }
    }
}

/// Makes the objects of pools that a node declares for the first time.
pub async fn ensure(ctx: &Ctx, pools: impl Iterator<Item = &PoolId>) -> Result<(), kube::Error> {
    let api = Api::<StoragePool>::all(ctx.client.clone());
    for pool in pools.filter(|pool| !ctx.pools.exists(pool)) {
        match api.create(&PostParams::default(), &StoragePool::new(pool.as_str(), StoragePoolSpec::default())).await {
            Ok(_) => tracing::info!(%pool, "storage pool registered"),
            Err(kube::Error::Api(status)) if status.is_already_exists() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Runs until the leadership ends. `nodes`: those that the room of the nodes has looked at, in the store that it fills.
pub async fn run(
    controller: Controller<StoragePool>,
    control: Arc<PoolControl>,
    nodes: mpsc::UnboundedReceiver<Arc<Node>>,
) {
    let (ctx, watched) = (control.ctx.clone(), control.clone());
    let concerned = move |node: Arc<Node>| {
        let pools = watched.declared().see(&node);
        stream::iter(pools.into_iter().map(|pool| ObjectRef::new(pool.as_str())))
    };
    controller
        .trigger_backoff(WatchBackoff::default())
        .with_config(Config::default().concurrency(4))
        .reconcile_on(UnboundedReceiverStream::new(nodes).flat_map(concerned))
        .graceful_shutdown_on(ctx.stop.clone().cancelled_owned())
        .run(reconcile, retry, control)
        .for_each(async |outcome| log_watch_error(outcome.err()))
        .await;
}

#[expect(clippy::needless_pass_by_value, reason = "the controller calls it so")]
fn retry(pool: Arc<StoragePool>, error: &WriteError, control: Arc<PoolControl>) -> Action {
    control.ctx.end_if_overtaken(error);
    match error {
        WriteError::Conflict { .. } => Action::requeue(Duration::from_millis(50)),
        WriteError::Gone { .. } | WriteError::StaleTerm { .. } => Action::await_change(),
        WriteError::Refused { .. } | WriteError::Unknown { .. } => {
            tracing::error!(pool = pool.metadata.name.as_deref(), %error, "failed to write the status of a storage pool");
            Action::requeue(Duration::from_secs(5))
        }
    }
}

#[tracing::instrument(
    name = "reconcile",
    skip_all,
    fields(kind = "StoragePool", name = pool.metadata.name.as_deref(), revision = pool.metadata.resource_version.as_deref())
)]
async fn reconcile(pool: Arc<StoragePool>, control: Arc<PoolControl>) -> Result<Action, WriteError> {
    metrics::counter!("kibotos_reconciles_total", "kind" => "StoragePool").increment(1);
    let name = pool.metadata.name.clone().unwrap_or_default();
    let Ok(id) = name.parse::<PoolId>() else { return Ok(Action::await_change()) };
    if control.nodes_known.subscribe().wait_for(|known| *known).await.is_err() {
        return Ok(Action::await_change());
    }
    control.tell_members(&pool);
    if pool.spec.lost.is_some() {
        control.tell_lost(&id);
    }
    let nodes = control.nodes_of(&id);
    let declarations: Vec<_> = nodes.iter().filter_map(|node| declaration(node, &name)).collect();
    let status = compute(&pool, &declarations, control.usage.of_pool(&id), &now());
    if pool.status.as_ref() == Some(&status) {
        return Ok(Action::requeue(PERIOD));
    }
    if !is_more_than_readings(pool.status.as_ref(), &status)
        && let Some(left) = control.paced(&name)
    {
        return Ok(Action::requeue(left));
    }
    if pool.status.as_ref().is_none_or(|status| status.uid.is_none()) {
        kibo_failpoint::reach("before-pool-registered").await;
    }
    let api = Api::<StoragePool>::all(control.ctx.client.clone());
    guarded::replace_status(&api, &*pool, status, control.ctx.term).await?;
    metrics::counter!("kibotos_status_writes_total", "kind" => "StoragePool").increment(1);
    control.written.lock().expect("no holder of this lock panics").insert(name, Instant::now());
    // What is waiting for this pool may be placed now.
    control.ctx.registry.notify();
    Ok(Action::requeue(PERIOD))
}
