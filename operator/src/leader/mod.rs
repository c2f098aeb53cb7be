//! Leadership by a Lease.
//!
//! The number of the Lease's transitions is the term of the leadership: it grows with every holder, every
//! status write carries it, and the API server refuses a lower one. A leader that cannot renew in time, or
//! that finds that its clock jumped (suspended, stopped), ends its process at once: a thread of its own
//! watches CLOCK_BOOTTIME, so a stalled runtime does not hide it.

mod decide;
mod history;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kibo_crds::{Node, StoragePool, Term, Volume, Workspace};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, ObjectMeta, PostParams},
};
use tokio_util::sync::CancellationToken;

use crate::{
    clock::boottime,
    guarded::{Guarded, Termed},
};
use decide::{Step, Watched, decide, term_of};
pub use history::History;

/// Name of the Lease in the operator's namespace.
pub const LEASE: &str = "kibotos-operator";
const WATCH_INTERVAL: Duration = Duration::from_millis(250);

/// Failure to take, renew or give back the Lease.
#[derive(Debug, thiserror::Error)]
pub enum LeaderError {
    #[error("failed to {what} lease {LEASE}: {source}")]
    Api { what: &'static str, source: Box<kube::Error> },
    #[error("lease {LEASE} was taken by {0}: this process leads no more")]
    Lost(String),
    #[error(
        "lease {LEASE} is older than this process has written it: the control plane was put back to an older state, and \
         what this process knows is void"
    )]
    WentBack,
    #[error("failed to start the thread that watches the clock: {0}")]
    Watchdog(std::io::Error),
}

fn api_error(what: &'static str) -> impl FnOnce(kube::Error) -> LeaderError {
    move |source| LeaderError::Api { what, source: Box::new(source) }
}

/// Durations of an election; all derive from how long a Lease lasts.
#[derive(Clone, Copy, Debug)]
struct Timing {
    lease: Duration,
    /// Between two renewals or two looks.
    retry: Duration,
    /// Without a renewal for this long the process ends; well before somebody else may take the Lease.
    deadline: Duration,
}

impl Timing {
    fn of(lease: Duration) -> Self {
        Self { lease, retry: lease / 6, deadline: lease * 2 / 3 }
    }
}

/// Takes part in the election.
pub struct Elector {
    client: Client,
    api: Api<Lease>,
    identity: String,
    timing: Timing,
    /// Term of the Lease as it was last read.
    observed_term: Arc<AtomicU64>,
}

impl Elector {
    /// `identity` must be that of no other process at the same time; absent: one that never comes again.
    pub fn new(client: Client, namespace: &str, identity: Option<String>, lease: Duration) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let random = || format!("{host}_{}", ulid::Ulid::new().to_string().to_ascii_lowercase());
        Self {
            api: Api::namespaced(client.clone(), namespace),
            client,
            identity: identity.unwrap_or_else(random),
            timing: Timing::of(lease),
            observed_term: Arc::default(),
        }
    }

    /// Term of whoever leads, as far as this process knows.
    pub fn observed_term(&self) -> Arc<AtomicU64> {
        self.observed_term.clone()
    }

    /// Waits until the Lease is this process's. Failures are logged and tried again.
    pub async fn acquire(self) -> Result<Leadership, LeaderError> {
        let mut watched = Watched::default();
        let mut told = None;
        loop {
            match self.try_acquire(&mut watched, &mut told).await {
                Ok(Some((lease, asked_at))) => return Leadership::begin(self, &lease, asked_at),
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "cannot take part in the election now"),
            }
            tokio::time::sleep(self.timing.retry).await;
        }
    }

    /// One look. The Lease, with the moment before it was asked for, when it is this process's now.
    async fn try_acquire(
        &self,
        watched: &mut Watched,
        told: &mut Option<String>,
    ) -> Result<Option<(Lease, Duration)>, LeaderError> {
        let asked_at = boottime();
        let Some(mut lease) = self.api.get_opt(LEASE).await.map_err(api_error("read"))? else {
            return Ok(self.create().await?.map(|lease| (lease, asked_at)));
        };
        let spec = lease.spec.clone().unwrap_or_default();
        self.observed_term.store(term_of(&spec).0, Ordering::Relaxed);
        let now = boottime();
        let since = watched.observe(&spec, now);
        let term = match decide(&spec, &self.identity, since, now, self.timing.lease) {
            Step::Take(term) => term,
            Step::Wait => {
                if *told != spec.holder_identity {
                    tracing::info!(holder = spec.holder_identity.as_deref(), "another replica leads; standing by");
                    told.clone_from(&spec.holder_identity);
                }
                return Ok(None);
            }
        };
        lease.metadata.annotations = Some(history::with_one_more(&lease, term));
        lease.spec = Some(self.held(term));
        match self.api.replace(LEASE, &PostParams::default(), &lease).await {
            Ok(lease) => Ok(Some((lease, now))),
            Err(kube::Error::Api(status)) if status.is_conflict() => Ok(None),
            Err(error) => Err(api_error("take")(error)),
        }
    }

    /// Makes the Lease. Its first term is above every one that was ever written, also when somebody deleted
    /// the Lease of a cluster that had been running.
    async fn create(&self) -> Result<Option<Lease>, LeaderError> {
        let highest = highest_written_term(&self.client).await.map_err(api_error("find the first term for"))?;
        let term = Term(highest.0 + 1);
        let annotations = Some(history::with_one_more(&Lease::default(), term));
        let lease = Lease {
            metadata: ObjectMeta { name: Some(LEASE.to_owned()), annotations, ..ObjectMeta::default() },
            spec: Some(self.held(term)),
        };
        match self.api.create(&PostParams::default(), &lease).await {
            Ok(lease) => Ok(Some(lease)),
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(None),
            Err(error) => Err(api_error("create")(error)),
        }
    }

    fn held(&self, term: Term) -> LeaseSpec {
        let now = MicroTime(jiff::Timestamp::now());
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.timing.lease.as_secs()).ok(),
            lease_transitions: i32::try_from(term.0).ok(),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }
    }
}

