use std::collections::BTreeMap;

use super::*;
use crate::flow::{SendWindow, Width};
use crate::frame::{self, Check};
use crate::guest::{GuestConnection, GuestEvent};
use proptest::prelude::*;

const OLD: Nonce = Nonce::new(1);
const NEW: Nonce = Nonce::new(2);

fn to_guest(host: &mut HostConnection, guest: &mut GuestConnection) {
    guest.receive(host.outgoing());
    host.written(host.outgoing().len());
}

fn to_host(guest: &mut GuestConnection, host: &mut HostConnection) {
    host.receive(guest.outgoing()).expect("an honest guest");
    guest.written(guest.outgoing().len());
}

fn guest_events(guest: &mut GuestConnection) -> Vec<GuestEvent> {
    std::iter::from_fn(|| guest.next_event()).collect()
}

fn host_events(host: &mut HostConnection) -> Vec<HostEvent> {
    std::iter::from_fn(|| host.next_event()).collect()
}

fn connect(host: &mut HostConnection, guest: &mut GuestConnection) {
    to_guest(host, guest);
    assert!(matches!(guest_events(guest).as_slice(), [GuestEvent::Connected(_)]));
    guest.reply(v1::HelloReply { boot_id: "boot".to_owned(), ..v1::HelloReply::default() });
    to_host(guest, host);
    assert!(matches!(host_events(host).as_slice(), [HostEvent::Connected(reply)] if reply.boot_id == "boot"));
}

fn connected() -> (HostConnection, GuestConnection) {
    let (mut host, mut guest) = (HostConnection::open(OLD, 0), GuestConnection::default());
    connect(&mut host, &mut guest);
    (host, guest)
}

fn pong(id: u64) -> v1::Pong {
    v1::Pong { id, time_unix_nanos: 0 }
}

fn process() -> v1::Process {
    v1::Process { argv: vec!["true".to_owned()], ..v1::Process::default() }
}

#[test]
fn late_replies_of_an_old_connection_never_reach_the_new_one() {
    let (_, mut guest) = connected();
    guest.send(pong(1)).expect("short");
    let late = guest.outgoing().to_vec();
    let mut host = HostConnection::open(NEW, 0);
    host.receive(&late).expect("dropped, not refused");
    host.receive(&late[..late.len() / 2]).expect("dropped, not refused");
    to_guest(&mut host, &mut guest);
    guest.reply(v1::HelloReply::default());
    guest.send(pong(2)).expect("short");
    to_host(&mut guest, &mut host);
    let events = host_events(&mut host);
    assert!(
        matches!(events.as_slice(), [HostEvent::Connected(_), HostEvent::Pong(v1::Pong { id: 2, .. })]),
        "{events:?}"
    );
}

#[test]
fn half_a_message_of_a_host_that_died_is_not_glued_to_the_next_hello() {
    let (mut old, mut guest) = connected();
    old.send(v1::Ping { id: 1 }).expect("short");
    guest.receive(&old.outgoing()[..old.outgoing().len() / 2]);
    connect(&mut HostConnection::open(NEW, 0), &mut guest);
}

#[test]
fn messages_of_an_old_connection_are_dropped_by_the_guest() {
    let (mut old, mut guest) = connected();
    connect(&mut HostConnection::open(NEW, 0), &mut guest);
    old.send(v1::Ping { id: 1 }).expect("short");
    to_guest(&mut old, &mut guest);
    assert_eq!(guest_events(&mut guest), []);
}

#[test]
fn a_repeated_hello_keeps_the_connection() {
    let (mut host, mut guest) = connected();
    host.say_hello();
    to_guest(&mut host, &mut guest);
    assert!(matches!(guest_events(&mut guest).as_slice(), [GuestEvent::HelloAgain(_)]));
    guest.reply(v1::HelloReply::default());
    to_host(&mut guest, &mut host);
    assert_eq!(host_events(&mut host), []);
}

