//! The next step of a transfer of the disks: into an archive, or, for a Workspace that is made from one, out of it.
//!
//! The grant of the layer and the transfer are one write; the Volume's grant follows, and names the transfer as a start
//! names its Instance. Then whoever asked gets its stream. When it is over, however it ended, the node says what became
//! of the grants. An import counts only by the write that says that the layer is made: before it, whatever lies in the
//! pools goes with the Workspace.

mod begin;

use kibo_crds::{
    Bytes, PoolId, TransferKind, TransferState, TransferStatus, Volume,
    workspace::{LayerStatus, PowerRequest, WhenUnplaceable, WorkspacePhase},
};
use kube::ResourceExt as _;

use super::{
    Action, Decision, Object, can_ask,
    idle::{Binding, binding},
    lost,
};
use crate::{
    placement::Demand,
    right::{HasRight as _, Standing, waits_for},
    transfer::{Refusal, Sizes, Wish, is_open},
    workspace::{
        draft::{Draft, Notice, Wait},
        sight::Sight,
    },
};

pub use begin::begun;
use begin::{Begin, begin};

const DELETED: &str = "Deleted";
const IMPORT_FAILED: &str = "ImportFailed";

/// A step of a transfer.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    Refuse(Refusal),
    /// Find a place for the disks that are to be made, and grant them there.
    Place(Box<Demand>),
    /// To the node of the transfer.
    GrantVolume,
    /// Tell whoever asked that the node may be asked for the stream.
    Order(Sizes),
    /// The image of the Volume is complete.
    MakeVolume(Bytes),
    /// Tell whoever asked that it is over.
    Tell(Result<(), String>),
}

impl Step {
    /// Nothing but a word to whoever asked: never in the way of anything else.
    pub fn is_word(&self) -> bool {
        matches!(self, Self::Refuse(_) | Self::Tell(_))
    }

    fn of(self, wish: &Wish) -> Action {
        Action::Transfer { id: wish.id, step: self }
    }
}

fn refuse(reason: &'static str, message: impl Into<String>) -> Step {
    Step::Refuse(Refusal { reason, message: message.into() })
}

/// The Volume that goes with it: of an export the one that it binds, of an import the one that it was made with.
enum Companion<'a> {
    None,
    Volume(&'a Volume),
    /// One step brings it nearer.
    NotYet,
    Blocked(Wait),
}

/// The next step; `None`: there is nothing to do, but perhaps to write.
pub(super) fn advance(sight: &Sight<'_>, draft: &mut Draft<'_>, is_deleting: bool) -> Option<Action> {
    let wish = sight.cluster.transfer(&sight.workspace.uid().unwrap_or_default());
    match draft.status.transfer.clone() {
        Some(transfer) if !transfer.state.is_over() => go_on(sight, draft, transfer, wish.as_ref(), is_deleting),
        last => {
            let wish = wish?;
            if let Some(last) = last.filter(|last| last.id == wish.id) {
                return Some(Step::Tell(outcome(&last)).of(&wish));
            }
            if let Some(ended) = wish.ended.clone() {
                return Some(Step::Tell(ended).of(&wish));
            }
            match begin(sight, draft, &wish, is_deleting) {
                Begin::Action(action) => Some(action),
                Begin::Step(step) => Some(step.of(&wish)),
                Begin::Nothing => None,
            }
        }
    }
}

fn outcome(transfer: &TransferStatus) -> Result<(), String> {
    match transfer.state {
        TransferState::Failed => Err(transfer.message.clone().unwrap_or_default()),
        _ => Ok(()),
    }
}

fn companion<'a>(sight: &Sight<'a>, kind: TransferKind) -> Companion<'a> {
    let is_made = |volume: &Volume| volume.status.as_ref().is_some_and(|status| status.size.is_some());
    match (binding(sight), kind) {
        (Binding::NotWanted, _) => Companion::None,
        (Binding::Step(_), _) => Companion::NotYet,
        (Binding::Blocked(wait), _) => Companion::Blocked(wait),
        (Binding::Bound(volume), TransferKind::Export) => match lost::volume(sight, volume) {
            Some(wait) => Companion::Blocked(wait),
            None if is_made(volume) => Companion::Volume(volume),
            None => Companion::None,
        },
        (Binding::Bound(volume), TransferKind::Import) => {
            let wanted = sight.workspace.spec.import.as_ref().is_some_and(|import| import.volume);
            if wanted { Companion::Volume(volume) } else { Companion::None }
        }
    }
}

fn explain(transfer: &mut TransferStatus, reason: &str, message: &str) {
    transfer.reason = Some(reason.chars().take(128).collect());
    transfer.message = Some(message.chars().take(1024).collect());
}

fn give_up(transfer: &mut TransferStatus, reason: &str, message: &str) {
    transfer.state = TransferState::Ending;
    explain(transfer, reason, message);
}

