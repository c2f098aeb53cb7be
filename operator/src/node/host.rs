//! What a node says of its host, as the status has it.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::SignedDuration};
use kibo_crds::{Bytes, InstanceId, MilliCpu, Percent, node::HostUsage, usage::Usage};
use kibo_protocol::v1;

/// Of a report that came at `reported`, by the operator's clock: the node says how long ago things were, not when.
pub fn host_usage(host: &v1::HostUsage, reported: &Time) -> HostUsage {
    let percent = |hundredths: Option<u32>| hundredths.and_then(Percent::from_hundredths);
    let is_tight = host.memory_tight == Some(true);
    HostUsage {
        sampled_at: before(reported, host.age_millis),
        vm_cpu_milli: host.vm_cpu_milli.map(MilliCpu),
        vm_memory_bytes: host.vm_memory_bytes.map(Bytes),
        memory_available_bytes: host.memory_available_bytes.map(Bytes),
        memory_total_bytes: host.memory_total_bytes.map(Bytes),
        memory_tight_since: is_tight.then(|| before(reported, host.memory_tight_for_millis.unwrap_or_default())),
        cpu_idle: percent(host.cpu_idle),
        cpu_pressure_some: percent(host.cpu_pressure_some),
        cpu_pressure_full: percent(host.cpu_pressure_full),
        memory_pressure_some: percent(host.memory_pressure_some),
        memory_pressure_full: percent(host.memory_pressure_full),
    }
}

/// What the VM of one Instance used.
#[derive(Clone, Debug, PartialEq)]
pub struct InstanceUsage {
    pub instance: InstanceId,
    pub sampled_at: Time,
    pub used: Usage,
}

/// Of a report that came at `reported`. What names no Instance is left out.
pub fn instance_usages(report: &v1::Report, reported: &Time) -> Vec<InstanceUsage> {
    let Some(host) = &report.host else { return Vec::new() };
    let sampled_at = before(reported, host.age_millis);
    let usage = |told: &v1::InstanceUsage| {
        let used = Usage { cpu_milli: told.cpu_milli.map(MilliCpu), memory_bytes: told.memory_bytes.map(Bytes) };
        Some(InstanceUsage { instance: told.instance_id.parse().ok()?, sampled_at: sampled_at.clone(), used })
    };
    report.instance_usages.iter().filter_map(usage).collect()
}

/// Whole seconds, as Kubernetes writes times; a time before all times is the time itself.
fn before(time: &Time, millis: u64) -> Time {
    let ago = SignedDuration::from_secs(i64::try_from(millis / 1000).unwrap_or(i64::MAX));
    Time(time.0.checked_sub(ago).unwrap_or(time.0))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    #[test]
    fn what_was_not_measured_stays_absent_and_nonsense_is_none() {
        let at = |second| Time(Timestamp::from_second(second).unwrap());
        let told = v1::HostUsage { age_millis: 4999, cpu_idle: Some(10_001), ..v1::HostUsage::default() };
        let usage = host_usage(&told, &at(100));
        assert_eq!(usage.sampled_at, at(96));
        assert_eq!((usage.cpu_idle, usage.vm_memory_bytes, usage.memory_tight_since), (None, None, None));
        let told = v1::HostUsage {
            memory_tight: Some(true),
            memory_tight_for_millis: Some(u64::MAX),
            age_millis: u64::MAX,
            memory_pressure_full: Some(1250),
            ..v1::HostUsage::default()
        };
        let usage = host_usage(&told, &at(100));
        assert_eq!(usage.memory_tight_since, Some(at(100)));
        assert_eq!(usage.memory_pressure_full.unwrap().to_string(), "12.5");
    }
}
