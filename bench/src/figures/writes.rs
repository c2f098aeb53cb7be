//! What is written to the API server.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::object;
use crate::{
    audit::{self, Audit},
    report::Section,
    site::{Site, workspace},
};

const MINUTE: Duration = Duration::from_secs(60);
/// What is still written after a Workspace looks done.
const AFTERWARDS: Duration = Duration::from_secs(2);

const EXPLAINED: &str = "\
Every request to the API server that stores something, counted in its audit log by who made it: for the start of a Workspace \
without and with a new Volume, for one minute in which nothing happens (one operator, one node, two running Workspaces) and \
for a normal stop. The user is whoever applies and stops; the others are Kibotos.";

type Counts = BTreeMap<(String, String), u64>;

pub async fn measure(site: &Site) -> Result<Vec<Section>> {
    let watch = site.watch().await?;
    let plain = counted(site, async || start(site, &watch, "writes-plain", json!({})).await).await?;
    let volume = json!({ "volume": { "new": { "size": "1Gi" }, "mountPath": "/data" } });
    let with_volume = counted(site, async || start(site, &watch, "writes-volume", volume).await).await?;
    let idle = counted(site, async || {
        tokio::time::sleep(MINUTE).await;
        Ok(())
    })
    .await?;
    let stop = counted(site, async || stop(site, &watch, "writes-plain").await).await?;

    let columns = [plain, with_volume, idle, stop];
    let header = ["", "start", "start with a new Volume", "idle minute", "stop"];
    let mut section = Section::new("Writes to the API server", EXPLAINED, header);
    let mut kinds: Vec<&(String, String)> = columns.iter().flat_map(Counts::keys).collect();
    kinds.sort();
    kinds.dedup();
    let show = |count: u64| if count == 0 { String::new() } else { count.to_string() };
    for kind in kinds {
        let name = format!("{}: {}", kind.0, kind.1);
        section.row(&name, columns.iter().map(|counts| show(counts.get(kind).copied().unwrap_or_default())));
    }
    section.row("all", columns.iter().map(|counts| show(counts.values().sum())));
    let object = object::measure(site, &watch, "writes-volume", "writes-plain").await?;
    Ok(vec![section, object])
}

/// What is written while something is done, and shortly after.
async fn counted(site: &Site, work: impl AsyncFnOnce() -> Result<()>) -> Result<Counts> {
    let audit: Audit = site.audit()?;
    work().await?;
    tokio::time::sleep(AFTERWARDS).await;
    Ok(audit::counts(&audit.writes()?))
}

async fn start(site: &Site, watch: &crate::watch::Watch, name: &str, more: serde_json::Value) -> Result<()> {
    site.apply(&[workspace(name, more)]).await?;
    watch.available(&[name.to_owned()]).await.map(drop)
}

async fn stop(site: &Site, watch: &crate::watch::Watch, name: &str) -> Result<()> {
    let patch = Patch::Merge(json!({ "spec": { "power": { "state": "Stopped" } } }));
    site.workspaces().await?.patch(name, &PatchParams::default(), &patch).await?;
    watch.stopped(name).await
}
