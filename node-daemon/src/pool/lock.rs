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

/// Each operation holds a thread. On a pool that hangs no more than these are lost to the others.
const MOST: usize = 64;

/// The object is this operation's until it is dropped.
pub struct ObjectLock<'l> {
    locks: &'l Locks,
    uid: ObjectUid,
}

impl Locks {
    /// Waits for the operation that runs on this object; `None` when that takes too long, and at once when too many others
    /// are under way.
    pub fn lock(&self, uid: &ObjectUid) -> Option<ObjectLock<'_>> {
        let busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        if busy.len() >= MOST {
            return None;
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_hangs_takes_no_more_than_its_share_of_threads() {
        let locks = Locks::default();
        let uid = |number: usize| format!("6f9619ff-8b86-d011-b42d-{number:012}").parse::<ObjectUid>().unwrap();
        let mut held: Vec<_> = (0..MOST).map(|number| locks.lock(&uid(number)).unwrap()).collect();
        assert!(locks.lock(&uid(MOST)).is_none());
        held.pop();
        assert!(locks.lock(&uid(MOST)).is_some());
    }
}
