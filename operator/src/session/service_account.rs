//! Enrollment inside the cluster: Kubernetes says on which of its nodes the pod of a daemon runs, and that host
//! becomes the node of the same name. Only when the admin allows it, and only for hosts that carry the admin's label.

use std::{collections::BTreeMap, fmt, str::FromStr};

use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus},
    core::v1::Node as Host,
};
use kibo_crds::NodeId;
use kube::{Api, Client, api::PostParams};
use tonic::Code;

/// For whom a token must have been made: one for the API server or for anybody else is worth nothing here.
const AUDIENCE: &str = "kibotos-operator";
/// What the API server says beside the user of a token that is bound to a node, or to a pod on it.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const NODE_UID: &str = "authentication.kubernetes.io/node-uid";
/// Kubernetes makes tokens of one or two KiB.
const LONGEST_TOKEN: usize = 16 << 10;

/// What the admin allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The account of the daemons' pods, and no other.
    pub account: ServiceAccount,
    /// Marks the cluster's nodes that may become hosts.
    pub label: HostLabel,
    /// The label is not asked for.
    pub allow_untagged: bool,
}

/// `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAccount {
    namespace: String,
    name: String,
}

impl FromStr for ServiceAccount {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let rule = "must be <namespace>/<name> of a ServiceAccount";
        let (namespace, name) = text.split_once('/').ok_or(rule)?;
        let is_part = |part: &str| !part.is_empty() && !part.contains(['/', ':']);
        if !is_part(namespace) || !is_part(name) {
            return Err(rule);
        }
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

impl ServiceAccount {
    /// As Kubernetes names its user.
    fn user(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.name)
    }
}

impl fmt::Display for ServiceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// `key=value`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostLabel {
    key: String,
    value: String,
}

impl FromStr for HostLabel {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (key, value) = text.split_once('=').ok_or("must be <key>=<value>")?;
        if key.is_empty() {
            return Err("must be <key>=<value>");
        }
        Ok(Self { key: key.to_owned(), value: value.to_owned() })
    }
}

impl fmt::Display for HostLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.key, self.value)
    }
}

impl HostLabel {
    fn is_on(&self, labels: Option<&BTreeMap<String, String>>) -> bool {
        labels.and_then(|labels| labels.get(&self.key)).is_some_and(|value| *value == self.value)
    }
}

/// Why a token does not make its host a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(
        "the admin of this cluster has not allowed that hosts enroll by a service-account token: issue a token with `kibo enrollment issue {0}`, or start the operator with --enroll-service-account"
    )]
    NotAllowed(NodeId),
    #[error(
        "Kubernetes does not accept this service-account token ({0}): it must be a fresh one for the audience {AUDIENCE}"
    )]
    NotAuthentic(String),
    #[error("the token is not for the audience {AUDIENCE}: project one for it into the pod")]
    OtherAudience,
    #[error("the token is of {shown}, and hosts enroll only as ServiceAccount {allowed}")]
    OtherAccount { shown: String, allowed: ServiceAccount },
    #[error(
        "the token does not say on which node of the cluster its pod runs: it must be bound to a pod or a node (Kubernetes 1.32 or newer)"
    )]
    NotBound,
    #[error("the token was given to a pod on node {bound}, so it does not make its host node {asked}")]
    OtherHost { bound: String, asked: NodeId },
    #[error("the cluster has no node {0} any more, or another one of that name: the token is of one that is gone")]
    HostGone(NodeId),
    #[error(
        "node {0} of the cluster does not carry the label {1}: `kubectl label node {0} {1}` makes it a host, or start the operator with --allow-untagged-nodes"
    )]
    Untagged(NodeId, HostLabel),
}

impl Refusal {
    pub fn code(&self) -> Code {
        match self {
            Self::NotAuthentic(_) | Self::OtherAudience => Code::Unauthenticated,
            Self::OtherAccount { .. } | Self::NotBound | Self::OtherHost { .. } => Code::PermissionDenied,
            Self::NotAllowed(_) | Self::HostGone(_) | Self::Untagged(..) => Code::FailedPrecondition,
        }
    }
}

