//! Commands that carry an id, on record in the status of the object that they are about. Pure.
//!
//! A command is recorded when its id is seen in the spec for the first time; its end follows from the status. A record
//! is kept for a day, and for as long as its id stands in the spec: until then a replay must find it.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{CommandRecord, CommandResult, Requested};

pub const KEPT: Duration = Duration::from_hours(24);
pub const MAX: usize = 16;

/// What has become of a command.
pub struct Outcome {
    pub result: CommandResult,
    pub failure: Option<(&'static str, String)>,
    pub counts: BTreeMap<String, u32>,
}

impl Outcome {
    fn of(result: CommandResult) -> Self {
        Self { result, failure: None, counts: BTreeMap::new() }
    }

    pub fn done_when(done: bool) -> Self {
        Self::of(if done { CommandResult::Succeeded } else { CommandResult::Processing })
    }

    pub fn failed(reason: &'static str, message: String) -> Self {
        Self { failure: Some((reason, message)), ..Self::of(CommandResult::Failed) }
    }
}

/// The records as they should be: `known` with what is new in the spec. What has become of an open one `outcome` tells,
/// by its record and whether its id still stands in the spec.
pub fn records(
    requested: &[Requested],
    known: &[CommandRecord],
    now: &Time,
    outcome: impl Fn(&CommandRecord, bool) -> Outcome,
) -> Vec<CommandRecord> {
    let mut records = known.to_vec();
    for new in requested.iter().filter(|new| !known.iter().any(|known| known.id == new.id)) {
        records.push(begun(new, now));
    }
    for record in records.iter_mut().filter(|record| record.result == CommandResult::Processing) {
        let stands = requested.iter().any(|it| it.id == record.id);
        end(record, outcome(record, stands), now);
    }
    let is_pinned = |record: &CommandRecord| requested.iter().any(|it| it.id == record.id);
    let from = now.0 - KEPT;
    records.retain(|record| is_pinned(record) || record.finished_at.as_ref().is_none_or(|at| at.0 >= from));
    let mut surplus = records.len().saturating_sub(MAX);
    records.retain(|record| {
        let goes = surplus > 0 && !is_pinned(record);
        surplus -= usize::from(goes);
        !goes
    });
    records
}

fn begun(requested: &Requested, now: &Time) -> CommandRecord {
    CommandRecord {
        id: requested.id.clone(),
        operation: requested.operation.to_owned(),
        digest: requested.digest.clone(),
        result: CommandResult::Processing,
        reason: None,
        message: None,
        counts: BTreeMap::new(),
        started_at: now.clone(),
        finished_at: None,
    }
}

fn end(record: &mut CommandRecord, outcome: Outcome, now: &Time) {
    if outcome.result == CommandResult::Processing {
        return;
    }
    record.result = outcome.result;
    record.finished_at = Some(now.clone());
    record.counts = outcome.counts;
    if let Some((reason, message)) = outcome.failure {
        record.reason = Some(reason.to_owned());
        record.message = Some(message.chars().take(1024).collect());
    }
}
