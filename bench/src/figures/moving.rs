//! How fast an image goes from one pool to another, beside cp.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use kibo_crds::{Bytes, Epoch, Incarnation, NodeId, ObjectUid, PoolId};
use kibo_node_daemon::{
    config::{FenceConfig, PoolConfig},
    launch::{By, Grant, GrantedObject, Object, Operation, PredecessorEnd, Taker},
    pool::{self, Pools, Progress},
};
use rand::RngCore as _;

use crate::{
    report::{Aim, Section, ratio},
    site::Site,
    spread::Spread,
};

/// In turns, so that what else the machine does hits both.
const ROUNDS: u64 = 5;
const SIZE: u64 = 4 << 30;
/// Every other of these is data: what lies between them is a hole.
const PART: usize = 64 << 20;
const PARTS: u64 = 16;
const AIM: Aim = Aim::AtLeast(0.9);
const UID: &str = "6f9619ff-8b86-d011-b42d-00c04fc964ff";

const EXPLAINED: &str = "\
An image of 4 GiB with 1 GiB of data in 16 pieces, from one pool to another on the same file system: by the node-daemon's own \
move (taken in both pools, copied, synced, read back as a whole and compared, named), and by `cp --sparse=always` with a `sync` of the copy, \
in turns, each with a page cache that does not have the image. The ratio is cp's time by the move's. The move reads or writes \
each byte three times, cp twice: beside a `cp` that is followed by a `cmp` of both from the disk, which is what a move promises, it is four.";

pub async fn measure(site: &Site) -> Result<Vec<Section>> {
    let root = site.directory("moves");
    let measured = tokio::task::spawn_blocking(move || in_turns(&root)).await??;
    let mut section = Section::new("Moves between storage pools", EXPLAINED, ["", "median", "min", "max", "aim", ""]);
    let speed = |seconds: f64| format!("{:.0} MiB/s", 1024.0 / seconds);
    let names = [
        ("move", &measured.moves),
        ("cp --sparse=always, sync", &measured.copies),
        ("the same, and cmp", &measured.compared),
    ];
    for (name, seconds) in names {
        let spread = Spread::of(seconds.iter().copied());
        section.row(name, [speed(spread.median), speed(spread.max), speed(spread.min)]);
    }
    let ratios = measured.copies.iter().zip(&measured.moves).map(|(copy, moved)| copy / moved);
    let spread = Spread::of(ratios);
    section.row("move by cp", spread.cells(ratio).into_iter().chain(AIM.cells(spread.median, ratio)));
    let ratios = measured.compared.iter().zip(&measured.moves).map(|(compared, moved)| compared / moved);
    section.row("move by cp and cmp", Spread::of(ratios).cells(ratio));
    Ok(vec![section])
}

#[derive(Default)]
struct Measured {
    moves: Vec<f64>,
    copies: Vec<f64>,
    compared: Vec<f64>,
}

fn in_turns(root: &Path) -> Result<Measured> {
    let dirs = [root.join("old"), root.join("new")];
    let ids: [PoolId; 2] = ["old".parse()?, "new".parse()?];
    for (dir, id) in dirs.iter().zip(&ids) {
        pool::init(dir, id)?;
    }
    let configs: Vec<_> = dirs
        .iter()
        .zip(&ids)
        .map(|(path, id)| PoolConfig { id: id.clone(), path: path.clone(), default: id.as_str() == "old" })
        .collect();
    let node: NodeId = "bench".parse()?;
    let pools = Pools::open(&configs, FenceConfig::default(), &node)?;
    let uid: ObjectUid = UID.parse()?;
    let image = |dir: &Path| dir.join("objects").join(UID).join("image.raw");
    make(&image(&dirs[0]))?;
    let (mut measured, copy) = (Measured::default(), root.join("copy.raw"));
    let taker = Taker { node, incarnation: Incarnation(1), by: By::Operation(Operation::Move) };
    for epoch in 1..=ROUNDS {
        let predecessor_end = if epoch == 1 { PredecessorEnd::None } else { PredecessorEnd::Released };
        let grant = Grant { epoch: Epoch(epoch), predecessor: Epoch(epoch - 1), predecessor_end };
        let object =
            Object { uid: uid.clone(), pool: ids[0].clone(), size: Bytes(SIZE), must_exist: true, grows_from: None };
        let granted = GrantedObject { object, grant };
        forget_pages()?;
        let begun = Instant::now();
        pools.move_object(&granted, &ids[1], &taker, &Progress::default())?;
        measured.moves.push(begun.elapsed().as_secs_f64());
        if epoch == 1 {
            let same = Command::new("cmp").args([image(&dirs[0]), image(&dirs[1])]).status()?;
            ensure!(same.success(), "the move made another image");
        }
        pools.get(&ids[1])?.discard_copy(&uid, Epoch(epoch))?;
        pools.get(&ids[0])?.release(&uid, Epoch(epoch))?;

        forget_pages()?;
        let begun = Instant::now();
        let copied = Command::new("cp").arg("--sparse=always").args([&image(&dirs[0]), &copy]).status()?;
        ensure!(copied.success(), "cp failed");
        File::open(&copy)?.sync_all()?;
        measured.copies.push(begun.elapsed().as_secs_f64());
        forget_pages()?;
        let same = Command::new("cmp").args([&image(&dirs[0]), &copy]).status()?;
        ensure!(same.success(), "cp made another image");
        measured.compared.push(begun.elapsed().as_secs_f64());
        fs::remove_file(&copy)?;
    }
    drop(pools);
    fs::remove_dir_all(root)?;
    Ok(measured)
}

fn make(path: &PathBuf) -> Result<()> {
    let dir = path.parent().context("it is in a directory")?;
    fs::create_dir_all(dir)?;
    let mut file = File::create_new(path)?;
    let mut part = vec![0; PART];
    for number in 0..PARTS {
        rand::rng().fill_bytes(&mut part);
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(number * 2 * PART as u64))?;
        file.write_all(&part)?;
    }
    file.set_len(SIZE)?;
    file.sync_all()?;
    Ok(())
}

/// So that nobody reads what is in memory already.
fn forget_pages() -> Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "1").context("failed to drop the page cache")
}
