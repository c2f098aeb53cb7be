//! What hides the bytes of a client on their way to the guest.
//!
//! A guest cannot know its next daemon, so it takes a hello from whoever says one. The bytes of a run travel as they are:
//! were a byte lost on the way, or the frame before a run, what a client sends could be read as a frame, and a hello in it
//! be believed. So each word of a client's bytes is changed by the connection's nonce, which no client and no workload
//! knows; whatever they choose, on the wire it is what nobody chose.

use std::fmt;

use crate::frame::Nonce;
use crate::sum::{Sums, WORD};

/// The same hides and shows.
#[derive(Clone, Copy)]
pub(crate) struct Mask(u64);

impl Mask {
    pub const fn of(nonce: Nonce) -> Self {
        Self(nonce.get())
    }

    /// Hides what is shown, and shows what is hidden.
    pub fn apply(self, bytes: &mut [u8]) {
        self.pass(bytes, |_| {});
    }

    /// Shows what came, and says the sums of it as it came: one pass, since each costs an emulated guest as much as a copy.
    pub fn show(self, bytes: &mut [u8]) -> u64 {
        let mut sums = Sums::of_len(bytes.len());
        self.pass(bytes, |hidden| sums.add(hidden));
        sums.finish()
    }

    /// Tells each word as it is before it is changed, the last one filled up with zeros, as [`Sums`] wants it.
    fn pass(self, bytes: &mut [u8], mut before: impl FnMut(u64)) {
        let (words, rest) = bytes.as_chunks_mut::<WORD>();
        for word in words {
            let found = u64::from_le_bytes(*word);
            before(found);
            *word = (found ^ self.0).to_le_bytes();
        }
        let mut last = [0; WORD];
        last[..rest.len()].copy_from_slice(rest);
        before(u64::from_le_bytes(last));
        for (byte, mask) in rest.iter_mut().zip(self.0.to_le_bytes()) {
            *byte ^= mask;
        }
    }
}

impl fmt::Debug for Mask {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Mask")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sum;

    const MASK: Mask = Mask(0x8877_6655_4433_2211);

    #[test]
    fn what_is_hidden_is_shown_again_with_the_sums_of_what_travelled() {
        for len in [0, 1, 7, 8, 9, 16, 100, 4097] {
            let bytes: Vec<u8> = (0..=250).cycle().take(len).collect();
            let mut hidden = bytes.clone();
            MASK.apply(&mut hidden);
            assert!(bytes.iter().zip(&hidden).all(|(one, other)| one != other), "of {len} some travels as it is");
            let travelled = sum::of(&hidden);
            assert_eq!(MASK.show(&mut hidden), travelled, "of {len}");
            assert_eq!(hidden, bytes);
        }
    }
}
