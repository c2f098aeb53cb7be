//! How hosts become nodes: by a token that an admin issued, or by what Kubernetes says of the daemon's pod. Each reason
//! to refuse has its own code and words.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Node as ClusterNode, Pod, ServiceAccount};
use kibo_crds::node::{Admission, NodePhase};
use kibo_crds::{Incarnation, Node, StoragePool};
use kibo_e2e::local::{Component, NAMESPACE};
use kibo_e2e::suite::host::{Host, dial, issue};
use kibo_e2e::suite::{Place, Suite, eventually, secrets};
use kibo_protocol::{NodeKey, Secret, v1};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tonic::{Code, Status};

/// Of the pods of daemons, as the operator is told.
const ACCOUNT: &str = "e2e-daemon";
const AUDIENCE: &str = "kibotos-operator";
const ARGS: [&str; 4] =
    ["--enroll-service-account", "kibotos-system/e2e-daemon", "--enroll-node-label", "e2e.example/host=yes"];
const SOON: u64 = 60;

fn main() -> ExitCode {
    Suite::with_everything()
        .operator_args(ARGS)
        .test("every_unusable_token_has_its_own_refusal", every_unusable_token_has_its_own_refusal)
        .test("a_pod_enrolls_the_host_on_which_it_runs", a_pod_enrolls_the_host_on_which_it_runs)
        .test("no_other_token_of_the_cluster_enrolls_a_host", no_other_token_of_the_cluster_enrolls_a_host)
        .test("a_daemon_becomes_a_node_by_its_pods_token", a_daemon_becomes_a_node_by_its_pods_token)
        .test("a_revoked_host_comes_back_by_a_new_token", a_revoked_host_comes_back_by_a_new_token)
        .test("a_retired_host_is_told_and_keeps_quiet", a_retired_host_is_told_and_keeps_quiet)
        .alone("only_what_the_admin_allowed_counts", only_what_the_admin_allowed_counts)
        .run()
}

/// The key, or the refusal.
async fn enroll(place: &Place, request: v1::EnrollRequest) -> Result<Result<NodeKey, Status>> {
    match dial(place).await?.enroll(request).await {
        Ok(answer) => {
            let key = answer.into_inner().node_key;
            secrets::remember(&key);
            Ok(Ok(NodeKey::from_bytes(&key)?))
        }
        Err(status) => Ok(Err(status)),
    }
}

fn with_secret(id: &str, secret: &Secret) -> v1::EnrollRequest {
    v1::EnrollRequest { node_id: id.to_owned(), secret: secret.expose().to_vec(), ..v1::EnrollRequest::default() }
}

fn with_token(id: &str, token: &str) -> v1::EnrollRequest {
    v1::EnrollRequest {
        node_id: id.to_owned(),
        service_account_token: token.to_owned(),
        ..v1::EnrollRequest::default()
    }
}

async fn refused(place: &Place, request: v1::EnrollRequest, code: Code, words: &str) -> Result<()> {
    let id = request.node_id.clone();
    let status = enroll(place, request).await?.err().with_context(|| format!("{id} was enrolled, not: {words}"))?;
    ensure!(status.code() == code && status.message().contains(words), "not {code:?} {words:?}: {status:?}");
    Ok(())
}

async fn patch(place: &Place, id: &str, spec: Value) -> Result<Node> {
    let patch = Patch::Merge(json!({ "spec": spec }));
    Ok(place.all::<Node>().patch(id, &PatchParams::default(), &patch).await?)
}

