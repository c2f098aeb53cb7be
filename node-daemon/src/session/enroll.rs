//! First contact: what this host can show becomes the node's key.

use std::{fmt, fs, io, path::Path, time::Duration};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use kibo_crds::NodeId;
use kibo_protocol::{EnrollmentToken, NodeKey, SecretHash, v1};
use serde::Deserialize;
use tonic::{Code, transport::Channel};

use crate::{
    config::ControlConfig,
    state::{Credentials, StateDir, StateError},
};

/// Much longer than the operator takes: when the answer is lost, so is the token.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum EnrollError {
    #[error("this node has no key yet: name an enrollment token in control.token_file")]
    NothingToShow,
    #[error("failed to read the enrollment token {path}: {problem}")]
    Token { path: String, problem: String },
    #[error("failed to read the service-account token {path}: {problem}")]
    ServiceAccount { path: String, problem: String },
    #[error("the enrollment token is for node {token}, but node.id is {configured}: use this node's token")]
    OtherNode { token: NodeId, configured: NodeId },
    #[error("the operator refused to enroll this host: {0}")]
    Refused(String),
    #[error("the operator could not enroll this node: {0}")]
    Unavailable(String),
    #[error("the operator's answer to the enrollment makes no sense: {0}")]
    Answer(String),
    #[error(transparent)]
    State(#[from] StateError),
}

/// What makes a host the node that it says it is.
#[derive(Debug)]
pub enum Proof {
    /// An admin put it on this host.
    Token(EnrollmentToken),
    /// Kubernetes gave it to the pod of this daemon.
    ServiceAccount(ServiceAccountToken),
}

/// Debug shows nothing of it.
pub struct ServiceAccountToken(String);

impl fmt::Debug for ServiceAccountToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServiceAccountToken(redacted)")
    }
}

impl Proof {
    /// What this host has to show, and as which node: a token that an admin gave it goes before what Kubernetes says.
    /// Read anew each time, since a person may have put a new token there, and Kubernetes does so every hour.
    pub fn read(control: &ControlConfig) -> Result<(Self, NodeId), EnrollError> {
        let is_there =
            |path: &Path| !matches!(fs::metadata(path), Err(error) if error.kind() == io::ErrorKind::NotFound);
        match (&control.token_file, &control.service_account_token_file) {
            (Some(path), other) if other.is_none() || is_there(path) => {
                read_token(path).map(|(token, id)| (Self::Token(token), id))
            }
            (_, Some(path)) => read_service_account(path).map(|(token, id)| (Self::ServiceAccount(token), id)),
            (_, None) => Err(EnrollError::NothingToShow),
        }
    }

    /// The same for a node whose name is known.
    pub fn of_node(control: &ControlConfig, node: &NodeId) -> Result<Self, EnrollError> {
        let (proof, id) = Self::read(control)?;
        if id != *node {
            return Err(EnrollError::OtherNode { token: id, configured: node.clone() });
        }
        Ok(proof)
    }

    /// The one CA to which it may be shown; otherwise any that is configured.
    pub fn ca_hash(&self) -> Option<SecretHash> {
        match self {
            Self::Token(token) => Some(token.ca_hash),
            Self::ServiceAccount(_) => None,
        }
    }
}

fn read_token(path: &Path) -> Result<(EnrollmentToken, NodeId), EnrollError> {
    let failed = |problem: String| EnrollError::Token { path: path.display().to_string(), problem };
    let text = fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let token: EnrollmentToken = text.parse().map_err(|error: kibo_protocol::TokenError| failed(error.to_string()))?;
    let id = token.node_id.parse().map_err(|error: kibo_crds::NameError| failed(error.to_string()))?;
    Ok((token, id))
}

/// The part of a token of Kubernetes that says where its pod runs.
#[derive(Deserialize)]
struct Claims {
    #[serde(rename = "kubernetes.io")]
    kubernetes: KubernetesClaims,
}

#[derive(Deserialize)]
struct KubernetesClaims {
    node: Option<HostClaim>,
}

#[derive(Deserialize)]
struct HostClaim {
    name: String,
}

/// Its signature is the operator's to check: here it only says who this host is.
fn read_service_account(path: &Path) -> Result<(ServiceAccountToken, NodeId), EnrollError> {
    let failed =
        |problem: &str| EnrollError::ServiceAccount { path: path.display().to_string(), problem: problem.to_owned() };
    let text = fs::read_to_string(path).map_err(|error| failed(&error.to_string()))?;
    let token = text.trim();
    // The error must not repeat what it could not read.
    let malformed = || failed("it is no token of a service account");
    let payload = token.split('.').nth(1).and_then(|part| URL_SAFE_NO_PAD.decode(part).ok()).ok_or_else(malformed)?;
    let claims: Claims = serde_json::from_slice(&payload).map_err(|_| malformed())?;
    let host = claims.kubernetes.node.ok_or_else(|| {
        failed("it does not say on which node its pod runs: Kubernetes 1.32 or newer, and a token projected into the pod, are needed")
    })?;
    let id = host.name.parse().map_err(|error: kibo_crds::NameError| failed(&error.to_string()))?;
    Ok((ServiceAccountToken(token.to_owned()), id))
}

