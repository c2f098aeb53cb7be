//! The default OvercommitPolicy, as the watch shows it.

use std::sync::{Arc, RwLock};

use kibo_crds::{
    OvercommitPolicy,
    overcommit_policy::{DEFAULT, OvercommitPolicySpec},
};

/// The cluster-wide ratios and the revision that they came with.
#[derive(Clone, Default)]
pub struct OvercommitIndex(Arc<RwLock<(OvercommitPolicySpec, u64)>>);

impl OvercommitIndex {
    pub fn get(&self) -> OvercommitPolicySpec {
        self.0.read().expect("no holder of this lock panics").0.clone()
    }

    /// Takes in what a read or the watch showed; returns whether the ratios changed.
    pub fn observe(&self, policy: &OvercommitPolicy) -> bool {
        let revision = crate::session::revision_of(policy.metadata.resource_version.as_deref()).unwrap_or_default();
        let mut known = self.0.write().expect("no holder of this lock panics");
        if policy.metadata.name.as_deref() != Some(DEFAULT) || revision < known.1 {
            return false;
        }
        let changed = known.0 != policy.spec;
        *known = (policy.spec.clone(), revision);
        changed
    }
}
