//! The next step of a move. Pure.
//!
//! A move is in one of three places. Before the commit (Copying) the object is in the old pool, and what lies in the new
//! one is left over if it is given up. The commit is one guarded write of the object's status, which puts the object
//! into the new pool; from then on (Removing) the old copy is what is left over. A move that is given up before
//! (Cancelling) can never be committed, since the commit is decided on the stored Copying; once the copying node has let
//! go, the object is free (Clearing), also while the pool that it was to go to hangs. `leftover` names the pool with
//! bytes to be removed from the moment before they can exist to the moment after they are gone, so that nobody forgets
//! them, whatever becomes of the node.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{
    Bytes, Epoch, Incarnation, MoveRequest, MoveState, MoveStatus, NodeId, PoolId,
    node::{Holder, HolderEnd},
};
use kibo_protocol::v1;

use super::heard::{Heard, Removal, Word};
use crate::{
    right::{NotGranted, Right, Standing, waits_for},
    space::Fit,
    workspace::sight::Cluster,
};

/// Reasons of a move that somebody gave up; with any other it failed.
const CANCELLED: &str = "Cancelled";
const DELETED: &str = "Deleted";
/// Of a move that is done but for the old copy, from before its removal is ordered: it may not be whole any more.
const OLD_COPY_GOES: &str = "OldCopyGoes";

/// Everything that a decision depends on.
pub struct Sight<'a> {
    /// For people: "the Volume", "the writable layer".
    pub name: &'a str,
    pub request: Option<&'a MoveRequest>,
    pub status: Option<&'a MoveStatus>,
    /// Where the image is, and its size; `None`: there is none.
    pub image: Option<(PoolId, Bytes)>,
    /// A size that was accepted, and that it gets at the next start.
    pub grows_to: Option<Bytes>,
    pub right: Right,
    pub is_deleting: bool,
    /// An execution uses it, or a start is about to.
    pub in_use: bool,
    pub heard: Heard,
    pub cluster: &'a dyn Cluster,
    pub now: Time,
}

/// What to do once the status is written.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// A grant that nobody uses any more: hear from its node what became of it.
    Settle { holder: Holder },
    /// Have it copied, under the current grant.
    Copy { node: NodeId, incarnation: Incarnation, to: PoolId },
    /// Have what is left over removed.
    Discard { node: NodeId, incarnation: Incarnation, pool: PoolId, epoch: Epoch },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    pub status: Option<MoveStatus>,
    pub right: Right,
    /// Where the image is from now on; `None`: it stays where it is.
    pub pool: Option<PoolId>,
    pub action: Option<Action>,
    /// Nothing of this counts: it depends on what is about to be stored elsewhere, and is to be decided again soon.
    pub is_undecided: bool,
}

pub fn decide(sight: &Sight<'_>) -> Decision {
    let mut next = Next {
        sight,
        decision: Decision {
            status: sight.status.cloned(),
            right: sight.right.clone(),
            pool: None,
            action: None,
            is_undecided: false,
        },
    };
    let Some(mut status) = next.current() else { return next.decision };
    match status.state {
        MoveState::Pending => next.begin(&mut status),
        MoveState::Copying => next.copy(&mut status),
        MoveState::Cancelling => next.cancel(&mut status),
        MoveState::Clearing => next.clear(&mut status),
        MoveState::Removing => next.remove(&mut status),
        MoveState::Finished | MoveState::Failed | MoveState::Cancelled => {}
    }
    next.decision.status = Some(status);
    next.decision
}

struct Next<'a> {
    sight: &'a Sight<'a>,
    decision: Decision,
}

fn explain(status: &mut MoveStatus, reason: &str, message: impl Into<String>) {
    status.reason = Some(reason.chars().take(128).collect());
    let message: String = message.into();
    status.message = (!message.is_empty()).then(|| message.chars().take(1024).collect());
}

/// What it waits for now, after why it was given up.
const NOW: &str = "; now: ";

fn note(status: &mut MoveStatus, wait: &str) {
    let message = match plain(status) {
        Some(why) => format!("{why}{NOW}{wait}"),
        None => wait.to_owned(),
    };
    status.message = Some(message.chars().take(1024).collect());
}

