//! The daemon: its rooms, put together.

use std::{fs, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use kibo_crds::NodeId;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::{
    accelerator,
    config::Config,
    host::Host,
    instance::{Bounds, Deps, Instances},
    log_store::{LogBounds, LogStore},
    network::Network,
    pool::Pools,
    session::{self, Node, NodeParts, Outcome},
    spool::EventSpool,
    state::{Credentials, NodeState, StateDir},
    vmm::{Vmm, list_processes},
};

/// For a supervisor: start again, this node begins a new life.
const ISOLATED: u8 = 3;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// A pool that hangs holds its thread; the process does not wait for it.
const LAST_THREADS: Duration = Duration::from_secs(1);

/// Runs until it is asked to end.
pub fn run(config: Config) -> anyhow::Result<ExitCode> {
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("failed to start the threads of the daemon")?;
    let outcome = runtime.block_on(serve(Arc::new(config)));
    runtime.shutdown_timeout(LAST_THREADS);
    match outcome? {
        Outcome::Shutdown => {
            tracing::info!("the daemon ends; its VMs go on");
            Ok(ExitCode::SUCCESS)
        }
        Outcome::Isolated => Ok(ExitCode::from(ISOLATED)),
    }
}

/// Takes the guests' network off the host, in the place of a daemon that was killed.
pub fn remove_network(config: &Config) -> anyhow::Result<()> {
    let Some(network) = config.network.clone() else {
        anyhow::bail!("there is no [network] section: nothing was made")
    };
    // Held: no daemon runs meanwhile.
    let dir = StateDir::open(&config.state_dir)?;
    let id = node_id(config, &dir)?;
    let running = list_processes(id.as_str(), &config.state_dir).context("failed to list the processes")?;
    if let Some((instance, process)) = running.first() {
        anyhow::bail!("the VM of {instance} runs (process {}): stop its Workspace first", process.pid);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async { Ok(Network::new(network, id, &config.state_dir)?.close().await?) })
}

/// Each VM costs about eight descriptors, and the usual soft limit of 1024 is only there for programs that use select().
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::debug!(%error, ?limit, "failed to raise the limit of open descriptors");
    }
}

async fn serve(config: Arc<Config>) -> anyhow::Result<Outcome> {
    let shutdown = shutdown_signal()?;
    let dir = StateDir::open(&config.state_dir)?;
    let state = NodeState::open(&dir)?;
    let id = node_id(&config, &dir)?;
    let boot_id = fs::read_to_string(BOOT_ID).with_context(|| format!("failed to read {BOOT_ID}"))?.trim().to_owned();
    tracing::info!(node = %id, version = kibo_protocol::RELEASE, accelerator = %config.vmm.accelerator, "starting");

    let pools = Pools::open_but(&config.storage_pools, config.fence, &id, &state.get().lost_pools);
    let pools = Arc::new(pools.context("failed to watch the storage pools")?);
    // After a boot of the host nothing of the life before is left that could write.
    let life = state.get().life.filter(|life| life.boot_id == boot_id);
    pools.live(life.map(|life| life.incarnation));
    let spool = Arc::new(EventSpool::open(&config.spool_dir())?);
    let vmm = Vmm::open(config.vmm.clone(), id.clone(), config.state_dir.clone(), Vmm::own_program())?;
    let network = open_network(&config, &id).await?;
    let logs = config.state_dir.join("logs");
    let logs = LogStore::open(logs.clone(), LogBounds::default())
        .with_context(|| format!("failed to open the logs in {}", logs.display()))?;
    let deps = Deps {
        images_dir: config.images.dir.clone(),
        vmm,
        network: network.clone(),
        pools: Arc::clone(&pools),
        spool: Arc::clone(&spool),
        logs: Arc::new(logs),
        bounds: Bounds::of(config.vmm.accelerator),
    };
    let vmm = deps.vmm.clone();
    let instances = Instances::recover(deps).await?;
    // After the recovery, which clears what a proof left that was cut off; what runs already is not affected by either.
    let limit = accelerator::limit(config.vmm.accelerator);
    let proved = tokio::select! {
        proved = accelerator::prove(&vmm, &boot_id, limit) => proved.map(Some),
        () = shutdown.cancelled() => Ok(None),
    };
    let outcome = match proved {
        Ok(Some(disk_io)) => {
            vmm.use_aio(disk_io);
            let host = Host::start(config.host.proc.clone(), vmm.cgroups_of_host());
            let instances = instances.clone();
            let parts = NodeParts { id, boot_id, config, dir, state, pools, spool, host, instances };
            Ok(session::run(Arc::new(Node::new(parts)), shutdown).await)
        }
        Ok(None) => Ok(Outcome::Shutdown),
        Err(error) => Err(error.into()),
    };
    if let Some(network) = network
        && instances.list().is_empty()
        && let Err(error) = network.close().await
    {
        tracing::warn!(%error, "the rules of the guests' network stay on this host");
    }
    outcome
}

async fn open_network(config: &Config, id: &NodeId) -> anyhow::Result<Option<Network>> {
    if let Some(network) = config.network.clone() {
        return Ok(Some(Network::open(network, id.clone(), &config.state_dir).await?));
    }
    tracing::info!("guests have no network: the configuration has no [network] section");
    Ok(None)
}

/// Who this node is: what the configuration says, else what it was enrolled as, else what it is to enroll with says.
fn node_id(config: &Config, dir: &StateDir) -> anyhow::Result<NodeId> {
    let enrolled = Credentials::load(dir)?.map(|credentials| credentials.node_id);
    match (&config.node.id, enrolled) {
        (Some(configured), Some(enrolled)) if *configured != enrolled => anyhow::bail!(
            "node.id = {configured:?}, but this host is enrolled as {enrolled}: a node's name never changes; \
             give the old one, or an empty state_dir to become another node"
        ),
        (Some(id), _) => Ok(id.clone()),
        (None, Some(id)) => Ok(id),
        (None, None) => {
            let (_, id) = session::Proof::read(&config.control)
                .context("node.id: is required as long as neither a key nor something to enroll with says it")?;
            Ok(id)
        }
    }
}

fn shutdown_signal() -> anyhow::Result<CancellationToken> {
    let shutdown = CancellationToken::new();
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let mut received = signal(kind).context("failed to listen for signals")?;
        let shutdown = shutdown.clone();
        tokio::spawn(async move {
            if received.recv().await.is_some() {
                shutdown.cancel();
            }
        });
    }
    Ok(shutdown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_of_descriptors_becomes_the_hard_one() {
        raise_descriptor_limit();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
