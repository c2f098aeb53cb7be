//! A process that was killed and does not end: it hangs in the kernel of the host, as with a storage pool that does not
//! answer. Its disks are in use until it is reaped, and nobody but people can help.

use std::{collections::BTreeSet, time::Duration};

use kibo_crds::{Bytes, PoolId};
use kibo_protocol::v1::{Blocked, instance_event::Kind};
use tokio::time::Instant;

use super::{Task, blocking};
use crate::pool::PoolStatus;

/// Looks some seconds apart, in turn: one that is found waiting in the kernel each time waits for the same thing. A single
/// look may find one that just waits for a disk, or for a lock of its own end.
const LOOKS: u32 = 2;
/// So long a process may take to end whatever it does, and longer for its memory: a kernel takes some 0.1 s to
/// free a GiB in pages of 4 KiB, and several times as long on a busy host.
const AT_LEAST: Duration = Duration::from_secs(60);
const FOR_EACH_GIB: Duration = Duration::from_secs(1);
const GIB: u64 = 1 << 30;

#[derive(Default)]
pub(super) struct Hang {
    /// For the first time.
    killed: Option<Instant>,
    /// How many of the last looks in turn found it waiting in the kernel.
    waits: u32,
    found: Option<Finding>,
    /// What was told of it last.
    told: Option<String>,
}

/// What is known of one that does not end; the later is the more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Finding {
    TakesLong,
    HangsInKernel,
}

/// A look at one that was killed.
struct Look {
    /// It waits for what no signal interrupts.
    waits: bool,
    /// One of its pools does not answer: nobody has to guess what it waits for.
    no_answer: bool,
}

impl Hang {
    /// What there is to be told after one more kill.
    fn was_killed(&mut self, now: Instant, look: &Look, memory: Bytes) -> Option<Finding> {
        let Some(killed) = self.killed else {
            self.killed = Some(now);
            return None;
        };
        self.waits = if look.waits { self.waits.saturating_add(1) } else { 0 };
        let found = if look.no_answer || self.waits >= LOOKS {
            Some(Finding::HangsInKernel)
        } else {
            (now.duration_since(killed) >= patience(memory)).then_some(Finding::TakesLong)
        };
        self.found = self.found.max(found);
        self.found
    }
}

fn patience(memory: Bytes) -> Duration {
    let gibs = u32::try_from(memory.0.div_ceil(GIB)).unwrap_or(u32::MAX);
    AT_LEAST.saturating_add(FOR_EACH_GIB.saturating_mul(gibs))
}

impl Task {
    /// Tells what the end waits for, once it looks as if it would last, and again when there is more to be said of it.
    pub(super) async fn was_killed(&mut self) {
        let grip = self.grip.clone();
        let waits = blocking(move || grip.waits_in_kernel()).await;
        let pools: BTreeSet<_> = self.launch.objects().map(|granted| &granted.object.pool).collect();
        let pools: Vec<_> = pools.into_iter().filter_map(|pool| Some((pool, self.status_of(pool)?))).collect();
        let look = Look { waits, no_answer: pools.iter().any(|(_, status)| !status.answers) };
        let Some(found) = self.hang.was_killed(Instant::now(), &look, self.launch.memory) else { return };
        let message = message(found, pools.into_iter().filter_map(|(pool, status)| Some((pool, status.problem?))));
        if self.hang.told.as_ref() == Some(&message) {
            return;
        }
        tracing::error!(instance = %self.launch.instance(), message, "it cannot be ended yet");
        if self.try_tell(Kind::Blocked(Blocked { message: message.clone() })).await {
            self.hang.told = Some(message);
        }
    }

    fn status_of(&self, pool: &PoolId) -> Option<PoolStatus> {
        Some(self.inner.deps.pools.get(pool).ok()?.status())
    }
}

/// With what is wrong with its pools.
fn message<'a>(found: Finding, problems: impl Iterator<Item = (&'a PoolId, String)>) -> String {
    let problems: Vec<_> = problems.map(|(pool, problem)| format!("storage pool {pool}: {problem}")).collect();
    let why = if problems.is_empty() { String::new() } else { format!(" ({})", problems.join("; ")) };
    match found {
        Finding::HangsInKernel => format!(
            "its VM was killed and has not ended: its process hangs in the kernel of the host{why}, and its disks are in use \
             until it has. It ends when the storage answers again, when its mount is given up on the host (umount --force), \
             or when the host is booted anew"
        ),
        Finding::TakesLong => format!(
            "its VM was killed, and its process takes far longer to end than its memory explains{why}; its disks are in use \
             until it has. The host may be short of CPU; what the process does in the kernel is in its /proc/<pid>/stack"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_frees_its_memory_is_not_said_to_hang() {
        const BUSY: Look = Look { waits: false, no_answer: false };
        const WAITS: Look = Look { waits: true, no_answer: false };
        const NO_ANSWER: Look = Look { waits: false, no_answer: true };
        let hangs = Some(Finding::HangsInKernel);
        let long = Some(Finding::TakesLong);
        // Looks 5 s apart, the first with the kill itself.
        let cases: &[(&str, &[&Look], Option<Finding>)] = &[
            ("killed", &[&WAITS], None),
            ("killed where the pool does not answer", &[&NO_ANSWER], None),
            ("frees its memory", &[&BUSY; 12], None),
            ("frees more than there is", &[&BUSY; 19], None),
            ("does not end", &[&BUSY; 20], long),
            ("waited once", &[&WAITS, &WAITS, &BUSY, &WAITS, &BUSY], None),
            ("waits", &[&BUSY, &WAITS, &WAITS], hangs),
            ("waits no more", &[&BUSY, &WAITS, &WAITS, &BUSY], hangs),
            ("its pool does not answer", &[&BUSY, &NO_ANSWER], hangs),
        ];
        let began = Instant::now();
        for (case, looks, expected) in cases {
            let mut hang = Hang::default();
            let mut found = None;
            for (look, at) in looks.iter().zip((0..).step_by(5)) {
                found = hang.was_killed(began + Duration::from_secs(at), look, Bytes(32 * GIB));
            }
            assert_eq!(found, *expected, "{case}");
        }
    }
}
