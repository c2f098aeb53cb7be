//! The disks of an archive: records in one zstd frame.
//!
//! Each record begins with 16 bytes: kind (1), disk (1), two zero bytes, length (4), offset (8), little-endian.
//!
//! | kind | follows | of |
//! |---|---|---|
//! | 1 data | the bytes of the image at the offset, at most 1 MiB, in whole blocks of 4 KiB | this disk, beyond all before |
//! | 2 end | SHA-256 over offset, length and bytes of each data record of the disk | this disk |
//! | 3 finish | SHA-256 over the digests of the prefix and of the disks | the archive |

use std::io::{self, BufRead, Read, Write};

use sha2::{Digest as _, Sha256};

use crate::prefix::{Prefix, PrefixError};

/// The most bytes in one record.
pub const MAX_DATA: usize = 1 << 20;
const BLOCK: u64 = 4096;
const HEADER: usize = 16;
const DIGEST: usize = 32;
const DATA: u8 = 1;
const END: u8 = 2;
const FINISH: u8 = 3;
const LEVEL: i32 = 3;
/// 8 MiB, more than what this level uses: a reader's memory is bounded whatever an archive says.
const LARGEST_WINDOW: u32 = 23;

/// Which image of a Workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Disk {
    Layer,
    Volume,
}

impl Disk {
    fn at(number: usize) -> Self {
        if number == 0 { Self::Layer } else { Self::Volume }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Layer => "writable layer",
            Self::Volume => "Volume",
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::Layer => 0,
            Self::Volume => 1,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    #[error("the archive is truncated: it ends before it is complete")]
    Truncated,
    #[error("the archive is damaged: {0}")]
    Damaged(String),
    #[error("the archive is damaged: the {} is not what it was when it was exported", .0.name())]
    Digest(Disk),
    #[error("the archive is damaged: its parts do not belong together")]
    Mixed,
    #[error("there is something behind the end of the archive")]
    Trailing,
    /// The archive could not be read on; it may be well.
    #[error("{0}")]
    Input(io::Error),
}

fn header(kind: u8, disk: u8, length: usize, offset: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    (header[0], header[1]) = (kind, disk);
    header[4..8].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    header[8..].copy_from_slice(&offset.to_le_bytes());
    header
}

/// What was and what may be in the disks, in their order.
struct Progress {
    sizes: Vec<u64>,
    current: usize,
    /// Everything before it is in the archive, or a hole.
    at: u64,
    digest: Sha256,
    whole: Sha256,
}

impl Progress {
    fn new(prefix: &Prefix) -> Self {
        let whole = Sha256::new_with_prefix(prefix.digest());
        Self { sizes: prefix.description.sizes(), current: 0, at: 0, digest: Sha256::new(), whole }
    }

    fn disk(&self) -> Option<Disk> {
        (self.current < self.sizes.len()).then(|| Disk::at(self.current))
    }

    /// Whether this data may come now; in words why not.
    fn check(&self, disk: u8, offset: u64, length: usize) -> Result<Disk, String> {
        let current = self.disk().filter(|current| current.code() == disk);
        let current = current.ok_or_else(|| format!("bytes of disk {disk} come out of their order"))?;
        let end = u64::try_from(length).ok().and_then(|length| offset.checked_add(length));
        let fits = end.is_some_and(|end| end <= self.sizes[self.current] && end.is_multiple_of(BLOCK));
        if length == 0 || length > MAX_DATA || offset < self.at || !offset.is_multiple_of(BLOCK) || !fits {
            return Err(format!("{length} bytes at byte {offset} of the {} cannot be", current.name()));
        }
        Ok(current)
    }

    fn take(&mut self, offset: u64, data: &[u8]) {
        self.digest.update(header(DATA, 0, data.len(), offset));
        self.digest.update(data);
        self.at = offset + data.len() as u64;
    }

    fn end_disk(&mut self) -> [u8; DIGEST] {
        let digest: [u8; DIGEST] = std::mem::take(&mut self.digest).finalize().into();
        self.whole.update(digest);
        (self.current, self.at) = (self.current + 1, 0);
        digest
    }

    fn finish(&mut self) -> [u8; DIGEST] {
        std::mem::take(&mut self.whole).finalize().into()
    }
}

/// Writes an archive. What is dropped before [`Writer::finish`] is one that no reader takes for complete.
pub struct Writer<W: Write> {
    zstd: zstd::Encoder<'static, W>,
    progress: Progress,
}

impl<W: Write> Writer<W> {
    pub fn new(mut to: W, prefix: &Prefix) -> io::Result<Self> {
        to.write_all(prefix.bytes())?;
        let mut zstd = zstd::Encoder::new(to, LEVEL)?;
        zstd.include_checksum(true)?;
        Ok(Self { zstd, progress: Progress::new(prefix) })
    }

    /// Bytes of the current disk: the layer first.
    pub fn data(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let disk = self.progress.disk().map(Disk::code).unwrap_or_default();
        self.progress.check(disk, offset, data.len()).map_err(io::Error::other)?;
        self.zstd.write_all(&header(DATA, disk, data.len(), offset))?;
        self.zstd.write_all(data)?;
        self.progress.take(offset, data);
        Ok(())
    }

