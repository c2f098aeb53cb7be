//! The next step of a Volume: pure, from what is stored.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{
    ConditionType, InstanceId, PoolId, VOLUME_FINALIZER, Volume, condition,
    node::Holder,
    set_condition,
    volume::{VolumePhase, VolumeStatus},
};
use kube::ResourceExt as _;

use crate::{
    growth::{self, Asked},
    moving,
    right::{HasRight as _, Standing, waits_for},
    workspace::sight::{CREATED_FOR, Cluster},
};

/// What is known of the Workspace that a Volume names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The Workspace is there, with this execution, or with a start under way that will have it, or with this transfer.
    Present { instance: Option<InstanceId> },
    /// A complete view shows that there is none with that uid.
    Gone,
}

/// Everything that a decision depends on.
pub struct Sight<'a> {
    pub volume: &'a Volume,
    /// The Workspace in `status.boundTo`.
    pub bound_to: Owner,
    /// The Workspace in `status.grantedFor`.
    pub granted_for: Owner,
    /// The Workspace that the Volume was made with.
    pub created_for: Owner,
    pub cluster: &'a dyn Cluster,
    pub now: Time,
}

/// What to do once the status is written.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Rest,
    AddFinalizer,
    /// A grant that nobody uses: hear from its node what became of it.
    Settle {
        holder: Holder,
    },
    /// Remove the image under its current grant.
    Delete {
        holder: Holder,
    },
    RemoveFinalizer,
    /// Delete the object: nothing was ever in it, and nobody will put anything there.
    Withdraw,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// `None`: the stored status is right.
    pub status: Option<Box<VolumeStatus>>,
    pub action: Action,
    /// Beside it, for its move.
    pub moving: Option<moving::Action>,
    /// Nothing of this counts: it depends on what is about to be stored elsewhere, and is to be decided again soon.
    pub is_undecided: bool,
}

impl Decision {
    fn only(action: Action) -> Self {
        Self { status: None, action, moving: None, is_undecided: false }
    }

    const UNDECIDED: Self = Self { status: None, action: Action::Rest, moving: None, is_undecided: true };
}

