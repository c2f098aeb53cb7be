//! OvercommitPolicy: the cluster-wide ratios. There is one, named `default`, without a status, so
//! that its version moves only when somebody changes it.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::Ratio;

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
}

fn one() -> Ratio {
    Ratio::ONE
}

impl Default for OvercommitPolicySpec {
    fn default() -> Self {
        Self { cpu: Ratio::ONE, memory: Ratio::ONE }
    }
}
