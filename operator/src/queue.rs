//! A work queue: each key is worked on by one task at a time, and what is asked for meanwhile comes once more.

use std::{
    collections::{HashMap, HashSet},
    pin::pin,
    time::Duration,
};

use futures::StreamExt as _;
use kube::runtime::scheduler::{ScheduleRequest, scheduler};
use tokio::{sync::mpsc, task::JoinSet, time::Instant};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::cache::Key;

/// After a panic in a task; the log has the rest.
const AFTER_PANIC: Duration = Duration::from_secs(5);

/// Where keys are asked for. Cheap to clone.
#[derive(Clone)]
pub struct Queue(mpsc::UnboundedSender<ScheduleRequest<Key>>);

/// The other end.
pub struct Work(mpsc::UnboundedReceiver<ScheduleRequest<Key>>);

pub fn queue() -> (Queue, Work) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (Queue(sender), Work(receiver))
}

impl Queue {
    pub fn push(&self, key: Key) {
        self.push_after(key, Duration::ZERO);
    }

    /// Asks for a key once `delay` has passed; an earlier request for it wins.
    pub fn push_after(&self, key: Key, delay: Duration) {
        // Nobody works any more when the leadership ends.
        let _ = self.0.send(ScheduleRequest { message: key, run_at: Instant::now() + delay });
    }
}

impl Work {
    /// Works until `stop`; `reconcile` answers when to look at the key again, if nothing asks for it before.
    /// What is under way at the end is dropped, as if the process had died.
    pub async fn run<F>(self, queue: Queue, stop: CancellationToken, reconcile: impl Fn(Key) -> F)
    where
        F: Future<Output = Option<Duration>> + Send + 'static,
    {
        let mut scheduled = pin!(scheduler(UnboundedReceiverStream::new(self.0)));
        let mut running: HashSet<Key> = HashSet::new();
        let mut tasks: JoinSet<Option<Duration>> = JoinSet::new();
        let mut keys: HashMap<tokio::task::Id, Key> = HashMap::new();
        loop {
            let mut due = scheduled.as_mut().hold_unless(|key: &Key| !running.contains(key));
            tokio::select! {
                () = stop.cancelled() => break,
                Some(ended) = tasks.join_next_with_id() => {
                    let (id, again) = match ended {
                        Ok((id, again)) => (id, again),
                        Err(error) => (error.id(), Some(AFTER_PANIC)),
                    };
                    if let Some(key) = keys.remove(&id) {
                        running.remove(&key);
                        if let Some(delay) = again {
                            queue.push_after(key, delay);
                        }
                    }
                }
                key = due.next() => {
                    let Some(key) = key else { break };
                    running.insert(key.clone());
                    let task = tasks.spawn(reconcile(key.clone()));
                    keys.insert(task.id(), key);
                }
            }
        }
        tasks.shutdown().await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };

    use super::*;

    #[tokio::test]
    async fn a_key_is_worked_on_by_one_task_and_comes_again_for_what_was_asked_meanwhile() {
        let (queue, work) = queue();
        let stop = CancellationToken::new();
        let (started, mut starts) = mpsc::unbounded_channel();
        let gate = Arc::new(tokio::sync::Semaphore::new(0));
        let at_once = Arc::new(AtomicU32::new(0));
        let worker = {
            let (queue, stop, gate, at_once) = (queue.clone(), stop.clone(), gate.clone(), at_once.clone());
            tokio::spawn(work.run(queue, stop, move |_| {
                let (started, gate, at_once) = (started.clone(), gate.clone(), at_once.clone());
                async move {
                    let others = at_once.fetch_add(1, Ordering::SeqCst);
                    started.send(others).unwrap();
                    gate.acquire().await.unwrap().forget();
                    at_once.fetch_sub(1, Ordering::SeqCst);
                    None
                }
            }))
        };
        let key = Key::new("default", "one");
        queue.push(key.clone());
        assert_eq!(starts.recv().await, Some(0));
        for _ in 0..5 {
            queue.push(key.clone());
        }
        gate.add_permits(2);
        assert_eq!(starts.recv().await, Some(0), "once more, and not beside the first");
        stop.cancel();
        worker.await.unwrap();
        assert_eq!(starts.recv().await, None, "five requests made one more run");
    }
}
