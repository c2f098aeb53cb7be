//! Whether this node takes what it is offered.
//!
//! The node decides by itself, from what it has and not from what the operator believes. What it
//! accepts is reserved for [`RESERVED_FOR`] of the host's boot-time clock; a Go that comes later finds
//! nothing. A reservation stops counting when its Instance is in the list of Instances.

mod decide;
mod ledger;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kibo_crds::{Bytes, InstanceId, MilliCpu, PoolId, Ratio};
use kibo_protocol::v1;

pub use decide::{Allocated, Demand, PoolSpace, Purpose, Refusal, View, decide};
use ledger::{Ledger, Reservation};

use crate::{
    clock::BootTime,
    config::Resources,
    host::{Host, Thresholds},
    instance::Summary,
    launch::{Launch, LaunchRequest, Object, RootImageName},
    pool::Pools,
};

/// How long an accepted offer is kept for its Go.
pub const RESERVED_FOR: Duration = Duration::from_secs(5);

/// What an admin has set for this node, as the admission uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub revision: u64,
    pub drain: bool,
    pub slots: Option<u32>,
    pub cpu_ratio: Ratio,
    pub memory_ratio: Ratio,
    pub memory_tight: Thresholds,
}

impl Settings {
    /// `None` for ratios beyond their range, and for thresholds that are none.
    pub fn read(message: &v1::Settings) -> Option<Self> {
        let memory_tight = match (message.memory_tight_below, message.memory_tight_until_above) {
            (None, None) => Thresholds::default(),
            (below, above) => Thresholds::new(below?, above?)?,
        };
        Some(Self {
            revision: message.revision,
            drain: message.drain,
            slots: message.slots,
            cpu_ratio: Ratio::from_thousandths(message.cpu_ratio)?,
            memory_ratio: Ratio::from_thousandths(message.memory_ratio)?,
            memory_tight,
        })
    }
}

/// The node's admission: its settings and its reservations.
pub struct Admission {
    resources: Resources,
    images: PathBuf,
    pools: Arc<Pools>,
    host: Arc<Host>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    settings: Option<Settings>,
    ledger: Ledger,
}

