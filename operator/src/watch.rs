//! How a watch is tried again that failed.

use std::time::Duration;

use kube::runtime::utils::Backoff;
use rand::Rng as _;

const FIRST: Duration = Duration::from_millis(250);
/// A leader whose watch waits knows nothing new: after an API server was away it must not go on for minutes with what it
/// knew before, as with the usual backoff, which counts the failures of all watches of a controller together.
const LONGEST: Duration = Duration::from_secs(4);

/// Doubles up to a few seconds, with the chance of half as long, so that replicas do not come together.
#[derive(Debug, Default)]
pub struct WatchBackoff {
    failures: u32,
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = FIRST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        Some(pause.mul_f64(rand::rng().random_range(0.5..=1.0)))
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_is_tried_every_few_seconds_however_often_it_failed() {
        let mut backoff = WatchBackoff::default();
        assert!(backoff.next().is_some_and(|first| first <= FIRST));
        assert!(backoff.by_ref().take(1000).all(|pause| pause <= LONGEST));
        assert!(backoff.next().is_some_and(|pause| pause >= LONGEST / 2));
        backoff.reset();
        assert!(backoff.next().is_some_and(|pause| pause <= FIRST));
    }
}
