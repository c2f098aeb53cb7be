//! The control plane, and the way to it.

use kibo_crds::{Epoch, Incarnation, NodeId};
use kibo_node_daemon::{
    launch::{By, Grant, Taker},
    pool::watch::decide::Watched,
    state::{Life, incarnation_for_hello},
};
use kibo_operator::{node::Void, right::Standing};

use crate::world::{Guest, Step, World, freeze_after, index, instance, node, pool, time};

impl World {
    /// Whether what this incarnation holds counts no more; as the index of the Nodes says it.
    fn void(&self, node: &NodeId, incarnation: Incarnation) -> Option<Void> {
        let at = index(node);
        if self.isolated[at] >= Some(incarnation) {
            return Some(Void::Isolated);
        }
        (self.minted[at] > incarnation).then_some(Void::IncarnationEnded)
    }

    /// The leader lets go of what is void: execution and holder.
    fn let_go_of_the_void(&mut self) {
        if let Some((node, incarnation, _)) = &self.execution
            && self.void(node, *incarnation).is_some()
        {
            self.execution = None;
        }
        if let Some(right) = self.right.voided(|node, incarnation| self.void(node, incarnation)) {
            self.right = right;
        }
    }

    /// A start is committed for a host with a session.
    pub(crate) fn grant(&mut self, at: usize, epochs: u64) -> Option<()> {
        let host = &self.hosts[at];
        let lived = host.life.filter(|_| host.session && host.guest.is_none())?;
        let void = |node: &NodeId, incarnation| self.void(node, incarnation);
        // All hosts are alike: the first of them is the first.
        if self.right.epoch.is_none() && at > 0 {
            return None;
        }
        if self.execution.is_some() || self.right.standing(void) != Standing::Grantable {
            return None;
        }
        let right = self.right.granted(&node(at), lived, void).ok()?;
        let epoch = right.epoch.filter(|epoch| epoch.0 <= epochs)?;
        self.execution = Some((node(at), lived, instance(epoch)));
        self.right = right;
        Some(())
    }

    /// The host hears of the execution that is its own, and does not know it.
    pub(crate) fn deliver(&mut self, at: usize) -> Option<()> {
        let (holder, incarnation, instance) = self.execution.clone()?;
        let host = &self.hosts[at];
        if index(&holder) != at || !host.session || host.guest.is_some() {
            return None;
        }
        let grant = Grant::try_from(&self.right.grant()?).ok()?;
        let taker = Taker { node: holder, incarnation, by: By::Instance(instance) };
        let watched = Watched::begin([pool()], time(0), false, freeze_after());
        self.hosts[at].guest = Some(Guest { taker, grant, step: Step::Begun, watched, overtime: 0 });
        Some(())
    }

    /// Events that the host has spooled.
    pub(crate) fn report(&mut self, at: usize) -> Option<()> {
        let host = &self.hosts[at];
        let guest = host.guest.as_ref().filter(|_| host.session)?;
        let Step::Closed(used) = guest.step else { return None };
        let (epoch, instance): (Epoch, _) = (guest.grant.epoch, guest.taker.instance()?);
        if self.execution.as_ref().is_some_and(|(_, _, running)| *running == instance) {
            self.execution = None;
        }
        if let Some(right) = self.right.after(&node(at), epoch, used, true) {
            self.right = right;
        }
        self.hosts[at].guest = None;
        Some(())
    }

    /// Somebody asserts that the host can write no more.
    pub(crate) fn isolate(&mut self, at: usize) -> Option<()> {
        let host = &self.hosts[at];
        if host.session || self.isolated[at] >= Some(self.minted[at]) {
            return None;
        }
        let may_write = host.pool && !host.is_harmless(self.marks[at]);
        self.left.isolations = self.left.isolations.checked_sub(1)?;
        self.isolated[at] = Some(self.minted[at]);
        self.wrong |= may_write;
        self.let_go_of_the_void();
        Some(())
    }

    pub(crate) fn cut_from_control(&mut self, at: usize) -> Option<()> {
        if !self.hosts[at].session {
            return None;
        }
        self.left.cuts_from_control = self.left.cuts_from_control.checked_sub(1)?;
        self.hosts[at].session = false;
        Some(())
    }

    /// A Hello, and what comes of it.
    pub(crate) fn connect(&mut self, at: usize) -> Option<()> {
        let host = &self.hosts[at];
        if !host.daemon || host.session {
            return None;
        }
        let boot = |rebooted| if rebooted { "after" } else { "before" };
        let life = host.life.map(|incarnation| Life { incarnation, boot_id: boot(false).to_owned() });
        let runs_anything = host.guest.as_ref().is_some_and(|guest| !matches!(guest.step, Step::Closed(_)));
        // Only who sees the pool, and has nothing left to tell.
        let dead = self.marks[at].filter(|_| host.pool && host.guest.is_none());
        match incarnation_for_hello(life.as_ref(), boot(host.rebooted), runs_anything, dead) {
            Some(lived) if self.isolated[at] >= Some(lived) => self.destroy(at),
            Some(_) => self.hosts[at].session = true,
            None => {
                let new = Incarnation(self.minted[at].0 + 1);
                self.minted[at] = new;
                let host = &mut self.hosts[at];
                (host.life, host.rebooted, host.session) = (Some(new), false, true);
                self.let_go_of_the_void();
            }
        }
        Some(())
    }

    /// It is told that it was isolated. Its life ends when nothing of it is left.
    fn destroy(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        match &mut host.guest {
            Some(Guest { step: Step::Closed(_), .. }) | None => host.life = None,
            Some(guest) => guest.reap(),
        }
    }
}
