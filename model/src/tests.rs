use stateright::{Checker as _, Model as _};

use super::*;

const NONE: Budget = Budget { isolations: 0, crashes: 0, daemon_crashes: 0, cuts_from_control: 0, cuts_from_pool: 0 };

fn checked(epochs: u64, periods: u64, budget: Budget) -> Checked {
    Checked { hosts: 2, epochs, periods, budget, watches: true }
}

fn check(model: Checked, expected: &[&'static str]) {
    let begun = std::time::Instant::now();
    let checker = model.checker().threads(2).spawn_bfs().join();
    println!("{} states, {} different, in {:?}", checker.state_count(), checker.unique_state_count(), begun.elapsed());
    for name in ALWAYS {
        if let Some(path) = checker.discovery(name) {
            panic!("{name}: {path}");
        }
    }
    for name in expected {
        assert!(checker.discovery(name).is_some(), "the search never comes to where {name}");
    }
}

#[test]
fn a_host_that_is_off_is_taken_over() {
    let budget = Budget { isolations: 1, crashes: 1, daemon_crashes: 1, ..NONE };
    check(checked(3, 1, budget), &[TAKEN_OVER, HANDED_OVER]);
}

#[test]
fn a_host_that_is_cut_off_stops_by_itself() {
    let budget = Budget { isolations: 1, cuts_from_control: 1, cuts_from_pool: 1, ..NONE };
    check(checked(2, 4, budget), &[TAKEN_OVER, HANDED_OVER, STANDS_STILL, KILLED, TWO_WRITE]);
}

#[test]
fn a_host_that_is_wrongly_declared_dead_stops_within_a_period() {
    let budget = Budget { isolations: 2, cuts_from_control: 2, ..NONE };
    check(checked(3, 2, budget), &[HANDED_OVER, KILLED, TWO_WRITE]);
}

#[test]
fn daemons_that_die_anywhere_lose_nothing() {
    let budget = Budget { isolations: 1, daemon_crashes: 2, cuts_from_control: 1, ..NONE };
    check(checked(2, 2, budget), &[HANDED_OVER, TWO_WRITE]);
}

/// Without a watch the second promise must fail: else the model would prove nothing.
#[test]
fn without_the_watch_a_wrong_isolation_has_no_end() {
    let budget = Budget { isolations: 1, cuts_from_control: 1, ..NONE };
    let model = Checked { watches: false, ..checked(2, 3, budget) };
    let checker = model.checker().threads(2).spawn_bfs().join();
    assert!(checker.discovery(STOPS_WITHIN_A_PERIOD).is_some());
    assert!(checker.discovery(NEVER_TWO_WRITERS).is_none(), "what was rightly declared dead needs no watch");
}
