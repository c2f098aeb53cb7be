//! What is in a pool, for those who look for what belongs to nobody; and the removal of it.

use std::{fs, io, os::unix::fs::MetadataExt as _, path::Path};

use kibo_crds::{Bytes, ObjectUid};

use super::{Pool, PoolError, image, marker, moving, record_files};
use crate::launch::{Grant, GrantedObject, Object, PredecessorEnd, Taker};

/// A block as `st_blocks` counts it.
const BLOCK: u64 = 512;

/// One entry of the directory of objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolEntry {
    pub name: String,
    /// Absent: it is no object of Kibotos. Also of an object, or a copy of one, that was put aside to be removed.
    pub uid: Option<ObjectUid>,
    /// What it occupies.
    pub used: Bytes,
    /// A deletion of it was granted and has begun; or it was never here, and only grants of it were refused.
    pub is_deleted: bool,
}

/// A page of the entries, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolPage {
    /// Of the pool's marker.
    pub pool_uid: String,
    pub entries: Vec<PoolEntry>,
    /// There are more after the last one.
    pub more: bool,
}

impl Pool {
    /// The next entries after a name. What goes in between is left out.
    pub fn entries(&self, after: &str, limit: usize) -> Result<PoolPage, PoolError> {
        self.verify()?;
        let failed = |source| PoolError::List { pool: self.id.clone(), source };
        let dir = self.path.join(marker::OBJECTS);
        let mut names = Vec::new();
        for entry in fs::read_dir(&dir).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            if name.as_str() > after {
                names.push(name);
            }
        }
        names.sort();
        let more = names.len() > limit;
        names.truncate(limit);
        let mut entries = Vec::with_capacity(names.len());
        for name in names {
            match entry(&dir, name) {
                Ok(entry) => entries.push(entry),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(PoolPage { pool_uid: self.marker_uid(), entries, more })
    }

    /// Removes what is left of an object whose owner is proven to be deleted. Nothing may hold it: the pool's own records
    /// have the last word.
    pub fn remove_unowned(&self, pool_uid: &str, uid: &ObjectUid, taker: &Taker) -> Result<(), PoolError> {
        self.verify()?;
        let found = self.marker_uid();
        if found != pool_uid {
            return Err(PoolError::OtherPool { pool: self.id.clone(), expected: pool_uid.to_owned(), found });
        }
        let records = {
            let _lock = self.begin(uid)?;
            self.find_again(uid)?;
            self.list(uid)?
        };
        let predecessor = records.0.keys().next_back().copied().unwrap_or_default();
        let epoch = predecessor.next().unwrap_or(predecessor);
        let object =
            Object { uid: uid.clone(), pool: self.id.clone(), size: Bytes(0), must_exist: false, grows_from: None };
        let grant = Grant { epoch, predecessor, predecessor_end: PredecessorEnd::Released };
        self.delete(&GrantedObject { object, grant }, taker)
    }
}

fn entry(dir: &Path, name: String) -> io::Result<PoolEntry> {
    let path = dir.join(&name);
    let used = occupied(&path)?;
    let Ok(uid) = name.parse::<ObjectUid>() else {
        // Its records say nothing of what has the object's name.
        return Ok(PoolEntry { uid: moving::object_of_aside(&name), used, is_deleted: false, name });
    };
    // Records that cannot be read prove nothing.
    let records = record_files::list(&path).unwrap_or_default();
    let is_deleted = records.is_deletion_begun() || (records.are_refusals() && image::size(&path)?.is_none());
    Ok(PoolEntry { used, is_deleted, uid: Some(uid), name })
}

/// What a file or a directory with its files takes.
fn occupied(path: &Path) -> io::Result<Bytes> {
    let metadata = fs::symlink_metadata(path)?;
    let mut blocks = metadata.blocks();
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            match entry?.metadata() {
                Ok(metadata) => blocks = blocks.saturating_add(metadata.blocks()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(Bytes(blocks.saturating_mul(BLOCK)))
}

#[cfg(test)]
#[path = "listing_tests.rs"]
mod tests;
