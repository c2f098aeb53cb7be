//! Creates objects and sees them placed.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt::Debug,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use kube::{
    Api, Resource, ResourceExt as _,
    api::PostParams,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{sync::watch, task::AbortHandle};

use super::arena::Arena;
use crate::figures::as_float;

/// Creations under way at once.
const CLIENTS: usize = 32;
/// A tenth of what is created at once is created at a steady pace, too.
const STEADY_SHARE: u32 = 10;
/// Between two of them: far below what either of the two can do.
const STEADY: Duration = Duration::from_millis(20);
/// Before anything counts: caches are filled, connections are open.
const WARM_UP: u32 = 50;
/// Without a further placement.
const PATIENCE: Duration = Duration::from_secs(120);

/// One kind of object with who places it.
pub struct Contest<'a, K> {
    pub arena: &'a Arena<'a>,
    pub api: Api<K>,
    pub make: fn(&str) -> Result<K>,
    pub is_placed: fn(&K) -> bool,
}

/// What one of them has done.
pub struct Score {
    pub burst: Outcome,
    pub steady: Outcome,
    /// To the API server, the creation counted, in the burst.
    pub writes_each: f64,
}

/// How a number of objects was placed.
pub struct Outcome {
    took: Duration,
    /// In milliseconds, the least first.
    latencies: Vec<f64>,
}

impl Outcome {
    pub fn rate(&self) -> f64 {
        as_float(self.latencies.len()) / self.took.as_secs_f64()
    }

    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the index of a quantile, between the first and the last"
    )]
    pub fn latency(&self, quantile: f64) -> f64 {
        let last = self.latencies.len().saturating_sub(1);
        let index = (as_float(last) * quantile).round() as usize;
        self.latencies.get(index).copied().unwrap_or_default()
    }
}

impl<K> Contest<'_, K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static,
{
    pub async fn play(&self, objects: u32) -> Result<Score> {
        let mut seen = Seen::begin(self.api.clone(), self.is_placed);
        self.round(&mut seen, "warm-up", WARM_UP, Duration::ZERO).await.context("warming up")?;
        let audit = self.arena.audit()?;
        let burst = self.round(&mut seen, "burst", objects, Duration::ZERO).await?;
        let writes_each = as_float(audit.writes()?.len()) / f64::from(objects);
        let steady = self.round(&mut seen, "steady", (objects / STEADY_SHARE).max(1), STEADY).await?;
        Ok(Score { burst, steady, writes_each })
    }

    /// Creates so many objects, at a pace or as fast as can be, and waits until all are placed.
    async fn round(&self, seen: &mut Seen, name: &str, count: u32, pace: Duration) -> Result<Outcome> {
        let names: Vec<_> = (0..count).map(|number| format!("{name}-{number}")).collect();
        let begun = Instant::now();
        let create = async |(number, name): (u32, &String)| {
            tokio::time::sleep_until((begun + pace * number).into()).await;
            let (object, at) = ((self.make)(name)?, Instant::now());
            self.api
                .create(&PostParams::default(), &object)
                .await
                .with_context(|| format!("failed to create {name}"))?;
            anyhow::Ok((name.clone(), at))
        };
        let created = stream::iter((0..).zip(&names)).map(create).buffer_unordered(CLIENTS);
        let created: HashMap<_, _> = created.try_collect().await?;
        let placed = seen.all(&names).await?;
        let latencies = created.iter().filter_map(|(name, at)| Some(placed.get(name)?.duration_since(*at)));
        let mut latencies: Vec<_> = latencies.map(|latency| latency.as_secs_f64() * 1000.0).collect();
        latencies.sort_by(f64::total_cmp);
        let last = names.iter().filter_map(|name| placed.get(name)).max().copied().unwrap_or(begun);
        Ok(Outcome { took: last.duration_since(begun), latencies })
    }
}

type Times = HashMap<String, Instant>;

/// When a watch showed each object as placed.
struct Seen {
    times: watch::Receiver<Times>,
    task: AbortHandle,
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Seen {
    fn begin<K>(api: Api<K>, is_placed: fn(&K) -> bool) -> Self
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let (sender, times) = watch::channel(Times::new());
        let task = tokio::spawn(async move {
            let mut objects =
                std::pin::pin!(watcher(api, watcher::Config::default()).default_backoff().applied_objects());
            while let Some(object) = objects.next().await {
                // An error is tried again by the stream itself.
                let Ok(object) = object else { continue };
                if is_placed(&object) {
                    let now = Instant::now();
                    // Its further versions are no news.
                    sender.send_if_modified(|all| match all.entry(object.name_any()) {
                        Entry::Occupied(_) => false,
                        Entry::Vacant(first) => {
                            first.insert(now);
                            true
                        }
                    });
                }
            }
        });
        Self { times, task: task.abort_handle() }
    }

    /// Waits until all of these are placed, for as long as the number of placements grows.
    async fn all(&mut self, names: &[String]) -> Result<Times> {
        let missing = |times: &Times| names.iter().filter(|name| !times.contains_key(*name)).count();
        loop {
            let left = {
                let times = self.times.borrow_and_update();
                match missing(&times) {
                    0 => return Ok(times.clone()),
                    left => left,
                }
            };
            match tokio::time::timeout(PATIENCE, self.times.changed()).await {
                Ok(changed) => changed.context("the watch ended")?,
                Err(_) => bail!("{left} of {} are not placed, and no more come within {PATIENCE:?}", names.len()),
            }
            // Each look goes through all names.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
