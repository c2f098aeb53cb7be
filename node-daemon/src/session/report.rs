//! When the node reports: every minute, and soon after something changed.

use std::{collections::BTreeMap, time::Duration};

use kibo_crds::InstanceId;
use kibo_protocol::v1;
use tokio::time::Instant;

use super::{control::InstanceControl, node::Node};
use crate::{admission, host::VmUsage, instance::Summary};

const EVERY: Duration = Duration::from_secs(60);
/// Changes within this time go together.
const AT_MOST_EVERY: Duration = Duration::from_secs(2);
/// A pool's free space moves all the time; less than this is no news.
const SPACE_STEP: u64 = 1 << 30;

#[derive(Debug, Default)]
pub struct Reporter {
    last: Option<(Instant, v1::Report)>,
}

/// With less, what needs space waits.
fn is_full(pool: &v1::Pool) -> bool {
    const FULL_BELOW: u64 = 16 << 20;
    pool.free_bytes.is_some_and(|free| free < FULL_BELOW)
}

fn pool_changed(old: &v1::Pool, new: &v1::Pool) -> bool {
    let free_moved = match (old.free_bytes, new.free_bytes) {
        (Some(old), Some(new)) => old.abs_diff(new) >= SPACE_STEP,
        (old, new) => old != new,
    };
    free_moved
        || old.waiting_guests != new.waiting_guests
        || is_full(old) != is_full(new)
        || old.id != new.id
        || old.uid != new.uid
        || old.available != new.available
        || old.default != new.default
}

fn changed(old: &v1::Report, new: &v1::Report) -> bool {
    old.allocated_cpu_milli != new.allocated_cpu_milli
        || old.allocated_memory_bytes != new.allocated_memory_bytes
        || old.instances != new.instances
        || old.settings_revision != new.settings_revision
        || old.pools.len() != new.pools.len()
        || old.pools.iter().zip(&new.pools).any(|(old, new)| pool_changed(old, new))
}

impl Reporter {
    /// The report, if it is due.
    pub fn due(&mut self, report: v1::Report, now: Instant) -> Option<v1::Report> {
        let is_due = match &self.last {
            None => true,
            Some((at, last)) => {
                let age = now.duration_since(*at);
                age >= EVERY || (age >= AT_MOST_EVERY && changed(last, &report))
            }
        };
        is_due.then(|| self.now(report, now))
    }

    /// The report, due or not.
    pub fn now(&mut self, report: v1::Report, now: Instant) -> v1::Report {
        self.last = Some((now, report.clone()));
        report
    }
}

pub fn report<I: InstanceControl>(node: &Node<I>) -> v1::Report {
    let instances = node.instances.list();
    let allocated = admission::allocated(&instances);
    v1::Report {
        allocated_cpu_milli: allocated.cpu.0,
        allocated_memory_bytes: allocated.memory.0,
        instances: allocated.instances,
        pools: node.pools.iter().map(crate::pool::Pool::report).collect(),
        settings_revision: node.admission.settings_revision(),
        host: node.host.report(),
        instance_usages: usages(&instances, &node.host.vms()),
    }
}

/// Other nodes of this host report their own.
fn usages(instances: &[Summary], vms: &BTreeMap<InstanceId, VmUsage>) -> Vec<v1::InstanceUsage> {
    let usage = |instance: &Summary| {
        let vm = vms.get(&instance.id)?;
        Some(v1::InstanceUsage {
            instance_id: instance.id.to_string(),
            cpu_milli: vm.cpu.map(|cpu| cpu.0),
            memory_bytes: vm.memory.map(|memory| memory.0),
        })
    };
    instances.iter().filter_map(usage).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_due_every_minute_and_soon_after_a_change() {
        let mut reporter = Reporter::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let one = v1::Report { instances: 1, ..Default::default() };
        assert!(reporter.due(v1::Report::default(), at(0)).is_some());
        assert!(reporter.due(v1::Report::default(), at(59)).is_none());
        assert!(reporter.due(v1::Report::default(), at(60)).is_some());
        assert!(reporter.due(one.clone(), at(61)).is_none());
        assert!(reporter.due(one.clone(), at(62)).is_some());
        assert!(reporter.due(one, at(70)).is_none());
    }

    #[test]
    fn a_little_space_is_no_news() {
        let pool = |free| v1::Pool { free_bytes: Some(free), available: true, ..Default::default() };
        assert!(!pool_changed(&pool(10 << 30), &pool((10 << 30) + 1)));
        assert!(pool_changed(&pool(10 << 30), &pool(9 << 30)));
        assert!(pool_changed(&pool(1), &v1::Pool { available: false, ..pool(1) }));
    }
}
