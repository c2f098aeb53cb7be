//! Enrollment: a single-use secret, or what Kubernetes says of a pod, becomes the key of a node.

use k8s_openapi::jiff::Timestamp;
use kibo_crds::{
    Incarnation, Node, NodeId,
    node::{Admission, NodeSpec, NodeStatus},
};
use kibo_protocol::{NodeKey, Secret, SecretHash, v1};
use kube::api::PostParams;
use tonic::{Code, Status};

use super::{
    open::{Leading, read_node},
    service_account::{self, Failure, Policy},
};
use crate::{
    guarded::WriteError,
    node::{Facts, compute_status, isolation},
};

/// Two hosts with one token are the only ones that meet here.
const ATTEMPTS: usize = 8;

/// Why a host does not become this node. Each has a gRPC code of its own kind, and a text for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("there is no Node {0}: issue an enrollment for it first")]
    UnknownNode(NodeId),
    #[error("node {0} is retired for ever: use a new node id for this host")]
    Retired(NodeId),
    #[error("the enrollment of node {0} was revoked: an admin must issue a new token with `kibo enrollment issue {0}`")]
    Revoked(NodeId),
    #[error(
        "no token is valid for node {0}: it was revoked, or none was issued yet; issue a new one with `kibo enrollment issue {0}`"
    )]
    NoGrant(NodeId),
    #[error("the secret is not the one that was issued for node {0}: the newest token counts")]
    WrongSecret(NodeId),
    #[error("the token for node {0} was used already: issue a new one")]
    Used(NodeId),
    #[error("the token for node {0} has expired: issue a new one")]
    Expired(NodeId),
    #[error("node {0} has a live control session from another host: stop kibo-node-daemon there first")]
    SessionLive(NodeId),
    #[error(
        "node {0} has lived, and another host may still run what it held: when that host is off or cannot write to its \
         storage any more, isolate incarnation {1} with {command}, then enroll again", command = isolation::command(.0)
    )]
    NotIsolated(NodeId, Incarnation),
}

impl Refusal {
    fn code(&self) -> Code {
        match self {
            Self::UnknownNode(_) => Code::NotFound,
            Self::WrongSecret(_) => Code::PermissionDenied,
            Self::Used(_) => Code::AlreadyExists,
            Self::Retired(_)
            | Self::Revoked(_)
            | Self::NoGrant(_)
            | Self::Expired(_)
            | Self::SessionLive(_)
            | Self::NotIsolated(..) => Code::FailedPrecondition,
        }
    }
}

/// Hosts that were one node, one after the other, and may come back.
const FORMER_KEYS: usize = 16;

/// What a host showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// The secret of a token, by its hash.
    Token(SecretHash),
    /// Kubernetes has said that it is the host of that name.
    ServiceAccount,
}

/// Whether whoever shows this may become the node. Pure.
///
/// A new host says truly that it runs nothing, which would void what an older one of this name holds and
/// may still write: so it may take the name only when the older life was isolated.
pub fn decide(
    id: &NodeId,
    node: Option<&Node>,
    shown: Proof,
    has_session: bool,
    now: Timestamp,
) -> Result<(), Refusal> {
    let node = node.ok_or_else(|| Refusal::UnknownNode(id.clone()))?;
    let facts = Facts::of(node);
    if facts.retired {
        return Err(Refusal::Retired(id.clone()));
    }
    // A token that was issued since ends a revocation; that the host is of the cluster does not.
    let is_revoked = node.status.as_ref().and_then(|status| status.admission) == Some(Admission::Revoked);
    if node.spec.revocation.is_some() || (is_revoked && shown == Proof::ServiceAccount) {
        return Err(Refusal::Revoked(id.clone()));
    }
    if let Proof::Token(shown) = shown {
        is_granted(id, node, shown, now)?;
    }
    let is_alive = node.status.as_ref().is_some_and(NodeStatus::has_live_session);
    if has_session || is_alive {
        return Err(Refusal::SessionLive(id.clone()));
    }
    if let Some(lived) = facts.incarnation.filter(|lived| facts.isolated < Some(*lived)) {
        return Err(Refusal::NotIsolated(id.clone(), lived));
    }
    Ok(())
}

/// Whether a secret is that of the pending grant.
fn is_granted(id: &NodeId, node: &Node, shown: SecretHash, now: Timestamp) -> Result<(), Refusal> {
    let hash = |text: &str| text.parse::<SecretHash>().ok();
    let used = node.status.as_ref().and_then(|status| status.used_secret_hash.as_deref()).and_then(hash);
    if used == Some(shown) {
        return Err(Refusal::Used(id.clone()));
    }
    let grant = node.spec.enrollment.as_ref().ok_or_else(|| Refusal::NoGrant(id.clone()))?;
    if hash(&grant.secret_hash) != Some(shown) {
        return Err(Refusal::WrongSecret(id.clone()));
    }
    if grant.expires_at.0 <= now {
        return Err(Refusal::Expired(id.clone()));
    }
    Ok(())
}

