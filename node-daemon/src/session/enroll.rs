//! First contact: a single-use token becomes the node's key.

use std::{fs, path::Path, time::Duration};

use kibo_crds::NodeId;
use kibo_protocol::{EnrollmentToken, NodeKey, v1};
use tonic::{Code, transport::Channel};

use crate::state::{Credentials, StateDir, StateError};

const TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
pub enum EnrollError {
    #[error("failed to read the enrollment token {path}: {problem}")]
    Token { path: String, problem: String },
    #[error("the enrollment token is for node {token}, but node.id is {configured}: use this node's token")]
    OtherNode { token: String, configured: NodeId },
    #[error(
        "the operator refused the enrollment token ({0}): a token works once and for a limited time; issue a new one"
    )]
    Refused(String),
    #[error("the operator could not enroll this node: {0}")]
    Unavailable(String),
    #[error("the operator's answer to the enrollment makes no sense: {0}")]
    Answer(String),
    #[error(transparent)]
    State(#[from] StateError),
}

/// Reads the token that an admin put on this host.
pub fn read_token(path: &Path, configured: Option<&NodeId>) -> Result<(EnrollmentToken, NodeId), EnrollError> {
    let failed = |problem: String| EnrollError::Token { path: path.display().to_string(), problem };
    let text = fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let token: EnrollmentToken = text.parse().map_err(|error: kibo_protocol::TokenError| failed(error.to_string()))?;
    if let Some(configured) = configured.filter(|id| id.as_str() != token.node_id) {
        return Err(EnrollError::OtherNode { token: token.node_id.clone(), configured: configured.clone() });
    }
    let id = token.node_id.parse().map_err(|error: kibo_crds::NameError| failed(error.to_string()))?;
    Ok((token, id))
}

/// Exchanges the token; the key is on disk before anybody uses it.
pub async fn enroll(
    channel: Channel,
    token: &EnrollmentToken,
    node_id: NodeId,
    dir: &StateDir,
) -> Result<Credentials, EnrollError> {
    let request = v1::EnrollRequest {
        node_id: token.node_id.clone(),
        secret: token.secret.expose().to_vec(),
        version: kibo_protocol::RELEASE.into(),
        service_account_token: String::new(),
    };
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

    #[test]
    fn a_token_of_another_node_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let token = EnrollmentToken {
            node_id: "node-a".into(),
            secret: Secret::generate().unwrap(),
            ca_hash: EnrollmentToken::hash_of_ca(b"ca"),
        };
        fs::write(&path, token.expose()).unwrap();
        let (read, id) = read_token(&path, None).unwrap();
        assert_eq!((read, id.as_str()), (token, "node-a"));
        let other = "node-b".parse().unwrap();
        assert!(matches!(read_token(&path, Some(&other)), Err(EnrollError::OtherNode { .. })));
    }

    #[test]
    fn a_malformed_token_is_not_repeated_in_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "kibo-enroll-v1.hush").unwrap();
        let error = read_token(&path, None).unwrap_err().to_string();
        assert!(!error.contains("hush") && error.contains("token"), "{error}");
    }
}
