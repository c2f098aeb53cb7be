//! A host: what its daemon does with an object, and what it sees in the pool.

use std::collections::BTreeMap;

use kibo_crds::Epoch;
use kibo_node_daemon::pool::{
    records::{Closing, Conflict, Record, Records, TakeDecision},
    watch::decide::{Dead, FenceSeen, Holding, Order, Pulse, Watched, find_in_fence, find_in_records},
};
use kibo_protocol::v1::ObjectUse;

use crate::world::{Guest, Step, World, freeze_after, index, object, pool, time};

#[derive(Clone, Copy)]
enum Kind {
    Taken,
    Released,
    Refused,
}

/// A record of that name stays as it is.
fn write(records: &mut Records, epoch: Epoch, kind: Kind, record: Record) {
    let of_epoch = records.0.entry(epoch).or_default();
    let place = match kind {
        Kind::Taken => &mut of_epoch.taken,
        Kind::Released => &mut of_epoch.released,
        Kind::Refused => &mut of_epoch.refused,
    };
    place.get_or_insert(record);
}

fn record_of(guest: &Guest) -> Record {
    Record { taker: Some(guest.taker.clone()), grant: guest.grant }
}

impl World {
    /// The daemon's Instance, where the daemon runs and reaches the pool.
    fn at_work(&self, at: usize) -> Option<Guest> {
        let host = &self.hosts[at];
        host.guest.clone().filter(|_| host.daemon && host.pool)
    }

    fn set(&mut self, at: usize, guest: Guest) {
        self.hosts[at].guest = Some(guest);
    }

    /// One step of a take.
    pub(crate) fn take(&mut self, at: usize) -> Option<()> {
        let mut guest = self.at_work(at)?;
        guest.step = match &guest.step {
            Step::Begun => self.list(at, &guest),
            Step::Listed { dead } => {
                for (victim, incarnation) in dead {
                    let mark = &mut self.marks[index(victim)];
                    *mark = (*mark).max(Some(*incarnation));
                }
                Step::Told
            }
            Step::Told => {
                write(&mut self.records, guest.grant.epoch, Kind::Taken, record_of(&guest));
                Step::Linked
            }
            Step::Linked => match self.records.decide_take(&guest.grant, &guest.taker) {
                TakeDecision::AlreadyMine => {
                    self.tell_the_dead(&guest);
                    Step::Ready
                }
                TakeDecision::Conflict(conflict) => self.withdraw(&guest, &conflict),
                TakeDecision::Write => return None,
            },
            Step::Ready => {
                // What is above is what no decision needs any more.
                for settled in self.records.settled_below(guest.grant.epoch) {
                    self.records.0.remove(&settled);
                }
                // It is looked at from here on.
                guest.watched = Watched::begin([pool()], time(self.now), false, freeze_after());
                Step::Runs
            }
            Step::Runs | Step::Reaped | Step::Closed(_) => return None,
        };
        self.set(at, guest);
        Some(())
    }

    fn list(&mut self, at: usize, guest: &Guest) -> Step {
        if let Some(dead) = self.marks[at].filter(|dead| *dead >= guest.taker.incarnation) {
            return self.withdraw(guest, &Conflict::Isolated { dead, lived: guest.taker.incarnation });
        }
        match self.records.decide_take(&guest.grant, &guest.taker) {
            TakeDecision::Write => Step::Listed { dead: self.records.dead_holders(&guest.grant).into_iter().collect() },
            TakeDecision::AlreadyMine => {
                self.tell_the_dead(guest);
                Step::Ready
            }
            TakeDecision::Conflict(conflict) => self.withdraw(guest, &conflict),
        }
    }

    fn tell_the_dead(&mut self, guest: &Guest) {
        for (victim, incarnation) in self.records.dead_holders(&guest.grant) {
            let mark = &mut self.marks[index(&victim)];
            *mark = (*mark).max(Some(incarnation));
        }
    }

    fn withdraw(&mut self, guest: &Guest, conflict: &Conflict) -> Step {
        self.stuck |= matches!(conflict, Conflict::PredecessorHolds { .. } | Conflict::TakenByOther { .. });
        let used = conflict.leaves().unwrap_or_else(|| {
            write(&mut self.records, guest.grant.epoch, Kind::Refused, record_of(guest));
            ObjectUse::Refused
        });
        Step::Closed(used)
    }

