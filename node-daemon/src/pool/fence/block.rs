//! Blocks of a fence file: a line of JSON, a line with its CRC-32, and spaces.

use std::{
    fs::{File, OpenOptions},
    io,
    ops::{Deref, DerefMut},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
};

use rustix::{fs::OFlags, io::Errno};
use serde::{Serialize, de::DeserializeOwned};

/// A page, and what every disk takes for direct I/O.
pub const BLOCK: usize = 4096;
/// What is said in a block is in its first sector: a disk writes it whole.
const SECTOR: usize = 512;

/// What one block says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said<T> {
    /// Nobody has written it yet.
    Nothing,
    Text(T),
    LaterFormat(u32),
    /// It is torn, which passes, or damaged.
    Garbled,
}

/// Bytes whose address is a multiple of a block, as direct I/O wants it.
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK);
        Self { bytes, start, len }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// `format` is a field of every text, and looked at first: a later one may have other fields.
pub fn encode(text: &impl Serialize) -> io::Result<Buffer> {
    let json = serde_json::to_string(text)?;
    let text = format!("{json}\n{:08x}\n", crc32fast::hash(json.as_bytes()));
    let mut block = Buffer::new(BLOCK);
    block.fill(b' ');
    let sector = &mut block[..SECTOR];
    sector.get_mut(..text.len()).ok_or_else(|| io::Error::other("it is too long"))?.copy_from_slice(text.as_bytes());
    block[BLOCK - 1] = b'\n';
    Ok(block)
}

pub fn decode<T: DeserializeOwned>(block: &[u8], known: u32) -> Said<T> {
    #[derive(serde::Deserialize)]
    struct Format {
        format: u32,
    }
    if block.iter().all(|byte| *byte == 0) {
        return Said::Nothing;
    }
    let text = || {
        let (json, rest) = std::str::from_utf8(&block[..block.len().min(SECTOR)]).ok()?.split_once('\n')?;
        let crc = u32::from_str_radix(rest.get(..8)?, 16).ok()?;
        (crc == crc32fast::hash(json.as_bytes())).then_some(json)
    };
    let Some(json) = text() else { return Said::Garbled };
    match serde_json::from_str(json) {
        Ok(Format { format }) if format > known => Said::LaterFormat(format),
        Ok(_) => serde_json::from_str(json).map_or(Said::Garbled, Said::Text),
        Err(_) => Said::Garbled,
    }
}

/// Opens a file past the page cache where its file system can do that, and in any case so that every write is on the
/// disk when it returns.
pub fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = |flags: OFlags| i32::try_from(flags.bits()).unwrap_or(0);
    match options.custom_flags(flags(OFlags::DIRECT | OFlags::DSYNC)).open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            options.custom_flags(flags(OFlags::DSYNC)).open(path)
        }
        result => result,
    }
}

/// All of the first `len` bytes; what the file does not have is 0.
pub fn read(file: &File, len: usize) -> io::Result<Buffer> {
    let mut buffer = Buffer::new(len);
    let mut done = 0;
    while done < len {
        match file.read_at(&mut buffer[done..], done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        // The end of the file, beyond which direct I/O could not go on.
        if done % BLOCK != 0 {
            break;
        }
    }
    Ok(buffer)
}