/// Decides, and stores the hash of a new key. Of two hosts that show the same token at once, one is
/// written and the other finds it used.
pub async fn enroll(
    leading: &Leading,
    policy: Option<&Policy>,
    request: v1::EnrollRequest,
) -> Result<v1::EnrollResponse, Status> {
    let id: NodeId = request.node_id.parse().map_err(|error| Status::invalid_argument(format!("{error}")))?;
    let version: String = request.version.escape_debug().take(64).collect();
    let outcome = match proof(leading, policy, &id, request).await {
        Ok(proof) => store(leading, &id, proof).await,
        Err(status) => Err(status),
    };
    let result = match &outcome {
        Ok(_) => "enrolled",
        Err(status) if status.code() == Code::Unavailable => "failed",
        Err(_) => "refused",
    };
    metrics::counter!("kibotos_enrollments_total", "result" => result).increment(1);
    match &outcome {
        Ok(_) => tracing::info!(node = %id, version, "node enrolled"),
        Err(status) => tracing::warn!(node = %id, version, refusal = status.message(), "enrollment {result}"),
    }
    outcome
}

fn unavailable(error: &dyn std::fmt::Display) -> Status {
    Status::unavailable(format!("try again: {error}"))
}

/// What the host shows, checked as far as that goes without the Node.
async fn proof(
    leading: &Leading,
    policy: Option<&Policy>,
    id: &NodeId,
    request: v1::EnrollRequest,
) -> Result<Proof, Status> {
    let (secret, token) = (request.secret, request.service_account_token);
    if token.is_empty() {
        let secret = Secret::from_bytes(&secret).map_err(|error| Status::invalid_argument(error.to_string()))?;
        return Ok(Proof::Token(secret.hash()));
    }
    if !secret.is_empty() {
        return Err(Status::invalid_argument("show the secret of a token or a service-account token, not both"));
    }
    match service_account::verify(&leading.nodes.ctx.client, policy, id, &token).await {
        Ok(()) => Ok(Proof::ServiceAccount),
        Err(Failure::Refused(refusal)) => Err(Status::new(refusal.code(), refusal.to_string())),
        Err(error @ Failure::Kubernetes { .. }) => Err(unavailable(&error)),
    }
}

async fn store(leading: &Leading, id: &NodeId, proof: Proof) -> Result<v1::EnrollResponse, Status> {
    let key = NodeKey::generate().map_err(|error| Status::internal(error.to_string()))?;
    let control = &leading.nodes;
    for _ in 0..ATTEMPTS {
        let (node, _) = read_node(&control.api(), id).await.map_err(|error| unavailable(&error))?;
        if node.is_none() && proof == Proof::ServiceAccount {
            register(leading, id).await?;
            continue;
        }
        let has_session = control.ctx.registry.get(id).is_some();
        if let Err(refusal) = decide(id, node.as_ref(), proof, has_session, Timestamp::now()) {
            return Err(Status::new(refusal.code(), refusal.to_string()));
        }
        let Some(node) = node else { continue };
        let status = enrolled(leading, id, &node, proof, key.hash());
        match control.write(id, &node, status).await {
            Ok(_) => {
                return Ok(v1::EnrollResponse {
                    node_key: key.expose().to_vec(),
                    cluster_id: control.ctx.cluster_id.clone(),
                });
            }
            Err(WriteError::Conflict { .. } | WriteError::Gone { .. }) => {}
            Err(error) => return Err(unavailable(&error)),
        }
    }
    Err(Status::unavailable(format!("Node {id} changes too often: try again")))
}

