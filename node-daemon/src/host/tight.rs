//! When a host counts as short of memory. Pure.

use kibo_crds::overcommit_policy::MemoryTightThresholds;

use super::proc::Memory;

/// Shares of the host's memory that is available, in whole percent: below the first it is tight, above the second no
/// longer, and in between it stays what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    enter_below: u8,
    leave_above: u8,
}

/// As the policy has them that nobody changed.
impl Default for Thresholds {
    fn default() -> Self {
        let policy = MemoryTightThresholds::default();
        Self { enter_below: policy.enter_below_percent, leave_above: policy.leave_above_percent }
    }
}

impl Thresholds {
    /// `None` unless they are shares of which the first is the lower one.
    pub fn new(enter_below: u32, leave_above: u32) -> Option<Self> {
        let (enter, leave) = (u8::try_from(enter_below).ok()?, u8::try_from(leave_above).ok()?);
        (enter < leave && leave <= 100).then_some(Self { enter_below: enter, leave_above: leave })
    }

    /// Whether memory is tight now, having been so or not. What was not measured changes nothing.
    pub fn is_tight(self, was: bool, memory: Option<Memory>) -> bool {
        let Some(memory) = memory else { return was };
        let available = u128::from(memory.available.0) * 100;
        let share = |percent: u8| u128::from(memory.total.0) * u128::from(percent);
        // 0 is never: also for a host that was short of it by other thresholds.
        let stays = self.enter_below > 0 && available <= share(self.leave_above);
        if was { stays } else { available < share(self.enter_below) }
    }
}

#[cfg(test)]
mod tests {
    use kibo_crds::Bytes;

    use super::*;

    fn permille(available: u64) -> Memory {
        Memory { available: Bytes(available), total: Bytes(1000) }
    }

    #[test]
    fn between_the_thresholds_it_stays_what_it_was() {
        let thresholds = Thresholds::default();
        for (was, available, tight) in [
            (false, 100, false),
            (false, 99, true),
            (true, 100, true),
            (true, 149, true),
            (true, 150, true),
            (true, 151, false),
            (false, 149, false),
        ] {
            assert_eq!(thresholds.is_tight(was, Some(permille(available))), tight, "was {was}, {available} of 1000");
        }
        assert!(thresholds.is_tight(true, None) && !thresholds.is_tight(false, None));
        let huge = Some(Memory { available: Bytes(u64::MAX), total: Bytes(u64::MAX) });
        assert!(!thresholds.is_tight(true, huge));
    }

    #[test]
    fn thresholds_are_shares_in_their_order() {
        let never = Thresholds::new(0, 100).unwrap();
        assert!(!never.is_tight(false, Some(permille(0))) && !never.is_tight(true, Some(permille(0))));
        for (enter, leave) in [(10, 10), (15, 10), (10, 101), (300, 301)] {
            assert_eq!(Thresholds::new(enter, leave), None, "{enter} {leave}");
        }
    }
}
