//! What the node remembers of itself: who it is, which life it lives, what it has obeyed.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use kibo_crds::{Incarnation, NodeId, PoolId, Term};
use kibo_protocol::{NodeKey, v1};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::durable;

const LOCK: &str = "lock";
const NODE: &str = "node.json";
const CREDENTIALS: &str = "credentials.json";

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("failed to {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} cannot be read: {problem}; it is written by the daemon alone, restore it or enroll the node anew")]
    Damaged { path: PathBuf, problem: String },
    #[error("another daemon uses the state directory {0}: stop it first")]
    InUse(PathBuf),
    #[error("{path} can be read by others (mode {mode:o}): it holds the node's key and must be 0600")]
    Exposed { path: PathBuf, mode: u32 },
}

/// The state directory, held by this process alone until it ends.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    _lock: File,
}

impl StateDir {
    /// Makes the directory (0700) when it is missing, and locks it.
    pub fn open(path: &Path) -> Result<Self, StateError> {
        let failed = |action| move |source| StateError::Io { action, path: path.to_owned(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed("make"))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(failed("protect"))?;
        let lock = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path.join(LOCK));
        let lock = lock.map_err(failed("lock"))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(StateError::InUse(path.to_owned())),
            Err(error) => Err(failed("lock")(error.into())),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells this directory from a copy of it; empty when it cannot be looked at.
    pub fn identity(&self) -> String {
        fs::metadata(&self.path).map(|it| format!("{:x}-{:x}", it.dev(), it.ino())).unwrap_or_default()
    }
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<Option<T>, StateError> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| StateError::Damaged { path: path.to_owned(), problem: error.to_string() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StateError::Io { action: "read", path: path.to_owned(), source }),
    }
}

fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), StateError> {
    let bytes = serde_json::to_vec_pretty(value)
        .map_err(|error| StateError::Damaged { path: path.to_owned(), problem: error.to_string() })?;
    durable::replace(path, &bytes).map_err(|source| StateError::Io { action: "write", path: path.to_owned(), source })
}

/// One life of the node's set of Instances.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Life {
    pub incarnation: Incarnation,
    /// The boot of the host in which this life has been seen last.
    pub boot_id: String,
}

/// A moment in the history of the control plane; see the protocol.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Moment {
    pub term: Term,
    pub leadership: String,
    pub renewed_unix_micros: u64,
}

impl From<v1::Moment> for Moment {
    fn from(moment: v1::Moment) -> Self {
        let v1::Moment { term, leadership, renewed_unix_micros } = moment;
        Self { term: Term(term), leadership, renewed_unix_micros }
    }
}

impl From<Moment> for v1::Moment {
    fn from(moment: Moment) -> Self {
        let Moment { term, leadership, renewed_unix_micros } = moment;
        Self { term: term.0, leadership, renewed_unix_micros }
    }
}

/// What is in `node.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeRecord {
    /// Absent: the next session asks for a new one.
    pub life: Option<Life>,
    /// Empty before the first session.
    pub cluster_id: String,
    pub highest_revision: u64,
    pub highest_term: Term,
    /// The latest moment that the operator told: a control plane that does not know it was put back.
    pub latest: Option<Moment>,
    /// Pools that were declared lost, for ever.
    pub lost_pools: BTreeSet<PoolId>,
}

/// The incarnation that a Hello names. A new life begins only where nothing of the old one runs: when this host was booted
/// anew and the daemon's own listing agrees, or when nothing is at work and a pool says that lives up to `dead` are over.
pub fn incarnation_for_hello(
    life: Option<&Life>,
    boot_id: &str,
    runs_anything: bool,
    dead: Option<Incarnation>,
) -> Option<Incarnation> {
    let goes_on = |life: &&Life| life.boot_id == boot_id && dead.is_none_or(|dead| dead < life.incarnation);
    life.filter(|life| runs_anything || goes_on(life)).map(|life| life.incarnation)
}

/// `node.json`, in memory and on disk. Every change is durable before it is acted upon.
#[derive(Debug)]
pub struct NodeState {
    path: PathBuf,
    record: Mutex<NodeRecord>,
}

impl NodeState {
    pub fn open(dir: &StateDir) -> Result<Self, StateError> {
        let path = dir.path().join(NODE);
        let record = read_json(&path)?.unwrap_or_default();
        Ok(Self { path, record: Mutex::new(record) })
    }

