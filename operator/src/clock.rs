//! The clock that measures durations here: it goes on while the machine sleeps, and nobody sets it.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CLOCK_BOOTTIME. Comparable only within this process's boot.
pub fn boottime() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or_default(), u32::try_from(now.tv_nsec).unwrap_or_default())
}