#[test]
fn nothing_is_believed_before_the_nonce_was_echoed() {
    let mut host = HostConnection::open(NEW, 0);
    let mut wire = Vec::new();
    let message = v1::GuestMessage { kind: Some(pong(1).into()) };
    frame::encode(Direction::FromGuest, NEW, Check::Crc, &message.encode_to_vec(), &mut wire).expect("short");
    host.receive(&wire).expect("dropped, not refused");
    assert_eq!(host_events(&mut host), []);
}

#[test]
fn a_guest_that_ignores_its_window_is_cut_off() {
    let (mut host, mut guest) = connected();
    let stream = host.exec(process(), false).expect("short");
    let chunk = v1::OutputData { stream_id: stream.get(), output: Output::Stdout.into(), data: vec![1; MAX_CHUNK] };
    for _ in 0..Width::NARROW.bytes() / MAX_CHUNK {
        guest.send(chunk.clone()).expect("short");
    }
    to_host(&mut guest, &mut host);
    guest.send(chunk).expect("short");
    let refused = host.receive(guest.outgoing());
    assert!(matches!(refused, Err(Violation::Window { stream: 1, .. })), "{refused:?}");
}

#[test]
fn standard_input_waits_for_credit() {
    let (mut host, mut guest) = connected();
    let stream = host.exec(process(), true).expect("short");
    let data = vec![7; Width::NARROW.bytes() + 10];
    let taken = host.write_stdin(stream, &data);
    assert_eq!(taken, Width::NARROW.bytes());
    assert_eq!(host.write_stdin(stream, &data[taken..]), 0);
    guest.send(v1::StdinCredit { stream_id: stream.get(), bytes: 4 }).expect("short");
    to_host(&mut guest, &mut host);
    assert_eq!(host_events(&mut host), [HostEvent::StdinWritable { stream }]);
    assert_eq!(host.write_stdin(stream, &data[taken..]), 4);
    host.close_stdin(stream);
    assert_eq!(host.write_stdin(stream, &data[taken..]), 0);
}

/// As many streams as have more than [`COMMON`] to say.
fn streams(host: &mut HostConnection) -> Vec<StreamId> {
    (0..20).map(|_| host.exec(process(), true).expect("short")).collect()
}

#[test]
fn the_input_of_all_streams_is_bounded_and_none_is_left_without() {
    let (mut host, mut guest) = connected_with(crate::PROTOCOL);
    let (streams, data) = (streams(&mut host), vec![7; Width::WIDE.bytes()]);
    let taken: Vec<_> = streams
        .iter()
        .map(|stream| {
            let taken = host.write_stdin(*stream, &data);
            host.written(host.outgoing().len());
            taken
        })
        .collect();
    assert_eq!(taken.iter().sum::<usize>(), streams.len() * Width::NARROW.bytes() + COMMON);
    assert!(taken.iter().all(|taken| *taken >= Width::NARROW.bytes()), "{taken:?}");
    assert_eq!(host.input_to_go_on().count(), 0);

    // What one has read is there for others, and so is what one left.
    let (first, second, last) = (streams[0], streams[1], streams[19]);
    let read = u32::try_from(Width::WIDE.bytes()).unwrap();
    guest.send(v1::StdinCredit { stream_id: first.get(), bytes: read }).expect("short");
    to_host(&mut guest, &mut host);
    assert!(host.input_to_go_on().any(|stream| stream == last));
    assert_eq!(host.write_stdin(last, &data), Width::WIDE.bytes() - Width::NARROW.bytes());
    host.written(host.outgoing().len());
    assert_eq!(host.input_to_go_on().count(), 0);
    guest.send(v1::ExecExited { stream_id: second.get(), status: Some(ProcessEnd::Code(0).into()) }).expect("short");
    to_host(&mut guest, &mut host);
    assert!(host.input_to_go_on().count() > 0);
}

/// A guest that prints on every output of its streams as much as it may.
struct Printing {
    host: HostConnection,
    guest: GuestConnection,
    windows: BTreeMap<(StreamId, Output), SendWindow>,
}

