//! The size of the writable layer that was asked for, while nothing runs.

use kibo_crds::{Bytes, CommandId, CommandRecord, CommandResult, ConditionType, digest, workspace::WritableLayer};

use crate::{
    growth::{Asked, Growth, RESOURCE_EXHAUSTED, judge},
    workspace::{draft::Draft, sight::Sight},
};

/// Name of the command, in its record.
pub const RESIZE: &str = "resize";

/// Accepts the size, or says why not. A layer that does not exist is made in that size: there is nothing to judge.
/// Nothing is judged while it is being moved: the pool that it goes to was found to have room for what was accepted before.
pub(super) fn take(sight: &Sight<'_>, draft: &mut Draft<'_>) {
    if draft.status.r#move.as_ref().is_some_and(|moving| moving.state.holds()) {
        return;
    }
    let asked = sight.workspace.spec.writable_layer.clone().unwrap_or_default();
    let wanted = asked.size.as_ref().and_then(|size| size.amount().ok());
    let request_id = asked.request_id.clone();
    let capacity = draft.status.writable_layer.as_ref().map(|layer| layer.grow_to.unwrap_or(layer.size));
    let growth = match &draft.status.writable_layer {
        None => Growth::default(),
        Some(layer) => {
            let asked = Asked {
                what: "the writable layer",
                pool: &layer.pool,
                size: layer.size,
                accepted: layer.grow_to,
                wanted,
            };
            match failed_before(draft, request_id.as_ref()) {
                Some(message) if wanted.is_some() && wanted > capacity => {
                    let unmet = Some((RESOURCE_EXHAUSTED, message));
                    Growth { grow_to: layer.grow_to, unmet, is_undecided: false }
                }
                _ => judge(&asked, || sight.cluster.room_in(&layer.pool)),
            }
        }
    };
    if growth.is_undecided {
        return draft.is_undecided = true;
    }
    record(draft, &asked, wanted, capacity, &growth);
    if let Some(layer) = &mut draft.status.writable_layer {
        layer.grow_to = growth.grow_to;
    }
    draft.judge(ConditionType::Resized, growth.unmet);
}

/// A request that was recorded as failed stays so: whoever asked was told.
fn failed_before(draft: &Draft<'_>, id: Option<&CommandId>) -> Option<String> {
    let id = id?;
    let is_it = |record: &&CommandRecord| record.id == *id && record.operation == RESIZE;
    let record = draft.status.commands.iter().find(is_it)?;
    (record.result == CommandResult::Failed).then(|| record.message.clone().unwrap_or_default())
}

/// Once for each request. One that asks for what there is opens no command.
fn record(
    draft: &mut Draft<'_>,
    asked: &WritableLayer,
    wanted: Option<Bytes>,
    capacity: Option<Bytes>,
    growth: &Growth,
) {
    let Some(id) = asked.request_id.as_ref().filter(|id| draft.status.resize_request_id.as_ref() != Some(id)) else {
        return;
    };
    draft.status.resize_request_id = Some(id.clone());
    if wanted.is_some() && wanted != capacity {
        let failure = growth.unmet.clone().filter(|_| growth.is_refused());
        draft.record_finished(id, RESIZE, digest(&wanted), failure);
    }
}
