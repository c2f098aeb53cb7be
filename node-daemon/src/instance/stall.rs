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
        self.disks.iter().find(|(known, _)| known == serial(disk)).map(|(_, pool)| pool.clone())
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

/// A disk whose writes fail.
struct Failing {
    /// As QEMU names it; empty: not known.
    disk: String,
    pool: Option<PoolId>,
    is_full: bool,
    /// Empty: not known.
    reason: String,
    at: Instant,
    /// Counts in what the pool reports.
    _waiting: Option<Waiting>,
}

/// A guest that stands still, or was just told to go on.
pub struct Stall {
    failing: Vec<Failing>,
    tried: Instant,
    /// When the guest was last told to go on.
    resumed: Option<Instant>,
    runs_since: Option<Instant>,
}

/// The name of a disk, or of the file below it, without that difference.
fn serial(disk: &str) -> &str {
    disk.strip_suffix("-file").unwrap_or(disk)
}

impl Stall {
    /// Of a guest that runs, as far as is known: an earlier daemon saw it stand still, or it is about to.
    pub fn survived(now: Instant) -> Self {
        Self { failing: Vec::new(), tried: now, resumed: None, runs_since: Some(now) }
    }

    /// QEMU says that the guest stands still, and which disk it is, as far as it knows.
    pub fn found(&mut self, disks: &DiskPools, failed: Option<&FailedDisk>, now: Instant) {
        let _is_told_anyway = match failed {
            Some(failed) => self.failed(disks, &failed.disk, failed.is_full, "", now),
            None if self.failing.is_empty() => self.failed(disks, "", false, "", now),
            None => {
                (self.tried, self.runs_since) = (now, None);
                false
            }
        };
    }

    /// A write to this disk failed, as before or for the first time. Whether that is news.
    pub fn failed(&mut self, disks: &DiskPools, disk: &str, is_full: bool, reason: &str, now: Instant) -> bool {
        (self.tried, self.runs_since) = (now, None);
        let known = self.failing.iter_mut().find(|it| serial(&it.disk) == serial(disk) && it.is_full == is_full);
        if let Some(known) = known {
            known.at = now;
            return false;
        }
        // The same disk for another reason, or one that was not known by its name, is told anew.
        self.failing.retain(|it| !it.disk.is_empty() && serial(&it.disk) != serial(disk));
        let pool = disks.of(disk);
        let waiting = pool.as_ref().filter(|_| is_full).and_then(|pool| disks.wait_for(pool));
        let (disk, reason) = (disk.to_owned(), reason.to_owned());
        self.failing.push(Failing { disk, pool, is_full, reason, at: now, _waiting: waiting });
        true
    }

    /// It was told to go on.
    pub fn goes_on(&mut self, now: Instant) {
        (self.tried, self.resumed, self.runs_since) = (now, Some(now), Some(now));
    }

    /// Forgets disks whose writes succeeded when the guest was told to go on, though it stands still because of another
    /// one. Whether that is news.
    pub fn settle(&mut self, now: Instant) -> bool {
        let before = self.failing.len();
        if let Some(resumed) = self.resumed
            && self.runs_since.is_none()
            && now.duration_since(self.tried) >= LOOK_EVERY
        {
            self.failing.retain(|it| it.at >= resumed);
        }
        self.failing.len() < before
    }

    pub fn next(&self, disks: &DiskPools, now: Instant) -> Step {
        step(now.duration_since(self.tried), self.runs_since.map(|since| now.duration_since(since)), self.free(disks))
    }

    /// Where there is least of it. `None`: space is not all that is missing.
    fn free(&self, disks: &DiskPools) -> Option<Bytes> {
        let free = self.failing.iter().map(|it| it.pool.as_ref().filter(|_| it.is_full).and_then(|it| disks.free(it)));
        free.collect::<Option<Vec<_>>>()?.into_iter().min()
    }

    /// For people.
    pub fn message(&self) -> Paused {
        let mut full: Vec<_> = self.failing.iter().filter(|it| it.is_full).map(pool_of).collect();
        full.dedup();
        let mut problems: Vec<_> = self.failing.iter().filter(|it| !it.is_full).map(failure).collect();
        let (reason, then) = if problems.is_empty() {
            (PauseReason::DiskFull, "it goes on by itself when there is space".to_owned())
        } else {
            (PauseReason::DiskFailed, format!("the write is tried again every {} s", AGAIN.as_secs()))
        };
        problems.extend(full.iter().map(|pool| format!("storage pool {pool} is full")));
        let message = format!("{}: the guest stands still and has seen no error; {then}", problems.join(", and "));
        Paused { reason: reason.into(), message }
    }
}

