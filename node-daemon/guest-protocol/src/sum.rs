//! Fletcher's checksum over words of eight bytes: it notices a frame that was cut, glued or put in another order, which is
//! what the channel does to frames; against an adversary no checksum helps.
//!
//! By hand because it is ten lines, and a table for each byte is what costs an emulated guest most.

pub(crate) const WORD: usize = size_of::<u64>();

/// The sums of all words and of all sums on the way, folded into one; the length counts too.
pub fn of(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<WORD>();
    let mut sums = Sums::of_len(bytes.len());
    for word in words {
        sums.add(u64::from_le_bytes(*word));
    }
    let mut last = [0; WORD];
    last[..rest.len()].copy_from_slice(rest);
    sums.add(u64::from_le_bytes(last));
    sums.finish()
}

/// The sums of words that come one after the other, the last one filled up with zeros.
pub(crate) struct Sums {
    sum: u64,
    sums: u64,
}

impl Sums {
    pub const fn of_len(len: usize) -> Self {
        // Not 0, or zeros at the beginning would count for nothing.
        Self { sum: len as u64 ^ 0x9e37_79b9_7f4a_7c15, sums: 0 }
    }

    pub const fn add(&mut self, word: u64) {
        self.sum = self.sum.wrapping_add(word);
        self.sums = self.sums.wrapping_add(self.sum);
    }

    pub const fn finish(self) -> u64 {
        self.sum.rotate_left(32) ^ self.sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_glued_and_swapped_words_are_noticed() {
        let bytes: Vec<u8> = (0..64).map(|at: u8| at.wrapping_mul(37)).collect();
        let whole = of(&bytes);
        let (first, second) = bytes.split_at(32);
        assert_ne!(of(&[second, first].concat()), whole);
        assert!((0..64).all(|len| of(&bytes[..len]) != whole));
        for at in 0..56 {
            let mut swapped = bytes.clone();
            swapped.swap(at, at + 8);
            assert_ne!(of(&swapped), whole, "at {at}");
        }
        let zeros: Vec<u64> = (0..40).map(|len| of(&vec![0; len])).collect();
        assert!((1..40).all(|len| !zeros[..len].contains(&zeros[len])), "zeros count");
    }
}
