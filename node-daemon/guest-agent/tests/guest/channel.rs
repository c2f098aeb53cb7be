//! What goes wrong on a port, and must not matter.

use std::io::Write;
use std::thread::sleep;
use std::time::Duration;

use kibo_guest_protocol::v1::{self, guest_state};
use kibo_guest_protocol::{HostConnection, HostEvent, MAX_RUN, Nonce};

use crate::machine::{Machine, configure, entrypoint, shell, unix_nanos};

fn is_ready(machine: &Machine) -> bool {
    let state = machine.hello.state.as_ref().and_then(|state| state.kind.as_ref());
    matches!(state, Some(guest_state::Kind::Ready(ready)) if ready.instance_id == "inst-1")
}

#[test]
fn a_daemon_that_comes_back_finds_the_same_guest() {
    let script = entrypoint("echo up; exec sleep 1000", v1::RestartPolicy::Never);
    let mut machine = Machine::ready(v1::Configure { entrypoint: Some(script), ..configure() });
    let boot_id = machine.hello.boot_id.clone();
    let process = machine.out("grep -slx sleep /proc/[0-9]*/comm");
    for pause in [0, 50, 3000] {
        machine.hang_up();
        sleep(Duration::from_millis(pause));
        machine.reconnect(0);
        assert!(is_ready(&machine), "{:?}", machine.hello);
        assert_eq!(machine.hello.boot_id, boot_id);
        assert_eq!(machine.out("grep -slx sleep /proc/[0-9]*/comm"), process, "the entrypoint went on");
    }
}

#[test]
fn a_reply_in_flight_reaches_nobody_else_and_its_process_dies() {
    let mut machine = Machine::ready(configure());
    for _ in 0..5 {
        machine.exec(shell("exec yes one-of-the-old-connection"), false);
        machine.wait_for("output", |event| matches!(event, HostEvent::Output { .. }).then_some(()));
        machine.reconnect(0);
        assert_eq!(machine.out("echo new"), "new\n");
        let gone =
            "for i in $(seq 100); do grep -qx yes /proc/[0-9]*/comm || exit 0; sleep 0.1; done; echo still there";
        assert_eq!(machine.out(gone), "");
    }
}

#[test]
fn half_a_frame_of_a_dead_daemon_is_forgotten() {
    let mut machine = Machine::ready(configure());
    for part in [1, 10, 100] {
        let mut dying = HostConnection::open(Nonce::new(rand::random()), 0);
        let hello = dying.outgoing().len();
        dying.exec(shell(&"x".repeat(1000)), false).expect("short enough");
        let bytes = dying.outgoing()[..hello + part].to_vec();
        machine.raw_port().write_all(&bytes).expect("the port takes it");
        machine.reconnect(0);
        assert_eq!(machine.out("echo new"), "new\n");
    }
}

#[test]
fn half_a_run_of_a_dead_daemon_swallows_no_hello_and_is_nobodys_input() {
    let mut machine = Machine::ready(configure());
    for (len, missing) in [(1000, 10), (MAX_RUN, 1), (MAX_RUN, MAX_RUN - 1)] {
        let stream = machine.exec(shell("exec 3>/data/got; echo up; exec cat >&3"), true);
        machine.read_until(stream, "up\n");
        let connection = machine.connection();
        assert_eq!(connection.write_stdin(stream, &vec![b'x'; len]), len);
        let bytes = connection.outgoing()[..connection.outgoing().len() - missing].to_vec();
        machine.raw_port().write_all(&bytes).expect("the port takes it");
        machine.reconnect(0);
        assert_eq!(machine.out("echo new"), "new\n");
        assert_eq!(machine.out("wc -c </data/got"), "0\n", "{len} bytes but for {missing}");
    }
}

#[test]
fn garbage_from_the_host_changes_nothing() {
    let mut machine = Machine::ready(configure());
    let garbage: Vec<u8> = (0..3_000_000u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    machine.raw_port().write_all(&garbage).expect("the port takes it");
    machine.raw_port().write_all(&vec![7; 1_000_000]).expect("the port takes it");
    machine.reconnect(0);
    assert!(is_ready(&machine));
    assert_eq!(machine.out("echo new"), "new\n");
}

#[test]
fn configuring_again_is_idempotent_for_the_same_instance_and_refused_for_another() {
    let mut machine = Machine::ready(configure());
    assert_eq!(machine.try_configure(configure()), None);
    machine.reconnect(0);
    assert_eq!(machine.try_configure(configure()), None);
    let other = v1::Configure { instance_id: "inst-2".to_owned(), ..configure() };
    let failure = machine.try_configure(other).expect("refused");
    assert_eq!(failure.stage(), v1::ConfigureStage::Request);
    assert!(failure.message.contains("inst-1"), "{}", failure.message);
    assert_eq!(machine.out("hostname"), "demo\n");
}

#[test]
fn a_guest_answers_pings_with_its_time_and_costs_next_to_nothing_while_idle() {
    let mut machine = Machine::ready(configure());
    machine.send(v1::Ping { id: 42 });
    let pong = machine.wait_for("the pong", |event| match event {
        HostEvent::Pong(pong) => Some(pong),
        _ => None,
    });
    assert_eq!(pong.id, 42);
    let off = Duration::from_nanos(pong.time_unix_nanos.abs_diff(unix_nanos()));
    assert!(off < Duration::from_secs(2), "the guest's clock is off by {off:?}");
    for connected in [true, false] {
        if !connected {
            machine.hang_up();
        }
        sleep(Duration::from_secs(1));
        let before = machine.cpu_time();
        sleep(Duration::from_secs(5));
        let used = machine.cpu_time().checked_sub(before).unwrap();
        println!("idle, connected: {connected}: {used:?} CPU in 5 s");
        assert!(used < Duration::from_millis(250), "{used:?} in 5 s, connected: {connected}");
    }
}
