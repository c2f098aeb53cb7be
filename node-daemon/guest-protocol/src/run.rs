//! Runs that are on their way in.

use crate::mask::Mask;
use crate::{MAX_RUN, sum};

/// What was announced, and what has come of it.
#[derive(Debug)]
pub(crate) struct Run<H> {
    pub head: H,
    /// As long as the whole run; what has come is at its beginning.
    data: Vec<u8>,
    filled: usize,
    sum: u64,
    mask: Option<Mask>,
}

impl<H> Run<H> {
    /// `None`: a run cannot be so long. `memory` gives what it is put into, which is used as it is, since to clear it
    /// costs as much as to copy it.
    pub fn begin(head: H, len: u32, sum: u64, memory: impl FnOnce(usize) -> Vec<u8>) -> Option<Self> {
        let len = usize::try_from(len).ok().filter(|len| (1..=MAX_RUN).contains(len))?;
        let mut data = memory(len);
        data.resize(len, 0);
        Some(Self { head, data, filled: 0, sum, mask: None })
    }

    /// Its bytes are hidden by this.
    pub fn masked(self, mask: Mask) -> Self {
        Self { mask: Some(mask), ..self }
    }

    pub const fn len(&self) -> usize {
        self.data.len()
    }

    /// Takes what came next of it; never more than is missing.
    pub fn push(&mut self, bytes: &[u8]) {
        let len = bytes.len();
        self.room()[..len].copy_from_slice(bytes);
        self.filled(len);
    }

    /// Where the next bytes belong.
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.data[self.filled..]
    }

    /// So many bytes were put into [`Self::room`].
    pub fn filled(&mut self, len: usize) {
        self.filled = (self.filled + len).min(self.data.len());
    }

    pub const fn is_whole(&self) -> bool {
        self.filled == self.data.len()
    }

    /// The bytes; `None`: they are not those that were announced.
    pub fn finish(mut self) -> (H, Option<Vec<u8>>) {
        let is_whole = self.is_whole();
        let found = match self.mask {
            Some(mask) => mask.show(&mut self.data),
            None => sum::of(&self.data),
        };
        (self.head, (is_whole && found == self.sum).then_some(self.data))
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
