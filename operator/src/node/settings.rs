//! What the admission of a node is to use: its own wishes over the default policy. Pure.

use kibo_crds::{
    Ratio,
    node::{EffectiveOvercommit, NodeSpec, RatioSource},
    overcommit_policy::OvercommitPolicySpec,
};

use crate::session::Settings;

pub fn effective(spec: &NodeSpec, policy: &OvercommitPolicySpec) -> Settings {
    let own = |ratio: fn(&kibo_crds::node::NodeOvercommit) -> Option<Ratio>| spec.overcommit.as_ref().and_then(ratio);
    Settings {
        drain: spec.drain.as_ref().is_some_and(|drain| drain.requested),
        slots: spec.slots,
        cpu: own(|overcommit| overcommit.cpu).unwrap_or(policy.cpu),
        memory: own(|overcommit| overcommit.memory).unwrap_or(policy.memory),
        memory_tight: policy.memory_tight,
    }
}

/// The ratios in `settings`, with where they come from.
pub fn overcommit(spec: &NodeSpec, settings: &Settings) -> EffectiveOvercommit {
    let source = |own: Option<Ratio>| if own.is_some() { RatioSource::Node } else { RatioSource::Default };
    let own = spec.overcommit.clone().unwrap_or_default();
    EffectiveOvercommit {
        cpu: settings.cpu,
        cpu_source: source(own.cpu),
        memory: settings.memory,
        memory_source: source(own.memory),
    }
}

#[cfg(test)]
mod tests {
    use kibo_crds::{
        node::{Drain, NodeOvercommit},
        overcommit_policy::MemoryTightThresholds,
    };

    use super::*;

    #[test]
    fn the_node_goes_before_the_policy() {
        let ratio = |text: &str| text.parse::<Ratio>().unwrap();
        let memory_tight = MemoryTightThresholds { enter_below_percent: 5, leave_above_percent: 7 };
        let policy = OvercommitPolicySpec { cpu: ratio("4"), memory: ratio("0.9"), memory_tight, request: None };
        let mut spec = NodeSpec::default();
        let default = Settings { drain: false, slots: None, cpu: ratio("4"), memory: ratio("0.9"), memory_tight };
        assert_eq!(effective(&spec, &policy), default);
        assert_eq!(overcommit(&spec, &default).cpu_source, RatioSource::Default);
        spec.overcommit = Some(NodeOvercommit { cpu: Some(ratio("2")), ..NodeOvercommit::default() });
        spec.drain = Some(Drain { requested: true, request_id: None });
        spec.slots = Some(3);
        let own = Settings { drain: true, slots: Some(3), cpu: ratio("2"), ..default };
        assert_eq!(effective(&spec, &policy), own);
        let shown = overcommit(&spec, &own);
        assert_eq!(
            (shown.cpu, shown.cpu_source, shown.memory_source),
            (ratio("2"), RatioSource::Node, RatioSource::Default)
        );
        spec.drain = Some(Drain { requested: false, request_id: None });
        assert!(!effective(&spec, &policy).drain);
    }
}