fn go_on(
    sight: &Sight<'_>,
    draft: &mut Draft<'_>,
    mut transfer: TransferStatus,
    wish: Option<&Wish>,
    is_deleting: bool,
) -> Option<Action> {
    let wish = wish.filter(|wish| wish.id == transfer.id);
    let is_held = draft.status.holder.as_ref().is_some_and(|holder| !holder.idle && holder.epoch == transfer.epoch);
    let mut action = None;
    if transfer.state == TransferState::Running {
        if let Some(pool) = lost::layer_pool(sight, draft) {
            give_up(&mut transfer, "PoolLost", &format!("storage pool {pool} was declared lost"));
        } else if !is_held {
            let message = format!("node {} lost the disks before the end", transfer.node);
            give_up(&mut transfer, "NodeLost", &message);
        } else if is_deleting {
            give_up(&mut transfer, DELETED, "the Workspace is being deleted");
        } else if let Some(wish) = wish {
            action = run(sight, draft, &mut transfer, wish);
        } else {
            give_up(&mut transfer, "Interrupted", "the operator's leader changed before the end");
        }
    }
    if transfer.state.is_letting_go() {
        action = end(sight, draft, &mut transfer);
    }
    draft.status.transfer = Some(transfer);
    action
}

fn run(sight: &Sight<'_>, draft: &mut Draft<'_>, transfer: &mut TransferStatus, wish: &Wish) -> Option<Action> {
    match (&wish.ended, wish.ordered) {
        (Some(Err(problem)), _) => give_up(transfer, "Interrupted", problem),
        (Some(Ok(())), Some(sizes)) if transfer.kind == TransferKind::Import => {
            let volume = match companion(sight, transfer.kind) {
                Companion::Volume(volume) => Some(volume),
                Companion::None | Companion::NotYet | Companion::Blocked(_) => None,
            };
            return complete(draft, transfer, wish, sizes, volume);
        }
        (Some(Ok(())), _) => transfer.state = TransferState::Completing,
        (None, Some(_)) => {}
        (None, None) => match companion(sight, transfer.kind) {
            Companion::None => return grant_volume(sight, draft, transfer, wish, None),
            Companion::Volume(volume) => return grant_volume(sight, draft, transfer, wish, Some(volume)),
            Companion::NotYet => {}
            // Since it began: nothing is transferred without the Volume that belongs to it.
            Companion::Blocked(wait) => give_up(transfer, wait.reason, &wait.message),
        },
    }
    None
}

/// It is the one that this transfer is of.
fn is_granted(volume: &Volume, transfer: &TransferStatus) -> bool {
    let granted = volume.status.as_ref().and_then(|status| status.granted_for.as_ref());
    granted.is_some_and(|granted| granted.instance_id == transfer.id)
}

/// All grants stand, or the next one is given.
fn grant_volume(
    sight: &Sight<'_>,
    draft: &Draft<'_>,
    transfer: &mut TransferStatus,
    wish: &Wish,
    volume: Option<&Volume>,
) -> Option<Action> {
    let layer = draft.status.writable_layer.as_ref()?.size;
    let Some(volume) = volume else { return Some(Step::Order(Sizes { layer, volume: None }).of(wish)) };
    let status = volume.status.clone().unwrap_or_default();
    if is_granted(volume, transfer)
        && status.holder.as_ref().is_some_and(|holder| holder.node == transfer.node && !holder.idle)
    {
        let size = crate::workspace::launch::volume_size(volume);
        return Some(Step::Order(Sizes { layer, volume: Some(size) }).of(wish));
    }
    match status.right().standing(|node, incarnation| sight.cluster.void(node, incarnation)) {
        Standing::Grantable => Some(Step::GrantVolume.of(wish)),
        Standing::Held(holder) if can_ask(sight, &holder) => Some(Action::Settle { object: Object::Volume, holder }),
        Standing::Held(holder) => {
            give_up(transfer, "HolderUnreachable", &waits_for("the Volume", &holder.node));
            None
        }
    }
}

/// The node has made the disks: the Volume first, then the write that counts.
fn complete(
    draft: &mut Draft<'_>,
    transfer: &mut TransferStatus,
    wish: &Wish,
    sizes: Sizes,
    volume: Option<&Volume>,
) -> Option<Action> {
    if let Some(size) = sizes.volume {
        let is_granted = |volume: &&Volume| is_granted(volume, transfer);
        let Some(volume) = volume.filter(is_granted) else {
            give_up(transfer, "VolumeGone", "the Volume was taken away before the import was complete");
            return None;
        };
        if volume.status.as_ref().is_none_or(|status| status.size.is_none()) {
            return Some(Step::MakeVolume(size).of(wish));
        }
    }
    if let Some(layer) = &mut draft.status.writable_layer {
        (layer.created, layer.size) = (true, sizes.layer);
    }
    draft.status.imported = true;
    transfer.state = TransferState::Completing;
    draft.enter(WorkspacePhase::Stopped);
    draft.notices.push(Notice::normal("Imported", "its disks are complete"));
    None
}

