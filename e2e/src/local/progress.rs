//! Lines that say what is being done and how long it took.

use std::future::Future;
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Where the lines go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// To stderr, for a person.
    Shown,
    /// Nowhere, for tests.
    Quiet,
}

impl Progress {
    /// Runs one step and prints one line for it: `  etcd ............ 0.4 s`.
    pub async fn step<T, E>(self, what: &str, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        if self == Self::Quiet {
            return work.await;
        }
        let begun = Instant::now();
        // On a terminal the line is alive while the step runs; in a log it appears when it is done.
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("  {msg:.dim} {spinner} {elapsed}").expect("a constant template");
            let bar = ProgressBar::new_spinner().with_style(style).with_message(what.to_owned());
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        let result = work.await;
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        let outcome = match &result {
            Ok(_) => format!("{:6.1} s", begun.elapsed().as_secs_f32()),
            Err(_) => "failed".to_owned(),
        };
        // A closed stderr must not end the cluster that is being made.
        let _ = writeln!(std::io::stderr(), "  {:.<46} {outcome}", format!("{what} "));
        result
    }

    pub fn say(self, text: &str) {
        if self == Self::Shown {
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }
}