impl Printing {
    fn new(streams: usize) -> Self {
        let (mut host, guest) = connected_with(crate::PROTOCOL);
        let streams: Vec<_> = (0..streams).map(|_| host.exec(process(), false).expect("short")).collect();
        let outputs = streams.into_iter().flat_map(|stream| [(stream, Output::Stdout), (stream, Output::Stderr)]);
        let windows = outputs.map(|output| (output, SendWindow::new(guest.widths().output))).collect();
        Self { host, guest, windows }
    }

    /// What the daemon is told then.
    fn print(&mut self) -> Vec<(StreamId, Output, usize)> {
        for ((stream, output), window) in &mut self.windows {
            while window.available() > 0 {
                let len = window.available().min(crate::MAX_RUN);
                self.guest.send_output(stream.get(), *output, len, |_| len).expect("a piece");
                window.sent(len);
            }
        }
        to_host(&mut self.guest, &mut self.host);
        let told = host_events(&mut self.host).into_iter().map(|event| match event {
            HostEvent::Output { stream, output, data } => (stream, output, data.len()),
            other => panic!("{other:?}"),
        });
        told.collect()
    }

    fn read(&mut self, told: Vec<(StreamId, Output, usize)>) {
        for (stream, output, len) in told {
            self.host.consumed(stream, output, len);
        }
        to_guest(&mut self.host, &mut self.guest);
        for event in guest_events(&mut self.guest) {
            if let GuestEvent::Message(message) = event
                && let host_message::Kind::StreamCredit(credit) = *message
            {
                let output = (StreamId(credit.stream_id), credit.output());
                self.windows.get_mut(&output).expect("a stream of ours").grant(credit.bytes);
            }
        }
    }
}

#[test]
fn what_all_streams_print_for_nobody_is_bounded_and_one_that_is_read_has_all_that_it_can_use() {
    const STREAMS: usize = 60;
    let mut printing = Printing::new(STREAMS);
    for _ in 0..8 {
        let told = printing.print();
        printing.read(told);
    }
    // From here on nobody reads.
    let unread: usize = printing.print().into_iter().map(|(_, _, len)| len).sum();
    let least = 2 * STREAMS * Width::GROWING.begins();
    assert!(unread <= least + COMMON_OUTPUT && unread > least + COMMON_OUTPUT / 2, "{unread}");
    assert!(printing.print().is_empty());

    let mut alone = Printing::new(1);
    for _ in 0..5 {
        let told = alone.print();
        alone.read(told);
    }
    assert!(alone.windows.values().all(|window| window.available() == Width::WIDE.bytes()));
}

#[test]
fn the_delimiters_at_the_beginning_are_not_kept() {
    let (host, _) = connected();
    assert_eq!(host.wire.outgoing.memory(), 0);
}

#[test]
fn input_waits_while_the_port_takes_nothing() {
    let (mut host, _) = connected_with(crate::PROTOCOL);
    let (streams, data) = (streams(&mut host), vec![7; Width::WIDE.bytes()]);
    for stream in &streams {
        host.write_stdin(*stream, &data);
    }
    assert!(host.outgoing().len() < INPUT_UNSENT + 2 * Width::WIDE.bytes(), "{}", host.outgoing().len());
    assert_eq!(host.input_to_go_on().count(), 0);
    host.written(host.outgoing().len());
    assert!(host.input_to_go_on().any(|stream| stream == streams[19]));
}

#[test]
fn single_bytes_of_input_cost_no_more_than_others() {
    let (mut host, _) = connected_with(crate::PROTOCOL);
    let stream = host.exec(process(), true).expect("short");
    let taken = std::iter::repeat_with(|| host.write_stdin(stream, &[7])).take_while(|taken| *taken == 1).count();
    assert!(taken < Width::WIDE.bytes());
    assert!(host.outgoing().len() < INPUT_UNSENT + MAX_CHUNK, "{}", host.outgoing().len());
}

