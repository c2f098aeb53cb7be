//! The next step of a Workspace: pure, from what is stored.
//!
//! A step is a status to write, an action to take, or both, in this order; then the Workspace is looked
//! at again. Whatever an action needs to know is in the status before it begins, so a leader that dies
//! in between leaves a status from which the next one decides the same step.

mod delete;
mod growth;
pub(super) mod idle;
mod lost;
pub(super) mod running;
mod stranded;
pub(super) mod transfer;

use kibo_crds::{
    Epoch, Incarnation, InstanceId, MoveState, MoveStatus, NodeId, WORKSPACE_FINALIZER, Workspace,
    node::Holder,
    workspace::{PowerRequest, WhenUnplaceable, WorkspacePhase},
};
use kibo_protocol::v1;
use kube::ResourceExt as _;

use super::{
    draft::{Draft, Notice, Outcome, Wait},
    sight::Sight,
};
use crate::{moving, node::Void, placement::Demand, right::HasRight as _};

/// What to do once the status is written.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Nothing until something changes.
    Rest,
    AddFinalizer,
    /// Make the Volume that `spec.volume.new` asks for.
    CreateVolume,
    /// Bind the Volume that the spec names, if nobody else has.
    BindVolume,
    /// Find a node, ask it, commit, go.
    Start(Box<Start>),
    /// The commit of this execution stands, and its node may not have heard of it.
    Go,
    /// Ask the node to end the Instance.
    Stop {
        node: NodeId,
        incarnation: Incarnation,
        instance: InstanceId,
        mode: v1::StopMode,
    },
    /// Nobody runs, and yet a grant is not ended: hear from its node what became of it.
    Settle {
        object: Object,
        holder: Holder,
    },
    /// Remove the layer under its current grant.
    DeleteLayer {
        holder: Holder,
    },
    DeleteVolume,
    UnbindVolume,
    /// Let a Volume go that the spec does not name any more.
    ReleaseVolume(String),
    /// Keep a record and let the object go.
    Bury,
    /// For the transfer that somebody asked for by this id.
    Transfer {
        id: InstanceId,
        step: transfer::Step,
    },
}

impl Action {
    /// The point before it: what was decided is written, and nothing of it is done.
    pub fn failpoint(&self) -> Option<&'static str> {
        match self {
            Self::CreateVolume => Some("before-create-volume"),
            Self::BindVolume => Some("before-bind-volume"),
            Self::Start(_) => Some("before-start"),
            Self::Stop { .. } => Some("before-stop"),
            Self::DeleteLayer { .. } => Some("before-delete-layer"),
            Self::DeleteVolume => Some("before-delete-volume"),
            Self::UnbindVolume => Some("before-unbind-volume"),
            Self::ReleaseVolume(_) => Some("before-release-volume"),
            Self::Bury => Some("before-bury"),
            Self::Rest | Self::AddFinalizer | Self::Go | Self::Settle { .. } | Self::Transfer { .. } => None,
        }
    }
}

/// Which of a Workspace's objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object {
    Layer,
    Volume,
}

/// A start that waits for its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    pub request: PowerRequest,
    pub demand: Demand,
}

/// One step.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    pub outcome: Outcome,
    pub action: Action,
    /// Beside it, for the move of the layer.
    pub moving: Option<moving::Action>,
    /// Before it, to whoever asked for a transfer.
    pub word: Option<Action>,
    /// Nothing of this counts: it depends on what is about to be stored elsewhere, and is to be decided again soon.
    pub is_undecided: bool,
}

impl Draft<'_> {
    fn then(self, action: Action) -> Decision {
        let is_undecided = self.is_undecided;
        Decision { outcome: self.finish(), action, moving: None, word: None, is_undecided }
    }
}

/// Reason of a Workspace whose node was isolated.
pub const UNAVAILABLE: &str = "Unavailable";
/// Reason of a Workspace that no node takes.
pub const RESOURCE_EXHAUSTED: &str = "ResourceExhausted";

