//! What a node says is its word, and some hosts lie: how much of it is taken in, before anything is made of it. Pure.

use std::time::{Duration, Instant};

use kibo_protocol::v1::{self, from_node::Message, instance_event::Kind};

/// No text of a node needs more; it goes into logs, conditions and answers.
const LONGEST_TEXT: usize = 1024;

/// Makes every text in a message fit for a log and a condition: short, and on one line.
pub fn bound(message: &mut Message) {
    match message {
        Message::Refuse(refuse) => text(&mut refuse.message),
        Message::ObjectResult(result) => text(&mut result.message),
        Message::StreamRefused(refused) => text(&mut refused.message),
        Message::MoveProgress(progress) => text(&mut progress.message),
        Message::FenceSeen(v1::FenceSeen { result: Some(v1::fence_seen::Result::Problem(problem)), .. }) => {
            text(problem);
        }
        Message::PoolListing(listing) => {
            text(&mut listing.problem);
            listing.entries.iter_mut().for_each(|entry| text(&mut entry.name));
        }
        Message::Events(batch) => batch.events.iter_mut().for_each(event),
        _ => {}
    }
}

fn event(event: &mut v1::InstanceEvent) {
    match &mut event.kind {
        Some(Kind::Ended(ended)) => text(&mut ended.message),
        Some(Kind::Blocked(blocked)) => text(&mut blocked.message),
        Some(Kind::Paused(paused)) => text(&mut paused.message),
        _ => {}
    }
}

fn text(text: &mut String) {
    if text.len() > LONGEST_TEXT || text.contains(char::is_control) {
        *text = one_line(text);
    }
}

/// The beginning of a text, without what would forge another line of a log.
pub fn one_line(text: &str) -> String {
    let visible = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(LONGEST_TEXT).map(visible).collect()
}

/// One thing each interval on the average, and so many at once.
#[derive(Clone, Debug)]
pub struct Pace {
    interval: Duration,
    burst: Duration,
    /// When everything that was counted would have come, one thing each interval.
    due: Instant,
}

impl Pace {
    pub fn new(interval: Duration, burst: u32, now: Instant) -> Self {
        Self { interval, burst: interval * burst, due: now }
    }

    /// How long the next thing is to wait.
    pub fn wait(&self, now: Instant) -> Duration {
        self.due.saturating_duration_since(now).saturating_sub(self.burst)
    }

    pub fn count(&mut self, now: Instant) {
        self.due = self.due.max(now) + self.interval;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_of_a_node_fills_a_log_or_forges_a_line() {
        let long = "a\nERROR forged ".repeat(1000);
        let kind = Some(Kind::Ended(v1::Ended { message: long.clone(), ..v1::Ended::default() }));
        let events = vec![v1::InstanceEvent { kind, ..v1::InstanceEvent::default() }];
        let mut message = Message::Events(v1::Events { events });
        bound(&mut message);
        let Message::Events(batch) = message else { unreachable!() };
        let Some(Kind::Ended(ended)) = &batch.events[0].kind else { unreachable!() };
        assert_eq!(ended.message.len(), LONGEST_TEXT);
        assert!(ended.message.starts_with("a ERROR forged a"));
        let mut fine = Message::Refuse(v1::Refuse { message: "zu voll: 3 GiB".into(), ..v1::Refuse::default() });
        let before = fine.clone();
        bound(&mut fine);
        assert_eq!(fine, before);
    }

    #[test]
    fn a_burst_is_free_and_then_one_each_interval() {
        let begun = Instant::now();
        let mut pace = Pace::new(Duration::from_secs(1), 3, begun);
        for _ in 0..3 {
            assert_eq!(pace.wait(begun), Duration::ZERO);
            pace.count(begun);
        }
        assert_eq!(pace.wait(begun), Duration::ZERO);
        pace.count(begun);
        assert_eq!(pace.wait(begun), Duration::from_secs(1));
        let later = begun + Duration::from_secs(60);
        assert_eq!(pace.wait(later), Duration::ZERO, "what was not used is not kept");
        (0..4).for_each(|_| pace.count(later));
        assert_eq!(pace.wait(later), Duration::from_secs(1));
    }
}
