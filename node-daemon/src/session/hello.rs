//! What the node says of itself. Pure, so that a test can compare the whole message.

use std::collections::BTreeMap;

use kibo_crds::InstanceId;
use kibo_protocol::v1;

use crate::{
    config::{NodeConfig, Resources},
    instance::Summary,
    pool::Pools,
    spool::EventSpool,
    state::{Credentials, NodeRecord, incarnation_for_hello},
};

/// Everything that is on the node: what runs, and what ended with events that nobody acknowledged.
pub fn instances(
    listed: &[Summary],
    ended: &[(InstanceId, String)],
    last_seq: impl Fn(InstanceId) -> u64,
) -> Vec<v1::Instance> {
    let mut by_id = BTreeMap::new();
    for (id, workspace_uid) in ended {
        by_id.insert(*id, (workspace_uid.clone(), v1::InstanceState::Ended));
    }
    for summary in listed {
        // An end in the spool is the last word.
        by_id.entry(summary.id).or_insert((summary.workspace_uid.clone(), summary.state));
    }
    let message = |(id, (workspace_uid, state)): (InstanceId, (String, v1::InstanceState))| v1::Instance {
        instance_id: id.to_string(),
        workspace_uid,
        state: state.into(),
        last_seq: last_seq(id),
    };
    // One whose Workspace is not known cannot be named; its events say what is known.
    by_id.into_iter().filter(|(_, (workspace_uid, _))| !workspace_uid.is_empty()).map(message).collect()
}

pub struct Facts<'a> {
    pub credentials: &'a Credentials,
    pub record: &'a NodeRecord,
    pub boot_id: &'a str,
    /// Which state directory this is.
    pub home: String,
    pub node: &'a NodeConfig,
    pub resources: Resources,
    pub pools: &'a Pools,
    pub listed: &'a [Summary],
    pub spool: &'a EventSpool,
    /// The last session ended for a new life, and nothing of this one goes on.
    pub renews: bool,
}

pub fn hello(facts: &Facts<'_>) -> v1::Hello {
    let runs_anything = facts.listed.iter().any(|summary| summary.state != v1::InstanceState::Ended);
    let dead = facts.pools.own_mark();
    let ends = dead.filter(|_| facts.renews);
    let incarnation = incarnation_for_hello(facts.record.life.as_ref(), facts.boot_id, runs_anything, ends);
    v1::Hello {
        node_id: facts.credentials.node_id.to_string(),
        node_key: facts.credentials.key.expose().to_vec(),
        incarnation: incarnation.map(|incarnation| incarnation.0),
        boot_id: facts.boot_id.to_owned(),
        version: kibo_protocol::RELEASE.into(),
        source_revision: kibo_protocol::REVISION.into(),
        capacity: Some(v1::Capacity {
            cpu_milli: Some(facts.resources.cpu.0),
            memory_bytes: Some(facts.resources.memory.0),
            max_instances: facts.resources.max_instances,
        }),
        pools: facts.pools.iter().map(crate::pool::Pool::report).collect(),
        instances: instances(facts.listed, &facts.spool.ended(), |id| facts.spool.last_seq(id)),
        cluster_id: if facts.record.cluster_id.is_empty() {
            facts.credentials.cluster_id.clone()
        } else {
            facts.record.cluster_id.clone()
        },
        highest_revision: facts.record.highest_revision,
        highest_term: facts.record.highest_term.0,
        latest: facts.record.latest.clone().map(Into::into),
        home: facts.home.clone(),
        labels: facts.node.labels.clone().into_iter().collect(),
        highest_mark: dead.map(|mark| mark.0),
        ended_incarnation: facts
            .record
            .life
            .as_ref()
            .filter(|_| facts.renews && incarnation.is_none())
            .map(|life| life.incarnation.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kibo_crds::{Bytes, MilliCpu};

    #[test]
    fn an_end_in_the_spool_is_the_last_word() {
        let (running, ending, gone) = (InstanceId::generate(), InstanceId::generate(), InstanceId::generate());
        let summary = |id, state| Summary {
            id,
            workspace_uid: "u".into(),
            state,
            cpu: MilliCpu(1),
            allocated_memory: Bytes(1),
            pools: std::collections::BTreeSet::new(),
        };
        let listed = [summary(running, v1::InstanceState::Running), summary(ending, v1::InstanceState::Stopping)];
        let ended = [(ending, "u".to_owned()), (gone, "u".to_owned())];
        let mut states: Vec<_> = instances(&listed, &ended, |_| 3)
            .into_iter()
            .map(|instance| (instance.instance_id.clone(), instance.state(), instance.last_seq))
            .collect();
        let mut expected = vec![
            (running.to_string(), v1::InstanceState::Running, 3),
            (ending.to_string(), v1::InstanceState::Ended, 3),
            (gone.to_string(), v1::InstanceState::Ended, 3),
        ];
        states.sort_by(|a, b| a.0.cmp(&b.0));
        expected.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(states, expected);
    }
}
