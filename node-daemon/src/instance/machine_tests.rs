use super::*;

fn ending(reason: EndReason) -> Ending {
    Ending::new(reason, "because")
}

fn exited() -> Input {
    Input::Exited { how: "by signal 9".into(), out_of_memory: false, explanation: String::new() }
}

fn off() -> Input {
    Input::Off { by_guest: true, reason: "guest-shutdown".into() }
}

fn synced() -> Input {
    Input::Synced { error: String::new() }
}

/// Plays inputs and gives where that leads, with all actions on the way.
fn play(mut state: State, inputs: impl IntoIterator<Item = Input>) -> (State, Vec<Action>) {
    let mut all = Vec::new();
    for input in inputs {
        let (next, actions) = state.step(input);
        all.extend(actions);
        state = next;
    }
    (state, all)
}

fn reason(state: &State) -> Option<EndReason> {
    match state {
        State::Releasing(ending) | State::Ending(ending) => Some(ending.reason),
        _ => None,
    }
}

fn all_states() -> Vec<State> {
    vec![
        State::Starting { end: None },
        State::Booting,
        State::Adopting,
        State::Configuring { stop: false },
        State::Configuring { stop: true },
        State::Running,
        State::Syncing { failed: false },
        State::Syncing { failed: true },
        State::PoweringOff,
        State::LastSync,
        State::Ending(ending(EndReason::TornDown)),
    ]
}

#[test]
fn a_start_leads_to_running() {
    let inputs = [Input::Launched, Input::Connected(GuestCondition::Unconfigured), Input::Configured];
    let (state, actions) = play(State::Starting { end: None }, inputs);
    assert_eq!(state, State::Running);
    assert_eq!(actions, [Action::Configure, Action::Available]);
}

#[test]
fn a_normal_stop_waits_for_the_writeback() {
    let (state, actions) = play(State::Running, [Input::Stop(StopMode::Normal)]);
    assert_eq!((&state, actions), (&State::Syncing { failed: false }, vec![Action::Sync]));
    let (state, actions) = play(state, [Input::Synced { error: "disk".into() }]);
    assert_eq!((&state, actions), (&State::Syncing { failed: true }, vec![]));
    let (state, actions) = play(state, [Input::TimedOut, synced()]);
    assert_eq!(state, State::PoweringOff);
    assert_eq!(actions, [Action::Sync, Action::Remember(Ending::stopped()), Action::ShutDown]);
    let (state, actions) = play(state, [Input::ShuttingDown, off(), exited()]);
    assert_eq!(reason(&state), Some(EndReason::Stopped));
    assert_eq!(actions, [Action::Remember(Ending::stopped()), Action::Quit]);
}

/// Everything was written back; such a guest may never power off, and nothing else ends a normal stop.
#[test]
fn a_guest_that_forgets_itself_on_its_way_down_is_ended() {
    for condition in [GuestCondition::Unconfigured, GuestCondition::Failed("odd".into())] {
        let (state, actions) = play(State::PoweringOff, [Input::Connected(condition)]);
        assert_eq!(reason(&state), Some(EndReason::Stopped));
        assert_eq!(actions, [Action::Remember(Ending::stopped()), Action::Kill]);
    }
}

#[test]
fn what_may_have_been_lost_with_a_connection_is_said_again() {
    let ready = || Input::Connected(GuestCondition::Ready);
    for (state, input, expected) in [
        (State::Syncing { failed: false }, ready(), vec![Action::Sync]),
        (State::PoweringOff, ready(), vec![Action::ShutDown]),
        (State::LastSync, ready(), vec![Action::Sync]),
        (State::Running, ready(), vec![]),
        (State::Configuring { stop: true }, Input::Connected(GuestCondition::Unconfigured), vec![Action::Configure]),
    ] {
        let (next, actions) = state.clone().step(input);
        assert_eq!((next, actions), (state, expected));
    }
}

#[test]
fn a_stop_before_the_guest_is_configured_leaves_nothing_to_write_back() {
    for state in [State::Starting { end: None }, State::Booting] {
        let (state, _) = play(state, [Input::Stop(StopMode::Normal), Input::Launched, exited()]);
        assert_eq!(reason(&state), Some(EndReason::Stopped));
    }
    let (state, actions) = play(State::Configuring { stop: false }, [Input::Stop(StopMode::Normal), Input::Configured]);
    assert_eq!((state, actions), (State::Syncing { failed: false }, vec![Action::Available, Action::Sync]));
}

#[test]
fn force_supersedes_a_normal_stop() {
    for state in [State::Running, State::Syncing { failed: false }, State::Syncing { failed: true }, State::Adopting] {
        let (next, actions) = play(state, [Input::Stop(StopMode::Force)]);
        assert_eq!((&next, actions), (&State::LastSync, vec![Action::Sync]));
        let (next, actions) = play(next, [Input::Stop(StopMode::Normal), Input::TimedOut]);
        assert_eq!(reason(&next), Some(EndReason::ForceStopped));
        assert_eq!(actions, [Action::Remember(Ending::forced()), Action::Kill]);
    }
    for state in [State::PoweringOff, State::Booting, State::Configuring { stop: true }] {
        let (next, actions) = play(state, [Input::Stop(StopMode::Force)]);
        assert_eq!(reason(&next), Some(EndReason::ForceStopped));
        assert_eq!(actions.last(), Some(&Action::Kill));
    }
}

