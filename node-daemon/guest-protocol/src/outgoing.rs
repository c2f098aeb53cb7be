//! Bytes on their way to the port.

use crate::cobs;
use crate::frame::DELIMITER;

/// Above this its memory is given back when nothing waits any more.
const KEPT: usize = 1 << 20;

/// A queue of bytes whose memory is used again as it is: to clear it for each frame would cost as much as to copy one.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    /// As long as it ever was needed to be; only what is between `begin` and `end` counts.
    memory: Vec<u8>,
    begin: usize,
    end: usize,
}

impl Outgoing {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory[self.begin..self.end]
    }

    pub(crate) fn push(&mut self, byte: u8) {
        self.room(1)[0] = byte;
        self.end += 1;
    }

    /// Appends the stuffed form of `plain`, with its delimiter.
    pub(crate) fn push_frame(&mut self, plain: &[u8]) {
        let room = self.room(cobs::max_encoded_len(plain.len()) + cobs::SPARE + 1);
        let len = cobs::encode_into(plain, room);
        room[len] = DELIMITER;
        self.end += len + 1;
    }

    /// Appends delimiters: frames without anything in them.
    pub(crate) fn push_delimiters(&mut self, count: usize) {
        self.room(count)[..count].fill(DELIMITER);
        self.end += count;
    }

    /// Appends what `read` puts into so much room, behind the frame that `announce` makes for it, of at most `head` bytes.
    /// Nothing is appended when nothing was read. The bytes are read to where they are sent from, since to copy them
    /// costs an emulated guest as much as to read them.
    pub(crate) fn push_run(
        &mut self,
        (head, room): (usize, usize),
        read: impl FnOnce(&mut [u8]) -> usize,
        announce: impl FnOnce(&[u8]) -> Self,
    ) {
        let (before, rest) = self.room(head + room).split_at_mut(head);
        let len = read(&mut rest[..room]).min(room);
        if len == 0 {
            return;
        }
        let announced = announce(&rest[..len]);
        let frame = announced.bytes();
        // What the frame leaves of its room are empty frames.
        let (empty, place) = before.split_at_mut(head - frame.len());
        empty.fill(DELIMITER);
        place.copy_from_slice(frame);
        self.end += head + len;
    }

    /// The first `len` bytes were written.
    pub(crate) fn written(&mut self, len: usize) {
        self.begin = (self.begin + len).min(self.end);
        if self.begin == self.end {
            self.clear();
        }
    }

    pub(crate) fn clear(&mut self) {
        (self.begin, self.end) = (0, 0);
        if self.memory.len() > KEPT {
            self.give_back();
        }
    }

    /// Gives its memory back, unless something waits in it.
    pub(crate) fn give_back(&mut self) {
        if self.begin == self.end {
            *self = Self::default();
        }
    }

    /// What is kept for what comes.
    #[cfg(test)]
    pub(crate) const fn memory(&self) -> usize {
        self.memory.capacity()
    }

    /// The memory behind what waits, at least so much.
    fn room(&mut self, len: usize) -> &mut [u8] {
        // Moving the rest for every write would be quadratic; never would keep all that was ever sent.
        if self.begin >= KEPT {
            self.memory.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        if self.memory.len() < self.end + len {
            self.memory.resize(self.end + len, 0);
        }
        &mut self.memory[self.end..]
    }
}
