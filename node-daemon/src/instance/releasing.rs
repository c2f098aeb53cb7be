//! After the end of the VM: nothing of it may be left, and everybody has to know. Every step can be repeated, so a daemon
//! that is killed in between is no different from a slow one.

use std::time::Duration;

use kibo_protocol::v1::{Ended, ObjectState, ObjectUse, instance_event::Kind};

use super::{Deps, files::InstanceDir, machine::Ending};
use crate::{
    launch::{GrantedObject, Launch},
    pool::PoolError,
    spool::SpoolError,
};

const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_LAST: Duration = Duration::from_secs(30);
/// People read it, and it is stored with the Workspace.
const MESSAGE_LIMIT: usize = 1000;

/// Removes all that an Instance had, and tells its end. The process must be reaped. What cannot be done now (a pool
/// that does not answer) is tried until it can: an object whose release is not recorded is not free.
pub async fn release(deps: &Deps, launch: &Launch, directory: &InstanceDir, ending: &Ending) {
    let instance = launch.instance();
    let cgroup = deps.vmm.cgroup(&instance.to_string());
    until_done("remove the cgroup", launch, || {
        let cgroup = cgroup.clone();
        move || cgroup.remove()
    })
    .await;
    kibo_failpoint::reach("cgroup-removed").await;
    let mut objects = Vec::new();
    for granted in launch.objects() {
        let object = until_done("release an object", launch, || {
            let (deps, launch, granted) = (deps.clone(), launch.clone(), granted.clone());
            move || close(&deps, &launch, &granted)
        })
        .await;
        objects.push(object);
        kibo_failpoint::reach("object-released").await;
    }
    let ended =
        Ended { reason: ending.reason.into(), message: ending.message.chars().take(MESSAGE_LIMIT).collect(), objects };
    append(deps, launch, Kind::Ended(ended)).await;
    kibo_failpoint::reach("ended-told").await;
    until_done("remove the directory", launch, || {
        let directory = directory.clone();
        move || directory.remove()
    })
    .await;
}

/// Makes an event that can be spared: when it cannot be stored, that is said and nothing waits for it.
pub async fn try_append(deps: &Deps, launch: &Launch, kind: Kind) {
    let (spool, instance, workspace) = (deps.spool.clone(), launch.instance(), launch.workspace.uid.clone());
    let appended = tokio::task::spawn_blocking(move || spool.append(instance, &workspace, kind)).await;
    match appended {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!(%instance, %error, "an event is dropped"),
        Err(error) => tracing::error!(%instance, %error, "an event is dropped"),
    }
}

/// Makes an event, however long that takes.
pub async fn append(deps: &Deps, launch: &Launch, kind: Kind) {
    until_done("store an event", launch, || {
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

/// Runs a step on a thread that may block, again and again until it succeeds.
async fn until_done<T, E, S>(what: &'static str, launch: &Launch, mut step: impl FnMut() -> S) -> T
where
    T: Send + 'static,
    E: std::fmt::Display + Send + 'static,
    S: FnOnce() -> Result<T, E> + Send + 'static,
{
    let mut pause = RETRY_FIRST;
    loop {
        match tokio::task::spawn_blocking(step()).await {
            Ok(Ok(value)) => return value,
            Ok(Err(error)) => tracing::warn!(instance = %launch.instance(), %error, "failed to {what}; trying again"),
            Err(error) => tracing::error!(instance = %launch.instance(), %error, "failed to {what}; trying again"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_LAST);
    }
}
