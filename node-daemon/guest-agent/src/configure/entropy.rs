//! The random generator: two guests that were restored from one save must not draw the same numbers.

use std::fs::File;
use std::io;

use kibo_guest_protocol::ENTROPY_LEN;
use rustix::ioctl::{NoArg, Opcode, Setter, opcode};

/// `struct rand_pool_info` with a buffer of our size (linux/random.h).
#[repr(C)]
struct PoolInfo {
    entropy_bits: i32,
    len: i32,
    buffer: [u8; ENTROPY_LEN],
}

/// The header gives it for a structure without its buffer: two ints.
const ADD_ENTROPY: Opcode = opcode::write::<[i32; 2]>(b'R', 0x03);
const RESEED: Opcode = opcode::none(b'R', 0x07);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to open /dev/urandom: {0}")]
    Open(io::Error),
    #[error("failed to give entropy to the kernel: {0}")]
    Add(rustix::io::Errno),
    #[error("failed to reseed the random generator: {0}")]
    Reseed(rustix::io::Errno),
}

#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "64 and 512 fit into an int")]
pub fn add(entropy: &[u8; ENTROPY_LEN]) -> Result<(), Error> {
    let device = File::open("/dev/urandom").map_err(Error::Open)?;
    let info = PoolInfo { entropy_bits: 8 * ENTROPY_LEN as i32, len: ENTROPY_LEN as i32, buffer: *entropy };
    #[allow(unsafe_code, reason = "rustix has no call of its own for this ioctl")]
    // SAFETY: RNDADDENTROPY reads a rand_pool_info with `len` bytes behind it, which is what PoolInfo is.
    unsafe { rustix::ioctl::ioctl(&device, Setter::<ADD_ENTROPY, PoolInfo>::new(info)) }.map_err(Error::Add)?;
    #[allow(unsafe_code, reason = "rustix has no call of its own for this ioctl")]
    // SAFETY: RNDRESEEDCRNG takes no argument.
    unsafe { rustix::ioctl::ioctl(&device, NoArg::<RESEED>::new()) }.map_err(Error::Reseed)
}
