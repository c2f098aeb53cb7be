//! Sparse images, read past the page cache: where their data is, in pieces, and one number that stands for all of it.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use crc_fast::{CrcAlgorithm, checksum};
use rustix::fs::{SeekFrom, seek};
use serde::{Deserialize, Serialize};

use super::image::ImageError;

/// Direct I/O wants addresses, offsets and lengths in whole blocks.
const BLOCK: usize = 4096;
/// Zeros of this length stay holes.
const SPARSE: usize = 64 << 10;
pub const PIECE: usize = 1 << 20;

static ZEROS: [u8; SPARSE] = [0; SPARSE];

/// A part of an image in memory, at an address for direct I/O.
pub struct Piece {
    memory: Vec<u8>,
    at: usize,
    pub len: usize,
}

impl Piece {
    pub fn new() -> Self {
        let memory = vec![0; PIECE + BLOCK];
        let at = memory.as_ptr().align_offset(BLOCK);
        Self { memory, at, len: 0 }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.at..self.at + self.len]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.at..self.at + self.len]
    }
}

/// Opens past the page cache where the file system can, and says whether it could.
pub fn open(path: &Path, options: &mut OpenOptions) -> Result<(File, bool), ImageError> {
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap_or(0);
    match options.custom_flags(direct).open(path) {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
            let file = options.custom_flags(0).open(path);
            file.map(|file| (file, false))
        }
        opened => opened.map(|file| (file, true)),
    }
    .map_err(|source| ImageError::Io { action: "open", path: path.to_owned(), source })
}

/// The data of a file from an offset on, in whole blocks and in pieces of at most [`PIECE`]; what lies between them are
/// holes.
pub struct Data<'f> {
    file: &'f File,
    size: u64,
    at: u64,
    /// Up to here it is data.
    end: u64,
}

impl<'f> Data<'f> {
    pub fn of(file: &'f File, from: u64, size: u64) -> Self {
        Self { file, size, at: from, end: from }
    }

    /// Offset and length of the next piece; `None`: only holes follow.
    pub fn next(&mut self) -> io::Result<Option<(u64, usize)>> {
        if self.at >= self.end {
            let Some((begin, end)) = next_data(self.file, self.at, self.size)? else { return Ok(None) };
            (self.at, self.end) = (begin, end);
        }
        let (at, len) = (self.at, usize::try_from(self.end - self.at).unwrap_or(PIECE).min(PIECE));
        self.at += len as u64;
        Ok(Some((at, len)))
    }
}

/// The next data at or after an offset, in whole blocks; `None`: only holes follow.
fn next_data(file: &File, from: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    if from >= size {
        return Ok(None);
    }
    let begin = match seek(file, SeekFrom::Data(from)) {
        Ok(begin) if begin < size => begin,
        Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let end = seek(file, SeekFrom::Hole(begin))?.min(size);
    let block = BLOCK as u64;
    let begin = (begin / block * block).max(from);
    Ok(Some((begin, end.div_ceil(block).saturating_mul(block).min(size))))
}

/// How much of a file is data, from an offset on.
pub fn data_bytes(file: &File, from: u64, size: u64) -> io::Result<u64> {
    let (mut at, mut sum) = (from, 0);
    while let Some((begin, end)) = next_data(file, at, size)? {
        sum += end - begin;
        at = end;
    }
    Ok(sum)
}

/// The parts of a piece that are not all zeros.
pub fn runs(bytes: &[u8]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (number, part) in bytes.chunks(SPARSE).enumerate() {
        let (begin, end) = (number * SPARSE, number * SPARSE + part.len());
        match runs.last_mut() {
            _ if *part == ZEROS[..part.len()] => {}
            Some(last) if last.1 == begin => last.1 = end,
            _ => runs.push((begin, end)),
        }
    }
    runs
}

/// Stands for the content of an image, wherever its holes are and in whatever pieces it was read: a sum over its blocks
/// that are not zeros. Against disks that fail, not against people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content(u64);

impl Content {
    /// Of a piece that begins at this offset, which is that of a block.
    pub fn of(offset: u64, bytes: &[u8]) -> Self {
        let mut sum = Self::default();
        let first = offset / BLOCK as u64;
        for (number, block) in (first..).zip(bytes.chunks(BLOCK)) {
            if *block != ZEROS[..block.len()] {
                sum.add(Self(mixed(checksum(CrcAlgorithm::Crc64Nvme, block) ^ mixed(number))));
            }
        }
        sum
    }

    pub fn add(&mut self, other: Self) {
        self.0 = self.0.wrapping_add(other.0);
    }
}

/// Spreads each bit over all of them (the finalizer of `splitmix64`): without it two blocks that changed places could make
/// the same sum.
fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn data_is_found_in_pieces_of_whole_blocks() {
        let file = tempfile::tempfile().unwrap();
        let size = 8 * PIECE as u64;
        file.set_len(size).unwrap();
        file.write_all_at(&[1; 10], 5000).unwrap();
        file.write_all_at(&vec![2; 2 * PIECE + 10], 4 * PIECE as u64).unwrap();
        let mut data = Data::of(&file, 0, size);
        let mut found = Vec::new();
        while let Some((at, len)) = data.next().unwrap() {
            assert!(at % BLOCK as u64 == 0 && len % BLOCK == 0 && len <= PIECE, "{at} {len}");
            found.push((at, len));
        }
        assert_eq!(found, [(4096, 4096), (4 << 20, PIECE), (5 << 20, PIECE), (6 << 20, BLOCK)]);
        assert_eq!(data_bytes(&file, 0, size).unwrap(), found.iter().map(|(_, len)| *len as u64).sum::<u64>());
    }

    #[test]
    fn one_number_stands_for_what_is_there_and_where() {
        let mut bytes = vec![0; 16 * BLOCK];
        for (number, byte) in [(1, 7), (2, 7), (9, 8)] {
            bytes[number * BLOCK..(number + 1) * BLOCK].fill(byte);
        }
        let whole = Content::of(0, &bytes);
        let in_parts = |cut: usize| {
            let (first, rest) = bytes.split_at(cut * BLOCK);
            let mut sum = Content::of((cut * BLOCK) as u64, rest);
            sum.add(Content::of(0, first));
            sum
        };
        assert!((0..16).all(|cut| in_parts(cut) == whole));
        let mut without_holes = Content::default();
        for number in [9, 1, 2] {
            let at = number * BLOCK;
            without_holes.add(Content::of(at as u64, &bytes[at..at + BLOCK]));
        }
        assert_eq!(without_holes, whole);
        let changed = |change: fn(&mut Vec<u8>)| {
            let mut other = bytes.clone();
            change(&mut other);
            Content::of(0, &other)
        };
        assert_ne!(changed(|bytes| bytes[5 * BLOCK + 3] = 1), whole, "where there was a hole");
        assert_ne!(changed(|bytes| bytes[2 * BLOCK..3 * BLOCK].fill(0)), whole, "one that is missing");
        assert_ne!(changed(|bytes| bytes[9 * BLOCK] ^= 1), whole, "one bit");
        let swapped = changed(|bytes| {
            bytes[BLOCK..2 * BLOCK].fill(8);
            bytes[9 * BLOCK..10 * BLOCK].fill(7);
        });
        assert_ne!(swapped, whole, "two that changed places");
        assert_ne!(Content::of(BLOCK as u64, &bytes), whole, "all of it, a block further");
    }
}
