//! How the host is used: sampled every 10 s, and its memory read afresh at each admission.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kibo_crds::{Bytes, InstanceId, Percent};
use kibo_protocol::v1;
use tokio::{sync::watch, time::MissedTickBehavior};

use super::{
    proc::{CpuTicks, Memory, Pressure, Proc},
    tight::Thresholds,
    vms::{Look, VmUsage, Vms},
};
use crate::clock::BootTime;

const EVERY: Duration = Duration::from_secs(10);

/// The host, as its node reports it and admits by it.
#[derive(Debug)]
pub struct Host {
    proc: Proc,
    state: Mutex<State>,
    /// Moves when memory becomes tight, or is so no longer.
    turns: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    vms: Vms,
    thresholds: Thresholds,
    tight_since: Option<BootTime>,
    cpu: Option<CpuTicks>,
    newest: Option<Sample>,
}

#[derive(Clone, Debug)]
struct Sample {
    at: BootTime,
    memory: Option<Memory>,
    vms: Look,
    cpu_idle: Option<Percent>,
    cpu_pressure: Pressure,
    memory_pressure: Pressure,
}

impl Host {
    /// Of the host whose /proc is at `proc` and whose VMs are in the cgroups below `cgroups`.
    pub fn new(proc: PathBuf, cgroups: PathBuf) -> Self {
        let state = State {
            vms: Vms::new(cgroups),
            thresholds: Thresholds::default(),
            tight_since: None,
            cpu: None,
            newest: None,
        };
        Self { proc: Proc::new(proc), state: Mutex::new(state), turns: watch::Sender::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn turns(&self) -> watch::Receiver<u64> {
        self.turns.subscribe()
    }

    /// From now on memory is tight by these thresholds.
    pub fn judge_by(&self, thresholds: Thresholds) {
        let turned = {
            let mut state = self.state();
            state.thresholds = thresholds;
            let memory = self.proc.memory();
            state.turn(memory)
        };
        self.tell(turned);
    }

    /// Whether the host is short of memory at this moment.
    pub fn is_memory_tight(&self) -> bool {
        let (turned, is_tight) = {
            let mut state = self.state();
            let turned = state.turn(self.proc.memory());
            (turned, state.tight_since.is_some())
        };
        self.tell(turned);
        is_tight
    }

    /// One sample. It reads a few files of the kernel, and one for each VM.
    pub fn sample(&self) {
        let turned = {
            let mut state = self.state();
            state.sample(&self.proc);
            let memory = state.newest.as_ref().and_then(|sample| sample.memory);
            state.turn(memory)
        };
        self.tell(turned);
    }

    fn tell(&self, turned: bool) {
        if turned {
            self.turns.send_modify(|turns| *turns = turns.wrapping_add(1));
        }
    }

    /// As the session reports it; `None` before the first sample.
    pub fn report(&self) -> Option<v1::HostUsage> {
        let state = self.state();
        let sample = state.newest.as_ref()?;
        let now = BootTime::now();
        let share = |percent: Option<Percent>| percent.map(Percent::hundredths);
        let vms = sample.vms.all.unwrap_or_default();
        let tight_for = state.tight_since.map(|since| millis(now.since(since)));
        Some(v1::HostUsage {
            age_millis: millis(now.since(sample.at)),
            vm_cpu_milli: vms.cpu.map(|cpu| cpu.0),
            vm_memory_bytes: vms.memory.map(|memory| memory.0),
            memory_available_bytes: sample.memory.map(|memory| memory.available.0),
            memory_total_bytes: sample.memory.map(|memory| memory.total.0),
            memory_tight: (sample.memory.is_some() || tight_for.is_some()).then_some(tight_for.is_some()),
            memory_tight_for_millis: tight_for,
            cpu_idle: share(sample.cpu_idle),
            cpu_pressure_some: share(sample.cpu_pressure.some),
            cpu_pressure_full: share(sample.cpu_pressure.full),
            memory_pressure_some: share(sample.memory_pressure.some),
            memory_pressure_full: share(sample.memory_pressure.full),
        })
    }

    /// What each VM of the host used in the newest sample, of whichever node it is.
    pub fn vms(&self) -> BTreeMap<InstanceId, VmUsage> {
        self.state().newest.as_ref().map(|sample| sample.vms.each.clone()).unwrap_or_default()
    }

    /// Samples for as long as somebody else holds the host.
    pub async fn watch(host: std::sync::Weak<Self>) {
        let mut due = tokio::time::interval(EVERY);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            due.tick().await;
            let Some(host) = host.upgrade() else { return };
            // The files of many VMs take a while.
            let _ = tokio::task::spawn_blocking(move || host.sample()).await;
        }
    }

    /// Takes the first sample, so that the first report has one, and goes on.
    pub fn start(proc: PathBuf, cgroups: PathBuf) -> Arc<Self> {
        let host = Arc::new(Self::new(proc, cgroups));
        host.sample();
        tokio::spawn(Self::watch(Arc::downgrade(&host)));
        host
    }
}

impl State {
    /// Takes a reading of memory in; returns whether memory became tight, or is so no longer.
    fn turn(&mut self, memory: Option<Memory>) -> bool {
        let was = self.tight_since.is_some();
        let is = self.thresholds.is_tight(was, memory);
        if was == is {
            return false;
        }
        self.tight_since = is.then(BootTime::now);
        let (available, total) = memory.map_or((Bytes(0), Bytes(0)), |memory| (memory.available, memory.total));
        if is {
            tracing::warn!(%available, %total, "the host is short of memory: it takes no new Instance");
        } else {
            tracing::info!(%available, %total, "the host has memory again");
        }
        true
    }

