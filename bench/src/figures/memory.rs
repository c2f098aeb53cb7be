//! What the programs hold, and what a VM costs beyond its guest's own pages.

use anyhow::{Context as _, Result};
use kibo_e2e::local::Component;
use procfs::process::{Process, SmapsRollup};
use serde_json::json;

use crate::{
    report::{Aim, Section, mib},
    site::{MEMORY_MIB, NAME, Site, workspace},
    spread::Spread,
};

const WORKSPACES: usize = 100;
const RUNNING: usize = 10;
const OPERATOR: Aim = Aim::AtMost(60.0);
const DAEMON: Aim = Aim::AtMost(25.0);

const EXPLAINED: &str = "\
Resident memory, file pages included, with 100 Workspaces of which 10 run. What a VM costs is QEMU's proportional set \
without the pages of the guest's own memory, which are shared memory of their own kind.";

pub async fn measure(site: &Site) -> Result<Vec<Section>> {
    let daemon = Component::Node(NAME.to_owned());
    let before = resident(site, &daemon)?;
    let watch = site.watch().await?;
    let names: Vec<String> = (0..WORKSPACES).map(|number| format!("memory-{number}")).collect();
    let (running, stopped) = names.split_at(RUNNING);
    let stopped: Vec<_> =
        stopped.iter().map(|name| workspace(name, json!({ "power": { "state": "Stopped" } }))).collect();
    site.apply(&stopped).await?;
    site.apply(&running.iter().map(|name| workspace(name, json!({}))).collect::<Vec<_>>()).await?;
    watch.available(running).await?;

    let mut section = Section::new("Memory", EXPLAINED, ["", "resident", "aim", "", "of it anonymous"]);
    for (name, component, aim) in
        [("operator, 100 Workspaces", &Component::Operator, OPERATOR), ("node-daemon, 10 VMs", &daemon, DAEMON)]
    {
        let (resident, anonymous) = resident(site, component)?;
        let [aim, met] = aim.cells(resident, mib);
        section.row(name, [mib(resident), aim, met, mib(anonymous)]);
    }
    section.row("node-daemon, before the first VM", [mib(before.0), String::new(), String::new(), mib(before.1)]);
    let vms = site.cluster().virtual_machines(NAME);
    let rollups = vms.iter().map(|vm| rollup(vm.id.pid)).collect::<Result<Vec<_>>>()?;
    let median = |key: &str, minus: &str| Spread::of(rollups.iter().map(|it| value(it, key) - value(it, minus))).median;
    let cells = [mib(median("Pss", "Pss_Shmem")), String::new(), String::new(), mib(median("Pss_Anon", ""))];
    section.row("a VM beyond its guest's pages", cells);
    section.row(&format!("a guest's own pages, of {MEMORY_MIB} MiB"), [mib(median("Pss_Shmem", ""))]);
    Ok(vec![section])
}

/// Resident and anonymous MiB of a component.
fn resident(site: &Site, component: &Component) -> Result<(f64, f64)> {
    let rollup = rollup(site.pid(component)?)?;
    Ok((value(&rollup, "Rss"), value(&rollup, "Anonymous")))
}

fn rollup(pid: i32) -> Result<SmapsRollup> {
    Process::new(pid)?.smaps_rollup().with_context(|| format!("failed to read the memory of process {pid}"))
}

/// In MiB; 0 for what is not there.
#[allow(clippy::cast_precision_loss, reason = "an amount of memory, rounded for people")]
fn value(rollup: &SmapsRollup, key: &str) -> f64 {
    let maps = rollup.memory_map_rollup.0.first();
    let bytes = maps.and_then(|map| map.extension.map.get(key)).copied().unwrap_or_default();
    bytes as f64 / f64::from(1 << 20)
}
