//! Where a local cluster keeps what: every path below its state directory has its name here.

use std::path::{Path, PathBuf};

/// The state directory of one local cluster. Two clusters with different directories share nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    /// `root` must be absolute: components are started with paths below it.
    pub fn new(root: PathBuf) -> Self {
        debug_assert!(root.is_absolute(), "{} is not absolute", root.display());
        Self { root }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Held (flock) by whoever starts and stops components.
    pub fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    /// Ports and processes, see [`super::record::Record`].
    pub fn record(&self) -> PathBuf {
        self.root.join("local.json")
    }

    /// The administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.root.join("kubeconfig")
    }

    /// Links to the programs that a person uses, for `PATH`.
    pub fn bin(&self) -> PathBuf {
        self.root.join("bin")
    }

    pub fn control_plane(&self) -> PathBuf {
        self.root.join("control-plane")
    }

    pub fn pki(&self) -> PathBuf {
        self.control_plane().join("pki")
    }

    pub fn etcd_data(&self) -> PathBuf {
        self.control_plane().join("etcd")
    }

    /// Exists once an API server may have written to etcd.
    pub fn etcd_in_use(&self) -> PathBuf {
        self.control_plane().join("etcd-in-use")
    }

    /// One line of JSON for each request that the API server finished: who did what.
    pub fn audit_log(&self) -> PathBuf {
        self.control_plane().join("audit.log")
    }

    pub fn audit_policy(&self) -> PathBuf {
        self.control_plane().join("audit-policy.yaml")
    }

    pub fn operator_kubeconfig(&self) -> PathBuf {
        self.root.join("operator.kubeconfig")
    }

    pub fn nodes(&self) -> PathBuf {
        self.root.join("nodes")
    }

    pub fn node(&self, id: &str) -> PathBuf {
        self.nodes().join(id)
    }

    /// Where a test arms the failpoints of the operator.
    pub fn operator_failpoints(&self) -> PathBuf {
        self.root.join("operator-failpoints")
    }

    /// Where a test arms the failpoints of a node's daemon.
    pub fn node_failpoints(&self, id: &str) -> PathBuf {
        self.node(id).join("failpoints")
    }

    /// The directory behind the pool that all nodes of this cluster are attached to.
    pub fn shared_pool(&self) -> PathBuf {
        self.root.join("shared-pool")
    }
}