    fn sample(&mut self, proc: &Proc) {
        let at = BootTime::now();
        let cpu = proc.cpu();
        let cpu_idle = match (cpu, self.cpu) {
            (Some(now), Some(before)) => now.idle_since(before),
            _ => None,
        };
        let since = self.newest.as_ref().map(|newest| at.since(newest.at));
        self.cpu = cpu;
        self.newest = Some(Sample {
            at,
            memory: proc.memory(),
            vms: self.vms.look(proc, since),
            cpu_idle,
            cpu_pressure: proc.cpu_pressure(),
            memory_pressure: proc.memory_pressure(),
        });
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn write_memory(proc: &std::path::Path, available: u64) {
        fs::write(proc.join("meminfo"), format!("MemTotal: 1000 kB\nMemAvailable: {available} kB\n")).unwrap();
    }

    #[test]
    fn tightness_is_read_afresh_each_time_and_a_turn_is_told_once() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::new(dir.path().to_owned(), dir.path().join("kibotos"));
        let mut turns = host.turns();
        assert!(!host.is_memory_tight(), "nothing was measured");
        for (available, tight, turned) in
            [(99, true, true), (149, true, false), (151, false, true), (120, false, false), (0, true, true)]
        {
            write_memory(dir.path(), available);
            assert_eq!(host.is_memory_tight(), tight, "{available}");
            assert_eq!(turns.has_changed().unwrap(), turned, "{available}");
            turns.mark_unchanged();
        }
        fs::remove_file(dir.path().join("meminfo")).unwrap();
        assert!(host.is_memory_tight(), "until it is read that there is memory again");
        host.judge_by(Thresholds::new(0, 1).unwrap());
        write_memory(dir.path(), 120);
        assert!(!host.is_memory_tight());
    }

    #[test]
    fn what_cannot_be_read_is_absent() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::new(dir.path().to_owned(), dir.path().join("kibotos"));
        assert_eq!(host.report(), None);
        host.sample();
        // But for its age, which grows.
        let told = host.report().map(|told| v1::HostUsage { age_millis: 0, ..told });
        assert_eq!(told, Some(v1::HostUsage::default()));
        write_memory(dir.path(), 50);
        fs::create_dir(dir.path().join("pressure")).unwrap();
        fs::write(dir.path().join("pressure/cpu"), "some avg10=1.00 avg60=2.50 avg300=0.00 total=1\n").unwrap();
        fs::write(dir.path().join("pressure/memory"), "garbage").unwrap();
        fs::write(dir.path().join("stat"), "cpu  0 0 0 100 0 0 0 0 0 0\n").unwrap();
        host.sample();
        fs::write(dir.path().join("stat"), "cpu  30 0 0 170 0 0 0 0 0 0\n").unwrap();
        host.sample();
        let told = host.report().unwrap();
        assert_eq!((told.cpu_idle, told.cpu_pressure_some, told.cpu_pressure_full), (Some(7000), Some(250), None));
        assert_eq!((told.memory_pressure_some, told.vm_memory_bytes), (None, None));
        assert_eq!((told.memory_available_bytes, told.memory_tight), (Some(50 << 10), Some(true)));
        assert!(told.memory_tight_for_millis.is_some());
    }
}
