//! A process that was killed and does not end: it hangs in the kernel of the host, as with a storage pool that does not
//! answer. Its disks are in use until it is reaped, and nobody but people can help.

use std::collections::BTreeSet;

use kibo_crds::PoolId;
use kibo_protocol::v1::{Blocked, instance_event::Kind};

use super::Task;

/// A process that was killed so often, some seconds apart, does not end by itself.
const AFTER: u32 = 2;

#[derive(Default)]
pub(super) struct Hang {
    kills: u32,
    /// What was told of it last.
    told: Option<String>,
}

impl Task {
    /// Tells what the end waits for, once it looks as if it would last, and again when there is more to be said of it.
    pub(super) async fn was_killed(&mut self) {
        self.hang.kills = self.hang.kills.saturating_add(1);
        let pools: BTreeSet<_> = self.launch.objects().map(|granted| &granted.object.pool).collect();
        let problems = pools.into_iter().filter_map(|pool| Some((pool, self.problem_of(pool)?)));
        let message = message(problems);
        if self.hang.kills < AFTER || self.hang.told.as_ref() == Some(&message) {
            return;
        }
        tracing::error!(instance = %self.launch.instance(), message, "it cannot be ended yet");
        self.hang.told = Some(message.clone());
        self.try_tell(Kind::Blocked(Blocked { message })).await;
    }

    fn problem_of(&self, pool: &PoolId) -> Option<String> {
        self.inner.deps.pools.get(pool).ok()?.status().problem
    }
}

/// With what is wrong with its pools.
fn message<'a>(problems: impl Iterator<Item = (&'a PoolId, String)>) -> String {
    let problems: Vec<_> = problems.map(|(pool, problem)| format!("storage pool {pool}: {problem}")).collect();
    let why = if problems.is_empty() { String::new() } else { format!(" ({})", problems.join("; ")) };
    format!(
        "its VM was killed and has not ended: its process hangs in the kernel of the host{why}, and its disks are in use until \
         it has. It ends when the storage answers again, when its mount is given up on the host (umount --force), or when the \
         host is booted anew"
    )
}
