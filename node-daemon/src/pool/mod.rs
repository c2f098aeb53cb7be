//! Storage pools: who may use which object, and the images themselves.
//!
//! A pool is a directory with a marker file. Each object has a directory named by its uid, with an
//! image and holder records. An image is opened only after the record of the grant was written and
//! every other record agrees; whoever is refused leaves a record of that too, so that the same grant
//! can never be taken later.
//!
//! Every operation here waits for the file system: call it on a thread that may block.

mod fence;
mod image;
mod listing;
mod lock;
mod loss;
mod marker;
mod moving;
mod object;
mod opening;
mod record_files;
pub mod records;
mod sparse;
mod status;
#[cfg(test)]
mod tests;
mod transfer;
pub mod watch;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::PathBuf,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use futures::future::select_all;
use kibo_crds::{Bytes, Epoch, Incarnation, InstanceId, NodeId, ObjectUid, PoolId};
use kibo_protocol::v1;

pub use fence::{Beat, FenceError};
pub use image::{IMAGE, ImageError, ensure as ensure_image};
pub use listing::{PoolEntry, PoolPage};
pub use marker::{Marker, MarkerError, init, read as read_marker};
pub use moving::{MoveError, Progress};
pub use opening::{OpenImage, open as open_image};
pub use records::{Conflict, LastTaken, NotACopy};
pub use status::PoolStatus;
pub use transfer::{Disks, TransferError};

use crate::{
    config::{FenceConfig, PoolConfig},
    launch::{By, Launch, Taker},
};
use lock::Locks;
use loss::Loss;
use status::StatusWatch;
use watch::{Grip, Registration, Watch};

/// The pools of this node.
pub struct Pools {
    by_id: BTreeMap<PoolId, Pool>,
    node: NodeId,
    life: fence::Life,
    watch: Watch,
}

/// One pool. Two operations never run on one object at once.
pub struct Pool {
    id: PoolId,
    path: PathBuf,
    is_default: bool,
    node: NodeId,
    /// Of the marker that this daemon has seen first.
    uid: Arc<OnceLock<String>>,
    status: StatusWatch,
    /// Of this node, in all of its pools.
    life: fence::Life,
    loss: Loss,
    waiting: Arc<AtomicU32>,
    /// None once the pool was declared lost.
    heart: Mutex<Option<fence::Heart>>,
    locks: Locks,
}

/// An object that this node holds, with its image open for reading and writing.
#[derive(Debug)]
pub struct TakenObject {
    pub uid: ObjectUid,
    pub pool: PoolId,
    pub epoch: Epoch,
    pub size: Bytes,
    pub image: OpenImage,
}

/// A guest that waits for space in a pool; dropped, it waits no more.
#[derive(Debug)]
pub struct Waiting(Arc<AtomicU32>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the records of one object say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolObject {
    pub uid: ObjectUid,
    /// Of any record; 0 without one.
    pub highest: Epoch,
    pub last: Option<LastTaken>,
    /// Absent: no image.
    pub size: Option<Bytes>,
}

impl PoolObject {
    /// What two directories say of the same object: one of them was put aside.
    fn both(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        let (Some(one), Some(other)) = (&one, &other) else { return one.or(other) };
        let epoch = |object: &Self| object.last.as_ref().map(|last| last.epoch);
        let last = if epoch(one) < epoch(other) { &other.last } else { &one.last };
        let (highest, size) = (one.highest.max(other.highest), one.size.or(other.size));
        Some(Self { uid: one.uid.clone(), highest, last: last.clone(), size })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("this node has no storage pool {0:?}: declare it in the daemon's configuration")]
    Unknown(PoolId),
    #[error("the storage pool {0} was declared lost: nothing in it is used any more, whatever is there")]
    Lost(PoolId),
    #[error("the storage pool {pool} is another one than the one that is meant: its uid is {found}, not {expected}")]
    OtherPool { pool: PoolId, expected: String, found: String },
    #[error("the storage pool {pool} is not available: {source}")]
    Unavailable { pool: PoolId, source: Box<MarkerError> },
    #[error("object {0} is busy with another operation")]
    Busy(ObjectUid),
    #[error("object {uid} cannot be used: {conflict}")]
    Conflict { uid: ObjectUid, conflict: Conflict },
    #[error("object {0} is in use on this node")]
    InUse(ObjectUid),
    #[error(
        "the image of object {uid} is still open on this host: what its VM wrote last is on its way to the disk, or another \
         program has locked it (lslocks says which)"
    )]
    StillOpen { uid: ObjectUid },
    #[error("what the pool {pool} has of object {uid} is not removed as a copy: {problem}")]
    NotACopy { uid: ObjectUid, pool: PoolId, problem: NotACopy },
    #[error("failed to list the objects of the pool {pool}: {source}")]
    List { pool: PoolId, source: io::Error },
    #[error(transparent)]
    Fence(FenceError),
    #[error("failed to write this node's fence file in the pool {pool}: {source}")]
    SignIn { pool: PoolId, source: io::Error },
    #[error("failed to {action} of object {uid} in the pool {pool}: {source}")]
    Io { action: &'static str, uid: ObjectUid, pool: PoolId, source: io::Error },
}