/// No answer, or one that says no.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("failed to ask Kubernetes about the token of node {node}: {source}")]
    Kubernetes { node: NodeId, source: Box<kube::Error> },
}

/// Asks Kubernetes whose token it is and where its pod runs; `Ok` when its host may become the node.
pub async fn verify(client: &Client, policy: Option<&Policy>, id: &NodeId, token: &str) -> Result<(), Failure> {
    let policy = policy.ok_or_else(|| Refusal::NotAllowed(id.clone()))?;
    if token.len() > LONGEST_TOKEN {
        return Err(Refusal::NotAuthentic("it is longer than any token".to_owned()).into());
    }
    let failed = |source| Failure::Kubernetes { node: id.clone(), source: Box::new(source) };
    let review = TokenReview {
        spec: TokenReviewSpec { token: Some(token.to_owned()), audiences: Some(vec![AUDIENCE.to_owned()]) },
        ..TokenReview::default()
    };
    let answer = Api::<TokenReview>::all(client.clone()).create(&PostParams::default(), &review).await;
    let bound = bound_to(policy, id, answer.map_err(failed)?.status.unwrap_or_default())?;
    let host = Api::<Host>::all(client.clone()).get_opt(id.as_str()).await.map_err(failed)?;
    Ok(may_be_host(policy, id, &bound, host.as_ref())?)
}

/// The uid of the cluster's node that a token is bound to; older API servers do not say it.
#[derive(Debug, PartialEq, Eq)]
struct Bound {
    uid: Option<String>,
}

/// What Kubernetes says of the token. Pure.
fn bound_to(policy: &Policy, id: &NodeId, answer: TokenReviewStatus) -> Result<Bound, Refusal> {
    if !answer.authenticated.unwrap_or_default() {
        // It names what is wrong, never the token.
        return Err(Refusal::NotAuthentic(answer.error.unwrap_or_else(|| "it is not valid".to_owned())));
    }
    // An API server that knows no audiences says none, and has checked none.
    if !answer.audiences.unwrap_or_default().iter().any(|audience| audience == AUDIENCE) {
        return Err(Refusal::OtherAudience);
    }
    let user = answer.user.unwrap_or_default();
    let shown = user.username.unwrap_or_default();
    if shown != policy.account.user() {
        return Err(Refusal::OtherAccount { shown, allowed: policy.account.clone() });
    }
    let extra = user.extra.unwrap_or_default();
    let said = |key: &str| match extra.get(key).map(Vec::as_slice) {
        Some([only]) if !only.is_empty() => Some(only.clone()),
        _ => None,
    };
    let bound = said(NODE_NAME).ok_or(Refusal::NotBound)?;
    if bound != id.as_str() {
        return Err(Refusal::OtherHost { bound, asked: id.clone() });
    }
    Ok(Bound { uid: said(NODE_UID) })
}