pub fn decide(sight: &Sight<'_>) -> Decision {
    let volume = sight.volume;
    let is_deleting = volume.metadata.deletion_timestamp.is_some();
    if !volume.finalizers().iter().any(|finalizer| finalizer == VOLUME_FINALIZER) {
        let action = if is_deleting { Action::Rest } else { Action::AddFinalizer };
        return Decision::only(action);
    }
    if volume.status.is_none() && sight.created_for != Owner::Gone && !is_deleting {
        // Its Workspace binds it at once: a status before that would only be in the way.
        return Decision::only(Action::Rest);
    }
    let mut status = volume.status.clone().unwrap_or_default();
    if sight.bound_to == Owner::Gone {
        status.bound_to = None;
    }
    if let Some(right) = status.right().voided(|node, incarnation| sight.cluster.void(node, incarnation)) {
        status.set_right(right);
        status.granted_for = None;
    }
    let right = status.right();
    if let Some(pool) =
        moving::taken_back(status.r#move.as_mut(), &right, |pool| sight.cluster.is_lost(pool), &sight.now)
    {
        status.pool = Some(pool);
    }
    if let Some(pool) = status.pool.clone().filter(|pool| sight.cluster.is_lost(pool)) {
        lose(sight, &mut status, &pool);
    } else if let Some(pool) = &status.pool
        && let Some(right) = status.right().given_back(|node| sight.cluster.others_reach(pool, node))
    {
        status.set_right(right);
    }
    let (Ok(()), Ok(moving)) = (grow(sight, &mut status), advance_move(sight, &mut status, is_deleting)) else {
        return Decision::UNDECIDED;
    };
    let is_moving = moving::is_open(status.r#move.as_ref());
    let (action, wait) = if !is_deleting && was_made_for_nobody(sight, &status) {
        (Action::Withdraw, None)
    } else if is_deleting && status.bound_to.is_none() && is_moving {
        (Action::Rest, status.r#move.as_ref().and_then(|moving| moving.message.clone()))
    } else if is_deleting && status.bound_to.is_none() {
        delete(sight, &mut status)
    } else if status.r#move.as_ref().is_some_and(|moving| moving.state.holds()) {
        (Action::Rest, None)
    } else {
        (settle(sight, &status), None)
    };
    match moving {
        Some(moving::Action::Settle { holder }) if action == Action::Rest => {
            finish(sight, status, Action::Settle { holder }, wait, None)
        }
        Some(moving::Action::Settle { .. }) => finish(sight, status, action, wait, None),
        moving => finish(sight, status, action, wait, moving),
    }
}

/// Made for a Workspace that went before it was bound, and never granted: there are no bytes of it anywhere.
fn was_made_for_nobody(sight: &Sight<'_>, status: &VolumeStatus) -> bool {
    sight.volume.labels().contains_key(CREATED_FOR)
        && sight.created_for == Owner::Gone
        && status.bound_to.is_none()
        && (status.epoch, status.size, &status.pool) == (None, None, &None)
}

/// It depends on what is about to be stored elsewhere.
struct Undecided;

/// The next step of its move, if there is one.
fn advance_move(
    sight: &Sight<'_>,
    status: &mut VolumeStatus,
    is_deleting: bool,
) -> Result<Option<moving::Action>, Undecided> {
    let request = sight.volume.spec.r#move.as_ref();
    if request.is_none() && !moving::is_open(status.r#move.as_ref()) {
        return Ok(None);
    }
    let decision = moving::decide(&moving::Sight {
        name: "the Volume",
        request,
        status: status.r#move.as_ref(),
        image: status.pool.clone().zip(status.size),
        grows_to: status.grow_to,
        right: status.right(),
        is_deleting,
        in_use: is_granted_to_current(sight, status),
        heard: sight.cluster.heard(&sight.volume.uid().unwrap_or_default()),
        cluster: sight.cluster,
        now: sight.now.clone(),
    });
    if decision.is_undecided {
        return Err(Undecided);
    }
    if decision.right.epoch != status.epoch {
        status.granted_for = None;
    }
    status.set_right(decision.right);
    status.pool = decision.pool.or(status.pool.take());
    status.r#move = decision.status;
    Ok(decision.action)
}

/// The execution that it was granted for is current, or a start under way will be.
fn is_granted_to_current(sight: &Sight<'_>, status: &VolumeStatus) -> bool {
    let granted = status.granted_for.as_ref().map(|granted| granted.instance_id);
    match sight.granted_for {
        Owner::Present { instance } => instance.is_some() && instance == granted,
        Owner::Gone => false,
    }
}

/// Its pool was declared lost, and nobody holds it any more.
fn lose(sight: &Sight<'_>, status: &mut VolumeStatus, pool: &PoolId) {
    if let Some(right) = status.right().lost() {
        status.set_right(right);
        status.granted_for = None;
    }
    let message = format!("it was in storage pool {pool}, which was declared lost: delete it");
    let generation = sight.volume.metadata.generation;
    let lost = condition(ConditionType::Lost, Some(true), "StoragePoolLost", &message, generation, &sight.now);
    set_condition(&mut status.conditions, lost);
}

/// Whether it was in a pool that was declared lost.
fn is_lost(status: &VolumeStatus) -> bool {
    let lost = ConditionType::Lost.to_string();
    status.conditions.iter().any(|condition| condition.type_ == lost && condition.status == "True")
}

/// Accepts the size that was asked for, or says why not. While a Workspace runs with it nothing is judged, nor while it is
/// being moved: the pool that it goes to was found to have room for what was accepted before.
fn grow(sight: &Sight<'_>, status: &mut VolumeStatus) -> Result<(), Undecided> {
    let (Some(size), Some(pool)) = (status.size, status.pool.clone()) else { return Ok(()) };
    let is_said = |reason| status.conditions.iter().any(|it| it.type_ == RESIZED.to_string() && it.reason == reason);
    if status.granted_for.is_some() || status.r#move.as_ref().is_some_and(|moving| moving.state.holds()) {
        if status.grow_to.is_none() && is_said(growth::AT_NEXT_START) {
            set_resized(sight, status, None);
        }
        return Ok(());
    }
    let (accepted, wanted) = (status.grow_to, sight.volume.spec.size.amount().ok());
    let asked = Asked { what: "its image", pool: &pool, size, accepted, wanted };
    let growth = growth::judge(&asked, || sight.cluster.room_in(&pool));
    if growth.is_undecided {
        return Err(Undecided);
    }
    status.grow_to = growth.grow_to;
    set_resized(sight, status, growth.unmet);
    Ok(())
}

const RESIZED: ConditionType = ConditionType::Resized;

/// The condition is there only while the image has not the size that was asked for.
fn set_resized(sight: &Sight<'_>, status: &mut VolumeStatus, unmet: Option<(&'static str, String)>) {
    match unmet {
        Some((reason, message)) => {
            let generation = sight.volume.metadata.generation;
            let resized = condition(RESIZED, Some(false), reason, &message, generation, &sight.now);
            set_condition(&mut status.conditions, resized);
        }
        None => status.conditions.retain(|condition| condition.type_ != RESIZED.to_string()),
    }
}