    /// Nothing more of the current disk.
    pub fn end_disk(&mut self) -> io::Result<()> {
        let disk = self.progress.disk().ok_or_else(|| io::Error::other("there is no disk to end"))?;
        let digest = self.progress.end_disk();
        self.zstd.write_all(&header(END, disk.code(), DIGEST, 0))?;
        self.zstd.write_all(&digest)
    }

    pub fn finish(mut self) -> io::Result<W> {
        if self.progress.disk().is_some() {
            return Err(io::Error::other("a disk is not ended yet"));
        }
        let digest = self.progress.finish();
        self.zstd.write_all(&header(FINISH, 0, DIGEST, 0))?;
        self.zstd.write_all(&digest)?;
        self.zstd.finish()
    }
}

/// What comes next in an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// The first `length` bytes of the buffer belong there.
    Data { disk: Disk, offset: u64, length: usize },
    /// The archive is complete, all of it is what was exported, and nothing is behind it.
    Finished,
}

/// Reads an archive. Nothing of it is to be believed before [`Record::Finished`].
pub struct Reader<R: BufRead> {
    zstd: zstd::Decoder<'static, R>,
    prefix: Prefix,
    progress: Progress,
}

/// Reads the prefix, which is not buffered beyond its end.
fn read_prefix(from: &mut impl Read) -> Result<Prefix, ArchiveError> {
    let mut bytes = Vec::new();
    loop {
        if let Some(prefix) = Prefix::read(&bytes)? {
            return Ok(prefix);
        }
        let have = bytes.len();
        // What is fixed, then as much as that says.
        let length = bytes.get(12..16).and_then(|length| length.try_into().ok()).map(u32::from_le_bytes);
        let wanted = length.and_then(|length| usize::try_from(length).ok()).map_or(HEADER, |it| HEADER + it + DIGEST);
        bytes.resize(wanted, 0);
        let mut filled = have;
        while filled < wanted {
            match from.read(&mut bytes[filled..]) {
                Ok(0) => {
                    // Even less than a prefix may not be one.
                    Prefix::read(&bytes[..filled])?;
                    return Err(ArchiveError::Truncated);
                }
                Ok(length) => filled += length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ArchiveError::Input(error)),
            }
        }
    }
}

fn broken(error: io::Error) -> ArchiveError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => ArchiveError::Truncated,
        // So the decompression fails.
        io::ErrorKind::Other | io::ErrorKind::InvalidData => ArchiveError::Damaged(error.to_string()),
        _ => ArchiveError::Input(error),
    }
}

impl<R: BufRead> Reader<R> {
    /// An error of `from` is to have another kind than `Other`, `InvalidData` and `UnexpectedEof`, which mean damage.
    pub fn new(mut from: R) -> Result<Self, ArchiveError> {
        let prefix = read_prefix(&mut from)?;
        let mut zstd = zstd::Decoder::with_buffer(from).map_err(broken)?.single_frame();
        zstd.window_log_max(LARGEST_WINDOW).map_err(broken)?;
        let progress = Progress::new(&prefix);
        Ok(Self { zstd, prefix, progress })
    }

    pub fn prefix(&self) -> &Prefix {
        &self.prefix
    }

    /// The next record; its data is put into the buffer, which must have [`MAX_DATA`] bytes.
    pub fn next(&mut self, buffer: &mut [u8]) -> Result<Record, ArchiveError> {
        loop {
            let mut header = [0; HEADER];
            self.zstd.read_exact(&mut header).map_err(broken)?;
            let [kind, disk, _, _, l0, l1, l2, l3, offset @ ..] = header;
            let length = usize::try_from(u32::from_le_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
            let offset = u64::from_le_bytes(offset);
            match kind {
                DATA => {
                    let disk = self.progress.check(disk, offset, length).map_err(ArchiveError::Damaged)?;
                    let data = &mut buffer[..length];
                    self.zstd.read_exact(data).map_err(broken)?;
                    self.progress.take(offset, data);
                    return Ok(Record::Data { disk, offset, length });
                }
                END => {
                    let current = self.progress.disk().filter(|current| current.code() == disk && length == DIGEST);
                    let current = current.ok_or_else(|| ArchiveError::Damaged("a disk ends twice".to_owned()))?;
                    let expected = self.progress.end_disk();
                    if self.digest()? != expected {
                        return Err(ArchiveError::Digest(current));
                    }
                }
                FINISH if length == DIGEST && self.progress.disk().is_none() => {
                    let expected = self.progress.finish();
                    if self.digest()? != expected {
                        return Err(ArchiveError::Mixed);
                    }
                    return self.finish();
                }
                _ => return Err(ArchiveError::Damaged(format!("a record of kind {kind} is out of place"))),
            }
        }
    }

    fn digest(&mut self) -> Result<[u8; DIGEST], ArchiveError> {
        let mut digest = [0; DIGEST];
        self.zstd.read_exact(&mut digest).map_err(broken)?;
        Ok(digest)
    }

    /// The frame has its own end and checksum, which must come, and nothing behind.
    fn finish(&mut self) -> Result<Record, ArchiveError> {
        let mut rest = [0];
        if self.zstd.read(&mut rest).map_err(broken)? != 0 {
            return Err(ArchiveError::Trailing);
        }
        if !self.zstd.get_mut().fill_buf().map_err(broken)?.is_empty() {
            return Err(ArchiveError::Trailing);
        }
        Ok(Record::Finished)
    }
}