/// The cluster itself says that there is such a host: nobody has to make its Node by hand.
async fn register(leading: &Leading, id: &NodeId) -> Result<(), Status> {
    let node = Node::new(id.as_str(), NodeSpec::default());
    match leading.nodes.api().create(&PostParams::default(), &node).await {
        Ok(_) => {
            tracing::info!(node = %id, "node registered for a host of the cluster");
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => Err(unavailable(&error)),
    }
}

fn enrolled(leading: &Leading, id: &NodeId, node: &Node, proof: Proof, key: SecretHash) -> NodeStatus {
    let mut node = node.clone();
    let status = node.status.get_or_insert_default();
    status.admission = Some(Admission::Admitted);
    if let Some(former) = status.key_hash.replace(key.to_string()) {
        status.former_key_hashes.push(former);
        let surplus = status.former_key_hashes.len().saturating_sub(FORMER_KEYS);
        status.former_key_hashes.drain(..surplus);
    }
    if let Proof::Token(secret) = proof {
        status.used_secret_hash = Some(secret.to_string());
    }
    compute_status(&leading.nodes.observe(id, &node))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use kibo_crds::node::{Enrollment, Retirement, Revocation};

    use super::*;

    #[test]
    fn each_refusal_says_which() {
        let id: NodeId = "node-1".parse().unwrap();
        let at = |second| Timestamp::from_second(second).unwrap();
        let hash = |byte| Secret::from_bytes(&[byte; 32]).unwrap().hash();
        let node = |granted: Option<u8>, used: Option<u8>, retired: bool| {
            let mut node = Node::new("node-1", NodeSpec::default());
            node.spec.enrollment = granted.map(|byte| Enrollment {
                secret_hash: hash(byte).to_string(),
                expires_at: Time(at(100)),
                request_id: None,
            });
            node.spec.retirement = retired.then(Retirement::default);
            node.status =
                Some(NodeStatus { used_secret_hash: used.map(|byte| hash(byte).to_string()), ..NodeStatus::default() });
            node
        };
        let lived = |isolated| {
            let mut node = node(Some(1), Some(2), false);
            node.status.get_or_insert_default().incarnation = Some(Incarnation(3));
            node.status.get_or_insert_default().isolation = isolated;
            node
        };
        let isolated = |incarnation| kibo_crds::node::IsolationResult {
            incarnation: Incarnation(incarnation),
            request_id: None,
            state: kibo_crds::node::IsolationState::Finished,
            evidence: None,
            released_volumes: None,
            released_layers: None,
            failed_workspaces: None,
            started_at: None,
            finished_at: None,
        };
        let cases = vec![
            (Some(lived(None)), false, 99, Err(Refusal::NotIsolated(id.clone(), Incarnation(3)))),
            (Some(lived(Some(isolated(2)))), false, 99, Err(Refusal::NotIsolated(id.clone(), Incarnation(3)))),
            (Some(lived(Some(isolated(3)))), false, 99, Ok(())),
            (Some(node(Some(1), None, false)), false, 99, Ok(())),
            // A new token for a host that was installed anew.
            (Some(node(Some(1), Some(2), false)), false, 99, Ok(())),
            (None, false, 99, Err(Refusal::UnknownNode(id.clone()))),
            (Some(node(None, None, false)), false, 99, Err(Refusal::NoGrant(id.clone()))),
            (Some(node(Some(2), None, false)), false, 99, Err(Refusal::WrongSecret(id.clone()))),
            (Some(node(Some(1), Some(1), false)), false, 99, Err(Refusal::Used(id.clone()))),
            (Some(node(Some(2), Some(1), false)), false, 99, Err(Refusal::Used(id.clone()))),
            (Some(node(Some(1), None, false)), false, 100, Err(Refusal::Expired(id.clone()))),
            (Some(node(Some(1), None, true)), false, 99, Err(Refusal::Retired(id.clone()))),
            (Some(node(Some(1), None, false)), true, 99, Err(Refusal::SessionLive(id.clone()))),
        ];
        for (node, session, now, expected) in cases {
            assert_eq!(decide(&id, node.as_ref(), Proof::Token(hash(1)), session, at(now)), expected);
        }
    }

    #[test]
    fn kubernetes_word_stands_for_the_token_and_for_nothing_else() {
        let id: NodeId = "node-1".parse().unwrap();
        let decide = |change: &dyn Fn(&mut Node), session| {
            let mut node = Node::new("node-1", NodeSpec::default());
            node.status = Some(NodeStatus { admission: Some(Admission::Admitted), ..NodeStatus::default() });
            change(&mut node);
            super::decide(&id, Some(&node), Proof::ServiceAccount, session, Timestamp::now())
        };
        assert_eq!(decide(&|_| {}, false), Ok(()), "also when an earlier answer was lost");
        assert_eq!(decide(&|_| {}, true), Err(Refusal::SessionLive(id.clone())));
        let retired = |node: &mut Node| node.spec.retirement = Some(Retirement::default());
        assert_eq!(decide(&retired, false), Err(Refusal::Retired(id.clone())));
        let revoked = |node: &mut Node| node.spec.revocation = Some(Revocation::default());
        assert_eq!(decide(&revoked, false), Err(Refusal::Revoked(id.clone())));
        let lived = |node: &mut Node| node.status.get_or_insert_default().incarnation = Some(Incarnation(2));
        assert_eq!(decide(&lived, false), Err(Refusal::NotIsolated(id.clone(), Incarnation(2))));
    }
}
