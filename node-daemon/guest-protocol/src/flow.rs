//! Credit windows. Each stream and direction starts with [`INITIAL`]; the reader grants again what it passed on, so a
//! reader that stops makes its writer stop, and neither the other streams nor the buffers between notice.

/// The bytes that may be sent before the first credit comes.
pub const INITIAL: u32 = 256 * 1024;

/// The writer's side.
#[derive(Debug)]
pub struct SendWindow(u32);

impl Default for SendWindow {
    fn default() -> Self {
        Self::initial()
    }
}

impl SendWindow {
    /// The window that a stream starts with.
    pub const fn initial() -> Self {
        Self(INITIAL)
    }

    /// How many bytes may be sent now.
    pub const fn available(&self) -> usize {
        self.0 as usize
    }

    /// Counts `len` bytes as sent; never more than [`Self::available`].
    pub fn sent(&mut self, len: usize) {
        debug_assert!(len <= self.available(), "the window was looked at before");
        self.0 = self.0.saturating_sub(u32::try_from(len).unwrap_or(u32::MAX));
    }

    /// The reader granted more. Never opens wider than at the start, so that a reader that grants without end cannot
    /// make the writer buffer without end.
    pub fn grant(&mut self, bytes: u32) {
        self.0 = self.0.saturating_add(bytes).min(INITIAL);
    }
}

/// The reader's side.
#[derive(Debug)]
pub struct ReceiveWindow {
    /// What the writer may still send.
    open: u32,
    /// What was passed on and not granted again yet.
    consumed: u32,
}

/// The writer sent more than it was granted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes were sent into a window of {open}")]
pub struct Overrun {
    pub len: usize,
    pub open: u32,
}

impl Default for ReceiveWindow {
    fn default() -> Self {
        Self { open: INITIAL, consumed: 0 }
    }
}

impl ReceiveWindow {
    /// Counts `len` bytes as received.
    pub fn received(&mut self, len: usize) -> Result<(), Overrun> {
        let taken = u32::try_from(len).ok().and_then(|len| self.open.checked_sub(len));
        self.open = taken.ok_or(Overrun { len, open: self.open })?;
        Ok(())
    }

    /// Counts `len` received bytes as passed on; says how much to grant, once it is worth a message.
    pub fn consumed(&mut self, len: usize) -> Option<u32> {
        let outstanding = INITIAL - self.open - self.consumed;
        self.consumed += u32::try_from(len).unwrap_or(u32::MAX).min(outstanding);
        if self.consumed < INITIAL / 4 {
            return None;
        }
        let credit = std::mem::take(&mut self.consumed);
        self.open += credit;
        Some(credit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_consumed_is_granted_again() {
        let (mut send, mut receive) = (SendWindow::default(), ReceiveWindow::default());
        for _ in 0..100 {
            let len = send.available().min(50_000);
            send.sent(len);
            receive.received(len).expect("within the window");
            if let Some(credit) = receive.consumed(len) {
                send.grant(credit);
            }
        }
        assert!(send.available() > INITIAL as usize / 2);
    }

    #[test]
    fn a_window_never_opens_wider_than_at_the_start() {
        let mut send = SendWindow::default();
        send.sent(10);
        send.grant(u32::MAX);
        assert_eq!(send.available(), INITIAL as usize);
    }

    #[test]
    fn a_writer_that_ignores_its_window_is_noticed() {
        let mut receive = ReceiveWindow::default();
        receive.received(INITIAL as usize).expect("exactly the window");
        assert_eq!(receive.received(1), Err(Overrun { len: 1, open: 0 }));
    }

    #[test]
    fn consuming_more_than_was_received_grants_no_more_than_the_window() {
        let mut receive = ReceiveWindow::default();
        receive.received(INITIAL as usize / 2).expect("within the window");
        assert_eq!(receive.consumed(usize::MAX), Some(INITIAL / 2));
        assert_eq!(receive.open, INITIAL);
    }
}
