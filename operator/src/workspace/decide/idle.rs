//! A Workspace without an execution: its Volume is made and bound, and a request to start looks for a place.

use std::collections::{BTreeMap, BTreeSet};

use kibo_crds::{
    ConditionType, NodeId, Template, Volume,
    node::Holder,
    volume::BoundTo,
    workspace::{BoundVolume, PowerRequest, PowerState, StopMode, VolumeBinding, WorkspacePhase},
};
use kube::ResourceExt as _;

use super::{Action, Decision, Object, Start, UNAVAILABLE, blocked, can_ask, growth, lost, stranded, transfer};
use crate::{
    moving,
    placement::{Demand, Disk},
    right::{HasRight as _, Right, Standing, waits_for},
    workspace::{
        draft::{Draft, Wait},
        launch,
        sight::{CREATED_FOR, Sight},
    },
};

/// How the Volume that the spec names stands.
pub(super) enum Binding<'a> {
    NotWanted,
    Bound(&'a Volume),
    /// One step brings it nearer.
    Step(Action),
    Blocked(Wait),
}

pub(super) fn decide(sight: &Sight<'_>, mut draft: Draft<'_>) -> Decision {
    growth::take(sight, &mut draft);
    let binding = released(sight, binding(sight));
    match &binding {
        Binding::Bound(volume) => {
            draft.status.volume = Some(BoundVolume { name: volume.name_any(), uid: volume.uid().unwrap_or_default() });
        }
        Binding::NotWanted => draft.status.volume = None,
        Binding::Step(_) | Binding::Blocked(_) => {}
    }
    let refused = if let Binding::Blocked(wait) = &binding { Some((wait.reason, wait.message.clone())) } else { None };
    draft.judge(ConditionType::VolumeBound, refused);
    let request = sight.workspace.power_request();
    let wants_start = !sight.workspace.is_power_request_consumed() && request.state == PowerState::Running;
    if !sight.workspace.is_power_request_consumed() && request.state == PowerState::Stopped {
        take_stop(&mut draft, &request);
    }
    // What it does not name any more is let go also by one that can never start again.
    if let Binding::Step(action @ Action::ReleaseVolume(_)) = binding {
        return draft.then(action);
    }
    if let Some(pool) = lost::layer_pool(sight, &draft) {
        lost::fail(&mut draft, &pool, wants_start.then_some(&request));
        return draft.then(Action::Rest);
    }
    if transfer::unfinished(&draft).is_some() {
        return transfer::hold(draft, binding, wants_start.then_some(&request));
    }
    if let Some(wait) = transfer::stands_in_the_way(sight, &draft).filter(|_| wants_start) {
        return blocked(draft, &request, wait, Action::Rest);
    }
    if draft.phase() == WorkspacePhase::Failed && draft.status.reason.as_deref() == Some(UNAVAILABLE) {
        match stranded::place(sight, &draft) {
            Some(place) => draft.could_be_placed(place),
            None => draft.place_stands(),
        }
    }
    match binding {
        Binding::Step(action) => draft.then(action),
        Binding::Blocked(wait) if wants_start => blocked(draft, &request, wait, Action::Rest),
        Binding::Bound(volume) if wants_start => start(sight, draft, request, Some(volume)),
        Binding::NotWanted if wants_start => start(sight, draft, request, None),
        _ => draft.then(Action::Rest),
    }
}

/// Nothing runs, so a stop is done at once; a start that waited for a place is no more.
fn take_stop(draft: &mut Draft<'_>, request: &PowerRequest) {
    let has_failed = draft.phase() == WorkspacePhase::Failed;
    draft.consume(request);
    if has_failed && request.stop_mode == Some(StopMode::Force) {
        draft.finish_commands(Some(("NoExecution", "it has failed and holds no execution: start it as it is")));
        return;
    }
    draft.finish_commands(None);
    if draft.phase() != WorkspacePhase::Stopped {
        draft.enter(WorkspacePhase::Stopped);
    }
}

/// Name of the Volume in the spec.
pub(in crate::workspace) fn volume_name(binding: &VolumeBinding, workspace: &str) -> String {
    binding.claim.clone().unwrap_or_else(|| workspace.to_owned())
}

