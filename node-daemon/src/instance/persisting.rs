//! A step that is tried until it succeeds, however long that takes, and what people hear of it meanwhile.

use std::{fmt::Display, pin::pin, time::Duration};

const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_LAST: Duration = Duration::from_secs(30);
/// So many failures in a row are told.
const TELL_AFTER: u32 = 3;
/// An attempt that takes so long hangs, as with a storage pool that does not answer: that is no failure, and nobody would
/// hear of it.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Tells the error of attempts that come back, and of one that does not what `hangs` knows of it; again only what differs
/// from what was told last. `tell` says whether that reached anybody.
pub async fn until_succeeded<T, E, A, H>(
    what: &str,
    mut attempt: impl FnMut() -> A,
    hangs: impl Fn() -> String,
    mut tell: impl FnMut(String) -> H,
) -> T
where
    E: Display,
    A: Future<Output = Result<T, E>>,
    H: Future<Output = bool>,
{
    let mut told: Option<String> = None;
    let mut say = async |message: String, told: &mut Option<String>| {
        if told.as_ref() != Some(&message) && tell(message.clone()).await {
            *told = Some(message);
        }
    };
    let mut pause = RETRY_FIRST;
    let mut failures: u32 = 0;
    loop {
        let mut attempt = pin!(attempt());
        let result = loop {
            if let Ok(result) = tokio::time::timeout(PATIENCE, &mut attempt).await {
                break result;
            }
            let message = hangs();
            tracing::warn!(message, "failed to {what} until now; waiting");
            say(message, &mut told).await;
        };
        let problem = match result {
            Ok(value) => return value,
            Err(error) => error.to_string(),
        };
        tracing::warn!(problem, "failed to {what}; trying again");
        failures = failures.saturating_add(1);
        // Whatever was told is not left standing once it is something else.
        if failures >= TELL_AFTER || told.is_some() {
            say(problem, &mut told).await;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_LAST);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::time::{Instant, sleep};

    use super::*;

    const HOUR: u64 = 60 * 60;
    /// How long an attempt takes in seconds, and what comes of it.
    type Attempt = (u64, Result<(), &'static str>);

    /// What is told of these attempts, the last of which succeeds. The pool shows after 15 s that it does not answer.
    /// `deaf`: so often nothing can be told.
    async fn told(attempts: &[Attempt], deaf: u32) -> Vec<String> {
        let (began, told, deaf) = (Instant::now(), RefCell::new(vec![]), RefCell::new(deaf));
        let mut attempts = attempts.iter();
        let attempt = || {
            let (takes, result) = attempts.next().copied().expect("nothing is tried after a success");
            async move { (sleep(Duration::from_secs(takes)).await, result).1 }
        };
        let hangs = || if began.elapsed() < Duration::from_secs(15) { "slow" } else { "no answer" }.to_owned();
        let tell = |message| {
            let hears = deaf.replace_with(|left| left.saturating_sub(1)) == 0;
            if hears {
                told.borrow_mut().push(message);
            }
            std::future::ready(hears)
        };
        until_succeeded("do it", attempt, hangs, tell).await;
        assert_eq!(attempts.next(), None, "each failure is followed by another attempt");
        told.into_inner()
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_told_by_its_error_and_only_what_does_not_come_back_as_a_hang() {
        const DONE: Attempt = (0, Ok(()));
        const FULL: Attempt = (0, Err("full"));
        const DAMAGED: Attempt = (0, Err("damaged"));
        // It comes back each time, and all of that takes longer than one attempt may.
        const STILL_OPEN: Attempt = (8, Err("still open"));
        const HANGS: Attempt = (HOUR, Err("full"));
        let cases: &[(&str, &[Attempt], &[&str])] = &[
            ("succeeds", &[DONE], &[]),
            ("succeeds late", &[(9, Ok(()))], &[]),
            ("fails twice", &[FULL, FULL, DONE], &[]),
            ("fails at once, for minutes", &[[FULL; 12].as_slice(), &[DONE]].concat(), &["full"]),
            ("fails slowly", &[STILL_OPEN, STILL_OPEN, STILL_OPEN, STILL_OPEN, DONE], &["still open"]),
            ("fails otherwise", &[FULL, FULL, FULL, FULL, DAMAGED, DAMAGED, DONE], &["full", "damaged"]),
            ("hangs for a moment", &[(12, Ok(()))], &["slow"]),
            ("hangs", &[(HOUR, Ok(()))], &["slow", "no answer"]),
            ("hangs, then fails", &[HANGS, FULL, DONE], &["slow", "no answer", "full"]),
            ("fails, then hangs", &[FULL, FULL, FULL, (HOUR, Ok(()))], &["full", "slow", "no answer"]),
            ("hangs in between", &[FULL, FULL, FULL, HANGS, FULL, DONE], &["full", "slow", "no answer", "full"]),
            ("hangs before much was told", &[FULL, HANGS, DONE], &["slow", "no answer", "full"]),
        ];
        for (case, attempts, expected) in cases {
            assert_eq!(&told(attempts, 0).await, expected, "{case}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_could_not_be_told_is_told_later() {
        let fails: Attempt = (0, Err("full"));
        assert_eq!(told(&[fails, fails, fails, fails, fails, (0, Ok(()))], 2).await, ["full"]);
        assert_eq!(told(&[fails, fails, fails, (0, Ok(()))], 1).await, [""; 0]);
    }
}