/// The next step.
pub fn decide(sight: &Sight<'_>) -> Decision {
    let workspace = sight.workspace;
    let is_ours = workspace.finalizers().iter().any(|finalizer| finalizer == WORKSPACE_FINALIZER);
    let is_deleting = workspace.metadata.deletion_timestamp.is_some();
    if !is_ours {
        let action = if is_deleting { Action::Rest } else { Action::AddFinalizer };
        return Decision { outcome: Outcome::default(), action, moving: None, word: None, is_undecided: false };
    }
    let mut draft = Draft::new(workspace, sight.now.clone());
    draft.status.id.get_or_insert(sight.fresh_id);
    release_void_layer(sight, &mut draft);
    take_back_layer(sight, &mut draft);
    lost::let_go(sight, &mut draft);
    if let Some(execution) = &draft.status.execution
        && let Some(void) = sight.cluster.void(&execution.node, execution.incarnation)
    {
        lose(&mut draft, void, is_deleting);
    }
    if let Some(execution) = &draft.status.execution
        && let Some(reachable) = sight.cluster.is_reachable(&execution.node, execution.incarnation)
    {
        draft.node_is_reachable(reachable);
    }
    let moving = advance_move(sight, &mut draft, is_deleting);
    let transfer = transfer::advance(sight, &mut draft, is_deleting);
    let mut decision = match (is_deleting, draft.status.execution.clone()) {
        (true, execution) => delete::decide(sight, draft, execution),
        (false, Some(execution)) => running::decide(sight, draft, &execution),
        (false, None) => idle::decide(sight, draft),
    };
    match moving {
        Some(moving::Action::Settle { holder }) => {
            if decision.action == Action::Rest {
                decision.action = Action::Settle { object: Object::Layer, holder };
            }
        }
        moving => decision.moving = moving,
    }
    match transfer {
        Some(action) if decision.action == Action::Rest => decision.action = action,
        Some(Action::Transfer { id, step }) if step.is_word() => decision.word = Some(Action::Transfer { id, step }),
        _ => {}
    }
    decision
}

/// From a pool that was declared lost before the move of the layer to it was over.
fn take_back_layer(sight: &Sight<'_>, draft: &mut Draft<'_>) {
    let right = draft.status.right();
    let moving = draft.status.r#move.as_mut();
    let pool = moving::taken_back(moving, &right, |pool| sight.cluster.is_lost(pool), &sight.now);
    if let (Some(pool), Some(layer)) = (pool, &mut draft.status.writable_layer) {
        layer.pool = pool;
    }
}

