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

/// The wait after so many failures in a row.
fn exponential(failures: u32) -> Duration {
    FIRST.saturating_mul(1 << failures.saturating_sub(1).min(10)).min(LONGEST)
}

/// `failures` counts the attempts in a row that brought no session, this one included.
pub fn next(end: &End, failures: u32) -> Next {
    use SessionRefusal as Refusal;
    match end {
        End::Shutdown => Next::Exit,
        End::Lost(_) | End::Disobeyed(_) | End::Local(_) => Next::Retry(exponential(failures)),
        End::NotEnrolled(_) => Next::Retry(exponential(failures).max(Duration::from_secs(5))),
        End::Refused { reason, .. } => match reason {
            Refusal::Isolated => Next::Isolate,
            Refusal::NotLeader => Next::Retry(exponential(failures).min(Duration::from_secs(2))),
            // An admin who adopts the node waits for its next attempt.
            Refusal::ControlPlaneWentBack => Next::Retry(QUARANTINED),
            Refusal::Replaced | Refusal::Duplicate => Next::Retry(exponential(failures).max(Duration::from_secs(5))),
            Refusal::InvalidHello | Refusal::Unspecified => Next::Retry(exponential(failures)),
            Refusal::UnknownNode | Refusal::WrongKey | Refusal::Retired | Refusal::Revoked => Next::Retry(SLOW),
        },
    }
}

/// Between half and all of it, by a random number from 0 to 1: many nodes must not come back at once.
pub fn jittered(wait: Duration, random: f64) -> Duration {
    wait.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(reason: SessionRefusal) -> End {
        End::Refused { reason, message: String::new() }
    }

    #[test]
    fn waits_grow_to_a_bound() {
        let lost = End::Lost(String::new());
        let wait = |failures| match next(&lost, failures) {
            Next::Retry(wait) => wait.as_millis(),
            _ => 0,
        };
        assert_eq!([0, 1, 2, 3, 4].map(wait), [250, 250, 500, 1000, 2000]);
        assert_eq!(wait(u32::MAX), 30_000);
    }

    #[test]
    fn refusals_are_acted_upon() {
        assert_eq!(next(&refused(SessionRefusal::Isolated), 1), Next::Isolate);
        for slow in [SessionRefusal::Retired, SessionRefusal::Revoked, SessionRefusal::WrongKey] {
            assert_eq!(next(&refused(slow), 1), Next::Retry(SLOW));
        }
        let soon = |failures| next(&refused(SessionRefusal::NotLeader), failures);
        assert_eq!(soon(1), Next::Retry(Duration::from_millis(250)));
        assert_eq!(soon(30), Next::Retry(Duration::from_secs(2)));
        assert_eq!(next(&End::Shutdown, 1), Next::Exit);
    }

    #[test]
    fn jitter_stays_between_half_and_all() {
        let wait = Duration::from_secs(10);
        assert_eq!(jittered(wait, 0.0), Duration::from_secs(5));
        assert_eq!(jittered(wait, 1.0), wait);
    }
}
