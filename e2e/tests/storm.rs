//! Twenty-four at once: start, stop, move and delete at random on three nodes that share two pools, while daemons and the
//! operator are killed at random. At the end every disk has what was written to it, every use right is right, and nothing is
//! left over.
//!
//! `KIBOTOS_STORM_SECONDS` makes it longer, `KIBOTOS_STORM_SEED` repeats what it drew.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures::future::try_join_all;
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{MoveState, Volume, Workspace};
use kibo_e2e::local::process::virtual_machines;
use kibo_e2e::local::{Component, LocalPool};
use kibo_e2e::suite::{Place, Suite, eventually, is_available, phase_of};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::json;
use tokio::time::Instant;

fn main() -> ExitCode {
    Suite::with_everything().alone("twenty_four_workspaces_in_a_storm_keep_their_data_and_leave_nothing", storm).run()
}

const LANES: usize = 24;
const NODES: usize = 3;
/// Guests of one node at a time: with all of them at once two cores would do nothing but boot.
const SLOTS: u32 = 2;
const STORM: Duration = Duration::from_secs(60);
/// Less than these is no storm: operations that the API took, and moves from one pool to the other that were finished.
const FEWEST: usize = 2 * LANES;
const FEWEST_MOVES: usize = 1;
/// What is under way comes to its end.
const CALM: u64 = 180;
const POOLS: [&str; 2] = ["storm-a", "storm-b"];

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

async fn storm(place: Arc<Place>) -> Result<()> {
    let seed = number("KIBOTOS_STORM_SEED").unwrap_or_else(rand::random);
    eprintln!("KIBOTOS_STORM_SEED={seed}");
    let pools = Pools { root: place.cluster().layout().root().to_owned() };
    let shared = pools.declared();
    let mut nodes = Vec::new();
    for _ in 0..NODES {
        let shared = shared.clone();
        let node = place.node_with("8", "4Gi", move |node| (node.pools, node.max_instances) = (shared, Some(SLOTS)));
        nodes.push(node.await?);
    }
    place.ensure_template().await?;
    let until = Instant::now() + number("KIBOTOS_STORM_SECONDS").map_or(STORM, Duration::from_secs);
    let lanes = (0..LANES).map(|number| {
        let random = StdRng::seed_from_u64(seed.wrapping_add(number as u64));
        Lane {
            place: &place,
            name: format!("s{number}"),
            random,
            until,
            disks: BTreeMap::new(),
            moved: BTreeSet::new(),
            tokens: 0,
            done: 0,
        }
    });
    let chaos = chaos(&place, &nodes, StdRng::seed_from_u64(!seed), until);
    let (lanes, killed) = tokio::try_join!(try_join_all(lanes.map(Lane::live)), chaos)?;
    let mut rested = Vec::with_capacity(LANES);
    let done: usize = lanes.iter().map(|lane| lane.done).sum();
    let mut moves = 0;
    for mut lane in lanes {
        lane.comes_to_rest().await.with_context(|| lane.name.clone())?;
        moves += lane.moved.len();
        rested.push(lane);
    }
    let lanes = rested;
    eprintln!("{done} operations, {moves} moves; killed: {killed:?}");
    ensure!(done >= FEWEST && moves >= FEWEST_MOVES && !killed.is_empty(), "that was no storm");
    agrees(&place, &pools, &nodes, &lanes).await?;
    place.api::<Workspace>().delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
    for lane in &lanes {
        place.gone(place.api::<Workspace>(), &lane.name, CALM).await?;
        place.gone(place.api::<Volume>(), &lane.name, CALM).await?;
    }
    for pool in POOLS {
        ensure!(pools.uids(pool).is_empty(), "left in {pool}: {:?}", pools.uids(pool));
    }
    Ok(())
}

/// Kills a daemon or the operator now and then. Answers how often whom.
async fn chaos(place: &Place, nodes: &[String], mut random: StdRng, until: Instant) -> Result<BTreeMap<String, usize>> {
    let mut killed = BTreeMap::new();
    loop {
        let pause = Duration::from_millis(random.random_range(2_000..7_000));
        tokio::time::sleep_until((Instant::now() + pause).min(until)).await;
        if Instant::now() >= until {
            return Ok(killed);
        }
        let victim = match random.random_range(0..=nodes.len()) {
            0 => Component::Operator,
            number => Component::Node(nodes[number - 1].clone()),
        };
        place.cluster().kill(&victim).await?;
        place.cluster().start(&victim).await?;
        *killed.entry(victim.to_string()).or_default() += 1;
    }
}

/// The two pools that all nodes share.
struct Pools {
    root: PathBuf,
}

impl Pools {
    fn path(&self, pool: &str) -> PathBuf {
        self.root.join(pool)
    }

    fn declared(&self) -> Vec<LocalPool> {
        let declare = |id: &str| LocalPool { id: id.to_owned(), path: self.path(id), default: id == POOLS[0] };
        POOLS.iter().copied().map(declare).collect()
    }

    fn image(&self, pool: &str, uid: &str) -> PathBuf {
        self.path(pool).join("objects").join(uid).join("image.raw")
    }

