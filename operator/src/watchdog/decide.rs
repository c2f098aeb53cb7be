//! Who is silent, and for how long. Pure: the clock comes in.
//!
//! Only moments that this process took itself are compared, and only a word of the node makes it reachable again.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use kibo_crds::NodeId;

/// So many nodes that vanished together may be a large part of the fleet; fewer are single accidents.
const LARGE: usize = 5;

/// How a node stands by its last word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    #[default]
    Reachable,
    Unreachable,
    Offline,
}

/// After which silence a node counts as what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Periods {
    pub unreachable: Duration,
    pub offline: Duration,
}

impl Periods {
    fn reach(self, silent: Duration) -> Reach {
        match silent {
            _ if silent >= self.offline => Reach::Offline,
            _ if silent >= self.unreachable => Reach::Unreachable,
            _ => Reach::Reachable,
        }
    }

    /// Between two looks.
    pub fn look(self) -> Duration {
        (self.unreachable / 10).clamp(Duration::from_millis(100), Duration::from_secs(1))
    }

    /// A look that comes so much too late means that this process itself stood still: what the nodes said meanwhile
    /// is still to be read.
    pub fn is_stall(self, since_last_look: Duration) -> bool {
        since_last_look > self.look() + self.unreachable / 5
    }

    /// How often a node is to say that it lives, so that one lost word does no harm.
    pub fn heartbeat(self) -> Duration {
        self.unreachable / 3
    }
}

/// What is known of one node.
#[derive(Clone, Copy, Debug)]
struct Seen {
    heard: Instant,
    /// It had a session since this leadership began, or when it began.
    was_here: bool,
    reach: Reach,
    /// Its Workspaces may say that it is offline.
    told: bool,
}

/// Everything that this leader knows of the nodes' silence.
#[derive(Debug)]
pub struct Ledger {
    periods: Periods,
    /// Silence counts from here at the earliest.
    since: Instant,
    nodes: HashMap<NodeId, Seen>,
}

/// What a look found new.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Nodes whose reach fell.
    pub fell: Vec<(NodeId, Reach)>,
    /// Nodes whose Workspaces may say so from now on.
    pub told: Vec<NodeId>,
    /// Offline nodes of which their Workspaces do not speak, since a large part of the fleet vanished with them.
    pub held_back: usize,
}

impl Ledger {
    pub fn new(periods: Periods, now: Instant) -> Self {
        Self { periods, since: now, nodes: HashMap::new() }
    }

    pub fn periods(&self) -> Periods {
        self.periods
    }

    /// A node that has lived before this leadership began. `was_here`: its session was alive then.
    pub fn expect(&mut self, node: NodeId, was_here: bool) {
        let seen = Seen { heard: self.since, was_here, reach: Reach::Reachable, told: false };
        self.nodes.entry(node).or_insert(seen);
    }

    /// The node said something. Returns whether that is a return.
    pub fn heard(&mut self, node: &NodeId, now: Instant) -> bool {
        let seen = Seen { heard: now, was_here: true, reach: Reach::Reachable, told: false };
        if let Some(known) = self.nodes.get_mut(node) {
            return std::mem::replace(known, seen).reach != Reach::Reachable;
        }
        self.nodes.insert(node.clone(), seen);
        false
    }

    /// This process did not listen: everybody has a full period from now on.
    pub fn excuse(&mut self, now: Instant) {
        self.since = now;
    }

    pub fn reach(&self, node: &NodeId) -> Reach {
        self.nodes.get(node).map(|seen| seen.reach).unwrap_or_default()
    }

    pub fn is_told(&self, node: &NodeId) -> bool {
        self.nodes.get(node).is_some_and(|seen| seen.told)
    }

    /// Compares every silence with the periods. Nodes that nobody waits for are forgotten.
    pub fn look(&mut self, now: Instant, is_awaited: impl Fn(&NodeId) -> bool) -> Found {
        let (since, periods) = (self.since, self.periods);
        let mut found = Found::default();
        self.nodes.retain(|node, seen| {
            let reach = periods.reach(now.saturating_duration_since(seen.heard.max(since)));
            // An excuse takes nothing back: only a word does.
            if reach > seen.reach {
                seen.reach = reach;
                found.fell.push((node.clone(), reach));
            }
            is_awaited(node)
        });
        found.fell.retain(|(node, _)| self.nodes.contains_key(node));
        self.tell(&mut found);
        found
    }

