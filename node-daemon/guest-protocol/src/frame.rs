//! Frames: `0`-terminated, byte-stuffed, each with a checksum and the nonce of its connection; and runs of raw bytes
//! behind them.
//!
//! Plain form, before stuffing: direction and kind of checksum (1 byte), nonce (8, little endian), payload, checksum of all
//! before it (little endian): CRC-32 (4 bytes), or, where both ends know it, the sums of [`crate::sum`] (8). A reader that
//! starts in the middle, or finds half a frame of a connection that is gone, is back in step at the next 0; its memory is
//! bounded by the longest legal frame whatever arrives.
//!
//! A run is as many bytes as the frame before it says, as they are. Whoever takes frames says how long the run behind each
//! is, and must not believe a frame that is not of its own connection: half a run of a connection that is gone swallows
//! what comes after it. So a host begins with as many zeros as the longest run has, which are empty frames otherwise, and
//! believes nothing until its nonce comes back.

use std::fmt;

use crate::outgoing::Outgoing;
use crate::{cobs, sum};

/// The most bytes of one encoded message: room for one argument of the greatest length that Linux takes (128 KiB) and
/// an environment beside it.
pub const MAX_MESSAGE: usize = 256 * 1024;

/// Direction and nonce.
pub(crate) const HEADER: usize = 1 + 8;
const CRC: usize = 4;
pub(crate) const SUM: usize = 8;
const MAX_WIRE: usize = cobs::max_encoded_len(HEADER + MAX_MESSAGE + SUM);

/// In the first byte, beside the direction: the checksum is [`Check::Sum`].
const IS_SUM: u8 = 0x10;

/// Ends every frame, and comes before the first frame of a connection.
pub const DELIMITER: u8 = 0;

/// Names one connection: random, never used twice.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce(u64);

impl Nonce {
    /// From 64 random bits of the host.
    pub const fn new(random: u64) -> Self {
        Self(random)
    }

    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

/// Who wrote a frame; a frame that comes back to its writer is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Direction {
    FromHost = 1,
    FromGuest = 2,
}

/// What shows that a frame is whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Check {
    /// What every end understands.
    #[default]
    Crc,
    /// A word at a time, which costs an emulated guest a small part of the other.
    Sum,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    pub nonce: Nonce,
    pub payload: &'a [u8],
}

/// A message is longer than [`MAX_MESSAGE`].
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of {len} bytes is longer than {MAX_MESSAGE}: shorten arguments or environment")]
pub struct TooLong {
    pub len: usize,
}

/// Appends the frame with `payload` to `wire`.
pub fn encode(
    direction: Direction,
    nonce: Nonce,
    check: Check,
    payload: &[u8],
    wire: &mut Vec<u8>,
) -> Result<(), TooLong> {
    let mut plain = Vec::new();
    begin(direction, nonce, check, payload.len(), &mut plain)?;
    plain.extend_from_slice(payload);
    let mut outgoing = Outgoing::default();
    seal(check, &mut plain, &mut outgoing);
    wire.extend_from_slice(outgoing.bytes());
    Ok(())
}

/// Begins the plain form of a frame for a payload of `len` bytes.
pub(crate) fn begin(
    direction: Direction,
    nonce: Nonce,
    check: Check,
    len: usize,
    plain: &mut Vec<u8>,
) -> Result<(), TooLong> {
    if len > MAX_MESSAGE {
        return Err(TooLong { len });
    }
    plain.reserve(HEADER + len + SUM);
    let kind = if check == Check::Sum { IS_SUM } else { 0 };
    plain.push(direction as u8 | kind);
    plain.extend_from_slice(&nonce.0.to_le_bytes());
    Ok(())
}

/// Ends the plain form of a frame, and puts it on its way.
pub(crate) fn seal(check: Check, plain: &mut Vec<u8>, wire: &mut Outgoing) {
    let len = plain.len();
    plain.resize(len + SUM, 0);
    seal_in_place(check, plain, len, wire);
}

/// The same for the `len` first bytes of a buffer that has room for the checksum behind them.
pub(crate) fn seal_in_place(check: Check, plain: &mut [u8], len: usize, wire: &mut Outgoing) {
    let (signed, behind) = plain.split_at_mut(len);
    let checksum = match check {
        Check::Crc => {
            behind[..CRC].copy_from_slice(&crc32fast::hash(signed).to_le_bytes());
            CRC
        }
        Check::Sum => {
            behind[..SUM].copy_from_slice(&sum::of(signed).to_le_bytes());
            SUM
        }
    };
    wire.push_frame(&plain[..len + checksum]);
}

