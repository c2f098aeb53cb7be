//! OvercommitPolicy: the cluster-wide ratios. There is one, named `default`, without a status, so
//! that its version moves only when somebody changes it.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::{Ratio, node::ChangeRequest};

/// Name of the only policy.
pub const DEFAULT: &str = "default";

/// How much more than a host's capacity is handed out, where the node itself says nothing.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kibotos.dev",
    version = "v1alpha1",
    kind = "OvercommitPolicy",
    plural = "overcommitpolicies",
    category = "kibo",
    derive = "PartialEq",
    printcolumn(name = "CPU", type_ = "string", json_path = ".spec.cpu"),
    printcolumn(name = "Memory", type_ = "string", json_path = ".spec.memory"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name == 'default'")
        .message("there is one OvercommitPolicy, named default: change that one, or a single node with spec.overcommit")
        .reason(Reason::FieldValueInvalid),
)]
#[serde(rename_all = "camelCase")]
pub struct OvercommitPolicySpec {
    #[serde(default = "one")]
    pub cpu: Ratio,
    #[serde(default = "one")]
    pub memory: Ratio,
    /// When a host counts as short of memory, and takes no new Workspace.
    #[serde(default)]
    pub memory_tight: MemoryTightThresholds,
    /// The command that set the ratios last, for a replay of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<ChangeRequest>,
}

/// Shares of a host's memory that is available, in whole percent. Between the two a host stays what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.enterBelowPercent < self.leaveAbovePercent")
    .message("memoryTight.enterBelowPercent must be less than leaveAbovePercent")
    .reason(Reason::FieldValueInvalid))]
pub struct MemoryTightThresholds {
    /// Less than this is available: the host is short of memory. 0: it never is.
    #[serde(default = "enter_below")]
    #[schemars(range(min = 0, max = 100))]
    pub enter_below_percent: u8,
    /// More than this is available: it is so no longer.
    #[serde(default = "leave_above")]
    #[schemars(range(min = 0, max = 100))]
    pub leave_above_percent: u8,
}

fn enter_below() -> u8 {
    MemoryTightThresholds::default().enter_below_percent
}

fn leave_above() -> u8 {
    MemoryTightThresholds::default().leave_above_percent
}

impl Default for MemoryTightThresholds {
    fn default() -> Self {
        Self { enter_below_percent: 10, leave_above_percent: 15 }
    }
}

fn one() -> Ratio {
    Ratio::ONE
}

impl Default for OvercommitPolicySpec {
    fn default() -> Self {
        Self { cpu: Ratio::ONE, memory: Ratio::ONE, memory_tight: MemoryTightThresholds::default(), request: None }
    }
}
