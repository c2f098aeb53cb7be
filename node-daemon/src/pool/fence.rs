//! The fence file of a node: `nodes/<node>` in each pool that it declares.
//!
//! Its first block belongs to that node, which writes it in place every 2 s: the incarnation that it lives and a count
//! that only grows. A count that moves tells every other member of the pool that this host is up and reaches the pool,
//! whatever anybody says of it. What follows the block belongs to others, who may one day write there that an
//! incarnation is dead; the owner never touches it.
//!
//! The block carries the version of its format and a checksum: one that is read while it is being written is read again,
//! and one of a later format is said to be so and not guessed at.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Duration,
};

use kibo_crds::{Incarnation, NodeId, PoolId};
use serde::{Deserialize, Serialize};

use super::marker;

const EVERY: Duration = Duration::from_secs(2);
const FORMAT: u32 = 1;
/// One sector: a disk writes it whole.
const BLOCK: usize = 512;
/// A block is torn for the length of one write; damage stays.
const READS: u32 = 5;
const BETWEEN_READS: Duration = Duration::from_millis(20);

/// The owner's block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    format: u32,
    pub node: NodeId,
    /// Absent: the node lives no life yet, and runs nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<Incarnation>,
    pub heartbeat: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    #[error("failed to {action} the fence file {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("the fence file {path} is damaged: its node writes it anew when its daemon runs")]
    Damaged { path: PathBuf },
    #[error("the fence file {path} has format {format}, and this daemon knows {FORMAT}: upgrade it")]
    LaterFormat { path: PathBuf, format: u32 },
}

/// Which life this node lives, for all of its pools.
#[derive(Clone, Debug, Default)]
pub struct Life(Arc<AtomicU64>);

impl Life {
    /// 0 is no incarnation.
    pub fn set(&self, incarnation: Option<Incarnation>) {
        self.0.store(incarnation.map_or(0, |incarnation| incarnation.0), Ordering::Relaxed);
    }

    fn get(&self) -> Option<Incarnation> {
        Some(self.0.load(Ordering::Relaxed)).filter(|incarnation| *incarnation > 0).map(Incarnation)
    }
}

fn path_of(pool: &Path, node: &NodeId) -> PathBuf {
    pool.join(marker::NODES).join(node.as_str())
}

fn encode(beat: &Beat) -> io::Result<[u8; BLOCK]> {
    let json = serde_json::to_string(beat)?;
    let text = format!("{json}\n{:08x}\n", crc32fast::hash(json.as_bytes()));
    let mut block = [b' '; BLOCK];
    block.get_mut(..text.len()).ok_or_else(|| io::Error::other("it is too long"))?.copy_from_slice(text.as_bytes());
    block[BLOCK - 1] = b'\n';
    Ok(block)
}

/// What a whole block says; the format first, since a later one may have other fields.
fn decode(block: &[u8]) -> Option<Result<Beat, u32>> {
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    let (json, rest) = std::str::from_utf8(block).ok()?.split_once('\n')?;
    let crc = u32::from_str_radix(rest.get(..8)?, 16).ok()?;
    (crc == crc32fast::hash(json.as_bytes())).then_some(())?;
    let Format { format } = serde_json::from_str(json).ok()?;
    if format > FORMAT { Some(Err(format)) } else { serde_json::from_str(json).ok().map(Ok) }
}

/// What the fence file of `node` says now, opened afresh, so that a network file system asks its server. `None`: there
/// is no such file, or nobody has counted in it yet.
pub fn read(pool: &Path, node: &NodeId) -> Result<Option<Beat>, FenceError> {
    let path = path_of(pool, node);
    for _ in 0..READS {
        let failed = |source| FenceError::Io { action: "read", path: path.clone(), source };
        let mut block = [0; BLOCK];
        match File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file.read_exact_at(&mut block, 0)))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
            Ok((0, _)) => return Ok(None),
            Ok((_, Err(error))) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(failed(error)),
            Ok(_) => {}
        }
        match decode(&block) {
            Some(Ok(beat)) => return Ok(Some(beat)),
            Some(Err(format)) => return Err(FenceError::LaterFormat { path, format }),
            None => thread::sleep(BETWEEN_READS),
        }
    }
    Err(FenceError::Damaged { path })
}

/// Writes the owner's block into a file that is there: in an empty mount point there is none.
fn write(pool: &Path, beat: &Beat) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path_of(pool, &beat.node))?;
    file.write_all_at(&encode(beat)?, 0)?;
    file.sync_data()
}

