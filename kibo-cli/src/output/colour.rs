//! Colours of states, on a terminal only.

use std::{env, io, io::IsTerminal as _, sync::OnceLock};

use comfy_table::Color;

static ON: OnceLock<bool> = OnceLock::new();

/// Turns colours on when standard output is a terminal and nobody has said no (<https://no-color.org>).
/// Until then, and in tests, there are none.
pub fn detect() {
    let unwanted = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = env::var_os("TERM").is_none_or(|term| term == "dumb");
    ON.get_or_init(|| io::stdout().is_terminal() && !unwanted && !dumb);
}

pub fn is_on() -> bool {
    ON.get().copied().unwrap_or(false)
}

/// The colour of a state: green is as it should be, yellow is on its way, red wants a look.
pub fn of(state: &str) -> Option<Color> {
    match state {
        "AVAILABLE" | "READY" | "BOUND" => Some(Color::DarkGreen),
        "CREATING" | "STARTING" | "STOPPING" | "DELETING" | "PENDING" | "NOT_READY" | "DRAINING" | "DRAINED" => {
            Some(Color::DarkYellow)
        }
        "FAILED" | "LOST" | "UNREACHABLE" | "OFFLINE" | "ISOLATED" | "REVOKED" => Some(Color::DarkRed),
        _ => None,
    }
}

/// A state in its colour; what stands behind it in brackets is left as it is.
pub fn state(text: &str) -> String {
    let word = text.split_whitespace().next().unwrap_or_default();
    let code = match of(word) {
        Some(Color::DarkGreen) if is_on() => 32,
        Some(Color::DarkYellow) if is_on() => 33,
        Some(Color::DarkRed) if is_on() => 31,
        _ => return text.to_owned(),
    };
    text.replacen(word, &format!("\u{1b}[{code}m{word}\u{1b}[39m"), 1)
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
        assert_eq!(state("FAILED (VMM_EXITED)"), "FAILED (VMM_EXITED)");
    }
}
