//! The life of one replica: start, stand by, lead, and end in order.

use std::{
    io::IsTerminal as _,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use anyhow::Context as _;
use kibo_crds::{FIELD_MANAGER, Node, OvercommitPolicy, StoragePool, overcommit_policy};
use kube::{
    Api, Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
    runtime::{
        Controller,
        events::{Recorder, Reporter},
        reflector::{Lookup, Store},
        watcher,
    },
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing_subscriber::EnvFilter;

use crate::{
    api,
    cli::{LogFormat, Run},
    cluster,
    context::{Context, Ctx},
    crd_apply,
    health::{self, Readiness},
    leader::{Elector, Leadership},
    node::{self, NodeControl, NodeIndex},
    overcommit::OvercommitIndex,
    session::{Leading, Registry, SessionServer},
    storage_pool::{self, PoolControl, PoolIndex},
    tls::{Authority, service_names},
    watchdog::{self, Watchdog},
    workspace::{Room, Settings},
};

/// Name of the operator's Service, for its certificates.
const SERVICE: &str = "kibotos-operator";
/// Between two attempts to reach an API server that does not answer at start.
const RETRY: Duration = Duration::from_secs(1);
const LISTED_CHECK: Duration = Duration::from_millis(50);
/// What is in work when the leadership ends has this long to come to its end.
const WIND_DOWN: Duration = Duration::from_secs(8);

/// Runs until SIGTERM or SIGINT (`Ok`), or until the leadership is lost (`Err`).
pub fn run(args: Run) -> anyhow::Result<()> {
    start_logging(args.log_format);
    // Fails only when a provider is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    raise_descriptor_limit();
    runtime.block_on(async move {
        let ended = ended()?;
        replica(args, ended).await
    })
}

/// Each session is a connection, and each stream of a guest is one: a fleet needs more than the usual soft limit of
/// 1024, which is only there for programs that use select().
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::debug!(%error, ?limit, "failed to raise the limit of open descriptors");
    }
}

fn start_logging(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,kube_runtime=warn"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Human => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}

/// Cancelled by SIGTERM and SIGINT.
fn ended() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate()).context("failed to listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to listen for SIGINT")?;
    let ended = CancellationToken::new();
    let token = ended.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("asked to end");
        token.cancel();
    });
    Ok(ended)
}