/// Whether the cluster's node is the one that the token names, and one that the admin marked. Pure.
fn may_be_host(policy: &Policy, id: &NodeId, bound: &Bound, host: Option<&Host>) -> Result<(), Refusal> {
    let host = host.ok_or_else(|| Refusal::HostGone(id.clone()))?;
    let is_another = bound.uid.is_some() && bound.uid != host.metadata.uid;
    if is_another || host.metadata.deletion_timestamp.is_some() {
        return Err(Refusal::HostGone(id.clone()));
    }
    if !policy.allow_untagged && !policy.label.is_on(host.metadata.labels.as_ref()) {
        return Err(Refusal::Untagged(id.clone(), policy.label.clone()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::authentication::v1::UserInfo;
    use kube::api::ObjectMeta;

    use super::*;

    fn policy() -> Policy {
        Policy {
            account: "kibotos-system/kibotos-node".parse().unwrap(),
            label: "kibotos.dev/host=true".parse().unwrap(),
            allow_untagged: false,
        }
    }

    fn id() -> NodeId {
        "host-1".parse().unwrap()
    }

    fn answer(change: impl FnOnce(&mut TokenReviewStatus, &mut UserInfo)) -> TokenReviewStatus {
        let one = |text: &str| vec![text.to_owned()];
        let extra = BTreeMap::from([(NODE_NAME.to_owned(), one("host-1")), (NODE_UID.to_owned(), one("u-1"))]);
        let mut user = UserInfo {
            username: Some("system:serviceaccount:kibotos-system:kibotos-node".to_owned()),
            extra: Some(extra),
            ..UserInfo::default()
        };
        let mut status = TokenReviewStatus {
            authenticated: Some(true),
            audiences: Some(one(AUDIENCE)),
            ..TokenReviewStatus::default()
        };
        change(&mut status, &mut user);
        TokenReviewStatus { user: Some(user), ..status }
    }

    #[test]
    fn what_kubernetes_says_of_a_token() {
        let extra = |user: &mut UserInfo, key: &str, values: &[&str]| {
            let values = values.iter().map(ToString::to_string).collect();
            user.extra.get_or_insert_default().insert(key.to_owned(), values);
        };
        let bound = |answer| bound_to(&policy(), &id(), answer);
        assert_eq!(bound(answer(|_, _| {})), Ok(Bound { uid: Some("u-1".to_owned()) }));
        assert_eq!(bound(TokenReviewStatus::default()), Err(Refusal::NotAuthentic("it is not valid".to_owned())));
        let expired = answer(|status, _| {
            (status.authenticated, status.error) = (Some(false), Some("token has expired".to_owned()));
        });
        assert_eq!(bound(expired), Err(Refusal::NotAuthentic("token has expired".to_owned())));
        assert_eq!(bound(answer(|status, _| status.audiences = None)), Err(Refusal::OtherAudience));
        let other = "system:serviceaccount:kibotos-system:default";
        assert_eq!(
            bound(answer(|_, user| user.username = Some(other.to_owned()))),
            Err(Refusal::OtherAccount { shown: other.to_owned(), allowed: policy().account })
        );
        assert_eq!(bound(answer(|_, user| user.extra = None)), Err(Refusal::NotBound));
        assert_eq!(bound(answer(|_, user| extra(user, NODE_NAME, &["host-1", "host-2"]))), Err(Refusal::NotBound));
        let elsewhere = answer(|_, user| extra(user, NODE_NAME, &["host-2"]));
        assert_eq!(bound(elsewhere), Err(Refusal::OtherHost { bound: "host-2".to_owned(), asked: id() }));
    }

    #[test]
    fn only_a_marked_node_of_the_cluster_is_a_host() {
        let host = |uid: &str, label: Option<&str>| Host {
            metadata: ObjectMeta {
                uid: Some(uid.to_owned()),
                labels: label.map(|value| BTreeMap::from([("kibotos.dev/host".to_owned(), value.to_owned())])),
                ..ObjectMeta::default()
            },
            ..Host::default()
        };
        let untagged = || Err(Refusal::Untagged(id(), policy().label));
        let gone = || Err(Refusal::HostGone(id()));
        let lenient = Policy { allow_untagged: true, ..policy() };
        for (policy, host, expected) in [
            (policy(), Some(host("u-1", Some("true"))), Ok(())),
            (policy(), Some(host("u-1", Some("false"))), untagged()),
            (policy(), Some(host("u-1", None)), untagged()),
            (lenient.clone(), Some(host("u-1", None)), Ok(())),
            (lenient, Some(host("u-2", None)), gone()),
            (policy(), None, gone()),
        ] {
            let bound = Bound { uid: Some("u-1".to_owned()) };
            assert_eq!(may_be_host(&policy, &id(), &bound, host.as_ref()), expected);
        }
    }

    #[test]
    fn names_from_the_command_line() {
        assert!("a/b".parse::<ServiceAccount>().is_ok() && "a=".parse::<HostLabel>().is_ok());
        for bad in ["a", "/b", "a/", "a/b/c", "a:b/c"] {
            assert!(bad.parse::<ServiceAccount>().is_err(), "{bad}");
        }
        assert!("=b".parse::<HostLabel>().is_err() && "a".parse::<HostLabel>().is_err());
    }
}
