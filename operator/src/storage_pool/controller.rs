//! Keeps the status of each StoragePool. The objects themselves come with the nodes that declare them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kibo_crds::{Node, PoolId, StoragePool, storage_pool::StoragePoolSpec};
use kube::{
    Api,
    api::PostParams,
    runtime::{
        Controller,
        controller::{Action, Config},
        reflector::{ObjectRef, Store},
        watcher,
    },
};

use super::status::{compute, declaration, is_more_than_readings};
use crate::{
    context::Ctx,
    guarded::{self, WriteError},
    node::log_watch_error,
    session::hooks::Usage,
};

const PERIOD: Duration = Duration::from_secs(60);
/// Readings such as free space are written at this pace.
const PACE: Duration = Duration::from_secs(30);

/// What the controller works with.
pub struct PoolControl {
    ctx: Ctx,
    usage: Arc<dyn Usage>,
    nodes: Store<Node>,
    written: Mutex<HashMap<String, Instant>>,
}

impl PoolControl {
    pub fn new(ctx: Ctx, usage: Arc<dyn Usage>, nodes: Store<Node>) -> Self {
        Self { ctx, usage, nodes, written: Mutex::default() }
    }

    fn paced(&self, name: &str) -> Option<Duration> {
        let written = self.written.lock().expect("no holder of this lock panics");
        written.get(name).and_then(|at| PACE.checked_sub(at.elapsed()))
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

/// Runs until the leadership ends.
pub async fn run(controller: Controller<StoragePool>, control: Arc<PoolControl>) {
    let ctx = control.ctx.clone();
    let pools = controller.store();
    // Those that the node declares, and those that it was a member of.
    let touched = move |node: Node| {
        let name = node.metadata.name.clone().unwrap_or_default();
        let declared = node.status.map(|status| status.pools).unwrap_or_default();
        let is_touched = |pool: &Arc<StoragePool>| {
            let id = pool.metadata.name.as_deref().unwrap_or_default();
            declared.iter().any(|declared| declared.id.as_str() == id)
                || pool.status.iter().flat_map(|s| &s.members).any(|member| member.node.as_str() == name)
        };
        pools
            .state()
            .iter()
            .filter(|pool| is_touched(pool))
            .map(|pool| ObjectRef::from_obj(&**pool))
            .collect::<Vec<_>>()
    };
    controller
        .with_config(Config::default().concurrency(4))
        .watches(Api::<Node>::all(ctx.client.clone()), watcher::Config::default(), touched)
        .graceful_shutdown_on(ctx.stop.clone().cancelled_owned())
        .run(reconcile, retry, control)
        .for_each(async |outcome| log_watch_error(outcome.err()))
        .await;
}

fn retry(pool: Arc<StoragePool>, error: &WriteError, control: Arc<PoolControl>) -> Action {
    match error {
        WriteError::Conflict { .. } => Action::requeue(Duration::from_millis(50)),
        WriteError::Gone { .. } => Action::await_change(),
        WriteError::StaleTerm { .. } => {
            tracing::error!(%error, "a newer leader writes: this one ends");
            control.ctx.stop.cancel();
            Action::await_change()
        }
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
    let mut nodes = control.nodes.state();
    nodes.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let declarations: Vec<_> = nodes.iter().filter_map(|node| declaration(node, &name)).collect();
    let status = compute(&pool, &declarations, control.usage.of_pool(&id), &Time(Timestamp::now()));
    if pool.status.as_ref() == Some(&status) {
        return Ok(Action::requeue(PERIOD));
    }
    if !is_more_than_readings(pool.status.as_ref(), &status)
        && let Some(left) = control.paced(&name)
    {
        return Ok(Action::requeue(left));
    }
    let api = Api::<StoragePool>::all(control.ctx.client.clone());
    guarded::replace_status(&api, &*pool, status, control.ctx.term).await?;
    metrics::counter!("kibotos_status_writes_total", "kind" => "StoragePool").increment(1);
    control.written.lock().expect("no holder of this lock panics").insert(name, Instant::now());
    // What is waiting for this pool may be placed now.
    control.ctx.registry.notify();
    Ok(Action::requeue(PERIOD))
}