async fn every_unusable_token_has_its_own_refusal(place: Arc<Place>) -> Result<()> {
    let (secret, wrong) = (secrets::generate()?, secrets::generate()?);
    let day = Duration::from_secs(86_400);
    refused(&place, with_secret("tokens-0", &secret), Code::NotFound, "there is no Node").await?;
    issue(&place, "tokens-1", &secret, day).await?;
    refused(&place, with_secret("tokens-1", &wrong), Code::PermissionDenied, "the newest token counts").await?;

    // Two hosts with one token at the same moment.
    let twice = tokio::join!(
        enroll(&place, with_secret("tokens-1", &secret)),
        enroll(&place, with_secret("tokens-1", &secret))
    );
    let (key, late) = match (twice.0?, twice.1?) {
        (Ok(key), Err(late)) | (Err(late), Ok(key)) => (key, late),
        both => bail!("one is enrolled, and one refused: {both:?}"),
    };
    ensure!(late.code() == Code::AlreadyExists, "{late:?}");
    // Of the key nothing is kept but its hash.
    let node = place.all::<Node>().get("tokens-1").await?;
    let stored = node.status.as_ref().and_then(|status| status.key_hash.clone());
    ensure!(key.expose().len() == 32 && stored == Some(key.hash().to_string()), "{stored:?}");
    refused(&place, with_secret("tokens-1", &secret), Code::AlreadyExists, "was used already").await?;

    issue(&place, "tokens-2", &secret, Duration::ZERO).await?;
    refused(&place, with_secret("tokens-2", &secret), Code::FailedPrecondition, "has expired").await?;
    issue(&place, "tokens-3", &secret, day).await?;
    patch(&place, "tokens-3", json!({ "enrollment": null })).await?;
    refused(&place, with_secret("tokens-3", &secret), Code::FailedPrecondition, "it was revoked").await?;

    // A node that was revoked, until an admin issues anew: which takes the revocation back when it is carried out.
    issue(&place, "tokens-4", &secret, day).await?;
    patch(&place, "tokens-4", json!({ "revocation": {} })).await?;
    refused(
        &place,
        with_secret("tokens-4", &secret),
        Code::FailedPrecondition,
        "the enrollment of node tokens-4 was revoked",
    )
    .await?;
    refused(&place, with_secret("tokens-4", &Secret::from_bytes(&[0; 32])?), Code::FailedPrecondition, "was revoked")
        .await?;
    let short = v1::EnrollRequest { secret: vec![1; 31], ..with_secret("tokens-4", &secret) };
    refused(&place, short, Code::InvalidArgument, "must have 32 bytes").await?;
    let nobody = v1::EnrollRequest { node_id: "x".repeat(64 << 10), ..with_secret("", &secret) };
    let status = enroll(&place, nobody).await?.err().context("enrolled")?;
    ensure!(status.code() == Code::InvalidArgument && status.message().len() < 1024, "{status:?}");
    Ok(())
}

/// The cluster in which daemons run as pods of this ServiceAccount.
struct Cluster<'a> {
    place: &'a Place,
    account: &'a str,
}

