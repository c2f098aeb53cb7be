//! Credit windows. Each stream and direction starts with a [`Width`]; the reader grants again what it passed on, so a
//! reader that stops makes its writer stop, and neither the other streams nor the buffers between notice.
//!
//! A window counts bytes, and what waits costs memory: see [`join`] for the pieces, [`COMMON`] for the streams.

use crate::MAX_CHUNK;

/// What the input of all streams of a guest may be ahead of their readers, beyond [`Width::NARROW`] for each: a guest
/// is small, and streams are many.
pub const COMMON: usize = 8 << 20;

/// What a guest may have printed, or may still print, ahead of those who read its streams, beyond what
/// [`Width::GROWING`] begins with for each output: they are many, and all of it may have to be kept.
pub const COMMON_OUTPUT: usize = 16 << 20;

// A reader grants a quarter of its window at once: who had less of it for sure would wait for ever.
const _: () = assert!(Width::NARROW.bytes() >= Width::WIDE.bytes() / 4);

/// Appends `next` to the piece before it, where both wait and are small; `false`: it stays a piece of its own. Whoever
/// sends single bytes would else make a reader keep many times as much as the window says.
pub fn join(last: &mut Vec<u8>, next: &[u8]) -> bool {
    let fits = last.len() + next.len() <= MAX_CHUNK;
    if fits {
        last.extend_from_slice(next);
    }
    fits
}

/// The bytes that may be sent before the first credit comes, and those that may be on their way at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width {
    begins: u32,
    widest: u32,
}

impl Width {
    /// Where one of the ends knows no runs.
    pub const NARROW: Self = Self::fixed(256 * 1024);
    /// Where both do: a credit is worth a whole run. With one CPU, each change between the two processes that pass bytes on
    /// costs as much as many kilobytes.
    pub const WIDE: Self = Self::fixed(1024 * 1024);
    /// Of outputs, where both ends know that a window may grow: one that is read becomes wide, and one that nobody reads
    /// stays as it is.
    pub const GROWING: Self = Self { begins: 64 * 1024, widest: Self::WIDE.widest };

    const fn fixed(bytes: u32) -> Self {
        Self { begins: bytes, widest: bytes }
    }

    /// At most.
    pub const fn bytes(self) -> usize {
        self.widest as usize
    }

    /// Before the first credit.
    pub const fn begins(self) -> usize {
        self.begins as usize
    }
}

/// How wide the windows of a connection's streams are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widths {
    /// Of what the daemon sends.
    pub input: Width,
    /// Of what the guest does.
    pub output: Width,
}

/// The writer's side.
#[derive(Debug)]
pub struct SendWindow {
    open: u32,
    width: Width,
}

impl SendWindow {
    pub const fn new(width: Width) -> Self {
        Self { open: width.begins, width }
    }

    /// How many bytes may be sent now.
    pub const fn available(&self) -> usize {
        self.open as usize
    }

    /// How many bytes were sent and not granted again, of a window that begins as wide as it gets.
    pub const fn ahead(&self) -> usize {
        (self.width.widest - self.open) as usize
    }

    /// What of [`Self::ahead`] is taken from [`COMMON`].
    pub const fn of_common(&self) -> usize {
        self.ahead().saturating_sub(Width::NARROW.bytes())
    }

    /// How many bytes may be sent now, with so much left of [`COMMON`].
    pub fn available_with(&self, common: usize) -> usize {
        let own = Width::NARROW.bytes().saturating_sub(self.ahead());
        self.available().min(own + common)
    }

    /// Counts `len` bytes as sent; never more than [`Self::available`].
    pub fn sent(&mut self, len: usize) {
        debug_assert!(len <= self.available(), "the window was looked at before");
        self.open = self.open.saturating_sub(u32::try_from(len).unwrap_or(u32::MAX));
    }

