//! How the end-to-end tests run: the tests of one file share one local cluster, each in a namespace
//! and on nodes of its own. The cluster starts with the first test that runs and is taken down after
//! the last, whatever happened; then nothing of it may be left on the host.

mod audit;
pub mod disk;
#[cfg(feature = "failpoints")]
pub mod failpoints;
pub mod host;
pub mod host_files;
pub mod line;
pub mod memory;
pub mod object_store;
pub mod outside;
mod place;
pub mod played;
pub mod program;
pub mod proxy;
pub mod remote;
pub mod replica;
pub mod secrets;
pub mod transcript;
pub mod typed;
mod wait;
pub mod wire;
mod workspaces;

use std::env;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;
use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::local::{Component, LocalCluster, Need, Programs, Progress, leftovers};

pub use place::{Place, Ran};
pub use wait::eventually;
pub use workspaces::{START, STOP, condition, execution, has_failed, is_available, phase_of, why};

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type TestFn = Arc<dyn Fn(Arc<Place>) -> BoxFuture<Result<()>> + Send + Sync>;

/// The tests of one file.
pub struct Suite {
    need: Need,
    operator_args: Vec<&'static str>,
    tests: Vec<Test>,
}

struct Test {
    name: &'static str,
    run: TestFn,
    /// No other test runs meanwhile.
    alone: bool,
}

/// What the tests of one process share.
struct Shared {
    need: Need,
    operator_args: Vec<&'static str>,
    root: PathBuf,
    cluster: OnceCell<Arc<LocalCluster>>,
    turns: RwLock<()>,
}

/// A test's turn, with others or alone.
enum Turn<'a> {
    Alone(#[expect(dead_code, reason = "held, not read")] RwLockWriteGuard<'a, ()>),
    Together(#[expect(dead_code, reason = "held, not read")] RwLockReadGuard<'a, ()>),
}

impl Suite {
    /// Tests that need the API server with the custom resources only.
    pub fn with_control_plane() -> Self {
        Self::with_need(Need::ControlPlane)
    }

    /// Tests that need the operator too, and play the nodes themselves.
    pub fn with_operator() -> Self {
        Self::with_need(Need::Operator)
    }

    /// Tests that need the operator and nodes too.
    pub fn with_everything() -> Self {
        Self::with_need(Need::Everything)
    }

    fn with_need(need: Need) -> Self {
        Self { need, operator_args: Vec::new(), tests: Vec::new() }
    }

    /// What the operator is told beyond the usual.
    #[must_use]
    pub fn operator_args<const N: usize>(mut self, args: [&'static str; N]) -> Self {
        self.operator_args.extend(args);
        self
    }

    /// Adds a test; its name is a sentence in snake case, like that of any other test.
    #[must_use]
    pub fn test<F, R>(self, name: &'static str, test: F) -> Self
    where
        F: Fn(Arc<Place>) -> R + Send + Sync + 'static,
        R: Future<Output = Result<()>> + Send + 'static,
    {
        self.with(name, test, false)
    }

    /// Adds a test that breaks what all share: it runs while no other does.
    #[must_use]
    pub fn alone<F, R>(self, name: &'static str, test: F) -> Self
    where
        F: Fn(Arc<Place>) -> R + Send + Sync + 'static,
        R: Future<Output = Result<()>> + Send + 'static,
    {
        self.with(name, test, true)
    }

    fn with<F, R>(mut self, name: &'static str, test: F, alone: bool) -> Self
    where
        F: Fn(Arc<Place>) -> R + Send + Sync + 'static,
        R: Future<Output = Result<()>> + Send + 'static,
    {
        let run: TestFn = Arc::new(move |place| Box::pin(test(place)));
        self.tests.push(Test { name, run, alone });
        self
    }

    /// Runs the tests that the command line asks for and prints what cargo test prints.
    pub fn run(self) -> ExitCode {
        let args = Arguments::from_args();
        let runtime = Arc::new(Runtime::new().expect("failed to start the async runtime"));
        // Short, because sockets live below it and their paths may have 107 bytes only.
        let root = env::temp_dir().join(format!("kibo-e2e-{}", std::process::id()));
        let shared = Arc::new(Shared {
            need: self.need,
            operator_args: self.operator_args,
            root,
            cluster: OnceCell::new(),
            turns: RwLock::default(),
        });
        runtime.spawn(end_on_signal(shared.clone()));
        let trials = self.tests.into_iter().map(|test| {
            let (runtime, shared) = (runtime.clone(), shared.clone());
            Trial::test(test.name, move || {
                let outcome = runtime.block_on(shared.run(test));
                // The chain of causes; a backtrace would only show this harness.
                outcome.map_err(|error| Failed::from(format!("{error:#}")))
            })
        });
        let conclusion = libtest_mimic::run(&args, trials.collect());
        match runtime.block_on(shared.take_down()) {
            Ok(()) => conclusion.exit_code(),
            Err(error) => {
                eprintln!("error: {error:#}");
                ExitCode::FAILURE
            }
        }
    }
}

impl Shared {
    async fn run(&self, test: Test) -> Result<()> {
        // Held to the end of the test.
        let _turn =
            if test.alone { Turn::Alone(self.turns.write().await) } else { Turn::Together(self.turns.read().await) };
        let cluster = self.cluster.get_or_try_init(|| self.start()).await?;
        let place = Arc::new(Place::begin(cluster.clone(), test.name).await?);
        let outcome = (test.run)(place.clone()).await;
        if outcome.is_err() {
            place.explain().await;
        }
        // A test that failed may leave things that do not end; the cluster's end takes them.
        let end = place.end().await;
        outcome.and(end)
    }

    async fn start(&self) -> Result<Arc<LocalCluster>> {
        let programs = Programs::find(self.need)?;
        let cluster = LocalCluster::open(self.root.clone(), programs, Progress::Quiet)?;
        cluster.set_operator_args(&self.operator_args)?;
        // Known at once, so that the end also takes down a cluster that came up half.
        let cluster = Arc::new(cluster);
        let begun = async {
            cluster.up_control_plane().await?;
            match self.need {
                Need::Operator | Need::Everything => cluster.start(&Component::Operator).await?,
                Need::ControlPlane | Need::Nothing => place::apply_contract(&cluster).await?,
            }
            anyhow::Ok(())
        };
        if let Err(error) = begun.await {
            cluster.down().await?;
            return Err(error);
        }
        Ok(cluster)
    }

    async fn take_down(&self) -> Result<()> {
        let Some(cluster) = self.cluster.get() else { return Ok(()) };
        cluster.down().await?;
        let rights = audit::operator_was_never_refused(cluster.layout());
        let secrets = secrets::are_kept(cluster.layout());
        let left = leftovers(cluster.layout(), &cluster.recorded().nodes);
        if env::var_os("KIBOTOS_KEEP").is_some() {
            eprintln!("kept: {}", self.root.display());
        } else {
            std::fs::remove_dir_all(&self.root).with_context(|| format!("failed to remove {}", self.root.display()))?;
        }
        rights?;
        secrets?;
        anyhow::ensure!(left.is_empty(), "the cluster left on this host:\n  {}", left.join("\n  "));
        Ok(())
    }
}

/// ^C and SIGTERM end the tests, and the cluster with them.
async fn end_on_signal(shared: Arc<Shared>) {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut term) = signal(SignalKind::terminate()) else { return };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = term.recv() => {}
    }
    eprintln!("interrupted: taking the cluster down");
    if let Err(error) = shared.take_down().await {
        eprintln!("error: {error:#}");
    }
    std::process::exit(130);
}