    /// The thread of the pool reads it.
    pub(crate) fn look(&mut self, at: usize, sees: bool) -> Option<()> {
        let mut guest = self.at_work(at).filter(|guest| guest.step == Step::Runs)?;
        self.hosts[at].looked = true;
        let holding = Holding { taker: guest.taker.clone(), objects: vec![(object(), guest.grant.epoch)] };
        let dead = self.marks[at].filter(|_| sees).map(|incarnation| Dead { incarnation, unix_millis: 0 });
        let fence = find_in_fence(&guest.taker, &FenceSeen { dead, problem: None });
        let records = if sees { Ok(self.records.clone()) } else { Err("not read".to_owned()) };
        let in_records = find_in_records(&holding, &BTreeMap::from([(object(), records)]));
        let (pool, now) = (pool(), time(self.now));
        let first = guest.watched.learn_of_fence(&pool, now, fence);
        let order = first.or_else(|| guest.watched.learn_of_records(&pool, now, in_records));
        if let Some(Order::Kill { .. }) = order {
            guest.step = Step::Reaped;
        }
        self.set(at, guest);
        Some(())
    }

    pub(crate) fn end(&mut self, at: usize) -> Option<()> {
        self.hosts[at].guest.as_mut().filter(|guest| guest.step == Step::Runs)?.reap();
        Some(())
    }

    /// The records say what became of the grant of an Instance that does not run any more.
    pub(crate) fn close(&mut self, at: usize) -> Option<()> {
        let mut guest = self.at_work(at).filter(|guest| guest.step == Step::Reaped)?;
        let epoch = guest.grant.epoch;
        let used = match self.records.decide_close(epoch, &guest.taker) {
            Closing::Done(used) => used,
            Closing::Release => {
                write(&mut self.records, epoch, Kind::Released, record_of(&guest));
                ObjectUse::Released
            }
            Closing::Refuse => {
                write(&mut self.records, epoch, Kind::Refused, record_of(&guest));
                ObjectUse::Refused
            }
        };
        guest.step = Step::Closed(used);
        self.set(at, guest);
        Some(())
    }

    /// Everything on it is gone but its disk.
    pub(crate) fn crash_host(&mut self, at: usize) -> Option<()> {
        self.left.crashes = self.left.crashes.checked_sub(1)?;
        let host = &mut self.hosts[at];
        (host.daemon, host.session, host.rebooted) = (false, false, true);
        if let Some(guest) = host.guest.as_mut().filter(|guest| !matches!(guest.step, Step::Closed(_))) {
            guest.reap();
        }
        Some(())
    }

    /// Its guest goes on.
    pub(crate) fn crash_daemon(&mut self, at: usize) -> Option<()> {
        let host = &mut self.hosts[at];
        if !host.daemon {
            return None;
        }
        self.left.daemon_crashes = self.left.daemon_crashes.checked_sub(1)?;
        (host.daemon, host.session) = (false, false);
        if let Some(guest) = &mut host.guest
            && matches!(guest.step, Step::Listed { .. } | Step::Told | Step::Linked | Step::Ready)
        {
            guest.step = Step::Begun;
        }
        Some(())
    }

    pub(crate) fn start_daemon(&mut self, at: usize) -> Option<()> {
        let now = time(self.now);
        let host = &mut self.hosts[at];
        if host.daemon {
            return None;
        }
        host.daemon = true;
        if let Some(guest) = &mut host.guest {
            let frozen = matches!(guest.watched.pulse(), Pulse::Frozen { .. });
            let now = if guest.step == Step::Runs { now } else { time(0) };
            guest.watched = Watched::begin([pool()], now, frozen, freeze_after());
        }
        Some(())
    }

    pub(crate) fn cut_from_pool(&mut self, at: usize) -> Option<()> {
        if !self.hosts[at].pool {
            return None;
        }
        self.left.cuts_from_pool = self.left.cuts_from_pool.checked_sub(1)?;
        self.hosts[at].pool = false;
        Some(())
    }

    pub(crate) fn attach_to_pool(&mut self, at: usize) -> Option<()> {
        let host = &mut self.hosts[at];
        if host.pool {
            return None;
        }
        host.pool = true;
        let lived = host.guest.as_ref().map(|guest| guest.taker.incarnation);
        let was_declared_dead = lived.is_some() && self.isolated[at] >= lived;
        // Whoever asserted that it can write no more did not see to that.
        self.wrong |= was_declared_dead && !self.hosts[at].is_harmless(self.marks[at]);
        Some(())
    }
}
