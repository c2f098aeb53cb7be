//! When a Lease may be taken. Pure; times are readings of the local CLOCK_BOOTTIME.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::LeaseSpec;
use kibo_crds::Term;

/// What to do about the Lease that was just read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nobody holds it, its holder fell silent, or its holder was an earlier process of this name (or this one,
    /// whose write got through without an answer): take it with this term.
    Take(Term),
    /// Somebody else holds it.
    Wait,
}

/// The Lease as it was last seen to change. Timestamps inside the Lease are other clocks' and are never
/// compared with this one; that it did not change for its whole duration is what counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Watched {
    seen: Option<(LeaseSpec, Duration)>,
}

impl Watched {
    /// Notes what was read at `now`, and says since when it has been so.
    pub fn observe(&mut self, spec: &LeaseSpec, now: Duration) -> Duration {
        match &self.seen {
            Some((seen, since)) if seen == spec => *since,
            _ => {
                self.seen = Some((spec.clone(), now));
                now
            }
        }
    }
}

/// The term that the Lease carries. It is the number of its transitions, so it grows with each holder.
pub fn term_of(spec: &LeaseSpec) -> Term {
    Term(spec.lease_transitions.and_then(|transitions| u64::try_from(transitions).ok()).unwrap_or_default())
}

/// Decides over a Lease that has been unchanged since `since`.
pub fn decide(spec: &LeaseSpec, me: &str, since: Duration, now: Duration, fallback: Duration) -> Step {
    let term = term_of(spec);
    let holder = spec.holder_identity.as_deref().filter(|holder| !holder.is_empty());
    let duration = spec
        .lease_duration_seconds
        .and_then(|seconds| u64::try_from(seconds).ok())
        .map_or(fallback, Duration::from_secs);
    if holder.is_none_or(|holder| holder == me) || now.saturating_sub(since) > duration {
        // The range is that of the counter in the Lease; nothing reaches its end.
        return Step::Take(Term(term.0 + 1));
    }
    Step::Wait
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: Option<&str>, transitions: i32) -> LeaseSpec {
        LeaseSpec {
            holder_identity: holder.map(str::to_owned),
            lease_transitions: Some(transitions),
            lease_duration_seconds: Some(15),
            ..LeaseSpec::default()
        }
    }

    #[test]
    fn a_lease_is_taken_only_when_nobody_can_hold_it() {
        let at = Duration::from_secs;
        for (holder, since, now, expected) in [
            (None, 0, 0, Step::Take(Term(8))),
            (Some(""), 0, 0, Step::Take(Term(8))),
            (Some("me"), 0, 0, Step::Take(Term(8))),
            (Some("other"), 100, 110, Step::Wait),
            (Some("other"), 100, 115, Step::Wait),
            (Some("other"), 100, 116, Step::Take(Term(8))),
            // A clock that seems to stand before the observation gives nobody the right.
            (Some("other"), 100, 50, Step::Wait),
        ] {
            let step = decide(&lease(holder, 7), "me", at(since), at(now), at(15));
            assert_eq!(step, expected, "{holder:?} {since} {now}");
        }
    }

    #[test]
    fn each_renewal_starts_the_wait_anew() {
        let at = Duration::from_secs;
        let mut watched = Watched::default();
        assert_eq!(watched.observe(&lease(Some("other"), 7), at(1)), at(1));
        assert_eq!(watched.observe(&lease(Some("other"), 7), at(9)), at(1));
        assert_eq!(watched.observe(&lease(Some("other"), 8), at(10)), at(10));
    }
}
