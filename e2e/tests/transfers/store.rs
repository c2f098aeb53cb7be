//! From a Workspace into an object store, and out of it, by ways that are slow, full or taken.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kibo_crds::{Volume, Workspace};
use kibo_e2e::local::LocalPool;
use kibo_e2e::suite::disk::Disk;
use kibo_e2e::suite::line;
use kibo_e2e::suite::object_store::ObjectStore;
use kibo_e2e::suite::program::Program;
use kibo_e2e::suite::{Place, eventually};
use kibo_failpoint::Action;
use tokio::task::JoinSet;

use crate::LIMIT;
use crate::scene::{Scene, names_in};
use crate::{gone, rights};

/// The API server's own requests end after a minute.
const LONG: Duration = Duration::from_secs(61);

pub async fn through_a_store(place: Arc<Place>) -> Result<()> {
    let disk = place.disk(256 << 20)?;
    let small = LocalPool { id: "small".to_owned(), path: disk.pool(), default: false };
    let scene = Scene::with(&place, |node| node.pools.push(small)).await?;
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
    let daemon = scene.daemon()?;
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
    let archive = scene.path("w.kibo");
    scene.export("w", &archive).await?;
    let far = place.node("1", "512Mi").await?;
    import_into(&scene, &archive, "far", &far).await?;
    place.kibo(&["node", "drain", &far]).await?.ok()?;
    // For longer than stores are mostly given for one request, and the API server its own ones: one that sends and one that
    // reads.
    let (mut reader, _its_line) = far_reader(&scene).await?;
    let (url, _line) = store.slowly(140_000).await?;
    let begun = Instant::now();
    let mut slow = by(&["transfer", "import", to, "--name", "slow"], &url)?;

    let mut twice = kibo(&["transfer", "export", "w", "--to", to])?;
    ensure!(twice.ended().await? == 13 && twice.stderr().contains("exists already"), "{}", twice.stderr());
    let mut missing = kibo(&["transfer", "import", "s3://backups/none"])?;
    ensure!(missing.ended().await? == 12, "{}", missing.stderr());
    // Oftener than a client of the store takes a request up again.
    let (brittle, _line_that_breaks) = store.brittle(1 << 20).await?;
    let mut import = by(&["transfer", "import", to, "--name", "copy"], &brittle)?;
    ensure!(import.ended().await? == 0, "{}", import.stderr());
    scene.same("w", "copy").await?;

    // Beside it, what takes no time in which it could be slow.
    raced(&scene, &store).await?;
    gone::killed(&scene, &archive, by(&["transfer", "import", to, "--name", "victim"], &url)?).await?;
    gone::stopped(&scene).await?;
    rights::some_of_them(&scene, &archive).await?;
    let (url, _line) = store.slowly(1_000_000).await?;
    let pools = ["--layer-pool", "small", "--volume-pool", "small"];
    let full = by(&[&["transfer", "import", to, "--name", "full"][..], &pools].concat(), &url)?;
    full_disks(&scene, &disk, full).await?;

    ensure!(slow.ended().await? == 0, "{}", slow.stderr());
    ensure!(begun.elapsed() > LONG, "it was no slow one: {:?}", begun.elapsed());
    scene.same("w", "slow").await?;
    ensure!(reader.ended().await? == 0, "{}", reader.stderr());
    ensure!(begun.elapsed() > LONG, "it was no slow one: {:?}", begun.elapsed());
    import_into(&scene, &scene.path("far.kibo"), "near", &scene.node).await?;
    scene.same("w", "near").await
}

/// Into the pool of this node, for which the others do not ask.
async fn import_into(scene: &Scene, archive: &str, name: &str, node: &str) -> Result<()> {
    let pool = format!("local-{node}");
    let import = ["transfer", "import", archive, "--name", name, "--layer-pool", &pool, "--volume-pool", &pool];
    scene.place.kibo(&import).await?.ok().map(drop)
}

/// Exports "far", from a node at which nobody waits for a point, to where the API server is reached by a slow line.
async fn far_reader(scene: &Scene) -> Result<(Program, JoinSet<()>)> {
    let cluster = scene.place.cluster();
    let server = format!("127.0.0.1:{}", cluster.ports().apiserver);
    let (line, its_end) = line::slow(&server, 140_000).await?;
    let near = fs::read_to_string(cluster.layout().kubeconfig())?;
    ensure!(near.contains(&server), "its API server is not at {server}");
    let far = scene.path("far.kubeconfig");
    fs::write(&far, near.replace(&server, &line.to_string()))?;
    let to = scene.path("far.kibo");
    let mut command = scene.place.kibo_command(&["transfer", "export", "far", "--to", &to]);
    command.env("KUBECONFIG", far);
    Ok((Program::start(command)?, its_end))
}

/// Something else gets the name between the last look at it and the end of the upload: the store itself refuses.
async fn raced(scene: &Scene, store: &ObjectStore) -> Result<()> {
    let theirs = "s3.put_object(Bucket='backups', Key='raced.kibo', Body=b'theirs')";
    let (url, _line) = store.before(["POST ", "uploadId="], theirs).await?;
    let args = ["transfer", "export", "w", "--to", "s3://backups/raced.kibo", "--s3-endpoint", &url];
    let mut command = scene.place.kibo_command(&args);
    command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "test");
    let mut raced = Program::start(command)?;
    ensure!(raced.ended().await? == 13 && raced.stderr().contains("exists already"), "{}", raced.stderr());
    let there = "print(s3.get_object(Bucket='backups', Key='raced.kibo')['Body'].read())";
    ensure!(store.ask(there).await? == "b'theirs'", "it was replaced");
    ensure!(store.ask("print(s3.list_multipart_uploads(Bucket='backups').get('Uploads'))").await? == "None");
    scene.is_free("w").await
}

/// There is no more space where an archive goes, and then where the disks of an import go: `import` is one that has begun.
async fn full_disks(scene: &Scene, disk: &Disk, mut import: Program) -> Result<()> {
    let place = &scene.place;
    let pool = disk.pool();
    let begun = async || {
        let objects = names_in(&pool.join("objects"));
        let mut inside = objects.iter().flat_map(|uid| names_in(&pool.join("objects").join(uid)));
        Ok(inside.any(|name| name.starts_with("image.raw.importing.")).then_some(()))
    };
    eventually("the import writes", LIMIT, begun).await?;
    disk.fill(1 << 20)?;
    ensure!(import.ended().await? == 15, "{}", import.stderr());
    let there = pool.parent().context("it is on the disk")?.to_owned();
    let export = ["transfer", "export", "w", "--to", &there.join("w.kibo").display().to_string()];
    let export = place.kibo(&export).await?;
    ensure!(export.code == 15 && export.stderr.contains("No space left"), "{export:?}");
    let left = names_in(&there);
    ensure!(!left.iter().any(|name| name.contains("w.kibo")), "{left:?}");
    scene.is_free("w").await?;
    disk.empty()?;
    place.gone(place.api::<Workspace>(), "full", LIMIT.as_secs()).await?;
    place.gone(place.api::<Volume>(), "full", LIMIT.as_secs()).await?;
    let is_empty = async || Ok(names_in(&pool.join("objects")).is_empty().then_some(()));
    eventually("nothing is left in the pool", LIMIT, is_empty).await
}
