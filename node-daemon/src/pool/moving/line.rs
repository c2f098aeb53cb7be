//! What of a copy is where: begun, written, durable, read back. Each follows the one before it, on threads of its own.
//!
//! Between two disks the copy is read back while the image is still being read. On one disk that only makes both slower
//! (tried: a tenth to a third), and the copy is read back when nothing else is to be done any more.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::copy::CopyError;
use crate::pool::sparse::{Content, Data};

/// So much is written before it is made durable, and can be read back; after so long, less is enough.
const SYNC_EVERY: u64 = 64 << 20;
const SYNC_AFTER: Duration = Duration::from_secs(2);

/// How far a copy is, and what was read of the image up to there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    pub at: u64,
    pub content: Content,
}

pub struct Line<'a> {
    copy: &'a File,
    size: u64,
    is_one_disk: bool,
    state: Mutex<State<'a>>,
    moved: Condvar,
}

struct State<'a> {
    /// Of the image, what is not begun.
    rest: Data<'a>,
    is_all_begun: bool,
    /// The ends of the pieces under way, from the first one on that is not written; with its content one is.
    begun: VecDeque<(u64, Option<Content>)>,
    /// How many came before them.
    ended: u64,
    written: Mark,
    /// Bytes that were written since it was last made durable, and when that was.
    unsynced: u64,
    synced: Instant,
    durable: u64,
    /// Of the copy, what is not read back, as far as it was durable when this was set.
    back: Data<'a>,
    back_to: u64,
    found: Content,
    has_failed: bool,
}

impl<'a> Line<'a> {
    pub fn new(image: &'a File, copy: &'a File, size: u64, from: Mark, is_one_disk: bool) -> Self {
        let state = State {
            rest: Data::of(image, from.at, size),
            is_all_begun: false,
            begun: VecDeque::new(),
            ended: 0,
            written: from,
            unsynced: 0,
            synced: Instant::now(),
            durable: from.at,
            back: Data::of(copy, 0, from.at),
            back_to: from.at,
            found: Content::default(),
            has_failed: false,
        };
        Self { copy, size, is_one_disk, state: Mutex::new(state), moved: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State<'a>> {
        // Whoever panics ends the copy.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something on this thread; should it fail, or panic, all others have nothing to do any more.
    pub fn unless_it_fails(&self, work: impl FnOnce() -> Result<(), CopyError>) -> Result<(), CopyError> {
        struct Failed<'l, 'a>(&'l Line<'a>);

        impl Drop for Failed<'_, '_> {
            fn drop(&mut self) {
                self.0.state().has_failed = true;
                self.0.moved.notify_all();
            }
        }

        let failed = Failed(self);
        work()?;
        std::mem::forget(failed);
        Ok(())
    }

    /// Number, offset and length of the next piece to copy; `None`: there is none.
    pub fn begin(&self) -> io::Result<Option<(u64, u64, usize)>> {
        let mut state = self.state();
        if state.has_failed {
            return Ok(None);
        }
        let Some((offset, len)) = state.rest.next()? else {
            state.is_all_begun = true;
            self.advance(&mut state);
            return Ok(None);
        };
        let number = state.ended + state.begun.len() as u64;
        state.begun.push_back((offset + len as u64, None));
        Ok(Some((number, offset, len)))
    }

    /// A piece was written.
    pub fn end(&self, number: u64, len: usize, content: Content) {
        let mut state = self.state();
        let at = usize::try_from(number - state.ended).unwrap_or(usize::MAX);
        if let Some((_, copied)) = state.begun.get_mut(at) {
            *copied = Some(content);
        }
        state.unsynced += len as u64;
        self.advance(&mut state);
    }

    fn advance(&self, state: &mut State<'_>) {
        while let Some((end, Some(content))) = state.begun.front().copied() {
            state.begun.pop_front();
            state.ended += 1;
            state.written.at = end;
            state.written.content.add(content);
        }
        if state.is_all_begun && state.begun.is_empty() {
            // Behind the last piece there are holes.
            state.written.at = self.size;
        }
        self.moved.notify_all();
    }

    /// Waits until it is worth it to make the copy durable, up to this mark. `None`: it is.
    pub fn to_sync(&self) -> Option<Mark> {
        let mut state = self.state();
        loop {
            if state.has_failed || state.durable == self.size {
                return None;
            }
            let age = state.synced.elapsed();
            let is_much = state.unsynced >= SYNC_EVERY && !self.is_one_disk;
            let is_worth_it = is_much || age >= SYNC_AFTER || state.written.at == self.size;
            if is_worth_it && state.written.at > state.durable {
                (state.unsynced, state.synced) = (0, Instant::now());
                return Some(state.written);
            }
            let patience = SYNC_AFTER.saturating_sub(age).max(Duration::from_millis(1));
            (state, _) = self.moved.wait_timeout(state, patience).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub fn is_durable(&self, mark: Mark) {
        self.state().durable = mark.at;
        self.moved.notify_all();
    }

    /// Waits for the next piece to read back: offset and length. `None`: there is none any more.
    pub fn to_read(&self) -> io::Result<Option<(u64, usize)>> {
        let mut state = self.state();
        loop {
            if state.has_failed {
                return Ok(None);
            }
            if self.is_one_disk && state.durable < self.size {
                state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if let Some(piece) = state.back.next()? {
                return Ok(Some(piece));
            }
            if state.back_to < state.durable {
                state.back = Data::of(self.copy, state.back_to, state.durable);
                state.back_to = state.durable;
            } else if state.durable == self.size {
                return Ok(None);
            } else {
                state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    pub fn was_read(&self, content: Content) {
        self.state().found.add(content);
    }

    /// What was read back of the whole copy is what was read of the image.
    pub fn is_the_same(&self) -> bool {
        let state = self.state();
        state.found == state.written.content
    }
}
