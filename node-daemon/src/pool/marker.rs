//! The marker file: it says which pool a directory is, so that an empty mount point is never
//! mistaken for one.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use kibo_crds::PoolId;
use serde::{Deserialize, Serialize};

use crate::durable;

const MARKER: &str = "kibotos-pool.json";
pub const OBJECTS: &str = "objects";
pub const NODES: &str = "nodes";

/// Content of the marker file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marker {
    pub id: PoolId,
    /// Random; two directories that were initialised with the same id are two pools.
    pub uid: String,
}

#[derive(Debug, thiserror::Error)]
pub enum MarkerError {
    #[error(
        "{path} is not a storage pool: it has no {MARKER}; is it mounted? A new pool is made by `kibo-node-daemon pool init`"
    )]
    Missing { path: PathBuf },
    #[error("{path} is pool {found:?}, not {expected:?}")]
    OtherId { path: PathBuf, expected: PoolId, found: PoolId },
    #[error(
        "{path} is another pool than the one that was there when the daemon started: its uid is {found}, not {expected}"
    )]
    OtherUid { path: PathBuf, expected: String, found: String },
    #[error("{path} has files in it and is not a pool: a pool needs an empty directory of its own")]
    NotEmpty { path: PathBuf },
    #[error("the marker of the pool {path} is damaged: {problem}")]
    Damaged { path: PathBuf, problem: String },
    #[error("failed to {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

/// Reads the marker of a pool that must have this id.
pub fn read(pool: &Path, id: &PoolId) -> Result<Marker, MarkerError> {
    let path = pool.join(MARKER);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(MarkerError::Missing { path: pool.to_owned() });
        }
        Err(source) => return Err(MarkerError::Io { action: "read", path, source }),
        Ok(bytes) => bytes,
    };
    let marker: Marker = serde_json::from_slice(&bytes)
        .map_err(|error| MarkerError::Damaged { path: pool.to_owned(), problem: error.to_string() })?;
    if marker.id != *id {
        return Err(MarkerError::OtherId { path: pool.to_owned(), expected: id.clone(), found: marker.id });
    }
    Ok(marker)
}

/// Makes an empty or missing directory a pool. Doing it again with the same id changes nothing.
pub fn init(pool: &Path, id: &PoolId) -> Result<Marker, MarkerError> {
    match read(pool, id) {
        Err(MarkerError::Missing { .. }) => {}
        result => return result,
    }
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| MarkerError::Io { action, path, source }
    };
    fs::create_dir_all(pool).map_err(failed("make", pool))?;
    for entry in fs::read_dir(pool).map_err(failed("list", pool))? {
        let name = entry.map_err(failed("list", pool))?.file_name();
        // A file system's own, and what an interrupted init left.
        let is_known = ["lost+found", OBJECTS, NODES].iter().any(|known| name == *known)
            || name.to_str().is_some_and(|name| name.starts_with(MARKER));
        if !is_known {
            return Err(MarkerError::NotEmpty { path: pool.to_owned() });
        }
    }
    for dir in [OBJECTS, NODES] {
        let dir = pool.join(dir);
        fs::create_dir_all(&dir).map_err(failed("make", &dir))?;
    }
    let marker = Marker { id: id.clone(), uid: random_uid() };
    let path = pool.join(MARKER);
    let bytes = serde_json::to_vec_pretty(&marker)
        .map_err(|error| MarkerError::Damaged { path: pool.to_owned(), problem: error.to_string() })?;
    durable::replace(&path, &bytes).map_err(failed("write", &path))?;
    Ok(marker)
}

fn random_uid() -> String {
    let hex = format!("{:032x}", rand::random::<u128>());
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> PoolId {
        text.parse().unwrap()
    }

    #[test]
    fn a_pool_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let pool = dir.path().join("pool");
        let marker = init(&pool, &id("a")).unwrap();
        assert_eq!(init(&pool, &id("a")).unwrap(), marker);
        assert_eq!(read(&pool, &id("a")).unwrap(), marker);
        assert!(matches!(init(&pool, &id("b")), Err(MarkerError::OtherId { .. })));
    }

    #[test]
    fn a_directory_with_something_in_it_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(matches!(init(dir.path(), &id("a")), Err(MarkerError::NotEmpty { .. })));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_empty_mount_point_is_no_pool() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(read(dir.path(), &id("a")), Err(MarkerError::Missing { .. })));
    }
}
