//! A guest that says anything to the daemon's end of the channel, while the daemon uses it. It must not panic, must
//! hand out no more than it granted, and must keep no more than a window for each output that nobody reads.
#![no_main]

mod input;

use std::collections::HashMap;

use input::Input;
use kibo_guest_protocol::{
    GuestConnection, HostConnection, HostEvent, Nonce, StreamId,
    flow::Width,
    frame::{self, Check, Direction},
    v1::{self, Output, guest_message},
};
use libfuzzer_sys::fuzz_target;
use prost::Message as _;

const NONCE: Nonce = Nonce::new(0x0102_0304_0506_0708);

struct Play {
    connection: HostConnection,
    /// An agent that keeps to the protocol, for what cannot be made up so easily.
    agent: GuestConnection,
    streams: Vec<StreamId>,
    /// What was handed out and not consumed.
    unread: HashMap<(StreamId, i32), usize>,
}

fuzz_target!(|data: &[u8]| {
    let (connection, mut agent) = (HostConnection::open(NONCE, 0), GuestConnection::default());
    agent.receive(connection.outgoing());
    let mut play = Play { connection, agent, streams: Vec::new(), unread: HashMap::new() };
    let mut input = Input(data);
    // The daemon closes the port when the guest breaks the protocol.
    while !input.is_empty() && play.step(&mut input) {}
});

impl Play {
    fn step(&mut self, input: &mut Input<'_>) -> bool {
        let goes_on = match input.byte() % 10 {
            0 => self.receive(input.bytes()),
            1 => self.receive_frame(input.bytes()),
            2 => {
                let protocol = u32::from(input.byte() % 5);
                self.say(v1::HelloReply { nonce: NONCE.get(), protocol, ..v1::HelloReply::default() })
            }
            8 => {
                let (stream_id, output) = (u32::from(input.byte() % 4), i32::from(input.byte() % 4));
                self.say(v1::OutputRun { stream_id, output, bytes: u32::from(input.byte()) * 300, sum: 0 })
            }
            9 => self.run(u32::from(input.byte() % 4), usize::from(input.byte()) * 257),
            3 => self.say(v1::OutputData {
                stream_id: u32::from(input.byte() % 4),
                output: i32::from(input.byte() % 4),
                data: vec![7; usize::from(input.byte()) * 509],
            }),
            4 => {
                if let Ok(stream) = self.connection.exec(v1::Process::default(), input.byte().is_multiple_of(2)) {
                    self.streams.push(stream);
                }
                true
            }
            5 => {
                self.consume(input.byte(), usize::from(input.byte()) * 509);
                true
            }
            6 => {
                if let Some(stream) = self.stream(input.byte()) {
                    self.connection.abandon(stream);
                    self.unread.retain(|(of, _), _| *of != stream);
                }
                true
            }
            _ => {
                if let Some(stream) = self.stream(input.byte()) {
                    let (data, room) = (input.bytes(), self.connection.stdin_room(stream));
                    let taken = self.connection.write_stdin(stream, data);
                    assert!(taken <= room, "more than the guest granted");
                    if data.is_empty() {
                        self.connection.close_stdin(stream);
                    }
                }
                true
            }
        };
        // The port takes all of it.
        self.connection.written(self.connection.outgoing().len());
        self.take_events();
        assert!(self.connection.open_streams().count() <= self.streams.len(), "a stream that nobody opened");
        goes_on
    }

    fn stream(&self, choice: u8) -> Option<StreamId> {
        self.streams.get(usize::from(choice) % self.streams.len().max(1)).copied()
    }

    fn receive(&mut self, bytes: &[u8]) -> bool {
        self.connection.receive(bytes).is_ok()
    }

    fn receive_frame(&mut self, payload: &[u8]) -> bool {
        let mut wire = Vec::new();
        let check = if payload.len().is_multiple_of(2) { Check::Sum } else { Check::Crc };
        frame::encode(Direction::FromGuest, NONCE, check, payload, &mut wire).expect("it is short");
        self.receive(&wire)
    }

    fn say(&mut self, kind: impl Into<guest_message::Kind>) -> bool {
        let message = v1::GuestMessage { kind: Some(kind.into()) };
        self.receive_frame(&message.encode_to_vec())
    }

    /// Output as an honest agent sends it.
    fn run(&mut self, stream_id: u32, len: usize) -> bool {
        self.agent.send_output(stream_id, Output::Stdout, len, |_| len).expect("a piece");
        let wire = self.agent.outgoing().to_vec();
        self.agent.written(wire.len());
        self.receive(&wire)
    }

    fn take_events(&mut self) {
        while let Some(event) = self.connection.next_event() {
            match event {
                HostEvent::Output { stream, output, data } => {
                    assert!(self.streams.contains(&stream), "output of a stream that nobody opened");
                    let unread = self.unread.entry((stream, output.into())).or_default();
                    *unread += data.len();
                    assert!(
                        *unread <= Width::WIDE.bytes(),
                        "the guest made the daemon hold {unread} bytes of one output"
                    );
                }
                HostEvent::ExecEnded { stream, .. } => self.unread.retain(|(of, _), _| *of != stream),
                _ => {}
            }
        }
    }

    fn consume(&mut self, choice: u8, len: usize) {
        let Some(stream) = self.stream(choice) else { return };
        for output in [Output::Stdout, Output::Stderr] {
            if let Some(unread) = self.unread.get_mut(&(stream, output.into())) {
                let len = len.min(*unread);
                *unread -= len;
                self.connection.consumed(stream, output, len);
            }
        }
    }
}