/// Takes what a [`Decoder`] finds.
pub trait Take {
    /// A whole frame; says how long the run is that follows it.
    fn frame(&mut self, frame: Frame<'_>) -> usize;

    /// Some of a run's bytes, in their order.
    fn raw(&mut self, bytes: &[u8]);
}

/// For frames of which none announces a run.
impl<F: FnMut(Frame<'_>)> Take for F {
    fn frame(&mut self, frame: Frame<'_>) -> usize {
        self(frame);
        0
    }

    fn raw(&mut self, _: &[u8]) {}
}

/// Finds the frames of one direction in a byte stream.
#[derive(Debug)]
pub struct Decoder {
    direction: Direction,
    /// What is still to come of a run.
    run: usize,
    partial: Vec<u8>,
    /// Where a frame is decoded; kept for its memory.
    plain: Vec<u8>,
    /// What came since the last delimiter is longer than any frame: drop all up to the next one.
    overlong: bool,
    broken: u64,
}

impl Decoder {
    /// A decoder for frames that were written by `direction`.
    pub const fn new(direction: Direction) -> Self {
        Self { direction, run: 0, partial: Vec::new(), plain: Vec::new(), overlong: false, broken: 0 }
    }

    /// Takes bytes as they were read and hands each whole frame, and the bytes of runs, to `take`.
    pub fn feed(&mut self, mut bytes: &[u8], mut take: impl Take) {
        loop {
            bytes = self.feed_run(bytes, &mut take);
            // A host begins with very many empty frames.
            if self.partial.is_empty() && !self.overlong {
                bytes = cobs::after_zeros(bytes);
            }
            let Some(end) = cobs::find_zero(bytes) else { break };
            let (frame, rest) = (&bytes[..end], &bytes[end + 1..]);
            // One that lies there as a whole is not copied first.
            if self.partial.is_empty() && !self.overlong && frame.len() <= MAX_WIRE {
                self.decode(frame, &mut take);
            } else {
                self.push(frame);
                self.finish(&mut take);
            }
            bytes = rest;
        }
        self.push(bytes);
    }

    /// How many bytes are still to come of the run that began last.
    pub const fn run(&self) -> usize {
        self.run
    }

    /// Somebody else took so many bytes of the run.
    pub fn skip(&mut self, len: usize) {
        self.run = self.run.saturating_sub(len);
    }

    /// Gives the bytes of a run away; what is left.
    fn feed_run<'a>(&mut self, bytes: &'a [u8], take: &mut impl Take) -> &'a [u8] {
        let (run, rest) = bytes.split_at(self.run.min(bytes.len()));
        if !run.is_empty() {
            self.run -= run.len();
            take.raw(run);
        }
        rest
    }

    /// How many pieces between delimiters were no frames.
    pub const fn broken(&self) -> u64 {
        self.broken
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.overlong || self.partial.len() + bytes.len() > MAX_WIRE {
            self.overlong = true;
            self.partial = Vec::new();
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }

    fn finish(&mut self, take: &mut impl Take) {
        let partial = std::mem::take(&mut self.partial);
        if std::mem::take(&mut self.overlong) {
            self.broken += 1;
        } else {
            self.decode(&partial, take);
        }
        self.partial = partial;
        self.partial.clear();
    }

    /// Takes what stood between two delimiters. Two in a row are no loss: a connection starts with one.
    fn decode(&mut self, wire: &[u8], take: &mut impl Take) {
        if wire.is_empty() {
            return;
        }
        match cobs::decode(wire, &mut self.plain).and_then(|plain| parse(self.direction, plain)) {
            Some(frame) => self.run = take.frame(frame),
            None => self.broken += 1,
        }
    }
}

fn parse(direction: Direction, plain: &[u8]) -> Option<Frame<'_>> {
    let kind = *plain.first()?;
    let signed = if kind & IS_SUM == 0 {
        let (signed, crc) = plain.split_last_chunk::<CRC>()?;
        (crc32fast::hash(signed) == u32::from_le_bytes(*crc)).then_some(signed)?
    } else {
        let (signed, found) = plain.split_last_chunk::<SUM>()?;
        (sum::of(signed) == u64::from_le_bytes(*found)).then_some(signed)?
    };
    let (&[from], rest) = signed.split_first_chunk::<1>()?;
    let (nonce, payload) = rest.split_first_chunk::<8>()?;
    (from & !IS_SUM == direction as u8).then(|| Frame { nonce: Nonce(u64::from_le_bytes(*nonce)), payload })
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