#[test]
fn an_output_is_closed_once() {
    let (mut host, mut guest) = connected();
    let stream = host.exec(process(), false).expect("short");
    for output in [Output::Stdout, Output::Stdout, Output::Unspecified, Output::Stdout] {
        guest.send(v1::OutputClosed { stream_id: stream.get(), output: output.into() }).expect("short");
    }
    to_host(&mut guest, &mut host);
    assert_eq!(host_events(&mut host), [HostEvent::OutputClosed { stream, output: Output::Stdout }]);
}

#[test]
fn what_a_guest_says_without_end_is_heard_once() {
    let (mut host, mut guest) = connected();
    let stream = host.exec(process(), false).expect("short");
    for pid in 1..100 {
        guest.send(v1::ExecStarted { stream_id: stream.get(), pid }).expect("short");
    }
    to_host(&mut guest, &mut host);
    assert_eq!(host_events(&mut host), [HostEvent::ExecStarted { stream, pid: 1 }]);
}

#[test]
fn an_abandoned_stream_of_an_old_guest_is_killed_and_reports_only_its_end() {
    let (mut host, mut guest) = connected();
    let stream = host.exec(process(), false).expect("short");
    let output = v1::OutputData { stream_id: stream.get(), output: Output::Stdout.into(), data: vec![1; MAX_CHUNK] };
    guest.send(output.clone()).expect("short");
    to_host(&mut guest, &mut host);
    host.abandon(stream);
    for _ in 0..100 {
        guest.send(output.clone()).expect("short");
        to_host(&mut guest, &mut host);
    }
    let status = Some(ProcessEnd::Signal(9).into());
    guest.send(v1::ExecExited { stream_id: stream.get(), status }).expect("short");
    to_host(&mut guest, &mut host);
    assert_eq!(host_events(&mut host), [HostEvent::ExecEnded { stream, end: ProcessEnd::Signal(9) }]);
    to_guest(&mut host, &mut guest);
    let killed = GuestEvent::Message(Box::new(v1::Signal { stream_id: stream.get(), number: 9 }.into()));
    assert!(guest_events(&mut guest).contains(&killed));
}

#[test]
fn an_abandoned_stream_is_hung_up_where_the_guest_knows_how() {
    let (mut host, mut guest) = (HostConnection::open(NEW, 0), GuestConnection::default());
    to_guest(&mut host, &mut guest);
    guest_events(&mut guest);
    guest.reply(v1::HelloReply { protocol: 1, ..v1::HelloReply::default() });
    to_host(&mut guest, &mut host);
    assert!(host.knows_streams());
    let stream = host.connect(80).expect("short");
    host.abandon(stream);
    host.abandon(stream);
    to_guest(&mut host, &mut guest);
    let hung_up = GuestEvent::Message(Box::new(v1::Hangup { stream_id: stream.get() }.into()));
    assert_eq!(guest_events(&mut guest).iter().filter(|event| **event == hung_up).count(), 1);
}

#[test]
fn after_a_hangup_nothing_is_queued() {
    let (_, mut guest) = connected();
    guest.hang_up();
    guest.send(pong(1)).expect("dropped");
    assert_eq!(guest.outgoing(), [] as [u8; 0]);
    connect(&mut HostConnection::open(NEW, 0), &mut guest);
}

proptest! {
    #[test]
    fn a_new_connection_stands_whatever_was_on_the_wire_before(
        to_guest_before in prop::collection::vec(any::<u8>(), 0..400),
        to_host_before in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        let (mut host, mut guest) = (HostConnection::open(NEW, 0), GuestConnection::default());
        guest.receive(&to_guest_before);
        host.receive(&to_host_before).expect("garbage is no violation");
        connect(&mut host, &mut guest);
    }

    #[test]
    fn a_guest_that_writes_nonsense_in_good_frames_is_refused_without_a_panic(
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 1..20),
    ) {
        let (mut host, _) = connected();
        host.exec(process(), true).expect("short");
        let mut wire = Vec::new();
        for payload in payloads {
            frame::encode(Direction::FromGuest, OLD, Check::Sum, &payload, &mut wire).expect("short");
        }
        let _ = host.receive(&wire);
        let _ = host_events(&mut host);
    }

    #[test]
    fn a_host_that_writes_nonsense_in_good_frames_is_ignored_without_a_panic(
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 1..20),
    ) {
        let (mut host, mut guest) = connected();
        let mut wire = Vec::new();
        for payload in payloads {
            frame::encode(Direction::FromHost, OLD, Check::Sum, &payload, &mut wire).expect("short");
        }
        guest.receive(&wire);
        let _ = guest_events(&mut guest);
        host.send(v1::Ping { id: 7 }).expect("short");
        to_guest(&mut host, &mut guest);
        let ping = GuestEvent::Message(Box::new(v1::Ping { id: 7 }.into()));
        prop_assert!(guest_events(&mut guest).contains(&ping));
    }
}

