//! A guest that stands still because a write to one of its disks failed on the host, for want of space as a rule.
//!
//! QEMU pauses the guest and keeps the write; the guest sees no error. When there is space again it is told to go on, and
//! tries the write itself. Whether that helped shows in the moments after it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kibo_crds::{Bytes, PoolId};
use kibo_protocol::v1::{PauseReason, Paused};

use crate::{
    pool::{Pools, Waiting},
    vmm::FailedDisk,
};

/// How often a stall is looked at.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);
/// With so much free space it is worth a try.
const ROOM: Bytes = Bytes::mib(16);
/// Tried this often in any case: quotas and other errors do not show in the free space.
const AGAIN: Duration = Duration::from_secs(30);
/// A guest that ran for so long without failing goes on.
const SETTLED: Duration = Duration::from_secs(3);

/// The pools that the disks of a VM are in.
#[derive(Clone, Default)]
pub struct DiskPools {
    pools: Option<Arc<Pools>>,
    /// By the serials of the disks.
    disks: Vec<(String, PoolId)>,
}

impl DiskPools {
    pub fn new(pools: Arc<Pools>, disks: Vec<(String, PoolId)>) -> Self {
        Self { pools: Some(pools), disks }
    }

    /// By the name of a disk or of the file below it.
    fn of(&self, disk: &str) -> Option<PoolId> {
        let serial = disk.strip_suffix("-file").unwrap_or(disk);
        self.disks.iter().find(|(known, _)| known == serial).map(|(_, pool)| pool.clone())
    }

    /// The newest known; another look is asked for.
    fn free(&self, pool: &PoolId) -> Option<Bytes> {
        let pool = self.pools.as_ref()?.get(pool).ok()?;
        pool.look_again();
        pool.status().free
    }

    fn wait_for(&self, pool: &PoolId) -> Option<Waiting> {
        Some(self.pools.as_ref()?.get(pool).ok()?.wait_for_space())
    }
}

/// What is to be done with a stalled guest now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Wait,
    /// Let it try the write again.
    Try,
    /// It runs.
    Over,
}

/// A guest that stands still, or was just told to go on.
pub struct Stall {
    /// As QEMU names it; empty: not known.
    disk: String,
    pool: Option<PoolId>,
    is_full: bool,
    /// Empty: not known.
    reason: String,
    tried: Instant,
    runs_since: Option<Instant>,
    /// Counts in what the pool reports.
    _waiting: Option<Waiting>,
}

impl Stall {
    pub fn begin(disks: &DiskPools, disk: &str, is_full: bool, reason: &str, now: Instant) -> Self {
        let pool = disks.of(disk);
        let waiting = pool.as_ref().filter(|_| is_full).and_then(|pool| disks.wait_for(pool));
        let (disk, reason) = (disk.to_owned(), reason.to_owned());
        Self { disk, pool, is_full, reason, tried: now, runs_since: None, _waiting: waiting }
    }

    /// It began while nobody listened.
    pub fn found(disks: &DiskPools, failed: Option<&FailedDisk>, now: Instant) -> Self {
        let (disk, is_full) = failed.map_or(("", false), |failed| (failed.disk.as_str(), failed.is_full));
        Self::begin(disks, disk, is_full, "", now)
    }

    /// An earlier daemon saw it begin, and it runs now as far as is known.
    pub fn survived(disks: &DiskPools, now: Instant) -> Self {
        Self { runs_since: Some(now), ..Self::begin(disks, "", false, "", now) }
    }

    /// Whether it is because of that disk.
    pub fn is_of(&self, failed: Option<&FailedDisk>) -> bool {
        let own = self.disk.strip_suffix("-file").unwrap_or(&self.disk);
        failed.is_some_and(|failed| (failed.disk.as_str(), failed.is_full) == (own, self.is_full))
    }

    /// The write failed once more.
    pub fn failed_again(&mut self, now: Instant) {
        (self.tried, self.runs_since) = (now, None);
    }

    /// It was told to go on.
    pub fn goes_on(&mut self, now: Instant) {
        (self.tried, self.runs_since) = (now, Some(now));
    }

