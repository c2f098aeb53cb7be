//! The file in which a Workspace travels from one cluster to another: what it was made from, and the bytes of its
//! writable layer and of its Volume.
//!
//! An archive begins with a prefix that can be read without anything else ([`Prefix`]): a magic number, the version of
//! the format, and the description. The disks follow in one zstd frame, as records ([`Writer`], [`Reader`]): their data
//! in the order of the offsets, without holes and zeros, then the digest of each disk, then one over everything. No part
//! of it has to be kept in memory, and it names no path: which record is whose bytes is said by a number.
//!
//! A reader takes nothing for granted: whatever was cut off, altered or added is an error that says which. The digests
//! find damage, not forgery: whoever can write an archive can write another one.

mod prefix;
mod records;
#[cfg(test)]
mod tests;

pub use prefix::{Description, MAGIC, Origin, Prefix, PrefixError, VERSION};
pub use records::{ArchiveError, Disk, MAX_DATA, Reader, Record, Writer};