/// The highest term in any status of the cluster; nothing before the definitions exist.
async fn highest_written_term(client: &Client) -> Result<Term, kube::Error> {
    let kinds = [
        highest_term_in::<Node>(client).await?,
        highest_term_in::<StoragePool>(client).await?,
        highest_term_in::<Workspace>(client).await?,
        highest_term_in::<Volume>(client).await?,
    ];
    Ok(kinds.into_iter().max().unwrap_or_default())
}

async fn highest_term_in<K: Guarded>(client: &Client) -> Result<Term, kube::Error> {
    let api = Api::<K>::all(client.clone());
    let mut params = ListParams::default().limit(500);
    let mut highest = Term::default();
    loop {
        let page = match api.list(&params).await {
            Ok(page) => page,
            // The kind is not served: the answer is plain text, so only its code says so.
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(highest),
            Err(error) => return Err(error),
        };
        let terms = page.items.iter().filter_map(|object| object.status().and_then(Termed::term));
        highest = terms.max().unwrap_or_default().max(highest);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(highest),
        }
    }
}

/// This process leads, until [`Leadership::lost`] or [`Leadership::release`].
pub struct Leadership {
    pub term: Term,
    pub history: Arc<History>,
    /// Cancelled when somebody else holds the Lease.
    lost: CancellationToken,
    stop: CancellationToken,
    released: Arc<AtomicBool>,
    renewal: tokio::task::JoinHandle<(Elector, Lease)>,
}

impl Leadership {
    fn begin(elector: Elector, lease: &Lease, asked_at: Duration) -> Result<Self, LeaderError> {
        let term = term_of(lease.spec.as_ref().unwrap_or(&LeaseSpec::default()));
        elector.observed_term.store(term.0, Ordering::Relaxed);
        tracing::info!(%term, identity = elector.identity, "this replica leads");
        let (lost, stop) = (CancellationToken::new(), CancellationToken::new());
        let renewed_at = Arc::new(AtomicU64::new(millis(asked_at)));
        let released = Arc::new(AtomicBool::new(false));
        watch_clock(elector.timing.deadline, renewed_at.clone(), released.clone())?;
        let history = Arc::new(History::of(lease));
        let renewing = Renewing { history: history.clone(), renewed_at, lost: lost.clone(), stop: stop.clone() };
        let renewal = tokio::spawn(renew(elector, lease.clone(), renewing));
        Ok(Self { term, history, lost, stop, released, renewal })
    }

    /// Resolves when this process leads no more.
    pub async fn lost(&self) {
        self.lost.cancelled().await;
    }

