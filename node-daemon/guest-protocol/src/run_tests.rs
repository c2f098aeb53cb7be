//! Runs over a connection of two ends, and what may happen to them on their way.

use crate::flow::Width;
use crate::frame::{self, Check, Direction};
use crate::host::Violation;
use crate::v1::{self, Output, guest_message, host_message};
use crate::{GuestConnection, GuestEvent, HostConnection, HostEvent, MAX_RUN, Nonce, PROTOCOL, StreamId, sum};
use proptest::prelude::*;
use prost::Message as _;

const OLD: Nonce = Nonce::new(0x0102_0304_0506_0708);
const NEW: Nonce = Nonce::new(2);

struct Ends {
    host: HostConnection,
    guest: GuestConnection,
    stream: StreamId,
}

impl Ends {
    /// Connected, with one stream.
    fn new(agent: u32) -> Self {
        let mut host = HostConnection::open(OLD, 0);
        let mut guest = GuestConnection::default();
        connect(&mut host, &mut guest, agent);
        let stream = host.exec(v1::Process::default(), true).expect("short");
        let mut ends = Self { host, guest, stream };
        assert_eq!(ends.host_writes().len(), 1);
        ends
    }

    fn host_writes(&mut self) -> Vec<GuestEvent> {
        self.guest.receive(self.host.outgoing());
        self.host.written(self.host.outgoing().len());
        said(&mut self.guest)
    }

    fn guest_writes(&mut self) -> Vec<HostEvent> {
        let wire = self.wire_of_guest();
        self.host.receive(&wire).expect("an honest guest");
        std::iter::from_fn(|| self.host.next_event()).collect()
    }

    fn wire_of_guest(&mut self) -> Vec<u8> {
        let wire = self.guest.outgoing().to_vec();
        self.guest.written(wire.len());
        wire
    }

    fn print(&mut self, bytes: &[u8]) {
        let fill = |room: &mut [u8]| {
            room[..bytes.len()].copy_from_slice(bytes);
            bytes.len()
        };
        self.guest.send_output(self.stream.get(), Output::Stdout, bytes.len(), fill).expect("a piece");
    }

    fn output(&self, data: &[u8]) -> HostEvent {
        HostEvent::Output { stream: self.stream, output: Output::Stdout, data: data.to_vec() }
    }
}

fn connect(host: &mut HostConnection, guest: &mut GuestConnection, agent: u32) {
    guest.receive(host.outgoing());
    host.written(host.outgoing().len());
    let said = said(guest);
    assert!(matches!(said.as_slice(), [GuestEvent::Connected(_)]), "{said:?}");
    guest.reply(v1::HelloReply { protocol: agent, ..v1::HelloReply::default() });
    host.receive(guest.outgoing()).expect("an honest guest");
    guest.written(guest.outgoing().len());
    assert!(matches!(host.next_event(), Some(HostEvent::Connected(_))));
}

fn said(guest: &mut GuestConnection) -> Vec<GuestEvent> {
    std::iter::from_fn(|| guest.next_event()).collect()
}

fn input(stream: StreamId, data: &[u8]) -> GuestEvent {
    let data = v1::StdinData { stream_id: stream.get(), data: data.to_vec() };
    GuestEvent::Message(Box::new(data.into()))
}

/// Where `bytes` lie in `wire` as they are.
fn lies_in(wire: &[u8], bytes: &[u8]) -> bool {
    wire.windows(bytes.len()).any(|window| window == bytes)
}

#[test]
fn bytes_travel_as_they_are_where_both_ends_know_runs_and_nobody_masks_them() {
    for (agent, as_they_are) in [(PROTOCOL, false), (3, true), (2, false), (1, false)] {
        let mut ends = Ends::new(agent);
        let bytes = [0, 1, 0, 0, 2, 255].repeat(50);
        assert_eq!(ends.host.write_stdin(ends.stream, &bytes), bytes.len());
        assert_eq!(lies_in(ends.host.outgoing(), &bytes), as_they_are, "to an agent of {agent}");
        let stream = ends.stream;
        assert_eq!(ends.host_writes(), [input(stream, &bytes)]);
    }
    let mut ends = Ends::new(PROTOCOL);
    let bytes = [0, 1, 0, 0, 2, 255].repeat(50);
    ends.print(&bytes);
    assert!(lies_in(ends.guest.outgoing(), &bytes));
    let output = ends.output(&bytes);
    assert_eq!(ends.guest_writes(), [output]);
}

