//! What a test of transfers begins with.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{Volume, Workspace};
use kibo_e2e::local::{Component, LocalNode};
use kibo_e2e::suite::Place;
use kibo_e2e::suite::failpoints::Failpoints;
use kube::ResourceExt as _;
use serde_json::json;

use crate::LIMIT;

/// A node with one stopped Workspace whose disks have data, and a directory for archives.
pub struct Scene {
    pub place: Arc<Place>,
    pub node: String,
    /// Of its node; the first one.
    pub pool: PathBuf,
    dir: tempfile::TempDir,
}

impl Scene {
    pub async fn make(place: &Arc<Place>) -> Result<Self> {
        Self::with(place, |_| {}).await
    }

    /// The same with something about its node changed.
    pub async fn with(place: &Arc<Place>, change: impl FnOnce(&mut LocalNode)) -> Result<Self> {
        let mut pool = PathBuf::new();
        let node = place.node_with("16", "8Gi", |node| {
            change(node);
            pool.clone_from(&node.pools[0].path);
        });
        let node = node.await?;
        let volume = json!({"new": {"size": "64Mi"}, "mountPath": "/data", "deleteWithWorkspace": true});
        let spec = json!({"volume": volume, "writableLayer": {"size": "64Mi"}, "annotations": {"note": "kept"}});
        place.create_workspace("w", spec).await?;
        place.available("w").await?;
        place
            .sh(
                "w",
                "echo volume > /data/note; head -c 9000000 /dev/urandom > /data/noise; echo layer > /root/note; sync",
            )
            .await?;
        place.power("w", json!({"state": "Stopped", "requestId": "stop"})).await?;
        place.phase("w", WorkspacePhase::Stopped, LIMIT.as_secs()).await?;
        Ok(Self { place: place.clone(), node, pool, dir: tempfile::tempdir()? })
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    pub fn files(&self) -> BTreeSet<String> {
        names_in(self.dir.path())
    }

    pub async fn export(&self, workspace: &str, to: &str) -> Result<String> {
        self.place.kibo(&["transfer", "export", workspace, "--to", to]).await?.ok()
    }

    pub async fn import(&self, from: &str, name: &str) -> Result<String> {
        self.place.kibo(&["transfer", "import", from, "--name", name]).await?.ok()
    }

    pub fn component(&self) -> Component {
        Component::Node(self.node.clone())
    }

    pub fn daemon(&self) -> Result<Failpoints> {
        Failpoints::of(self.place.cluster(), &self.component())
    }

    fn objects(&self) -> PathBuf {
        self.pool.join("objects")
    }

    /// What is in the directory of an object.
    pub fn entries(&self, uid: &str) -> BTreeSet<String> {
        names_in(&self.objects().join(uid))
    }

    /// The objects of the pool, without what outlives them by design.
    pub fn uids(&self) -> BTreeSet<String> {
        let is_more = |name: &String| self.entries(name).iter().any(|it| !it.ends_with(".refused"));
        names_in(&self.objects()).into_iter().filter(is_more).collect()
    }

    /// The uids of a Workspace's layer and Volume.
    pub async fn disks(&self, workspace: &str) -> Result<[String; 2]> {
        let layer = self.place.api::<Workspace>().get(workspace).await?.uid().context("it has a uid")?;
        let volume = self.place.api::<Volume>().get(workspace).await?.uid().context("it has a uid")?;
        Ok([layer, volume])
    }

    /// Both disks are what those of another one are, and nobody holds them.
    pub async fn same(&self, one: &str, other: &str) -> Result<()> {
        for (one, other) in self.disks(one).await?.into_iter().zip(self.disks(other).await?) {
            let image = |uid: &str| self.objects().join(uid).join("image.raw");
            let same = Command::new("cmp").arg(image(&one)).arg(image(&other)).status()?;
            ensure!(same.success(), "{one} and {other} differ");
            let left = self.entries(&one);
            ensure!(left.iter().all(|name| name == "image.raw" || name.starts_with("holder.")), "{one}: {left:?}");
        }
        Ok(())
    }

    pub async fn is_free(&self, workspace: &str) -> Result<()> {
        let free = |it: &Workspace| {
            let status = it.status.clone().unwrap_or_default();
            status.holder.is_none_or(|holder| holder.idle) && status.transfer.is_none_or(|it| it.state.is_over())
        };
        self.place.watched(self.place.api::<Workspace>(), workspace, "is free", LIMIT.as_secs(), free).await?;
        let free = |it: &Volume| it.status.as_ref().is_some_and(|it| it.holder.as_ref().is_none_or(|it| it.idle));
        self.place.watched(self.place.api::<Volume>(), workspace, "is free", LIMIT.as_secs(), free).await?;
        Ok(())
    }

    pub async fn delete(&self, names: &[String]) -> Result<()> {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.place.kibo(&[&["workspace", "delete"][..], &names[..]].concat()).await?.ok().map(drop)
    }
}

pub fn names_in(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}
