//! A Workspace with its disks goes into an archive and comes out of one, and whoever is killed or gives up, each archive
//! is whole or not there, and so is each Workspace.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::future::{join_all, try_join_all};
use kibo_archive::{Description, Prefix};
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{Volume, Workspace};
use kibo_e2e::local::Component;
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::object_store::ObjectStore;
use kibo_e2e::suite::program::Program;
use kibo_e2e::suite::{Place, Suite, eventually};
use kibo_failpoint::Action;
use kube::ResourceExt as _;
use serde_json::json;

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_workspace_goes_into_an_archive_and_comes_out_of_it_as_it_was", there_and_back)
        .test("an_archive_goes_into_an_object_store_whole_or_not_at_all", through_a_store)
        .alone("a_transfer_leaves_nothing_half_wherever_the_operator_or_the_daemon_is_killed", killed)
        .run()
}

const LIMIT: Duration = Duration::from_secs(120);

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

/// A node with one stopped Workspace whose disks have data, and a directory for archives.
struct Scene {
    place: Arc<Place>,
    node: String,
    dir: tempfile::TempDir,
}

impl Scene {
    async fn make(place: &Arc<Place>) -> Result<Self> {
        let node = place.node("16", "8Gi").await?;
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
        Ok(Self { place: place.clone(), node, dir: tempfile::tempdir()? })
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn files(&self) -> BTreeSet<String> {
        names_in(self.dir.path())
    }

    async fn export(&self, workspace: &str, to: &str) -> Result<String> {
        self.place.kibo(&["transfer", "export", workspace, "--to", to]).await?.ok()
    }

    async fn import(&self, from: &str, name: &str) -> Result<String> {
        self.place.kibo(&["transfer", "import", from, "--name", name]).await?.ok()
    }

    fn objects(&self) -> PathBuf {
        self.place.cluster().layout().node(&self.node).join("pool/objects")
    }

    /// The objects of the pool, without what outlives them by design.
    fn uids(&self) -> BTreeSet<String> {
        let is_more = |name: &String| names_in(&self.objects().join(name)).iter().any(|it| !it.ends_with(".refused"));
        names_in(&self.objects()).into_iter().filter(is_more).collect()
    }

    /// The uids of a Workspace's layer and Volume.
    async fn disks(&self, workspace: &str) -> Result<[String; 2]> {
        let layer = self.place.api::<Workspace>().get(workspace).await?.uid().context("it has a uid")?;
        let volume = self.place.api::<Volume>().get(workspace).await?.uid().context("it has a uid")?;
        Ok([layer, volume])
    }

    /// Both disks are what those of another one are, and nobody holds them.
    async fn same(&self, one: &str, other: &str) -> Result<()> {
        for (one, other) in self.disks(one).await?.into_iter().zip(self.disks(other).await?) {
            let image = |uid: &str| self.objects().join(uid).join("image.raw");
            let same = Command::new("cmp").arg(image(&one)).arg(image(&other)).status()?;
            ensure!(same.success(), "{one} and {other} differ");
            let left = names_in(&self.objects().join(&one));
            ensure!(left.iter().all(|name| name == "image.raw" || name.starts_with("holder.")), "{one}: {left:?}");
        }
        Ok(())
    }

    async fn is_free(&self, workspace: &str) -> Result<()> {
        let free = |it: &Workspace| {
            let status = it.status.clone().unwrap_or_default();
            status.holder.is_none_or(|holder| holder.idle) && status.transfer.is_none_or(|it| it.state.is_over())
        };
        self.place.watched(self.place.api::<Workspace>(), workspace, "is free", LIMIT.as_secs(), free).await?;
        let free = |it: &Volume| it.status.as_ref().is_some_and(|it| it.holder.as_ref().is_none_or(|it| it.idle));
        self.place.watched(self.place.api::<Volume>(), workspace, "is free", LIMIT.as_secs(), free).await?;
        Ok(())
    }

    async fn delete(&self, names: &[String]) -> Result<()> {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.place.kibo(&[&["workspace", "delete"][..], &names[..]].concat()).await?.ok().map(drop)
    }
}

fn names_in(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

async fn there_and_back(place: Arc<Place>) -> Result<()> {
    let scene = Scene::make(&place).await?;
    let archive = scene.path("w.kibo");
    place.kibo(&["node", "drain", &scene.node]).await?.ok()?;

    // While it is read nobody uses it, whoever wants to is told, and nothing has the archive's name.
    let daemon = Failpoints::of(place.cluster(), &Component::Node(scene.node.clone()))?;
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
    Ok(())
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

async fn through_a_store(place: Arc<Place>) -> Result<()> {
    let scene = Scene::make(&place).await?;
    let store = ObjectStore::start().await?;
    store.ask("s3.create_bucket(Bucket='backups')").await?;
    let objects = "print([o['Key'] for o in s3.list_objects_v2(Bucket='backups').get('Contents', [])])";
    let uploads = "print(len(s3.list_multipart_uploads(Bucket='backups').get('Uploads', [])))";
    let by = |args: &[&str], url: &str| {
        let mut command = place.kibo_command(&[args, &["--s3-endpoint", url]].concat());
        command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "test");
        Program::start(command)
    };
    let kibo = |args: &[&str]| by(args, &store.url);
    let to = "s3://backups/a/w.kibo";

    // One that is broken off is not there, and its parts are not either.
    let daemon = Failpoints::of(place.cluster(), &Component::Node(scene.node.clone()))?;
    daemon.arm(&["export-read"], Action::Wait)?;
    let mut export = kibo(&["transfer", "export", "w", "--to", to])?;
    daemon.all_reached(&["export-read"], LIMIT).await?;
    ensure!(store.ask(uploads).await? == "1");
    export.signal(rustix::process::Signal::INT)?;
    ensure!(export.ended().await? == 130, "{}", export.stderr());
    daemon.clear()?;
    ensure!(store.ask(objects).await? == "[]" && store.ask(uploads).await? == "0");
    scene.is_free("w").await?;

    let mut export = kibo(&["transfer", "export", "w", "--to", to])?;
    ensure!(export.ended().await? == 0, "{}", export.stderr());
    ensure!(store.ask(objects).await? == "['a/w.kibo']" && store.ask(uploads).await? == "0");
    // For longer than stores are mostly given for one request.
    let (url, _line) = store.slowly(250_000).await?;
    let begun = Instant::now();
    let mut slow = by(&["transfer", "import", to, "--name", "slow"], &url)?;

    let mut twice = kibo(&["transfer", "export", "w", "--to", to])?;
    ensure!(twice.ended().await? == 13 && twice.stderr().contains("exists already"), "{}", twice.stderr());
    let mut missing = kibo(&["transfer", "import", "s3://backups/none"])?;
    ensure!(missing.ended().await? == 12, "{}", missing.stderr());
    let mut import = kibo(&["transfer", "import", to, "--name", "copy"])?;
    ensure!(import.ended().await? == 0, "{}", import.stderr());
    scene.same("w", "copy").await?;
    ensure!(slow.ended().await? == 0, "{}", slow.stderr());
    ensure!(begun.elapsed() > Duration::from_secs(33), "it was no slow one: {:?}", begun.elapsed());
    scene.same("w", "slow").await
}

/// Each of as many transfers as there are points waits at another one.
async fn killed(place: Arc<Place>) -> Result<()> {
    let scene = Scene::make(&place).await?;
    let archive = scene.path("w.kibo");
    scene.export("w", &archive).await?;
    scene.is_free("w").await?;
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
