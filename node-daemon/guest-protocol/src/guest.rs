//! The agent's end of the channel, over all connections of the guest's life.

use std::collections::VecDeque;

use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint, encoded_len_varint};

use crate::flow::Widths;
use crate::frame::{DELIMITER, Decoder, Direction, Frame, Nonce, Take, TooLong};
use crate::mask::Mask;
use crate::run::Run;
use crate::spare::Spare;
use crate::v1::{self, guest_message, host_message};
use crate::wire::{PREFIX, Wire};
use crate::{MAX_CHUNK, MAX_RUN};

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
    said: Said,
    wire: Wire,
}

/// What the host said.
#[derive(Debug, Default)]
struct Said {
    events: VecDeque<GuestEvent>,
    /// Input that was announced and is not all there yet.
    run: Option<Run<v1::StdinRun>>,
    spare: Spare,
}

impl Default for GuestConnection {
    fn default() -> Self {
        let decoder = Decoder::new(Direction::FromHost);
        Self { nonce: None, decoder, said: Said::default(), wire: Wire::default() }
    }
}

impl GuestConnection {
    /// Takes bytes as they were read from the port. What cannot be understood is dropped: the host may be newer, or may
    /// have died in the middle of a word.
    pub fn receive(&mut self, bytes: &[u8]) {
        let Self { nonce, decoder, said, wire } = self;
        decoder.feed(bytes, Listener { nonce, said, wire });
    }

    /// Where the next bytes of the port belong, if that is known: to read them there spares a copy.
    pub fn room(&mut self) -> Option<&mut [u8]> {
        Some(self.said.run.as_mut()?.room())
    }

    /// So many bytes were read to [`Self::room`].
    pub fn filled(&mut self, len: usize) {
        self.decoder.skip(len);
        self.said.filled(len);
    }

    pub fn next_event(&mut self) -> Option<GuestEvent> {
        self.said.events.pop_front()
    }

    /// The host closed the port: nothing more is sent until the next hello.
    pub fn hang_up(&mut self) {
        self.nonce = None;
        self.said.forget();
        // All that the host had sent was read by now: what comes next is another one's.
        self.decoder = Decoder::new(Direction::FromHost);
        self.wire.clear();
        // Half a frame that was written already must not swallow the next connection's first one; that one starts with
        // a delimiter of its own, see `receive`.
    }

