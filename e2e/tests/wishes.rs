//! What a stopped Workspace is asked to become: more memory, a larger layer, another Volume. Seen inside the guest, and
//! whole whoever is killed in between.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use kibo_crds::storage_pool::StoragePool;
use kibo_crds::volume::VolumePhase;
use kibo_crds::{Volume, Workspace};
use kibo_e2e::local::Component;
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::program::Program;
use kibo_e2e::suite::{Place, Ran, Suite};
use kibo_failpoint::Action;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_layer_and_a_volume_grow_at_the_next_start", they_grow)
        .test("a_volume_is_bound_elsewhere_with_its_data", bound_elsewhere)
        .test("of_two_workspaces_that_want_a_volume_one_gets_it", one_wins)
        .alone("a_growth_goes_on_after_the_daemon_was_killed_in_it", daemon_killed)
        .alone("a_binding_goes_on_after_the_operator_was_killed_in_it", operator_killed)
        .run()
}

/// The exit status and the words of a refusal.
fn refused(ran: &Ran, code: i32, words: &str) -> Result<()> {
    ensure!(ran.code == code && ran.stderr.contains(words), "expected {code} with {words:?}: {ran:?}");
    Ok(())
}

async fn kibo(place: &Place, line: &str) -> Result<Ran> {
    place.kibo(&line.split(' ').collect::<Vec<_>>()).await
}

async fn done(place: &Place, line: &str) -> Result<String> {
    kibo(place, line).await?.ok().with_context(|| line.to_owned())
}

/// MiB of the file system that a path is on, as the guest counts them.
async fn mib_of(place: &Place, name: &str, path: &str) -> Result<u64> {
    Ok(place.sh(name, &format!("df -k {path} | tail -n 1 | awk '{{print int($2 / 1024)}}'")).await?.parse()?)
}

#[expect(clippy::needless_pass_by_value, reason = "a literal")]
fn volume(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "kibotos.dev/v1alpha1", "kind": "Volume", "metadata": {"name": name}, "spec": spec})
}

async fn stopped(place: &Place, name: &str) -> Result<()> {
    place.create_workspace(name, json!({"power": {"state": "Stopped"}})).await
}

/// What one has been found to have room for counts before it is stored, and no longer.
async fn of_two_growths_one_fits(place: &Place, node: &str) -> Result<()> {
    let pool = format!("local-{node}");
    done(place, &format!("storage-pool set-capacity {pool} 620Mi")).await?;
    let is_set = |it: &StoragePool| it.status.as_ref().is_some_and(|it| it.capacity.as_deref() == Some("620Mi"));
    place.watched(place.all::<StoragePool>(), &pool, "has its capacity", LIMIT.as_secs(), is_set).await?;
    let resize = |layer: Value| Patch::Merge(json!({"spec": {"writableLayer": layer}}));
    let (api, params) = (place.api::<Workspace>(), PatchParams::default());
    let grows_to = |it: &Workspace| {
        let layer = it.status.as_ref().and_then(|status| status.writable_layer.as_ref());
        layer.and_then(|layer| layer.grow_to).map(|size| size.0)
    };

    // Who comes second waits for what becomes of the first.
    let points = Failpoints::of(place.cluster(), &Component::Operator)?;
    let contest = async |second: &'static str| {
        points.arm(&["space-claimed"], Action::Wait)?;
        api.patch("w", &params, &resize(json!({"size": "512Mi"}))).await?;
        points.all_reached(&["space-claimed"], LIMIT).await?;
        points.arm(&["space-awaited"], Action::Wait)?;
        let second = Program::start(place.kibo_command(&second.split(' ').collect::<Vec<_>>()))?;
        points.all_reached(&["space-awaited"], LIMIT).await?;
        anyhow::Ok(second)
    };
    let mut second = contest("volume resize v --size 320Mi").await?;
    points.clear()?;
    ensure!(second.ended().await? == 15 && second.stderr().contains("has 44Mi left"), "{}", second.stderr());
    let grows = |it: &Workspace| grows_to(it) == Some(512 << 20);
    place.watched(api.clone(), "w", "is to grow", LIMIT.as_secs(), grows).await?;
    api.patch("w", &params, &resize(Value::Null)).await?;
    place.watched(api.clone(), "w", "is not to grow", LIMIT.as_secs(), |it| grows_to(it).is_none()).await?;

    // It comes to nothing.
    let mut second = contest("volume resize v --size 128Mi").await?;
    api.patch("w", &params, &resize(Value::Null)).await?;
    points.clear()?;
    ensure!(second.ended().await? == 0, "{}", second.stderr());
    done(place, &format!("storage-pool set-capacity {pool} default")).await.map(drop)
}

