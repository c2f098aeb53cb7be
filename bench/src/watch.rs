//! Sees the Workspaces as whoever waits for them does: by a watch.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result, bail};
use futures::TryStreamExt as _;
use jiff::Timestamp;
use kibo_crds::{Workspace, workspace::WorkspacePhase};
use kibo_e2e::suite;
use kube::{
    Api, ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::{sync::watch, task::AbortHandle};

const LIMIT: Duration = Duration::from_secs(300);

/// What was seen of one Workspace.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// When it was seen to be available, first.
    pub available: Option<Timestamp>,
    pub last: Option<Workspace>,
}

/// A watch on the Workspaces of one namespace.
pub struct Watch {
    seen: watch::Receiver<BTreeMap<String, Seen>>,
    task: AbortHandle,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watch {
    pub fn begin(api: Api<Workspace>) -> Self {
        let (sender, seen) = watch::channel(BTreeMap::<String, Seen>::new());
        let task = tokio::spawn(async move {
            let mut events = std::pin::pin!(watcher(api, watcher::Config::default()).default_backoff());
            loop {
                let event = match events.try_next().await {
                    Ok(Some(event)) => event,
                    Ok(None) => return,
                    // It is tried again by the stream itself.
                    Err(_) => continue,
                };
                let now = Timestamp::now();
                match event {
                    watcher::Event::Apply(object) | watcher::Event::InitApply(object) => {
                        sender.send_modify(|all| note(all.entry(object.name_any()).or_default(), object, now));
                    }
                    watcher::Event::Delete(object) => {
                        sender.send_modify(|all| drop(all.remove(&object.name_any())));
                    }
                    watcher::Event::Init | watcher::Event::InitDone => {}
                }
            }
        });
        Self { seen, task: task.abort_handle() }
    }

    /// Waits until all of these are available. An error when one has failed instead.
    pub async fn available(&self, names: &[String]) -> Result<Vec<(Timestamp, Workspace)>> {
        let reached = |all: &BTreeMap<String, Seen>| {
            names.iter().all(|name| all.get(name).is_some_and(|seen| seen.available.is_some()))
                || names.iter().any(|name| all.get(name).is_some_and(has_failed))
        };
        let all = self.until("available", names, reached).await?;
        let result = names.iter().map(|name| {
            let seen = &all[name];
            match (seen.available, &seen.last) {
                (Some(at), Some(workspace)) => Ok((at, workspace.clone())),
                (_, last) => {
                    bail!("{name} did not become available: {}", last.as_ref().map(suite::why).unwrap_or_default())
                }
            }
        });
        result.collect()
    }

    /// Waits until it is stopped and nothing of it runs.
    pub async fn stopped(&self, name: &str) -> Result<()> {
        let is_stopped = |seen: &Seen| {
            let workspace = seen.last.as_ref().filter(|workspace| workspace.is_power_request_consumed());
            workspace.and_then(suite::phase_of) == Some(WorkspacePhase::Stopped)
        };
        let reached = |all: &BTreeMap<String, Seen>| all.get(name).is_some_and(is_stopped);
        self.until("stopped", &[name.to_owned()], reached).await.map(drop)
    }

    /// Waits until none of these exists.
    pub async fn gone(&self, names: &[String]) -> Result<()> {
        self.until("gone", names, |all| names.iter().all(|name| !all.contains_key(name))).await.map(drop)
    }

    async fn until(
        &self,
        what: &str,
        names: &[String],
        reached: impl Fn(&BTreeMap<String, Seen>) -> bool,
    ) -> Result<BTreeMap<String, Seen>> {
        let mut seen = self.seen.clone();
        let waited = tokio::time::timeout(LIMIT, seen.wait_for(|all| reached(all))).await;
        let all = waited.with_context(|| format!("{names:?} not {what} within {LIMIT:?}"))?;
        Ok(all.context("the watch ended")?.clone())
    }
}

fn note(seen: &mut Seen, object: Workspace, now: Timestamp) {
    if suite::is_available(&object) {
        seen.available.get_or_insert(now);
    } else {
        seen.available = None;
    }
    seen.last = Some(object);
}

fn has_failed(seen: &Seen) -> bool {
    seen.last.as_ref().is_some_and(|it| suite::has_failed(it) && it.is_power_request_consumed())
}