/// The first byte of each frame says which checksum it has.
fn kinds(wire: &[u8]) -> Vec<u8> {
    let frames = wire.split(|byte| *byte == DELIMITER).filter(|frame| !frame.is_empty());
    frames.map(|frame| crate::cobs::decode(frame, &mut Vec::new()).expect("a frame")[0]).collect()
}

#[test]
fn checksums_are_such_as_both_ends_understand() {
    for (daemon, agent, sums) in [(crate::PROTOCOL, crate::PROTOCOL, true), (crate::PROTOCOL, 1, false), (0, 1, false)]
    {
        let (mut host, mut guest) = (HostConnection::open(OLD, 0), GuestConnection::default());
        host.hello.protocol = daemon;
        host.wire.clear();
        host.say_hello();
        assert_eq!(kinds(host.outgoing()), [0x01], "who says hello does not know yet");
        to_guest(&mut host, &mut guest);
        guest_events(&mut guest);
        guest.reply(v1::HelloReply { protocol: agent, ..v1::HelloReply::default() });
        assert_eq!(kinds(guest.outgoing()), [if daemon >= 2 { 0x12 } else { 0x02 }]);
        to_host(&mut guest, &mut host);
        host.send(v1::Ping { id: 1 }).expect("short");
        assert_eq!(kinds(host.outgoing()), [if sums { 0x11 } else { 0x01 }], "{daemon} with {agent}");
        to_guest(&mut host, &mut guest);
        assert_eq!(guest_events(&mut guest), [GuestEvent::Message(Box::new(v1::Ping { id: 1 }.into()))]);
    }
}

#[test]
fn what_a_stream_printed_is_read_to_where_it_is_sent_from() {
    for protocol in [0, 2, crate::PROTOCOL] {
        let (mut host, mut guest) = connected_with(protocol);
        let stream = host.exec(process(), false).expect("short");
        for len in [0, 1, crate::MAX_CHUNK, 300, 0, crate::MAX_CHUNK] {
            let fill = |room: &mut [u8]| {
                room[..len].fill(u8::try_from(len % 251).unwrap());
                len
            };
            guest.send_output(stream.get(), Output::Stdout, crate::MAX_CHUNK, fill).expect("a piece");
            to_host(&mut guest, &mut host);
            let events = host_events(&mut host);
            if len == 0 {
                assert_eq!(events, []);
                continue;
            }
            let data = vec![u8::try_from(len % 251).unwrap(); len];
            assert_eq!(events, [HostEvent::Output { stream, output: Output::Stdout, data }], "with {protocol}");
            host.consumed(stream, Output::Stdout, len);
        }
    }
}

/// Connected, where both understand no more than `protocol`.
fn connected_with(protocol: u32) -> (HostConnection, GuestConnection) {
    let (mut host, mut guest) = (HostConnection::open(OLD, 0), GuestConnection::default());
    host.hello.protocol = protocol;
    host.wire.clear();
    host.say_hello();
    to_guest(&mut host, &mut guest);
    guest_events(&mut guest);
    guest.reply(v1::HelloReply { protocol, ..v1::HelloReply::default() });
    to_host(&mut guest, &mut host);
    host_events(&mut host);
    (host, guest)
}
