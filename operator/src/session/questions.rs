//! What a node was asked and has not answered yet.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::oneshot, time::timeout};

/// The questions of one kind, by their ids.
#[derive(Debug)]
pub struct Questions<T>(Mutex<HashMap<String, oneshot::Sender<T>>>);

/// One of them. Dropped, nobody waits for its answer any more.
#[derive(Debug)]
pub struct Question<'a, T> {
    all: &'a Questions<T>,
    id: String,
    answer: oneshot::Receiver<T>,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    Late,
    /// The session ended first.
    SessionLost,
}

impl<T> Default for Questions<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Questions<T> {
    /// From now on the answer is waited for: before the question is sent.
    pub fn expect(&self, id: &str) -> Question<'_, T> {
        let (answered, answer) = oneshot::channel();
        self.waiting().insert(id.to_owned(), answered);
        Question { all: self, id: id.to_owned(), answer }
    }

    /// Hands an answer over; `false` when nobody waits for it any more.
    pub fn answer(&self, id: &str, answer: T) -> bool {
        let asked = self.waiting().remove(id);
        asked.is_some_and(|asked| asked.send(answer).is_ok())
    }

    /// None of them will be answered: the session has ended.
    pub fn close(&self) {
        self.waiting().clear();
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<String, oneshot::Sender<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Question<'_, T> {
    pub async fn answered(&mut self, within: Duration) -> Result<T, Unanswered> {
        match timeout(within, &mut self.answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(Unanswered::SessionLost),
            Err(_) => Err(Unanswered::Late),
        }
    }
}

impl<T> Drop for Question<'_, T> {
    fn drop(&mut self) {
        self.answer.close();
        let mut waiting = self.all.waiting();
        // One that was asked anew with this id goes on.
        if waiting.get(&self.id).is_some_and(oneshot::Sender::is_closed) {
            waiting.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(3);

    #[tokio::test(start_paused = true)]
    async fn an_answer_comes_to_its_question_and_to_no_other() {
        let questions = Questions::default();
        let (mut first, mut second) = (questions.expect("a"), questions.expect("b"));
        assert!(questions.answer("b", 2) && !questions.answer("b", 3) && !questions.answer("c", 4));
        assert_eq!((second.answered(SOON).await, first.answered(SOON).await), (Ok(2), Err(Unanswered::Late)));
        questions.close();
        assert_eq!(first.answered(SOON).await, Err(Unanswered::SessionLost));
    }

    #[test]
    fn whoever_goes_without_an_answer_leaves_nothing_behind() {
        let questions = Questions::<u32>::default();
        drop(questions.expect("a"));
        assert!(questions.waiting().is_empty() && !questions.answer("a", 1));
        let first = questions.expect("a");
        let _again = questions.expect("a");
        drop(first);
        assert!(questions.answer("a", 1), "it was asked anew");
    }
}
