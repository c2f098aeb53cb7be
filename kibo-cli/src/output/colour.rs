//! Colours of states and of errors, on a terminal only.

use std::{
    env, io,
    io::IsTerminal as _,
    sync::atomic::{AtomicBool, Ordering},
};

use clap::ColorChoice;
use comfy_table::Color;

/// Whether standard output and standard error have colours. Until somebody has chosen, and in tests, neither.
static STDOUT: AtomicBool = AtomicBool::new(false);
static STDERR: AtomicBool = AtomicBool::new(false);

/// Takes the choice of `--color`. By itself a terminal gets colours unless `NO_COLOR` (<https://no-color.org>) is
/// set or `TERM` says that it has none.
pub fn choose(choice: ColorChoice) {
    let unwanted = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = env::var_os("TERM").is_none_or(|term| term == "dumb");
    let wanted = |is_terminal: bool| match choice {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => is_terminal && !unwanted && !dumb,
    };
    STDOUT.store(wanted(io::stdout().is_terminal()), Ordering::Relaxed);
    STDERR.store(wanted(io::stderr().is_terminal()), Ordering::Relaxed);
}

/// Whether standard output has colours.
pub fn is_on() -> bool {
    STDOUT.load(Ordering::Relaxed)
}

/// The colour of a state: green is as it should be, yellow is on its way, red wants a look.
pub fn of(state: &str) -> Option<Color> {
    match state {
        "AVAILABLE" | "READY" | "BOUND" => Some(Color::DarkGreen),
        "CREATING" | "STARTING" | "STOPPING" | "DELETING" | "PENDING" | "NOT_READY" | "DRAINING" | "DRAINED" => {
            Some(Color::DarkYellow)
        }
        "FAILED" | "LOST" | "UNREACHABLE" | "OFFLINE" | "ISOLATED" | "REVOKED" | "Warning" => Some(Color::DarkRed),
        _ => None,
    }
}

/// A line in which the first `word` is a state, with its colour.
pub fn state_in(line: &str, word: &str) -> String {
    let code = match of(word) {
        Some(Color::DarkGreen) if is_on() => 32,
        Some(Color::DarkYellow) if is_on() => 33,
        Some(Color::DarkRed) if is_on() => 31,
        _ => return line.to_owned(),
    };
    line.replacen(word, &format!("\u{1b}[{code}m{word}\u{1b}[39m"), 1)
}

/// The word that begins an error.
pub fn error_word() -> &'static str {
    if STDERR.load(Ordering::Relaxed) { "\u{1b}[1;31merror:\u{1b}[0m" } else { "error:" }
}

/// The word that begins what to do about it.
pub fn next_word() -> &'static str {
    if STDERR.load(Ordering::Relaxed) { "\u{1b}[1mnext:\u{1b}[0m" } else { "next:" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_have_colours_and_other_words_have_none() {
        assert_eq!(of("AVAILABLE"), Some(Color::DarkGreen));
        assert_eq!(of("FAILED"), Some(Color::DarkRed));
        assert_eq!(of("STOPPED"), None);
        assert_eq!(of("debian-12"), None);
    }

    #[test]
    fn without_a_terminal_there_are_none() {
        assert_eq!(state_in("State:  FAILED (VMM_EXITED)", "FAILED"), "State:  FAILED (VMM_EXITED)");
        assert_eq!((error_word(), next_word()), ("error:", "next:"));
    }
}
