//! How long the parts of a start take, for /metrics: where its time goes.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use kibo_crds::InstanceId;
use kibo_protocol::v1::instance_event::Kind;

/// By `part`: what of a start took how long.
pub const METRIC: &str = "kibotos_start_seconds";

/// Upper bounds of the histogram's buckets.
pub const BUCKETS: [f64; 12] = [0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0];

/// A start that has said nothing for so long is not measured any more.
const GIVEN_UP: Duration = Duration::from_secs(3600);

/// From one part of a start to the next.
#[derive(Debug)]
pub struct Lap(Instant);

impl Lap {
    pub fn begin() -> Self {
        Self(Instant::now())
    }

    /// The part that began with the last one's end is over.
    pub fn end(&mut self, part: &'static str) {
        record(part, self.0);
        self.0 = Instant::now();
    }
}

/// The committed starts that are not available yet.
#[derive(Debug, Default)]
pub struct Stopwatch(Mutex<HashMap<InstanceId, Instant>>);

impl Stopwatch {
    fn lock(&self) -> MutexGuard<'_, HashMap<InstanceId, Instant>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    pub fn committed(&self, instance: InstanceId) {
        let mut committed = self.lock();
        committed.retain(|_, at| at.elapsed() < GIVEN_UP);
        committed.insert(instance, Instant::now());
    }

    /// What the node told of an Instance is stored now. Of a start that an earlier leader committed nothing is known.
    pub fn told(&self, instance: InstanceId, event: &Kind) {
        let mut committed = self.lock();
        match event {
            Kind::ObjectsTaken(_) => {
                if let Some(at) = committed.get(&instance) {
                    record("objects", *at);
                }
            }
            Kind::Available(_) => {
                if let Some(at) = committed.remove(&instance) {
                    record("available", at);
                }
            }
            Kind::Ended(_) => drop(committed.remove(&instance)),
            _ => {}
        }
    }
}

fn record(part: &'static str, since: Instant) {
    metrics::histogram!(METRIC, "part" => part).record(since.elapsed().as_secs_f64());
}
