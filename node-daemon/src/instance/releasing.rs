//! After the end of the VM: nothing of it may be left, and everybody has to know. Every step can be repeated, so a daemon
//! that is killed in between is no different from a slow one.

use std::{pin::pin, time::Duration};

use kibo_crds::PoolId;
use kibo_protocol::v1::{Blocked, Ended, ObjectState, ObjectUse, instance_event::Kind};

use super::{Deps, files::InstanceDir, machine::Ending, task::blocking};
use crate::{
    launch::{GrantedObject, Launch},
    pool::PoolError,
    spool::SpoolError,
};

const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_LAST: Duration = Duration::from_secs(30);
/// So many failures in a row are told to the people who wait for the end.
const TELL_AFTER: u32 = 3;
/// A step that takes so long hangs with its storage pool: that is no failure, and nobody would hear of it.
const PATIENCE: Duration = Duration::from_secs(10);
/// People read it, and it is stored with the Workspace.
const MESSAGE_LIMIT: usize = 1000;

/// Removes all that an Instance had, and tells its end. The process must be reaped. What cannot be done now (a pool
/// that does not answer) is tried until it can: an object whose release is not recorded is not free.
pub async fn release(deps: &Deps, launch: &Launch, directory: &InstanceDir, ending: &Ending) {
    let instance = launch.instance();
    let cgroup = deps.vmm.cgroup(&instance.to_string());
    until_done("remove the cgroup", launch, Some(deps), || {
        let cgroup = cgroup.clone();
        move || cgroup.remove()
    })
    .await;
    kibo_failpoint::reach("cgroup-removed").await;
    if let Some(network) = &deps.network {
        until_succeeded("detach the network", launch, Some(deps), || network.detach(instance)).await;
    }
    kibo_failpoint::reach("network-detached").await;
    let mut objects = Vec::new();
    for granted in launch.objects() {
        let close = || {
            let (deps, launch, granted) = (deps.clone(), launch.clone(), granted.clone());
            move || close(&deps, &launch, &granted)
        };
        let pool = &granted.object.pool;
        let closed = until_done("release an object", launch, Some(deps), close);
        let closed = deps.pools.unless_lost([pool], patiently(closed, hangs(deps, launch, pool))).await;
        objects.push(closed.unwrap_or_else(|_lost| given_up(granted)));
        kibo_failpoint::reach("object-released").await;
    }
    let ended =
        Ended { reason: ending.reason.into(), message: ending.message.chars().take(MESSAGE_LIMIT).collect(), objects };
    append(deps, launch, Kind::Ended(ended)).await;
    kibo_failpoint::reach("ended-told").await;
    until_done("remove the directory", launch, None, || {
        let directory = directory.clone();
        move || directory.remove()
    })
    .await;
}

/// Makes an event if that can be done now.
pub async fn try_append(deps: &Deps, launch: &Launch, kind: Kind) -> Result<(), SpoolError> {
    let (spool, instance, workspace) = (deps.spool.clone(), launch.instance(), launch.workspace.uid.clone());
    blocking(move || match spool.append(instance, &workspace, kind) {
        // An earlier daemon told its end and was killed before it could note that.
        Err(SpoolError::Ended { .. }) => Ok(()),
        result => result.map(drop),
    })
    .await
}

/// Makes an event, however long that takes.
pub async fn append(deps: &Deps, launch: &Launch, kind: Kind) {
    until_done("store an event", launch, None, || {
        let (deps, launch, kind) = (deps.clone(), launch.clone(), kind.clone());
        move || match deps.spool.append(launch.instance(), &launch.workspace.uid, kind) {
            // An earlier daemon told it and was killed before it could note that.
            Err(SpoolError::Ended { .. }) => Ok(()),
            result => result.map(drop),
        }
    })
    .await;
}

fn close(deps: &Deps, launch: &Launch, granted: &GrantedObject) -> Result<ObjectState, PoolError> {
    let pool = deps.pools.get(&granted.object.pool)?;
    let object_use: ObjectUse = pool.close(granted, &launch.taker)?;
    Ok(ObjectState {
        uid: granted.object.uid.to_string(),
        epoch: granted.grant.epoch.0,
        r#use: object_use.into(),
        size_bytes: pool.image_size(&granted.object.uid)?.map(|size| size.0),
    })
}

/// Of an object whose pool is declared lost: nobody will ever have it.
fn given_up(granted: &GrantedObject) -> ObjectState {
    let (uid, epoch) = (granted.object.uid.to_string(), granted.grant.epoch.0);
    ObjectState { uid, epoch, r#use: ObjectUse::Released.into(), size_bytes: None }
}

/// Waits for a step, and once that takes long tells people what is waited for.
async fn patiently<T>(step: impl Future<Output = T>, tell: impl Future<Output = ()>) -> T {
    let mut step = pin!(step);
    if let Ok(done) = tokio::time::timeout(PATIENCE, &mut step).await {
        return done;
    }
    tell.await;
    step.await
}

async fn hangs(deps: &Deps, launch: &Launch, pool: &PoolId) {
    let problem = deps.pools.get(pool).ok().and_then(|pool| pool.status().problem);
    let problem = problem.unwrap_or_else(|| "it is slow to answer".to_owned());
    let problem =
        format!("a disk is released in storage pool {pool}: {problem}. If that pool is gone for good, declare it lost");
    blocked(deps, launch, &problem).await;
}

/// Runs a step on a thread that may block, again and again until it succeeds. With `tell` people hear of a problem that
/// looks as if it would last: the Workspace waits for it.
async fn until_done<T, E, S>(what: &'static str, launch: &Launch, tell: Option<&Deps>, mut step: impl FnMut() -> S) -> T
where
    T: Send + 'static,
    E: std::fmt::Display + Send + 'static,
    S: FnOnce() -> Result<T, E> + Send + 'static,
{
    until_succeeded(what, launch, tell, || {
        let step = tokio::task::spawn_blocking(step());
        async move {
            match step.await {
                Ok(result) => result.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            }
        }
    })
    .await
}

/// The same for a step that does not block.
async fn until_succeeded<T, E: std::fmt::Display, F: Future<Output = Result<T, E>>>(
    what: &'static str,
    launch: &Launch,
    tell: Option<&Deps>,
    mut step: impl FnMut() -> F,
) -> T {
    let mut pause = RETRY_FIRST;
    let mut failures = 0;
    loop {
        let problem = match step().await {
            Ok(value) => return value,
            Err(error) => error.to_string(),
        };
        tracing::warn!(instance = %launch.instance(), problem, "failed to {what}; trying again");
        failures += 1;
        if let Some(deps) = tell.filter(|_| failures == TELL_AFTER) {
            blocked(deps, launch, &problem).await;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_LAST);
    }
}

async fn blocked(deps: &Deps, launch: &Launch, problem: &str) {
    let message = format!("it has ended, and holds what it had until this is done: {problem}");
    let blocked = Kind::Blocked(Blocked { message: message.chars().take(MESSAGE_LIMIT).collect() });
    if let Err(error) = try_append(deps, launch, blocked).await {
        tracing::warn!(instance = %launch.instance(), %error, "what an end waits for cannot be told");
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_hangs_is_told_once_and_waited_for_all_the_same() {
        let told = Cell::new(0);
        let takes =
            |seconds| patiently(tokio::time::sleep(Duration::from_secs(seconds)), async { told.set(told.get() + 1) });
        takes(9).await;
        assert_eq!(told.get(), 0);
        takes(60 * 60).await;
        assert_eq!(told.get(), 1);
    }
}
