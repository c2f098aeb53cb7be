//! Storage pools with real guests: one that fills up, one whose host died, one that is gone for good, and what is in a
//! pool and belongs to nobody.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kibo_crds::node::Node;
use kibo_crds::storage_pool::{StoragePool, StoragePoolStatus, UnownedObjects, UnownedReason};
use kibo_crds::volume::{Volume, VolumePhase};
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{Bytes, Workspace};
use kibo_e2e::local::{Component, LocalPool};
use kibo_e2e::suite::typed::said;
use kibo_e2e::suite::{Place, STOP, Suite, condition, eventually, phase_of, why};
use kube::api::{Patch, PatchParams};
use serde_json::json;

fn main() -> ExitCode {
    Suite::with_everything()
        .operator_args(["--pool-audit-seconds=2", "--unreachable-seconds=4"])
        .test("a_full_pool_pauses_its_guests_and_they_go_on_when_there_is_space", full)
        .test("a_pool_whose_host_died_is_attached_to_another_and_one_that_is_gone_is_given_up", died_and_gone)
        .test("what_belongs_to_nobody_is_told_and_removed_only_when_its_owner_is_proven_deleted", unowned)
        .alone("a_pool_that_becomes_read_only_pauses_its_guests_and_loses_nothing_that_was_synced", read_only)
        .run()
}

const SOON: u64 = 90;
const MIB: u64 = 1 << 20;

async fn pool(
    place: &Place,
    id: &str,
    what: &str,
    reached: impl Fn(&StoragePoolStatus) -> bool,
) -> Result<StoragePoolStatus> {
    let reached = |pool: &StoragePool| pool.status.as_ref().is_some_and(&reached);
    let pool = place.watched(place.all::<StoragePool>(), id, what, SOON, reached).await?;
    pool.status.context("it has a status")
}

fn is(status: &StoragePoolStatus, kind: &str, value: &str, reason: &str) -> bool {
    let matches = |it: &Condition| it.type_ == kind && it.status == value && it.reason == reason;
    status.conditions.iter().any(matches)
}

fn occupied(image: &Path) -> Result<u64> {
    Ok(fs::metadata(image)?.blocks() * 512)
}

async fn full(place: Arc<Place>) -> Result<()> {
    let disk = place.disk(2048 * MIB)?;
    let node = place.node_with("1", "512Mi", |node| node.pools[0].path = disk.pool()).await?;
    let (id, component) = (format!("local-{node}"), Component::Node(node.clone()));
    place.create_workspace("w", json!({})).await?;
    let workspace = place.available("w").await?;
    let image = disk.pool().join("objects").join(workspace.metadata.uid.context("no uid")?).join("image.raw");

    // What a guest deletes is given back.
    place.sh("w", "dd if=/dev/urandom of=/root/big bs=1M count=48 conv=fsync 2> /dev/null").await?;
    let with_it = occupied(&image)?;
    ensure!(with_it > 48 * MIB, "{with_it} bytes are occupied");
    place.sh("w", "rm /root/big; sync").await?;
    let given_back = async || Ok((occupied(&image)? + 40 * MIB < with_it).then_some(()));
    eventually("the deleted bytes are given back", Duration::from_secs(SOON), given_back).await?;

    disk.fill(8 * MIB)?;
    // The first error would end it; and it outlives the command that began it.
    let write = "setsid sh -c 'dd if=/dev/urandom of=/root/big bs=1M count=64 conv=fsync; echo $? > /run/status' \
                 > /dev/null 2>&1 & sleep 0";
    place.sh("w", write).await?;
    let paused = |it: &Workspace| condition(it, "Paused").is_some_and(|it| it.reason == "DiskFull");
    let workspace = place.workspace("w", "is paused", SOON, paused).await?;
    ensure!(phase_of(&workspace) == Some(WorkspacePhase::Available), "{}", why(&workspace));
    pool(&place, &id, "is full", |status| is(status, "DiskFull", "True", "GuestsWait")).await?;
    said(&place, &["storage-pool", "list"], 0, "FULL").await?;

    // The daemon after this one knows it too.
    place.cluster().kill(&component).await?;
    place.cluster().start(&component).await?;
    place.workspace("w", "is still paused", SOON, paused).await?;
    pool(&place, &id, "is still full", |status| is(status, "DiskFull", "True", "GuestsWait")).await?;

    disk.empty()?;
    place.workspace("w", "goes on", SOON, |it| condition(it, "Paused").is_none()).await?;
    pool(&place, &id, "has space", |status| is(status, "DiskFull", "False", "Space")).await?;
    let ended = async || {
        let status = place.sh("w", "cat /run/status 2> /dev/null || true").await?;
        Ok((!status.is_empty()).then_some(status))
    };
    let status = eventually("the writer ends", Duration::from_secs(SOON), ended).await?;
    let size = place.sh("w", "stat -c %s /root/big").await?;
    ensure!(status == "0" && size == (64 * MIB).to_string(), "it ended with {status}, and {size} bytes are there");
    let errors = place.sh("w", "dmesg | grep -ci 'i/o error\\|remounting\\|ext4-fs error' || true").await?;
    ensure!(errors == "0", "the guest saw errors: {errors}");
    Ok(())
}

