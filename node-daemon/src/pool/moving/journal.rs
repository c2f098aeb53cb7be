//! How far a copy has come, beside it: another daemon goes on from there.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use kibo_crds::{Epoch, PoolId};
use serde::{Deserialize, Serialize};

use crate::{
    durable,
    pool::{record_files::remove_if_there, sparse::Content},
};

const FORMAT: u32 = 2;
/// What a move makes in the directory of an object begins like this.
const PREFIX: &str = "image.raw.moving.";
const JOURNAL: &str = ".json";

/// The state of a copy that is on the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    format: u32,
    pub from: PoolId,
    /// Of the grant: the source cannot have changed under it.
    pub epoch: Epoch,
    pub size: u64,
    /// Everything before this byte is in the copy, and synced.
    pub done: u64,
    /// What was read of the image before that byte.
    pub content: Content,
    /// The whole copy is there and synced; it has to be read back, and to get its name.
    pub complete: bool,
}

impl Journal {
    pub fn new(from: PoolId, epoch: Epoch, size: u64) -> Self {
        Self { format: FORMAT, from, epoch, size, done: 0, content: Content::default(), complete: false }
    }

    /// What was noted of the same copy; what is damaged or about another one counts as nothing.
    pub fn read(dir: &Path, new: &Self) -> io::Result<Option<Self>> {
        let bytes = match fs::read(journal_path(dir, new.epoch)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes?,
        };
        let same = |known: &Self| known.format == FORMAT && known.from == new.from && known.size == new.size;
        Ok(serde_json::from_slice(&bytes).ok().filter(same))
    }

    pub fn write(&self, dir: &Path) -> io::Result<()> {
        durable::replace(&journal_path(dir, self.epoch), &serde_json::to_vec(self)?)
    }
}

/// The copy before it has its name.
pub fn copy_path(dir: &Path, epoch: Epoch) -> PathBuf {
    dir.join(format!("{PREFIX}{epoch}"))
}

fn journal_path(dir: &Path, epoch: Epoch) -> PathBuf {
    dir.join(format!("{PREFIX}{epoch}{JOURNAL}"))
}

/// Removes what moves of these epochs left in the directory of an object.
pub fn clear(dir: &Path, which: impl Fn(Epoch) -> bool) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let mut is_changed = false;
    for entry in entries {
        let path = entry?.path();
        let epoch = path.file_name().and_then(|name| name.to_str()).and_then(epoch_of);
        if epoch.is_some_and(&which) {
            remove_if_there(&path)?;
            is_changed = true;
        }
    }
    if is_changed { durable::sync_dir(dir) } else { Ok(()) }
}

/// The move that made a file of this name.
fn epoch_of(name: &str) -> Option<Epoch> {
    name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok().map(Epoch)
}
