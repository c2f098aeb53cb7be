//! Waiting for an object by a watch, with a progress line on a terminal.

use std::{io, io::IsTerminal as _, time::Duration};

use futures::{StreamExt as _, TryStreamExt as _};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::de::DeserializeOwned;

use crate::{
    errors::{Error, Kind, Result, Subject, from_watch},
    output::words::span,
};

/// What one look at the object says.
#[derive(Debug, PartialEq, Eq)]
pub enum Look<T> {
    /// Not yet; what it waits for, for the progress line.
    Waiting(String),
    Done(T),
}

/// A wait for one object.
pub struct Wait<'a, K> {
    pub api: Api<K>,
    pub subject: &'a Subject,
    /// What is waited for: `to become AVAILABLE`.
    pub goal: &'a str,
    pub timeout: Duration,
    /// What remains true when the waiting ends early, by Ctrl-C or by the timeout, and how to go on.
    pub remains: &'a str,
    pub go_on: String,
}

impl<K> Wait<'_, K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    /// Watches the object until `look` is done or fails. `None` is an object that is not there.
    pub async fn until<T>(&self, mut look: impl FnMut(Option<&K>) -> Result<Look<T>>) -> Result<T> {
        let progress = spinner(&format!("{} {}", self.subject.name, self.goal));
        let mut last = String::new();
        let result = tokio::select! {
            result = self.watch(&mut look, &progress, &mut last) => result,
            () = tokio::time::sleep(self.timeout) => Err(self.timed_out(&last)),
            _ = tokio::signal::ctrl_c() => Err(self.interrupted()),
        };
        progress.finish_and_clear();
        result
    }

    async fn watch<T>(
        &self,
        look: &mut impl FnMut(Option<&K>) -> Result<Look<T>>,
        progress: &ProgressBar,
        last: &mut String,
    ) -> Result<T> {
        // The first list is a quorum read, so it shows what this command has written.
        let config = watcher::Config::default().fields(&format!("metadata.name={}", self.subject.name));
        let mut events = watcher(self.api.clone(), config).default_backoff().boxed();
        let (mut listed, mut was_shown) = (None, false);
        loop {
            let seen = match events.try_next().await {
                Ok(Some(watcher::Event::Init)) => {
                    listed = None;
                    continue;
                }
                Ok(Some(watcher::Event::InitApply(object))) => {
                    listed = Some(object);
                    continue;
                }
                Ok(Some(watcher::Event::InitDone)) => listed.take(),
                Ok(Some(watcher::Event::Apply(object))) => Some(object),
                Ok(Some(watcher::Event::Delete(_))) => None,
                Ok(None) => return Err(Error::new(Kind::Other, format!("{}: the watch ended", self.subject))),
                // A server that restarts forgets its watches, and for a moment the rights that it gave. What it
                // has shown once it will show again; what it refuses from the start stays refused.
                Err(error) if was_shown || is_passing(&error) => {
                    *last = format!("the API server does not answer: {}", from_watch(error, self.subject));
                    progress.set_message(last.clone());
                    continue;
                }
                Err(error) => {
                    let mut error = from_watch(error, self.subject);
                    error.message = format!("{error}; {}", self.remains);
                    return Err(error);
                }
            };
            was_shown = true;
            match look(seen.as_ref())? {
                Look::Done(value) => return Ok(value),
                Look::Waiting(text) => {
                    progress.set_message(text.clone());
                    *last = text;
                }
            }
        }
    }

    fn timed_out(&self, last: &str) -> Error {
        let seconds = i64::try_from(self.timeout.as_secs()).unwrap_or(i64::MAX);
        let last = if last.is_empty() { String::new() } else { format!("; last seen: {last}") };
        Error::new(
            Kind::Timeout,
            format!(
                "timed out after {} waiting for {} {}{last}; {}",
                span(seconds),
                self.subject,
                self.goal,
                self.remains
            ),
        )
        .next(format!("go on waiting: {}", self.go_on))
    }

    fn interrupted(&self) -> Error {
        Error::new(Kind::Interrupted, format!("interrupted; {}", self.remains))
            .next(format!("go on waiting: {}", self.go_on))
    }
}

/// Whether a watch that failed so can be made again with success.
fn is_passing(error: &watcher::Error) -> bool {
    match error {
        // The state that the watch began with is gone: a new list makes a new one.
        watcher::Error::WatchError(_) => true,
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => match error {
            kube::Error::Api(status) => !matches!(status.code, 400..=404 | 422),
            error => !matches!(error, kube::Error::SerdeError(_)),
        },
        watcher::Error::NoResourceVersion => false,
    }
}

/// A spinner with the time that has passed; nothing when standard error is not a terminal.
fn spinner(goal: &str) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} waiting for {prefix}: {wide_msg}") {
        bar.set_style(style);
    }
    bar.set_prefix(goal.to_owned());
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn a_watch_is_made_again_unless_it_is_refused() {
        let status = |code| Status { code, ..Status::default() }.boxed();
        let listing = |code| watcher::Error::InitialListFailed(kube::Error::Api(status(code)));
        for passing in [410, 429, 500, 503, 504] {
            assert!(is_passing(&listing(passing)), "{passing}");
        }
        for lasting in [400, 401, 403, 404] {
            assert!(!is_passing(&listing(lasting)), "{lasting}");
        }
        assert!(is_passing(&watcher::Error::WatchError(status(410))));
    }
}