#[test]
fn an_older_daemon_gets_no_runs() {
    let mut guest = GuestConnection::default();
    let mut wire = Vec::new();
    let hello = v1::Hello { nonce: OLD.get(), protocol: 2, ..v1::Hello::default() };
    let message = v1::HostMessage { kind: Some(hello.into()) };
    frame::encode(Direction::FromHost, OLD, Check::Crc, &message.encode_to_vec(), &mut wire).expect("short");
    guest.receive(&wire);
    guest.reply(v1::HelloReply { protocol: PROTOCOL, ..v1::HelloReply::default() });
    let bytes = [0; 100];
    let fill = |room: &mut [u8]| {
        room.copy_from_slice(&bytes);
        bytes.len()
    };
    guest.send_output(1, Output::Stdout, bytes.len(), fill).expect("a piece");
    assert!(!lies_in(guest.outgoing(), &bytes));
}

#[test]
fn frames_within_a_run_are_bytes_like_others() {
    let mut ends = Ends::new(PROTOCOL);
    let mut forged = vec![0];
    let message = v1::GuestMessage { kind: Some(v1::ShuttingDown {}.into()) };
    frame::encode(Direction::FromGuest, OLD, Check::Sum, &message.encode_to_vec(), &mut forged).expect("short");
    ends.print(&forged);
    let output = ends.output(&forged);
    assert_eq!(ends.guest_writes(), [output]);
    let mut forged = vec![0];
    let message = v1::HostMessage { kind: Some(v1::Shutdown::default().into()) };
    frame::encode(Direction::FromHost, OLD, Check::Sum, &message.encode_to_vec(), &mut forged).expect("short");
    ends.host.write_stdin(ends.stream, &forged);
    let stream = ends.stream;
    assert_eq!(ends.host_writes(), [input(stream, &forged)]);
}

#[test]
fn half_a_run_of_a_daemon_that_died_neither_swallows_a_hello_nor_becomes_input() {
    for cut in [1, 100, MAX_RUN - 1] {
        let mut ends = Ends::new(PROTOCOL);
        // Zeros: what the next daemon fills it with would make it whole.
        ends.host.write_stdin(ends.stream, &[&[1], vec![0; MAX_RUN - 1].as_slice()].concat());
        let wire = ends.host.outgoing();
        ends.guest.receive(&wire[..wire.len() - cut]);
        let mut host = HostConnection::open(NEW, 0);
        connect(&mut host, &mut ends.guest, PROTOCOL);
        host.send(v1::Ping { id: 7 }).expect("short");
        ends.host = host;
        assert_eq!(ends.host_writes(), [GuestEvent::Message(Box::new(v1::Ping { id: 7 }.into()))]);
    }
}

#[test]
fn half_a_run_that_others_filled_ends_its_stream() {
    let mut ends = Ends::new(PROTOCOL);
    ends.host.write_stdin(ends.stream, &[7; 1000]);
    let wire = ends.host.outgoing().to_vec();
    ends.guest.receive(&wire[..wire.len() - 10]);
    ends.guest.receive(&[0; 20]);
    let hangup = v1::Hangup { stream_id: ends.stream.get() };
    assert_eq!(said(&mut ends.guest), [GuestEvent::Message(Box::new(hangup.into()))]);
}

#[test]
fn after_the_host_was_seen_to_hang_up_no_run_is_waited_for() {
    let mut ends = Ends::new(PROTOCOL);
    ends.host.write_stdin(ends.stream, &[7; 1000]);
    ends.guest.receive(&ends.host.outgoing()[..500]);
    assert!(ends.guest.room().is_some());
    ends.guest.hang_up();
    assert!(ends.guest.room().is_none());
    // An older daemon: its hello comes without zeros before it.
    let mut host = HostConnection::open(NEW, 0);
    host.written(MAX_RUN);
    connect(&mut host, &mut ends.guest, PROTOCOL);
}

#[test]
fn half_a_run_of_an_old_connection_is_nothing_to_the_new_one() {
    let mut ends = Ends::new(PROTOCOL);
    ends.print(&vec![9; MAX_RUN]);
    let late = ends.wire_of_guest();
    for (number, left) in [10, 60, 5000, late.len()].into_iter().enumerate() {
        let mut host = HostConnection::open(Nonce::new(100 + number as u64), 0);
        host.receive(&late[late.len() - left..]).expect("dropped, not refused");
        connect(&mut host, &mut ends.guest, PROTOCOL);
        assert_eq!(host.next_event(), None);
    }
}

