//! The way to the operator: TLS by the configured CA alone, and a connection that notices its death.

use std::{fs, path::Path, time::Duration};

use kibo_protocol::{EnrollmentToken, SecretHash};
use tonic::transport::{Certificate, Channel, ClientTlsConfig};

use crate::config::Endpoint;

/// A dead peer is noticed within interval plus timeout.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(3);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Of one stream, in both directions.
const STREAM_WINDOW: u32 = 1 << 20;
/// A piece of a stream is few frames, not sixteen.
const HTTP2_FRAME: u32 = 128 << 10;

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("failed to read the operator's CA {path}: {problem}")]
    Ca { path: String, problem: String },
    #[error(
        "none of the certificates in {path} is the CA that the enrollment token names: use the ca.crt of the operator that issued the token"
    )]
    OtherCa { path: String },
    #[error("failed to connect to {endpoint}: {problem}")]
    Connect { endpoint: Endpoint, problem: String },
}

/// The certificates that a server must descend from.
#[derive(Clone)]
pub struct Trust(Certificate);

impl Trust {
    /// Every certificate of the CA file; with a hash, only the one that has it.
    pub fn read(path: &Path, only: Option<SecretHash>) -> Result<Self, ConnectError> {
        let shown = path.display().to_string();
        let failed = |problem: String| ConnectError::Ca { path: shown.clone(), problem };
        let pem = fs::read(path).map_err(|error| failed(error.to_string()))?;
        let certificates: Vec<_> = rustls_pemfile::certs(&mut pem.as_slice())
            .collect::<Result<_, _>>()
            .map_err(|error| failed(error.to_string()))?;
        if certificates.is_empty() {
            return Err(failed("it has no certificate in PEM".into()));
        }
        let Some(hash) = only else { return Ok(Self(Certificate::from_pem(pem))) };
        let named = certificates.iter().find(|der| EnrollmentToken::hash_of_ca(der) == hash);
        let named = named.ok_or_else(|| ConnectError::OtherCa { path: shown.clone() })?;
        Ok(Self(Certificate::from_pem(to_pem(named))))
    }
}

fn to_pem(der: &[u8]) -> String {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    let text = STANDARD.encode(der);
    let mut pem = String::from("-----BEGIN CERTIFICATE-----\n");
    for line in text.as_bytes().chunks(64) {
        pem.extend(line.iter().map(|byte| char::from(*byte)));
        pem.push('\n');
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}

/// Everything down to the innermost cause: "connection refused" is what helps.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text.push_str(": ");
            text.push_str(&inner_text);
        }
        source = inner.source();
    }
    text
}

/// A connection of its own to this endpoint.
pub async fn connect(endpoint: &Endpoint, trust: &Trust) -> Result<Channel, ConnectError> {
    let failed =
        |error: tonic::transport::Error| ConnectError::Connect { endpoint: endpoint.clone(), problem: chain(&error) };
    let tls = ClientTlsConfig::new().ca_certificate(trust.0.clone());
    let channel = Channel::from_shared(endpoint.as_str().to_owned())
        .map_err(|error| ConnectError::Connect { endpoint: endpoint.clone(), problem: error.to_string() })?
        .tls_config(tls)
        .map_err(failed)?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE_EVERY)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW * 4)
        .max_frame_size(HTTP2_FRAME);
    match tokio::time::timeout(CONNECT_TIMEOUT * 2, channel.connect()).await {
        Ok(connected) => connected.map_err(failed),
        Err(_) => Err(ConnectError::Connect { endpoint: endpoint.clone(), problem: "no answer in time".into() }),
    }
}