    pub fn get(&self) -> NodeRecord {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the record; nothing is written when the change changes nothing.
    pub fn update(&self, change: impl FnOnce(&mut NodeRecord)) -> Result<NodeRecord, StateError> {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = record.clone();
        change(&mut changed);
        if changed != *record {
            write_json(&self.path, &changed)?;
            record.clone_from(&changed);
        }
        Ok(changed)
    }
}

/// Who the node is toward the operator.
#[derive(Clone, Debug)]
pub struct Credentials {
    pub node_id: NodeId,
    pub key: NodeKey,
    pub cluster_id: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StoredCredentials {
    node_id: NodeId,
    key: String,
    cluster_id: String,
}

impl Credentials {
    /// What an earlier enrollment stored.
    pub fn load(dir: &StateDir) -> Result<Option<Self>, StateError> {
        let path = dir.path().join(CREDENTIALS);
        let Some(stored) = read_json::<StoredCredentials>(&path)? else { return Ok(None) };
        let mode = fs::metadata(&path)
            .map_err(|source| StateError::Io { action: "look at", path: path.clone(), source })?
            .permissions()
            .mode();
        if mode & 0o077 != 0 {
            return Err(StateError::Exposed { path, mode: mode & 0o777 });
        }
        // The error must not repeat what it could not decode.
        let key = STANDARD.decode(&stored.key).ok().and_then(|bytes| NodeKey::from_bytes(&bytes).ok());
        let key =
            key.ok_or_else(|| StateError::Damaged { path, problem: "the key is not 32 bytes in base64".into() })?;
        Ok(Some(Self { node_id: stored.node_id, key, cluster_id: stored.cluster_id }))
    }

    /// Durable when it returns.
    pub fn store(&self, dir: &StateDir) -> Result<(), StateError> {
        let stored = StoredCredentials {
            node_id: self.node_id.clone(),
            key: STANDARD.encode(self.key.expose()),
            cluster_id: self.cluster_id.clone(),
        };
        write_json(&dir.path().join(CREDENTIALS), &stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state_dir() -> (tempfile::TempDir, StateDir) {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(&dir.path().join("state")).unwrap();
        (dir, state)
    }

    #[test]
    fn one_daemon_holds_a_state_directory() {
        let (_dir, state) = state_dir();
        assert!(matches!(StateDir::open(state.path()), Err(StateError::InUse(_))));
        let (path, identity) = (state.path().to_owned(), state.identity());
        drop(state);
        let again = StateDir::open(&path).unwrap();
        assert!(!identity.is_empty() && again.identity() == identity);
        assert_ne!(state_dir().1.identity(), identity);
    }

    #[test]
    fn the_record_survives_a_restart() {
        let (_dir, state) = state_dir();
        let node = NodeState::open(&state).unwrap();
        node.update(|record| record.highest_term = Term(7)).unwrap();
        assert_eq!(NodeState::open(&state).unwrap().get().highest_term, Term(7));
    }

    #[test]
    fn the_key_is_for_the_owner_alone() {
        let (_dir, state) = state_dir();
        assert!(Credentials::load(&state).unwrap().is_none());
        let credentials = Credentials {
            node_id: "node-a".parse().unwrap(),
            key: NodeKey::generate().unwrap(),
            cluster_id: "c".into(),
        };
        credentials.store(&state).unwrap();
        let loaded = Credentials::load(&state).unwrap().unwrap();
        assert_eq!((loaded.node_id, loaded.key), (credentials.node_id, credentials.key));
        let path = state.path().join(CREDENTIALS);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(Credentials::load(&state), Err(StateError::Exposed { .. })));
    }

    #[test]
    fn a_damaged_key_is_not_repeated_in_the_error() {
        let (_dir, state) = state_dir();
        let text = r#"{"nodeId": "a", "key": "c2VjcmV0", "clusterId": ""}"#;
        durable::replace(&state.path().join(CREDENTIALS), text.as_bytes()).unwrap();
        let error = Credentials::load(&state).unwrap_err().to_string();
        assert!(!error.contains("c2VjcmV0"), "{error}");
    }

    #[test]
    fn a_new_life_begins_only_with_nothing_running_after_a_boot_or_where_a_pool_takes_it_for_dead() {
        let life = Life { incarnation: Incarnation(3), boot_id: "a".into() };
        let same = Some(Incarnation(3));
        for (stored, boot, runs, dead, expected) in [
            (None, "a", false, None, None),
            (Some(&life), "a", false, None, same),
            (Some(&life), "a", true, None, same),
            (Some(&life), "b", false, None, None),
            // Cannot be, but must not lose a VM if it is.
            (Some(&life), "b", true, None, same),
            // As after an isolation: the lives before it.
            (Some(&life), "a", false, Some(2), same),
            (Some(&life), "a", false, Some(3), None),
            (Some(&life), "a", false, Some(7), None),
            (Some(&life), "a", true, Some(7), same),
        ] {
            let named = incarnation_for_hello(stored, boot, runs, dead.map(Incarnation));
            assert_eq!(named, expected, "{stored:?} {boot} {runs} {dead:?}");
        }
    }
}
