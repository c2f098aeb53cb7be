//! The clocks: one for durations, which goes on while the machine sleeps and which nobody sets, and one for people.

use std::time::Duration;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use rustix::time::{ClockId, clock_gettime};

/// CLOCK_BOOTTIME. Comparable only within this process's boot.
pub fn boottime() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or_default(), u32::try_from(now.tv_nsec).unwrap_or_default())
}

/// The time that statuses carry: whole seconds, as the API stores them. With more, what is stored would never equal what
/// is computed, and every look at an object would be a write.
pub fn now() -> Time {
    let now = Timestamp::now();
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_was_stored_is_the_same() {
        let now = now();
        let stored: Time = serde_json::from_value(serde_json::to_value(&now).unwrap()).unwrap();
        assert_eq!(stored, now);
    }
}
