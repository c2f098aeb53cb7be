//! The entrypoint: its log and its restarts.

use std::time::Duration;

use kibo_guest_protocol::v1::{self, Output, RestartPolicy, entrypoint_state, guest_state};
use kibo_guest_protocol::{HostEvent, ProcessEnd};

use crate::machine::{Machine, configure, entrypoint, unix_nanos};

fn started(script: &str, policy: RestartPolicy) -> Machine {
    Machine::ready(v1::Configure { entrypoint: Some(entrypoint(script, policy)), ..configure() })
}

fn next_log(machine: &mut Machine) -> v1::LogData {
    machine.wait_for("a piece of the log", |event| match event {
        HostEvent::Log(piece) => Some(piece),
        _ => None,
    })
}

/// Reads the log up to `end`, acknowledging as it goes.
fn read_to(machine: &mut Machine, mut from: u64, end: u64) -> Vec<u8> {
    let mut log = Vec::new();
    while from < end {
        let piece = next_log(machine);
        assert_eq!(piece.offset, from, "no byte is lost and none comes twice");
        from += piece.data.len() as u64;
        log.extend(piece.data);
        machine.send(v1::LogAck { offset: from });
    }
    log
}

fn wait_for_state(
    machine: &mut Machine,
    what: &str,
    pick: impl Fn(&v1::EntrypointState) -> bool,
) -> v1::EntrypointState {
    machine.wait_for(what, |event| match event {
        HostEvent::Entrypoint(state) if pick(&state) => Some(state),
        _ => None,
    })
}

fn exited(state: &v1::EntrypointState) -> bool {
    matches!(state.kind, Some(entrypoint_state::Kind::Exited(_)))
}

#[test]
fn the_log_has_both_outputs_with_their_times() {
    let before = unix_nanos();
    let mut machine = started("echo out; sleep 0.2; echo err >&2; exit 4", RestartPolicy::Never);
    let (first, second) = (next_log(&mut machine), next_log(&mut machine));
    assert_eq!((first.output(), first.offset, first.data.as_slice()), (Output::Stdout, 0, &b"out\n"[..]));
    assert_eq!((second.output(), second.offset, second.data.as_slice()), (Output::Stderr, 4, &b"err\n"[..]));
    assert!(second.time_unix_nanos - first.time_unix_nanos > 100_000_000);
    assert!(first.time_unix_nanos.abs_diff(before) < 60_000_000_000, "the guest has the host's clock");
    let state = wait_for_state(&mut machine, "its end", exited);
    let Some(entrypoint_state::Kind::Exited(exit)) = state.kind else { panic!("{state:?}") };
    assert_eq!(ProcessEnd::from_message(exit.status), Some(ProcessEnd::Code(4)));
}

#[test]
fn an_entrypoint_that_fails_is_started_again_and_one_that_succeeds_is_not() {
    let script = "echo run >> /runs; test $(wc -l < /runs) -ge 3";
    let mut machine = started(script, RestartPolicy::OnFailure);
    let state = wait_for_state(&mut machine, "its last end", exited);
    assert_eq!(state.restarts, 2);
    assert_eq!(machine.out("wc -l < /runs"), "3\n");
}

#[test]
fn a_killed_entrypoint_is_started_again() {
    let mut machine = started("echo $$; exec sleep 1000", RestartPolicy::Always);
    let pid = String::from_utf8(next_log(&mut machine).data).expect("a number");
    machine.out(&format!("kill -9 {pid}"));
    wait_for_state(&mut machine, "the restart", |state| {
        state.restarts == 1 && matches!(state.kind, Some(entrypoint_state::Kind::Running(_)))
    });
    assert_ne!(String::from_utf8(next_log(&mut machine).data).expect("a number"), pid);
}

#[test]
fn a_log_that_nobody_takes_stops_its_writer_and_loses_nothing() {
    let lines = 400_000;
    let mut machine = started(&format!("seq {lines}; echo end; exec sleep 1000"), RestartPolicy::Never);
    let expected: String = (1..=lines).map(|line| format!("{line}\n")).chain(["end\n".to_owned()]).collect();
    // What was sent is not acknowledged; the daemon dies, and is away while the entrypoint goes on.
    next_log(&mut machine);
    machine.hang_up();
    std::thread::sleep(Duration::from_secs(3));
    machine.reconnect(0);
    let kept = machine.hello.log_end - machine.hello.log_start;
    assert!(machine.hello.log_start == 0 && kept > 200_000 && kept <= 1 << 20, "{kept} bytes are kept");
    let Some(guest_state::Kind::Ready(ready)) = machine.hello.state.clone().and_then(|state| state.kind) else {
        panic!("{:?}", machine.hello);
    };
    assert_eq!(ready.instance_id, "inst-1");
    let half = expected.len() as u64 / 2;
    let mut log = read_to(&mut machine, 0, half);
    // A daemon that stored more than it acknowledged says so in its hello.
    let have = log.len() as u64;
    machine.reconnect(have);
    log.extend(read_to(&mut machine, have, expected.len() as u64));
    assert!(log == expected.as_bytes(), "{} of {} bytes", log.len(), expected.len());
}