/// Who holds it and is not the execution that it was granted for never took it, or ended long ago.
fn settle(sight: &Sight<'_>, status: &VolumeStatus) -> Action {
    let Standing::Held(holder) = status.right().standing(|node, incarnation| sight.cluster.void(node, incarnation))
    else {
        return Action::Rest;
    };
    let is_current = is_granted_to_current(sight, status);
    let can_ask = sight.cluster.session(&holder.node) == Some(holder.incarnation);
    if is_current || !can_ask { Action::Rest } else { Action::Settle { holder } }
}

fn delete(sight: &Sight<'_>, status: &mut VolumeStatus) -> (Action, Option<String>) {
    let Some(pool) = status.pool.clone().filter(|_| !is_lost(status)) else { return (Action::RemoveFinalizer, None) };
    let void = |node: &_, incarnation| sight.cluster.void(node, incarnation);
    if let Standing::Held(holder) = status.right().standing(void) {
        if sight.cluster.session(&holder.node) != Some(holder.incarnation) {
            return (Action::Rest, Some(waits_for("it", &holder.node)));
        }
        // Without `grantedFor` the grant was made for the deletion.
        let action = match status.granted_for {
            Some(_) => settle(sight, status),
            None => Action::Delete { holder },
        };
        return (action, None);
    }
    let right = status.right();
    let last = right.holder.as_ref().map(|holder| holder.node.clone());
    let members = sight.cluster.reachable_members(&pool);
    let member = members.iter().find(|(node, _)| Some(node) == last.as_ref()).or(members.first());
    let Some((node, incarnation)) = member else {
        let message = format!(
            "waits for a node of storage pool {pool} with a control session, since only that can remove the image"
        );
        return (Action::Rest, Some(message));
    };
    match right.granted(node, *incarnation, void) {
        Ok(right) => {
            status.set_right(right);
            status.granted_for = None;
            (Action::Rest, None)
        }
        Err(error) => (Action::Rest, Some(error.to_string())),
    }
}

fn finish(
    sight: &Sight<'_>,
    mut status: VolumeStatus,
    action: Action,
    wait: Option<String>,
    moving: Option<moving::Action>,
) -> Decision {
    complete(sight.volume, &mut status, wait, &sight.now);
    let changed = Some(&status) != sight.volume.status.as_ref();
    Decision { status: changed.then(|| Box::new(status)), action, moving, is_undecided: false }
}

/// Makes phase and conditions agree with the rest, so that one write says it all.
pub fn complete(volume: &Volume, status: &mut VolumeStatus, wait: Option<String>, now: &Time) {
    let is_deleting = volume.metadata.deletion_timestamp.is_some();
    let (is_made, is_bound) = (status.size.is_some(), status.bound_to.is_some());
    status.observed_generation = volume.metadata.generation;
    status.phase = Some(match (is_deleting, is_bound, is_made) {
        (true, ..) => VolumePhase::Deleting,
        _ if is_lost(status) => VolumePhase::Lost,
        (false, true, _) => VolumePhase::Bound,
        (false, false, true) => VolumePhase::Available,
        (false, false, false) => VolumePhase::Pending,
    });
    let created = if is_made { ("ImageExists", "") } else { ("NotMade", "its image is made at the first start") };
    let bound = match (&status.bound_to, wait) {
        (Some(bound), _) if is_deleting => {
            ("InUse", format!("is deleted once Workspace {} is deleted, which binds it", bound.name))
        }
        (Some(bound), _) => ("Bound", format!("to Workspace {}", bound.name)),
        (None, None) => ("NotBound", String::new()),
        (None, Some(wait)) => ("Waiting", wait),
    };
    let mut set = |kind, is, reason: &str, message: &str| {
        let condition = condition(kind, Some(is), reason, message, volume.metadata.generation, now);
        set_condition(&mut status.conditions, condition);
    };
    set(ConditionType::Created, is_made, created.0, created.1);
    set(ConditionType::Bound, is_bound, bound.0, &bound.1);
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
