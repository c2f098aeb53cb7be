//! `kibo enrollment issue`: a token with which one host becomes a node.
//!
//! The token is printed once and stored nowhere; the Node keeps the hash of its secret.

use std::{fs, path::PathBuf, time::Duration};

use clap::Args;
use jiff::Timestamp;
use k8s_openapi::{api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::Time};
use kibo_crds::{
    Node, NodeId,
    node::{Enrollment, NodeCommand, NodeSpec},
};
use kibo_protocol::{EnrollmentToken, Secret, SecretHash};
use kube::{ResourceExt as _, api::PostParams};
use serde::Serialize;

use crate::{
    client::{Cluster, duration},
    errors::{Error, Kind, On as _, Result, Subject},
    node::{Given, Submission, WriteArgs, is_isolated, subject},
    output::{OutputArgs, Present, present, remark, words::instant},
};

/// ConfigMap of the operator with its CA, which every user of the cluster may read.
const CA_CONFIG_MAP: &str = "kibotos-ca";
const CA_KEY: &str = "ca.crt";

#[derive(Args, Debug)]
pub struct Issue {
    node: NodeId,
    /// How long the token works
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = ttl)]
    ttl: Duration,
    /// Namespace of the operator
    #[arg(long, value_name = "NAMESPACE", default_value = "kibotos-system")]
    operator_namespace: String,
    /// The operator's CA certificate (PEM); default: read from the cluster
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// SHA-256 of the operator's CA certificate in DER, in hexadecimal
    #[arg(long, value_name = "HASH", conflicts_with = "ca_file")]
    ca_hash: Option<SecretHash>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// A token that never works helps nobody.
fn ttl(text: &str) -> Result<Duration, String> {
    duration(text).and_then(|ttl| if ttl.is_zero() { Err("must be longer than 0s".to_owned()) } else { Ok(ttl) })
}

pub async fn issue(cluster: &Cluster, args: Issue) -> Result<()> {
    let ca_hash = ca_hash(cluster, &args).await?;
    let secret = Secret::generate().map_err(|error| Error::new(Kind::Other, error.to_string()))?;
    let expires = Timestamp::now().checked_add(args.ttl).map_err(|_| Error::invalid("--ttl is too long"))?;
    let expires = Time(expires);
    let grant = Enrollment { secret_hash: secret.hash().to_string(), expires_at: expires.clone(), request_id: None };
    let known = store(cluster, &args.node, grant, args.write).await?;
    let token = EnrollmentToken { node_id: args.node.to_string(), secret, ca_hash };
    let issued = Issued { node: args.node, token: token.expose(), expires_at: instant(&expires) };
    present(args.output.form(), &issued)?;
    remark(&format!(
        "a host becomes node {} with this token, once, until {}; it goes into the file that control.token_file names",
        issued.node, issued.expires_at
    ));
    if let Some(obstacle) = known.as_ref().and_then(obstacle) {
        remark(&obstacle);
    }
    Ok(())
}

/// Why a host that came now would be refused with a token for this node. Somebody who replaces a host may know, and
/// isolate it next.
fn obstacle(node: &Node) -> Option<String> {
    let status = node.status.as_ref()?;
    let incarnation = status.incarnation.filter(|_| !is_isolated(status))?;
    let subject = subject(&node.name_any());
    let why = if status.has_live_session() {
        "another host has a live session as this node".to_owned()
    } else {
        format!("this node has lived, and what its host held in incarnation {incarnation} is not released")
    };
    Some(format!(
        "as it stands, a host with this token is refused: {why}. A host that still has its key needs no token; when the old host is off for good: {} --confirm-host-cannot-write",
        subject.command("isolate")
    ))
}

/// Puts the grant into the Node, in place of a former one, and gives back the Node as it was. What forbids it (the node
/// is retired) is a rule of the API.
async fn store(cluster: &Cluster, id: &NodeId, mut grant: Enrollment, write: WriteArgs) -> Result<Option<Node>> {
    let is_expected = write.expected_version.is_some();
    let submission = Submission::new(cluster, id.as_str(), &NodeCommand::Issue, write);
    grant.request_id = submission.id_if_named().cloned();
    let known = submission.api.get_opt(id.as_str()).await.on(&submission.subject)?;
    if known.is_none() {
        if is_expected {
            let text = format!("{} does not exist, so it is not in the expected version", submission.subject);
            return Err(Error::new(Kind::NotFound, text).next("leave --expected-version out to make it"));
        }
        let spec = NodeSpec { enrollment: Some(grant.clone()), ..NodeSpec::default() };
        match submission.api.create(&PostParams::default(), &Node::new(id.as_str(), spec)).await {
            // Somebody else was quicker.
            Err(kube::Error::Api(status)) if status.is_already_exists() => {}
            created => return created.map(Some).on(&submission.subject),
        }
    }
    let patch = |_: &Node| {
        // A merge patch keeps what it does not name.
        Ok(serde_json::json!({ "spec": { "revocation": null, "enrollment": {
            "secretHash": grant.secret_hash,
            "expiresAt": grant.expires_at,
            "requestId": grant.request_id,
        }}}))
    };
    match submission.submit(patch).await? {
        Given::Now => Ok(known),
        Given::Before => {
            let text = format!(
                "{}: the token of command {:?} was printed when the command was given, and is stored nowhere",
                submission.subject,
                submission.id.as_str()
            );
            Err(Error::new(Kind::FailedPrecondition, text)
                .next("if it is lost, issue another one, with another --command-id: the newest token counts"))
        }
    }
}