impl PoolError {
    /// The same for the operator.
    pub fn failure(&self) -> v1::ObjectFailure {
        match self {
            Self::Unknown(_) | Self::Unavailable { .. } | Self::Lost(_) | Self::OtherPool { .. } => {
                v1::ObjectFailure::PoolUnavailable
            }
            Self::Conflict { .. } | Self::NotACopy { .. } => v1::ObjectFailure::HolderConflict,
            Self::InUse(_) | Self::Busy(_) | Self::StillOpen { .. } => v1::ObjectFailure::InUse,
            Self::List { .. } | Self::Fence(_) | Self::SignIn { .. } | Self::Io { .. } => v1::ObjectFailure::Io,
        }
    }
}

/// Why an object was not taken, and what that leaves in the pool.
#[derive(Debug, thiserror::Error)]
#[error("object {uid}: {cause}")]
pub struct TakeError {
    pub uid: ObjectUid,
    pub epoch: Epoch,
    /// HELD when the pool does not answer: then it is not known.
    pub object_use: v1::ObjectUse,
    pub cause: TakeFailure,
}

#[derive(Debug, thiserror::Error)]
pub enum TakeFailure {
    #[error(transparent)]
    Conflict(#[from] Conflict),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Image(#[from] ImageError),
}

impl TakeError {
    /// How an Instance ends that needed this object.
    pub fn end_reason(&self) -> v1::EndReason {
        match &self.cause {
            TakeFailure::Conflict(Conflict::Refused(_) | Conflict::Released(_) | Conflict::Isolated { .. }) => {
                v1::EndReason::NotStarted
            }
            TakeFailure::Conflict(_) => v1::EndReason::HolderConflict,
            TakeFailure::Pool(_) | TakeFailure::Image(_) => v1::EndReason::StorageFailed,
        }
    }

    pub fn object_state(&self) -> v1::ObjectState {
        v1::ObjectState {
            uid: self.uid.to_string(),
            epoch: self.epoch.0,
            r#use: self.object_use.into(),
            size_bytes: None,
        }
    }
}

impl Pools {
    /// Starts to watch every pool. One that is not there now may come later.
    pub fn open(configs: &[PoolConfig], fence: FenceConfig, node: &NodeId) -> io::Result<Self> {
        Self::open_but(configs, fence, node, &BTreeSet::new())
    }

