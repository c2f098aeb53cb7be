//! A Workspace that holds an execution.

use kibo_crds::workspace::{Execution, PowerRequest, PowerState, StopMode, WorkspacePhase};
use kibo_protocol::v1;

use super::{Action, Decision};
use crate::{
    right::waits_for,
    workspace::{
        draft::{Draft, Wait},
        sight::Sight,
    },
};

pub(super) fn decide(sight: &Sight<'_>, mut draft: Draft<'_>, execution: &Execution) -> Decision {
    let request = sight.workspace.power_request();
    if !sight.workspace.is_power_request_consumed() {
        take_request(&mut draft, execution, &request);
    }
    match draft.phase() {
        WorkspacePhase::Stopping => {
            draft.enter(WorkspacePhase::Stopping);
            let mode = stop_mode(draft.status.power.as_ref().map(|power| &power.consumed));
            stop(sight, draft, execution, mode)
        }
        WorkspacePhase::Starting => {
            draft.enter(WorkspacePhase::Starting);
            start_goes_on(sight, draft, execution)
        }
        _ => draft.then(Action::Rest),
    }
}

/// Acts once on a new request.
fn take_request(draft: &mut Draft<'_>, execution: &Execution, request: &PowerRequest) {
    let is_stopping = draft.phase() == WorkspacePhase::Stopping;
    match request.state {
        PowerState::Stopped => {
            draft.finish_commands(Some(("Superseded", "a later request took its place")));
            draft.consume(request);
            draft.enter(WorkspacePhase::Stopping);
        }
        // It starts when the stop has ended.
        PowerState::Running if is_stopping => {}
        PowerState::Running => {
            draft.finish_commands(Some(("Superseded", "a later request took its place")));
            draft.consume(request);
            match &request.node {
                Some(node) if *node != execution.node => {
                    let message = format!("it runs on node {}: stop it first", execution.node);
                    draft.finish_commands(Some(("RunsElsewhere", &message)));
                }
                _ if draft.phase() == WorkspacePhase::Available => draft.finish_commands(None),
                _ => {}
            }
        }
    }
}

pub(in crate::workspace) fn stop_mode(consumed: Option<&PowerRequest>) -> v1::StopMode {
    match consumed.and_then(|request| request.stop_mode) {
        Some(StopMode::Force) => v1::StopMode::Force,
        None => v1::StopMode::Normal,
    }
}

/// Asks the node to stop, or says what the stop waits for.
pub(super) fn stop(sight: &Sight<'_>, mut draft: Draft<'_>, execution: &Execution, mode: v1::StopMode) -> Decision {
    if sight.cluster.session(&execution.node) == Some(execution.incarnation) {
        let (node, incarnation) = (execution.node.clone(), execution.incarnation);
        return draft.then(Action::Stop { node, incarnation, instance: execution.instance_id, mode });
    }
    if !sight.cluster.is_settling() {
        draft.wait_for(Wait::node("NodeUnreachable", waits_for("the execution", &execution.node)));
    }
    draft.then(Action::Rest)
}

fn start_goes_on(sight: &Sight<'_>, mut draft: Draft<'_>, execution: &Execution) -> Decision {
    if sight.cluster.session(&execution.node) == Some(execution.incarnation) {
        let was_told = sight.cluster.was_told(execution.instance_id);
        return draft.then(if was_told { Action::Rest } else { Action::Go });
    }
    if !sight.cluster.is_settling() {
        draft.wait_for(Wait::node("NodeUnreachable", waits_for("the execution", &execution.node)));
    }
    draft.then(Action::Rest)
}
