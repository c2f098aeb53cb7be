//! The session port as one sees it who does not keep to the protocol.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::Api;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status};

use super::Place;
use crate::local::NAMESPACE;

/// After so long a blocked read looks around.
const LOOK: Duration = Duration::from_millis(500);
/// How long an answer of the operator may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Bytes in place of a message.
#[derive(Clone, Debug, Default)]
pub struct Raw(pub Vec<u8>);

/// Passes messages on as the bytes that they are.
#[derive(Default)]
struct RawCodec;

impl Codec for RawCodec {
    type Encode = Raw;
    type Decode = Raw;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for RawCodec {
    type Item = Raw;
    type Error = Status;

    fn encode(&mut self, item: Raw, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put_slice(to, &item.0);
        Ok(())
    }
}

impl Decoder for RawCodec {
    type Item = Raw;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Raw>, Status> {
        let mut bytes = vec![0; bytes::Buf::remaining(from)];
        bytes::Buf::copy_to_slice(from, &mut bytes);
        Ok(Some(Raw(bytes)))
    }
}

/// The operator's CA, which every user of the cluster may read.
pub async fn operator_ca(place: &Place) -> Result<String> {
    let maps: Api<ConfigMap> = Api::namespaced(place.client(), NAMESPACE);
    maps.get("kibotos-ca").await?.data.unwrap_or_default().remove("ca.crt").context("no ca.crt")
}

/// A TLS connection to the session port, with nothing spoken in it. A read that waits ends now and then.
pub fn tls(ca_pem: &str, port: u16) -> Result<StreamOwned<ClientConnection, TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca_pem.as_bytes()).context("the CA")?)?;
    let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connection = ClientConnection::new(Arc::new(config), ServerName::try_from("localhost")?)?;
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(LOOK))?;
    Ok(StreamOwned::new(connection, stream))
}

async fn grpc(place: &Place) -> Result<Grpc<Channel>> {
    let ca = Certificate::from_pem(operator_ca(place).await?);
    let tls = ClientTlsConfig::new().ca_certificate(ca).domain_name("localhost");
    let address = format!("https://127.0.0.1:{}", place.cluster().ports().session);
    let channel = Endpoint::from_shared(address)?.tls_config(tls)?.connect().await?;
    let mut grpc = Grpc::new(channel);
    grpc.ready().await?;
    Ok(grpc)
}

/// Begins a session with these bytes as its first message; what is answered, as text, or nothing when it is closed.
pub async fn answer_to_raw(place: &Place, first: Vec<u8>) -> Result<String> {
    let path = http::uri::PathAndQuery::from_static("/kibotos.node.v1.NodeControl/Session");
    // The stream stays open, as that of a session does.
    let messages = futures::StreamExt::chain(tokio_stream::once(Raw(first)), tokio_stream::pending());
    let mut grpc = grpc(place).await?;
    let answer = tokio::time::timeout(ANSWER_LIMIT, async {
        let mut answers = grpc.streaming(Request::new(messages), path, RawCodec).await?.into_inner();
        answers.message().await
    });
    match answer.await.context("it is neither answered nor closed")? {
        Ok(Some(Raw(bytes))) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Ok(None) => Ok(String::new()),
        Err(status) => Ok(status.message().to_owned()),
    }
}

/// Dials a stream with these bytes as its first frame.
pub async fn attach_with_raw(place: &Place, first: Raw) -> Result<Result<(), Status>> {
    let path = http::uri::PathAndQuery::from_static("/kibotos.node.v1.NodeControl/Attach");
    let mut grpc = grpc(place).await?;
    let answer = grpc.streaming(Request::new(tokio_stream::once(first)), path, RawCodec);
    let answer = tokio::time::timeout(ANSWER_LIMIT, answer).await.context("it is neither answered nor closed")?;
    Ok(answer.map(drop))
}

/// How often the statuses of some objects were written since the cluster began.
pub fn status_writes(place: &Place, resource: &str, is_meant: impl Fn(&str) -> bool) -> Result<usize> {
    let text = std::fs::read_to_string(place.cluster().layout().audit_log())?;
    let entries = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let is_write = |entry: &Value| {
        let object = &entry["objectRef"];
        let is_status = object["resource"] == resource && object["subresource"] == "status";
        let is_status = is_status && object["name"].as_str().is_some_and(&is_meant);
        is_status && matches!(entry["verb"].as_str(), Some("update" | "patch"))
    };
    Ok(entries.filter(is_write).count())
}