    /// The same, and nothing is written to those that were declared lost.
    pub fn open_but(
        configs: &[PoolConfig],
        fence: FenceConfig,
        node: &NodeId,
        lost: &BTreeSet<PoolId>,
    ) -> io::Result<Self> {
        let life = fence::Life::default();
        let open = |config: &PoolConfig| {
            let loss = Loss::of(lost.contains(&config.id));
            let heart = (!loss.is_declared())
                .then(|| fence::Heart::start(config.id.clone(), config.path.clone(), node.clone(), life.clone()))
                .transpose()?;
            let status = StatusWatch::start(config.id.clone(), config.path.clone(), node.clone(), loss.clone())?;
            let pool = Pool {
                id: config.id.clone(),
                path: config.path.clone(),
                is_default: config.default,
                node: node.clone(),
                uid: Arc::default(),
                status,
                life: life.clone(),
                loss,
                waiting: Arc::default(),
                heart: Mutex::new(heart),
                locks: Locks::default(),
            };
            if let Some(problem) = pool.status().problem {
                tracing::warn!(pool = %pool.id, problem, "the storage pool is not available");
            }
            Ok((config.id.clone(), pool))
        };
        let pools: BTreeMap<_, _> = configs.iter().map(open).collect::<io::Result<_>>()?;
        let places = pools.values().map(|pool: &Pool| watch::Place {
            id: pool.id.clone(),
            path: pool.path.clone(),
            uid: pool.uid.clone(),
        });
        let watch = Watch::start(places, node, fence.freeze_after)?;
        Ok(Self { by_id: pools, node: node.clone(), life, watch })
    }

    /// From now on this Instance is stopped by whatever its pools say of its right to what it holds. To be called before
    /// anything is taken for it, and kept until its process is reaped. `frozen`: it was found standing still.
    pub fn watch(&self, launch: &Launch, grip: Arc<dyn Grip>, frozen: bool) -> Registration {
        self.watch.register(launch, grip, frozen)
    }

    /// Waits for a step that may hang in one of these pools, until that pool is declared lost: then nobody waits any more, and
    /// the step, should it ever go on, writes nothing there.
    pub async fn unless_lost<T>(
        &self,
        ids: impl IntoIterator<Item = &PoolId>,
        step: impl Future<Output = T>,
    ) -> Result<T, PoolId> {
        let pools = ids.into_iter().filter_map(|id| self.by_id.get(id));
        let losses: Vec<_> = pools.map(|pool| Box::pin(async { (pool.loss.declared().await, pool.id()).1 })).collect();
        let first =
            async { if losses.is_empty() { std::future::pending().await } else { select_all(losses).await.0.clone() } };
        tokio::select! {
            biased;
            done = step => Ok(done),
            lost = first => Err(lost),
        }
    }

    /// The highest incarnation of this node that one of its pools says is dead, as far as they were seen. One that no node
    /// lives to see is a mistake of whoever wrote it, and harms that pool alone.
    pub fn own_mark(&self) -> Option<Incarnation> {
        let lived = self.life.get().unwrap_or_default();
        let marks = self.iter().filter_map(|pool| pool.status.get().own_mark);
        marks.filter(|mark| mark.is_credible_after(lived)).max()
    }

    /// From now on this node's fence files say that it lives this life.
    pub fn live(&self, incarnation: Option<Incarnation>) {
        self.life.set(incarnation);
    }

    /// Whether this pool was declared lost: what still hangs there writes nothing any more, there or elsewhere.
    pub fn is_lost(&self, id: &PoolId) -> bool {
        self.by_id.get(id).is_some_and(|pool| pool.loss.is_declared())
    }

    /// These were declared lost: from now on nothing is written there. Gives back those of this node that were not lost
    /// before.
    pub fn declare_lost(&self, ids: &BTreeSet<PoolId>) -> BTreeSet<PoolId> {
        let own = self.by_id.values().filter(|pool| ids.contains(&pool.id));
        own.filter(|pool| pool.declare_lost()).map(|pool| pool.id.clone()).collect()
    }

    /// The same for an Instance that could not be taken up: nobody knows what it holds, so that every pool has a say.
    /// `None`: this node lives no life in which it could hold anything.
    pub fn watch_unclear(&self, instance: InstanceId, grip: Arc<dyn Grip>, frozen: bool) -> Option<Registration> {
        let by = By::Instance(instance);
        let taker = Taker { node: self.node.clone(), incarnation: self.life.get()?, by };
        let registration = self.watch.register_unclear(instance, taker, grip, frozen);
        registration.runs();
        Some(registration)
    }

