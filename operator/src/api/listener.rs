//! TLS connections, each with what its client's certificate says.

use std::{sync::Arc, time::Duration};

use axum::{Extension, Router};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer},
    server::WebPkiClientVerifier,
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::front_proxy::{Certificate, CurrentTrust, Trust};

/// A client that does not finish its handshake or its request's head in this time is dropped.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// So long a new connection waits until it is known whom to trust, which takes a moment after a change of the leader: one
/// that is not asked for its certificate could never say who it is.
const TRUST_WITHIN: Duration = Duration::from_secs(5);
/// A client that answers no ping is gone.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// How long a connection may take to end when the server does; the Lease waits for it.
const FAREWELL: Duration = Duration::from_secs(1);

/// The certificate that the server shows, and the key to it.
pub struct ServingCertificate {
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

/// Serves `router` until `stop`; connections that are open then end with what is on them.
pub async fn serve(
    listener: TcpListener,
    serving: Arc<ServingCertificate>,
    trust: CurrentTrust,
    router: Router,
    stop: CancellationToken,
) {
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((socket, _)) => {
                let (serving, trust) = (serving.clone(), trust.clone());
                let (router, stop) = (router.clone(), stop.clone());
                connections.spawn(async move {
                    if let Err(error) = connection(socket, &serving, trust, router, stop).await {
                        tracing::debug!(error, "connection to the API ended");
                    }
                });
            }
            Err(error) => {
                // Mostly no file descriptors; those in use come back.
                tracing::warn!(%error, "cannot accept a connection to the API");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
    connections.close();
    connections.wait().await;
}

async fn connection(
    socket: TcpStream,
    serving: &ServingCertificate,
    mut trust: CurrentTrust,
    router: Router,
    stop: CancellationToken,
) -> Result<(), String> {
    // Small frames of a terminal must not wait for one another.
    socket.set_nodelay(true).map_err(|error| error.to_string())?;
    let known = tokio::select! {
        known = timeout(TRUST_WITHIN, known(&mut trust)) => known.ok(),
        () = stop.cancelled() => return Ok(()),
    };
    let acceptor = TlsAcceptor::from(Arc::new(tls(serving, known.as_deref())?));
    let stream = timeout(HANDSHAKE, acceptor.accept(socket))
        .await
        .map_err(|_| "no TLS handshake in time".to_owned())?
        .map_err(|error| format!("TLS handshake: {error}"))?;
    let router = router.layer(Extension(peer(&stream)));
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HANDSHAKE);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(KEEP_ALIVE);
    let serve = builder.serve_connection_with_upgrades(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut serve = std::pin::pin!(serve);
    tokio::select! {
        result = serve.as_mut() => return result.map_err(|error| error.to_string()),
        () = stop.cancelled() => {}
        _ = self::known(&mut trust), if known.is_none() => {}
    }
    serve.as_mut().graceful_shutdown();
    let ended = timeout(FAREWELL, serve).await.map_err(|_| "still busy at the end".to_owned())?;
    ended.map_err(|error| error.to_string())
}

/// Whom to trust, as soon as that is known.
async fn known(trust: &mut CurrentTrust) -> Arc<Trust> {
    let known = trust.wait_for(Option::is_some).await.ok().and_then(|known| known.clone());
    match known {
        Some(known) => known,
        // The server ends.
        None => std::future::pending().await,
    }
}

/// The client's certificate, if it showed one; the handshake has checked it.
fn peer(stream: &TlsStream<TcpStream>) -> Option<Certificate> {
    Certificate::of(stream.get_ref().1.peer_certificates()?.first()?)
}

/// Made for each connection, so that a change of the trusted CA counts from the next one on.
fn tls(serving: &ServingCertificate, trust: Option<&Trust>) -> Result<ServerConfig, String> {
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    // Who shows no certificate is answered in words; who shows a wrong one does not get that far.
    let builder = match trust {
        Some(trust) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(trust.roots.clone(), provider)
                .allow_unauthenticated()
                .build()
                .map_err(|error| error.to_string())?;
            builder.with_client_cert_verifier(verifier)
        }
        None => builder.with_no_client_auth(),
    };
    let mut config =
        builder.with_single_cert(serving.chain.clone(), serving.key.clone_key()).map_err(|error| error.to_string())?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}
