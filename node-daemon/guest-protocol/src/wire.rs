//! What an end has to say, on its way to the port.

use prost::Message;

use crate::flow::{Width, Widths};
use crate::frame::{self, Check, Direction, Nonce, TooLong};
use crate::outgoing::Outgoing;
use crate::{MAX_RUN, WITH_MASKS, WITH_RUNS, WITH_SUMS, sum};

/// Frames on their way to the port.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    pub(crate) outgoing: Outgoing,
    /// Where frames are put together, kept so that its memory is not asked for again and again.
    plain: Vec<u8>,
    /// Where what is sent is read to.
    read: Vec<u8>,
    check: Check,
    /// What the other side understands.
    protocol: u32,
}

impl Wire {
    /// From here on frames are such as the other side understands.
    pub(crate) fn agree(&mut self, protocol: u32) {
        self.check = if protocol >= WITH_SUMS { Check::Sum } else { Check::Crc };
        self.protocol = protocol;
    }

    /// Whether the other side takes runs.
    pub(crate) const fn takes_runs(&self) -> bool {
        self.protocol >= WITH_RUNS
    }

    /// Whether the other side finds the bytes of runs behind a mask.
    pub(crate) const fn takes_masks(&self) -> bool {
        self.protocol >= WITH_MASKS
    }

    /// How wide the windows of streams are.
    pub(crate) const fn widths(&self) -> Widths {
        let input = if self.takes_runs() { Width::WIDE } else { Width::NARROW };
        Widths { input, output: if self.takes_masks() { Width::GROWING } else { input } }
    }

    pub(crate) fn push(&mut self, from: Direction, nonce: Nonce, message: &impl Message) -> Result<(), TooLong> {
        self.plain.clear();
        frame::begin(from, nonce, self.check, message.encoded_len(), &mut self.plain)?;
        message.encode(&mut self.plain).expect("a vector grows as needed");
        frame::seal(self.check, &mut self.plain, &mut self.outgoing);
        Ok(())
    }

    /// As [`Self::push`], for a message that ends with bytes, which are read to where they belong: `read` gets so much
    /// room and says how much it filled, `prefix` what stands before so many bytes, at most [`PREFIX`]. Nothing is sent
    /// when nothing was read.
    pub(crate) fn push_read(
        &mut self,
        (from, nonce): (Direction, Nonce),
        room: usize,
        read: impl FnOnce(&mut [u8]) -> usize,
        prefix: impl FnOnce(usize) -> Vec<u8>,
    ) -> Result<(), TooLong> {
        const BEFORE: usize = frame::HEADER + PREFIX;
        if self.read.len() < BEFORE + room + frame::SUM {
            self.read.resize(BEFORE + room + frame::SUM, 0);
        }
        let len = read(&mut self.read[BEFORE..BEFORE + room]).min(room);
        if len == 0 {
            return Ok(());
        }
        let prefix = prefix(len);
        self.plain.clear();
        frame::begin(from, nonce, self.check, prefix.len() + len, &mut self.plain)?;
        self.plain.extend_from_slice(&prefix);
        let begin = BEFORE - self.plain.len();
        self.read[begin..BEFORE].copy_from_slice(&self.plain);
        frame::seal_in_place(self.check, &mut self.read[begin..], BEFORE - begin + len, &mut self.outgoing);
        Ok(())
    }

    /// Sends what `read` puts into so much room, at most [`MAX_RUN`], as a run behind the message that `announce` makes of
    /// its length and sums. Nothing is sent when nothing was read.
    pub(crate) fn push_run<M: Message>(
        &mut self,
        (from, nonce): (Direction, Nonce),
        room: usize,
        read: impl FnOnce(&mut [u8]) -> usize,
        announce: impl FnOnce(u32, u64) -> M,
    ) {
        let Self { outgoing, plain, check, .. } = self;
        outgoing.push_run((HEAD, room.min(MAX_RUN)), read, |bytes| {
            let len = u32::try_from(bytes.len()).expect("at most MAX_RUN");
            let message = announce(len, sum::of(bytes));
            plain.clear();
            frame::begin(from, nonce, *check, message.encoded_len(), plain).expect("it is short");
            message.encode(plain).expect("a vector grows as needed");
            let mut head = Outgoing::default();
            frame::seal(*check, plain, &mut head);
            head
        });
    }

    pub(crate) fn outgoing(&self) -> &[u8] {
        self.outgoing.bytes()
    }

    pub(crate) fn written(&mut self, len: usize) {
        self.outgoing.written(len);
    }

    pub(crate) fn clear(&mut self) {
        self.outgoing.clear();
    }
}

/// Room for what stands before the bytes of a message.
pub(crate) const PREFIX: usize = 64;

/// Room for the frame that announces a run.
const HEAD: usize = 64;