    /// Gives the Lease back, so that another replica need not wait for its end. Call it when nothing acts
    /// under this leadership any more.
    pub async fn release(self) -> Result<(), LeaderError> {
        self.stop.cancel();
        let Ok((elector, mut lease)) = self.renewal.await else { return Ok(()) };
        self.released.store(true, Ordering::Relaxed);
        if self.lost.is_cancelled() {
            return Ok(());
        }
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = Some(String::new());
            spec.renew_time = Some(MicroTime(jiff::Timestamp::now()));
        }
        match elector.api.replace(LEASE, &PostParams::default(), &lease).await {
            Ok(_) => {
                tracing::info!(term = %self.term, "lease released");
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.is_conflict() => Ok(()),
            Err(error) => Err(api_error("release")(error)),
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// What a renewal tells the rest of the process.
struct Renewing {
    history: Arc<History>,
    renewed_at: Arc<AtomicU64>,
    lost: CancellationToken,
    stop: CancellationToken,
}

/// Renews until told to stop, or until somebody else is the holder. Gives back what a release needs.
async fn renew(elector: Elector, mut lease: Lease, to: Renewing) -> (Elector, Lease) {
    loop {
        tokio::select! {
            () = to.stop.cancelled() => return (elector, lease),
            () = tokio::time::sleep(elector.timing.retry) => {}
        }
        let asked_at = boottime();
        match tokio::time::timeout(elector.timing.deadline, renew_once(&elector, &mut lease)).await {
            Ok(Ok(())) => {
                to.renewed_at.store(millis(asked_at), Ordering::Relaxed);
                to.history.renew(history::renewed(&lease));
            }
            Ok(Err(error @ (LeaderError::Lost(_) | LeaderError::WentBack))) => {
                tracing::error!(%error, "this leadership is over");
                to.lost.cancel();
                return (elector, lease);
            }
            Ok(Err(error)) => tracing::warn!(%error, "failed to renew the lease, trying again"),
            Err(_) => tracing::warn!("the API server did not answer the renewal of the lease"),
        }
    }
}

async fn renew_once(elector: &Elector, lease: &mut Lease) -> Result<(), LeaderError> {
    let mut wanted = lease.clone();
    if let Some(spec) = &mut wanted.spec {
        // Also when the clock was set back: moments of one leadership come one after the other.
        let after =
            spec.renew_time.as_ref().and_then(|last| last.0.checked_add(jiff::SignedDuration::from_micros(1)).ok());
        spec.renew_time = Some(MicroTime(jiff::Timestamp::now().max(after.unwrap_or(jiff::Timestamp::MIN))));
    }
    match elector.api.replace(LEASE, &PostParams::default(), &wanted).await {
        Ok(renewed) => {
            *lease = renewed;
            Ok(())
        }
        // Somebody touched the Lease, or an own write got through whose answer was lost.
        Err(kube::Error::Api(status)) if status.is_conflict() || status.is_not_found() => {
            let stored = elector.api.get_opt(LEASE).await.map_err(api_error("read"))?;
            let holder = stored.as_ref().and_then(|lease| lease.spec.as_ref()?.holder_identity.clone());
            let is_ours = |stored: &Lease| {
                let term = |lease: &Lease| lease.spec.as_ref().map(term_of);
                stored.uid() == lease.uid() && term(stored) == term(lease)
            };
            match stored {
                Some(stored) if history::renewed(&stored) < history::renewed(lease) => Err(LeaderError::WentBack),
                Some(stored) if holder.as_deref() == Some(&elector.identity) && is_ours(&stored) => {
                    *lease = stored;
                    Ok(())
                }
                Some(_) => Err(LeaderError::Lost(holder.unwrap_or_else(|| "nobody".to_owned()))),
                None => Err(LeaderError::Lost("nobody: it was deleted".to_owned())),
            }
        }
        Err(error) => Err(api_error("renew")(error)),
    }
}

/// Ends the process when the last renewal is too long ago by the clock that never stops.
fn watch_clock(deadline: Duration, renewed_at: Arc<AtomicU64>, released: Arc<AtomicBool>) -> Result<(), LeaderError> {
    let watch = move || {
        while !released.load(Ordering::Relaxed) {
            let silent = boottime().saturating_sub(Duration::from_millis(renewed_at.load(Ordering::Relaxed)));
            if silent > deadline {
                tracing::error!(
                    seconds = silent.as_secs_f32(),
                    "the lease was not renewed in time (API server out of reach, or this process was stopped): exiting, so that another replica can lead"
                );
                std::process::exit(1);
            }
            std::thread::sleep(WATCH_INTERVAL);
        }
    };
    std::thread::Builder::new().name("lease-watchdog".to_owned()).spawn(watch).map_err(LeaderError::Watchdog)?;
    Ok(())
}