#[test]
fn input_is_read_to_where_it_belongs() {
    let mut ends = Ends::new(PROTOCOL);
    let bytes: Vec<u8> = (0..=255).cycle().take(MAX_RUN).collect();
    for _ in 0..3 {
        ends.host.write_stdin(ends.stream, &bytes);
        ends.host.send(v1::Ping { id: 1 }).expect("short");
        let wire = ends.host.outgoing().to_vec();
        ends.host.written(wire.len());
        let mut rest = wire.as_slice();
        while !rest.is_empty() {
            let len = rest.len().min(4096);
            let read = ends.guest.room().map(|room| {
                let len = len.min(room.len());
                room[..len].copy_from_slice(&rest[..len]);
                len
            });
            match read {
                Some(len) => ends.guest.filled(len),
                None => ends.guest.receive(&rest[..len]),
            }
            rest = &rest[read.unwrap_or(len)..];
        }
        let said = said(&mut ends.guest);
        assert_eq!(said, [input(ends.stream, &bytes), GuestEvent::Message(Box::new(v1::Ping { id: 1 }.into()))]);
        for event in said {
            if let GuestEvent::Message(message) = event
                && let host_message::Kind::StdinData(data) = *message
            {
                ends.guest.recycle(data.data);
            }
        }
        ends.guest.send(v1::StdinCredit { stream_id: ends.stream.get(), bytes: u32::MAX }).expect("short");
        ends.guest_writes();
    }
}

/// What a guest announces, and what it sends then.
fn announced(len: u32, sum: u64, bytes: &[u8]) -> Vec<u8> {
    let run = v1::OutputRun { stream_id: 1, output: Output::Stdout.into(), bytes: len, sum };
    let message = v1::GuestMessage { kind: Some(guest_message::Kind::OutputRun(run)) };
    let mut wire = Vec::new();
    frame::encode(Direction::FromGuest, OLD, Check::Sum, &message.encode_to_vec(), &mut wire).expect("short");
    wire.extend_from_slice(bytes);
    wire
}

#[test]
fn a_guest_that_lies_about_a_run_is_cut_off() {
    let longest = u32::try_from(MAX_RUN).expect("short");
    for len in [0, longest + 1, u32::MAX] {
        let refused = Ends::new(PROTOCOL).host.receive(&announced(len, 0, &[1; 10]));
        assert_eq!(refused, Err(Violation::Run { stream: 1, len }));
    }
    let refused = Ends::new(PROTOCOL).host.receive(&announced(10, sum::of(&[1; 10]), &[2; 10]));
    assert_eq!(refused, Err(Violation::Damaged { stream: 1 }));
}

#[test]
fn a_run_beyond_the_window_is_cut_off() {
    for (agent, width) in [(PROTOCOL, Width::GROWING), (3, Width::WIDE)] {
        let mut ends = Ends::new(agent);
        let run = width.begins().min(MAX_RUN);
        for _ in 0..width.begins() / run {
            ends.print(&vec![1; run]);
        }
        assert_eq!(ends.guest_writes().len(), width.begins() / run);
        ends.print(&[1]);
        let wire = ends.wire_of_guest();
        assert!(matches!(ends.host.receive(&wire), Err(Violation::Window { stream: 1, .. })));
    }
}

/// A client sends what a new daemon would say, behind other bytes, and one byte is lost on the way: whichever it is, the
/// guest takes nobody for its daemon. It would, if the bytes travelled as they are.
#[test]
fn whatever_byte_is_lost_no_input_is_taken_for_a_daemon() {
    let forger = Nonce::new(666);
    let hello = v1::Hello { nonce: forger.get(), protocol: PROTOCOL, ..v1::Hello::default() };
    let message = v1::HostMessage { kind: Some(hello.into()) };
    let mut forged = vec![0];
    frame::encode(Direction::FromHost, forger, Check::Crc, &message.encode_to_vec(), &mut forged).expect("short");
    let taken_for_a_daemon = |agent: u32, lost: usize| {
        let mut ends = Ends::new(agent);
        ends.host.write_stdin(ends.stream, &[b'x'; 20]);
        ends.host.write_stdin(ends.stream, &forged);
        let mut wire = ends.host.outgoing().to_vec();
        if lost >= wire.len() {
            return None;
        }
        wire.remove(lost);
        ends.guest.receive(&wire);
        Some(said(&mut ends.guest).iter().any(|event| matches!(event, GuestEvent::Connected(_))))
    };
    let at_any = |agent| (0..).map_while(|lost| taken_for_a_daemon(agent, lost)).any(|taken| taken);
    assert!(at_any(3), "nothing is proved by this test");
    assert!(!at_any(PROTOCOL));
}

