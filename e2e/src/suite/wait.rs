//! Waiting for a state, never for a time.

use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use anyhow::{Result, bail};
use futures::TryStreamExt as _;
use kube::api::Api;
use kube::runtime::{WatchStreamExt as _, watcher};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout};

/// Asks again and again until `probe` gives something; for what cannot be watched.
pub async fn eventually<T, F, R>(what: &str, limit: Duration, mut probe: F) -> Result<T>
where
    F: FnMut() -> R,
    R: Future<Output = Result<Option<T>>>,
{
    let deadline = Instant::now() + limit;
    loop {
        let outcome = probe().await;
        if let Ok(Some(found)) = outcome {
            return Ok(found);
        }
        if Instant::now() >= deadline {
            match outcome {
                Err(error) => return Err(error.context(format!("{what}: not within {limit:?}"))),
                _ => bail!("{what}: not within {limit:?}"),
            }
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Watches one object until `reached` is true of it (none: it does not exist), and gives it back.
/// After `limit` the error shows the object as it was last seen.
pub async fn watched<K>(
    api: Api<K>,
    name: &str,
    what: &str,
    limit: Duration,
    reached: impl Fn(Option<&K>) -> bool,
) -> Result<Option<K>>
where
    K: kube::Resource + Clone + Debug + DeserializeOwned + serde::Serialize + Send + 'static,
{
    let mut last = None;
    let watch = async {
        let mut stream = std::pin::pin!(watcher::watch_object(api, name).default_backoff());
        // An error of the watch (the API server restarts) is tried again by the stream itself.
        loop {
            match stream.try_next().await {
                Ok(Some(object)) => {
                    last = object;
                    if reached(last.as_ref()) {
                        return;
                    }
                }
                Ok(None) => return,
                Err(_) => {}
            }
        }
    };
    if timeout(limit, watch).await.is_ok() && reached(last.as_ref()) {
        return Ok(last);
    }
    let shown = match &last {
        Some(object) => serde_yaml::to_string(object).unwrap_or_else(|_| format!("{object:?}")),
        None => "it does not exist".to_owned(),
    };
    bail!("{name}: {what}: not within {limit:?}; last seen:\n{shown}")
}
