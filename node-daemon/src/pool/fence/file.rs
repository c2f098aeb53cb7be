//! The file itself: the owner's block, and the marks of the others behind it.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use kibo_crds::{Incarnation, NodeId};
use serde::{Deserialize, Serialize};

use super::block::{self, BLOCK, Said};
use crate::{clock, durable, pool::marker};

pub const FORMAT: u32 = 1;
/// Marks of different incarnations are in different blocks, so that of two members that mark at once, one of them from
/// long ago, none takes the other's mark away.
const MARKS: u64 = 4;
#[expect(clippy::cast_possible_truncation, reason = "a handful of blocks")]
const LENGTH: usize = BLOCK * (1 + MARKS as usize);
/// A block is torn for the length of one write; damage stays.
const READS: u32 = 5;
const BETWEEN_READS: Duration = Duration::from_millis(20);

/// The owner's block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    pub format: u32,
    pub node: NodeId,
    /// Absent: the node lives no life yet, and runs nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<Incarnation>,
    pub heartbeat: u64,
}

/// That an incarnation is dead, by somebody who takes over what it held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mark {
    format: u32,
    /// This one and all before it.
    pub incarnation: Incarnation,
    pub by: NodeId,
    /// By that node's clock; for people only.
    pub unix_millis: u64,
}

/// What a fence file says.
#[derive(Debug)]
pub struct Fence {
    /// `None`: nobody has counted yet.
    pub beat: Result<Option<Beat>, FenceError>,
    /// The highest. An error: what is written there cannot be read, and may be one.
    pub mark: Result<Option<Mark>, FenceError>,
    /// The highest that can be read, also where another one cannot.
    pub highest: Option<Mark>,
}

#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    #[error("failed to {action} the fence file {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("the fence file {path} is damaged: its node writes it anew when its daemon runs")]
    Damaged { path: PathBuf },
    #[error(
        "a mark in the fence file {path} is damaged, and may say that this node was isolated: isolate the node if its \
         host was declared dead, else overwrite what follows the first {BLOCK} bytes with zeros"
    )]
    DamagedMark { path: PathBuf },
    #[error("the fence file {path} has format {format}, and this daemon knows {FORMAT}: upgrade it")]
    LaterFormat { path: PathBuf, format: u32 },
    #[error("the fence file {path} does not keep what is written to it: see whether the pool's file system is well")]
    NotKept { path: PathBuf },
}

pub fn path_of(pool: &Path, node: &NodeId) -> PathBuf {
    pool.join(marker::NODES).join(node.as_str())
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FenceError {
    move |source| FenceError::Io { action, path: path.to_owned(), source }
}

/// What the fence file of `node` says now, opened afresh, so that a network file system asks its server. `None`: there
/// is no such file.
pub fn read(pool: &Path, node: &NodeId) -> Result<Option<Fence>, FenceError> {
    let path = path_of(pool, node);
    for last in (0..READS).map(|count| count + 1 == READS) {
        let file = match block::open(&path, OpenOptions::new().read(true)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(failed("open", &path))?,
        };
        let bytes = block::read(&file, LENGTH).map_err(failed("read", &path))?;
        let (owner, marks) = bytes.split_at(BLOCK);
        let (owner, (highest, marks)) = (block::decode::<Beat>(owner, FORMAT), read_marks(marks));
        if !last && (owner == Said::Garbled || marks == Said::Garbled) {
            thread::sleep(BETWEEN_READS);
            continue;
        }
        return Ok(Some(Fence {
            beat: said(owner, &path, || FenceError::Damaged { path: path.clone() }),
            mark: said(marks, &path, || FenceError::DamagedMark { path: path.clone() }),
            highest,
        }));
    }
    unreachable!("the last read returns")
}

fn said<T>(said: Said<T>, path: &Path, damaged: impl FnOnce() -> FenceError) -> Result<Option<T>, FenceError> {
    match said {
        Said::Nothing => Ok(None),
        Said::Text(text) => Ok(Some(text)),
        Said::LaterFormat(format) => Err(FenceError::LaterFormat { path: path.to_owned(), format }),
        Said::Garbled => Err(damaged()),
    }
}

/// The highest of all marks that can be read, and of all: one that cannot be read may be higher than the others.
fn read_marks(blocks: &[u8]) -> (Option<Mark>, Said<Mark>) {
    let mut highest: Option<Mark> = None;
    let mut unclear = None;
    for block in blocks.chunks(BLOCK) {
        match block::decode::<Mark>(block, FORMAT) {
            Said::Nothing => {}
            Said::Text(mark) => {
                if highest.as_ref().is_none_or(|known| known.incarnation < mark.incarnation) {
                    highest = Some(mark);
                }
            }
            said => unclear = Some(said),
        }
    }
    let all = unclear.unwrap_or_else(|| highest.clone().map_or(Said::Nothing, Said::Text));
    (highest, all)
}

/// Makes the file with its whole length, so that the others know that they share the pool with this node, and fails
/// where nothing can be written.
pub fn sign_in(pool: &Path, node: &NodeId) -> io::Result<()> {
    let dir = pool.join(marker::NODES);
    fs::create_dir_all(&dir)?;
    make(&path_of(pool, node), &dir).map(drop)
}

/// Not exclusively: whoever is told by a cache that a file is missing makes the one that is there.
fn make(path: &Path, dir: &Path) -> io::Result<File> {
    let file = block::open(path, OpenOptions::new().read(true).write(true).create(true).truncate(false))?;
    if file.metadata()?.len() < LENGTH as u64 {
        file.set_len(LENGTH as u64)?;
        file.sync_all()?;
        durable::sync_dir(dir)?;
    }
    Ok(file)
}

/// Writes the owner's block into a file that is there: in an empty mount point there is none.
pub fn write_beat(pool: &Path, beat: &Beat) -> io::Result<()> {
    let file = block::open(&path_of(pool, &beat.node), OpenOptions::new().write(true))?;
    file.write_all_at(&block::encode(beat)?, 0)
}

/// Says in the fence file of `victim` that this incarnation of it is dead, and returns when everybody reads it there.
/// Only upward: a higher mark stays. The owner's block is not touched.
pub fn mark(pool: &Path, victim: &NodeId, dead: Incarnation, by: &NodeId) -> Result<(), FenceError> {
    let path = path_of(pool, victim);
    let mark = Mark { format: FORMAT, incarnation: dead, by: by.clone(), unix_millis: clock::unix_nanos() / 1_000_000 };
    let offset = (1 + dead.0 % MARKS) * BLOCK as u64;
    for _ in 0..READS {
        if is_marked(pool, victim, dead)? {
            return Ok(());
        }
        let file = make(&path, &pool.join(marker::NODES)).map_err(failed("open", &path))?;
        let block = block::encode(&mark).map_err(failed("mark", &path))?;
        file.write_all_at(&block, offset).map_err(failed("mark", &path))?;
    }
    if is_marked(pool, victim, dead)? { Ok(()) } else { Err(FenceError::NotKept { path }) }
}

/// What is damaged beside it stops nobody: the victim takes that for a reason to stand still anyhow.
fn is_marked(pool: &Path, victim: &NodeId, dead: Incarnation) -> Result<bool, FenceError> {
    let Some(fence) = read(pool, victim)? else { return Ok(false) };
    match fence.mark {
        Err(error @ FenceError::LaterFormat { .. }) => Err(error),
        _ => Ok(fence.highest.is_some_and(|mark| mark.incarnation >= dead)),
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