async fn read_only(place: Arc<Place>) -> Result<()> {
    let disk = place.disk(2048 * MIB)?;
    let node = place.node_with("1", "512Mi", |node| node.pools[0].path = disk.pool()).await?;
    let (id, component) = (format!("local-{node}"), Component::Node(node.clone()));
    place.create_workspace("w", json!({})).await?;
    let vm = place.vm(&place.available("w").await?)?;
    place.sh("w", "echo kept > /root/note; sync").await?;
    place.sh("w", "setsid sh -c 'while :; do date >> /root/noise; sync; done' > /dev/null 2>&1 & sleep 0").await?;

    disk.fail()?;
    let paused = |it: &Workspace| {
        let paused = condition(it, "Paused").filter(|it| it.reason == "DiskFailed");
        paused.is_some_and(|it| it.message.contains(&format!("storage pool {id}")))
    };
    let workspace = place.workspace("w", "is paused", SOON, paused).await?;
    ensure!(phase_of(&workspace) == Some(WorkspacePhase::Available) && vm.is_alive(), "{}", why(&workspace));
    let reaches = |status: &StoragePoolStatus| status.members.iter().any(|member| member.available);
    pool(&place, &id, "cannot be used", |status| !reaches(status)).await?;
    // The daemon after this one hears from the VM which disk it is.
    place.cluster().kill(&component).await?;
    place.cluster().start(&component).await?;
    place.workspace("w", "is still paused", SOON, paused).await?;

    // Its end is recorded in the pool, which must be there for that.
    place.power("w", json!({ "state": "Stopped", "stopMode": "Force", "requestId": "end" })).await?;
    ensure!(vm.ended_within(Duration::from_secs(SOON)).await, "it goes on");
    eventually("the disk is repaired", Duration::from_secs(SOON), async || disk.repair().map(Some)).await?;
    place.phase("w", WorkspacePhase::Stopped, SOON).await?;
    pool(&place, &id, "can be used", reaches).await?;
    place.power("w", json!({ "state": "Running", "requestId": "again" })).await?;
    place.available("w").await?;
    ensure!(place.sh("w", "cat /root/note").await? == "kept");
    Ok(())
}

/// The host is off: nothing of it runs any more.
async fn host_dies(place: &Place, node: &str) -> Result<()> {
    place.cluster().kill(&Component::Node(node.to_owned())).await?;
    place.cluster().end_virtual_machines(node).await?;
    let is_silent =
        |it: &Node| it.status.as_ref().and_then(|status| status.session.as_ref()).is_none_or(|session| !session.alive);
    place.watched(place.all::<Node>(), node, "has no session", SOON, is_silent).await?;
    said(place, &["node", "isolate", node, "--confirm-host-cannot-write"], 0, "is isolated").await.map(drop)
}