async fn client(args: &Run) -> anyhow::Result<Client> {
    let mut config = match &args.kubeconfig {
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path)
                .with_context(|| format!("failed to read --kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
        }
        None => Config::infer().await.context("found no credentials for the API server: give --kubeconfig")?,
    };
    // A watch ends after five minutes at the latest; nothing else takes that long.
    config.read_timeout = Some(Duration::from_secs(295));
    // Whoever calls tries again on newer facts; the client would repeat an old request for minutes.
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

async fn replica(args: Run, ended: CancellationToken) -> anyhow::Result<()> {
    let readiness = Readiness::default();
    // Ends the listeners, after the leadership.
    let closed = CancellationToken::new();
    let _close = closed.clone().drop_guard();
    health::serve(args.health_listen, readiness.clone(), closed.clone()).await?;
    let client = client(&args).await?;
    let Some((authority, cluster_id)) = until_answered(&ended, async || prepare(&client, &args.namespace).await).await
    else {
        return Ok(());
    };
    let elector = Elector::new(client.clone(), &args.namespace, args.identity.clone(), args.lease_duration());
    let server = listen(&args, &authority, elector.observed_term(), &closed).await?;
    let leadership = tokio::select! {
        leadership = elector.acquire() => leadership?,
        () = ended.cancelled() => return Ok(()),
    };
    metrics::gauge!("kibotos_leader_term").set(term_as_float(leadership.term.0));
    let replica = Replica { args, client, authority, cluster_id, server, readiness };
    replica.lead(leadership, ended).await
}

#[allow(clippy::cast_precision_loss, reason = "a term counts changes of leader")]
fn term_as_float(term: u64) -> f64 {
    term as f64
}

/// What must exist before this replica can listen.
async fn prepare(client: &Client, namespace: &str) -> anyhow::Result<(Authority, String)> {
    let authority = Authority::ensure(client, namespace).await?;
    Ok((authority, cluster::ensure(client, namespace).await?))
}

/// Tries until it works; `None` when asked to end before.
async fn until_answered<T>(ended: &CancellationToken, attempt: impl AsyncFn() -> anyhow::Result<T>) -> Option<T> {
    loop {
        match attempt().await {
            Ok(done) => return Some(done),
            Err(error) => tracing::warn!("cannot start yet, trying again: {error:#}"),
        }
        tokio::select! {
            () = ended.cancelled() => return None,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

async fn listen(
    args: &Run,
    authority: &Authority,
    observed_term: Arc<AtomicU64>,
    closed: &CancellationToken,
) -> anyhow::Result<SessionServer> {
    let serving = authority.serving_certificate(&service_names(SERVICE, &args.namespace, &args.session_name))?;
    let server = SessionServer::new(observed_term, args.enrollment_policy());
    let serve = server.clone().listen(args.session_listen, &serving, closed.clone()).await?;
    tokio::spawn(async move {
        if let Err(error) = serve.await {
            tracing::error!(%error, "the session server ended: exiting");
            std::process::exit(1);
        }
    });
    Ok(server)
}

/// Waits for the first complete list in a store. Asked again and again, since the store wakes only the last of
/// those who wait, and its controller waits too.
async fn until_listed<K>(store: &Store<K>) -> anyhow::Result<()>
where
    K: Lookup<DynamicType: Eq + std::hash::Hash + Clone> + Clone + 'static,
{
    loop {
        if let Ok(listed) = tokio::time::timeout(LISTED_CHECK, store.wait_until_ready()).await {
            return Ok(listed?);
        }
    }
}

struct Replica {
    args: Run,
    client: Client,
    authority: Authority,
    cluster_id: String,
    server: SessionServer,
    readiness: Readiness,
}

impl Replica {
    async fn lead(self, leadership: Leadership, ended: CancellationToken) -> anyhow::Result<()> {
        self.server.elected();
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let started = tokio::select! {
            started = self.start(&leadership, &stop, &tasks) => started,
            () = ended.cancelled() => Ok(()),
            () = leadership.lost() => Err(anyhow::anyhow!("lost the lease while starting to lead")),
        };
        let outcome = match started {
            Ok(()) => tokio::select! {
                () = ended.cancelled() => Ok(()),
                () = leadership.lost() => Err(anyhow::anyhow!("lost the lease: another replica leads")),
                () = stop.cancelled() => Err(anyhow::anyhow!("this leadership was overtaken by a newer one")),
            },
            Err(error) => Err(error),
        };
        self.readiness.set(false);
        self.server.resign();
        stop.cancel();
        tasks.close();
        if tokio::time::timeout(WIND_DOWN, tasks.wait()).await.is_err() {
            tracing::warn!(left = tasks.len(), "not everything came to its end in time");
        }
        if let Err(error) = leadership.release().await {
            tracing::warn!(%error, "another replica has to wait for the end of the lease");
        }
        outcome
    }

    /// Everything that acts starts here, in the order in which it stands on each other. Sessions come last:
    /// before the first Hello the whole desired set is known.
    async fn start(
        &self,
        leadership: &Leadership,
        stop: &CancellationToken,
        tasks: &TaskTracker,
    ) -> anyhow::Result<()> {
        crd_apply::apply(&self.client).await?;
        let pools = Controller::new(Api::<StoragePool>::all(self.client.clone()), watcher::Config::default());
        let nodes = Controller::new(Api::<Node>::all(self.client.clone()), watcher::Config::default());
        let (pool_store, node_store) = (pools.store(), nodes.store());
        let ctx = self.context(leadership, stop, tasks, PoolIndex::new(pool_store.clone()));
        let policy = Api::<OvercommitPolicy>::all(self.client.clone()).get(overcommit_policy::DEFAULT).await;
        ctx.overcommit.observe(&policy.context("failed to read the default OvercommitPolicy")?);
        node::load(&ctx).await.context("failed to list the nodes")?;

        let settings = Settings { strategy: self.args.placement, tombstone_ttl: self.args.tombstone_ttl() };
        let room = Room::open(ctx.clone(), settings).await?;
        let workspaces = room.hooks();
        let streams = api::start(ctx.clone(), room.workspaces(), workspaces.clone(), self.api_options()?).await?;
        let (to_pools, seen_nodes) = tokio::sync::mpsc::unbounded_channel();
        let control = Arc::new(NodeControl::new(ctx.clone(), workspaces.clone(), to_pools));
        let pool_control = Arc::new(PoolControl::new(ctx.clone(), workspaces.clone(), node_store.clone()));
        tasks.spawn(storage_pool::run(pools, pool_control.clone(), seen_nodes));
        tasks.spawn(node::run(nodes, control.clone()));
        until_listed(&pool_store).await?;
        until_listed(&node_store).await?;
        pool_control.nodes_are_known();

        room.run();
        let unowned =
            storage_pool::run_unowned(ctx.clone(), workspaces.clone(), pool_store, self.args.pool_audit_period());
        tasks.spawn(stop.clone().run_until_cancelled_owned(unowned));
        tasks.spawn(stop.clone().run_until_cancelled_owned(watchdog::run(ctx.clone())));
        let leading = Leading {
            nodes: control,
            desired: workspaces.clone(),
            events: workspaces.clone(),
            moves: workspaces,
            streams,
        };
        self.server.lead(Arc::new(leading));
        self.readiness.set(true);
        tracing::info!(term = %leadership.term, cluster = self.cluster_id, "leading: nodes and users are served");
        Ok(())
    }

    fn context(&self, leadership: &Leadership, stop: &CancellationToken, tasks: &TaskTracker, pools: PoolIndex) -> Ctx {
        let reporter = Reporter { controller: FIELD_MANAGER.to_owned(), instance: None };
        Arc::new(Context {
            client: self.client.clone(),
            namespace: self.args.namespace.clone(),
            term: leadership.term,
            history: leadership.history.clone(),
            cluster_id: self.cluster_id.clone(),
            watchdog: Watchdog::new(self.args.periods()),
            clock_period: self.args.clock_period(),
            registry: Registry::default(),
            nodes: NodeIndex::default(),
            pools,
            overcommit: OvercommitIndex::default(),
            recorder: Recorder::new(self.client.clone(), reporter),
            vm_overhead: self.args.vm_overhead,
            stop: stop.clone(),
            tasks: tasks.clone(),
        })
    }

    fn api_options(&self) -> anyhow::Result<api::Options> {
        let names = service_names(SERVICE, &self.args.namespace, &["localhost".to_owned(), "127.0.0.1".to_owned()]);
        let serving = self.authority.serving_certificate(&names)?;
        let reach = match (&self.args.api_service_external_name, self.args.advertise_address) {
            (Some(name), _) => api::Reach::ExternalName(name.clone()),
            (None, Some(address)) => api::Reach::Leader(address),
            (None, None) => api::Reach::Service,
        };
        Ok(api::Options {
            listen: self.args.api_listen,
            session_listen: self.args.session_listen,
            reach,
            serving: api::ServingCertificate { chain: serving.chain, key: serving.key },
            ca_pem: self.authority.ca_pem().to_owned(),
        })
    }
}
