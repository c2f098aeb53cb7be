//! What a local cluster remembers between two commands: its ports, its nodes, and which process is
//! which component. One JSON file, replaced in one step at every change.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rand::Rng as _;
use serde::{Deserialize, Serialize};

use super::component::Component;
use super::node::LocalNode;
use super::pki;
use super::process::ProcessId;

#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("failed to read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a record of a local cluster: stop its processes by hand and remove the directory", path.display())]
    Parse {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error(transparent)]
    Write(#[from] pki::PkiError),
    #[error("no free port on loopback between {from} and {to}: end what listens there")]
    NoPort { from: u16, to: u16 },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The boot of the machine that `processes` is about; after another boot none of them lives.
    pub boot_id: String,
    pub ports: Ports,
    #[serde(default)]
    pub nodes: Vec<LocalNode>,
    #[serde(default)]
    pub processes: BTreeMap<Component, Started>,
    /// More arguments for the operator than it always has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operator_args: Vec<String>,
}

/// Where the components listen, all on 127.0.0.1. Picked once: kubeconfigs and node configs name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ports {
    pub etcd_client: u16,
    pub etcd_peer: u16,
    pub apiserver: u16,
    pub controller_manager: u16,
    pub session: u16,
    pub api: u16,
    pub health: u16,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Started {
    #[serde(flatten)]
    pub process: ProcessId,
    pub at: Timestamp,
    /// Of a node: the control session that was the newest when its daemon was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_before: Option<String>,
}

impl Record {
    /// A new record with freshly picked ports.
    pub fn new() -> Result<Self, RecordError> {
        Ok(Self {
            boot_id: boot_id(),
            ports: Ports::pick()?,
            nodes: Vec::new(),
            processes: BTreeMap::new(),
            operator_args: Vec::new(),
        })
    }

    /// The record in `path`; none when there is no such file.
    pub fn load(path: &Path) -> Result<Option<Self>, RecordError> {
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                return Err(RecordError::Read { path: path.to_owned(), source });
            }
        };
        let mut record: Self =
            serde_json::from_slice(&text).map_err(|source| RecordError::Parse { path: path.to_owned(), source })?;
        if record.boot_id != boot_id() {
            record.boot_id = boot_id();
            record.processes.clear();
        }
        Ok(Some(record))
    }

    pub fn save(&self, path: &Path) -> Result<(), RecordError> {
        let text = serde_json::to_vec_pretty(self).expect("a record has string keys only");
        Ok(pki::write(path, &text)?)
    }

    /// The process of a component, when it is recorded and alive.
    pub fn alive(&self, component: &Component) -> Option<ProcessId> {
        let process = self.processes.get(component)?.process;
        process.is_alive().then_some(process)
    }
}

impl Ports {
    fn pick() -> Result<Self, RecordError> {
        let mut taken = Vec::new();
        let mut next = || -> Result<u16, RecordError> {
            let port = free_port(&taken)?;
            taken.push(port);
            Ok(port)
        };
        Ok(Self {
            etcd_client: next()?,
            etcd_peer: next()?,
            apiserver: next()?,
            controller_manager: next()?,
            session: next()?,
            api: next()?,
            health: next()?,
        })
    }
}

/// A free port below the range from which the kernel gives ports to outgoing connections: one of
/// those could take the port of a component while it restarts.
fn free_port(taken: &[u16]) -> Result<u16, RecordError> {
    const FROM: u16 = 15_000;
    const ATTEMPTS: usize = 500;
    let to = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|range| range.split_whitespace().next()?.parse().ok())
        .filter(|low| *low > FROM + 1_000)
        .unwrap_or(32_000);
    let mut random = rand::rng();
    (0..ATTEMPTS)
        .map(|_| random.random_range(FROM..to))
        .find(|port| !taken.contains(port) && TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .ok_or(RecordError::NoPort { from: FROM, to })
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_its_file_but_not_its_boot() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("local.json");
        assert!(Record::load(&path).unwrap().is_none());

        let mut record = Record::new().unwrap();
        let own = ProcessId::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        for component in [Component::Etcd, Component::Node("node-1".into())] {
            let started = Started { process: own, at: Timestamp::now(), session_before: None };
            record.processes.insert(component, started);
        }
        record.save(&path).unwrap();
        let loaded = Record::load(&path).unwrap().unwrap();
        assert_eq!(loaded.ports, record.ports);
        assert_eq!(loaded.alive(&Component::Node("node-1".into())), Some(own));

        record.boot_id = "another".into();
        record.save(&path).unwrap();
        assert!(Record::load(&path).unwrap().unwrap().processes.is_empty());
    }
}
