//! The way down.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use kibo_guest_protocol::HostEvent;
use kibo_guest_protocol::v1::{self, RestartPolicy};

use crate::machine::{Machine, configure, entrypoint};

/// What e2fsck says of an image that nobody has open.
fn is_clean(image: &Path) -> bool {
    let output = Command::new("dumpe2fs").arg("-h").arg(image).output().expect("dumpe2fs is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let state = text.lines().find(|line| line.starts_with("Filesystem state:")).unwrap_or_default();
    let recovery = text.lines().any(|line| line.starts_with("Filesystem features:") && line.contains("needs_recovery"));
    state.ends_with(" clean") && !recovery
}

fn assert_clean(directory: &Path) {
    for image in ["layer.raw", "volume.raw"] {
        assert!(is_clean(&directory.join(image)), "{image} was not unmounted");
    }
}

#[test]
fn a_guest_without_a_timer_boots_anew_before_anybody_hears_of_it() {
    let mut machine = Machine::without_timer();
    // The harness lets no guest boot twice.
    assert!(machine.wait_for_exit().success());
    let console = std::fs::read_to_string(machine.directory().join("console.log")).expect("a console");
    assert!(console.contains("no timer that works"), "{console}");
}

#[test]
fn a_shutdown_lets_the_workload_end_by_itself_and_unmounts() {
    let script = "trap 'echo goodbye; echo goodbye > /data/said; exit 0' TERM; echo up; while true; do sleep 0.1; done";
    let mut machine =
        Machine::ready(v1::Configure { entrypoint: Some(entrypoint(script, RestartPolicy::Always)), ..configure() });
    machine.wait_for("its word", |event| matches!(event, HostEvent::Log(_)).then_some(()));
    let started = Instant::now();
    machine.shut_down(Duration::from_secs(30));
    // The shell may also say that its child was terminated.
    let last = machine.wait_for("its last word", |event| match event {
        HostEvent::Log(piece) if piece.data.ends_with(b"goodbye\n") => Some(piece),
        _ => None,
    });
    machine.send(v1::LogAck { offset: last.offset + last.data.len() as u64 });
    assert!(machine.wait_for_exit().success());
    println!("down in {:?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(15), "the grace was not waited out");
    assert_clean(machine.directory());
}

/// The agent has room for a part of what was written. What it has room for only when nobody writes any more comes too.
#[test]
fn what_is_in_the_pipe_goes_out_before_the_power() {
    let script = "seq 400000; exec sleep 1000";
    let mut machine =
        Machine::ready(v1::Configure { entrypoint: Some(entrypoint(script, RestartPolicy::Never)), ..configure() });
    let stuck = "while a=$(grep wchar /proc/$(pidof seq)/io); sleep 0.5; \
         [ \"$a\" != \"$(grep wchar /proc/$(pidof seq)/io)\" ]; do :; done; echo stuck";
    assert_eq!(machine.out(stuck), "stuck\n");
    machine.shut_down(Duration::from_secs(5));
    // All that it has until now, at once.
    machine.send(v1::LogAck { offset: u64::MAX });
    let full = 900 << 10;
    machine.wait_for("what was in the pipe", |event| match event {
        HostEvent::Log(piece) if piece.offset > full => Some(()),
        _ => None,
    });
    machine.send(v1::LogAck { offset: u64::MAX });
    assert!(machine.wait_for_exit().success());
}

#[test]
fn what_ignores_the_request_is_killed_after_the_grace() {
    let script = "trap '' TERM; echo up; while true; do echo x >> /data/file; sleep 0.05; done";
    let mut machine =
        Machine::ready(v1::Configure { entrypoint: Some(entrypoint(script, RestartPolicy::Always)), ..configure() });
    machine.wait_for("its word", |event| matches!(event, HostEvent::Log(_)).then_some(()));
    machine.out("(trap '' TERM; setsid sh -c 'while true; do sleep 0.1; done' >/dev/null 2>&1 &)");
    let started = Instant::now();
    machine.shut_down(Duration::from_secs(1));
    assert!(machine.wait_for_exit().success());
    assert!(started.elapsed() >= Duration::from_secs(1));
    assert_clean(machine.directory());
}

#[test]
fn a_guest_whose_daemon_died_in_the_middle_of_a_shutdown_goes_down_all_the_same() {
    let mut machine = Machine::ready(v1::Configure {
        entrypoint: Some(entrypoint("yes; true", RestartPolicy::Always)),
        ..configure()
    });
    machine.shut_down(Duration::from_secs(5));
    machine.hang_up();
    assert!(machine.wait_for_exit().success());
    assert_clean(machine.directory());
}

#[test]
fn an_unconfigured_guest_can_be_shut_down() {
    let mut machine = Machine::fresh();
    machine.shut_down(Duration::from_secs(5));
    assert!(machine.wait_for_exit().success());
}