/// Counts in one pool, on a thread of its own, until it is dropped.
pub struct Heart {
    _alive: Sender<()>,
}

impl Heart {
    pub fn start(id: PoolId, pool: PathBuf, node: NodeId, life: Life) -> io::Result<Self> {
        let (alive, dropped) = channel();
        thread::Builder::new().name(format!("fence-{id}")).spawn(move || beat(&id, &pool, &node, &life, &dropped))?;
        Ok(Self { _alive: alive })
    }
}

fn beat(id: &PoolId, pool: &Path, node: &NodeId, life: &Life, dropped: &Receiver<()>) {
    // Where an earlier daemon stopped; of what cannot be read, any count is a new one.
    let mut heartbeat = None;
    let mut told = None;
    loop {
        let next = heartbeat.unwrap_or_else(|| read(pool, node).ok().flatten().map_or(0, |beat| beat.heartbeat)) + 1;
        let beat = Beat { format: FORMAT, node: node.clone(), incarnation: life.get(), heartbeat: next };
        let problem = match write(pool, &beat) {
            Ok(()) => {
                heartbeat = Some(next);
                None
            }
            // The pool's own watch makes it, and says what hinders it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => Some(error.to_string()),
        };
        if let Some(problem) = problem.as_ref().filter(|problem| told.as_ref() != Some(*problem)) {
            tracing::warn!(pool = %id, problem, "failed to count in this node's fence file");
        }
        told = problem;
        match dropped.recv_timeout(EVERY) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn node() -> NodeId {
        "node-a".parse().unwrap()
    }

    fn pool() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(marker::NODES)).unwrap();
        dir
    }

    fn beat(heartbeat: u64) -> Beat {
        Beat { format: FORMAT, node: node(), incarnation: Some(Incarnation(3)), heartbeat }
    }

    #[test]
    fn others_read_what_the_owner_wrote_and_keep_what_is_theirs() {
        let pool = pool();
        let path = path_of(pool.path(), &node());
        assert_eq!(read(pool.path(), &node()).unwrap(), None, "no file");
        assert!(write(pool.path(), &beat(1)).is_err(), "a file is never made where there is none");
        fs::write(&path, "").unwrap();
        assert_eq!(read(pool.path(), &node()).unwrap(), None, "nobody has counted yet");
        write(pool.path(), &beat(1)).unwrap();
        let theirs = [7; 16];
        OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&theirs, BLOCK as u64).unwrap();
        write(pool.path(), &beat(2)).unwrap();
        assert_eq!(read(pool.path(), &node()).unwrap(), Some(beat(2)));
        assert_eq!(fs::read(&path).unwrap()[BLOCK..], theirs);
    }

    #[test]
    fn damage_and_a_later_format_are_told_apart() {
        let pool = pool();
        let path = path_of(pool.path(), &node());
        fs::write(&path, "").unwrap();
        write(pool.path(), &beat(41)).unwrap();
        let mut block = fs::read(&path).unwrap();
        let at = block.windows(2).position(|two| two == b"41").unwrap();
        block[at] = b'9';
        fs::write(&path, &block).unwrap();
        assert!(matches!(read(pool.path(), &node()), Err(FenceError::Damaged { .. })));
        fs::write(&path, &block[..100]).unwrap();
        assert!(matches!(read(pool.path(), &node()), Err(FenceError::Damaged { .. })));
        write(pool.path(), &Beat { format: FORMAT + 1, ..beat(1) }).unwrap();
        assert!(matches!(read(pool.path(), &node()), Err(FenceError::LaterFormat { format: 2, .. })));
    }

    #[test]
    fn a_daemon_goes_on_counting_where_the_one_before_it_stopped() {
        let pool = pool();
        fs::write(path_of(pool.path(), &node()), "").unwrap();
        write(pool.path(), &beat(41)).unwrap();
        let life = Life::default();
        life.set(Some(Incarnation(4)));
        let heart = Heart::start("p".parse().unwrap(), pool.path().to_owned(), node(), life).unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(10);
        let counted = loop {
            let now = read(pool.path(), &node()).unwrap().unwrap();
            if now.heartbeat > 41 || std::time::Instant::now() > until {
                break now;
            }
            thread::sleep(Duration::from_millis(5));
        };
        drop(heart);
        assert_eq!((counted.heartbeat, counted.incarnation), (42, Some(Incarnation(4))));
    }
}
