//! Whether the host that is declared dead still writes: other members of its shared pools look at its fence file.
//!
//! A daemon counts up in that file every 2 s for as long as it runs, with or without a way to the operator. A count
//! that moves proves that the host is up and reaches the pool. One that stands still proves nothing (its VMs may run
//! on without their daemon), and neither does one of another life (a host that was set up anew, and waits to be let
//! in): then the word of the person who ordered the isolation counts.
//!
//! What was seen before the order ([`super::ahead`]) counts too: who has stood still for long need not be watched again.

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use kibo_crds::{Incarnation, Node, NodeId, PoolId};
use kibo_protocol::v1::{FenceFile, fence_seen};
use tokio::time::{Instant, sleep};

use super::shared::{Members, Shared};
use crate::node::NodeControl;

/// More than two counts of a daemon that runs.
const WATCHED_FOR: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What was seen of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// It still writes: the isolation is refused.
    pub writes: bool,
    /// For people; absent: there was nobody to ask.
    pub words: Option<String>,
}

/// Who is declared dead.
#[derive(Clone, Copy, Debug)]
struct Victim<'a> {
    node: &'a NodeId,
    life: Incarnation,
}

/// What one pool shows, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    moves: bool,
    words: String,
}

/// Looks in all shared pools at once.
pub async fn seek(control: &Arc<NodeControl>, victim: &NodeId, node: &Node, life: Incarnation) -> Evidence {
    let shared = Members::of(&control.ctx.registry.snapshot()).sharing(victim, node, 0);
    let victim = Victim { node: victim, life };
    judge(join_all(shared.iter().map(|shared| watch(control, victim, shared))).await)
}

/// One pool in which it writes is enough.
fn judge(seen: Vec<Seen>) -> Evidence {
    let writes = seen.iter().any(|seen| seen.moves);
    let told: Vec<_> = seen.into_iter().filter(|seen| seen.moves == writes).map(|seen| seen.words).collect();
    let words: String = told.join("; ").chars().take(1024).collect();
    Evidence { writes, words: Some(words).filter(|words| !words.is_empty()) }
}

/// Asks the members of one pool, one after the other, until one has an answer.
async fn watch(control: &Arc<NodeControl>, victim: Victim<'_>, shared: &Shared) -> Seen {
    let mut problems = Vec::new();
    for member in &shared.members {
        match watch_with(control, victim, &shared.pool, member).await {
            Ok(seen) => return seen,
            Err(problem) => problems.push(format!("node {member}: {problem}")),
        }
    }
    let words = format!("nobody could look in storage pool {}: {}", shared.pool, problems.join(", "));
    Seen { moves: false, words }
}

async fn watch_with(
    control: &Arc<NodeControl>,
    victim: Victim<'_>,
    pool: &PoolId,
    member: &NodeId,
) -> Result<Seen, String> {
    let Victim { node, life } = victim;
    let asked = Instant::now();
    let Some(first) = look(control, node, pool, member).await? else {
        let words = format!("node {node} has no fence file in storage pool {pool}, says node {member}");
        return Ok(Seen { moves: false, words });
    };
    let stood = control.sightings.unmoved_for(node, pool, &first, asked);
    let begun = Instant::now();
    while stood.max(begun.elapsed()) < WATCHED_FOR {
        sleep(LOOK_EVERY).await;
        if let Some(now) = look(control, node, pool, member).await?.filter(|now| moves(&first, now, life)) {
            let words = format!(
                "node {member} saw the count of node {node} in storage pool {pool} move from {} to {} at {}",
                first.heartbeat,
                now.heartbeat,
                crate::clock::now().0
            );
            return Ok(Seen { moves: true, words });
        }
    }
    let words = if first.incarnation == life.0 {
        let (count, seconds) = (first.heartbeat, stood.max(begun.elapsed()).as_secs());
        format!(
            "the count of node {node} in storage pool {pool} stood still at {count} for {seconds} s, says node {member}"
        )
    } else {
        format!(
            "the fence file of node {node} in storage pool {pool} says nothing of incarnation {life}, says node {member}"
        )
    };
    Ok(Seen { moves: false, words })
}

/// Whether the host was counting in this life between two looks.
fn moves(first: &FenceFile, now: &FenceFile, life: Incarnation) -> bool {
    let is_of_it = |file: &FenceFile| file.incarnation == life.0;
    is_of_it(first) && is_of_it(now) && first.heartbeat != now.heartbeat
}

pub(super) async fn look(
    control: &Arc<NodeControl>,
    node: &NodeId,
    pool: &PoolId,
    member: &NodeId,
) -> Result<Option<FenceFile>, String> {
    let seen = control.ctx.registry.look_at_fence(member, pool, node).await.map_err(|error| error.to_string())?;
    match seen {
        Some(fence_seen::Result::File(file)) => Ok(Some(file)),
        Some(fence_seen::Result::Missing(_)) => Ok(None),
        Some(fence_seen::Result::Problem(problem)) => Err(problem),
        None => Err("its answer cannot be understood".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_life_is_proved_by_a_count() {
        let file = |incarnation, heartbeat| FenceFile { incarnation, heartbeat };
        let moves =
            |first: (u64, u64), now: (u64, u64)| moves(&file(first.0, first.1), &file(now.0, now.1), Incarnation(7));
        assert!(moves((7, 1), (7, 2)));
        assert!(!moves((7, 1), (7, 1)));
        assert!(!moves((0, 1), (0, 2)), "it has no incarnation yet");
        assert!(!moves((8, 1), (8, 2)) && !moves((6, 1), (6, 2)), "another life");
        assert!(!moves((7, 1), (0, 2)), "this life is over");
    }

    #[test]
    fn one_count_that_moves_is_enough() {
        let seen = |moves, words: &str| Seen { moves, words: words.to_owned() };
        let (still, unknown, moves) = (seen(false, "still"), seen(false, "unknown"), seen(true, "moves"));
        let evidence = |writes, words: &str| Evidence { writes, words: Some(words.to_owned()) };
        assert_eq!(judge(vec![]), Evidence { writes: false, words: None });
        assert_eq!(judge(vec![still.clone(), unknown.clone()]), evidence(false, "still; unknown"));
        assert_eq!(judge(vec![still, moves, unknown]), evidence(true, "moves"));
    }
}
