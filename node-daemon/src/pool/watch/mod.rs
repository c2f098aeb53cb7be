//! Watches whether this node still holds what its Instances use, with or without the control plane.
//!
//! A thread for each pool reads this node's fence file there afresh every 2 s, and the holder records of what is in use; a
//! file system that hangs stops nothing but that thread. Another thread looks at the clock: where a pool could not be
//! read for too long its guests are frozen. What follows from what was seen is decided in [`decide`].
//!
//! An Instance is watched from before its first object is taken until its process is reaped.

pub mod decide;
mod look;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Duration,
};

use kibo_crds::{Epoch, InstanceId, NodeId, ObjectUid, PoolId};

use crate::{
    clock::{self, BootTime},
    launch::{Launch, Taker},
};
use decide::{FenceFinding, Finding, Holding, Loss, Order, Pulse, Watched};

/// How often a pool is read while it is in use.
pub const EVERY: Duration = Duration::from_secs(2);
/// How often somebody looks at the clock.
const TICK: Duration = Duration::from_millis(500);

/// A pool of this node.
pub struct Place {
    pub id: PoolId,
    pub path: PathBuf,
    /// Of the marker that this daemon has seen first: another pool in the place of this one proves nothing.
    pub uid: Arc<OnceLock<String>>,
}

/// A guest in the hand of its Instance. None of this waits, and all of it may be done again.
pub trait Grip: Send + Sync {
    /// Nothing of it runs any more until it is thawed; also not what is just starting.
    fn freeze(&self, pool: &PoolId, problem: &str);
    fn thaw(&self);
    /// It is dead as soon as the kernel can do that. Why is told afterwards. `stood_still`: since before somebody else
    /// may have written.
    fn kill(&self, pool: &PoolId, why: &str, stood_still: bool);
}

type Objects = BTreeMap<PoolId, Vec<(ObjectUid, Epoch)>>;
type Users = Mutex<BTreeMap<InstanceId, User>>;

/// The Instances that use pools of this node.
#[derive(Clone)]
pub struct Watch {
    users: Arc<Users>,
    wake: Arc<BTreeMap<PoolId, Sender<()>>>,
    wake_clock: Sender<()>,
    freeze_after: Duration,
    numbers: Arc<AtomicU64>,
}

struct User {
    number: u64,
    watched: Watched,
    taker: Taker,
    objects: Objects,
    /// Its VM was started: its objects are taken.
    runs: bool,
    last: Option<Order>,
    grip: Arc<dyn Grip>,
}

/// An Instance is watched as long as this is there.
pub struct Registration {
    instance: InstanceId,
    number: u64,
    watch: Watch,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut users = self.watch.lock();
        // Somebody may watch it anew already.
        if users.get(&self.instance).is_some_and(|user| user.number == self.number) {
            users.remove(&self.instance);
        }
    }
}

impl Registration {
    /// Its VM runs, or did when the daemon came: what was ordered in the meantime is done to it.
    pub fn runs(&self) {
        let mut users = self.watch.lock();
        let Some(user) = users.get_mut(&self.instance) else { return };
        user.runs = true;
        if let Some(order) = user.last.clone().filter(|_| user.watched.pulse() != &Pulse::Runs) {
            user.obey(order);
        }
        let pools: Vec<_> = user.objects.keys().cloned().collect();
        drop(users);
        self.watch.look_now(&pools);
    }
}

impl User {
    fn obey_if(&mut self, instance: InstanceId, order: Option<Order>) {
        if let Some(order) = order {
            tracing::warn!(%instance, ?order, "a pool has a say in whether an Instance may run");
            self.obey(order);
        }
    }

    fn obey(&mut self, order: Order) {
        match &order {
            Order::Freeze { pool, problem } => self.grip.freeze(pool, problem),
            Order::Thaw => self.grip.thaw(),
            Order::Kill { pool, loss, still } => {
                let stood_still = still.is_some_and(|since| stood_still_before(loss, since));
                self.grip.kill(pool, &loss.to_string(), stood_still);
            }
        }
        self.last = Some(order);
    }
}

/// Whether a guest had stood still when its right ended, by the clocks of both hosts. Where nothing says when that was,
/// it may have been before.
fn stood_still_before(loss: &Loss, since: BootTime) -> bool {
    let Loss::Isolated(dead) = loss else { return false };
    let now = Duration::from_nanos(clock::unix_nanos());
    let began = now.saturating_sub(BootTime::now().since(since));
    // In whole milliseconds, as the mark has it.
    began.as_millis() <= u128::from(dead.unix_millis)
}

