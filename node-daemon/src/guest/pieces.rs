//! What a guest said on a stream, and the stream's client did not take yet.
//!
//! Windows bound its bytes. Its memory is bounded here: a guest may say a byte at a time, and each piece costs many
//! times as much.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kibo_guest_protocol::{flow, v1::Output};
use tokio::sync::Notify;

use super::streams::ExecEvent;

/// While fewer events wait, they come in the order in which they were said, whichever outputs they are of. Beyond it
/// each output keeps its own order only, as the two pipes in the guest do.
const IN_ORDER: usize = 64;

/// Says what the guest said.
#[derive(Debug)]
pub(super) struct Speaker(Arc<Shared>);

/// Hears it. Nothing is kept once it is gone.
#[derive(Debug)]
pub(super) struct Hearer(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    news: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    events: VecDeque<ExecEvent>,
    deaf: bool,
}

/// Nobody hears it any more.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Deaf;

pub(super) fn channel() -> (Speaker, Hearer) {
    let shared = Arc::new(Shared::default());
    (Speaker(shared.clone()), Hearer(shared))
}

impl Speaker {
    pub fn say(&self, event: ExecEvent) -> Result<(), Deaf> {
        let mut waiting = self.0.waiting();
        if waiting.deaf {
            return Err(Deaf);
        }
        waiting.add(event);
        drop(waiting);
        self.0.news.notify_one();
        Ok(())
    }
}

impl Drop for Speaker {
    fn drop(&mut self) {
        // After an end nobody listens any more; otherwise the connection broke.
        let _ = self.say(ExecEvent::Lost);
    }
}

impl Hearer {
    /// The next event, as soon as there is one. The last is [`ExecEvent::Lost`].
    pub async fn hear(&mut self) -> ExecEvent {
        loop {
            if let Some(event) = self.0.waiting().events.pop_front() {
                return event;
            }
            // What is said before this waits is remembered.
            self.0.news.notified().await;
        }
    }
}

impl Drop for Hearer {
    fn drop(&mut self) {
        *self.0.waiting() = Waiting { events: VecDeque::new(), deaf: true };
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn add(&mut self, event: ExecEvent) {
        if let ExecEvent::Output(output, data) = &event
            && self.last_of(*output).is_some_and(|last| flow::join(last, data))
        {
            return;
        }
        self.events.push_back(event);
    }

    /// The piece that more of an output may be joined to.
    fn last_of(&mut self, wanted: Output) -> Option<&mut Vec<u8>> {
        let looked_at = if self.events.len() < IN_ORDER { 1 } else { usize::MAX };
        self.events.iter_mut().rev().take(looked_at).find_map(|event| match event {
            ExecEvent::Output(output, data) if *output == wanted => Some(data),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use kibo_guest_protocol::{MAX_CHUNK, ProcessEnd, flow::Width};

    use super::*;

    const OUTPUTS: [Output; 2] = [Output::Stdout, Output::Stderr];

    fn waiting(speaker: &Speaker) -> VecDeque<ExecEvent> {
        std::mem::take(&mut speaker.0.waiting().events)
    }

    #[test]
    fn a_million_single_bytes_are_few_pieces_and_all_there() {
        let (speaker, _hearer) = channel();
        let bytes: Vec<u8> = (0..=250).cycle().take(Width::WIDE.bytes()).collect();
        // In turns: no two in a row are of the same output.
        for byte in &bytes {
            for output in OUTPUTS {
                speaker.say(ExecEvent::Output(output, vec![*byte])).unwrap();
            }
        }
        speaker.say(ExecEvent::Ended(ProcessEnd::Code(0))).unwrap();
        let events = waiting(&speaker);
        assert!(events.len() <= IN_ORDER + 4 * bytes.len() / MAX_CHUNK, "{} pieces", events.len());
        let memory: usize =
            events.iter().map(|event| if let ExecEvent::Output(_, data) = event { data.capacity() } else { 0 }).sum();
        assert!(memory <= 4 * bytes.len(), "{memory} bytes of memory for {}", 2 * bytes.len());
        for wanted in OUTPUTS {
            let said = events.iter().filter_map(|event| match event {
                ExecEvent::Output(output, data) if *output == wanted => Some(data.as_slice()),
                _ => None,
            });
            assert!(said.collect::<Vec<_>>().concat() == bytes, "{wanted:?} has other bytes");
        }
        assert_eq!(events.back(), Some(&ExecEvent::Ended(ProcessEnd::Code(0))));
    }

    #[test]
    fn while_little_waits_it_comes_in_order() {
        let (speaker, _hearer) = channel();
        let (out, err) = (Output::Stdout, Output::Stderr);
        for (output, byte) in [(out, 1), (out, 2), (err, 3), (out, 4)] {
            speaker.say(ExecEvent::Output(output, vec![byte])).unwrap();
        }
        speaker.say(ExecEvent::Closed(out)).unwrap();
        let expected = [
            ExecEvent::Output(out, vec![1, 2]),
            ExecEvent::Output(err, vec![3]),
            ExecEvent::Output(out, vec![4]),
            ExecEvent::Closed(out),
        ];
        assert_eq!(waiting(&speaker), expected);
    }

    #[tokio::test]
    async fn who_speaks_and_goes_is_lost_after_all_was_heard() {
        let (speaker, mut hearer) = channel();
        let heard = tokio::spawn(async move { [hearer.hear().await, hearer.hear().await] });
        tokio::task::yield_now().await;
        speaker.say(ExecEvent::Closed(Output::Stdout)).unwrap();
        drop(speaker);
        assert_eq!(heard.await.unwrap(), [ExecEvent::Closed(Output::Stdout), ExecEvent::Lost]);
    }

    #[test]
    fn nothing_is_kept_for_nobody() {
        let (speaker, hearer) = channel();
        speaker.say(ExecEvent::Closed(Output::Stdout)).unwrap();
        drop(hearer);
        assert_eq!(waiting(&speaker), []);
        assert_eq!(speaker.say(ExecEvent::Closed(Output::Stdout)), Err(Deaf));
    }
}