    fn tell(&mut self, found: &mut Found) {
        let silent = |seen: &&Seen| seen.was_here && !seen.told && seen.reach != Reach::Reachable;
        let vanished = self.nodes.values().filter(silent).count();
        let present = self.nodes.values().filter(|seen| seen.reach == Reach::Reachable).count();
        let is_large_part = vanished >= LARGE && vanished > present;
        for (node, seen) in self.nodes.iter_mut().filter(|(_, seen)| seen.reach == Reach::Offline && !seen.told) {
            if is_large_part && seen.was_here {
                found.held_back += 1;
            } else {
                seen.told = true;
                found.told.push(node.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIODS: Periods = Periods { unreachable: Duration::from_secs(15), offline: Duration::from_secs(60) };

    fn node(number: usize) -> NodeId {
        format!("node-{number}").parse().unwrap()
    }

    /// A ledger with so many nodes, and its beginning.
    fn fleet(size: usize) -> (Ledger, Instant) {
        let begin = Instant::now();
        let mut ledger = Ledger::new(PERIODS, begin);
        for number in 0..size {
            ledger.heard(&node(number), begin);
        }
        (ledger, begin)
    }

    fn look(ledger: &mut Ledger, at: Instant) -> Found {
        let mut found = ledger.look(at, |_| true);
        found.fell.sort();
        found.told.sort();
        found
    }

    #[test]
    fn silence_makes_unreachable_then_offline_and_a_word_ends_it() {
        let (mut ledger, begin) = fleet(1);
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(look(&mut ledger, at(14)), Found::default());
        assert_eq!(look(&mut ledger, at(15)).fell, [(node(0), Reach::Unreachable)]);
        assert_eq!(look(&mut ledger, at(30)), Found::default());
        let found = look(&mut ledger, at(60));
        assert_eq!((found.fell, found.told), (vec![(node(0), Reach::Offline)], vec![node(0)]));
        assert!(ledger.is_told(&node(0)));
        assert!(ledger.heard(&node(0), at(61)));
        assert!(!ledger.heard(&node(0), at(62)));
        assert_eq!((ledger.reach(&node(0)), ledger.is_told(&node(0))), (Reach::Reachable, false));
        assert_eq!(look(&mut ledger, at(76)), Found::default());
    }

    #[test]
    fn a_new_leader_and_one_that_stood_still_give_a_full_period() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut ledger = Ledger::new(PERIODS, begin);
        ledger.expect(node(0), true);
        ledger.expect(node(1), false);
        assert_eq!(look(&mut ledger, at(14)), Found::default());
        ledger.heard(&node(0), at(10));
        ledger.excuse(at(40));
        assert_eq!(look(&mut ledger, at(54)), Found::default());
        assert_eq!(look(&mut ledger, at(55)).fell.len(), 2);
        // What was found stays found.
        ledger.excuse(at(56));
        assert_eq!(look(&mut ledger, at(57)), Found::default());
        assert_eq!(ledger.reach(&node(0)), Reach::Unreachable);
    }

    #[test]
    fn standing_still_shows_in_the_time_between_two_looks() {
        assert!(!PERIODS.is_stall(Duration::from_millis(3900)));
        assert!(PERIODS.is_stall(Duration::from_millis(4100)));
    }

    #[test]
    fn when_a_large_part_vanished_together_workspaces_do_not_speak_of_it() {
        let (mut ledger, begin) = fleet(10);
        let at = |seconds| begin + Duration::from_secs(seconds);
        for number in 6..10 {
            ledger.heard(&node(number), at(59));
        }
        // Six of ten.
        let found = look(&mut ledger, at(60));
        assert_eq!((found.fell.len(), found.told.len(), found.held_back), (6, 0, 6));
        for number in 6..10 {
            ledger.heard(&node(number), at(61));
        }
        assert_eq!(look(&mut ledger, at(62)).held_back, 6);
        // Three return: the other three are single accidents.
        for number in 0..3 {
            ledger.heard(&node(number), at(63));
        }
        assert_eq!(look(&mut ledger, at(64)).told, [node(3), node(4), node(5)]);
    }

    #[test]
    fn nodes_that_were_gone_before_are_no_part_of_an_accident() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut ledger = Ledger::new(PERIODS, begin);
        for number in 0..8 {
            ledger.expect(node(number), false);
        }
        ledger.heard(&node(8), at(0));
        ledger.heard(&node(9), at(58));
        assert_eq!(look(&mut ledger, at(60)).told.len(), 9);
    }

    #[test]
    fn nobody_waits_for_a_retired_node() {
        let (mut ledger, begin) = fleet(2);
        let found = ledger.look(begin + Duration::from_secs(60), |id| *id != node(0));
        assert_eq!((found.fell, found.told), (vec![(node(1), Reach::Offline)], vec![node(1)]));
        assert_eq!(ledger.reach(&node(0)), Reach::Reachable);
    }
}