/// The next step of the layer's move, if there is one.
fn advance_move(sight: &Sight<'_>, draft: &mut Draft<'_>, is_deleting: bool) -> Option<moving::Action> {
    let request = sight.workspace.spec.r#move.as_ref();
    if request.is_none() && !moving::is_open(draft.status.r#move.as_ref()) {
        return None;
    }
    let layer = draft.status.writable_layer.as_ref().filter(|layer| layer.created);
    let uid = sight.workspace.uid().unwrap_or_default();
    let decision = moving::decide(&moving::Sight {
        name: "the writable layer",
        request,
        status: draft.status.r#move.as_ref(),
        image: layer.map(|layer| (layer.pool.clone(), layer.size)),
        grows_to: layer.and_then(|layer| layer.grow_to),
        right: draft.status.right(),
        is_deleting,
        in_use: draft.status.execution.is_some() || crate::transfer::is_open(draft.status.transfer.as_ref()),
        heard: sight.cluster.heard(&uid),
        cluster: sight.cluster,
        now: sight.now.clone(),
    });
    draft.is_undecided |= decision.is_undecided;
    draft.status.set_right(decision.right);
    if let (Some(pool), Some(layer)) = (decision.pool, &mut draft.status.writable_layer) {
        layer.pool = pool;
    }
    let state = |status: Option<&MoveStatus>| status.map(|status| status.state);
    if state(decision.status.as_ref()) == Some(MoveState::Failed)
        && state(draft.status.r#move.as_ref()) != Some(MoveState::Failed)
    {
        let message = decision.status.as_ref().and_then(|status| status.message.clone()).unwrap_or_default();
        draft.notices.push(Notice::warning("MoveFailed", &message));
    }
    draft.status.r#move = decision.status;
    decision.action
}

fn release_void_layer(sight: &Sight<'_>, draft: &mut Draft<'_>) {
    if let Some(right) = draft.status.right().voided(|node, incarnation| sight.cluster.void(node, incarnation)) {
        draft.status.set_right(right);
    }
    let Some(pool) = draft.status.writable_layer.as_ref().map(|layer| layer.pool.clone()) else { return };
    if let Some(right) = draft.status.right().given_back(|node| sight.cluster.others_reach(&pool, node)) {
        draft.status.set_right(right);
    }
}

/// The execution's incarnation is void: it ended with its node.
fn lose(draft: &mut Draft<'_>, void: Void, is_deleting: bool) {
    let Some(node) = draft.status.execution.as_ref().map(|execution| execution.node.clone()) else { return };
    let (reason, message) = match void {
        Void::IncarnationEnded => ("NodeRestarted", format!("node {node} came back without it: start it again")),
        Void::Isolated | Void::Retired => {
            let message = format!("node {node} was isolated: start it again; the condition Placed says where it can");
            (UNAVAILABLE, message)
        }
    };
    draft.end_execution(reason);
    if is_deleting {
        return;
    }
    draft.enter_because(WorkspacePhase::Failed, reason, &message);
    draft.finish_commands(Some((reason, &message)));
    draft.notices.push(Notice::warning(reason, &message));
}

/// A start that cannot be made now: with Fail it ends here, with Wait it stays a wish.
fn blocked(mut draft: Draft<'_>, request: &PowerRequest, wait: Wait, action: Action) -> Decision {
    match request.when_unplaceable() {
        WhenUnplaceable::Wait => {
            let told = draft.workspace.status.as_ref().and_then(|status| status.reason.as_deref());
            if told != Some(wait.reason) {
                draft.notices.push(Notice::warning(wait.reason, &wait.message));
            }
            draft.wait_for(wait);
            draft.then(action)
        }
        WhenUnplaceable::Fail => {
            // Nothing ran before: there is no state to go back to. A stopped one stays stopped.
            let phase = match draft.phase() {
                WorkspacePhase::Stopped => WorkspacePhase::Stopped,
                _ => WorkspacePhase::Failed,
            };
            draft.consume(request);
            draft.finish_commands(Some((wait.reason, &wait.message)));
            draft.enter_because(phase, wait.reason, &wait.message);
            draft.notices.push(Notice::warning(wait.reason, &wait.message));
            draft.then(Action::Rest)
        }
    }
}

/// No node takes the start.
pub fn unplaced(sight: &Sight<'_>, request: &PowerRequest, answer: &str) -> Outcome {
    let mut draft = Draft::new(sight.workspace, sight.now.clone());
    draft.status.id.get_or_insert(sight.fresh_id);
    blocked(draft, request, Wait::placement(RESOURCE_EXHAUSTED, answer), Action::Rest).outcome
}

/// Whether a holder's node can be asked now.
fn can_ask(sight: &Sight<'_>, holder: &Holder) -> bool {
    sight.cluster.session(&holder.node) == Some(holder.incarnation)
}

/// The status with the layer deleted: nothing is held, and nothing has to be deleted again.
pub fn layer_deleted(workspace: &Workspace, node: &NodeId, epoch: Epoch) -> kibo_crds::workspace::WorkspaceStatus {
    let mut status = workspace.status.clone().unwrap_or_default();
    if let Some(right) = status.right().released(node, epoch, true) {
        status.set_right(right);
    }
    status.writable_layer = None;
    status
}

#[cfg(test)]
mod tests;
