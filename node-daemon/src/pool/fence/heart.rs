//! Counts in the owner's block.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Duration,
};

use kibo_crds::{Incarnation, NodeId, PoolId};

use super::file::{Beat, FORMAT, read, write_beat};

const EVERY: Duration = Duration::from_secs(2);

/// Which life this node lives, for all of its pools.
#[derive(Clone, Debug, Default)]
pub struct Life(Arc<AtomicU64>);

impl Life {
    /// 0 is no incarnation.
    pub fn set(&self, incarnation: Option<Incarnation>) {
        self.0.store(incarnation.map_or(0, |incarnation| incarnation.0), Ordering::Relaxed);
    }

    pub fn get(&self) -> Option<Incarnation> {
        Some(self.0.load(Ordering::Relaxed)).filter(|incarnation| *incarnation > 0).map(Incarnation)
    }
}

/// Counts in one pool, on a thread of its own, until it is dropped. Nothing that reads waits for it: a write may take
/// long where many guests write.
pub struct Heart {
    _alive: Sender<()>,
}

impl Heart {
    pub fn start(id: PoolId, pool: PathBuf, node: NodeId, life: Life) -> io::Result<Self> {
        let (alive, dropped) = channel();
        thread::Builder::new().name(format!("heart-{id}")).spawn(move || beat(&id, &pool, &node, &life, &dropped))?;
        Ok(Self { _alive: alive })
    }
}

fn beat(id: &PoolId, pool: &Path, node: &NodeId, life: &Life, dropped: &Receiver<()>) {
    // Where an earlier daemon stopped; of what cannot be read, any count is a new one.
    let last = || read(pool, node).ok().flatten().and_then(|fence| fence.beat.ok().flatten());
    let mut heartbeat = None;
    let mut told = None;
    loop {
        let next = heartbeat.unwrap_or_else(|| last().map_or(0, |beat| beat.heartbeat)) + 1;
        let beat = Beat { format: FORMAT, node: node.clone(), incarnation: life.get(), heartbeat: next };
        let problem = match write_beat(pool, &beat) {
            Ok(()) => {
                heartbeat = Some(next);
                None
            }
            // The pool's own watch makes it, and says what hinders it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => Some(error.to_string()),
        };
        if let Some(problem) = problem.as_ref().filter(|problem| told.as_ref() != Some(*problem)) {
            tracing::warn!(pool = %id, problem, "failed to count in this node's fence file");
        }
        told = problem;
        match dropped.recv_timeout(EVERY) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
