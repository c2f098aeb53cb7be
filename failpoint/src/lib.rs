//! Points between two steps at which a test makes a program wait or die.
//!
//! A point does nothing unless the program was built with the feature `failpoints` and started with
//! [`DIRECTORY_VARIABLE`], the directory through which a test speaks with it: a file there with the name of a point arms
//! it, and says in a word what is to happen ([`Action`]). Whoever reaches an armed point takes the file away, so that a
//! point acts once for each time that it was armed, whichever task or process comes by first. A program that waits is
//! seen by the file `<point>.reached`, and goes on when that is removed.
//!
//! The test is another process, and the tasks that wait must not hold a thread of the runtime: the crate `fail` can do
//! neither.

/// Names the directory; without it no point ever acts.
pub const DIRECTORY_VARIABLE: &str = "KIBOTOS_FAILPOINTS";

/// What an armed point does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Waits until the test lets it go on, or kills the process.
    Wait,
    /// Ends the process at once, as a crash does.
    Abort,
}

impl Action {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Abort => "abort",
        }
    }
}

/// Added to the name of a point that was reached.
pub const REACHED: &str = ".reached";

#[cfg(all(feature = "failpoints", not(debug_assertions)))]
compile_error!("failpoints are for tests: build releases without that feature");

#[cfg(feature = "failpoints")]
pub use armed::{reach, reach_blocking};

/// A point in a task.
#[cfg(not(feature = "failpoints"))]
#[inline]
#[expect(clippy::unused_async, reason = "the same signature as with failpoints")]
pub async fn reach(_: &str) {}

/// A point on a thread that may block.
#[cfg(not(feature = "failpoints"))]
#[inline]
pub fn reach_blocking(_: &str) {}

#[cfg(feature = "failpoints")]
mod armed {
    use std::{
        fs, io,
        path::{Path, PathBuf},
        sync::OnceLock,
        time::Duration,
    };

    use super::{Action, DIRECTORY_VARIABLE, REACHED};

    /// How often one who waits looks whether it may go on.
    const LOOK: Duration = Duration::from_millis(10);

    /// A point in a task.
    pub async fn reach(point: &str) {
        if let Some(reached) = directory().and_then(|directory| claim(directory, point)) {
            while reached.exists() {
                tokio::time::sleep(LOOK).await;
            }
        }
    }

    /// A point on a thread that may block.
    pub fn reach_blocking(point: &str) {
        if let Some(reached) = directory().and_then(|directory| claim(directory, point)) {
            while reached.exists() {
                std::thread::sleep(LOOK);
            }
        }
    }

    fn directory() -> Option<&'static Path> {
        static DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();
        DIRECTORY.get_or_init(|| std::env::var_os(DIRECTORY_VARIABLE).map(PathBuf::from)).as_deref()
    }

    /// Takes an armed point; gives back the file that stands while it waits. Does not return when it is to abort.
    pub(super) fn claim(directory: &Path, point: &str) -> Option<PathBuf> {
        let reached = directory.join(format!("{point}{REACHED}"));
        let armed = directory.join(point);
        // Read first: as soon as it bears the other name a test may remove it.
        let action = fs::read_to_string(&armed).ok()?;
        match fs::rename(&armed, &reached) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => panic!("failed to take the failpoint {}: {error}", armed.display()),
        }
        tracing::warn!(point, action, "failpoint");
        match action.trim() {
            word if word == Action::Wait.as_str() => Some(reached),
            word if word == Action::Abort.as_str() => std::process::abort(),
            other => panic!("{}: {other:?} is no action of a failpoint", armed.display()),
        }
    }
}

#[cfg(all(test, feature = "failpoints"))]
mod tests {
    use super::*;

    #[test]
    fn a_point_acts_once_for_each_time_that_it_is_armed() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(armed::claim(directory.path(), "p"), None);
        std::fs::write(directory.path().join("p"), Action::Wait.as_str()).unwrap();
        let reached = armed::claim(directory.path(), "p").expect("it is armed");
        assert!(reached.exists());
        assert_eq!(armed::claim(directory.path(), "p"), None);
    }
}
