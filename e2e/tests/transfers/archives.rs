//! From a Workspace into a file, and out of it.

use std::fs;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kibo_archive::{Description, Prefix};
use kibo_crds::{Volume, Workspace};
use kibo_e2e::suite::program::Program;
use kibo_e2e::suite::{Place, eventually};
use kibo_failpoint::Action;

use crate::LIMIT;
use crate::isolated;
use crate::scene::Scene;

pub async fn there_and_back(place: Arc<Place>) -> Result<()> {
    let (scene, way) = isolated::Way::with_scene(&place).await?;
    let archive = scene.path("w.kibo");
    place.kibo(&["node", "drain", &scene.node]).await?.ok()?;

    // While it is read nobody uses it, whoever wants to is told, and nothing has the archive's name.
    let daemon = scene.daemon()?;
    daemon.arm(&["export-reading"], Action::Wait)?;
    let export = Program::start(place.kibo_command(&["transfer", "export", "w", "--to", &archive]))?;
    daemon.all_reached(&["export-reading"], LIMIT).await?;
    ensure!(!scene.files().contains("w.kibo") && scene.files().len() == 1, "{:?}", scene.files());
    let start = place.kibo(&["workspace", "start", "w"]).await?;
    ensure!(start.code == 13 && start.stderr.contains(&format!("exports it by node {}", scene.node)), "{start:?}");
    let again = place.kibo(&["transfer", "export", "w", "--to", &scene.path("again")]).await?;
    ensure!(again.code == 13 && again.stderr.contains("is exporting or importing it"), "{again:?}");
    let moved = place.kibo(&["storage-pool", "move", "workspace/w", "--to", "elsewhere"]).await?;
    ensure!(moved.code == 13 && moved.stderr.contains("let its export or import end"), "{moved:?}");
    daemon.clear()?;
    let mut export = export;
    ensure!(export.ended().await? == 0, "{}", export.stderr());
    ensure!(scene.files() == ["w.kibo".to_owned()].into(), "{:?}", scene.files());
    scene.is_free("w").await?;
    let twice = place.kibo(&["transfer", "export", "w", "--to", &archive]).await?;
    ensure!(twice.code == 13 && twice.stderr.contains("exists already"), "{twice:?}");
    place.kibo(&["node", "cancel-drain", &scene.node]).await?.ok()?;

    let before = scene.uids();
    refusals(&scene, &archive).await?;
    ensure!(scene.uids() == before, "left over: {:?}", scene.uids().difference(&before));

    // Half an import is not started, and goes when its sender gives up.
    daemon.arm(&["import-writing"], Action::Wait)?;
    let mut import = Program::start(place.kibo_command(&["transfer", "import", &archive, "--name", "half"]))?;
    daemon.all_reached(&["import-writing"], LIMIT).await?;
    let start = place.kibo(&["workspace", "start", "half"]).await?;
    ensure!(start.code == 13 && start.stderr.contains("makes its disks from an archive"), "{start:?}");
    import.signal(rustix::process::Signal::INT)?;
    ensure!(import.ended().await? == 130, "{}", import.stderr());
    daemon.clear()?;
    place.gone(place.api::<Workspace>(), "half", LIMIT.as_secs()).await?;
    place.gone(place.api::<Volume>(), "half", LIMIT.as_secs()).await?;
    eventually("its parts are gone", LIMIT, async || Ok((scene.uids() == before).then_some(()))).await?;

    scene.import(&format!("file://{archive}"), "copy").await?;
    scene.same("w", "copy").await?;
    place.kibo(&["workspace", "start", "copy"]).await?.ok()?;
    ensure!(place.sh("copy", "cat /data/note /root/note").await? == "volume\nlayer");
    let copy = place.api::<Workspace>().get("copy").await?;
    ensure!(copy.spec.annotations.get("note").is_some_and(|note| note == "kept"), "{:?}", copy.spec);
    let used = place.kibo(&["transfer", "export", "copy", "--to", &scene.path("copy")]).await?;
    ensure!(used.code == 13 && used.stderr.contains("stop it first"), "{used:?}");
    ensure!(!scene.files().contains("copy"), "{:?}", scene.files());
    scene.delete(&["copy".to_owned()]).await?;
    isolated::meanwhile(&scene, &way, &archive).await
}

/// Each archive that is not one, and each place where it cannot go, has its own error, and leaves nothing.
async fn refusals(scene: &Scene, archive: &str) -> Result<()> {
    let whole = fs::read(archive)?;
    let prefix = Prefix::read(&whole)?.context("it has a beginning")?;
    let mut description = prefix.description.clone();
    "nowhere".clone_into(&mut description.spec.template);
    let with = |description| -> Result<Vec<u8>> {
        Ok([Prefix::new(description)?.bytes(), &whole[prefix.bytes().len()..]].concat())
    };
    let other = with(description)?;
    ensure!(prefix.description.root_image.as_deref() == Some("debian-12"), "{:?}", prefix.description);
    let image = with(Description { root_image: Some("alpine-3".to_owned()), ..prefix.description.clone() })?;
    let changed = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let cases: [(&str, Vec<u8>, i32, &str); 8] = [
        ("truncated", whole[..whole.len() - 1].to_vec(), 10, "the archive is truncated"),
        ("beginning", whole[..20].to_vec(), 10, "the archive is truncated"),
        ("altered", changed(whole.len() - 4096), 10, "the archive is damaged"),
        ("version", changed(8), 10, "this release reads version 1 only"),
        ("nonsense", b"something else".to_vec(), 10, "is no archive of a Workspace"),
        ("longer", [&whole[..], b"x"].concat(), 10, "behind the end of the archive"),
        ("template", other, 12, "is not in this cluster"),
        ("image", image, 13, "and the archive's layer lies on \"alpine-3\""),
    ];
    for (name, bytes, code, says) in cases {
        let path = scene.path(name);
        fs::write(&path, bytes)?;
        let refused = scene.place.kibo(&["transfer", "import", &path, "--name", name]).await?;
        ensure!(refused.code == code && refused.stderr.contains(says), "{name}: {refused:?}");
        scene.place.gone(scene.place.api::<Workspace>(), name, LIMIT.as_secs()).await?;
    }
    let taken = scene.place.kibo(&["transfer", "import", archive]).await?;
    ensure!(taken.code == 14 && taken.stderr.contains("already exists"), "{taken:?}");
    let full = ["transfer", "import", archive, "--name", "full", "--layer-pool", "nowhere"];
    let full = scene.place.kibo(&full).await?;
    ensure!(full.code == 15, "{full:?}");
    scene.place.gone(scene.place.api::<Workspace>(), "full", LIMIT.as_secs()).await?;
    scene.place.gone(scene.place.api::<Volume>(), "full", LIMIT.as_secs()).await
}
