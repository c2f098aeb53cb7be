//! A second replica of the operator, beside the cluster's own.

use std::net::TcpListener;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use super::Place;
use crate::local::{LocalCluster, NAMESPACE};

/// How long a replica that fell silent stays the leader.
const LEASE_SECONDS: u64 = 5;

/// Ends with its value.
pub struct Replica {
    pub process: Child,
    /// Where nodes open their sessions.
    pub session: u16,
    pub health: u16,
    log: PathBuf,
}

impl Replica {
    /// Its failpoints are those of the cluster's own operator, and so are the arguments that a test gave to that one.
    pub fn start(place: &Place, name: &str) -> Result<Self> {
        Self::beside(place.cluster(), name, LEASE_SECONDS)
    }

    /// The same for a cluster without tests, or for a lease that a busy machine does not cost it.
    pub fn beside(cluster: &LocalCluster, name: &str, lease_seconds: u64) -> Result<Self> {
        let ports = (0..3).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<Vec<_>, _>>()?;
        let ports = ports.iter().map(|port| Ok(port.local_addr()?.port())).collect::<Result<Vec<_>>>()?;
        let layout = cluster.layout();
        let log = layout.root().join(format!("{name}.log"));
        let listen = |port: u16| format!("127.0.0.1:{port}");
        let process = Command::new(cluster.programs().operator())
            .env(kibo_failpoint::DIRECTORY_VARIABLE, layout.operator_failpoints())
            .arg("run")
            .arg("--kubeconfig")
            .arg(layout.operator_kubeconfig())
            .args(["--namespace", NAMESPACE, "--identity", name])
            .args(["--session-listen", &listen(ports[0]), "--api-listen", &listen(ports[1])])
            .args(["--health-listen", &listen(ports[2]), "--session-name", "127.0.0.1,localhost"])
            .args(["--api-service-external-name", "localhost"])
            .args(["--lease-seconds", &lease_seconds.to_string()])
            .args(cluster.recorded().operator_args)
            .stderr(std::fs::File::create(&log)?)
            .kill_on_drop(true)
            .spawn()?;
        Ok(Self { process, session: ports[0], health: ports[2], log })
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.process.id().and_then(|id| Pid::from_raw(id.cast_signed())).context("it has ended")?;
        Ok(kill_process(pid, signal)?)
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}