    /// Takes back the memory of input that was passed on.
    pub fn recycle(&mut self, data: Vec<u8>) {
        self.said.spare.put(data);
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

    /// How wide the windows of this connection's streams are.
    pub const fn widths(&self) -> Widths {
        self.wire.widths()
    }

    /// The most that [`Self::send_output`] sends at once.
    pub const fn longest_output(&self) -> usize {
        if self.wire.takes_runs() { MAX_RUN } else { MAX_CHUNK }
    }

    /// Queues what a stream printed, as [`Self::send`]: `read` is given room for so much, and says how much it filled. It
    /// is read to where it is sent from, since a copy costs an emulated guest as much as the reading.
    pub fn send_output(
        &mut self,
        stream_id: u32,
        output: v1::Output,
        room: usize,
        read: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<(), TooLong> {
        let Some(nonce) = self.nonce else {
            // Nobody hears it, and it was printed all the same.
            read(&mut vec![0; room]);
            return Ok(());
        };
        let from = (Direction::FromGuest, nonce);
        if self.wire.takes_runs() {
            self.wire.push_run(from, room, read, |bytes, sum| {
                let run = v1::OutputRun { stream_id, output: output.into(), bytes, sum };
                v1::GuestMessage { kind: Some(guest_message::Kind::OutputRun(run)) }
            });
            return Ok(());
        }
        self.wire.push_read(from, room, read, |len| output_prefix(stream_id, output, len))
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

impl Said {
    /// What was said on a connection that is gone.
    fn forget(&mut self) {
        self.events.clear();
        self.run = None;
    }

    /// A run begins; its length.
    fn announced(&mut self, head: v1::StdinRun, nonce: Nonce) -> usize {
        let run = Run::begin(head, head.bytes, head.sum, |len| self.spare.take(len));
        self.run = run.map(|run| if head.masked { run.masked(Mask::of(nonce)) } else { run });
        self.run.as_ref().map_or(0, Run::len)
    }

    /// So many bytes more of the run are there.
    fn filled(&mut self, len: usize) {
        let Some(mut run) = self.run.take() else { return };
        run.filled(len);
        if !run.is_whole() {
            self.run = Some(run);
            return;
        }
        let (v1::StdinRun { stream_id, .. }, data) = run.finish();
        // Half a run of a host that died, and another one's zeros behind it. The stream cannot go on without the bytes.
        let kind = data.map_or_else(
            || v1::Hangup { stream_id }.into(),
            |data| host_message::Kind::from(v1::StdinData { stream_id, data }),
        );
        self.events.push_back(GuestEvent::Message(Box::new(kind)));
    }
}

/// Takes what is found in the bytes of the port.
struct Listener<'a> {
    nonce: &'a mut Option<Nonce>,
    said: &'a mut Said,
    wire: &'a mut Wire,
}

impl Take for Listener<'_> {
    fn frame(&mut self, frame: Frame<'_>) -> usize {
        let Some(kind) = decode(frame.payload, &mut self.said.spare) else { return 0 };
        let is_current = *self.nonce == Some(frame.nonce);
        let event = match kind {
            host_message::Kind::Hello(hello) if hello.nonce != frame.nonce.get() => return 0,
            host_message::Kind::Hello(hello) if is_current => GuestEvent::HelloAgain(hello),
            host_message::Kind::Hello(hello) => {
                *self.nonce = Some(frame.nonce);
                // Nothing that was meant for the old connection may reach the new one. A frame that was written in
                // part ends at the delimiter.
                self.said.forget();
                self.wire.clear();
                self.wire.outgoing.push(DELIMITER);
                self.wire.agree(hello.protocol);
                GuestEvent::Connected(hello)
            }
            host_message::Kind::StdinRun(head) if is_current && self.wire.takes_runs() => {
                return self.said.announced(head, frame.nonce);
            }
            host_message::Kind::StdinRun(_) => return 0,
            kind if is_current => GuestEvent::Message(Box::new(kind)),
            _ => return 0,
        };
        self.said.events.push_back(event);
        0
    }

    fn raw(&mut self, bytes: &[u8]) {
        if let Some(run) = &mut self.said.run {
            run.room()[..bytes.len()].copy_from_slice(bytes);
            self.said.filled(bytes.len());
        }
    }
}

fn decode(payload: &[u8], spare: &mut Spare) -> Option<host_message::Kind> {
    if let Some((stream_id, bytes)) = stdin_data(payload) {
        let mut data = spare.take(bytes.len());
        data.clear();
        data.extend_from_slice(bytes);
        return Some(v1::StdinData { stream_id, data }.into());
    }
    v1::HostMessage::decode(payload).ok()?.kind
}

/// A [`v1::StdinData`] as hosts write it, whose bytes need not be copied to be understood; `None`: it is something else.
fn stdin_data(mut payload: &[u8]) -> Option<(u32, &[u8])> {
    const STDIN_DATA: u32 = 17;
    const STREAM_ID: u32 = 1;
    const DATA: u32 = 2;
    let payload = &mut payload;
    let mut is_next =
        |field, kind| (decode_key(payload).ok()? == (field, kind)).then(|| decode_varint(payload).ok())?;
    let len = is_next(STDIN_DATA, WireType::LengthDelimited)?;
    let stream_id = is_next(STREAM_ID, WireType::Varint)?;
    let data_len = is_next(DATA, WireType::LengthDelimited)?;
    let inner = encoded_len_varint(stream_id) + encoded_len_varint(data_len) + 2;
    let is_whole = payload.len() as u64 == data_len && len == inner as u64 + data_len;
    is_whole.then_some((u32::try_from(stream_id).ok()?, *payload))
}

/// An [`v1::OutputData`] in its [`v1::GuestMessage`], up to its `len` bytes.
fn output_prefix(stream_id: u32, output: v1::Output, len: usize) -> Vec<u8> {
    const OUTPUT_DATA: u32 = 19;
    const DATA: u32 = 3;
    let mut inner = v1::OutputData { stream_id, output: output.into(), data: Vec::new() }.encode_to_vec();
    encode_key(DATA, WireType::LengthDelimited, &mut inner);
    encode_varint(len as u64, &mut inner);
    let mut prefix = Vec::with_capacity(PREFIX);
    encode_key(OUTPUT_DATA, WireType::LengthDelimited, &mut prefix);
    encode_varint((inner.len() + len) as u64, &mut prefix);
    prefix.extend_from_slice(&inner);
    prefix
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_is_understood_as_the_message_that_it_is() {
        for (stream_id, len) in [(1, 1), (127, 127), (128, 128), (70_000, 20_000), (u32::MAX, MAX_CHUNK)] {
            let data = vec![7; len];
            let message = v1::HostMessage { kind: Some(v1::StdinData { stream_id, data: data.clone() }.into()) };
            let payload = message.encode_to_vec();
            assert_eq!(stdin_data(&payload), Some((stream_id, data.as_slice())));
            let mut spare = Spare::default();
            spare.put(vec![9; len]);
            assert_eq!(decode(&payload, &mut spare), message.kind);
            for cut in [1, len] {
                let cut = &payload[..payload.len() - cut];
                assert_eq!(stdin_data(cut), None);
                assert_eq!(decode(cut, &mut Spare::default()), None);
            }
        }
        let others: [host_message::Kind; 3] =
            [v1::Ping { id: 1 }.into(), v1::StdinClose { stream_id: 1 }.into(), v1::StdinData::default().into()];
        for kind in others {
            let payload = v1::HostMessage { kind: Some(kind.clone()) }.encode_to_vec();
            assert_eq!(stdin_data(&payload), None);
            assert_eq!(decode(&payload, &mut Spare::default()), Some(kind));
        }
    }

    #[test]
    fn what_is_read_in_place_is_the_message_that_it_would_be() {
        for (stream_id, len) in [(1, 1), (127, 127), (128, 128), (70_000, 20_000), (u32::MAX, MAX_CHUNK)] {
            let data: Vec<u8> = (0..=250_u8).cycle().take(len).collect();
            let message = v1::OutputData { stream_id, output: v1::Output::Stderr.into(), data: data.clone() };
            let whole = v1::GuestMessage { kind: Some(guest_message::Kind::OutputData(message)) }.encode_to_vec();
            let prefix = output_prefix(stream_id, v1::Output::Stderr, len);
            assert!(prefix.len() <= PREFIX);
            assert_eq!([prefix, data].concat(), whole, "{len} bytes of {stream_id}");
        }
    }
}