/// What its spec does not name any more is let go, once what it names is bound: a target that is refused leaves the
/// Volume of before.
fn released<'a>(sight: &Sight<'_>, binding: Binding<'a>) -> Binding<'a> {
    match (&binding, sight.others_bound.first()) {
        (Binding::NotWanted | Binding::Bound(_), Some(other)) => Binding::Step(Action::ReleaseVolume(other.clone())),
        _ => binding,
    }
}

fn is_bound_to(volume: &Volume, uid: Option<&str>) -> bool {
    bound_to(volume).is_some_and(|bound| Some(bound.uid.as_str()) == uid)
}

pub(super) fn bound_to(volume: &Volume) -> Option<&BoundTo> {
    volume.status.as_ref().and_then(|status| status.bound_to.as_ref())
}

pub(super) fn binding<'a>(sight: &Sight<'a>) -> Binding<'a> {
    let Some(spec) = &sight.workspace.spec.volume else { return Binding::NotWanted };
    let uid = sight.workspace.uid();
    let name = volume_name(spec, &sight.workspace.name_any());
    let Some(volume) = sight.volume else {
        return match &spec.new {
            Some(_) => Binding::Step(Action::CreateVolume),
            None => Binding::Blocked(Wait::placement(
                "VolumeNotFound",
                format!("Volume {name} does not exist in this namespace: create it, and the start goes on"),
            )),
        };
    };
    if is_bound_to(volume, uid.as_deref()) {
        return Binding::Bound(volume);
    }
    if let Some(other) = bound_to(volume) {
        let message =
            format!("Volume {name} is bound to Workspace {}: unbind it there, or use another Volume", other.name);
        return Binding::Blocked(Wait::placement("VolumeInUse", message));
    }
    if volume.metadata.deletion_timestamp.is_some() {
        return Binding::Blocked(Wait::placement("VolumeDeleting", format!("Volume {name} is being deleted")));
    }
    if spec.new.is_some() && volume.labels().get(CREATED_FOR) != uid.as_ref() {
        let message = format!(
            "a Volume {name} exists already and was not made for this Workspace: name it in volume.claim of a new Workspace, or delete it"
        );
        return Binding::Blocked(Wait::placement("VolumeNameTaken", message));
    }
    if let Some(wait) = lost::volume(sight, volume) {
        return Binding::Blocked(wait);
    }
    let moves = volume.status.as_ref().and_then(|status| status.r#move.as_ref());
    if let Some(message) = moving::stands_in_the_way(&format!("Volume {name}"), moves) {
        return Binding::Blocked(Wait::placement("VolumeMoving", message));
    }
    out_of_reach(sight, volume).map_or(Binding::Step(Action::BindVolume), Binding::Blocked)
}

/// A Workspace whose layer is in one pool cannot use a Volume in another that no node has beside it.
fn out_of_reach(sight: &Sight<'_>, volume: &Volume) -> Option<Wait> {
    let layer = &sight.workspace.status.as_ref()?.writable_layer.as_ref()?.pool;
    let pool = volume.status.as_ref().and_then(|status| status.pool.as_ref()).or(volume.spec.pool.as_ref())?;
    let members = |pool| -> BTreeSet<NodeId> { sight.cluster.members(pool).into_iter().collect() };
    if pool == layer || !members(pool).is_disjoint(&members(layer)) {
        return None;
    }
    let name = volume.name_any();
    let message = format!(
        "Volume {name} is in storage pool {pool}, and no node is attached to that and to {layer}, where the writable layer \
         is: attach a node to both, or move one of them"
    );
    Some(Wait::placement("VolumeOutOfReach", message))
}

