//! `/healthz`: the process runs. `/readyz`: this replica leads and serves nodes and users; a standby is
//! healthy and not ready, so that Services lead to the leader alone. `/metrics`: for Prometheus.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{Router, http::StatusCode, routing::get};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio_util::sync::CancellationToken;

use crate::workspace::stopwatch;

/// How often metrics that are kept as single samples are folded together.
const UPKEEP: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    #[error("failed to listen on {address} for --health-listen: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("failed to set up metrics: {0}")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
}

/// Whether this replica leads and serves.
#[derive(Clone, Default)]
pub struct Readiness(Arc<AtomicBool>);

impl Readiness {
    pub fn set(&self, ready: bool) {
        self.0.store(ready, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Serves until `stop`.
pub async fn serve(address: SocketAddr, readiness: Readiness, stop: CancellationToken) -> Result<(), HealthError> {
    let starts = Matcher::Full(stopwatch::METRIC.to_owned());
    let metrics = PrometheusBuilder::new().set_buckets_for_metric(starts, &stopwatch::BUCKETS)?.install_recorder()?;
    let listener =
        tokio::net::TcpListener::bind(address).await.map_err(|source| HealthError::Listen { address, source })?;
    tokio::spawn(upkeep(metrics.clone(), stop.clone()));
    let router = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(async move || ready(&readiness)))
        .route("/metrics", get(async move || metrics.render()));
    tokio::spawn(async move {
        let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await;
        if let Err(error) = served {
            tracing::error!(%error, "the health endpoint ended");
        }
    });
    Ok(())
}

fn ready(readiness: &Readiness) -> (StatusCode, &'static str) {
    if readiness.get() {
        (StatusCode::OK, "ok\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "this replica does not lead\n")
    }
}

async fn upkeep(metrics: PrometheusHandle, stop: CancellationToken) {
    while tokio::time::timeout(UPKEEP, stop.cancelled()).await.is_err() {
        metrics.run_upkeep();
    }
}