    /// The objects of a pool, without what a node says for good about a grant that it never took.
    fn uids(&self, pool: &str) -> BTreeSet<String> {
        let objects = self.path(pool).join("objects");
        let is_more = |name: &String| names_in(&objects.join(name)).iter().any(|file| !file.ends_with(".refused"));
        names_in(&objects).into_iter().filter(is_more).collect()
    }
}

fn names_in(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// What was written to a disk: the last that is known to be there, and what was tried since.
#[derive(Debug, Default)]
struct Written {
    known: Option<String>,
    tried: BTreeSet<String>,
}

/// One Workspace and whoever works with it.
struct Lane<'a> {
    place: &'a Place,
    name: String,
    random: StdRng,
    until: Instant,
    /// By the path in the guest; of the Workspace that there is now.
    disks: BTreeMap<&'static str, Written>,
    /// Requests of moves that were seen to be finished.
    moved: BTreeSet<String>,
    tokens: u32,
    done: usize,
}

impl Lane<'_> {
    async fn live(mut self) -> Result<Self> {
        while Instant::now() < self.until {
            match self.act().await {
                Ok(acted) => self.done += usize::from(acted),
                // The API's rules, and races that they decide.
                Err(error) if is_refusal(&error) => {}
                Err(error) => return Err(error.context(self.name.clone())),
            }
        }
        Ok(self)
    }

    /// Whether it did something; else it looked on.
    async fn act(&mut self) -> Result<bool> {
        let Some(workspace) = self.place.api::<Workspace>().get_opt(&self.name).await? else {
            self.disks.clear();
            return self.create().await.map(|()| true);
        };
        self.note(&workspace);
        let rests = matches!(phase_of(&workspace), Some(WorkspacePhase::Stopped | WorkspacePhase::Failed));
        if workspace.metadata.deletion_timestamp.is_some() {
            return self.changes(&workspace).await.map(|()| false);
        }
        if is_available(&workspace) {
            return self.use_it().await.map(|()| true);
        }
        if rests && workspace.is_power_request_consumed() {
            return self.rest().await.map(|()| true);
        }
        match self.random.random_range(0..20) {
            0 => self.power("Stopped", None).await.map(|()| true),
            1 => self.delete().await.map(|()| true),
            _ => self.changes(&workspace).await.map(|()| false),
        }
    }

    async fn create(&mut self) -> Result<()> {
        let volume = json!({"new": {"size": "16Mi"}, "mountPath": "/data", "deleteWithWorkspace": true});
        let mut spec = json!({"writableLayer": {"size": "32Mi"}});
        self.disks.insert("/root", Written::default());
        if self.random.random_bool(0.3) {
            spec["volume"] = volume;
            self.disks.insert("/data", Written::default());
        }
        self.place.create_workspace(&self.name, spec).await
    }

    /// Writes something, then ends it in one of the ways.
    async fn use_it(&mut self) -> Result<()> {
        self.tokens += 1;
        let token = format!("{}-{}", self.name, self.tokens);
        let lines = self.disks.keys().map(|path| format!("echo {token} > {path}/token")).collect::<Vec<_>>().join("; ");
        for disk in self.disks.values_mut() {
            disk.tried.insert(token.clone());
        }
        let written = self.place.sh(&self.name, &format!("set -e; {lines}; sync")).await;
        // The operator or the daemon may have been killed meanwhile: then it is written or not.
        if written.is_ok() {
            for disk in self.disks.values_mut() {
                *disk = Written { known: Some(token.clone()), tried: BTreeSet::new() };
            }
        }
        match self.random.random_range(0..10) {
            0 => self.delete().await,
            1 | 2 => self.power("Stopped", Some("Force")).await,
            _ => self.power("Stopped", None).await,
        }
    }

    /// Nothing runs.
    async fn rest(&mut self) -> Result<()> {
        let to = POOLS[self.random.random_range(0..POOLS.len())];
        let request = json!({"spec": {"move": {"to": to, "requestId": self.request()}}});
        let (params, patch) = (PatchParams::default(), Patch::Merge(&request));
        match self.random.random_range(0..10) {
            0 => self.delete().await,
            1..=3 => Ok(self.place.api::<Workspace>().patch(&self.name, &params, &patch).await.map(drop)?),
            4 | 5 if self.disks.contains_key("/data") => {
                Ok(self.place.api::<Volume>().patch(&self.name, &params, &patch).await.map(drop)?)
            }
            _ => self.power("Running", None).await,
        }
    }

    /// A move that has put the layer into another pool.
    fn note(&mut self, workspace: &Workspace) {
        let moving = workspace.status.as_ref().and_then(|status| status.r#move.as_ref());
        let done = moving.filter(|it| matches!(it.state, MoveState::Removing | MoveState::Finished));
        if let Some(done) = done.filter(|it| it.from.as_ref().is_some_and(|from| *from != it.to)) {
            self.moved.extend(done.request_id.as_ref().map(ToString::to_string));
        }
    }

    fn request(&mut self) -> String {
        format!("storm-{:016x}", self.random.random::<u64>())
    }

    async fn power(&mut self, state: &str, mode: Option<&str>) -> Result<()> {
        let mut request = json!({"state": state, "requestId": self.request()});
        if let Some(mode) = mode {
            request["stopMode"] = json!(mode);
        }
        self.place.power(&self.name, request).await
    }

    async fn delete(&self) -> Result<()> {
        self.place.api::<Workspace>().delete(&self.name, &DeleteParams::default()).await.map(drop)?;
        Ok(())
    }

    /// Until something changes, or for a moment.
    async fn changes(&self, workspace: &Workspace) -> Result<()> {
        let seen = workspace.resource_version();
        let changed = |it: &Workspace| it.resource_version() != seen;
        // That nothing happened in so short a time is no fault.
        let _ = self.place.workspace(&self.name, "changes", 2, changed).await;
        Ok(())
    }

    /// Asks for a stop, as often as the rules want, and waits for it and for its moves.
    async fn comes_to_rest(&mut self) -> Result<()> {
        let api = self.place.api::<Workspace>();
        let limit = Duration::from_secs(CALM);
        eventually("a stop is taken, or it is gone", limit, async || match api.get_opt(&self.name).await? {
            None => Ok(Some(())),
            Some(it) if it.metadata.deletion_timestamp.is_some() => Ok(None),
            Some(_) => self.place.power(&self.name, json!({"state": "Stopped", "requestId": "calm"})).await.map(Some),
        })
        .await?;
        if api.get_opt(&self.name).await?.is_none() {
            return Ok(());
        }
        let rests = |it: &Workspace| {
            let status = it.status.clone().unwrap_or_default();
            let is_still = status.execution.is_none() && status.r#move.is_none_or(|it| it.state.is_over());
            it.is_power_request_consumed() && is_still
        };
        let workspace = self.place.workspace(&self.name, "rests", CALM, rests).await?;
        self.note(&workspace);
        // That of an earlier Workspace of this name may be on its way out.
        eventually("its Volume rests", limit, async || {
            let volume = self.place.api::<Volume>().get_opt(&self.name).await?;
            let rests = volume.is_none_or(|it| {
                let is_over = it.status.and_then(|it| it.r#move).is_none_or(|it| it.state.is_over());
                is_over && it.metadata.deletion_timestamp.is_none()
            });
            Ok(rests.then_some(()))
        })
        .await
    }
}

fn is_refusal(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422))
}