fn start(sight: &Sight<'_>, mut draft: Draft<'_>, request: PowerRequest, volume: Option<&Volume>) -> Decision {
    let Some(template) = sight.template else {
        let name = &sight.workspace.spec.template;
        let message = format!("Template {name} does not exist: create it, or look at `kibo template list`");
        return blocked(draft, &request, Wait::placement("TemplateNotFound", message), Action::Rest);
    };
    if let Some(wait) = volume.and_then(|volume| lost::volume(sight, volume)) {
        return blocked(draft, &request, wait, Action::Rest);
    }
    let moves = [
        ("the writable layer", draft.status.r#move.as_ref()),
        ("the Volume", volume.and_then(|volume| volume.status.as_ref()?.r#move.as_ref())),
    ];
    let in_the_way = moves.into_iter().find_map(|(name, it)| moving::stands_in_the_way(name, it));
    if let Some(message) = in_the_way {
        return blocked(draft, &request, Wait::placement("Moving", message), Action::Rest);
    }
    if let Some(Held { object, name, holder }) = held(sight, &draft, volume) {
        if can_ask(sight, &holder) {
            let message = format!("waits for node {} to say that it does not use {name} any more", holder.node);
            draft.wait_for(Wait::placement("NotReleased", message));
            return draft.then(Action::Settle { object, holder });
        }
        if sight.cluster.is_settling() {
            return draft.then(Action::Rest);
        }
        let wait = Wait::node("HolderUnreachable", waits_for(name, &holder.node));
        return blocked(draft, &request, wait, Action::Rest);
    }
    match demand(sight, &draft, &request, template, volume) {
        Ok(demand) => {
            // Said while it waits its turn; what is stored already is not written again.
            if draft.status.reason.as_deref() == Some(super::RESOURCE_EXHAUSTED) {
                let message = draft.status.message.clone().unwrap_or_default();
                draft.wait_for(Wait::placement(super::RESOURCE_EXHAUSTED, message));
            }
            draft.then(Action::Start(Box::new(Start { request, demand })))
        }
        Err(message) => blocked(draft, &request, Wait::placement("InvalidAmounts", message), Action::Rest),
    }
}

/// A disk that somebody may still use, and who.
pub(super) struct Held {
    pub object: Object,
    /// For people.
    pub name: &'static str,
    pub holder: Holder,
}

/// The first of its disks that cannot be granted anew.
pub(super) fn held(sight: &Sight<'_>, draft: &Draft<'_>, volume: Option<&Volume>) -> Option<Held> {
    let rights = [
        (Object::Layer, "the writable layer", Some(draft.status.right())),
        (Object::Volume, "the Volume", volume.and_then(|volume| volume.status.as_ref()).map(right_of)),
    ];
    rights.into_iter().find_map(|(object, name, right)| {
        match right?.standing(|node, incarnation| sight.cluster.void(node, incarnation)) {
            Standing::Held(holder) => Some(Held { object, name, holder }),
            Standing::Grantable => None,
        }
    })
}

fn right_of(status: &kibo_crds::volume::VolumeStatus) -> Right {
    status.right()
}

pub(super) fn demand(
    sight: &Sight<'_>,
    draft: &Draft<'_>,
    request: &PowerRequest,
    template: &Template,
    volume: Option<&Volume>,
) -> Result<Demand, String> {
    let amounts = launch::amounts(sight.workspace, template).map_err(|error| error.to_string())?;
    let memory = amounts.memory.checked_add(sight.vm_overhead).ok_or("the memory is beyond all bounds")?;
    let wanted_pool = sight.workspace.spec.writable_layer.as_ref().and_then(|layer| layer.pool.clone());
    let layer = match &draft.status.writable_layer {
        Some(layer) => {
            let whole = layer.grow_to.unwrap_or(layer.size);
            let to_allocate = if layer.created { whole.saturating_sub(layer.size) } else { whole };
            Disk::In { pool: layer.pool.clone(), to_allocate }
        }
        None => Disk::New { pool: wanted_pool, size: amounts.layer },
    };
    Ok(Demand {
        cpu: amounts.cpu,
        memory,
        disks: std::iter::once(layer).chain(volume.map(disk)).collect(),
        node_selector: sight.workspace.spec.node_selector.clone(),
        pin: request.node.clone(),
        refusals: BTreeMap::new(),
    })
}

fn disk(volume: &Volume) -> Disk {
    let status = volume.status.as_ref();
    let size = launch::volume_size(volume);
    match status.and_then(|status| status.pool.clone()) {
        Some(pool) => {
            let made = status.and_then(|status| status.size);
            let grows_by = status.and_then(|status| status.grow_to).unwrap_or(size).saturating_sub(size);
            Disk::In { pool, to_allocate: if made.is_some() { grows_by } else { size } }
        }
        None => Disk::New { pool: volume.spec.pool.clone(), size },
    }
}