    pub fn get(&self, id: &PoolId) -> Result<&Pool, PoolError> {
        self.by_id.get(id).ok_or_else(|| PoolError::Unknown(id.clone()))
    }

    pub fn iter(&self) -> impl Iterator<Item = &Pool> {
        self.by_id.values()
    }
}

impl Pool {
    pub fn id(&self) -> &PoolId {
        &self.id
    }

    pub fn is_default(&self) -> bool {
        self.is_default
    }

    /// The newest known status; never waits.
    pub fn status(&self) -> PoolStatus {
        self.status.get().lived(self.life.get())
    }

    /// Asks for a fresh look at it, without waiting.
    pub fn look_again(&self) {
        self.status.look_again();
    }

    /// A guest stands still until there is space here.
    pub fn wait_for_space(&self) -> Waiting {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self.waiting.clone())
    }

    /// As the session reports it.
    pub fn report(&self) -> v1::Pool {
        let status = self.status();
        v1::Pool {
            id: self.id.to_string(),
            default: self.is_default,
            available: status.is_available(),
            uid: status.uid.unwrap_or_default(),
            capacity_bytes: status.capacity.map(|bytes| bytes.0),
            free_bytes: status.free.map(|bytes| bytes.0),
            used_bytes: status.used.map(|bytes| bytes.0),
            waiting_guests: self.waiting.load(Ordering::Relaxed),
        }
    }

    /// Of the marker that was seen first; empty before any was.
    fn marker_uid(&self) -> String {
        self.uid.get().cloned().unwrap_or_default()
    }

    fn object_dir(&self, uid: &ObjectUid) -> PathBuf {
        self.path.join(marker::OBJECTS).join(uid.as_str())
    }

    /// Whether that is news.
    fn declare_lost(&self) -> bool {
        if !self.loss.declare() {
            return false;
        }
        tracing::error!(pool = %self.id, "the storage pool was declared lost: nothing is written there any more");
        // Its thread ends with it.
        self.heart.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.status.look_again();
        true
    }

    /// Looks at the marker afresh: between two looks of the watch a mount may have gone.
    fn verify(&self) -> Result<(), PoolError> {
        if self.loss.is_declared() {
            return Err(PoolError::Lost(self.id.clone()));
        }
        let unavailable = |source| PoolError::Unavailable { pool: self.id.clone(), source: Box::new(source) };
        let marker = marker::read(&self.path, &self.id).map_err(unavailable)?;
        let expected = self.uid.get_or_init(|| marker.uid.clone());
        if *expected != marker.uid {
            let (path, expected, found) = (self.path.clone(), expected.clone(), marker.uid);
            return Err(unavailable(MarkerError::OtherUid { path, expected, found }));
        }
        Ok(())
    }

    /// As somebody who takes over from it.
    #[cfg(test)]
    pub(crate) fn mark_dead(&self, victim: &NodeId, dead: Incarnation) {
        fence::mark(&self.path, victim, dead, &self.node).unwrap();
    }

    /// What another node's fence file says now; `None`: it has none here, or has not counted in it.
    pub fn look_at_fence(&self, node: &NodeId) -> Result<Option<Beat>, PoolError> {
        self.verify()?;
        let fence = fence::read(&self.path, node).map_err(PoolError::Fence)?;
        fence.map_or(Ok(None), |fence| fence.beat).map_err(PoolError::Fence)
    }

    /// Whether other nodes use this pool too.
    fn is_shared(&self) -> io::Result<bool> {
        let own = self.node.as_str();
        for entry in fs::read_dir(self.path.join(marker::NODES))? {
            let name = entry?.file_name();
            if name.to_str().is_some_and(|name| name != own && !name.starts_with('.')) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
