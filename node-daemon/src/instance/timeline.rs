//! How long each part of a start took: one line of the log for each Instance that became available.

use std::{collections::BTreeMap, fmt, time::Instant};

/// A part of a start, named by what is there at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Directory and record are made, the objects are taken and their images are open.
    Objects,
    /// QEMU's process runs.
    Process,
    /// The guest has booted: its agent answered.
    Agent,
    /// The guest is configured.
    Configured,
}

const PARTS: [(Part, &str); 4] =
    [(Part::Objects, "objects"), (Part::Process, "process"), (Part::Agent, "agent"), (Part::Configured, "configured")];

/// The parts of one start.
#[derive(Debug)]
pub struct Timeline {
    begun: Instant,
    reached: BTreeMap<Part, Instant>,
}

impl Timeline {
    pub fn begin() -> Self {
        Self { begun: Instant::now(), reached: BTreeMap::new() }
    }

    /// The first time counts: an agent is heard again whenever its connection was lost.
    pub fn reach(&mut self, part: Part) {
        self.reach_at(part, Instant::now());
    }

    fn reach_at(&mut self, part: Part, at: Instant) {
        self.reached.entry(part).or_insert(at);
    }

    /// Whether this daemon saw all of the start.
    pub fn is_whole(&self) -> bool {
        self.reached.len() == PARTS.len()
    }
}

/// Each part's own milliseconds: `objects=12.1 process=3.0 agent=1250.9 configured=160.2`.
impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = self.begun;
        for (index, (part, name)) in PARTS.iter().enumerate() {
            let Some(at) = self.reached.get(part) else { continue };
            let space = if index == 0 { "" } else { " " };
            write!(f, "{space}{name}={:.1}", at.duration_since(last).as_secs_f64() * 1000.0)?;
            last = *at;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_part_has_its_own_time_and_the_first_counts() {
        let mut timeline = Timeline::begin();
        let mut at = timeline.begun;
        for (number, (part, _)) in (1..).zip(PARTS) {
            assert!(!timeline.is_whole());
            at += Duration::from_millis(10 * number);
            timeline.reach_at(part, at);
        }
        timeline.reach_at(Part::Agent, at);
        assert!(timeline.is_whole());
        assert_eq!(timeline.to_string(), "objects=10.0 process=20.0 agent=30.0 configured=40.0");
    }
}
