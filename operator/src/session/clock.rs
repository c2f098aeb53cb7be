//! How far a node's clock is off this process's: by probes of which the quickest counts. Pure.
//!
//! Of a probe four moments are known: when it was sent and answered by this clock, and when it came and was answered
//! by the node's. Half of the round trip is the most that the offset can be wrong by, however uneven the two ways were,
//! so what waits in some queue makes the result vague and never wrong.

use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::node::NodeClock;
use kibo_protocol::v1;

/// A host whose clock is further off gets no new Workspaces.
pub const ALLOWED: Duration = Duration::from_secs(30);
/// Probes of one measurement, one after the other.
const PROBES: u8 = 4;
/// A probe that is not answered by then is lost.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// A node that was never measured gets no Workspaces, so the next attempt comes soon.
const FIRST_AGAIN: Duration = Duration::from_secs(5);

/// A moment by both clocks of this process: the one that nobody sets, and the one that people read.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    pub at: Instant,
    pub unix_nanos: i128,
}

impl Moment {
    pub fn now() -> Self {
        Self { at: Instant::now(), unix_nanos: jiff::Timestamp::now().as_nanosecond() }
    }
}

/// What one probe told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Measured {
    /// Node minus operator.
    offset_nanos: i128,
    round_trip: Duration,
    kernel_synchronized: Option<bool>,
}

impl Measured {
    /// `None` when the node's clock ran backwards or faster than time meanwhile: somebody is setting it.
    fn of(sent: Moment, answered: Instant, reading: &v1::ClockReading) -> Option<Self> {
        let (came, left) = (reading.received_unix_nanos, reading.sent_unix_nanos);
        let elapsed = answered.saturating_duration_since(sent.at);
        let on_node = Duration::from_nanos(left.checked_sub(came)?);
        let round_trip = elapsed.checked_sub(on_node)?;
        let middle = sent.unix_nanos + i128::try_from(elapsed.as_nanos()).ok()? / 2;
        let middle_on_node = i128::midpoint(came.into(), left.into());
        let kernel_synchronized = reading.kernel_synchronized;
        Some(Self { offset_nanos: middle_on_node - middle, round_trip, kernel_synchronized })
    }

    fn into_clock(self, now: Time) -> NodeClock {
        let uncertainty = self.round_trip / 2;
        let vague = i128::try_from(uncertainty.as_nanos()).unwrap_or(i128::MAX);
        let allowed = i128::try_from(ALLOWED.as_nanos()).unwrap_or(i128::MAX);
        let over = self.offset_nanos.abs().saturating_sub(vague) > allowed;
        let offset_millis = round_to_millis(self.offset_nanos);
        NodeClock {
            offset_millis,
            // Rounded up: it is a bound.
            uncertainty_millis: u64::try_from(uncertainty.as_micros().div_ceil(1000)).unwrap_or(u64::MAX),
            kernel_synchronized: self.kernel_synchronized,
            over,
            shown: NodeClock::show(offset_millis, over),
            measured_at: now,
        }
    }
}

fn round_to_millis(nanos: i128) -> i64 {
    let half = if nanos < 0 { -500_000 } else { 500_000 };
    i64::try_from((nanos + half) / 1_000_000).unwrap_or(if nanos < 0 { i64::MIN } else { i64::MAX })
}

/// The measurements of one session.
#[derive(Debug)]
pub struct Clock {
    period: Duration,
    /// Number of the last probe; it never comes twice.
    last: u64,
    waiting: Option<Moment>,
    left: u8,
    best: Option<Measured>,
    /// When the next measurement begins.
    due: Instant,
    current: Option<NodeClock>,
}

impl Clock {
    pub fn new(period: Duration, now: Instant) -> Self {
        Self { period, last: 0, waiting: None, left: 0, best: None, due: now, current: None }
    }

    /// The newest result of this session.
    pub fn current(&self) -> Option<&NodeClock> {
        self.current.as_ref()
    }

    /// When the next measurement begins; `None` while one is under way.
    pub fn rests_until(&self) -> Option<Instant> {
        self.waiting.is_none().then_some(self.due)
    }

    /// Time goes on: the probe that is to be sent now, if any. Give it `now` just before it is sent.
    pub fn tick(&mut self, now: Moment, today: &Time) -> Option<v1::ClockProbe> {
        match self.waiting {
            Some(sent) if now.at.saturating_duration_since(sent.at) < ANSWERED_WITHIN => None,
            Some(_) => self.next(now, today),
            None if now.at < self.due => None,
            None => {
                (self.left, self.best) = (PROBES, None);
                self.due = now.at + self.period;
                self.next(now, today)
            }
        }
    }

    /// The node answered, as it was heard at `answered`. The next probe is to be sent now, if any.
    pub fn take(&mut self, reading: &v1::ClockReading, answered: Moment, today: &Time) -> Option<v1::ClockProbe> {
        // One that was given up says nothing: its time is forgotten.
        let sent = self.waiting.filter(|_| reading.probe == self.last)?;
        if let Some(measured) = Measured::of(sent, answered.at, reading)
            && self.best.is_none_or(|best| measured.round_trip < best.round_trip)
        {
            self.best = Some(measured);
        }
        self.next(answered, today)
    }

