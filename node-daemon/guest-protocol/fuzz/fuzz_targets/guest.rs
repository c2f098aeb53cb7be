//! A host that says anything to the agent's end of the channel: newer, dead in the middle of a word, or several of them
//! one after the other. It must not panic, and nothing of a connection that is gone may be said to the next one.
#![no_main]

mod input;

use input::Input;
use kibo_guest_protocol::{
    GuestConnection, GuestEvent, Nonce,
    frame::{self, Check, Decoder, Direction, Frame, Take},
    v1::{self, guest_message, host_message},
};
use libfuzzer_sys::fuzz_target;
use prost::Message as _;

fuzz_target!(|data: &[u8]| {
    let mut connection = GuestConnection::default();
    let mut input = Input(data);
    let mut current = None;
    while !input.is_empty() {
        step(&mut connection, &mut input);
        while let Some(event) = connection.next_event() {
            match event {
                GuestEvent::Connected(hello) => {
                    current = Some(Nonce::new(hello.nonce));
                    connection.reply(v1::HelloReply::default());
                }
                GuestEvent::HelloAgain(hello) => assert_eq!(current, Some(Nonce::new(hello.nonce))),
                GuestEvent::Message(_) => assert!(connection.is_connected(), "a word of nobody"),
            }
        }
        check_outgoing(&mut connection, current);
    }
});

fn step(connection: &mut GuestConnection, input: &mut Input<'_>) {
    match input.byte() % 9 {
        0 => connection.receive(input.bytes()),
        1 => {
            let nonce = Nonce::new(u64::from(input.byte() % 3));
            receive(connection, nonce, input.bytes());
        }
        2 => {
            let nonce = u64::from(input.byte() % 3);
            let protocol = u32::from(input.byte() % 5);
            say(connection, Nonce::new(nonce), v1::Hello { nonce, protocol, ..v1::Hello::default() });
        }
        3 => say(connection, Nonce::new(u64::from(input.byte() % 3)), v1::Ping::default()),
        4 => connection.hang_up(),
        5 => {
            let (nonce, bytes) = (Nonce::new(u64::from(input.byte() % 3)), u32::from(input.byte()) * 300);
            let masked = input.byte().is_multiple_of(2);
            say(connection, nonce, v1::StdinRun { stream_id: 1, bytes, sum: 0, masked });
        }
        6 => {
            let bytes = input.bytes();
            let len = connection.room().map_or(0, |room| {
                let len = bytes.len().min(room.len());
                room[..len].copy_from_slice(&bytes[..len]);
                len
            });
            connection.filled(len);
        }
        7 => {
            let bytes = input.bytes();
            let fill = |room: &mut [u8]| {
                room.copy_from_slice(bytes);
                bytes.len()
            };
            connection.send_output(1, v1::Output::Stdout, bytes.len(), fill).expect("it is short");
        }
        _ => {
            let data = vec![0; usize::from(input.byte()) * 101];
            connection.send(v1::LogData { data, ..v1::LogData::default() }).expect("it is short");
        }
    }
}

fn receive(connection: &mut GuestConnection, nonce: Nonce, payload: &[u8]) {
    let mut wire = Vec::new();
    let check = if payload.len().is_multiple_of(2) { Check::Sum } else { Check::Crc };
    frame::encode(Direction::FromHost, nonce, check, payload, &mut wire).expect("it is short");
    connection.receive(&wire);
}

fn say(connection: &mut GuestConnection, nonce: Nonce, kind: impl Into<host_message::Kind>) {
    let message = v1::HostMessage { kind: Some(kind.into()) };
    receive(connection, nonce, &message.encode_to_vec());
}

/// Takes what the newest host may hear.
struct Newest(Option<Nonce>);

impl Take for Newest {
    fn frame(&mut self, frame: Frame<'_>) -> usize {
        assert_eq!(Some(frame.nonce), self.0, "said to another host");
        match v1::GuestMessage::decode(frame.payload).expect("it can be read").kind {
            Some(guest_message::Kind::OutputRun(run)) => run.bytes as usize,
            _ => 0,
        }
    }

    fn raw(&mut self, _: &[u8]) {}
}

/// All that is said is said to the newest host.
fn check_outgoing(connection: &mut GuestConnection, current: Option<Nonce>) {
    let mut decoder = Decoder::new(Direction::FromGuest);
    decoder.feed(connection.outgoing(), Newest(current));
    assert_eq!(decoder.run(), 0, "what was announced is said");
    assert_eq!(decoder.broken(), 0, "what is said can be read");
    assert!(connection.is_connected() || connection.outgoing().is_empty(), "said to nobody");
    connection.written(connection.outgoing().len());
}
