//! The user's terminal while a program in a guest has it: every byte goes there as it is typed.
//!
//! The terminal is given back as it was on every way out: the end of the command, an error, a signal, a panic.

use std::{
    io::{self, IsTerminal as _},
    panic,
    sync::{Mutex, Once, PoisonError},
};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// How the terminal was, as long as it is not given back. Also the panic hook needs it.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Columns and rows.
pub type Size = (u16, u16);

pub fn is_there() -> bool {
    io::stdin().is_terminal()
}

/// What the terminal says of its size; none: it does not say.
pub fn size() -> Option<Size> {
    let size = tcgetwinsize(io::stdin()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col, size.ws_row))
}

/// The terminal in raw mode; it is given back when this is dropped.
#[derive(Debug)]
pub struct Raw {
    raw: Termios,
}

impl Raw {
    pub fn enter() -> io::Result<Self> {
        give_back_on_panic();
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        *before_lock() = Some(before);
        let raw = Self { raw };
        raw.again()?;
        Ok(raw)
    }

    /// After the process was stopped and continued: the shell has set the terminal for itself meanwhile.
    pub fn again(&self) -> io::Result<()> {
        Ok(tcsetattr(io::stdin(), OptionalActions::Now, &self.raw)?)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        give_back();
    }
}

fn before_lock() -> std::sync::MutexGuard<'static, Option<Termios>> {
    BEFORE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn give_back() {
    if let Some(before) = before_lock().take() {
        // A terminal that has gone needs nothing.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &before);
    }
}

fn give_back_on_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            give_back();
            usual(info);
        }));
    });
}
