//! Frames: `0`-terminated, byte-stuffed, each with a checksum and the nonce of its connection.
//!
//! Plain form, before stuffing: direction (1 byte), nonce (8, little endian), payload, CRC-32 of all before it (4,
//! little endian). A reader that starts in the middle, or finds half a frame of a connection that is gone, is back in
//! step at the next 0; its memory is bounded by the longest legal frame whatever arrives.

use std::fmt;

use crate::cobs;

/// The most bytes of one encoded message: room for one argument of the greatest length that Linux takes (128 KiB) and
/// an environment beside it.
pub const MAX_MESSAGE: usize = 256 * 1024;

const HEADER: usize = 1 + 8;
const CHECKSUM: usize = 4;
const MAX_WIRE: usize = cobs::max_encoded_len(HEADER + MAX_MESSAGE + CHECKSUM);

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
pub fn encode(direction: Direction, nonce: Nonce, payload: &[u8], wire: &mut Vec<u8>) -> Result<(), TooLong> {
    let append = |plain: &mut Vec<u8>| plain.extend_from_slice(payload);
    encode_with(direction, nonce, payload.len(), append, &mut Vec::new(), wire)
}

/// Appends a frame to `wire` whose payload, of `len` bytes, is what `payload` appends. `plain` is where it is put
/// together; what it held is overwritten.
pub fn encode_with(
    direction: Direction,
    nonce: Nonce,
    len: usize,
    payload: impl FnOnce(&mut Vec<u8>),
    plain: &mut Vec<u8>,
    wire: &mut Vec<u8>,
) -> Result<(), TooLong> {
    if len > MAX_MESSAGE {
        return Err(TooLong { len });
    }
    plain.clear();
    plain.reserve(HEADER + len + CHECKSUM);
    plain.push(direction as u8);
    plain.extend_from_slice(&nonce.0.to_le_bytes());
    payload(plain);
    let checksum = crc32fast::hash(plain);
    plain.extend_from_slice(&checksum.to_le_bytes());
    cobs::encode(plain, wire);
    wire.push(DELIMITER);
    Ok(())
}

/// Finds the frames of one direction in a byte stream.
#[derive(Debug)]
pub struct Decoder {
    direction: Direction,
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
        Self { direction, partial: Vec::new(), plain: Vec::new(), overlong: false, broken: 0 }
    }

    /// Takes bytes as they were read and hands each whole frame to `take`.
    pub fn feed(&mut self, mut bytes: &[u8], mut take: impl FnMut(Frame<'_>)) {
        while let Some(end) = cobs::find_zero(bytes) {
            self.push(&bytes[..end]);
            bytes = &bytes[end + 1..];
            self.finish(&mut take);
        }
        self.push(bytes);
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

    fn finish(&mut self, take: &mut impl FnMut(Frame<'_>)) {
        let overlong = std::mem::take(&mut self.overlong);
        // Two delimiters in a row are no loss: a connection starts with one.
        if self.partial.is_empty() && !overlong {
            return;
        }
        match cobs::decode(&self.partial, &mut self.plain).and_then(|plain| parse(self.direction, plain)) {
            Some(frame) => take(frame),
            None => self.broken += 1,
        }
        self.partial.clear();
    }
}

fn parse(direction: Direction, plain: &[u8]) -> Option<Frame<'_>> {
    let (signed, checksum) = plain.split_last_chunk::<CHECKSUM>()?;
    let (&[from], rest) = signed.split_first_chunk::<1>()?;
    let (nonce, payload) = rest.split_first_chunk::<8>()?;
    let intact = crc32fast::hash(signed) == u32::from_le_bytes(*checksum);
    (intact && from == direction as u8).then(|| Frame { nonce: Nonce(u64::from_le_bytes(*nonce)), payload })
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