    /// The reader granted more. Never opens wider than its width says, so that a reader that grants without end cannot
    /// make the writer buffer without end.
    pub fn grant(&mut self, bytes: u32) {
        self.open = self.open.saturating_add(bytes).min(self.width.widest);
    }
}

/// The reader's side.
#[derive(Debug)]
pub struct ReceiveWindow {
    /// What the writer may still send.
    open: u32,
    /// What came and was not passed on yet.
    held: u32,
    /// What was passed on and not granted again yet.
    passed: u32,
    width: Width,
}

/// The writer sent more than it was granted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes were sent into a window of {open}")]
pub struct Overrun {
    pub len: usize,
    pub open: u32,
}

impl ReceiveWindow {
    pub const fn new(width: Width) -> Self {
        Self { open: width.begins, held: 0, passed: 0, width }
    }

    /// Counts `len` bytes as received.
    pub fn received(&mut self, len: usize) -> Result<(), Overrun> {
        let overrun = Overrun { len, open: self.open };
        let len = u32::try_from(len).ok().filter(|len| *len <= self.open).ok_or(overrun)?;
        self.open -= len;
        self.held += len;
        Ok(())
    }

    /// Counts `len` received bytes as passed on.
    pub fn passed_on(&mut self, len: usize) {
        let len = u32::try_from(len).unwrap_or(u32::MAX).min(self.held);
        self.held -= len;
        self.passed += len;
    }

    /// How much to grant, once it is worth a message. `common`: what is left of that from which a window grows; it doubles
    /// each time that a good part of it was used, so that it is wide where much is printed.
    pub fn credit(&mut self, common: usize) -> Option<u32> {
        let promised = self.promised();
        let was = promised + self.passed;
        let common = u32::try_from(common).unwrap_or(u32::MAX);
        let allowed = promised.max(self.width.begins).saturating_add(common).min(2 * was).min(self.width.widest);
        let credit = allowed.saturating_sub(promised);
        // A writer that is granted nothing has three quarters of its window before it, once all before was passed on.
        let is_worth_it = self.passed >= was / 4 && credit > 0 && credit >= allowed / 4;
        is_worth_it.then(|| {
            self.passed = 0;
            self.open += credit;
            credit
        })
    }

    /// As [`Self::passed_on`] and [`Self::credit`] for a window that begins as wide as it gets.
    pub fn consumed(&mut self, len: usize) -> Option<u32> {
        self.passed_on(len);
        self.credit(0)
    }

    /// What the reader may have to keep, beyond what the window began with.
    pub const fn beyond(&self) -> usize {
        self.promised().saturating_sub(self.width.begins) as usize
    }