/// Its node says what became of the grant of the layer; that of the Volume goes the way of every grant that nobody uses.
fn end(sight: &Sight<'_>, draft: &mut Draft<'_>, transfer: &mut TransferStatus) -> Option<Action> {
    let right = draft.status.right();
    if let Standing::Held(holder) = right.standing(|node, incarnation| sight.cluster.void(node, incarnation))
        && holder.epoch == transfer.epoch
    {
        if can_ask(sight, &holder) {
            return Some(Action::Settle { object: Object::Layer, holder });
        }
        return None;
    }
    transfer.finished_at = Some(sight.now.clone());
    transfer.state = match transfer.state {
        TransferState::Completing => TransferState::Finished,
        _ => TransferState::Failed,
    };
    if transfer.kind == TransferKind::Import && transfer.state == TransferState::Failed {
        draft.notices.push(Notice::warning(IMPORT_FAILED, transfer.message.as_deref().unwrap_or_default()));
    }
    None
}

/// The layer of an import that is about to be made there.
pub fn new_layer(pool: PoolId, size: Bytes) -> LayerStatus {
    LayerStatus { pool, size, grow_to: None, created: false }
}

fn has_failed(draft: &Draft<'_>) -> bool {
    let transfer = draft.status.transfer.as_ref();
    transfer.is_some_and(|it| it.kind == TransferKind::Import && it.state == TransferState::Failed)
}

/// A Workspace that is made from an archive, as long as it is not: phase, reason and message.
pub(super) fn unfinished(draft: &Draft<'_>) -> Option<(WorkspacePhase, &'static str, String)> {
    draft.workspace.spec.import.as_ref()?;
    if draft.status.imported {
        return None;
    }
    let transfer = draft.status.transfer.as_ref();
    Some(match transfer {
        Some(_) if has_failed(draft) => {
            let why = transfer.and_then(|transfer| transfer.message.clone()).unwrap_or_default();
            (WorkspacePhase::Failed, IMPORT_FAILED, format!("{why}: delete it, and import again"))
        }
        Some(transfer) => {
            (WorkspacePhase::Creating, "Importing", format!("node {} makes its disks from an archive", transfer.node))
        }
        None => (
            WorkspacePhase::Creating,
            "ImportPending",
            "its disks come from an archive that nobody sends yet: it cannot be started before".to_owned(),
        ),
    })
}

/// The transfer is over but for a node that cannot be asked: what somebody has to do about that.
pub(super) fn out_of_reach(sight: &Sight<'_>, draft: &Draft<'_>) -> Option<String> {
    draft.status.transfer.as_ref().filter(|transfer| transfer.state.is_letting_go())?;
    let right = draft.status.right();
    match right.standing(|node, incarnation| sight.cluster.void(node, incarnation)) {
        Standing::Held(holder) if !can_ask(sight, &holder) && !sight.cluster.is_settling() => {
            Some(waits_for("the writable layer", &holder.node))
        }
        _ => None,
    }
}

/// Why it cannot be started while its disks are transferred.
pub(super) fn stands_in_the_way(sight: &Sight<'_>, draft: &Draft<'_>) -> Option<Wait> {
    let transfer = draft.status.transfer.as_ref().filter(|transfer| is_open(Some(transfer)))?;
    let message = if transfer.state.is_letting_go() {
        out_of_reach(sight, draft).unwrap_or_else(|| {
            format!("node {} is being asked to let go of its disks, which were transferred", transfer.node)
        })
    } else {
        let TransferStatus { user, node, .. } = transfer;
        let name = sight.workspace.name_any();
        format!(
            "{user} exports it by node {node}: it can be used when that is over (`kibo transfer cancel {name}` ends it)"
        )
    };
    Some(Wait::placement("Transferring", message))
}

/// What becomes of a Workspace whose disks are not imported yet.
pub(super) fn hold(mut draft: Draft<'_>, binding: Binding<'_>, start: Option<&PowerRequest>) -> Decision {
    let Some((phase, reason, message)) = unfinished(&draft) else { return draft.then(Action::Rest) };
    if let Some(request) = start
        && (phase == WorkspacePhase::Failed || request.when_unplaceable() == WhenUnplaceable::Fail)
    {
        draft.consume(request);
        draft.finish_commands(Some((reason, &message)));
    }
    draft.enter_because(phase, reason, &message);
    match binding {
        Binding::Step(action) if phase != WorkspacePhase::Failed => draft.then(action),
        _ => draft.then(Action::Rest),
    }
}