#[test]
fn a_guest_that_is_not_known_to_have_runs_announces_none() {
    let mut ends = Ends::new(2);
    let pong = v1::GuestMessage { kind: Some(v1::Pong { id: 3, time_unix_nanos: 0 }.into()) };
    let mut wire = announced(1000, 0, &[]);
    frame::encode(Direction::FromGuest, OLD, Check::Sum, &pong.encode_to_vec(), &mut wire).expect("short");
    ends.host.receive(&wire).expect("ignored, not refused");
    assert_eq!(ends.host.next_event(), Some(HostEvent::Pong(v1::Pong { id: 3, time_unix_nanos: 0 })));
}

#[test]
fn the_contract_has_the_longest_run_right() {
    let contract = include_str!("../proto/kibotos/guest/v1/guest.proto");
    let said = format!("At most {} KiB.\nmessage StdinRun", MAX_RUN / 1024);
    assert!(contract.contains(&said), "no {said:?}");
}

#[test]
fn a_short_run_does_not_wait_in_the_memory_of_a_long_one() {
    let mut ends = Ends::new(PROTOCOL);
    ends.guest.recycle(Vec::with_capacity(MAX_RUN));
    ends.host.write_stdin(ends.stream, &[7]);
    let said = ends.host_writes();
    let [GuestEvent::Message(message)] = said.as_slice() else { panic!("{said:?}") };
    let host_message::Kind::StdinData(data) = message.as_ref() else { panic!("{message:?}") };
    assert!(data.data.capacity() <= 64, "{}", data.data.capacity());
}

/// A daemon that was rolled back sends no zeros. Where the guest did not see the port close, its hellos are the rest of
/// the run.
#[test]
fn an_older_daemon_after_half_a_run_is_heard_when_its_hellos_have_filled_it() {
    let mut ends = Ends::new(PROTOCOL);
    ends.host.write_stdin(ends.stream, &[7; 1000]);
    let wire = ends.host.outgoing();
    ends.guest.receive(&wire[..wire.len() - 500]);
    let mut host = HostConnection::open(NEW, 0);
    host.written(MAX_RUN);
    let mut hellos = 1;
    loop {
        ends.guest.receive(host.outgoing());
        host.written(host.outgoing().len());
        if said(&mut ends.guest).iter().any(|event| matches!(event, GuestEvent::Connected(_))) {
            break;
        }
        host.say_hello();
        hellos += 1;
        assert!(hellos < 100, "it is never heard");
    }
    assert!(hellos > 1, "the first was the rest of the run");
}

proptest! {
    #[test]
    fn runs_arrive_whatever_the_pieces_they_come_in(
        outputs in prop::collection::vec(prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 1..400), 1..10),
        pieces in prop::collection::vec(1usize..90, 1..40),
    ) {
        let mut ends = Ends::new(PROTOCOL);
        for bytes in &outputs {
            ends.print(bytes);
            ends.host.write_stdin(ends.stream, bytes);
        }
        let (from_guest, from_host) = (ends.wire_of_guest(), ends.host.outgoing().to_vec());
        let cut = |mut rest: &[u8], take: &mut dyn FnMut(&[u8])| {
            for piece in pieces.iter().cycle() {
                let (now, later) = rest.split_at((*piece).min(rest.len()));
                take(now);
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
        };
        cut(&from_guest, &mut |piece| ends.host.receive(piece).expect("an honest guest"));
        cut(&from_host, &mut |piece| ends.guest.receive(piece));
        let expected: Vec<_> = outputs.iter().map(|bytes| ends.output(bytes)).collect();
        prop_assert_eq!(std::iter::from_fn(|| ends.host.next_event()).collect::<Vec<_>>(), expected);
        let expected: Vec<_> = outputs.iter().map(|bytes| input(ends.stream, bytes)).collect();
        prop_assert_eq!(said(&mut ends.guest), expected);
    }

    #[test]
    fn a_new_connection_stands_wherever_the_old_one_was_cut(
        bytes in prop::collection::vec(any::<u8>(), 1..2000),
        to_guest in any::<prop::sample::Index>(),
        to_host in any::<prop::sample::Index>(),
    ) {
        let mut ends = Ends::new(PROTOCOL);
        ends.print(&bytes);
        ends.host.write_stdin(ends.stream, &bytes);
        let (from_guest, from_host) = (ends.wire_of_guest(), ends.host.outgoing());
        ends.guest.receive(&from_host[..to_guest.index(from_host.len())]);
        let mut host = HostConnection::open(NEW, 0);
        host.receive(&from_guest[to_host.index(from_guest.len())..]).expect("garbage is no violation");
        connect(&mut host, &mut ends.guest, PROTOCOL);
        prop_assert_eq!(host.next_event(), None);
    }
}
