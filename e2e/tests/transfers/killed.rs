//! The operator and the daemon are killed between any two steps.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use futures::future::{join_all, try_join_all};
use kibo_crds::{Volume, Workspace};
use kibo_e2e::local::Component;
use kibo_e2e::suite::Place;
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::program::Program;
use kibo_failpoint::Action;
use serde_json::json;

use crate::LIMIT;
use crate::scene::Scene;

/// Points of an export with a Volume, in their order.
const EXPORT_OPERATOR: &[&str] = &["transfer-volume-granted", "transfer-granted", "grant-settled"];
const EXPORT_DAEMON: &[&str] = &["transfer-taken", "export-reading", "export-read", "transfer-released"];
/// And of an import.
const IMPORT_OPERATOR: &[&str] = &[
    "import-placed",
    "transfer-volume-granted",
    "transfer-granted",
    "import-received",
    "import-volume-made",
    "grant-settled",
];
const IMPORT_DAEMON: &[&str] =
    &["transfer-taken", "import-writing", "import-synced", "import-named", "transfer-released"];

/// Each of as many transfers as there are points waits at another one.
pub async fn killed(place: Arc<Place>) -> Result<()> {
    let scene = Scene::make(&place).await?;
    let archive = scene.path("w.kibo");
    scene.export("w", &archive).await?;
    scene.is_free("w").await?;
    one_of_two(&scene, &archive).await?;
    let (operator, daemon) = (Component::Operator, Component::Node(scene.node.clone()));
    let kept = scene.uids();
    for (points, victim) in [(IMPORT_OPERATOR, &operator), (IMPORT_DAEMON, &daemon)] {
        let names: Vec<String> = (0..points.len()).map(|number| format!("i{number}")).collect();
        let imports: Vec<[&str; 5]> =
            names.iter().map(|name| ["transfer", "import", archive.as_str(), "--name", name.as_str()]).collect();
        let codes = broken(&scene, points, victim, imports.iter().map(|args| &args[..])).await?;
        for (name, code) in names.iter().zip(codes) {
            if code == 0 {
                scene.same("w", name).await?;
                scene.delete(std::slice::from_ref(name)).await?;
            }
            place.gone(place.api::<Workspace>(), name, LIMIT.as_secs()).await?;
            place.gone(place.api::<Volume>(), name, LIMIT.as_secs()).await?;
        }
        ensure!(scene.uids() == kept, "left over: {:?}", scene.uids().difference(&kept));
    }
    let names: Vec<String> = (0..EXPORT_DAEMON.len()).map(|number| format!("e{number}")).collect();
    try_join_all(names.iter().map(|name| scene.import(&archive, name))).await?;
    for (points, victim) in [(EXPORT_OPERATOR, &operator), (EXPORT_DAEMON, &daemon)] {
        let paths: Vec<String> = names.iter().map(|name| scene.path(name)).collect();
        let exports = names.iter().zip(&paths).take(points.len());
        let exports: Vec<[&str; 5]> =
            exports.map(|(name, path)| ["transfer", "export", name.as_str(), "--to", path.as_str()]).collect();
        let codes = broken(&scene, points, victim, exports.iter().map(|args| &args[..])).await?;
        let complete = names.iter().zip(codes).filter(|(_, code)| *code == 0).map(|(name, _)| name.clone());
        let complete: BTreeSet<String> = complete.chain(["w.kibo".to_owned()]).collect();
        ensure!(scene.files() == complete, "{:?} and not {complete:?}", scene.files());
        for name in complete.iter().filter(|name| *name != "w.kibo") {
            fs::remove_file(scene.path(name))?;
        }
        for name in &names {
            scene.is_free(name).await?;
            scene.same(name, "w").await?;
        }
    }
    // What was broken off before is done when it is asked for again, and is what it was.
    scene.export("e0", &scene.path("again.kibo")).await?;
    scene.delete(&names).await?;
    scene.import(&scene.path("again.kibo"), "again").await?;
    scene.same("again", "w").await?;
    place.power("again", json!({"state": "Running", "requestId": "run"})).await?;
    place.available("again").await?;
    ensure!(place.sh("again", "cat /data/note /root/note").await? == "volume\nlayer");
    Ok(())
}

/// Of two imports that find the room of one, one gets it, also while the first has stored its layer and not yet its Volume.
async fn one_of_two(scene: &Scene, archive: &str) -> Result<()> {
    let (place, pool) = (&scene.place, format!("local-{}", scene.node));
    let import = |name| ["transfer", "import", archive, "--name", name];
    // Each Workspace takes 128Mi of it: half of that with its layer alone.
    place.kibo(&["storage-pool", "set-capacity", &pool, "340Mi"]).await?.ok()?;
    let operator = Failpoints::of(place.cluster(), &Component::Operator)?;
    operator.arm(&["import-placed"], Action::Wait)?;
    let mut first = Program::start(place.kibo_command(&import("first")))?;
    operator.all_reached(&["import-placed"], LIMIT).await.with_context(|| first.stderr())?;
    let second = place.kibo(&import("second")).await?;
    ensure!(second.code == 15 && second.stderr.contains("not allocated: 84Mi"), "{second:?}");
    operator.clear()?;
    ensure!(first.ended().await? == 0, "{}", first.stderr());
    scene.same("w", "first").await?;
    place.kibo(&["storage-pool", "set-capacity", &pool, "default"]).await?.ok()?;
    scene.delete(&["first".to_owned()]).await?;
    place.gone(place.api::<Volume>(), "first", LIMIT.as_secs()).await
}

/// Runs these at once until each point has somebody waiting at it, and kills. Gives their exit statuses: who says that it is
/// complete has to be.
async fn broken<'a>(
    scene: &Scene,
    points: &[&str],
    victim: &Component,
    transfers: impl Iterator<Item = &'a [&'a str]>,
) -> Result<Vec<i32>> {
    let cluster = scene.place.cluster();
    let failpoints = Failpoints::of(cluster, victim)?;
    failpoints.arm(points, Action::Wait)?;
    let mut running =
        transfers.map(|args| Program::start(scene.place.kibo_command(args))).collect::<Result<Vec<_>>>()?;
    let reached = failpoints.all_reached(points, LIMIT).await;
    cluster.kill(victim).await?;
    failpoints.clear()?;
    cluster.start(victim).await?;
    reached.with_context(|| running.iter().map(Program::stderr).collect::<Vec<_>>().join("; "))?;
    join_all(running.iter_mut().map(Program::ended)).await.into_iter().collect()
}
