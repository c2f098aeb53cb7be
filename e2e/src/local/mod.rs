//! A local cluster: a real Kubernetes control plane, the operator and node daemons, as plain
//! processes of this machine that listen on loopback only. All that it has is in one state
//! directory; two directories make two clusters that share nothing.

mod cluster;
mod component;
mod control_plane;
mod layout;
mod leftovers;
mod network;
mod node;
mod operator;
mod pki;
pub mod process;
mod programs;
mod progress;
mod record;

pub use cluster::{ClusterError, LocalCluster};
pub use component::{CONTROL_PLANE, Component};
pub use layout::Layout;
pub use leftovers::{cgroups_of, leftovers};
pub use network::{LocalNetwork, network_of, networks_of};
pub use node::{Accelerator, LocalNode, LocalPool};
pub use operator::NAMESPACE;
pub use pki::{Pki, PkiError};
pub use process::{ProcessError, ProcessId};
pub use programs::{Need, Programs, ProgramsError};
pub use progress::Progress;
pub use record::{Ports, Record, RecordError, Started};
