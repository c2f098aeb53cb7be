//! Whether a pool can be used, looked at again and again on a thread of its own: a file system that
//! hangs stops nothing but that thread, and its pool counts as not available.

use std::{
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread,
    time::Duration,
};

use kibo_crds::{Bytes, Incarnation, NodeId, PoolId};
use tokio::sync::watch;

use super::{fence, image, loss::Loss, marker};
use crate::clock::BootTime;

const EVERY: Duration = Duration::from_secs(5);
/// A look that takes longer than this says that the pool hangs.
const STALE_AFTER: Duration = Duration::from_secs(15);
/// So long a start waits for the first look.
const FIRST_LOOK: Duration = Duration::from_secs(5);

/// What is known of a pool; what could not be measured is absent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStatus {
    /// From the marker file.
    pub uid: Option<String>,
    /// Why it cannot be used; absent when it can.
    pub problem: Option<String>,
    /// Whether the newest look at it came back, whatever it found.
    pub answers: bool,
    pub capacity: Option<Bytes>,
    pub free: Option<Bytes>,
    /// By whatever is on the file system.
    pub used: Option<Bytes>,
    /// The highest incarnation of this node that the pool says is dead.
    pub own_mark: Option<Incarnation>,
}

impl PoolStatus {
    fn unknown() -> Self {
        let problem = Some("the pool's file system does not answer".to_owned());
        Self { answers: false, ..Self::unusable(None, problem) }
    }

    fn unusable(uid: Option<String>, problem: Option<String>) -> Self {
        Self { uid, problem, answers: true, capacity: None, free: None, used: None, own_mark: None }
    }

    /// The same in this life of the node. One that the pool says is dead can take nothing there, and placement is to pass
    /// the pool by.
    #[must_use]
    pub fn lived(mut self, lived: Option<Incarnation>) -> Self {
        if let (None, Some(dead), Some(lived)) = (&self.problem, self.own_mark, lived)
            && dead >= lived
        {
            let problem = format!(
                "the pool says that this node is dead up to incarnation {dead}, and it lives {lived}: it gets a later one as \
                 soon as nothing runs on it, at most every 5 minutes (drain it and stop what does; where something hangs in \
                 a pool, restart the host)"
            );
            self.problem = Some(problem);
        }
        self
    }

    pub fn is_available(&self) -> bool {
        self.problem.is_none()
    }
}

/// The newest status of one pool. The thread ends when this is dropped.
pub struct StatusWatch {
    newest: watch::Sender<(BootTime, PoolStatus)>,
    again: Sender<()>,
}

impl StatusWatch {
    pub fn start(id: PoolId, path: PathBuf, node: NodeId, loss: Loss) -> std::io::Result<Self> {
        let newest = watch::Sender::new((BootTime::now(), PoolStatus::unknown()));
        let seen = newest.clone();
        let (again, wanted) = channel();
        let (first, looked) = channel::<()>();
        thread::Builder::new().name(format!("pool-{id}")).spawn(move || {
            let mut uid = None;
            let mut first = Some(first);
            loop {
                let status =
                    if loss.is_declared() { look_at_lost(&path, &id) } else { look(&path, &id, &node, &mut uid) };
                seen.send_replace((BootTime::now(), status));
                first.take();
                if !wait(&wanted) {
                    return;
                }
            }
        })?;
        // Either way the sender is gone: looked, or the time is over.
        let _ = looked.recv_timeout(FIRST_LOOK);
        Ok(Self { newest, again })
    }

    pub fn get(&self) -> PoolStatus {
        let (at, mut status) = self.newest.borrow().clone();
        if BootTime::now().since(at) > STALE_AFTER {
            status.problem = PoolStatus::unknown().problem;
            status.answers = false;
            (status.free, status.used) = (None, None);
        }
        status
    }

    /// Somebody found so much free space since the newest look.
    pub fn note_free(&self, free: Bytes) {
        self.newest.send_modify(|(_, status)| status.free = Some(free));
    }

    /// Asks for a fresh look; the answer comes when the file system gives it.
    pub fn look_again(&self) {
        // Fails only when the thread has ended with its process.
        let _ = self.again.send(());
    }
}

/// Until the next look; `false` when nobody is interested any more.
fn wait(wanted: &Receiver<()>) -> bool {
    match wanted.recv_timeout(EVERY) {
        Ok(()) | Err(RecvTimeoutError::Timeout) => {
            while wanted.try_recv().is_ok() {}
            true
        }
        Err(RecvTimeoutError::Disconnected) => false,
    }
}

/// Without leaving anything there: only which pool it is.
fn look_at_lost(path: &Path, id: &PoolId) -> PoolStatus {
    let uid = marker::read(path, id).ok().map(|marker| marker.uid);
    PoolStatus::unusable(uid, Some("it was declared lost: take it out of the daemon's configuration".to_owned()))
}

fn look(path: &Path, id: &PoolId, node: &NodeId, pinned: &mut Option<String>) -> PoolStatus {
    let marker = match marker::read(path, id) {
        Ok(marker) => marker,
        Err(error) => return PoolStatus::unusable(None, Some(error.to_string())),
    };
    // The identity of a pool does not change under a running daemon.
    let pinned = pinned.get_or_insert_with(|| marker.uid.clone());
    let mut problem = (*pinned != marker.uid).then(|| {
        let (expected, found) = (pinned.clone(), marker.uid.clone());
        marker::MarkerError::OtherUid { path: path.to_owned(), expected, found }.to_string()
    });
    if problem.is_none() {
        problem = fence::sign_in(path, node).err().map(|error| format!("failed to write to the pool: {error}"));
    }
    // One that cannot be read is told by the watch of the fence files.
    let fence = fence::read(path, node).ok().flatten();
    // What another pool says that is mounted here is of another node.
    let own_mark = fence.and_then(|fence| fence.highest).map(|mark| mark.incarnation).filter(|_| problem.is_none());
    match image::space(path) {
        Ok(image::Space { free, used, capacity }) => PoolStatus {
            uid: Some(marker.uid),
            problem,
            answers: true,
            capacity: Some(capacity),
            free: Some(free),
            used: Some(used),
            own_mark,
        },
        Err(error) => {
            let problem = problem.unwrap_or_else(|| format!("the free space is unknown: {error}"));
            PoolStatus::unusable(Some(marker.uid), Some(problem))
        }
    }
}
