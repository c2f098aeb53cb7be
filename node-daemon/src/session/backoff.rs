//! How long to wait before the next attempt, and what a session's end asks for. No clock, no I/O.

use std::time::Duration;

use kibo_protocol::v1::SessionRefusal;

/// How one session, or the attempt at one, ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// No connection, or it broke.
    Lost(String),
    /// The operator said why.
    Refused { reason: SessionRefusal, message: String },
    /// The operator broke the protocol, or is one that this node must not obey.
    Disobeyed(String),
    /// Enrollment was refused; the message says what to do.
    NotEnrolled(String),
    /// This node's own disk or configuration is in the way.
    Local(String),
    /// The daemon is asked to end.
    Shutdown,
}

/// What to do after a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Try the next endpoint after this long, before jitter.
    Retry(Duration),
    /// Destroy all Instances, forget the incarnation, exit.
    Isolate,
    Exit,
}

const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(30);
const QUARANTINED: Duration = Duration::from_secs(5);
/// For what only a person can mend; retried nevertheless, so that mending it is enough.
const SLOW: Duration = Duration::from_secs(60);
/// As long as a session was lost no longer ago than this, its operator may be on its way back: a leader that was killed,
/// a network that is mended.
const LATELY: Duration = Duration::from_secs(120);
/// Until then nobody waits longer than this.
const SOON: Duration = Duration::from_secs(3);

/// What the node knows besides how its last attempt ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct Past {
    /// Attempts in a row that brought no session, the last one included.
    pub failures: u32,
    /// Since the end of the last session; absent when this daemon had none.
    pub alone_for: Option<Duration>,
    /// Over how long a time the operator spreads the return of its whole fleet.
    pub return_within: Duration,
}

/// The wait after so many failures in a row.
fn exponential(failures: u32) -> Duration {
    FIRST.saturating_mul(1 << failures.saturating_sub(1).min(10)).min(LONGEST)
}

pub fn next(end: &End, past: Past) -> Next {
    use SessionRefusal as Refusal;
    let failures = past.failures;
    match end {
        End::Shutdown => Next::Exit,
        End::Lost(_) => {
            let is_lately = past.alone_for.is_some_and(|alone| alone < LATELY);
            let longest = if is_lately { SOON } else { LONGEST };
            Next::Retry(exponential(failures).min(longest).max(past.return_within))
        }
        End::Disobeyed(_) | End::Local(_) => Next::Retry(exponential(failures)),
        End::NotEnrolled(_) => Next::Retry(exponential(failures).max(Duration::from_secs(5))),
        End::Refused { reason, .. } => match reason {
            Refusal::Isolated => Next::Isolate,
            Refusal::NotLeader => {
                Next::Retry(exponential(failures).min(Duration::from_secs(2)).max(past.return_within))
            }
            // An admin who adopts the node waits for its next attempt.
            Refusal::ControlPlaneWentBack => Next::Retry(QUARANTINED),
            Refusal::Replaced | Refusal::Duplicate => Next::Retry(exponential(failures).max(Duration::from_secs(5))),
            Refusal::InvalidHello | Refusal::Unspecified => Next::Retry(exponential(failures)),
            Refusal::UnknownNode | Refusal::WrongKey | Refusal::Retired | Refusal::Revoked => Next::Retry(SLOW),
        },
    }
}

/// Between half and all of it, by a random number from 0 to 1: many nodes must not come back at once. Right after a
/// session it is anything up to all of it, since all others lost theirs in the same moment.
pub fn jittered(wait: Duration, random: f64, past: Past) -> Duration {
    let random = random.clamp(0.0, 1.0);
    let is_first = past.failures <= 1 && past.alone_for.is_some();
    wait.mul_f64(if is_first { random } else { 0.5 + random / 2.0 })
}

#[cfg(test)]
mod tests {
    use SessionRefusal as Refusal;

    use super::*;

    fn refused(reason: SessionRefusal) -> End {
        End::Refused { reason, message: String::new() }
    }

    #[test]
    fn waits_grow_to_a_bound() {
        let lost = End::Lost(String::new());
        let wait = |failures, alone_for| match next(&lost, Past { failures, alone_for, ..Past::default() }) {
            Next::Retry(wait) => wait.as_millis(),
            _ => 0,
        };
        assert_eq!([0, 1, 2, 3, 4].map(|failures| wait(failures, None)), [250, 250, 500, 1000, 2000]);
        assert_eq!(wait(u32::MAX, None), 30_000);
        // A leader that was killed is followed by another one.
        assert_eq!(wait(9, Some(Duration::from_secs(20))), 3000);
        assert_eq!(wait(9, Some(Duration::from_secs(600))), 30_000);
    }

    #[test]
    fn a_large_fleet_comes_back_over_as_long_as_its_operator_said() {
        let past = |failures| Past {
            failures,
            alone_for: Some(Duration::from_secs(1)),
            return_within: Duration::from_secs(25),
        };
        for end in [End::Lost(String::new()), refused(Refusal::NotLeader)] {
            assert_eq!(next(&end, past(1)), Next::Retry(Duration::from_secs(25)));
        }
        let waits = [0.0, 0.5, 1.0].map(|random| jittered(Duration::from_secs(25), random, past(1)));
        assert_eq!(waits, [0, 12_500, 25_000].map(Duration::from_millis));
        assert_eq!(jittered(Duration::from_secs(25), 0.0, past(2)), Duration::from_millis(12_500));
    }

    #[test]
    fn refusals_are_acted_upon() {
        let after = |end: &End, failures| next(end, Past { failures, ..Past::default() });
        assert_eq!(after(&refused(Refusal::Isolated), 1), Next::Isolate);
        for slow in [Refusal::Retired, Refusal::Revoked, Refusal::WrongKey] {
            assert_eq!(after(&refused(slow), 1), Next::Retry(SLOW));
        }
        let soon = |failures| after(&refused(Refusal::NotLeader), failures);
        assert_eq!(soon(1), Next::Retry(Duration::from_millis(250)));
        assert_eq!(soon(30), Next::Retry(Duration::from_secs(2)));
        assert_eq!(after(&End::Shutdown, 1), Next::Exit);
    }

    #[test]
    fn jitter_stays_between_half_and_all() {
        let wait = Duration::from_secs(10);
        assert_eq!(jittered(wait, 0.0, Past::default()), Duration::from_secs(5));
        assert_eq!(jittered(wait, 1.0, Past::default()), wait);
    }
}
