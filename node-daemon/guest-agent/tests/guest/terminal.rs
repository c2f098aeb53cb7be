//! Terminals: what a person at a shell expects of one.

use std::time::{Duration, Instant};

use kibo_guest_protocol::v1::{self, Output};
use kibo_guest_protocol::{HostEvent, ProcessEnd, StreamId, flow};

use crate::machine::{Machine, configure, entrypoint, shell};

fn terminal() -> v1::Terminal {
    v1::Terminal { columns: 80, rows: 24, term: "xterm-256color".to_owned() }
}

fn start(machine: &mut Machine, script: &str) -> StreamId {
    let exec =
        v1::Exec { process: Some(shell(script)), stdin: true, terminal: Some(terminal()), ..v1::Exec::default() };
    machine.open(|connection| connection.start(exec))
}

#[test]
fn a_terminal_has_its_size_its_kind_its_name_and_all_outputs() {
    let mut machine = Machine::ready(configure());
    let script = "stty size; tty; echo $TERM; test -t 0 && test -t 1 && test -t 2 && echo all; echo err >&2; \
                  echo own >/dev/tty; ls /dev/ptmx; exit 3";
    let stream = start(&mut machine, script);
    let ran = machine.collect(stream, b"");
    let expected = "24 80\r\n/dev/pts/0\r\nxterm-256color\r\nall\r\nerr\r\nown\r\n/dev/ptmx\r\n";
    assert_eq!((ran.end, ran.stdout.as_str(), ran.stderr.as_str()), (ProcessEnd::Code(3), expected, ""));
    assert_eq!(machine.out("ls /dev/pts"), "ptmx\n", "a terminal that ended is gone");
}

#[test]
fn a_resize_reaches_the_foreground() {
    let mut machine = Machine::ready(configure());
    let stream = start(&mut machine, "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done");
    machine.read_until(stream, "ready\r\n");
    machine.connection().resize(stream, 132, 50);
    assert_eq!(machine.read_until(stream, "132\r\n"), "50 132\r\n");
}

#[test]
fn control_c_interrupts_the_foreground_and_so_does_a_signal() {
    let mut machine = Machine::ready(configure());
    let script = "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.05; done";
    for by_key in [true, false] {
        let stream = start(&mut machine, script);
        machine.read_until(stream, "ready\r\n");
        if by_key {
            machine.type_in(stream, b"\x03");
        } else {
            machine.connection().signal(stream, 2);
        }
        let heard = machine.read_until(stream, "caught\r\n");
        assert_eq!(heard, if by_key { "^Ccaught\r\n" } else { "caught\r\n" });
        assert_eq!(machine.wait_for_end(stream), ProcessEnd::Code(7));
    }
}

#[test]
fn a_raw_terminal_changes_no_byte() {
    let mut machine = Machine::ready(configure());
    let stream = start(&mut machine, "stty raw -echo; echo ready; head -c 1024 >/tmp/bytes; cat /tmp/bytes");
    machine.read_until(stream, "ready\n");
    let bytes: Vec<u8> = (0..=u8::MAX).cycle().take(1024).collect();
    machine.type_in(stream, &bytes);
    let got = machine.collect_bytes(stream, b"");
    assert_eq!((got.end, got.stdout), (ProcessEnd::Code(0), bytes));
}

#[test]
fn the_end_of_the_input_is_typed_where_lines_are_read() {
    let mut machine = Machine::ready(configure());
    for input in ["typed\n", "typed"] {
        let stream = start(&mut machine, "stty -echo; echo ready; cat; echo end");
        machine.read_until(stream, "ready\r\n");
        let ran = machine.collect(stream, input.as_bytes());
        assert_eq!((ran.end, ran.stdout.replace("\r\n", "")), (ProcessEnd::Code(0), "typedend".to_owned()));
    }
}

#[test]
fn a_shell_is_the_users_own_or_the_entrypoints() {
    let login = |machine: &mut Machine| {
        let exec = v1::Exec { stdin: true, terminal: Some(terminal()), login_shell: true, ..v1::Exec::default() };
        let stream = machine.open(|connection| connection.start(exec));
        machine.type_in(stream, b"echo $0 $SHELL; exit 5\n");
        let ran = machine.collect(stream, b"");
        assert_eq!(ran.end, ProcessEnd::Code(5), "{ran:?}");
        ran.stdout
    };
    let mut machine = Machine::ready(configure());
    assert!(login(&mut machine).contains("/bin/bash /bin/bash\r\n"));
    let mut given = entrypoint("exec sleep 1000", v1::RestartPolicy::Never);
    let process = given.process.as_mut().expect("given");
    process.env = vec![v1::EnvVar { name: "SHELL".to_owned(), value: "/bin/sh".to_owned() }];
    let mut machine = Machine::ready(v1::Configure { entrypoint: Some(given), ..configure() });
    assert!(login(&mut machine).contains("/bin/sh /bin/sh\r\n"));
}

#[test]
fn a_client_that_goes_hangs_the_terminal_up() {
    let mut machine = Machine::ready(configure());
    let polite = start(&mut machine, "trap 'echo hup >/hup; exit 0' HUP; echo ready; while :; do sleep 0.05; done");
    machine.read_until(polite, "ready\r\n");
    machine.connection().abandon(polite);
    assert_eq!(machine.wait_for_end(polite), ProcessEnd::Code(0));
    assert_eq!(machine.out("cat /hup; ls /dev/pts"), "hup\nptmx\n");

    let stubborn = start(&mut machine, "trap '' HUP; echo ready; exec sleep 1000");
    machine.read_until(stubborn, "ready\r\n");
    let since = Instant::now();
    machine.connection().abandon(stubborn);
    assert_eq!(machine.wait_for_end(stubborn), ProcessEnd::Signal(9));
    assert!(since.elapsed() > Duration::from_secs(4), "it had no time to go: {:?}", since.elapsed());
}

#[test]
fn a_daemon_that_goes_hangs_its_commands_up() {
    let mut machine = Machine::ready(configure());
    let pipes = machine.exec(shell("trap '' HUP; echo ready; exec perl -e 'sleep 1000'"), false);
    machine.read_until(pipes, "ready\n");
    let terminal = start(&mut machine, "echo ready; exec perl -e 'sleep 1000'");
    machine.read_until(terminal, "ready\r\n");
    machine.reconnect(0);
    let left = "grep -sl '^perl$' /proc/[0-9]*/comm | wc -l";
    let gone = format!("for i in $(seq 200); do test $({left}) = 0 && exit 0; sleep 0.1; done; echo left");
    assert_eq!(machine.out(&gone), "");
}

#[test]
fn a_terminal_that_nobody_reads_stops_its_own_writer_and_nobody_else() {
    let mut machine = Machine::ready(configure());
    let greedy = start(&mut machine, "yes");
    let mut heard = 0;
    while heard < flow::Width::GROWING.begins() {
        heard += machine.wait_for("output", |event| match event {
            HostEvent::Output { data, .. } => Some(data.len()),
            _ => None,
        });
    }
    assert_eq!(machine.out("echo still here"), "still here\n");
    machine.type_in(greedy, b"\x03");
    machine.connection().consumed(greedy, Output::Stdout, heard);
    assert_eq!(machine.wait_for_end(greedy), ProcessEnd::Signal(2));
}