fn pool_of(failing: &Failing) -> String {
    failing.pool.as_ref().map(ToString::to_string).unwrap_or_default()
}

fn failure(failing: &Failing) -> String {
    let of = failing.pool.as_ref().map(|pool| format!(" in storage pool {pool}")).unwrap_or_default();
    let how = if failing.reason.is_empty() { String::new() } else { format!(" ({})", failing.reason) };
    format!("a write to a disk{of} failed{how}")
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

    fn two_disks() -> DiskPools {
        let disks = vec![("layer".to_owned(), "a".parse().unwrap()), ("vol0".to_owned(), "b".parse().unwrap())];
        DiskPools { pools: None, disks }
    }

    fn begin(disks: &DiskPools, disk: &str, now: Instant) -> Stall {
        let mut stall = Stall::survived(now);
        assert!(stall.failed(disks, disk, true, "No space left on device", now));
        stall
    }

    #[test]
    fn what_an_earlier_daemon_saw_is_told_of_the_disk_that_qemu_names() {
        let (disks, now) = (two_disks(), Instant::now());
        let failed = |disk: &str, is_full| FailedDisk { disk: disk.to_owned(), is_full };
        let told = |failed: Option<&FailedDisk>| {
            let mut stall = Stall::survived(now);
            stall.found(&disks, failed, now);
            stall.message()
        };
        let full = told(Some(&failed("vol0", true)));
        assert!(
            full.reason() == PauseReason::DiskFull && full.message.starts_with("storage pool b is full"),
            "{full:?}"
        );
        let broken = told(Some(&failed("vol0", false)));
        assert!(broken.reason() == PauseReason::DiskFailed && broken.message.contains("pool b failed:"), "{broken:?}");
        let unknown = told(None);
        assert!(unknown.reason() == PauseReason::DiskFailed && unknown.message.contains("to a disk failed:"));
        // What was known of it stays when QEMU only says which disk it is.
        let mut begun = begin(&disks, "vol0-file", now);
        begun.found(&disks, Some(&failed("vol0", true)), now);
        assert_eq!(begun.failing.len(), 1);
        begun.found(&disks, None, now);
        assert_eq!(begun.failing.len(), 1);
    }

    #[test]
    fn a_second_disk_that_fails_is_told_and_waited_for_too() {
        let (disks, now) = (two_disks(), Instant::now());
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut stall = begin(&disks, "layer-file", now);
        assert!(!stall.failed(&disks, "layer-file", true, "No space left on device", later(1)), "it is told already");
        stall.goes_on(later(2));
        assert!(!stall.failed(&disks, "layer-file", true, "No space left on device", later(2)));
        assert!(stall.failed(&disks, "vol0-file", false, "Input/output error", later(2)));
        let both = stall.message();
        assert_eq!(both.reason(), PauseReason::DiskFailed);
        assert!(
            both.message.contains("storage pool b failed (Input/output error), and storage pool a is full"),
            "{both:?}"
        );
        assert_eq!(stall.free(&disks), None, "room in one pool alone is no reason to try");
        assert!(!stall.settle(later(10)), "both failed when it was tried");

        // There is room in a now, and the guest stands still because of b alone.
        stall.goes_on(later(12));
        assert!(!stall.failed(&disks, "vol0-file", false, "Input/output error", later(12)));
        assert!(!stall.settle(later(12)), "the other one may just be on its way");
        assert!(stall.settle(later(13)));
        let left = stall.message().message;
        assert!(left.contains("storage pool b failed") && !left.contains("storage pool a"), "{left}");
    }

    #[test]
    fn a_disk_that_fails_after_the_daemon_came_back_is_known_by_its_pool() {
        let (disks, now) = (two_disks(), Instant::now());
        let mut stall = Stall::survived(now);
        assert!(
            stall.failed(&disks, "vol0-file", true, "No space left on device", now),
            "nobody knew which disk it was"
        );
        let told = stall.message();
        assert!(
            told.reason() == PauseReason::DiskFull && told.message.starts_with("storage pool b is full"),
            "{told:?}"
        );
        // For another reason it is told anew.
        assert!(stall.failed(&disks, "vol0-file", false, "Read-only file system", now));
        assert_eq!((stall.failing.len(), stall.message().reason()), (1, PauseReason::DiskFailed));
    }

    #[test]
    fn the_pool_of_a_disk_is_found_by_its_nodes_name() {
        let disks = two_disks();
        assert_eq!(disks.of("vol0-file"), Some("b".parse().unwrap()));
        assert_eq!(disks.of("layer"), Some("a".parse().unwrap()));
        assert_eq!(disks.of("root"), None);
    }
}
