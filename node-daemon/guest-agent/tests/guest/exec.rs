//! Processes that the host starts in the guest.

use std::time::Instant;

use kibo_guest_protocol::v1::{self, Output, StartFailureReason};
use kibo_guest_protocol::{HostEvent, ProcessEnd, flow};

use crate::machine::{Machine, configure, entrypoint, shell};

#[test]
fn exec_carries_streams_status_and_environment() {
    let mut machine = Machine::ready(configure());

    let ran = machine.sh("echo out; echo err >&2; exit 3");
    assert_eq!((ran.end, ran.stdout.as_str(), ran.stderr.as_str()), (ProcessEnd::Code(3), "out\n", "err\n"));

    let ran = machine.run(shell("cat; echo end"), Some(b"typed in"));
    assert_eq!((ran.end, ran.stdout.as_str()), (ProcessEnd::Code(0), "typed inend\n"));

    assert_eq!(machine.sh("kill -SEGV $$").end, ProcessEnd::Signal(11));
    assert_eq!(machine.out("cat /dev/stdin; echo $HOME $USER $TERM; pwd"), "/root root xterm\n/\n");

    let mut process = shell("echo $GREETING; pwd; id -u; id -g; echo $HOME");
    process.env = vec![v1::EnvVar { name: "GREETING".to_owned(), value: "a b=c".to_owned() }];
    process.cwd = "/usr/lib".to_owned();
    process.user = "daemon".to_owned();
    assert_eq!(machine.run(process, None).stdout, "a b=c\n/usr/lib\n1\n1\n/usr/sbin\n");
}

#[test]
fn what_cannot_be_started_says_why() {
    let mut machine = Machine::ready(configure());
    let program = |name: &str| v1::Process { argv: vec![name.to_owned()], ..v1::Process::default() };
    let somewhere = |cwd: &str| v1::Process { cwd: cwd.to_owned(), ..shell("true") };
    let somebody = |user: &str| v1::Process { user: user.to_owned(), ..shell("true") };
    let cases = [
        (program("no-such-program"), StartFailureReason::NotFound),
        (program("/etc/passwd"), StartFailureReason::PermissionDenied),
        (program(""), StartFailureReason::Invalid),
        (v1::Process::default(), StartFailureReason::Invalid),
        (somewhere("/nowhere"), StartFailureReason::Invalid),
        (somewhere("/etc/passwd"), StartFailureReason::Invalid),
        (somebody("nobody-at-all"), StartFailureReason::Invalid),
    ];
    for (process, reason) in cases {
        let what = format!("{process:?}");
        let ProcessEnd::NotStarted(failure) = machine.run(process, None).end else { panic!("{what} was started") };
        assert_eq!(failure.reason(), reason, "{what}: {}", failure.message);
    }
}

#[test]
fn an_unconfigured_guest_refuses_exec() {
    let mut machine = Machine::fresh();
    let ProcessEnd::NotStarted(failure) = machine.sh("true").end else { panic!("it was started") };
    assert_eq!(failure.reason(), StartFailureReason::NotReady);
}

#[test]
fn a_signal_reaches_the_whole_group() {
    let mut machine = Machine::ready(configure());
    let stream = machine.exec(
        shell("trap 'echo caught; exit 7' TERM; sleep 1000 & until grep -qx sleep /proc/$!/comm; do :; done; echo ready; wait"),
        false,
    );
    machine.wait_for("ready", |event| matches!(event, HostEvent::Output { .. }).then_some(()));
    machine.connection().signal(stream, 15);
    let ran = machine.collect(stream, b"");
    assert_eq!((ran.end, ran.stdout.as_str()), (ProcessEnd::Code(7), "caught\n"));
    assert_eq!(machine.out("grep -slx sleep /proc/[0-9]*/comm || echo none"), "none\n");
}

#[test]
fn a_child_that_keeps_the_output_open_does_not_keep_the_exec() {
    let mut machine = Machine::ready(configure());
    let started = Instant::now();
    let ran = machine.sh("echo before; sleep 30 & ");
    assert_eq!((ran.end, ran.stdout.as_str()), (ProcessEnd::Code(0), "before\n"));
    assert!(started.elapsed().as_secs() < 20, "it waited for the child");
}

#[test]
fn a_slow_reader_stops_its_own_writer_and_nobody_else() {
    let mut machine = Machine::ready(configure());
    let greedy = machine.exec(shell("yes; true"), false);
    let mut heard = 0;
    while heard < flow::Width::GROWING.begins() {
        heard += machine.wait_for("output", |event| match event {
            HostEvent::Output { data, .. } => Some(data.len()),
            _ => None,
        });
    }
    assert_eq!(machine.out("echo still here"), "still here\n");
    machine.connection().consumed(greedy, Output::Stdout, heard);
    machine.wait_for("more output", |event| matches!(event, HostEvent::Output { .. }).then_some(()));
    machine.connection().abandon(greedy);
    let end = machine.wait_for("its end", |event| match event {
        HostEvent::ExecEnded { end, .. } => Some(end),
        _ => None,
    });
    assert_eq!(end, ProcessEnd::Signal(1));
}

#[test]
fn megabytes_arrive_unchanged_in_both_directions() {
    let mut machine = Machine::ready(configure());
    let text: String = (0..200_000).flat_map(|line| ["line ".to_owned(), line.to_string(), "\n".to_owned()]).collect();
    let ran = machine.run(shell("tee /dev/stderr"), Some(text.as_bytes()));
    assert_eq!(ran.end, ProcessEnd::Code(0));
    assert!(
        ran.stdout == text && ran.stderr == text,
        "{} and {} of {} bytes",
        ran.stdout.len(),
        ran.stderr.len(),
        text.len()
    );
}

#[test]
fn many_execs_at_once_and_orphans_leave_no_zombie() {
    let mut machine = Machine::ready(configure());
    let streams: Vec<_> = (0..40).map(|_| machine.exec(shell("(sleep 0.1 &) ; echo x"), false)).collect();
    for stream in streams {
        assert_eq!(machine.collect(stream, b"").end, ProcessEnd::Code(0));
    }
    let zombies = "for i in $(seq 100); do cat /proc/[0-9]*/stat 2>/dev/null | grep -q ') Z ' || exit 0; sleep 0.1; done; echo zombies";
    assert_eq!(machine.out(zombies), "");
}

#[test]
fn exec_sees_what_the_entrypoint_sees_and_not_the_initramfs() {
    let script = "mount -t tmpfs none /mnt && touch /mnt/mounted && echo done; exec sleep 1000";
    let mut given = entrypoint(script, v1::RestartPolicy::Never);
    let process = given.process.as_mut().expect("given");
    process.env = vec![v1::EnvVar { name: "FROM".to_owned(), value: "entrypoint".to_owned() }];
    process.cwd = "/srv".to_owned();
    let mut machine = Machine::ready(v1::Configure { entrypoint: Some(given), ..configure() });
    machine.wait_for("its word", |event| matches!(event, HostEvent::Log(_)).then_some(()));
    assert_eq!(
        machine.out("ls /mnt; echo $FROM; pwd; ls /init /modules 2>/dev/null || true"),
        "mounted\nentrypoint\n/srv\n"
    );
}