#[test]
fn unexpected_ends_have_distinct_reasons() {
    let out_of_memory = Input::Exited { how: "by signal 9".into(), out_of_memory: true, explanation: String::new() };
    let host = Input::Off { by_guest: false, reason: "host-signal".into() };
    for (state, input, expected) in [
        (State::Running, exited(), EndReason::VmmExited),
        (State::Syncing { failed: false }, exited(), EndReason::VmmExited),
        (State::PoweringOff, exited(), EndReason::VmmExited),
        (State::Adopting, exited(), EndReason::VmmExited),
        (State::Booting, exited(), EndReason::VmmFailed),
        (State::Running, out_of_memory, EndReason::OutOfMemory),
        (State::Running, Input::Panicked, EndReason::GuestPanicked),
        (State::Running, off(), EndReason::GuestShutdown),
        (State::Syncing { failed: false }, off(), EndReason::GuestShutdown),
        (State::Running, host, EndReason::VmmExited),
        (State::Booting, Input::TimedOut, EndReason::GuestBootTimeout),
        (State::Configuring { stop: false }, Input::TimedOut, EndReason::GuestBootTimeout),
        (State::Configuring { stop: true }, Input::ConfigureFailed("no root".into()), EndReason::GuestConfigureFailed),
        (State::Adopting, Input::Connected(GuestCondition::Failed("no root".into())), EndReason::GuestConfigureFailed),
        (State::Adopting, Input::Connected(GuestCondition::Foreign("inst-x".into())), EndReason::VmmFailed),
        (State::Running, Input::Connected(GuestCondition::Unconfigured), EndReason::GuestShutdown),
    ] {
        let (next, actions) = play(state.clone(), [input.clone()]);
        assert_eq!(reason(&next), Some(expected), "{state:?} {input:?}");
        assert!(matches!(actions[0], Action::Remember(_)), "{state:?} {input:?}");
    }
}

#[test]
fn what_is_asked_during_the_launch_happens_after_it() {
    for (input, expected) in [
        (Input::Stop(StopMode::Force), EndReason::ForceStopped),
        (Input::End(ending(EndReason::Isolated)), EndReason::Isolated),
    ] {
        let (state, actions) = play(State::Starting { end: None }, [input.clone(), Input::Launched]);
        assert_eq!(reason(&state), Some(expected));
        assert_eq!(actions.last(), Some(&Action::Kill));
        let failed = Input::LaunchFailed(ending(EndReason::StorageFailed));
        let (state, _) = play(State::Starting { end: None }, [input, failed]);
        assert!(matches!(state, State::Releasing(_)));
    }
    let (state, _) = play(State::Starting { end: None }, [Input::LaunchFailed(ending(EndReason::HolderConflict))]);
    assert_eq!(state, State::Releasing(ending(EndReason::HolderConflict)));
}

#[test]
fn an_order_to_end_is_obeyed_everywhere_and_the_first_reason_stays() {
    for state in all_states() {
        let (next, _) = play(
            state.clone(),
            [
                Input::End(ending(EndReason::TornDown)),
                Input::Launched,
                Input::Stop(StopMode::Normal),
                Input::Panicked,
                exited(),
            ],
        );
        assert_eq!(next, State::Releasing(ending(EndReason::TornDown)), "{state:?}");
    }
}

#[test]
fn a_vm_that_does_not_go_is_killed() {
    let (state, actions) = play(State::Running, [off(), Input::TimedOut]);
    assert_eq!(reason(&state), Some(EndReason::GuestShutdown));
    assert_eq!(actions[1..], [Action::Quit, Action::Kill]);
}

#[test]
fn the_end_of_the_process_ends_every_state_but_the_launch() {
    for state in all_states() {
        let (next, _) = play(state.clone(), [exited()]);
        if matches!(state, State::Starting { .. }) {
            assert_eq!(next, state);
        } else {
            assert!(matches!(next, State::Releasing(_)), "{state:?} {next:?}");
        }
    }
}

#[test]
fn an_ending_survives_the_way_through_its_file() {
    let ending = ending(EndReason::GuestConfigureFailed);
    let text = serde_json::to_string(&ending).unwrap();
    assert!(text.contains("END_REASON_GUEST_CONFIGURE_FAILED"), "{text}");
    assert_eq!(serde_json::from_str::<Ending>(&text).unwrap(), ending);
}

#[test]
fn what_a_guest_says_again_puts_no_deadline_off() {
    let notice = Input::Noticed(Kind::GuestUnresponsive(kibo_protocol::v1::GuestUnresponsive {}));
    let unconfigured = Input::Connected(GuestCondition::Unconfigured);
    let ready = Input::Connected(GuestCondition::Ready);
    let again = [
        (State::LastSync, ready),
        (State::Configuring { stop: false }, unconfigured),
        (State::Syncing { failed: true }, Input::Synced { error: "no space".into() }),
    ];
    let noticed = all_states().into_iter().map(|state| (state, notice.clone()));
    for (state, input) in noticed.chain(again) {
        let (next, _) = state.clone().step(input.clone());
        assert!(!state.begins_anew(&next, &input), "{state:?} at {input:?}");
    }
}

#[test]
fn a_guest_that_stands_still_for_its_disk_has_time_to_start_and_none_to_end() {
    let bounds = Bounds::of(Accelerator::Kvm);
    let resumed = Input::Noticed(Kind::Resumed(kibo_protocol::v1::Resumed {}));
    for state in all_states() {
        let starts = matches!(state, State::Booting | State::Configuring { .. });
        let (runs, stalled) = (state.deadline(&bounds, false), state.deadline(&bounds, true));
        assert_eq!(stalled, runs.filter(|_| !starts), "{state:?}");
        let (next, _) = state.clone().step(resumed.clone());
        assert_eq!(state.begins_anew(&next, &resumed), starts, "{state:?}");
    }
}

/// Else the task would spin on a deadline that has passed.
#[test]
fn a_deadline_that_passed_begins_anew() {
    for state in all_states() {
        let (next, _) = state.clone().step(Input::TimedOut);
        assert!(state.begins_anew(&next, &Input::TimedOut), "{state:?}");
    }
}
