//! The next step of a transfer of the disks: into an archive, or, for a Workspace that is made from one, out of it.
//!
//! The grant of the layer and the transfer are one write; the Volume's grant follows, and names the transfer as a start
//! names its Instance. Then whoever asked gets its stream. When it is over, however it ended, the node says what became
//! of the grants. An import counts only by the write that says that the layer is made: before it, whatever lies in the
//! pools goes with the Workspace.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{
    Bytes, Incarnation, NodeId, PoolId, TransferKind, TransferState, TransferStatus, Volume,
    workspace::{LayerStatus, PowerRequest, WhenUnplaceable, WorkspacePhase},
};
use kube::ResourceExt as _;

use super::{
    Action, Decision, Object, can_ask,
    idle::{Binding, Held, binding, demand, held},
    lost,
};
use crate::{
    moving,
    node::Void,
    placement::Demand,
    right::{HasRight as _, Standing, waits_for},
    transfer::{Refusal, Sizes, Wish, is_open},
    workspace::{
        draft::{Draft, Notice, Wait},
        sight::Sight,
    },
};

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

enum Begin {
    /// It waits, or has begun.
    Nothing,
    Step(Step),
    Action(Action),
}

impl From<Step> for Begin {
    fn from(step: Step) -> Self {
        Self::Step(step)
    }
}

fn begin(sight: &Sight<'_>, draft: &mut Draft<'_>, wish: &Wish, is_deleting: bool) -> Begin {
    let name = sight.workspace.name_any();
    if is_deleting {
        return refuse(DELETED, format!("Workspace {name} is being deleted")).into();
    }
    if let Some(pool) = lost::layer_pool(sight, draft) {
        return refuse("PoolLost", format!("the writable layer was in storage pool {pool}, which was declared lost"))
            .into();
    }
    let problem = match wish.kind {
        TransferKind::Export => cannot_export(sight, draft, &name),
        TransferKind::Import => cannot_import(sight, draft, &name),
    };
    if let Some((reason, message)) = problem {
        return refuse(reason, message).into();
    }
    let volume = match companion(sight, wish.kind) {
        Companion::None => None,
        Companion::Volume(volume) => Some(volume),
        Companion::NotYet => return Begin::Nothing,
        Companion::Blocked(wait) => return refuse(wait.reason, wait.message).into(),
    };
    if let Some(held) = not_free(sight, draft, volume) {
        return held;
    }
    match wish.kind {
        TransferKind::Export => begin_export(sight, draft, wish, volume),
        TransferKind::Import => {
            let Some(template) = sight.template else {
                let message =
                    format!("Template {} does not exist: create it, and import again", sight.workspace.spec.template);
                return refuse("TemplateNotFound", message).into();
            };
            match demand(sight, draft, &sight.workspace.power_request(), template, sight.volume) {
                Ok(demand) => Step::Place(Box::new(demand)).into(),
                Err(message) => refuse("InvalidAmounts", message).into(),
            }
        }
    }
}