impl Admission {
    pub fn new(resources: Resources, images: PathBuf, pools: Arc<Pools>, host: Arc<Host>) -> Self {
        Self { resources, images, pools, host, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From here on every decision uses these settings.
    pub fn apply(&self, settings: Settings) {
        self.host.judge_by(settings.memory_tight);
        self.lock().settings = Some(settings);
    }

    /// Of the settings in use; 0 before the first.
    pub fn settings_revision(&self) -> u64 {
        self.lock().settings.map_or(0, |settings| settings.revision)
    }

    /// Accepts and reserves, or refuses. `instances` is everything that is on the node.
    pub fn offer(
        &self,
        offer_id: &str,
        request: &LaunchRequest,
        instances: &[Summary],
        now: BootTime,
    ) -> Result<(), Refusal> {
        let demand = Demand::from(request);
        let mut state = self.lock();
        state.ledger.forget_expired(now);
        if state.ledger.holds(request.instance) || instances.iter().any(|known| known.id == request.instance) {
            let message = format!("{} is on this node or about to start already", request.instance);
            return Err(Refusal { reason: v1::RefuseReason::Stale, message });
        }
        let view = self.view(&state, instances, &request.root_image);
        decide(&demand, &view, Purpose::Offer)?;
        tell(request.instance, &demand, &view);
        let until = Some(now.after(RESERVED_FOR));
        state.ledger.reserve(offer_id.to_owned(), Reservation { instance: request.instance, demand, until });
        Ok(())
    }

    /// Gives a reservation back.
    pub fn revoke(&self, offer_id: &str) {
        self.lock().ledger.revoke(offer_id);
    }

    /// Whether the Go of an accepted offer came in time and for what was reserved. The reservation
    /// stays until [`Self::registered`].
    pub fn go(&self, offer_id: &str, launch: &Launch, now: BootTime) -> Result<(), String> {
        self.lock().ledger.go(offer_id, launch.instance(), &Demand::from(launch), now)
    }

    /// Admits what the control plane holds for this node already, without an offer: a drain does not
    /// count, everything else does. Reserved until [`Self::registered`].
    pub fn committed(&self, launch: &Launch, instances: &[Summary], now: BootTime) -> Result<(), Refusal> {
        let demand = Demand::from(launch);
        let mut state = self.lock();
        state.ledger.forget_expired(now);
        if state.ledger.holds(launch.instance()) {
            return Ok(());
        }
        let view = self.view(&state, instances, &launch.root_image);
        decide(&demand, &view, Purpose::Committed)?;
        tell(launch.instance(), &demand, &view);
        let reservation = Reservation { instance: launch.instance(), demand, until: None };
        state.ledger.reserve(launch.instance().to_string(), reservation);
        Ok(())
    }

    /// The Instance is in the list now, or has ended already.
    pub fn registered(&self, instance: InstanceId) {
        self.lock().ledger.drop_instance(instance);
    }

    fn view(&self, state: &State, instances: &[Summary], root_image: &RootImageName) -> View {
        let (mut allocated, promised) = state.ledger.totals(instances);
        for instance in instances {
            allocated.add_instance(instance);
        }
        let space = |pool: &crate::pool::Pool| {
            let status = pool.status();
            let promised = promised.get(pool.id()).copied().unwrap_or_default();
            let free = status.free.map(|free| free.saturating_sub(promised));
            (pool.id().clone(), PoolSpace { problem: status.problem, free })
        };
        View {
            settings: state.settings,
            resources: self.resources,
            allocated,
            pools: self.pools.iter().map(space).collect(),
            has_root_image: self.has_root_image(root_image),
            is_memory_tight: self.host.is_memory_tight(),
        }
    }

    fn has_root_image(&self, name: &RootImageName) -> bool {
        ["erofs", "squashfs"].iter().any(|suffix| self.images.join(format!("{name}.{suffix}")).is_file())
    }
}

/// What the node counts at the moment of an admission, and by which revision of its settings.
fn tell(instance: InstanceId, demand: &Demand, view: &View) {
    let Some(settings) = view.settings else { return };
    let (cpu, memory) = view.limits(&settings);
    tracing::info!(
        %instance,
        settings = settings.revision,
        cpu = view.allocated.cpu.0.saturating_add(demand.cpu.0),
        cpu_limit = cpu.0,
        memory = view.allocated.memory.0.saturating_add(demand.memory.0),
        memory_limit = memory.0,
        "admitted"
    );
}

/// What the Instances of a list use: those that have ended use nothing.
pub fn allocated(instances: &[Summary]) -> Allocated {
    let mut sum = Allocated::default();
    for instance in instances {
        sum.add_instance(instance);
    }
    sum
}

impl Demand {
    fn new<'o>(cpu: MilliCpu, memory: Bytes, objects: impl Iterator<Item = &'o Object>) -> Self {
        let mut by_pool: BTreeMap<PoolId, Bytes> = BTreeMap::new();
        for object in objects {
            let made = object.grows_from.filter(|_| object.must_exist).unwrap_or(object.size);
            let to_make = if object.must_exist { object.size.saturating_sub(made).0 } else { object.size.0 };
            let sum = by_pool.entry(object.pool.clone()).or_default();
            *sum = Bytes(sum.0.saturating_add(to_make));
        }
        Self { cpu, memory, objects: by_pool }
    }
}

impl From<&LaunchRequest> for Demand {
    fn from(request: &LaunchRequest) -> Self {
        Self::new(request.cpu, request.allocated_memory, request.objects.iter())
    }
}

impl From<&Launch> for Demand {
    fn from(launch: &Launch) -> Self {
        Self::new(launch.cpu, launch.allocated_memory, launch.objects().map(|granted| &granted.object))
    }
}

impl Allocated {
    fn add(&mut self, cpu: MilliCpu, memory: Bytes) {
        self.cpu = MilliCpu(self.cpu.0.saturating_add(cpu.0));
        self.memory = Bytes(self.memory.0.saturating_add(memory.0));
        self.instances = self.instances.saturating_add(1);
    }

    fn add_instance(&mut self, instance: &Summary) {
        if instance.state != v1::InstanceState::Ended {
            self.add(instance.cpu, instance.allocated_memory);
        }
    }
}
