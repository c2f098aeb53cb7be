//! One operation at a time on each object.

use std::{
    collections::BTreeSet,
    sync::{Condvar, Mutex, PoisonError},
    time::Duration,
};

use kibo_crds::ObjectUid;

/// An operation that takes longer hangs with its file system.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Default)]
pub struct Locks {
    busy: Mutex<BTreeSet<ObjectUid>>,
    freed: Condvar,
}

/// The object is this operation's until it is dropped.
pub struct ObjectLock<'l> {
    locks: &'l Locks,
    uid: ObjectUid,
}

impl Locks {
    /// Waits for the operation that runs on this object; `None` when that takes too long.
    pub fn lock(&self, uid: &ObjectUid) -> Option<ObjectLock<'_>> {
        let busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let is_busy = |busy: &mut BTreeSet<ObjectUid>| busy.contains(uid);
        let (mut busy, _) =
            self.freed.wait_timeout_while(busy, PATIENCE, is_busy).unwrap_or_else(PoisonError::into_inner);
        busy.insert(uid.clone()).then(|| ObjectLock { locks: self, uid: uid.clone() })
    }
}

impl Drop for ObjectLock<'_> {
    fn drop(&mut self) {
        self.locks.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.uid);
        self.locks.freed.notify_all();
    }
}
