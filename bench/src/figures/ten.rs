//! Ten starts at once beside ten bare boots at once.

use anyhow::Result;
use futures::future::try_join_all;
use jiff::Timestamp;
use kibo_e2e::local::{CONTROL_PLANE, Component};
use serde_json::json;

use super::between;
use crate::{
    bare::Bare,
    cpu,
    report::{Aim, Section, millis, ratio},
    site::{NAME, Site, workspace},
    spread::Spread,
    watch::Watch,
};

const TEN: usize = 10;
const ROUNDS: usize = 3;
const AIM: Aim = Aim::AtMost(1.1);

const EXPLAINED: &str = "\
Ten Workspaces in one `kubectl apply` until the last of them is Available, beside ten bare boots that begin at once until the \
last guest has confirmed its configuration; in turns, three times. Below, how many CPU seconds each part used during the ten \
starts.";

pub async fn measure(site: &Site) -> Result<Vec<Section>> {
    let (bare, watch) = (Bare::new(site)?, site.watch().await?);
    let (mut starts, mut boots, mut used) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let before = cpu_seconds(site)?;
        starts.push(start(site, &watch, round).await?);
        let after = cpu_seconds(site)?;
        used.push(before.into_iter().zip(after).map(|(before, after)| after - before).collect::<Vec<_>>());
        site.clear().await?;
        boots.push(boot(&bare).await?);
    }
    let mut section = Section::new("Ten starts at once", EXPLAINED, ["", "median", "min", "max", "aim", ""]);
    section.row("ten starts", Spread::of(starts.iter().copied()).cells(millis));
    section.row("ten bare boots", Spread::of(boots.iter().copied()).cells(millis));
    let ratios = Spread::of(starts.iter().zip(&boots).map(|(start, boot)| start / boot));
    section.row("ratio", ratios.cells(ratio).into_iter().chain(AIM.cells(ratios.median, ratio)));
    for (index, component) in components().iter().enumerate() {
        let spread = Spread::of(used.iter().map(|used| used[index]));
        section.row(&format!("CPU of {component}"), spread.cells(|seconds| format!("{seconds:.2} s")));
    }
    Ok(vec![section])
}

async fn start(site: &Site, watch: &Watch, round: usize) -> Result<f64> {
    let names: Vec<String> = (0..TEN).map(|number| format!("ten-{round}-{number}")).collect();
    let manifests: Vec<_> = names.iter().map(|name| workspace(name, json!({}))).collect();
    let begun = Timestamp::now();
    let (applied, available) = tokio::join!(site.apply(&manifests), watch.available(&names));
    applied?;
    let last = available?.into_iter().map(|(at, _)| at).max().unwrap_or(begun);
    Ok(between(begun, last))
}

async fn boot(bare: &Bare) -> Result<f64> {
    let begun = Timestamp::now();
    let guests = try_join_all((0..TEN).map(|_| bare.boot(false, |_, _| Ok(())))).await?;
    let last = guests.iter().map(|guest| guest.times.ready).max().unwrap_or(begun);
    Ok(between(begun, last))
}

fn components() -> Vec<Component> {
    CONTROL_PLANE.into_iter().chain([Component::Operator, Component::Node(NAME.to_owned())]).collect()
}

/// What each component has used since it was started.
fn cpu_seconds(site: &Site) -> Result<Vec<f64>> {
    components().iter().map(|component| cpu::seconds(site.pid(component)?)).collect()
}