/// The node again, attached to these pools and its own.
async fn attach(place: &Place, node: &str, pools: &[LocalPool]) -> Result<()> {
    let component = Component::Node(node.to_owned());
    let known = place.cluster().recorded().nodes.into_iter().find(|it| it.id == node).context("no such node")?;
    let own = known.pools.first().cloned();
    let pools = own.into_iter().chain(pools.iter().cloned()).collect();
    place.cluster().add_node(kibo_e2e::local::LocalNode { pools, ..known })?;
    place.cluster().stop(&component).await?;
    place.cluster().start(&component).await.map_err(Into::into)
}

async fn died_and_gone(place: Arc<Place>) -> Result<()> {
    let dies = place.node("1", "512Mi").await?;
    let (id, dir) = (format!("local-{dies}"), place.cluster().layout().node(&dies).join("pool"));
    let volume = json!({ "new": { "size": "64Mi" }, "mountPath": "/data", "deleteWithWorkspace": true });
    place.create_workspace("w", json!({ "volume": volume })).await?;
    place.available("w").await?;
    place.sh("w", "echo kept > /root/note; echo too > /data/note; sync").await?;
    host_dies(&place, &dies).await?;

    // The disk is attached to another host under the same id.
    let other = place.node("2", "1Gi").await?;
    let disk = LocalPool { id: id.clone(), path: dir.clone(), default: false };
    attach(&place, &other, std::slice::from_ref(&disk)).await?;
    place.power("w", json!({ "state": "Running", "requestId": "there", "node": other })).await?;
    place.available("w").await?;
    ensure!(place.sh("w", "cat /root/note /data/note").await? == "kept\ntoo", "the disks are others");
    place.create_workspace("elsewhere", json!({})).await?;
    place.available("elsewhere").await?;

    // It is given up only when nobody reaches it.
    let give_up = ["storage-pool", "declare-lost", &id, "--confirm-data-is-gone", "--yes"];
    said(&place, &give_up, 13, "a member node reaches the pool").await?;
    place.power("w", json!({ "state": "Stopped", "requestId": "stop" })).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;
    attach(&place, &other, &[]).await?;
    pool(&place, &id, "has no member", |status| !status.members.iter().any(|member| member.available)).await?;
    said(&place, &give_up, 0, "is LOST: 2 objects").await?;
    said(&place, &give_up, 13, "is declared lost").await?;
    let is_lost = |it: &Workspace| why(it).starts_with("StoragePoolLost: ");
    place.workspace("w", "is lost", SOON, is_lost).await?;
    let lost = |it: &Volume| it.status.as_ref().is_some_and(|status| status.phase == Some(VolumePhase::Lost));
    place.watched(place.api::<Volume>(), "w", "is lost", SOON, lost).await?;
    said(&place, &["workspace", "start", "w"], 13, "declared lost").await?;

    // It comes back, and is neither used nor written to.
    let before = written(&dir)?;
    attach(&place, &other, &[disk]).await?;
    let told = |status: &StoragePoolStatus| {
        let ready = status.conditions.iter().find(|it| it.type_ == "Ready");
        ready.is_some_and(|it| it.reason == "Lost" && it.message.contains(&other))
    };
    let status = pool(&place, &id, "is refused", told).await?;
    ensure!(!status.members.iter().any(|member| member.available), "{:?}", status.members);
    // Nobody is needed for the deletion, nor does it remove anything there.
    said(&place, &["workspace", "delete", "w"], 0, "").await?;
    place.gone(place.api::<Volume>(), "w", SOON).await?;
    ensure!(written(&dir)? == before, "something was written to the lost pool");
    ensure!(place.sh("elsewhere", "echo here").await? == "here", "nothing else is touched");

    // The host that died comes back: first it hears that it was isolated, and ends.
    let component = Component::Node(dies);
    place.cluster().spawn(&component).await?;
    let has_ended = async || Ok(place.cluster().process(&component).is_none().then_some(()));
    eventually("its daemon ends", Duration::from_secs(SOON), has_ended).await?;
    place.cluster().start(&component).await.map_err(Into::into)
}

