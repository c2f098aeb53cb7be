//! Ends Instances that never ran here: their grants are closed in the pools first, so that nothing
//! can take them later, and only then the end is told.

use std::{sync::Arc, time::Duration};

use kibo_crds::InstanceId;
use kibo_protocol::v1::{self, ObjectUse, instance_event::Kind};

use super::{control::InstanceControl, node::Node};
use crate::{
    launch::{GrantedObject, Taker},
    pool::{PoolError, Pools},
    spool::{EventSpool, SpoolError},
};

const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_LONGEST: Duration = Duration::from_secs(30);

/// An Instance that this node does not run and never will.
#[derive(Clone, Debug)]
pub struct NotHere {
    pub instance: InstanceId,
    pub taker: Taker,
    pub workspace_uid: String,
    pub objects: Vec<GrantedObject>,
    pub message: String,
}

/// Closes and tells in the background, for as long as a pool does not answer; one that is declared lost is not waited for.
pub fn settle<I: InstanceControl>(node: &Arc<Node<I>>, not_here: NotHere) {
    let instance = not_here.instance;
    if !node.begin_settling(instance) {
        return;
    }
    let node = Arc::clone(node);
    tokio::spawn(async move {
        let (pools, spool) = (Arc::clone(&node.pools), Arc::clone(&node.spool));
        let mut wait = RETRY_FIRST;
        loop {
            let used = not_here.objects.iter().map(|granted| &granted.object.pool).filter(|pool| !pools.is_lost(pool));
            let step = {
                let (pools, spool, not_here) = (Arc::clone(&pools), Arc::clone(&spool), not_here.clone());
                tokio::task::spawn_blocking(move || try_settle(&pools, &spool, &not_here))
            };
            match pools.unless_lost(used, step).await {
                Ok(Ok(Ok(()))) => break,
                Ok(Ok(Err(error))) => {
                    tracing::warn!(%instance, %error, "an Instance that is not here cannot be ended yet");
                }
                Ok(Err(error)) => tracing::error!(%instance, %error, "ending an Instance that is not here failed"),
                // The next try asks that pool no more.
                Err(_lost) => continue,
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(RETRY_LONGEST);
        }
        node.admission.registered(instance);
        node.end_settling(instance);
    });
}

#[derive(Debug, thiserror::Error)]
enum SettleError {
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Spool(#[from] SpoolError),
}

fn try_settle(pools: &Pools, spool: &EventSpool, not_here: &NotHere) -> Result<(), SettleError> {
    let instance = not_here.instance;
    let mut objects = Vec::new();
    let mut was_taken = false;
    for granted in &not_here.objects {
        let object_use = match pools.get(&granted.object.pool) {
            Ok(pool) => pool.close(granted, &not_here.taker)?,
            // Of a pool that this node does not have it can take nothing.
            Err(_) => ObjectUse::Refused,
        };
        was_taken |= object_use != ObjectUse::Refused;
        objects.push(v1::ObjectState {
            uid: granted.object.uid.to_string(),
            epoch: granted.grant.epoch.0,
            r#use: object_use.into(),
            size_bytes: None,
        });
    }
    // Something was taken and nothing runs: it ended without its writeback being seen.
    let reason = if was_taken { v1::EndReason::ForceStopped } else { v1::EndReason::NotStarted };
    tracing::info!(%instance, reason = reason.as_str_name(), why = not_here.message, "an Instance does not run here");
    let ended = v1::Ended { reason: reason.into(), message: not_here.message.clone(), objects };
    match spool.append(instance, &not_here.workspace_uid, Kind::Ended(ended)) {
        Ok(_) | Err(SpoolError::Ended { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
