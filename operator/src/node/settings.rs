//! What the admission of a node is to use: its own wishes over the default policy. Pure.

use kibo_crds::{Ratio, node::NodeSpec, overcommit_policy::OvercommitPolicySpec};

use crate::session::Settings;

pub fn effective(spec: &NodeSpec, policy: &OvercommitPolicySpec) -> Settings {
    let own = |ratio: fn(&kibo_crds::node::NodeOvercommit) -> Option<Ratio>| spec.overcommit.as_ref().and_then(ratio);
    Settings {
        drain: spec.drain.as_ref().is_some_and(|drain| drain.requested),
        slots: spec.slots,
        cpu: own(|overcommit| overcommit.cpu).unwrap_or(policy.cpu),
        memory: own(|overcommit| overcommit.memory).unwrap_or(policy.memory),
    }
}

#[cfg(test)]
mod tests {
    use kibo_crds::node::{Drain, NodeOvercommit};

    use super::*;

    #[test]
    fn the_node_goes_before_the_policy() {
        let ratio = |text: &str| text.parse::<Ratio>().unwrap();
        let policy = OvercommitPolicySpec { cpu: ratio("4"), memory: ratio("0.9") };
        let mut spec = NodeSpec::default();
        let default = Settings { drain: false, slots: None, cpu: ratio("4"), memory: ratio("0.9") };
        assert_eq!(effective(&spec, &policy), default);
        spec.overcommit = Some(NodeOvercommit { cpu: Some(ratio("2")), memory: None });
        spec.drain = Some(Drain { requested: true, request_id: None });
        spec.slots = Some(3);
        let own = Settings { drain: true, slots: Some(3), cpu: ratio("2"), ..default };
        assert_eq!(effective(&spec, &policy), own);
        spec.drain = Some(Drain { requested: false, request_id: None });
        assert!(!effective(&spec, &policy).drain);
    }
}
