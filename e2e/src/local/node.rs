//! The nodes of a local cluster: what each offers, and the daemon's config for it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One node: what its daemon is told to offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeSpec {
    pub id: String,
    /// A quantity: cores or millicores.
    pub cpu: String,
    /// A quantity: bytes.
    pub memory: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_instances: Option<u32>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    pub pools: Vec<PoolSpec>,
}

/// A storage pool that a node is attached to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolSpec {
    pub id: String,
    pub path: PathBuf,
    #[serde(default)]
    pub default: bool,
}