    pub fn next(&self, disks: &DiskPools, now: Instant) -> Step {
        let free = self.pool.as_ref().filter(|_| self.is_full).and_then(|pool| disks.free(pool));
        step(now.duration_since(self.tried), self.runs_since.map(|since| now.duration_since(since)), free)
    }

    /// For people.
    pub fn message(&self) -> Paused {
        let pool = self.pool.as_ref().map(ToString::to_string).unwrap_or_default();
        let (reason, message) = if self.is_full {
            let message = format!(
                "storage pool {pool} is full: the guest stands still and has seen no error; it goes on by itself when \
                 there is space"
            );
            (PauseReason::DiskFull, message)
        } else {
            let of = if pool.is_empty() { String::new() } else { format!(" in storage pool {pool}") };
            let how = if self.reason.is_empty() { String::new() } else { format!(" ({})", self.reason) };
            let message = format!(
                "a write to a disk{of} failed{how}: the guest stands still and has seen no error; the write is tried again \
                 every {} s",
                AGAIN.as_secs()
            );
            (PauseReason::DiskFailed, message)
        };
        Paused { reason: reason.into(), message }
    }
}

fn step(since_try: Duration, runs_for: Option<Duration>, free: Option<Bytes>) -> Step {
    match runs_for {
        Some(runs_for) if runs_for >= SETTLED => Step::Over,
        None if since_try >= AGAIN => Step::Try,
        None if since_try >= LOOK_EVERY && free.is_some_and(|free| free >= ROOM) => Step::Try,
        _ => Step::Wait,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stalled_guest_is_tried_when_there_is_room_and_now_and_then() {
        let seconds = Duration::from_secs;
        let table = [
            (1, None, None, Step::Wait),
            (0, None, Some(64), Step::Wait),
            (1, None, Some(64), Step::Try),
            (10, None, Some(15), Step::Wait),
            (30, None, Some(0), Step::Try),
            (1, Some(1), Some(64), Step::Wait),
            (3, Some(3), Some(0), Step::Over),
        ];
        for (since_try, runs_for, free, expected) in table {
            let decided = step(seconds(since_try), runs_for.map(seconds), free.map(Bytes::mib));
            assert_eq!(decided, expected, "{since_try} {runs_for:?} {free:?}");
        }
    }

    #[test]
    fn what_an_earlier_daemon_saw_is_told_of_the_disk_that_qemu_names() {
        let disks = vec![("layer".to_owned(), "a".parse().unwrap()), ("vol0".to_owned(), "b".parse().unwrap())];
        let disks = DiskPools { pools: None, disks };
        let now = Instant::now();
        let failed = |disk: &str, is_full| FailedDisk { disk: disk.to_owned(), is_full };
        let told = |failed: Option<&FailedDisk>| Stall::found(&disks, failed, now).message();
        let full = told(Some(&failed("vol0", true)));
        assert!(
            full.reason() == PauseReason::DiskFull && full.message.starts_with("storage pool b is full"),
            "{full:?}"
        );
        let broken = told(Some(&failed("vol0", false)));
        assert!(broken.reason() == PauseReason::DiskFailed && broken.message.contains("pool b failed:"), "{broken:?}");
        let unknown = told(None);
        assert!(unknown.reason() == PauseReason::DiskFailed && unknown.message.contains("to a disk failed:"));
        let begun = Stall::begin(&disks, "vol0-file", true, "No space left on device", now);
        assert!(begun.is_of(Some(&failed("vol0", true))) && !begun.is_of(Some(&failed("layer", true))));
        assert!(!Stall::survived(&disks, now).is_of(Some(&failed("vol0", true))) && !begun.is_of(None));
    }

    #[test]
    fn the_pool_of_a_disk_is_found_by_its_nodes_name() {
        let disks = vec![("layer".to_owned(), "a".parse().unwrap()), ("vol0".to_owned(), "b".parse().unwrap())];
        let disks = DiskPools { pools: None, disks };
        assert_eq!(disks.of("vol0-file"), Some("b".parse().unwrap()));
        assert_eq!(disks.of("layer"), Some("a".parse().unwrap()));
        assert_eq!(disks.of("root"), None);
    }
}
