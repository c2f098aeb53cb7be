//! A disk that is larger than its file system: the host has made the image grow, and the guest, which alone reads what is
//! on it, makes the file system follow.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, opcode};

/// EXT4_IOC_RESIZE_FS: the new number of blocks.
const RESIZE: Opcode = opcode::write::<u64>(b'f', 16);

const SUPERBLOCK_AT: u64 = 1024;
const SUPERBLOCK_LEN: usize = 1024;
const MAGIC: u16 = 0xEF53;
/// A feature of the file system: its counts have upper halves.
const HAS_64_BITS: u32 = 0x80;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to read the superblock: {0}")]
    Read(io::Error),
    #[error("failed to find the size of the disk: {0}")]
    Size(Errno),
    #[error("the kernel did not grow it to {blocks} blocks: {errno}")]
    Resize { blocks: u64, errno: Errno },
}

/// Blocks that an ext4 has, and bytes of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    blocks: u64,
    block_size: u64,
}

/// Grows the ext4 that is mounted at `root` to all of its disk. Nothing to do is nothing done.
pub fn to_disk(device: &Path, root: impl AsFd) -> Result<(), Error> {
    let disk = File::open(device).map_err(Error::Read)?;
    let mut superblock = [0; SUPERBLOCK_LEN];
    disk.read_exact_at(&mut superblock, SUPERBLOCK_AT).map_err(Error::Read)?;
    let size = seek(&disk, SeekFrom::End(0)).map_err(Error::Size)?;
    let Some(blocks) = extent(&superblock).and_then(|extent| wanted(extent, size)) else { return Ok(()) };
    #[allow(unsafe_code, reason = "rustix has no call of its own for this ioctl")]
    // SAFETY: EXT4_IOC_RESIZE_FS reads one u64, which is what the setter carries.
    unsafe { rustix::ioctl::ioctl(root, Setter::<RESIZE, u64>::new(blocks)) }
        .map_err(|errno| Error::Resize { blocks, errno })
}

/// What the superblock says; `None` when it is none.
fn extent(superblock: &[u8; SUPERBLOCK_LEN]) -> Option<Extent> {
    let half = |at: usize| u16::from_le_bytes([superblock[at], superblock[at + 1]]);
    let word = |at: usize| u32::from(half(at)) | u32::from(half(at + 2)) << 16;
    if half(0x38) != MAGIC {
        return None;
    }
    let upper = if word(0x60) & HAS_64_BITS == 0 { 0 } else { word(0x150) };
    let block_size = 1024_u64.checked_shl(word(0x18)).filter(|size| (1024..=65536).contains(size))?;
    Some(Extent { blocks: u64::from(upper) << 32 | u64::from(word(0x04)), block_size })
}

/// The blocks that it should have, if those are more.
fn wanted(extent: Extent, disk: u64) -> Option<u64> {
    let blocks = disk / extent.block_size;
    (blocks > extent.blocks).then_some(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(blocks: u64, log_block_size: u8, has_64_bits: bool) -> [u8; SUPERBLOCK_LEN] {
        let mut bytes = [0; SUPERBLOCK_LEN];
        bytes[0x38..0x3A].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[0x04..0x0C].copy_from_slice(&(blocks & 0xFFFF_FFFF).to_le_bytes());
        bytes[0x150..0x158].copy_from_slice(&(blocks >> 32).to_le_bytes());
        bytes[0x18] = log_block_size;
        bytes[0x60] = if has_64_bits { 0x80 } else { 0 };
        bytes
    }

    #[test]
    fn a_superblock_says_how_large_its_file_system_is() {
        let large = (1 << 33) + 7;
        let read = |bytes| extent(&bytes).map(|extent| (extent.blocks, extent.block_size));
        assert_eq!(read(superblock(16384, 2, true)), Some((16384, 4096)));
        assert_eq!(read(superblock(large, 2, true)), Some((large, 4096)));
        assert_eq!(read(superblock(large, 2, false)), Some((7, 4096)), "the upper half means nothing then");
        assert_eq!(read([0; SUPERBLOCK_LEN]), None);
        assert_eq!(read(superblock(1, 60, true)), None);
    }

    #[test]
    fn only_a_disk_that_is_larger_is_grown_to() {
        let extent = Extent { blocks: 16384, block_size: 4096 };
        assert_eq!(wanted(extent, 64 << 20), None);
        assert_eq!(wanted(extent, 32 << 20), None, "nothing shrinks");
        assert_eq!(wanted(extent, 128 << 20), Some(32768));
        assert_eq!(wanted(extent, (64 << 20) + 4095), None, "no part of a block");
    }
}