    fn next(&mut self, now: Moment, today: &Time) -> Option<v1::ClockProbe> {
        self.waiting = None;
        if self.left > 0 {
            self.left -= 1;
            self.last += 1;
            self.waiting = Some(now);
            return Some(v1::ClockProbe { probe: self.last });
        }
        if let Some(best) = self.best.take() {
            self.current = Some(best.into_clock(today.clone()));
        }
        if self.current.is_none() {
            self.due = self.due.min(now.at + FIRST_AGAIN);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: i128 = 1_000_000_000;
    /// Where the operator's clock stands at its first moment.
    const EPOCH: i128 = 1_800_000_000 * SECOND;

    fn today() -> Time {
        Time(jiff::Timestamp::from_second(1_800_000_000).unwrap())
    }

    struct Ways {
        begin: Instant,
        there: i128,
        on_node: i128,
        back: i128,
        offset: i128,
    }

    impl Ways {
        fn moment(&self, nanos: i128) -> Moment {
            let at = self.begin + Duration::from_nanos(u64::try_from(nanos).unwrap());
            Moment { at, unix_nanos: EPOCH + nanos }
        }

        /// The answer to a probe that is sent after so many nanoseconds, and when it comes.
        fn answer(&self, probe: u64, sent: i128) -> (v1::ClockReading, Moment) {
            let came = EPOCH + sent + self.there + self.offset;
            let reading = v1::ClockReading {
                probe,
                received_unix_nanos: u64::try_from(came).unwrap(),
                sent_unix_nanos: u64::try_from(came + self.on_node).unwrap(),
                kernel_synchronized: Some(true),
            };
            (reading, self.moment(sent + self.there + self.on_node + self.back))
        }
    }

    fn ways(there: i128, back: i128, offset: i128) -> Ways {
        Ways { begin: Instant::now(), there, on_node: 1000, back, offset }
    }

    fn measure(ways: &Ways) -> Measured {
        let (reading, answered) = ways.answer(1, 0);
        Measured::of(ways.moment(0), answered.at, &reading).unwrap()
    }

    proptest! {
        #[test]
        fn the_offset_is_never_wrong_by_more_than_its_uncertainty(
            there in 0..5 * SECOND, back in 0..5 * SECOND, offset in -100 * SECOND..100 * SECOND,
        ) {
            let measured = measure(&ways(there, back, offset));
            let vague = i128::try_from((measured.round_trip / 2).as_nanos()).unwrap();
            // One for each division.
            prop_assert!((measured.offset_nanos - offset).abs() <= vague + 3);
        }
    }

    #[test]
    fn the_offset_less_its_uncertainty_is_what_counts() {
        for (there, back, offset, over) in [
            (1_000_000, 1_000_000, 30 * SECOND, false),
            (1_000_000, 1_000_000, 30 * SECOND + 2_000_000, true),
            (1_000_000, 1_000_000, -40 * SECOND, true),
            // 40 s give or take 12: that may be 28.
            (12 * SECOND, 12 * SECOND, 40 * SECOND, false),
        ] {
            let clock = measure(&ways(there, back, offset)).into_clock(today());
            assert_eq!(clock.over, over, "{clock:?}");
        }
        let clock = measure(&ways(1_000_000, 1_000_000, -40 * SECOND)).into_clock(today());
        assert_eq!(
            (clock.offset_millis, clock.uncertainty_millis, clock.shown.as_str()),
            (-40_000, 1, "-40.0s (over)")
        );
    }

    #[test]
    fn of_several_probes_the_quickest_counts() {
        let slow = ways(SECOND, 0, 0);
        let quick = Ways { there: 1000, ..ways(0, 1000, 0) };
        let mut clock = Clock::new(Duration::from_secs(60), slow.begin);
        let mut probe = clock.tick(slow.moment(0), &today());
        let mut sent = 0;
        for number in 1..=u64::from(PROBES) {
            assert_eq!(probe, Some(v1::ClockProbe { probe: number }));
            assert_eq!(clock.tick(slow.moment(sent), &today()), None, "one at a time");
            let way = if number == 2 { &quick } else { &slow };
            let (reading, answered) = way.answer(number, sent);
            sent = answered.unix_nanos - EPOCH;
            probe = clock.take(&reading, slow.moment(sent), &today());
        }
        assert_eq!(probe, None);
        assert_eq!(clock.current().map(|clock| (clock.offset_millis, clock.uncertainty_millis)), Some((0, 1)));
        assert_eq!(clock.tick(slow.moment(59 * SECOND), &today()), None);
        assert_eq!(clock.tick(slow.moment(60 * SECOND), &today()), Some(v1::ClockProbe { probe: 5 }));
    }

    #[test]
    fn a_lost_probe_is_passed_over_and_what_is_not_measured_is_tried_again_soon() {
        let way = ways(0, 0, 0);
        let mut clock = Clock::new(Duration::from_secs(60), way.begin);
        for probe in 0..i128::from(PROBES) {
            assert!(clock.tick(way.moment(probe * 2 * SECOND), &today()).is_some());
        }
        let (late, _) = way.answer(1, 0);
        assert_eq!(clock.take(&late, way.moment(7 * SECOND), &today()), None);
        assert_eq!(clock.tick(way.moment(8 * SECOND), &today()), None);
        assert_eq!(clock.tick(way.moment(12 * SECOND), &today()), None);
        assert_eq!(clock.current(), None);
        assert!(clock.tick(way.moment(13 * SECOND), &today()).is_some());
    }

    #[test]
    fn a_clock_that_is_set_meanwhile_and_senseless_numbers_measure_nothing() {
        let way = ways(1000, 1000, 0);
        let (reading, answered) = way.answer(1, 0);
        for senseless in [
            v1::ClockReading { sent_unix_nanos: reading.received_unix_nanos - 1, ..reading },
            v1::ClockReading { sent_unix_nanos: u64::MAX, ..reading },
        ] {
            assert_eq!(Measured::of(way.moment(0), answered.at, &senseless), None);
        }
        let far = v1::ClockReading { received_unix_nanos: 0, sent_unix_nanos: 0, ..reading };
        let clock = Measured::of(way.moment(0), answered.at, &far).unwrap().into_clock(today());
        assert!(clock.over);
    }
}