/// Store, pools, hosts and what the lanes remember say the same.
async fn agrees(place: &Place, pools: &Pools, nodes: &[String], lanes: &[Lane<'_>]) -> Result<()> {
    let mut expected: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for lane in lanes {
        let Some(workspace) = place.api::<Workspace>().get_opt(&lane.name).await? else { continue };
        let status = workspace.status.clone().unwrap_or_default();
        ensure!(status.holder.is_none(), "{}: all pools are shared: {:?}", lane.name, status.holder);
        if let Some(layer) = status.writable_layer.filter(|layer| layer.created) {
            let uid = workspace.uid().context("it has a uid")?;
            check(&pools.image(layer.pool.as_str(), &uid), "/upper/root/token", lane.disks.get("/root"))
                .with_context(|| format!("layer of {}", lane.name))?;
            expected.entry(layer.pool.to_string()).or_default().insert(uid);
        }
        let Some(volume) = place.api::<Volume>().get_opt(&lane.name).await? else { continue };
        let status = volume.status.clone().unwrap_or_default();
        ensure!(status.holder.is_none(), "Volume {}: {:?}", lane.name, status.holder);
        if let (Some(pool), Some(_)) = (&status.pool, status.size) {
            let uid = volume.uid().context("it has a uid")?;
            check(&pools.image(pool.as_str(), &uid), "/token", lane.disks.get("/data"))
                .with_context(|| format!("Volume of {}", lane.name))?;
            expected.entry(pool.to_string()).or_default().insert(uid);
        }
    }
    for pool in POOLS {
        let expected = expected.remove(pool).unwrap_or_default();
        ensure!(pools.uids(pool) == expected, "in {pool}: {:?}, known: {expected:?}", pools.uids(pool));
    }
    for node in nodes {
        ensure!(virtual_machines(node).is_empty(), "{node} runs something");
    }
    Ok(())
}

/// The file system is whole, and the file has what was written last.
fn check(image: &Path, file: &str, written: Option<&Written>) -> Result<()> {
    let checked = Command::new("e2fsck").args(["-p", "-f"]).arg(image).output()?;
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    // 1: what a forced stop left was set right, as the next mount would have done.
    ensure!(matches!(checked.status.code(), Some(0 | 1)), "{}: {said}", image.display());
    let read = Command::new("debugfs").args(["-R", &format!("cat {file}")]).arg(image).output()?;
    let found = String::from_utf8_lossy(&read.stdout).trim().to_owned();
    let Some(written) = written else { bail!("a disk that nobody has written to") };
    let is_known = written.known.as_deref().unwrap_or_default() == found;
    ensure!(is_known || written.tried.contains(&found), "{}: {found:?}, written: {written:?}", image.display());
    Ok(())
}