async fn they_grow(place: Arc<Place>) -> Result<()> {
    let node = place.node("2", "1Gi").await?;
    place.create(volume("v", json!({"size": "64Mi"}))).await?;
    place.create_workspace("w", json!({"volume": {"claim": "v", "mountPath": "/data"}})).await?;
    place.available("w").await?;
    place.sh("w", "echo layer > /root/note; echo volume > /data/note; sync").await?;
    let (layer, disk) = (mib_of(&place, "w", "/").await?, mib_of(&place, "w", "/data").await?);
    ensure!(layer < 256 && disk < 64, "{layer} and {disk} MiB to begin with");
    refused(&kibo(&place, "workspace resize w --layer 512Mi").await?, 13, "holds no execution")?;
    refused(&kibo(&place, "workspace update w --cpu 2").await?, 13, "holds no execution")?;
    refused(&kibo(&place, "volume resize v --size 128Mi").await?, 13, "no Workspace runs with the Volume")?;
    done(&place, "workspace stop w").await?;

    of_two_growths_one_fits(&place, &node).await?;
    refused(&kibo(&place, "workspace resize w --layer 255Mi").await?, 10, "only grows")?;
    refused(&kibo(&place, "workspace resize w --layer 256.5Mi").await?, 10, "whole number of MiB")?;
    refused(&kibo(&place, "workspace resize w --layer 60Ti").await?, 15, "left")?;
    refused(&kibo(&place, "volume resize v --size 63Mi").await?, 10, "only grow")?;
    refused(&kibo(&place, "volume resize v --size 60Ti").await?, 15, "left")?;
    let spec = place.api::<Workspace>().get("w").await?.spec;
    ensure!(spec.writable_layer.is_none(), "what was refused is taken back: {:?}", spec.writable_layer);
    let before = place.api::<Workspace>().get("w").await?.status.context("a status")?.commands.len();
    done(&place, "workspace resize w --layer 256Mi").await?;
    let commands = place.api::<Workspace>().get("w").await?.status.context("a status")?.commands;
    ensure!(commands.len() == before, "what it has already opens no command: {commands:?}");
    done(&place, "workspace resize w --layer 512Mi --command-id grow").await?;
    done(&place, "workspace resize w --layer 512Mi --command-id grow").await?;
    refused(&kibo(&place, "workspace resize w --layer 768Mi --command-id grow").await?, 14, "command id")?;
    done(&place, "volume resize v --size 128Mi").await?;

    let revision =
        |it: &Workspace| it.status.as_ref().and_then(|it| it.revisions.as_ref()).map(|it| it.resources.revision);
    let seen = revision(&place.api::<Workspace>().get("w").await?).context("a revision")?;
    done(&place, &format!("workspace update w --memory 160Mi --expected-revision {seen}")).await?;
    let late = kibo(&place, &format!("workspace update w --cpu 500m --expected-revision {seen}")).await?;
    refused(&late, 14, "revision")?;
    done(&place, &format!("workspace update w --memory 160Mi --expected-revision {}", seen + 1)).await?;

    done(&place, "workspace start w").await?;
    let (layer, disk) = (mib_of(&place, "w", "/").await?, mib_of(&place, "w", "/data").await?);
    ensure!(layer > 400 && disk > 100, "{layer} and {disk} MiB after the growth");
    ensure!(place.sh("w", "cat /root/note /data/note").await? == "layer\nvolume");
    let grown = place.api::<Workspace>().get("w").await?.status.context("a status")?;
    let layer = grown.writable_layer.context("a layer")?;
    ensure!((layer.size.0, layer.grow_to) == (512 << 20, None), "{layer:?}");
    ensure!(!grown.conditions.iter().any(|it| it.type_ == "Resized"), "{:?}", grown.conditions);
    let size = place.api::<Volume>().get("v").await?.status.context("a status")?.size;
    ensure!(size.map(|size| size.0) == Some(128 << 20), "{size:?}");
    Ok(())
}

async fn bound_elsewhere(place: Arc<Place>) -> Result<()> {
    place.node("2", "1Gi").await?;
    place.create(volume("v", json!({"size": "16Mi"}))).await?;
    place.create_workspace("one", json!({"volume": {"claim": "v", "mountPath": "/data"}})).await?;
    place.available("one").await?;
    place.sh("one", "echo kept > /data/note; sync").await?;
    refused(&kibo(&place, "workspace unbind one").await?, 13, "holds no execution")?;
    stopped(&place, "two").await?;
    refused(&kibo(&place, "workspace bind two v:/other").await?, 13, "bound to Workspace \"one\"")?;
    done(&place, "workspace stop one").await?;

    // Its layer is where no node reaches the pool of another one.
    let far = place.node("1", "256Mi").await?;
    place.create(volume("far", json!({"size": "16Mi", "pool": format!("local-{far}")}))).await?;
    refused(&kibo(&place, "workspace bind one far:/data").await?, 13, "no node is attached to")?;
    let one = place.api::<Workspace>().get("one").await?;
    let claim = one.spec.volume.and_then(|volume| volume.claim);
    ensure!(claim.as_deref() == Some("v"), "what was refused is taken back: {claim:?}");

    let seen = one.status.and_then(|it| it.revisions).context("revisions")?.binding.revision;
    done(&place, "workspace bind one v:/elsewhere").await?;
    done(&place, "workspace bind one v:/elsewhere").await?;
    let late = kibo(&place, &format!("workspace unbind one --expected-revision {seen}")).await?;
    refused(&late, 14, "revision")?;
    done(&place, "workspace unbind one").await?;
    let released = place.api::<Volume>().get("v").await?.status.context("a status")?;
    ensure!((released.phase, &released.bound_to) == (Some(VolumePhase::Available), &None), "{released:?}");

    done(&place, "workspace bind two v:/other").await?;
    done(&place, "workspace start two").await?;
    ensure!(place.sh("two", "cat /other/note").await? == "kept");
    // The one that let it go is deleted without it, and starts without it.
    done(&place, "workspace delete one").await?;
    ensure!(place.sh("two", "cat /other/note").await? == "kept");
    Ok(())
}

