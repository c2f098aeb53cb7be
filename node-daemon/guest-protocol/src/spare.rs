//! Memory that is used again.

use crate::MAX_RUN;
use crate::flow::Width;

/// Pieces whose memory is kept: as many runs as a window has.
const KEPT: usize = Width::WIDE.bytes() / MAX_RUN;

/// The memory of pieces that were passed on: to ask for memory for each costs an emulated guest more than to copy it.
#[derive(Debug, Default)]
pub(crate) struct Spare(Vec<Vec<u8>>);

impl Spare {
    /// Memory for a piece of `len` bytes, with whatever is in it. Never much more than that: the piece may wait for
    /// long, and many like it.
    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let fits = |memory: &Vec<u8>| (len..=len.saturating_mul(2)).contains(&memory.capacity());
        let found = self.0.iter().rposition(fits);
        found.map_or_else(|| Vec::with_capacity(len), |at| self.0.swap_remove(at))
    }

    /// Takes memory back; the largest is kept.
    pub fn put(&mut self, memory: Vec<u8>) {
        if self.0.len() < KEPT {
            self.0.push(memory);
        } else if let Some(smallest) = self.0.iter_mut().min_by_key(|kept| kept.capacity())
            && smallest.capacity() < memory.capacity()
        {
            *smallest = memory;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_piece_does_not_keep_large_memory() {
        let mut spare = Spare::default();
        spare.put(Vec::with_capacity(MAX_RUN));
        for len in [1, 1000, MAX_RUN / 2 - 1] {
            let memory = spare.take(len);
            assert!((len..=2 * len).contains(&memory.capacity()), "{} for {len}", memory.capacity());
            spare.put(memory);
        }
        let large: Vec<u8> = Vec::with_capacity(MAX_RUN);
        let at = large.as_ptr().addr();
        spare.put(large);
        let taken = spare.take(MAX_RUN);
        assert_eq!(taken.as_ptr().addr(), at, "memory that fits is used again");
    }

    #[test]
    fn what_is_kept_is_bounded_and_the_largest() {
        let mut spare = Spare::default();
        for len in 1..=10 * KEPT {
            spare.put(Vec::with_capacity(len * 1000));
            spare.put(Vec::with_capacity(1));
        }
        assert_eq!(spare.0.len(), KEPT);
        assert!(spare.0.iter().all(|kept| kept.capacity() > 8 * KEPT * 1000));
    }
}