fn plain(status: &MoveStatus) -> Option<String> {
    // Only what is given up has a reason of its own.
    let is_given_up = matches!(status.state, MoveState::Cancelling | MoveState::Clearing);
    let message = status.message.as_deref().filter(|_| is_given_up)?;
    Some(message.split_once(NOW).map_or(message, |(why, _)| why).to_owned())
}

fn names(nodes: &BTreeSet<NodeId>) -> String {
    if nodes.is_empty() {
        return "no node".to_owned();
    }
    nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn give_up(status: &mut MoveStatus, reason: &str, message: &str) {
    status.state = MoveState::Cancelling;
    explain(status, reason, message);
}

impl Next<'_> {
    /// The move that is under way, or the one that was just asked for.
    fn current(&self) -> Option<MoveStatus> {
        let stored = self.sight.status.cloned();
        if let Some(open) =
            stored.clone().filter(|status| !matches!(status.state, MoveState::Pending) && is_open(status))
        {
            return Some(open);
        }
        let Some(request) = self.sight.request else {
            return stored.map(|mut status| {
                if status.state == MoveState::Pending {
                    self.end(&mut status, MoveState::Cancelled, CANCELLED, "it was taken back before it began");
                }
                status
            });
        };
        match stored.filter(|status| status.answers(request)) {
            Some(answer) => Some(answer),
            None if self.sight.is_deleting => self.sight.status.cloned(),
            None => Some(MoveStatus {
                request_id: request.request_id.clone(),
                to: request.to.clone(),
                state: MoveState::Pending,
                from: None,
                node: None,
                incarnation: None,
                epoch: None,
                leftover: None,
                copied_bytes: None,
                total_bytes: None,
                started_at: self.sight.now.clone(),
                finished_at: None,
                reason: None,
                message: None,
            }),
        }
    }

    fn end(&self, status: &mut MoveStatus, state: MoveState, reason: &str, message: impl Into<String>) {
        status.state = state;
        status.finished_at = Some(self.sight.now.clone());
        explain(status, reason, message);
    }

    fn fail(&self, status: &mut MoveStatus, reason: &str, message: impl Into<String>) {
        self.end(status, MoveState::Failed, reason, message);
    }

    /// One of the two pools that was declared lost.
    fn lost<'p>(&self, status: &'p MoveStatus, from: &'p PoolId) -> Option<&'p PoolId> {
        [from, &status.to].into_iter().find(|pool| self.sight.cluster.is_lost(pool))
    }

    fn members(&self, pool: &PoolId) -> BTreeSet<NodeId> {
        self.sight.cluster.members(pool).into_iter().collect()
    }

    /// Refuses it, says what it waits for, or begins.
    fn begin(&mut self, status: &mut MoveStatus) {
        let sight = self.sight;
        if sight.is_deleting {
            return self.end(status, MoveState::Cancelled, DELETED, "it is being deleted");
        }
        let Some((from, size)) = sight.image.clone() else {
            let message = format!("{} has no image yet, which is made at the first start", sight.name);
            return self.fail(status, "NoImage", message);
        };
        if from == status.to {
            status.from = Some(from);
            return self.end(status, MoveState::Finished, "AlreadyThere", "it is there");
        }
        if sight.in_use {
            let message = format!(
                "{} is in use: stop the Workspace first, or let its export or import end; then ask again",
                sight.name
            );
            return self.fail(status, "InUse", message);
        }
        if let Some(lost) = self.lost(status, &from) {
            return self.fail(status, "PoolLost", format!("storage pool {lost} was declared lost"));
        }
        let (there, here) = (self.members(&status.to), self.members(&from));
        if there.is_disjoint(&here) {
            let message = format!(
                "no node is attached to both storage pools: {from} is attached to {}; {} to {}",
                names(&here),
                status.to,
                names(&there)
            );
            return self.fail(status, "NotAttached", message);
        }
        if let Standing::Held(holder) = sight.right.standing(|node, incarnation| sight.cluster.void(node, incarnation))
        {
            if sight.cluster.session(&holder.node) == Some(holder.incarnation) {
                self.decision.action = Some(Action::Settle { holder });
                return explain(status, "NotReleased", "");
            }
            return explain(status, "HolderUnreachable", waits_for(sight.name, &holder.node));
        }
        self.grant(status, &from, size);
    }

    /// Gives a node that reaches both pools the grant to copy.
    fn grant(&mut self, status: &mut MoveStatus, from: &PoolId, size: Bytes) {
        let sight = self.sight;
        let there = sight.cluster.reachable_members(&status.to);
        let mut both = sight.cluster.reachable_members(from);
        both.retain(|member| there.contains(member));
        let last = sight.right.holder.as_ref().map(|holder| holder.node.clone());
        both.sort_by_key(|(node, _)| Some(node) != last.as_ref());
        let Some((node, incarnation)) = both.first().cloned() else {
            let both = &self.members(&status.to) & &self.members(from);
            let message = format!(
                "waits for a control session of a node that reaches storage pools {from} and {} now; attached to both: {}",
                status.to,
                names(&both)
            );
            return explain(status, "NodeUnreachable", message);
        };
        let is_first = status.state == MoveState::Pending;
        let needed = sight.grows_to.map_or(size, |to| to.max(size));
        let room = sight.cluster.free_in(&node, &status.to).filter(|_| is_first);
        match room.map(|room| (room.fit(needed), room.left)) {
            Some((Fit::Undecided, _)) => return self.decision.is_undecided = true,
            Some((Fit::No, free)) => {
                let message =
                    format!("storage pool {} has {free} free, the image of {needed} needs as much", status.to);
                return self.fail(status, "PoolFull", message);
            }
            Some((Fit::Yes, _)) | None => {}
        }
        let void = |node: &NodeId, incarnation| sight.cluster.void(node, incarnation);
        match sight.right.granted(&node, incarnation, void) {
            Ok(right) => {
                status.state = MoveState::Copying;
                (status.from, status.leftover) = (Some(from.clone()), Some(status.to.clone()));
                (status.node, status.incarnation) = (Some(node), Some(incarnation));
                (status.epoch, status.copied_bytes) = (right.epoch, Some(Bytes(0)));
                (status.reason, status.message) = (None, None);
                self.decision.right = right;
            }
            // Somebody uses it whom no grant of this move names: an older store was put back, and told of that since.
            Err(error @ NotGranted::Held(_)) if !is_first => give_up(status, error.reason(), &error.to_string()),
            Err(error) => explain(status, error.reason(), error.to_string()),
        }
    }

    /// The node that holds the object for this move.
    fn holder(&self, status: &MoveStatus) -> Option<Holder> {
        let holder = self.decision.right.holder.clone()?;
        (!holder.idle && Some(holder.epoch) == status.epoch).then_some(holder)
    }

    fn word(&self, holder: &Holder) -> Option<&Word> {
        let word = self.sight.heard.word.as_ref()?;
        (word.node == holder.node && word.epoch == holder.epoch).then_some(word)
    }

    fn copy(&mut self, status: &mut MoveStatus) {
        let sight = self.sight;
        let is_wanted = sight.request.is_some_and(|request| status.answers(request));
        if sight.is_deleting || !is_wanted {
            let (reason, message) =
                if sight.is_deleting { (DELETED, "it is being deleted") } else { (CANCELLED, "it was taken back") };
            return give_up(status, reason, message);
        }
        if let Some(lost) = status.from.as_ref().and_then(|from| self.lost(status, from)) {
            let message = format!("storage pool {lost} was declared lost");
            return give_up(status, "PoolLost", &message);
        }
        let Some(holder) = self.holder(status) else {
            // Its node's incarnation is over: another one, or the same in its next life, begins anew.
            if let Some((from, size)) = sight.image.clone() {
                self.grant(status, &from, size);
            }
            return;
        };
        if let Some(word) = self.word(&holder).cloned() {
            status.total_bytes = Some(Bytes(word.total)).filter(|total| total.0 > 0).or(status.total_bytes);
            status.copied_bytes = Some(Bytes(word.copied));
            match word.state {
                v1::MoveState::Copied => return self.commit(status),
                v1::MoveState::Failed if word.failure == v1::ObjectFailure::PoolUnavailable => {
                    explain(status, "PoolUnavailable", format!("node {}: {}", holder.node, word.message));
                }
                v1::MoveState::Failed => {
                    let reason = match word.failure {
                        v1::ObjectFailure::NoSpace => "PoolFull",
                        v1::ObjectFailure::HolderConflict => "HolderConflict",
                        _ => "StorageFailed",
                    };
                    return give_up(status, reason, &format!("node {}: {}", holder.node, word.message));
                }
                _ if word.message.is_empty() => (status.reason, status.message) = (None, None),
                _ => explain(status, "NodeWaits", format!("node {}: {}", holder.node, word.message)),
            }
        }
        if sight.cluster.session(&holder.node) != Some(holder.incarnation) {
            if !sight.cluster.is_settling() {
                explain(
                    status,
                    "NodeUnreachable",
                    waits_for(&format!("{}, which it copies", sight.name), &holder.node),
                );
            }
            return;
        }
        if status.reason.as_deref() == Some("NodeUnreachable") {
            (status.reason, status.message) = (None, None);
        }
        let Holder { node, incarnation, .. } = holder;
        self.decision.action = Some(Action::Copy { node, incarnation, to: status.to.clone() });
    }

    /// The object is in the new pool.
    fn commit(&mut self, status: &mut MoveStatus) {
        status.state = MoveState::Removing;
        status.leftover.clone_from(&status.from);
        (status.reason, status.message) = (None, None);
        self.decision.pool = Some(status.to.clone());
    }

    fn cancel(&mut self, status: &mut MoveStatus) {
        // First, since the object can be used then: where it is, a move only reads.
        if self.settle(status) {
            return;
        }
        status.message = plain(status);
        status.state = MoveState::Clearing;
        self.clear(status);
    }

    fn clear(&mut self, status: &mut MoveStatus) {
        if self.discard(status) {
            return;
        }
        let reason = status.reason.clone().unwrap_or_default();
        let is_wish = reason == CANCELLED || reason == DELETED;
        let message = plain(status).unwrap_or_default();
        self.end(status, if is_wish { MoveState::Cancelled } else { MoveState::Failed }, &reason, message);
    }

    fn remove(&mut self, status: &mut MoveStatus) {
        // First, since the object can be used then.
        if self.settle(status) {
            return;
        }
        if status.leftover.is_some() && !is_marked_there(status, &self.decision.right) && !self.sight.is_deleting {
            return self.mark_there(status);
        }
        if status.leftover.is_some() {
            status.reason = Some(OLD_COPY_GOES.to_owned());
        }
        if self.discard(status) {
            return;
        }
        status.state = MoveState::Finished;
        status.finished_at = Some(self.sight.now.clone());
        (status.reason, status.message) = (None, None);
    }

    /// The copier's life ended before it marked the new copy as the object: another member of that pool is granted it, and
    /// leaves a record there when it says what became of the grant.
    fn mark_there(&mut self, status: &mut MoveStatus) {
        let sight = self.sight;
        let Some((node, incarnation)) = sight.cluster.reachable_members(&status.to).into_iter().next() else {
            if !sight.cluster.is_settling() {
                let members = names(&self.members(&status.to));
                let wait = format!(
                    "waits for a node that reaches storage pool {}, to mark the copy there as the object before the old one is removed (members: {members})",
                    status.to
                );
                note(status, &wait);
            }
            return;
        };
        match self.decision.right.granted(&node, incarnation, |node, incarnation| sight.cluster.void(node, incarnation))
        {
            Ok(right) => {
                status.epoch = right.epoch;
                (status.node, status.incarnation) = (Some(node), Some(incarnation));
                self.decision.right = right;
            }
            Err(error) => note(status, &error.to_string()),
        }
    }

    /// Ends the grant of this move. Whether something of that is left to be done.
    fn settle(&mut self, status: &mut MoveStatus) -> bool {
        let Some(holder) = self.holder(status) else { return false };
        if self.sight.cluster.session(&holder.node) == Some(holder.incarnation) {
            self.decision.action = Some(Action::Settle { holder });
        } else if !self.sight.cluster.is_settling() {
            note(status, &waits_for(self.sight.name, &holder.node));
        }
        true
    }

    /// Has what is left over removed by one node after the other. Whether something of that is left to be done.
    fn discard(&mut self, status: &mut MoveStatus) -> bool {
        let Some(pool) = status.leftover.clone() else { return false };
        if self.sight.cluster.is_lost(&pool) {
            status.leftover = None;
            return false;
        }
        let epoch = status.epoch.unwrap_or_default();
        if let Some(discarded) = &self.sight.heard.discarded
            && (&discarded.pool, discarded.epoch) == (&pool, epoch)
        {
            match &discarded.outcome {
                Removal::Removed => {
                    status.leftover = None;
                    return false;
                }
                // What lies there was there before, and stood in the way of the copy: it stays, and the object is free.
                Removal::NotOurs(_) if status.state == MoveState::Clearing => {
                    status.leftover = None;
                    return false;
                }
                Removal::NotOurs(problem) | Removal::Failed(problem) => note(status, problem),
            }
        }
        match self.remover(status, &pool) {
            Some((node, incarnation)) => {
                (status.node, status.incarnation) = (Some(node.clone()), Some(incarnation));
                self.decision.action = Some(Action::Discard { node, incarnation, pool, epoch });
            }
            None if self.sight.cluster.is_settling() => {}
            None => {
                let members = names(&self.members(&pool));
                let wait = format!(
                    "waits for a node that reaches storage pool {pool}, to remove what is left over there (members: {members})"
                );
                note(status, &wait);
            }
        }
        true
    }

    /// Who removes it. One that was asked keeps that as long as it lives this life and is attached: it may be at it.
    fn remover(&self, status: &MoveStatus, pool: &PoolId) -> Option<(NodeId, Incarnation)> {
        let cluster = self.sight.cluster;
        if let (Some(node), Some(incarnation)) = (&status.node, status.incarnation)
            && cluster.void(node, incarnation).is_none()
            && self.members(pool).contains(node)
        {
            return (cluster.session(node) == Some(incarnation)).then(|| (node.clone(), incarnation));
        }
        cluster.reachable_members(pool).into_iter().next()
    }
}