async fn ca_hash(cluster: &Cluster, args: &Issue) -> Result<SecretHash> {
    if let Some(hash) = args.ca_hash {
        return Ok(hash);
    }
    if let Some(path) = &args.ca_file {
        let text =
            fs::read(path).map_err(|error| Error::invalid(format!("cannot read {}: {error}", path.display())))?;
        return hash_of_pem(&text, &path.display().to_string());
    }
    let namespace = &args.operator_namespace;
    let subject = Subject::namespaced("ConfigMap", CA_CONFIG_MAP, namespace);
    let found = cluster.namespaced::<ConfigMap>(namespace).get_opt(CA_CONFIG_MAP).await.on(&subject)?;
    let pem = found.and_then(|map| map.data).and_then(|mut data| data.remove(CA_KEY)).ok_or_else(|| {
        Error::new(
            Kind::FailedPrecondition,
            format!("{subject} does not exist or has no {CA_KEY}, so the operator has not run yet"),
        )
        .next("start the operator, or name its namespace with --operator-namespace, or give --ca-file")
    })?;
    hash_of_pem(pem.as_bytes(), &subject.to_string())
}

fn hash_of_pem(pem: &[u8], source: &str) -> Result<SecretHash> {
    use rustls::pki_types::{CertificateDer, pem::PemObject as _};
    let der = CertificateDer::from_pem_slice(pem)
        .map_err(|error| Error::invalid(format!("{source} holds no certificate in PEM form: {error:?}")))?;
    Ok(EnrollmentToken::hash_of_ca(&der))
}

/// A token that was made just now.
struct Issued {
    node: NodeId,
    token: String,
    expires_at: String,
}

#[derive(Serialize)]
struct View<'a> {
    node_id: &'a str,
    token: &'a str,
    expires_at: &'a str,
}

impl Present for Issued {
    fn view(&self) -> impl Serialize {
        View { node_id: self.node.as_str(), token: &self.token, expires_at: &self.expires_at }
    }

    fn names(&self) -> Vec<String> {
        vec![self.token.clone()]
    }

    fn text(&self, _wide: bool) -> String {
        format!("{}\n", self.token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_certificate_is_refused() {
        let error = hash_of_pem(b"nothing", "ca.crt").unwrap_err();
        assert_eq!(error.kind, Kind::InvalidArgument);
        assert!(error.message.starts_with("ca.crt holds no certificate in PEM form"), "{error}");
    }

    #[test]
    fn a_token_that_would_be_refused_says_so() {
        let told = |status: serde_json::Value| {
            let node = serde_json::from_value(
                serde_json::json!({ "metadata": { "name": "n" }, "spec": {}, "status": status }),
            );
            obstacle(&node.unwrap()).unwrap_or_default()
        };
        assert_eq!(told(serde_json::json!({ "admission": "Admitted" })), "", "it has not lived");
        let lived = serde_json::json!({ "admission": "Admitted", "incarnation": 2 });
        assert!(told(lived.clone()).contains("in incarnation 2 is not released"), "{}", told(lived.clone()));
        let mut alive = lived.clone();
        alive["session"] = serde_json::json!({
            "id": "s", "alive": true, "incarnation": 2, "bootId": "b", "version": "v", "startedAt": "1970-01-01T00:00:00Z",
        });
        assert!(told(alive).contains("live session"));
        let mut isolated = lived;
        isolated["isolation"] = serde_json::json!({
            "incarnation": 2, "state": "Finished", "startedAt": "1970-01-01T00:00:00Z",
        });
        assert_eq!(told(isolated), "");
    }

    #[test]
    fn a_token_works_for_some_time() {
        assert_eq!(ttl("90s"), Ok(Duration::from_secs(90)));
        for bad in ["0s", "-5m", "", "x"] {
            assert!(ttl(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_token_alone_is_the_text() {
        let issued = Issued { node: "n".parse().unwrap(), token: "t".into(), expires_at: "x".into() };
        assert_eq!(issued.text(false), "t\n");
    }
}