/// Every file with its size and when it was written.
fn written(dir: &Path) -> Result<Vec<(PathBuf, u64, i64, i64)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let metadata = fs::symlink_metadata(&path)?;
        found.push((path.clone(), metadata.size(), metadata.mtime(), metadata.mtime_nsec()));
        if metadata.is_dir() {
            found.extend(written(&path)?);
        }
    }
    found.sort();
    Ok(found)
}

async fn unowned(place: Arc<Place>) -> Result<()> {
    const NOBODYS: &str = "6f9619ff-8b86-4011-b42d-00c04fc964ff";
    let node = place.node("1", "512Mi").await?;
    let (id, objects) = (format!("local-{node}"), place.cluster().layout().node(&node).join("pool/objects"));
    place.create_workspace("w", json!({})).await?;
    let workspace = place.available("w").await?;
    let uid = workspace.metadata.uid.context("no uid")?;
    place.power("w", json!({ "state": "Stopped", "requestId": "stop" })).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;

    // A capacity counts sizes: the one that is there and the next one.
    said(&place, &["storage-pool", "set-capacity", &id, "300Mi"], 0, "capacity set to 300Mi").await?;
    pool(&place, &id, "shows its capacity", |status| status.capacity.as_deref() == Some("300Mi")).await?;
    let pinned = json!({ "power": { "state": "Running", "requestId": "r", "node": node } });
    place.create_workspace("too-much", pinned).await?;
    let refused =
        |it: &Workspace| why(it).starts_with("ResourceExhausted: ") && why(it).contains("not allocated: 44Mi");
    place.workspace("too-much", "has no capacity", SOON, refused).await?;
    said(&place, &["storage-pool", "set-capacity", &id, "default"], 0, "what its file system has").await?;
    place.power("w", json!({ "state": "Running", "requestId": "again" })).await?;
    place.available("w").await?;
    place.power("w", json!({ "state": "Stopped", "requestId": "stop-again" })).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;

    // The copy of a disk, put back when its Workspace is deleted: as of a pool that was restored.
    let (own, aside) = (objects.join(&uid), place.cluster().layout().node(&node).join("aside"));
    let copy = place.bash(&format!("cp --archive --sparse=always {} {}", own.display(), aside.display())).await?;
    copy.ok()?;
    said(&place, &["workspace", "delete", "w"], 0, "").await?;
    let removed = async || Ok((!own.exists()).then_some(()));
    eventually("the disk is removed", Duration::from_secs(SOON), removed).await?;
    fs::create_dir(objects.join(NOBODYS))?;
    fs::write(objects.join(NOBODYS).join("image.raw"), vec![1; 1 << 20])?;
    fs::write(objects.join("note.txt"), "not ours")?;
    fs::rename(&aside, &own)?;

    let only_others = |found: &UnownedObjects| {
        let owners: Vec<_> = found.entries.iter().map(|it| (it.name.as_str(), it.owner)).collect();
        owners == [(NOBODYS, UnownedReason::Unknown), ("note.txt", UnownedReason::Foreign)]
    };
    let seen = |status: &StoragePoolStatus| !own.exists() && status.unowned.as_ref().is_some_and(only_others);
    let status = pool(&place, &id, "tells what belongs to nobody", seen).await?;
    let found = status.unowned.context("it was found")?;
    ensure!(found.count == 2 && found.bytes >= Bytes(1 << 20), "{found:?}");
    said(&place, &["storage-pool", "objects", &id], 0, "UNOWNED (UNKNOWN)").await?;
    ensure!(objects.join(NOBODYS).join("image.raw").exists() && objects.join("note.txt").exists(), "both are kept");

    fs::remove_dir_all(objects.join(NOBODYS))?;
    fs::remove_file(objects.join("note.txt"))?;
    pool(&place, &id, "has nothing that belongs to nobody", |status| status.unowned.is_none()).await?;
    let record = json!({ "spec": { "lost": { "confirmDataIsGone": false } } });
    let refused = place.all::<StoragePool>().patch(&id, &PatchParams::default(), &Patch::Merge(record)).await;
    ensure!(refused.is_err(), "a pool was given up without a confirmation");
    Ok(())
}