async fn one_wins(place: Arc<Place>) -> Result<()> {
    const ROUNDS: usize = 5;
    const MANY: usize = 4;
    place.create(volume("v", json!({"size": "16Mi"}))).await?;
    let names: Vec<_> = (0..MANY).map(|number| format!("w{number}")).collect();
    try_join_all(names.iter().map(|name| stopped(&place, name))).await?;
    for _ in 0..ROUNDS {
        let lines: Vec<_> = names.iter().map(|name| format!("workspace bind {name} v:/data")).collect();
        let ran = try_join_all(lines.iter().map(|line| kibo(&place, line))).await?;
        let winners: Vec<_> = names.iter().zip(&ran).filter(|(_, ran)| ran.code == 0).map(|(name, _)| name).collect();
        ensure!(winners.len() == 1, "{winners:?} of {ran:?}");
        ensure!(ran.iter().all(|ran| matches!(ran.code, 0 | 13)), "{ran:?}");
        let bound = place.api::<Volume>().get("v").await?.status.and_then(|status| status.bound_to).context("bound")?;
        ensure!(bound.name == *winners[0], "{bound:?} and {winners:?}");
        done(&place, &format!("workspace unbind {}", winners[0])).await?;
    }
    Ok(())
}

/// One waits before its image grows, one after it, and the daemon is killed.
async fn daemon_killed(place: Arc<Place>) -> Result<()> {
    let node = place.node("4", "1Gi").await?;
    let names = ["w0", "w1"];
    for name in names {
        place.create_workspace(name, json!({})).await?;
    }
    for name in names {
        place.available(name).await?;
        place.sh(name, "echo kept > /root/note; sync").await?;
        done(&place, &format!("workspace stop {name}")).await?;
        done(&place, &format!("workspace resize {name} --layer 512Mi")).await?;
    }
    let daemon = Component::Node(node);
    let points = Failpoints::of(place.cluster(), &daemon)?;
    let steps = ["image-grows", "image-grown"];
    points.arm(&steps, Action::Wait)?;
    for name in names {
        place.power(name, json!({"state": "Running", "requestId": "grow"})).await?;
    }
    let reached = points.all_reached(&steps, LIMIT).await;
    place.cluster().kill(&daemon).await?;
    points.clear()?;
    place.cluster().start(&daemon).await?;
    reached?;
    for name in names {
        place.available(name).await?;
        let mib = mib_of(&place, name, "/").await?;
        ensure!(mib > 400, "{name}: {mib} MiB");
        ensure!(place.sh(name, "cat /root/note").await? == "kept");
    }
    Ok(())
}

/// Each waits at another step on the way from one Volume to another, and the operator is killed.
async fn operator_killed(place: Arc<Place>) -> Result<()> {
    let steps = ["before-bind-volume", "before-release-volume", "volume-let-go"];
    let each: Vec<_> =
        (0..steps.len()).map(|number| (format!("w{number}"), format!("a{number}"), format!("b{number}"))).collect();
    for (name, old, new) in &each {
        place.create(volume(old, json!({"size": "16Mi"}))).await?;
        place.create(volume(new, json!({"size": "16Mi"}))).await?;
        stopped(&place, name).await?;
        done(&place, &format!("workspace bind {name} {old}:/data")).await?;
    }
    let points = Failpoints::of(place.cluster(), &Component::Operator)?;
    points.arm(&steps, Action::Wait)?;
    let api = place.api::<Workspace>();
    for (name, _, new) in &each {
        let patch = json!({"spec": {"volume": {"claim": new}}});
        api.patch(name, &kube::api::PatchParams::default(), &kube::api::Patch::Merge(patch)).await?;
    }
    let reached = points.all_reached(&steps, LIMIT).await;
    place.cluster().kill(&Component::Operator).await?;
    points.clear()?;
    place.cluster().start(&Component::Operator).await?;
    reached?;
    for (name, old, new) in &each {
        let has_new = |it: &Workspace| {
            it.status.as_ref().and_then(|status| status.volume.as_ref()).is_some_and(|bound| bound.name == *new)
        };
        place.workspace(name, "has the other Volume", LIMIT.as_secs(), has_new).await?;
        let bound = |volume: Volume| volume.status.and_then(|status| status.bound_to).map(|bound| bound.name);
        ensure!(bound(place.api::<Volume>().get(new).await?).as_ref() == Some(name));
        ensure!(bound(place.api::<Volume>().get(old).await?).is_none(), "{old} is let go");
    }
    Ok(())
}