/// Whether the new pool has a record by which nobody can take the object there for what a move left over: the use of the
/// move is recorded as over, a grant after it was refused or taken, or the object was granted since. Before that, what is
/// in the old pool must stay: a control plane that was put back to the time of the copying would remove the new copy.
fn is_marked_there(status: &MoveStatus, right: &Right) -> bool {
    let Some(epoch) = status.epoch else { return true };
    let was_closed = right.previous.as_ref().is_some_and(|previous| {
        let is_closed = matches!(previous.ended, HolderEnd::Released | HolderEnd::Refused);
        // A refusal leaves the holder before it as the previous one.
        previous.epoch < epoch || (previous.epoch == epoch && is_closed)
    });
    match &right.holder {
        Some(holder) => holder.epoch > epoch || (holder.epoch == epoch && holder.idle),
        None => right.epoch > Some(epoch) || was_closed,
    }
}

/// The pool where the object is again, when the one that it was moved to was declared lost before anything used it there
/// and before anything was removed here. To be asked before the object itself counts as lost.
pub fn taken_back(
    moving: Option<&mut MoveStatus>,
    right: &Right,
    is_lost: impl Fn(&PoolId) -> bool,
    now: &Time,
) -> Option<PoolId> {
    let moving = moving.filter(|moving| moving.state == MoveState::Removing)?;
    let from = moving.from.clone().filter(|from| !is_lost(from) && moving.leftover.as_ref() == Some(from))?;
    let is_untouched = right.epoch == moving.epoch && moving.reason.as_deref() != Some(OLD_COPY_GOES);
    if !is_untouched || !is_lost(&moving.to) {
        return None;
    }
    let message = format!(
        "storage pool {} was declared lost before the move there was over: it is in storage pool {from} as it was when it was copied",
        moving.to
    );
    (moving.state, moving.leftover, moving.finished_at) = (MoveState::Failed, None, Some(now.clone()));
    explain(moving, "PoolLost", message);
    Some(from)
}

fn is_open(status: &MoveStatus) -> bool {
    !status.state.is_over()
}
