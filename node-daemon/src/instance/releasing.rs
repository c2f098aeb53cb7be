//! After the end of the VM: nothing of it may be left, and everybody has to know. Every step can be repeated, so a daemon
//! that is killed in between is no different from a slow one.

use kibo_crds::PoolId;
use kibo_protocol::v1::{Blocked, Ended, ObjectState, ObjectUse, instance_event::Kind};

use super::{
    Deps,
    files::InstanceDir,
    machine::Ending,
    persisting::{PATIENCE, until_succeeded},
    task::blocking,
};
use crate::{
    launch::{GrantedObject, Launch},
    pool::{PoolError, PoolStatus},
    spool::SpoolError,
};

/// People read it, and it is stored with the Workspace.
const MESSAGE_LIMIT: usize = 1000;

/// Removes all that an Instance had, and tells its end. The process must be reaped. What cannot be done now (a pool
/// that does not answer) is tried until it can: an object whose release is not recorded is not free.
pub async fn release(deps: &Deps, launch: &Launch, directory: &InstanceDir, ending: &Ending) {
    let instance = launch.instance();
    let cgroup = deps.vmm.cgroup(&instance.to_string());
    let step = Step { what: "remove the cgroup", launch, tell: Some(deps), pool: None };
    step.until_done(|| {
        let cgroup = cgroup.clone();
        move || cgroup.remove()
    })
    .await;
    kibo_failpoint::reach("cgroup-removed").await;
    if let Some(network) = &deps.network {
        let step = Step { what: "detach the network", launch, tell: Some(deps), pool: None };
        step.until_succeeded(|| network.detach(instance)).await;
    }
    kibo_failpoint::reach("network-detached").await;
    let mut objects = Vec::new();
    for granted in launch.objects() {
        let close = || {
            let (deps, launch, granted) = (deps.clone(), launch.clone(), granted.clone());
            move || close(&deps, &launch, &granted)
        };
        let pool = &granted.object.pool;
        let step = Step { what: "release a disk", launch, tell: Some(deps), pool: Some(pool) };
        let closed = deps.pools.unless_lost([pool], step.until_done(close)).await;
        objects.push(closed.unwrap_or_else(|_lost| given_up(granted)));
        kibo_failpoint::reach("object-released").await;
    }
    let ended =
        Ended { reason: ending.reason.into(), message: ending.message.chars().take(MESSAGE_LIMIT).collect(), objects };
    append(deps, launch, Kind::Ended(ended)).await;
    kibo_failpoint::reach("ended-told").await;
    let step = Step { what: "remove the directory", launch, tell: None, pool: None };
    step.until_done(|| {
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
    let step = Step { what: "store an event", launch, tell: None, pool: None };
    step.until_done(|| {
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

/// A step that is tried until it succeeds.
struct Step<'a> {
    what: &'static str,
    launch: &'a Launch,
    /// The Workspace waits for it: people hear of what looks as if it would last.
    tell: Option<&'a Deps>,
    /// Where it may hang.
    pool: Option<&'a PoolId>,
}

impl Step<'_> {
    /// On a thread that may block.
    async fn until_done<T, E, S>(&self, mut attempt: impl FnMut() -> S) -> T
    where
        T: Send + 'static,
        E: std::fmt::Display + Send + 'static,
        S: FnOnce() -> Result<T, E> + Send + 'static,
    {
        self.until_succeeded(|| {
            let attempt = tokio::task::spawn_blocking(attempt());
            async move {
                match attempt.await {
                    Ok(result) => result.map_err(|error| error.to_string()),
                    // In the same words each time: what differs is told anew.
                    Err(error) if error.is_panic() => Err("the daemon made a mistake, which its log has".to_owned()),
                    // The runtime ends, and this task with it.
                    Err(_) => std::future::pending().await,
                }
            }
        })
        .await
    }

    async fn until_succeeded<T, E: std::fmt::Display, A>(&self, attempt: impl FnMut() -> A) -> T
    where
        A: Future<Output = Result<T, E>>,
    {
        until_succeeded(self.what, attempt, || self.hangs(), |message| self.blocked(message)).await
    }

    fn hangs(&self) -> String {
        let status = |id| Some(self.tell?.pools.get(id).ok()?.status());
        hangs(self.what, self.pool.and_then(|id| Some((id, status(id)?))))
    }

    /// Whether people can read that now.
    async fn blocked(&self, problem: String) -> bool {
        let Some(deps) = self.tell else { return true };
        let message = format!("it has ended, and holds what it had until this is done: {problem}");
        let blocked = Kind::Blocked(Blocked { message: message.chars().take(MESSAGE_LIMIT).collect() });
        let told = try_append(deps, self.launch, blocked).await;
        if let Err(error) = &told {
            tracing::warn!(instance = %self.launch.instance(), %error, "what an end waits for cannot be told");
        }
        told.is_ok()
    }
}

/// Of an attempt that does not come back. Only of a pool that does not answer can somebody say that it is gone for good.
fn hangs(what: &str, pool: Option<(&PoolId, PoolStatus)>) -> String {
    let slow = format!("to {what} takes more than {} s and goes on", PATIENCE.as_secs());
    match pool {
        None => slow,
        Some((id, PoolStatus { problem: None, .. })) => format!("{slow}, in storage pool {id}"),
        Some((id, PoolStatus { problem: Some(problem), answers: true, .. })) => {
            format!("{slow}, in storage pool {id}: {problem}")
        }
        Some((id, PoolStatus { problem: Some(problem), answers: false, .. })) => {
            format!("{slow}, in storage pool {id}: {problem}. If that pool is gone for good, declare it lost")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// To declare a pool lost gives up every disk in it.
    #[test]
    fn only_of_a_pool_that_does_not_answer_it_is_said_how_to_give_it_up() {
        let id: PoolId = "far".parse().unwrap();
        let status = |problem: Option<&str>, answers| {
            let problem = problem.map(str::to_owned);
            PoolStatus { uid: None, problem, answers, capacity: None, free: None, used: None, own_mark: None }
        };
        let cases = [
            (None, "to release a disk takes more than 10 s and goes on", false),
            (Some(status(None, true)), "goes on, in storage pool far", false),
            (Some(status(Some("read-only"), true)), "goes on, in storage pool far: read-only", false),
            (Some(status(Some("no answer"), false)), "goes on, in storage pool far: no answer. If", true),
        ];
        for (status, words, advises) in cases {
            let message = hangs("release a disk", status.map(|status| (&id, status)));
            assert!(message.contains(words), "{message}");
            assert_eq!(message.contains("declare it lost"), advises, "{message}");
        }
    }
}
