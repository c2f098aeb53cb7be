//! The agent's end of the channel, over all connections of the guest's life.

use std::collections::VecDeque;

use prost::Message;

use crate::frame::{DELIMITER, Decoder, Direction, Nonce, TooLong};
use crate::host::Wire;
use crate::v1::{self, guest_message, host_message};

/// What the host said.
#[derive(Clone, Debug, PartialEq)]
pub enum GuestEvent {
    /// A new connection: all streams of the one before are void. Answer with [`GuestConnection::reply`] first.
    Connected(v1::Hello),
    /// The same hello again: answer it, nothing else changes.
    HelloAgain(v1::Hello),
    Message(Box<host_message::Kind>),
}

#[derive(Debug)]
pub struct GuestConnection {
    nonce: Option<Nonce>,
    decoder: Decoder,
    wire: Wire,
    events: VecDeque<GuestEvent>,
    buffer: Vec<u8>,
}

impl Default for GuestConnection {
    fn default() -> Self {
        Self {
            nonce: None,
            decoder: Decoder::new(Direction::FromHost),
            wire: Wire::default(),
            events: VecDeque::new(),
            buffer: Vec::new(),
        }
    }
}

impl GuestConnection {
    /// Takes bytes as they were read from the port. What cannot be understood is dropped: the host may be newer, or may
    /// have died in the middle of a word.
    pub fn receive(&mut self, bytes: &[u8]) {
        let Self { nonce: current, decoder, wire, events, .. } = self;
        decoder.feed(bytes, |frame| {
            let Ok(v1::HostMessage { kind: Some(kind) }) = v1::HostMessage::decode(frame.payload) else {
                return;
            };
            match kind {
                host_message::Kind::Hello(hello) if hello.nonce != frame.nonce.get() => {}
                host_message::Kind::Hello(hello) if *current == Some(frame.nonce) => {
                    events.push_back(GuestEvent::HelloAgain(hello));
                }
                host_message::Kind::Hello(hello) => {
                    *current = Some(frame.nonce);
                    // Nothing that was meant for the old connection may reach the new one. A frame that was written in
                    // part ends at the delimiter.
                    events.clear();
                    wire.clear();
                    wire.bytes.push(DELIMITER);
                    events.push_back(GuestEvent::Connected(hello));
                }
                kind if *current == Some(frame.nonce) => {
                    events.push_back(GuestEvent::Message(Box::new(kind)));
                }
                _ => {}
            }
        });
    }

    pub fn next_event(&mut self) -> Option<GuestEvent> {
        self.events.pop_front()
    }

    /// The host closed the port: nothing more is sent until the next hello.
    pub fn hang_up(&mut self) {
        self.nonce = None;
        self.events.clear();
        self.wire.clear();
        // Half a frame that was written already must not swallow the next connection's first one; that one starts with
        // a delimiter of its own, see `receive`.
    }

    pub const fn is_connected(&self) -> bool {
        self.nonce.is_some()
    }

    /// Answers a hello.
    pub fn reply(&mut self, mut reply: v1::HelloReply) {
        if let Some(nonce) = self.nonce {
            reply.nonce = nonce.get();
            self.send(reply).expect("a reply is short");
        }
    }

    /// Queues a message; dropped while nobody is connected.
    pub fn send(&mut self, message: impl Into<guest_message::Kind>) -> Result<(), TooLong> {
        let Some(nonce) = self.nonce else {
            return Ok(());
        };
        let message = v1::GuestMessage { kind: Some(message.into()) };
        self.wire.push(Direction::FromGuest, nonce, &message)
    }

    /// A buffer for [`Self::send_output`], which comes back here: to ask for memory for each piece costs an emulated
    /// guest more than to copy it.
    pub fn take_buffer(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }

    /// Queues what a stream printed, as [`Self::send`]; nothing when `data` is empty.
    pub fn send_output(&mut self, stream_id: u32, output: v1::Output, data: Vec<u8>) -> Result<(), TooLong> {
        let is_empty = data.is_empty();
        let message = v1::OutputData { stream_id, output: output.into(), data };
        let message = v1::GuestMessage { kind: Some(guest_message::Kind::OutputData(message)) };
        let nonce = self.nonce.filter(|_| !is_empty);
        let queued = nonce.map_or(Ok(()), |nonce| self.wire.push(Direction::FromGuest, nonce, &message));
        if let Some(guest_message::Kind::OutputData(message)) = message.kind {
            self.buffer = message.data;
        }
        queued
    }

    /// What is to be written to the port.
    pub fn outgoing(&self) -> &[u8] {
        self.wire.outgoing()
    }

    /// The first `len` bytes of [`Self::outgoing`] were written.
    pub fn written(&mut self, len: usize) {
        self.wire.written(len);
    }
}
