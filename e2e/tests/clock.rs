//! Hosts whose clocks are off: the daemon's own clock is set by libfaketime, and everything else is real.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kibo_crds::Node;
use kibo_crds::node::NodeClock;
use kibo_e2e::suite::{Place, START, Suite, condition, execution, is_available};
use serde_json::json;

const SOON: u64 = 30;

fn main() -> ExitCode {
    Suite::with_everything()
        .operator_args(["--clock-seconds=1"])
        .test("a_node_whose_clock_is_off_takes_nothing_until_it_is_right_again", off_and_right_again)
        .run()
}

/// Where Debian and its relatives have it, whatever the machine is.
fn libfaketime() -> Result<PathBuf> {
    let libraries = fs::read_dir("/usr/lib")?.flatten().map(|entry| entry.path().join("faketime/libfaketimeMT.so.1"));
    libraries.into_iter().find(|path| path.exists()).context("there is no libfaketime: run hack/setup")
}

/// A node whose daemon sees the time of the file `clock`, and reads it anew each second.
async fn node(place: &Place, clock: &Path) -> Result<String> {
    let env = [
        ("LD_PRELOAD", libfaketime()?.display().to_string()),
        ("FAKETIME_TIMESTAMP_FILE", clock.display().to_string()),
        ("FAKETIME_CACHE_DURATION", "1".to_owned()),
        // What it waits for is as long as ever: a clock that is set does not change that.
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
    ];
    let set = |node: &mut kibo_e2e::local::LocalNode| {
        node.env.extend(env.map(|(name, value)| (name.to_owned(), value)));
    };
    place.node_with("2", "1Gi", set).await
}

fn set(clock: &Path, offset: &str) -> Result<()> {
    Ok(fs::write(clock, offset)?)
}

/// Waits until the clock of a node is measured as it should be.
async fn measured(place: &Place, id: &str, what: &str, is: impl Fn(&NodeClock) -> bool) -> Result<Node> {
    let clock = |node: &Node| node.status.as_ref().and_then(|status| status.clock.as_ref()).is_some_and(&is);
    place.watched(place.all(), id, what, SOON, clock).await
}

fn node_condition(node: &Node, kind: &str) -> String {
    let conditions = node.status.iter().flat_map(|status| &status.conditions);
    let found = conditions.into_iter().find(|condition| condition.type_ == kind);
    found.map(|it| format!("{} {}", it.status, it.reason)).unwrap_or_default()
}

async fn off_and_right_again(place: Arc<Place>) -> Result<()> {
    let clock = place.cluster().layout().root().join(format!("{}.clock", place.namespace()));
    set(&clock, "+40")?;
    let id = node(&place, &clock).await?;
    let node = measured(&place, &id, "is ahead", |it| it.over && it.shown.starts_with("+40.")).await?;
    ensure!(node_condition(&node, "ClockSynchronized") == "False ClockOff", "{node:?}");
    ensure!(node_condition(&node, "Schedulable") == "False ClockOff", "{node:?}");
    ensure!(node_condition(&node, "Ready") == "True SessionLive", "{node:?}");
    for list in [place.kibo(&["node", "list"]).await?.ok()?, place.kubectl(&["get", "knode", &id]).await?.ok()?] {
        ensure!(list.lines().any(|line| line.starts_with(&id) && line.contains("s (over)")), "{list}");
    }

    place.create_workspace("box", json!({})).await?;
    let keeps_out = |it: &kibo_crds::Workspace| {
        condition(it, "Placed").is_some_and(|it| it.status == "False" && it.message.contains("whose clock is off"))
    };
    place.workspace("box", "is kept out", SOON, keeps_out).await?;
    // Behind is as bad as ahead.
    set(&clock, "-40")?;
    measured(&place, &id, "is behind", |it| it.over && it.shown.starts_with("-40.")).await?;
    place.workspace("box", "is kept out", SOON, keeps_out).await?;

    set(&clock, "+20")?;
    let node = measured(&place, &id, "is within bounds", |it| !it.over && it.offset_millis > 19_000).await?;
    ensure!(node_condition(&node, "ClockSynchronized") == "True WithinBounds", "{node:?}");
    let running = place.workspace("box", "is available", START, is_available).await?;

    // What runs goes on.
    set(&clock, "+40")?;
    measured(&place, &id, "is ahead again", |it| it.over).await?;
    ensure!(place.sh("box", "echo lives").await? == "lives");
    let still = place.workspace("box", "is available", SOON, is_available).await?;
    ensure!(execution(&still)? == execution(&running)?);
    set(&clock, "+0")?;
    measured(&place, &id, "is right", |it| !it.over && it.offset_millis.abs() < 1000).await?;
    Ok(())
}
