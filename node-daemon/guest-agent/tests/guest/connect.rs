//! Connections to servers in the guest.

use std::time::Instant;

use kibo_guest_protocol::v1::{Output, StartFailureReason};
use kibo_guest_protocol::{HostEvent, ProcessEnd, StreamId, flow};

use crate::machine::{Machine, configure, shell};

/// A server of which each connection is a process: `serve` is Perl, with the connection as `$c`.
fn listen(machine: &mut Machine, address: &str, serve: &str) {
    let script = format!(
        "use IO::Socket::IP; $SIG{{CHLD}}='IGNORE'; my $s = IO::Socket::IP->new(LocalHost => '{address}', LocalPort => 8080, \
         Listen => 128, ReuseAddr => 1) or die $@; $|=1; print \"up\\n\"; while (my $c = $s->accept) {{ \
         next if fork; close $s; {serve}; exit }}"
    );
    let process =
        kibo_guest_protocol::v1::Process { argv: vec!["perl".to_owned(), "-e".to_owned(), script], ..shell("") };
    let server = machine.exec(process, false);
    machine.read_until(server, "up\n");
}

const ECHO: &str = "while (sysread($c, my $b, 65536)) { syswrite($c, $b) } ; syswrite($c, 'bye')";

fn connect(machine: &mut Machine, port: u32) -> StreamId {
    machine.open(|connection| connection.connect(port))
}

#[test]
fn a_connection_carries_bytes_and_half_closes_both_ways() {
    let mut machine = Machine::ready(configure());
    listen(&mut machine, "127.0.0.1", ECHO);
    let bytes: Vec<u8> = (0..700_000u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let stream = connect(&mut machine, 8080);
    // The server hears the end of the input, and its last word comes after it.
    let got = machine.collect_bytes(stream, &bytes);
    assert_eq!(got.end, ProcessEnd::Code(0));
    assert!(got.stdout == [bytes.as_slice(), b"bye"].concat(), "{} bytes", got.stdout.len());
}

#[test]
fn a_server_may_end_first_and_still_hear() {
    let mut machine = Machine::ready(configure());
    let serve =
        "syswrite($c, 'hello'); shutdown($c, 1); sysread($c, my $b, 100); open(my $f, '>', '/heard'); print $f $b";
    listen(&mut machine, "::1", serve);
    let stream = connect(&mut machine, 8080);
    machine.wait_for("the server's end", |event| {
        matches!(event, HostEvent::OutputClosed { stream: of, .. } if of == stream).then_some(())
    });
    machine.type_in(stream, b"after the end");
    machine.close(stream);
    assert_eq!(machine.wait_for_end(stream), ProcessEnd::Code(0));
    assert_eq!(
        machine.out("for i in $(seq 100); do test -s /heard && break; sleep 0.1; done; cat /heard"),
        "after the end"
    );
}

#[test]
fn a_port_without_a_server_refuses_and_a_connection_that_is_reset_says_so() {
    let mut machine = Machine::ready(configure());
    let stream = connect(&mut machine, 81);
    let ProcessEnd::NotStarted(failure) = machine.wait_for_end(stream) else { panic!("somebody listens") };
    assert_eq!(failure.reason(), StartFailureReason::Refused, "{}", failure.message);
    let stream = connect(&mut machine, 70_000);
    let ProcessEnd::NotStarted(failure) = machine.wait_for_end(stream) else { panic!("there is such a port") };
    assert_eq!(failure.reason(), StartFailureReason::Invalid);

    let reset = "use Socket; sysread($c, my $b, 1); setsockopt($c, SOL_SOCKET, SO_LINGER, pack('ii', 1, 0)); close $c";
    listen(&mut machine, "127.0.0.1", reset);
    let stream = connect(&mut machine, 8080);
    machine.type_in(stream, b"xy");
    assert_eq!(machine.wait_for_end(stream), ProcessEnd::Code(1));
}

#[test]
fn many_connections_go_at_once_and_one_that_nobody_reads_holds_nobody_up() {
    let mut machine = Machine::ready(configure());
    listen(
        &mut machine,
        "127.0.0.1",
        "sysread($c, my $b, 1); if ($b eq 'f') { while (syswrite($c, 'x' x 65536)) {} } ; \
                                       syswrite($c, $b x 20000)",
    );
    let flood = connect(&mut machine, 8080);
    machine.type_in(flood, b"f");
    let mut heard = 0;
    while heard < flow::Width::GROWING.begins() {
        heard += machine.wait_for("the flood", |event| match event {
            HostEvent::Output { data, .. } => Some(data.len()),
            _ => None,
        });
    }
    let since = Instant::now();
    let streams: Vec<_> = (0..32).map(|_| connect(&mut machine, 8080)).collect();
    for stream in &streams {
        machine.connection().write_stdin(*stream, b"a");
    }
    for stream in streams {
        let got = machine.collect(stream, b"");
        assert_eq!((got.end, got.stdout.len()), (ProcessEnd::Code(0), 20_000));
    }
    println!("32 connections beside a blocked one: {:?}", since.elapsed());
    machine.connection().consumed(flood, Output::Stdout, heard);
    machine.wait_for("more of the flood", |event| matches!(event, HostEvent::Output { .. }).then_some(()));
    machine.connection().abandon(flood);
    assert_eq!(machine.wait_for_end(flood), ProcessEnd::Code(0));
}

#[test]
fn there_are_so_many_streams_and_no_more() {
    let mut machine = Machine::ready(configure());
    listen(&mut machine, "127.0.0.1", "sysread($c, my $b, 1)");
    // The server itself is one.
    let streams: Vec<_> = (0..256).map(|_| connect(&mut machine, 8080)).collect();
    let last = *streams.last().expect("256");
    let ProcessEnd::NotStarted(failure) = machine.wait_for_end(last) else { panic!("it was opened") };
    assert_eq!(failure.reason(), StartFailureReason::TooMany);
    machine.close(streams[0]);
    machine.wait_for_end(streams[0]);
    assert_eq!(machine.out("echo room again"), "room again\n");
}