impl Watch {
    /// Begins to read the pools. It goes on until every handle is dropped.
    pub fn start(places: impl IntoIterator<Item = Place>, node: &NodeId, freeze_after: Duration) -> io::Result<Self> {
        let (wake, woken): (BTreeMap<_, _>, Vec<_>) = places
            .into_iter()
            .map(|place| {
                let (sender, receiver) = channel();
                ((place.id.clone(), sender), (place, receiver))
            })
            .unzip();
        let (wake_clock, clock) = channel();
        let watch =
            Self { users: Arc::default(), wake: Arc::new(wake), wake_clock, freeze_after, numbers: Arc::default() };
        for (place, woken) in woken {
            let (users, node) = (Arc::downgrade(&watch.users), node.clone());
            thread::Builder::new().name(format!("fence-{}", place.id)).spawn(move || {
                let pool = look::Looker { place, node };
                while_watched(&users, &woken, EVERY, |users| look_at(&pool, users));
            })?;
        }
        let users = Arc::downgrade(&watch.users);
        thread::Builder::new().name("fence-clock".to_owned()).spawn(move || {
            while_watched(&users, &clock, TICK, tick);
        })?;
        Ok(watch)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<InstanceId, User>> {
        lock(&self.users)
    }

    /// Watches an Instance. `frozen`: it was found standing still.
    pub fn register(&self, launch: &Launch, grip: Arc<dyn Grip>, frozen: bool) -> Registration {
        let mut objects: Objects = BTreeMap::new();
        for granted in launch.objects() {
            let held = (granted.object.uid.clone(), granted.grant.epoch);
            objects.entry(granted.object.pool.clone()).or_default().push(held);
        }
        self.begin(launch.instance(), launch.taker.clone(), objects, grip, frozen)
    }

    /// Watches an Instance of which nobody knows what it holds: it may be in any pool.
    pub fn register_unclear(
        &self,
        instance: InstanceId,
        taker: Taker,
        grip: Arc<dyn Grip>,
        frozen: bool,
    ) -> Registration {
        let objects = self.wake.keys().map(|pool| (pool.clone(), Vec::new())).collect();
        self.begin(instance, taker, objects, grip, frozen)
    }

    fn begin(
        &self,
        instance: InstanceId,
        taker: Taker,
        objects: Objects,
        grip: Arc<dyn Grip>,
        frozen: bool,
    ) -> Registration {
        let now = BootTime::now();
        let mut watched = Watched::begin(objects.keys().cloned(), now, frozen, self.freeze_after);
        for pool in objects.keys().filter(|pool| !self.wake.contains_key(pool)) {
            let problem = "this node's configuration does not declare it any more".to_owned();
            // Whether anything follows is for the clock to say.
            let _ = watched.learn_of_fence(pool, now, FenceFinding::Unknown(problem));
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let pools: Vec<_> = objects.keys().cloned().collect();
        self.lock().insert(instance, User { number, watched, taker, objects, runs: false, last: None, grip });
        self.look_now(&pools);
        Registration { instance, number, watch: self.clone() }
    }

    fn look_now(&self, pools: &[PoolId]) {
        for pool in pools {
            if let Some(wake) = self.wake.get(pool) {
                // Fails only when the thread has ended with its process.
                let _ = wake.send(());
            }
        }
        let _ = self.wake_clock.send(());
    }
}

fn lock(users: &Users) -> MutexGuard<'_, BTreeMap<InstanceId, User>> {
    // Every change under the lock leaves it whole.
    users.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does something again and again as long as there are users, and sooner when it is woken; ends when nobody could come
/// any more.
fn while_watched(users: &Weak<Users>, woken: &Receiver<()>, every: Duration, mut act: impl FnMut(&Users)) {
    loop {
        let Some(users) = users.upgrade() else { return };
        let is_idle = lock(&users).is_empty();
        if !is_idle {
            act(&users);
        }
        // Only a weak hold while it waits, so that it ends with the last handle.
        drop(users);
        let wait = if is_idle { woken.recv().map_err(Into::into) } else { woken.recv_timeout(every) };
        match wait {
            Ok(()) => while woken.try_recv().is_ok() {},
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Nothing is held while the file system is asked: who comes or goes meanwhile is not affected. What the fence file says
/// is acted upon before any record is read.
fn look_at(pool: &look::Looker, users: &Users) {
    let begun = BootTime::now();
    let fence = pool.fence();
    let mut undisputed = Vec::new();
    for (instance, user) in lock(users).iter_mut().filter(|(_, user)| user.objects.contains_key(pool.id())) {
        let finding = decide::find_in_fence(&user.taker, &fence);
        if finding == FenceFinding::Undisputed && user.runs {
            let objects = user.objects[pool.id()].clone();
            undisputed.push((*instance, Holding { taker: user.taker.clone(), objects }));
        }
        let order = user.watched.learn_of_fence(pool.id(), begun, finding);
        user.obey_if(*instance, order);
    }
    for (instance, holding) in undisputed {
        let finding = decide::find_in_records(&holding, &pool.records(&holding));
        let mut users = lock(users);
        // Another of the same id is never begun; one that is gone has let go of everything.
        let Some(user) = users.get_mut(&instance) else { continue };
        if let Finding::Unclear(problem) = &finding {
            tracing::debug!(pool = %pool.id(), %instance, problem, "that an Instance still holds its disks is not proven");
        }
        let order = user.watched.learn_of_records(pool.id(), begun, finding);
        user.obey_if(instance, order);
    }
}

fn tick(users: &Users) {
    let now = BootTime::now();
    for (instance, user) in lock(users).iter_mut() {
        if let Some(order) = user.watched.tick(now) {
            tracing::warn!(%instance, ?order, "nobody knows whether an Instance still holds its disks: its guest stands still");
            user.obey(order);
        }
    }
}
