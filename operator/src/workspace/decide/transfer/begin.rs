//! Whether what somebody asks for can begin now; if not, why.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{Incarnation, NodeId, PoolId, TransferKind, TransferState, TransferStatus, Volume};
use kube::ResourceExt as _;

use super::{
    super::{
        Action, can_ask,
        idle::{Held, demand, held},
        lost,
    },
    Companion, DELETED, IMPORT_FAILED, Step, companion, has_failed, refuse, unfinished,
};
use crate::{
    moving,
    node::Void,
    right::{HasRight as _, waits_for},
    transfer::{Refusal, Wish},
    workspace::{draft::Draft, sight::Sight},
};

pub(super) enum Begin {
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

pub(super) fn begin(sight: &Sight<'_>, draft: &mut Draft<'_>, wish: &Wish, is_deleting: bool) -> Begin {
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
