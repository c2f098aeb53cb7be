//! One start beside one bare boot, in turns.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use kibo_crds::Workspace;
use kube::api::DeleteParams;
use serde_json::json;

use super::between;
use crate::{
    audit::Write,
    bare::{Bare, Times},
    report::{Aim, Section, millis, ratio},
    site::{Site, workspace},
    spread::Spread,
    watch::Watch,
};

/// A start may take so many times as long as a bare boot.
const AIM: Aim = Aim::AtMost(1.15);

const EXPLAINED: &str = "\
From the start of `kubectl apply` to the moment in which a watch shows the Workspace as Available, beside a bare boot: QEMU \
with the same command line, kernel, initramfs, root image and freshly made disks, until the guest has confirmed the same \
configure message; no API server, no operator, no daemon. In turns, one after the other; the first pair is not counted. The \
ratio is of the two times of each pair.";

const PHASES: &str = "\
The medians of the same starts, phase by phase. Times of requests are the API server's (its audit log), those on the node the \
daemon's (the line `available` of its log). The phases of the bare boot that are the same stand beside them.";

/// The phases of a start, in their order, and what a bare boot calls the same.
const NAMES: [(&str, Option<&str>); 11] = [
    ("kubectl: started, and sends the object", None),
    ("API server: the object is stored", None),
    ("operator: sees it and makes it its own", None),
    ("operator: places it, the node accepts", None),
    ("operator: commits", None),
    ("session: Go, the daemon begins", None),
    ("daemon: records, disks made and taken", None),
    ("daemon: cgroup, sockets, QEMU is started", Some("started")),
    ("guest: boots, its agent answers", Some("agent")),
    ("guest: configured", Some("configured")),
    ("Available: event, status, seen", None),
];

type Phases = [f64; NAMES.len()];

struct Pair {
    start: f64,
    bare: f64,
    phases: Phases,
    times: Times,
}

pub async fn measure(site: &Site, pairs: u32) -> Result<Vec<Section>> {
    let (bare, watch) = (Bare::new(site)?, site.watch().await?);
    let mut measured = Vec::new();
    for number in 0..=pairs {
        let pair = pair(site, &bare, &watch, &format!("start-{number}")).await?;
        // What is read from disk for the first time is nobody's cost.
        if number > 0 {
            measured.push(pair);
        }
    }
    Ok(vec![overview(&measured), phases(&measured)])
}

fn overview(pairs: &[Pair]) -> Section {
    let mut section = Section::new("A start", EXPLAINED, ["", "median", "min", "max", "aim", ""]);
    section.row("start", Spread::of(pairs.iter().map(|pair| pair.start)).cells(millis));
    section.row("bare boot", Spread::of(pairs.iter().map(|pair| pair.bare)).cells(millis));
    let ratios = Spread::of(pairs.iter().map(|pair| pair.start / pair.bare));
    section.row("ratio", ratios.cells(ratio).into_iter().chain(AIM.cells(ratios.median, ratio)));
    section
}

fn phases(pairs: &[Pair]) -> Section {
    let mut section = Section::new("Where a start's time goes", PHASES, ["", "median", "min", "max", "bare boot"]);
    for (index, (name, same)) in NAMES.into_iter().enumerate() {
        let spread = Spread::of(pairs.iter().map(|pair| pair.phases[index]));
        let bare = same.map(|same| Spread::of(pairs.iter().map(|pair| bare_phases(&pair.times)[same])).median);
        section.row(name, spread.cells(tenths).into_iter().chain(bare.map(tenths)));
    }
    section
}

fn tenths(millis: f64) -> String {
    format!("{millis:.1} ms")
}

fn bare_phases(times: &Times) -> BTreeMap<&'static str, f64> {
    BTreeMap::from([
        ("started", between(times.begun, times.started)),
        ("agent", between(times.started, times.agent)),
        ("configured", between(times.agent, times.ready)),
    ])
}

async fn pair(site: &Site, bare: &Bare, watch: &Watch, name: &str) -> Result<Pair> {
    let (names, manifests) = ([name.to_owned()], [workspace(name, json!({}))]);
    let audit = site.audit()?;
    let begun = Timestamp::now();
    let (applied, available) = tokio::join!(site.apply(&manifests), watch.available(&names));
    applied?;
    let (seen, object) = available?.pop().context("one was waited for")?;
    let phases = split(begun, seen, &object, &audit.writes()?, &site.daemon_log()?)?;
    site.workspaces().await?.delete(name, &DeleteParams::default()).await?;
    watch.gone(&names).await?;
    let times = bare.boot(false, |_, _| Ok(())).await?.times;
    Ok(Pair { start: between(begun, seen), bare: between(times.begun, times.ready), phases, times })
}

/// The phases of one start.
fn split(begun: Timestamp, seen: Timestamp, object: &Workspace, writes: &[Write], log: &str) -> Result<Phases> {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let execution = object.status.as_ref().and_then(|status| status.execution.as_ref()).context("it runs nowhere")?;
    let instance = format!("instance={}", execution.instance_id);
    let line = |word: &str| {
        let found = log.lines().find(|line| line.contains(&instance) && line.contains(word));
        found.with_context(|| format!("the daemon's log has no line {word:?} of {instance}"))
    };
    let (starting, available) = (line(": starting ")?, line(": available ")?);
    let (starting_at, available_at) = (time_of(starting)?, time_of(available)?);
    let of_object: Vec<&Write> =
        writes.iter().filter(|write| write.name == name && write.resource.starts_with("workspaces")).collect();
    let created = of_object.first().context("nobody created it")?;
    let owned = of_object.get(1).context("the operator did not make it its own")?;
    let committed = of_object.iter().rev().find(|write| write.done <= starting_at).context("nobody committed it")?;
    let millis = |part: &str| {
        let value = available.split_whitespace().find_map(|word| word.rsplit_once(part)?.1.parse::<f64>().ok());
        value.with_context(|| format!("the daemon does not say {part}"))
    };
    Ok([
        between(begun, created.received),
        between(created.received, created.done),
        between(created.done, owned.done),
        between(owned.done, committed.received),
        between(committed.received, committed.done),
        between(committed.done, starting_at),
        millis("objects=")?,
        millis("process=")?,
        millis("agent=")?,
        millis("configured=")?,
        between(available_at, seen),
    ])
}

fn time_of(line: &str) -> Result<Timestamp> {
    let first = line.split_whitespace().next().unwrap_or_default();
    first.parse().with_context(|| format!("a line of the daemon's log has no time: {line}"))
}