fn cannot_export(sight: &Sight<'_>, draft: &Draft<'_>, name: &str) -> Option<(&'static str, String)> {
    if draft.status.execution.is_some() {
        let message = format!("Workspace {name} is {:?}: stop it first (kibo workspace stop {name})", draft.phase());
        return Some(("InUse", message));
    }
    if unfinished(draft).is_some() {
        return Some(("NotImported", format!("the disks of Workspace {name} are not imported yet")));
    }
    let layer = draft.status.writable_layer.as_ref().filter(|layer| layer.created);
    if layer.is_none() {
        return Some(("NoImage", format!("Workspace {name} has no disks yet: they are made at the first start")));
    }
    let volume = sight.volume.and_then(|volume| volume.status.as_ref()?.r#move.as_ref());
    let moves = [draft.status.r#move.as_ref(), volume];
    moves
        .into_iter()
        .any(moving::is_open)
        .then(|| ("Moving", format!("a disk of Workspace {name} is being moved: export it when that is over")))
}

fn cannot_import(sight: &Sight<'_>, draft: &Draft<'_>, name: &str) -> Option<(&'static str, String)> {
    let import = sight.workspace.spec.import.as_ref();
    let Some(import) = import else {
        return Some((
            "NotAnImport",
            format!("Workspace {name} was not made for an import: `kibo transfer import` makes one"),
        ));
    };
    if draft.status.imported {
        return Some(("Complete", format!("the disks of Workspace {name} are complete already")));
    }
    if has_failed(draft) {
        return Some((
            IMPORT_FAILED,
            format!("an import into Workspace {name} did not complete: delete it, and import again"),
        ));
    }
    let size = sight.workspace.spec.writable_layer.as_ref().and_then(|layer| layer.size.as_ref());
    let new = sight.workspace.spec.volume.as_ref().and_then(|volume| volume.new.as_ref());
    if size.is_none() || (import.volume && new.is_none()) {
        return Some((
            "NoSize",
            "an import needs spec.writableLayer.size, and for its Volume spec.volume.new.size".to_owned(),
        ));
    }
    let made = sight.volume.and_then(|volume| volume.status.as_ref()?.size);
    (import.volume && made.is_some())
        .then(|| ("VolumeNotEmpty", format!("the Volume of Workspace {name} has an image already")))
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

/// Somebody holds a disk yet: its node is asked, or it cannot be.
fn not_free(sight: &Sight<'_>, draft: &Draft<'_>, volume: Option<&Volume>) -> Option<Begin> {
    let Held { object, name, holder } = held(sight, draft, volume)?;
    Some(if can_ask(sight, &holder) {
        Begin::Action(Action::Settle { object, holder })
    } else if sight.cluster.is_settling() {
        Begin::Nothing
    } else {
        refuse("HolderUnreachable", waits_for(name, &holder.node)).into()
    })
}

/// On a node that reaches all of its disks; whether it drains does not matter.
fn begin_export(sight: &Sight<'_>, draft: &mut Draft<'_>, wish: &Wish, volume: Option<&Volume>) -> Begin {
    let Some(layer) = draft.status.writable_layer.clone() else { return Begin::Nothing };
    let volume_pool = volume.and_then(|volume| volume.status.as_ref()?.pool.clone());
    let pools: Vec<PoolId> = std::iter::once(layer.pool).chain(volume_pool).collect();
    let mut nodes = sight.cluster.reachable_members(&pools[0]);
    for pool in &pools[1..] {
        let there = sight.cluster.reachable_members(pool);
        nodes.retain(|node| there.contains(node));
    }
    let right = draft.status.right();
    let last = right.holder.as_ref().map(|holder| holder.node.clone());
    nodes.sort_by_key(|(node, _)| Some(node) != last.as_ref());
    let Some((node, incarnation)) = nodes.first().cloned() else {
        if sight.cluster.is_settling() {
            return Begin::Nothing;
        }
        let members: BTreeSet<NodeId> = pools.iter().flat_map(|pool| sight.cluster.members(pool)).collect();
        let names = |all: Vec<String>| all.join(", ");
        let message = format!(
            "no node with a control session reaches storage pool {} now (members: {})",
            names(pools.iter().map(ToString::to_string).collect()),
            names(members.iter().map(ToString::to_string).collect())
        );
        return refuse("NodeUnreachable", message).into();
    };
    let void = |node: &NodeId, incarnation| sight.cluster.void(node, incarnation);
    match begun(draft, wish, &node, incarnation, void, sight.now.clone()) {
        Ok(()) => Begin::Nothing,
        Err(refusal) => Step::Refuse(refusal).into(),
    }
}

/// Grants the layer for a transfer and notes the transfer: what is one write.
pub fn begun(
    draft: &mut Draft<'_>,
    wish: &Wish,
    node: &NodeId,
    incarnation: Incarnation,
    void: impl Fn(&NodeId, Incarnation) -> Option<Void>,
    now: Time,
) -> Result<(), Refusal> {
    let right = draft.status.right().granted(node, incarnation, void);
    let right = right.map_err(|error| Refusal { reason: error.reason(), message: error.to_string() })?;
    draft.status.transfer = Some(TransferStatus {
        id: wish.id,
        kind: wish.kind,
        state: TransferState::Running,
        user: wish.user.chars().take(256).collect(),
        node: node.clone(),
        incarnation,
        epoch: right.epoch.unwrap_or_default(),
        started_at: now,
        finished_at: None,
        reason: None,
        message: None,
    });
    draft.status.set_right(right);
    Ok(())
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
        if !is_held {
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
    if transfer.state == TransferState::Ending {
        action = end(sight, draft, &mut transfer);
    }
    draft.status.transfer = Some(transfer);
    action
}

fn run(sight: &Sight<'_>, draft: &mut Draft<'_>, transfer: &mut TransferStatus, wish: &Wish) -> Option<Action> {
    let volume = match companion(sight, transfer.kind) {
        Companion::Volume(volume) => Some(volume),
        _ => None,
    };
    match (&wish.ended, wish.ordered) {
        (Some(Err(problem)), _) => give_up(transfer, "Interrupted", problem),
        (Some(Ok(())), Some(sizes)) if transfer.kind == TransferKind::Import => {
            return complete(draft, transfer, wish, sizes, volume);
        }
        (Some(Ok(())), _) => transfer.state = TransferState::Ending,
        (None, None) => return grant_volume(sight, draft, transfer, wish, volume),
        (None, Some(_)) => {
            if let Some(pool) = lost::layer_pool(sight, draft) {
                give_up(transfer, "PoolLost", &format!("storage pool {pool} was declared lost"));
            }
        }
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
    transfer.state = TransferState::Ending;
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
    transfer.state = if transfer.reason.is_some() { TransferState::Failed } else { TransferState::Finished };
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
    draft.status.transfer.as_ref().filter(|transfer| transfer.state == TransferState::Ending)?;
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
    let message = match transfer.state {
        TransferState::Ending => out_of_reach(sight, draft).unwrap_or_else(|| {
            format!("node {} is being asked to let go of its disks, which were transferred", transfer.node)
        }),
        _ => format!("{} exports it by node {}: it can be used when that is over", transfer.user, transfer.node),
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