impl Cluster<'_> {
    fn accounts(&self) -> Api<ServiceAccount> {
        Api::namespaced(self.place.client(), NAMESPACE)
    }

    async fn ensure_account(&self) -> Result<()> {
        let account = serde_json::from_value(json!({ "metadata": { "name": self.account } }))?;
        match self.accounts().create(&PostParams::default(), &account).await {
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
            other => Ok(other.map(drop)?),
        }
    }

    /// A node of the cluster; labelled as the admin's host or not.
    async fn node(&self, name: &str, is_host: bool) -> Result<ClusterNode> {
        let labels = if is_host { json!({ "e2e.example/host": "yes" }) } else { json!({ "e2e.example/host": "no" }) };
        let node = serde_json::from_value(json!({ "metadata": { "name": name, "labels": labels } }))?;
        Ok(Api::all(self.place.client()).create(&PostParams::default(), &node).await?)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.place.client(), NAMESPACE)
    }

    /// A pod on that node. Nobody runs it, and for its token nobody needs to.
    async fn pod(&self, node: &str) -> Result<Pod> {
        let pod = serde_json::from_value(json!({
            "metadata": { "name": format!("daemon-{node}") },
            "spec": {
                "nodeName": node, "serviceAccountName": self.account, "terminationGracePeriodSeconds": 0,
                "containers": [{ "name": "daemon", "image": "daemon" }],
            },
        }))?;
        Ok(self.pods().create(&PostParams::default(), &pod).await?)
    }

    /// What the kubelet would project into a pod; `bound` is the object that the token lives and dies with.
    async fn token(&self, audience: &str, bound: Option<Value>) -> Result<String> {
        let spec = json!({ "audiences": [audience], "boundObjectRef": bound, "expirationSeconds": 600 });
        let request: TokenRequest = serde_json::from_value(json!({ "metadata": {}, "spec": spec }))?;
        let answer = self.accounts().create_token_request(self.account, &PostParams::default(), &request).await?;
        let token = answer.status.context("a token")?.token;
        secrets::remember(token.as_bytes());
        Ok(token)
    }

    async fn token_of_pod(&self, pod: &Pod, audience: &str) -> Result<String> {
        let (name, uid) = (&pod.metadata.name, &pod.metadata.uid);
        self.token(audience, Some(json!({ "apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid }))).await
    }
}

async fn a_pod_enrolls_the_host_on_which_it_runs(place: Arc<Place>) -> Result<()> {
    let cluster = Cluster { place: &place, account: ACCOUNT };
    cluster.ensure_account().await?;
    cluster.node("pod-host-1", true).await?;
    let pod = cluster.pod("pod-host-1").await?;
    let token = cluster.token_of_pod(&pod, AUDIENCE).await?;
    ensure!(place.all::<Node>().get_opt("pod-host-1").await?.is_none(), "nobody has made its Node");
    enroll(&place, with_token("pod-host-1", &token)).await??;
    let node = place.all::<Node>().get("pod-host-1").await?;
    ensure!(node.status.and_then(|status| status.admission) == Some(Admission::Admitted));

    // The answer was lost, perhaps: the host asks again. The newer key counts, and opens a session.
    let key = enroll(&place, with_token("pod-host-1", &token)).await??;
    let host = Host {
        client: dial(&place).await?,
        id: "pod-host-1".to_owned(),
        key,
        boot_id: "boot-1".to_owned(),
        pools: Vec::new(),
    };
    let session = host.session(None).await?;
    refused(&place, with_token("pod-host-1", &token), Code::FailedPrecondition, "live control session").await?;
    drop(session);
    let is_over = |node: &Node| node.status.iter().flat_map(|status| &status.session).all(|session| !session.alive);
    place.watched(place.all::<Node>(), "pod-host-1", "its session is over", SOON, is_over).await?;
    refused(&place, with_token("pod-host-1", &token), Code::FailedPrecondition, "isolate").await?;
    Ok(())
}

async fn no_other_token_of_the_cluster_enrolls_a_host(place: Arc<Place>) -> Result<()> {
    let cluster = Cluster { place: &place, account: ACCOUNT };
    cluster.ensure_account().await?;
    let node = cluster.node("pod-host-2", true).await?;
    let pod = cluster.pod("pod-host-2").await?;
    let token = cluster.token_of_pod(&pod, AUDIENCE).await?;
    let unauthenticated = Code::Unauthenticated;
    refused(&place, with_token("pod-host-2", "x.y.z"), unauthenticated, "Kubernetes does not accept").await?;
    refused(&place, with_token("pod-host-2", &"x".repeat(64 << 10)), unauthenticated, "longer than any token").await?;
    let huge = with_token("pod-host-2", &"x".repeat(1 << 20));
    refused(&place, huge, Code::ResourceExhausted, "the first message has").await?;
    let cut = &token[..token.len() - 3];
    refused(&place, with_token("pod-host-2", cut), unauthenticated, "Kubernetes does not accept").await?;
    let for_others = cluster.token_of_pod(&pod, "somebody-else").await?;
    refused(&place, with_token("pod-host-2", &for_others), unauthenticated, "for the audience").await?;

    let denied = Code::PermissionDenied;
    let loose = cluster.token(AUDIENCE, None).await?;
    refused(&place, with_token("pod-host-2", &loose), denied, "does not say on which node").await?;
    refused(&place, with_token("pod-host-3", &token), denied, "a pod on node pod-host-2").await?;
    let stranger = Cluster { place: &place, account: "default" };
    let on_node = Some(json!({ "apiVersion": "v1", "kind": "Node", "name": "pod-host-2", "uid": node.metadata.uid }));
    let others = stranger.token(AUDIENCE, on_node.clone()).await?;
    refused(&place, with_token("pod-host-2", &others), denied, "kibotos-system:default, and hosts enroll only").await?;
    let both = v1::EnrollRequest { secret: vec![1; 32], ..with_token("pod-host-2", &token) };
    refused(&place, both, Code::InvalidArgument, "not both").await?;

    cluster.node("pod-host-4", false).await?;
    let untagged = cluster.pod("pod-host-4").await?;
    let untagged = cluster.token_of_pod(&untagged, AUDIENCE).await?;
    let words = "does not carry the label e2e.example/host=yes";
    refused(&place, with_token("pod-host-4", &untagged), Code::FailedPrecondition, words).await?;
    ensure!(place.all::<Node>().get_opt("pod-host-4").await?.is_none(), "a refusal leaves no Node behind");

    // A token that is bound to the node itself is as good, until that node is gone.
    let token = cluster.token(AUDIENCE, on_node).await?;
    let nodes: Api<ClusterNode> = Api::all(place.client());
    nodes.delete("pod-host-2", &DeleteParams::default()).await?;
    refused(&place, with_token("pod-host-2", &token), unauthenticated, "Kubernetes does not accept").await?;
    Ok(())
}

async fn a_daemon_becomes_a_node_by_its_pods_token(place: Arc<Place>) -> Result<()> {
    let cluster = Cluster { place: &place, account: ACCOUNT };
    cluster.ensure_account().await?;
    cluster.node("pod-host-5", true).await?;
    let pod = cluster.pod("pod-host-5").await?;
    let path = place.cluster().layout().root().join("pod-host-5.token");
    std::fs::write(&path, cluster.token_of_pod(&pod, AUDIENCE).await?)?;
    // Its configuration does not say who it is: the token does.
    place.node_named("pod-host-5", "2", "1Gi", |node| node.service_account_token = Some(path)).await?;
    let is_ready = |node: &Node| node.status.as_ref().and_then(|status| status.phase) == Some(NodePhase::Ready);
    place.watched(place.all::<Node>(), "pod-host-5", "is ready", SOON, is_ready).await?;
    Ok(())
}

/// Revoked, it has no session and belongs to no pool; its former life is to be isolated before a host may begin another.
async fn a_revoked_host_comes_back_by_a_new_token(place: Arc<Place>) -> Result<()> {
    let id = place.node("1", "512Mi").await?;
    let daemon = Component::Node(id.clone());
    place.kibo(&["enrollment", "revoke", &id]).await?.ok()?;
    let is_out = |node: &Node| {
        let status = node.status.clone().unwrap_or_default();
        status.phase == Some(NodePhase::Revoked) && status.session.is_none_or(|session| !session.alive)
    };
    place.watched(place.all::<Node>(), &id, "is revoked", SOON, is_out).await?;
    let pool = format!("local-{id}");
    let has_left = |pool: &StoragePool| pool.status.as_ref().is_none_or(|status| status.members.is_empty());
    place.watched(place.all::<StoragePool>(), &pool, "has lost its member", SOON, has_left).await?;
    says_once(&place, &id, "SESSION_REFUSAL_REVOKED").await?;

    place.kibo(&["node", "isolate", &id, "--confirm-host-cannot-write"]).await?.ok()?;
    let token = place.kibo(&["enrollment", "issue", &id]).await?.ok()?;
    std::fs::write(place.cluster().layout().node(&id).join("enroll.token"), token)?;
    // Its former life is over: it is told, and ends. Started again, it finds the new token.
    place.cluster().kill(&daemon).await?;
    place.cluster().spawn(&daemon).await?;
    let ended = async || Ok(place.cluster().process(&daemon).is_none().then_some(()));
    eventually("the isolated daemon has ended", Duration::from_secs(SOON), ended).await?;
    place.cluster().start(&daemon).await?;
    let status = place.all::<Node>().get(&id).await?.status.unwrap_or_default();
    ensure!(status.admission == Some(Admission::Admitted) && status.incarnation == Some(Incarnation(2)), "{status:#?}");
    Ok(())
}

async fn a_retired_host_is_told_and_keeps_quiet(place: Arc<Place>) -> Result<()> {
    let id = place.node("1", "512Mi").await?;
    let daemon = Component::Node(id.clone());
    place.kibo(&["node", "drain", &id, "--wait"]).await?.ok()?;
    place.kibo(&["node", "retire", &id, "--yes"]).await?.ok()?;
    says_once(&place, &id, "SESSION_REFUSAL_RETIRED").await?;
    // One that is started anew hears the same, and does the same.
    place.cluster().kill(&daemon).await?;
    let told = refusals(&place, &id);
    place.cluster().spawn(&daemon).await?;
    let again = async || Ok((refusals(&place, &id).len() > told.len()).then_some(()));
    eventually("the new daemon says why it has no session", Duration::from_secs(SOON), again).await?;
    says_once(&place, &id, "SESSION_REFUSAL_RETIRED").await
}

/// Lines of a daemon's log, of all its lives.
fn refusals(place: &Place, id: &str) -> Vec<String> {
    let log = place.cluster().log(&Component::Node(id.to_owned()));
    let text = std::fs::read_to_string(log).unwrap_or_default();
    text.lines().filter(|line| line.contains("no session: refused")).map(str::to_owned).collect()
}

/// A person has to act: the daemon says so, stays where it is, and asks again slowly without saying it again.
async fn says_once(place: &Place, id: &str, reason: &str) -> Result<()> {
    let told = async || Ok(refusals(place, id).last().is_some_and(|line| line.contains(reason)).then_some(()));
    eventually("the daemon says why it has no session", Duration::from_secs(SOON), told).await?;
    let lines = refusals(place, id);
    let is_slow = |line: &String| line.contains(reason) && line.contains("Retry(60s)");
    ensure!(lines.iter().all(is_slow), "{lines:#?}");
    ensure!(place.cluster().process(&Component::Node(id.to_owned())).is_some(), "the daemon has ended");
    Ok(())
}

async fn only_what_the_admin_allowed_counts(place: Arc<Place>) -> Result<()> {
    let cluster = Cluster { place: &place, account: ACCOUNT };
    cluster.ensure_account().await?;
    cluster.node("pod-host-6", false).await?;
    let pod = cluster.pod("pod-host-6").await?;
    let token = cluster.token_of_pod(&pod, AUDIENCE).await?;
    let restarted_with = async |args: &[&str]| {
        place.cluster().set_operator_args(args)?;
        place.cluster().stop(&Component::Operator).await?;
        anyhow::Ok(place.cluster().start(&Component::Operator).await?)
    };
    restarted_with(&[]).await?;
    refused(&place, with_token("pod-host-6", &token), Code::FailedPrecondition, "has not allowed").await?;
    let lenient = [ARGS.as_slice(), &["--allow-untagged-nodes"]].concat();
    restarted_with(&lenient).await?;
    let enrolled = enroll(&place, with_token("pod-host-6", &token)).await?;
    restarted_with(&ARGS).await?;
    enrolled?;
    Ok(())
}
