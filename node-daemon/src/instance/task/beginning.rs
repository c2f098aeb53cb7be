//! How a task comes to its VM: by starting one, or by going on with that of an earlier daemon.

use std::sync::Arc;

use kibo_protocol::v1::{self as protocol, EndReason, instance_event::Kind};

use super::{Task, blocking, network_failed};
use crate::{
    instance::{
        launching,
        machine::{Ending, Input, State},
        releasing,
        stall::DiskPools,
        timeline::Part,
        vm::{RunningVm, Watched},
    },
    network::Mac,
    vmm::{ProcessId, SocketDir, Started, Tap, VmProcess},
};

impl Task {
    /// Takes the objects and starts the VM; the result is the first input.
    pub(super) async fn launch(&mut self) {
        let process = match self.try_launch().await {
            Ok(process) => process,
            Err(ending) => return self.send(Input::LaunchFailed(ending)),
        };
        self.send(Input::Launched);
        if let Err(ending) = self.remember(|record| record.process = Some(process)).await {
            self.send(Input::End(ending));
        }
        kibo_failpoint::reach("vm-recorded").await;
    }

    async fn try_launch(&mut self) -> Result<ProcessId, Ending> {
        self.watched = Some(self.inner.deps.pools.watch(&self.launch, self.grip.clone(), false));
        let (inner, launch) = (self.inner.clone(), self.launch.clone());
        let used: Vec<_> = self.launch.objects().map(|granted| &granted.object.pool).collect();
        let taken = blocking(move || launching::take(&inner.deps, &launch));
        let taken = self.inner.deps.pools.unless_lost(used, taken).await.map_err(|lost| {
            let message = format!("one of its disks is in storage pool {lost}, which was declared lost");
            Ending::new(EndReason::StorageFailed, message)
        })??;
        self.timeline.reach(Part::Objects);
        if !self.record.objects_taken {
            let objects = taken.states();
            // Nothing runs yet: where that cannot be stored, nothing is started.
            let told = Kind::ObjectsTaken(protocol::ObjectsTaken { objects });
            let stored = releasing::try_append(&self.inner.deps, &self.launch, told).await;
            stored.map_err(|error| Ending::new(EndReason::VmmFailed, error.to_string()))?;
            kibo_failpoint::reach("taken-told").await;
            self.remember(|record| record.objects_taken = true).await?;
        }
        let sockets = self.sockets()?;
        let tap = self.attach().await?;
        let started: Started = {
            let (inner, launch, sockets) = (self.inner.clone(), self.launch.clone(), sockets.clone());
            blocking(move || launching::start(&inner.deps, &launch, taken, tap, &sockets)).await?
        };
        let process = started.process.id();
        self.timeline.reach(Part::Process);
        kibo_failpoint::reach("vm-started").await;
        self.watch(started.process, Some(started.complaints), sockets);
        Ok(process)
    }

    /// Makes the guest's network: the address is on the disk before it is used, the rules stand before the tap, and the
    /// tap before the VM.
    async fn attach(&mut self) -> Result<Option<Tap>, Ending> {
        let Some(network) = self.inner.deps.network.clone() else { return Ok(None) };
        let (instance, egress) = (self.launch.instance(), self.launch.egress);
        let address = network.assign(instance, egress).await.map_err(network_failed)?;
        self.remember(|record| record.address = Some(address)).await?;
        kibo_failpoint::reach("address-noted").await;
        let fd = network.attach(instance).await.map_err(network_failed)?;
        kibo_failpoint::reach("tap-made").await;
        Ok(Some(Tap { fd, mac: Mac::of(instance).to_string() }))
    }

    /// Goes on with a VM that an earlier daemon started.
    pub(super) async fn adopt(&mut self, process: VmProcess, sockets: SocketDir) {
        let instance = self.launch.instance();
        tracing::info!(%instance, pid = process.id().pid, "adopting");
        let id = process.id();
        let is_frozen = self.inner.deps.vmm.cgroup(&instance.to_string()).is_frozen();
        self.watched = Some(self.inner.deps.pools.watch(&self.launch, self.grip.clone(), is_frozen));
        self.watch(process, None, sockets);
        let remembered = self.remember(|record| record.process = Some(id)).await;
        self.state = match self.record.ending.clone() {
            // The guest was told to power off after its writeback; whether it has is seen at the VM.
            Some(ending) if ending.reason == EndReason::Stopped && self.record.configured => State::PoweringOff,
            Some(ending) => State::Ending(ending),
            None if self.record.configured => State::Adopting,
            None => State::Booting,
        };
        if let State::Ending(_) = self.state {
            self.grip.kill_process();
        }
        if let Err(ending) = remembered {
            self.send(Input::End(ending));
        }
        self.inner.entered(instance, self.state.reported());
    }

    fn sockets(&self) -> Result<SocketDir, Ending> {
        SocketDir::open(self.directory.path()).map_err(|error| {
            let message = format!("failed to open the directory {}: {error}", self.directory.path().display());
            Ending::new(EndReason::VmmFailed, message)
        })
    }

    fn watch(&mut self, process: VmProcess, complaints: Option<tokio::net::unix::pipe::Receiver>, sockets: SocketDir) {
        let instance = self.launch.instance();
        let deps = &self.inner.deps;
        let log = deps.logs.writer(&self.launch.layer.object.uid, instance);
        let cgroup = deps.vmm.cgroup(&instance.to_string());
        let directory = self.directory.path().to_owned();
        let process = Arc::new(process);
        self.grip.take(process.clone());
        let disks = DiskPools::new(deps.pools.clone(), launching::disk_pools(&self.launch));
        let was_stalled = self.record.stalled;
        let watched = Watched { process, complaints, cgroup, directory, sockets, disks, was_stalled };
        let vm = RunningVm::watch(watched, log, self.record.configured, &self.inputs.sender);
        if let Some(watched) = &self.watched {
            watched.runs();
        }
        self.inner.set_guest(instance, Some(vm.guest.clone()));
        self.vm = Some(vm);
    }
}
