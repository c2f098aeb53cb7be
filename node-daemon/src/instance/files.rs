//! What the daemon keeps of an Instance on disk, so that the next daemon can go on.
//!
//! `<state>/instances/<id>/` holds the record, the VM's sockets and what its console said. The record is there before
//! anything is done for the Instance, and the directory goes last: an Instance without one has left nothing.

use std::{
    fs, io,
    net::Ipv4Addr,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use kibo_crds::InstanceId;
use kibo_protocol::v1;
use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::machine::Ending;
use crate::{
    durable,
    launch::{InvalidMessage, Launch, Taker},
    vmm::ProcessId,
};

const RECORD: &str = "instance.json";

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error("failed to {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "{path} is damaged: {problem}; it is written by the daemon alone. Move its directory away to give the Instance up: \
         its VM is ended then, and its objects stay held until the node is isolated"
    )]
    Damaged { path: PathBuf, problem: String },
}

/// The directory of all Instances.
#[derive(Clone, Debug)]
pub struct InstanceDirs(PathBuf);

impl InstanceDirs {
    /// Makes it when it is missing.
    pub fn open(state_dir: &Path) -> Result<Self, FilesError> {
        let path = state_dir.join("instances");
        make_directory(&path)?;
        Ok(Self(path))
    }

    pub fn of(&self, instance: InstanceId) -> InstanceDir {
        InstanceDir { path: self.0.join(instance.to_string()) }
    }

    /// All Instances that have a directory.
    pub fn list(&self) -> Result<Vec<InstanceId>, FilesError> {
        let failed = |source| FilesError::Io { action: "list", path: self.0.clone(), source };
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.0).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if let Some(id) = name.to_str().and_then(|name| name.parse().ok()) {
                ids.push(id);
            } else {
                tracing::warn!(directory = %self.0.display(), ?name, "this is no Instance; it is left alone");
            }
        }
        Ok(ids)
    }
}

/// The directory of one Instance.
#[derive(Clone, Debug)]
pub struct InstanceDir {
    path: PathBuf,
}

/// How far an Instance has come; with it, every step can be taken up by another daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own, on disk under its own name")]
pub struct Record {
    pub taker: Taker,
    /// The kernel's random id of the host's boot in which it was started.
    #[serde(default)]
    pub host_boot_id: String,
    /// The protocol's Launch, in base64.
    launch: String,
    /// The guest was or is being configured: from here on it may have written.
    #[serde(default)]
    pub configured: bool,
    /// Events that come once and were made.
    #[serde(default)]
    pub objects_taken: bool,
    #[serde(default)]
    pub available: bool,
    /// How many ends of the entrypoint were made events.
    #[serde(default)]
    pub exits_told: u32,
    /// It stands still because its disk could not be written, and people were told.
    #[serde(default)]
    pub stalled: bool,
    /// Of the guest, from before anything was made for it on the host; absent when it has no network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<Ipv4Addr>,
    /// The VM, once it was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessId>,
    /// Why it ended or is about to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ending: Option<Ending>,
}

impl Record {
    pub fn new(launch: &Launch) -> Self {
        Self {
            taker: launch.taker.clone(),
            host_boot_id: host_boot_id(),
            launch: STANDARD.encode(launch.message.encode_to_vec()),
            configured: false,
            objects_taken: false,
            available: false,
            exits_told: 0,
            stalled: false,
            address: None,
            process: None,
            ending: None,
        }
    }

    fn launch(&self) -> Result<Launch, String> {
        let bytes = STANDARD.decode(&self.launch).map_err(|error| error.to_string())?;
        let message = v1::Launch::decode(bytes.as_slice()).map_err(|error| error.to_string())?;
        Launch::read(message, self.taker.node.clone(), self.taker.incarnation)
            .map_err(|error: InvalidMessage| error.to_string())
    }
}

impl InstanceDir {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the directory with its first record; durable when it returns.
    pub fn create(&self, record: &Record) -> Result<(), FilesError> {
        make_directory(&self.path)?;
        self.store(record)?;
        if let Some(parent) = self.path.parent() {
            durable::sync_dir(parent).map_err(self.failed("sync"))?;
        }
        Ok(())
    }

    pub fn store(&self, record: &Record) -> Result<(), FilesError> {
        let path = self.path.join(RECORD);
        let text = serde_json::to_vec_pretty(record)
            .map_err(|error| FilesError::Damaged { path: path.clone(), problem: error.to_string() })?;
        durable::replace(&path, &text).map_err(|source| FilesError::Io { action: "write", path, source })
    }

    /// The record and what the Instance is made from; nothing when the daemon was killed before there was one.
    pub fn load(&self) -> Result<Option<(Record, Launch)>, FilesError> {
        let path = self.path.join(RECORD);
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(FilesError::Io { action: "read", path, source }),
            Ok(bytes) => bytes,
        };
        let damaged = |problem| FilesError::Damaged { path, problem };
        let record: Record = match serde_json::from_slice(&bytes) {
            Ok(record) => record,
            Err(error) => return Err(damaged(error.to_string())),
        };
        match record.launch() {
            Ok(launch) => Ok(Some((record, launch))),
            Err(problem) => Err(damaged(problem)),
        }
    }

    /// Idempotent.
    pub fn remove(&self) -> Result<(), FilesError> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.failed("remove")(error)),
            _ => Ok(()),
        }
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> FilesError {
        let path = self.path.clone();
        move |source| FilesError::Io { action, path, source }
    }
}

/// Empty when it cannot be read, which is then like no boot.
pub fn host_boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

fn make_directory(path: &Path) -> Result<(), FilesError> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| FilesError::Io { action: "make", path: path.to_owned(), source })
}
