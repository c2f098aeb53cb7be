//! The reservations.

use std::collections::BTreeMap;

use kibo_crds::{Bytes, InstanceId, PoolId};

use super::{Allocated, Demand};
use crate::{clock::BootTime, instance::Summary};

#[derive(Clone, Debug)]
pub struct Reservation {
    pub instance: InstanceId,
    pub demand: Demand,
    /// Absent once its Go came: then it stays until its Instance is registered.
    pub until: Option<BootTime>,
}

/// By offer id.
#[derive(Debug, Default)]
pub struct Ledger(BTreeMap<String, Reservation>);

impl Ledger {
    pub fn reserve(&mut self, offer_id: String, reservation: Reservation) {
        self.0.insert(offer_id, reservation);
    }

    /// Has no effect once the Go came.
    pub fn revoke(&mut self, offer_id: &str) {
        if self.0.get(offer_id).is_some_and(|reservation| reservation.until.is_some()) {
            self.0.remove(offer_id);
        }
    }

    pub fn forget_expired(&mut self, now: BootTime) {
        self.0.retain(|_, reservation| reservation.until.is_none_or(|until| now <= until));
    }

    pub fn holds(&self, instance: InstanceId) -> bool {
        self.0.values().any(|reservation| reservation.instance == instance)
    }

    pub fn drop_instance(&mut self, instance: InstanceId) {
        self.0.retain(|_, reservation| reservation.instance != instance);
    }

    /// Turns a reservation into one without an end; on an error it is gone.
    pub fn go(&mut self, offer_id: &str, instance: InstanceId, demand: &Demand, now: BootTime) -> Result<(), String> {
        self.forget_expired(now);
        let Some(reservation) = self.0.get_mut(offer_id) else {
            return Err("the reservation is over: the Go came too late".into());
        };
        if reservation.instance != instance
            || reservation.demand.cpu != demand.cpu
            || reservation.demand.memory != demand.memory
        {
            self.0.remove(offer_id);
            return Err("the Go asks for something else than what was offered".into());
        }
        reservation.until = None;
        Ok(())
    }

    /// What is reserved for Instances that are not in the list, and the bytes promised in each pool.
    pub fn totals(&self, instances: &[Summary]) -> (Allocated, BTreeMap<PoolId, Bytes>) {
        let mut allocated = Allocated::default();
        let mut promised: BTreeMap<PoolId, Bytes> = BTreeMap::new();
        let is_listed = |id| instances.iter().any(|instance| instance.id == id);
        for reservation in self.0.values().filter(|reservation| !is_listed(reservation.instance)) {
            allocated.add(reservation.demand.cpu, reservation.demand.memory);
            for (pool, bytes) in &reservation.demand.objects {
                let sum = promised.entry(pool.clone()).or_default();
                *sum = Bytes(sum.0.saturating_add(bytes.0));
            }
        }
        (allocated, promised)
    }
}