/// Exchanges what this host shows; the key is on disk before anybody uses it.
pub async fn enroll(
    channel: Channel,
    proof: Proof,
    node_id: NodeId,
    dir: &StateDir,
) -> Result<Credentials, EnrollError> {
    let mut request = v1::EnrollRequest {
        node_id: node_id.to_string(),
        version: kibo_protocol::RELEASE.into(),
        ..v1::EnrollRequest::default()
    };
    match proof {
        Proof::Token(token) => request.secret = token.secret.expose().to_vec(),
        Proof::ServiceAccount(token) => request.service_account_token = token.0,
    }
    let mut client = v1::node_control_client::NodeControlClient::new(channel);
    let answer = tokio::time::timeout(TIMEOUT, client.enroll(request)).await;
    let answer = match answer {
        Err(_) => return Err(EnrollError::Unavailable("no answer in time".into())),
        Ok(Err(status)) => return Err(refusal(&status)),
        Ok(Ok(answer)) => answer.into_inner(),
    };
    let key = NodeKey::from_bytes(&answer.node_key).map_err(|error| EnrollError::Answer(error.to_string()))?;
    let credentials = Credentials { node_id, key, cluster_id: answer.cluster_id };
    credentials.store(dir)?;
    Ok(credentials)
}

fn refusal(status: &tonic::Status) -> EnrollError {
    match status.code() {
        Code::PermissionDenied
        | Code::Unauthenticated
        | Code::NotFound
        | Code::FailedPrecondition
        | Code::InvalidArgument
        | Code::AlreadyExists => EnrollError::Refused(status.message().to_owned()),
        _ => EnrollError::Unavailable(format!("{}: {}", status.code(), status.message())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kibo_protocol::Secret;

    struct Files(tempfile::TempDir);

    impl Files {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn control(&self) -> ControlConfig {
            ControlConfig {
                endpoints: Vec::new(),
                ca_file: self.0.path().join("ca"),
                token_file: Some(self.0.path().join("token")),
                service_account_token_file: Some(self.0.path().join("account")),
            }
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.0.path().join(name), text).unwrap();
        }

        /// A token of Kubernetes with these claims, which nobody signed.
        fn write_account(&self, claims: &str) {
            self.write("account", &format!("e30.{}.hush\n", URL_SAFE_NO_PAD.encode(claims)));
        }
    }

    fn token(node: &str) -> EnrollmentToken {
        let ca_hash = EnrollmentToken::hash_of_ca(b"ca");
        EnrollmentToken { node_id: node.into(), secret: Secret::generate().unwrap(), ca_hash }
    }

    #[test]
    fn a_token_of_another_node_is_refused() {
        let files = Files::new();
        files.write("token", &token("node-a").expose());
        let (own, other) = ("node-a".parse().unwrap(), "node-b".parse().unwrap());
        assert!(Proof::of_node(&files.control(), &own).unwrap().ca_hash().is_some());
        assert!(matches!(Proof::of_node(&files.control(), &other), Err(EnrollError::OtherNode { .. })));
    }

    #[test]
    fn an_issued_token_goes_before_what_kubernetes_says() {
        let files = Files::new();
        let named = |control: &ControlConfig| Proof::read(control).map(|(_, id)| id.to_string());
        files.write_account(r#"{"kubernetes.io":{"node":{"name":"host-1","uid":"u"},"pod":{"name":"p"}}}"#);
        assert_eq!(named(&files.control()).unwrap(), "host-1");
        files.write("token", &token("node-a").expose());
        assert_eq!(named(&files.control()).unwrap(), "node-a");
        let nothing = ControlConfig { token_file: None, service_account_token_file: None, ..files.control() };
        assert!(matches!(Proof::read(&nothing), Err(EnrollError::NothingToShow)));
    }

    #[test]
    fn what_cannot_be_read_is_not_repeated_in_the_error() {
        let files = Files::new();
        for claims in ["hush", r#"{"kubernetes.io":{"namespace":"hush"}}"#, r#"{"iss":"hush"}"#] {
            files.write_account(claims);
            let error = Proof::read(&files.control()).unwrap_err();
            assert!(matches!(error, EnrollError::ServiceAccount { .. }), "{error}");
            assert!(!format!("{error} {error:?}").contains("hush"), "{error}");
        }
        files.write("token", "kibo-enroll-v1.hush");
        let error = Proof::read(&files.control()).unwrap_err().to_string();
        assert!(!error.contains("hush") && error.contains("token"), "{error}");
    }
}