    const fn promised(&self) -> u32 {
        self.open + self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_that_wait_are_few_whatever_they_were() {
        for len in [1, 100, 9_999, MAX_CHUNK / 2 + 1] {
            let mut waiting: Vec<Vec<u8>> = Vec::new();
            let sent: Vec<u8> = (0..=255).cycle().take(Width::WIDE.bytes()).collect();
            for piece in sent.chunks(len) {
                if !waiting.last_mut().is_some_and(|last| join(last, piece)) {
                    waiting.push(piece.to_vec());
                }
            }
            assert!(waiting.len() <= 2 * sent.len() / MAX_CHUNK, "{} pieces", waiting.len());
            assert_eq!(waiting.concat(), sent);
        }
    }

    #[test]
    fn each_window_is_open_for_a_credit_when_nothing_is_left_of_what_is_common() {
        for width in WIDTHS {
            let mut send = SendWindow::new(width);
            assert_eq!(send.available_with(COMMON), width.bytes());
            assert_eq!(send.available_with(0), Width::NARROW.bytes());
            send.sent(Width::NARROW.bytes());
            assert_eq!((send.available_with(0), send.of_common()), (0, 0));
            let mut receive = ReceiveWindow::new(width);
            receive.received(Width::NARROW.bytes()).expect("within the window");
            let credit = receive.consumed(Width::NARROW.bytes()).expect("worth a message");
            send.grant(credit);
            assert_eq!(send.available_with(0), Width::NARROW.bytes());
        }
    }

    const WIDTHS: [Width; 2] = [Width::NARROW, Width::WIDE];

    #[test]
    fn what_is_consumed_is_granted_again() {
        for width in WIDTHS {
            let (mut send, mut receive) = (SendWindow::new(width), ReceiveWindow::new(width));
            for _ in 0..100 {
                let len = send.available().min(50_000);
                send.sent(len);
                receive.received(len).expect("within the window");
                if let Some(credit) = receive.consumed(len) {
                    send.grant(credit);
                }
            }
            assert!(send.available() > width.bytes() / 2);
        }
    }

    #[test]
    fn a_window_that_is_read_grows_and_one_that_is_not_keeps_to_its_beginning() {
        let (mut send, mut receive) = (SendWindow::new(Width::GROWING), ReceiveWindow::new(Width::GROWING));
        assert_eq!(send.available(), Width::GROWING.begins());
        let mut pass = |send: &mut SendWindow, common: usize| {
            let len = send.available();
            send.sent(len);
            receive.received(len).expect("within the window");
            assert_eq!(receive.credit(0), None, "nobody has read it");
            receive.passed_on(len);
            send.grant(receive.credit(common).expect("all of it was read"));
            receive.beyond()
        };
        assert_eq!(pass(&mut send, 100_000), Width::GROWING.begins(), "twice as much");
        assert_eq!(pass(&mut send, 30_000), 30_000, "as much as there is");
        for _ in 0..4 {
            pass(&mut send, usize::MAX);
        }
        assert_eq!(send.available(), Width::GROWING.bytes());
        // What others need more is given back as it is read.
        assert_eq!(pass(&mut send, 0), 0);
        assert_eq!(send.available(), Width::GROWING.begins());
    }

    #[test]
    fn a_window_of_which_little_is_used_does_not_grow() {
        let mut receive = ReceiveWindow::new(Width::GROWING);
        receive.received(100).expect("within the window");
        receive.passed_on(100);
        assert_eq!((receive.credit(usize::MAX), receive.beyond()), (None, 0));
    }

    #[test]
    fn a_writer_whose_reader_reads_is_never_without_room() {
        for common in [0, 1, 7, 50_000, usize::MAX] {
            let (mut send, mut receive) = (SendWindow::new(Width::GROWING), ReceiveWindow::new(Width::GROWING));
            for len in (1..2000).map(|round: usize| round.pow(2) % 90_000) {
                let len = len.min(send.available());
                send.sent(len);
                receive.received(len).expect("within the window");
                receive.passed_on(len);
                if let Some(credit) = receive.credit(common) {
                    send.grant(credit);
                }
                assert!(send.available() > 0, "with {common} in common");
            }
        }
    }

    #[test]
    fn a_window_never_opens_wider_than_at_the_start() {
        for width in WIDTHS {
            let mut send = SendWindow::new(width);
            send.sent(10);
            send.grant(u32::MAX);
            assert_eq!(send.available(), width.bytes());
        }
    }

    #[test]
    fn a_writer_that_ignores_its_window_is_noticed() {
        for width in WIDTHS {
            let mut receive = ReceiveWindow::new(width);
            receive.received(width.bytes()).expect("exactly the window");
            assert_eq!(receive.received(1), Err(Overrun { len: 1, open: 0 }));
        }
    }

    #[test]
    fn consuming_more_than_was_received_grants_no_more_than_the_window() {
        for width in WIDTHS {
            let mut receive = ReceiveWindow::new(width);
            receive.received(width.bytes() / 2).expect("within the window");
            assert_eq!(receive.consumed(usize::MAX), Some(width.widest / 2));
            assert_eq!(receive.open, width.widest);
        }
    }
}
