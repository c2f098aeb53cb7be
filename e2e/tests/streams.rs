//! exec and log through the aggregated API, as existing Kubernetes client code speaks it.

use std::borrow::Cow;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures::AsyncBufReadExt as _;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Status};
use kibo_crds::workspace::WorkspacePhase;
use kibo_e2e::local::Component;
use kibo_e2e::suite::memory::resident;
use kibo_e2e::suite::program::Program;
use kibo_e2e::suite::{Place, STOP, Suite, eventually};
use kube::api::{Api, AttachParams, AttachedProcess, LogParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Resource};
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

fn main() -> ExitCode {
    Suite::with_everything()
        .test("exec_carries_every_byte_and_the_status", bytes_and_status)
        .test("rights_on_the_subresources_decide", rights)
        .test("what_cannot_be_done_is_refused_in_words", refusals)
        .test("a_slow_reader_stops_the_writer_in_the_guest", slow_reader)
        .test("a_client_that_goes_away_ends_its_command", client_gone)
        .test("a_stream_that_breaks_says_so", broken_stream)
        .test("a_log_is_followed_and_outlives_the_run", logs)
        .run()
}

/// A Workspace as a group of its own shows it: for `Api::exec` and `Api::logs`.
#[derive(Clone, Debug, Deserialize)]
struct Streams {
    metadata: ObjectMeta,
}

impl Resource for Streams {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind(&(): &()) -> Cow<'_, str> {
        "Workspace".into()
    }

    fn group(&(): &()) -> Cow<'_, str> {
        "subresources.kibotos.dev".into()
    }

    fn version(&(): &()) -> Cow<'_, str> {
        "v1alpha1".into()
    }

    fn plural(&(): &()) -> Cow<'_, str> {
        "workspaces".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl kube::api::Execute for Streams {}
impl kube::api::Log for Streams {}

/// The streams of this test's Workspaces, for the administrator or for a user without any rights of its own.
async fn streams(place: &Place, user: Option<&str>) -> Result<Api<Streams>> {
    let kubeconfig = Kubeconfig::read_from(place.cluster().layout().kubeconfig())?;
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    config.auth_info.impersonate = user.map(str::to_owned);
    // An answer that says unavailable is what some tests want to see.
    config.default_retry = false;
    Ok(Api::namespaced(Client::try_from(config)?, place.namespace()))
}

/// A Workspace named w that runs.
async fn running(place: &Place) -> Result<Api<Streams>> {
    place.node("1", "512Mi").await?;
    place.create_workspace("w", json!({})).await?;
    place.available("w").await?;
    streams(place, None).await
}

fn sh(line: &str) -> [&str; 3] {
    ["sh", "-c", line]
}

/// Everything that a command printed, and how it ended.
async fn finish(mut process: AttachedProcess) -> Result<(Vec<u8>, Vec<u8>, Status)> {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let (mut stdout, mut stderr) = (process.stdout().context("stdout")?, process.stderr().context("stderr")?);
    let status = process.take_status().context("a status")?;
    let (read_out, read_err, status) = tokio::join!(stdout.read_to_end(&mut out), stderr.read_to_end(&mut err), status);
    read_out?;
    read_err?;
    Ok((out, err, status.context("the command ended without a status")?))
}

/// The exit code as Kubernetes clients read it.
fn code(status: &Status) -> Option<i32> {
    if status.status.as_deref() == Some("Success") {
        return Some(0);
    }
    let causes = status.details.as_ref()?.causes.as_ref()?;
    causes.iter().find(|cause| cause.reason.as_deref() == Some("ExitCode"))?.message.as_ref()?.parse().ok()
}

/// The refusal of a request that must not be served.
fn refused<T>(outcome: Result<T, kube::Error>) -> Result<(u16, String)> {
    match outcome {
        Err(kube::Error::Api(status)) => Ok((status.code, status.message)),
        Err(error) => bail!("not refused with a Status but {error}"),
        Ok(_) => bail!("it was served"),
    }
}

async fn bytes_and_status(place: Arc<Place>) -> Result<()> {
    let api = running(&place).await?;
    let mut process = api.exec("w", sh("cat; echo err >&2; exit 7"), &AttachParams::default().stdin(true)).await?;
    let sent: Vec<u8> = (0..4_u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut stdin = process.stdin().context("stdin")?;
    let data = sent.clone();
    let feed = tokio::spawn(async move {
        stdin.write_all(&data).await?;
        stdin.shutdown().await
    });
    let (out, err, status) = finish(process).await?;
    feed.await??;
    ensure!(out.len() == sent.len(), "{} of {} bytes came back", out.len(), sent.len());
    ensure!(Sha256::digest(&out) == Sha256::digest(&sent), "other bytes came back");
    ensure!(err == b"err\n", "{}", String::from_utf8_lossy(&err));
    ensure!(code(&status) == Some(7), "{status:?}");

    let ended = |line: &'static str| {
        let api = api.clone();
        async move { finish(api.exec("w", sh(line), &AttachParams::default()).await?).await.map(|it| it.2) }
    };
    ensure!(code(&ended("true").await?) == Some(0));
    let killed = ended("kill -9 $$").await?;
    ensure!(code(&killed) == Some(137), "{killed:?}");
    ensure!(killed.message.as_deref().is_some_and(|text| text.contains("SIGKILL")), "{killed:?}");

    // Many at once do not disturb one another.
    let many = (0..12).map(|number| {
        let api = api.clone();
        async move {
            let line = format!("sleep 0.2; echo {number}");
            let (out, _, status) = finish(api.exec("w", sh(&line), &AttachParams::default()).await?).await?;
            ensure!(out == format!("{number}\n").as_bytes() && code(&status) == Some(0), "{number}: {status:?}");
            Ok(())
        }
    });
    futures::future::try_join_all(many).await.map(drop)
}

async fn rights(place: Arc<Place>) -> Result<()> {
    running(&place).await?;
    let get_only = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": {"name": "get-only", "namespace": place.namespace()},
        "rules": [{"apiGroups": ["subresources.kibotos.dev"], "resources": ["workspaces/exec"], "verbs": ["get"]}],
    });
    place.kubectl_with(&["apply", "-f", "-"], &get_only.to_string()).await?.ok()?;
    for (user, role) in
        [("viewer", "--clusterrole=view"), ("editor", "--clusterrole=edit"), ("getter", "--role=get-only")]
    {
        place.kubectl(&["create", "rolebinding", user, role, "--user", user]).await?.ok()?;
    }
    let exec = async |user: &'static str| {
        let api = streams(&place, Some(user)).await?;
        anyhow::Ok(api.exec("w", ["true"], &AttachParams::default()).await)
    };
    // Bindings reach the authorizer a moment after they are written.
    eventually("the editor may run a command", Duration::from_secs(10), || async {
        let (_, _, status) = finish(exec("editor").await??).await?;
        ensure!(code(&status) == Some(0), "{status:?}");
        Ok(Some(()))
    })
    .await?;
    for user in ["nobody", "viewer", "getter"] {
        let (code, message) = refused(exec(user).await?).with_context(|| user.to_owned())?;
        ensure!(code == 403, "{user}: {code} {message}");
        for part in [user, "workspaces/exec", place.namespace()] {
            ensure!(message.contains(part), "{message}");
        }
    }
    // To read is not to run: the operator asks for `create`, however the request is made.
    let (_, message) = refused(exec("getter").await?)?;
    ensure!(message.contains("cannot create"), "{message}");

    let log = async |user: &'static str| {
        let api = streams(&place, Some(user)).await?;
        anyhow::Ok(api.logs("w", &LogParams::default()).await)
    };
    log("editor").await??;
    ensure!(refused(log("viewer").await?)?.0 == 403);
    files_and_ports(&place).await
}

/// The same for files, where reading and writing are two rights, and for ports; the audit log names who.
async fn files_and_ports(place: &Place) -> Result<()> {
    let read_files = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": {"name": "read-files", "namespace": place.namespace()},
        "rules": [{"apiGroups": ["subresources.kibotos.dev"], "resources": ["workspaces/files"], "verbs": ["get"]}],
    });
    place.kubectl_with(&["apply", "-f", "-"], &read_files.to_string()).await?.ok()?;
    for role in ["--clusterrole=view", "--role=read-files"] {
        place
            .kubectl(&["create", "rolebinding", role.trim_start_matches('-'), role, "--user", "reader"])
            .await?
            .ok()?;
    }
    let directory = tempfile::tempdir()?;
    let here = directory.path().join("passwd").display().to_string();
    let cp = async |user: &str, from: &str, to: &str| place.kibo(&["workspace", "cp", from, to, "--as", user]).await;
    eventually("the reader may read", Duration::from_secs(10), || async {
        Ok(Some(cp("reader", "w:/etc/passwd", &here).await?.ok()?))
    })
    .await?;
    cp("editor", &here, "w:/root/passwd").await?.ok()?;
    for (user, from, to, verb) in
        [("reader", here.as_str(), "w:/root/x", "update"), ("viewer", "w:/etc/passwd", here.as_str(), "get")]
    {
        let ran = cp(user, from, to).await?;
        let says = ran.stderr.contains(&format!("cannot {verb} resource \"workspaces/files\""));
        ensure!(ran.code == 11 && says, "{user}: {ran:?}");
    }

    let forward = |user: &str| {
        let mut args = vec!["workspace", "port-forward", "w", ":9", "--address", "127.0.0.1"];
        args.extend(["--as", user]);
        Program::start(place.kibo_command(&args))
    };
    for (user, says) in
        [("editor", "nothing listens on port 9"), ("viewer", "cannot get resource \"workspaces/portforward\"")]
    {
        let program = forward(user)?;
        program.says("-> 9").await?;
        let line = String::from_utf8(program.stdout())?;
        let port: u16 = line.split([':', ' ']).find_map(|word| word.parse().ok()).context("a port")?;
        let mut socket = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
        // Nobody listens in the guest, or nobody may ask: it ends either way.
        let _ = socket.read(&mut [0]).await;
        program.remarks(says).await?;
    }

    for (user, may) in [("editor", true), ("viewer", false)] {
        let said = place.kubectl(&["auth", "can-i", "--list", "--as", user]).await?.ok()?;
        let mut lines = said.lines().filter(|line| line.contains("create"));
        ensure!(lines.any(|line| line.contains("workspaces.subresources.kibotos.dev/exec")) == may, "{user}: {said}");
    }
    let audit = std::fs::read_to_string(place.cluster().layout().audit_log())?;
    let entries = audit.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let ours = entries.filter(|entry| entry["objectRef"]["namespace"] == place.namespace());
    let done: std::collections::BTreeSet<String> = ours
        .filter(|entry| entry["objectRef"]["apiGroup"] == "subresources.kibotos.dev")
        .filter_map(|entry| {
            let who = entry["impersonatedUser"]["username"].as_str()?;
            Some(format!("{who} {} {}", entry["verb"].as_str()?, entry["objectRef"]["subresource"].as_str()?))
        })
        .collect();
    for line in ["editor get exec", "editor get files", "editor get portforward", "reader get files", "editor get log"]
    {
        ensure!(done.contains(line), "the audit log does not show {line:?} but {done:?}");
    }
    Ok(())
}

async fn refusals(place: Arc<Place>) -> Result<()> {
    place.create_workspace("w", json!({"power": {"state": "Stopped"}})).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;
    let api = streams(&place, None).await?;
    let params = AttachParams::default;
    let table = [("nobody", params(), 404, "not found"), ("w", params(), 409, "start it first")];
    for (name, params, code, says) in table {
        let (got, message) = refused(api.exec(name, ["true"], &params).await)?;
        ensure!(got == code && message.contains(says), "expected {code} {says:?}: {got} {message}");
    }
    let (got, message) = refused(api.exec("w", Vec::<String>::new(), &params()).await)?;
    ensure!(got == 400 && message.contains("command="), "{got} {message}");
    let (got, message) = refused(api.logs("w", &LogParams::default()).await)?;
    ensure!(got == 409, "a Workspace that never ran has no log: {got} {message}");
    let (got, message) = refused(api.logs("w", &LogParams { previous: true, ..LogParams::default() }).await)?;
    ensure!(got == 400 && message.contains("previous"), "{got} {message}");
    Ok(())
}

async fn slow_reader(place: Arc<Place>) -> Result<()> {
    let api = running(&place).await?;
    let node = place.nodes().first().context("a node")?.clone();
    let daemon = place.cluster().process(&Component::Node(node)).context("a daemon")?.pid;
    let before = resident(daemon)?;
    let writer = "i=0; while head -c 1048576 /dev/zero; do i=$((i+1)); echo $i > /root/n; done";
    let mut process = api.exec("w", sh(writer), &AttachParams::default()).await?;
    let mut stdout = process.stdout().context("stdout")?;
    // Nobody reads: the writer comes to a halt, while other commands run as ever.
    let written = async || anyhow::Ok(place.sh("w", "cat /root/n || echo 0").await?.parse::<u64>()?);
    let halted = eventually("the writer stands still", Duration::from_secs(90), || async {
        let before = written().await?;
        place.sh("w", "sleep 2").await?;
        Ok((written().await? == before && before > 0).then_some(before))
    })
    .await?;
    // The sockets between here and the operator hold some 16 MiB; nobody else holds anything to speak of.
    ensure!(halted < 48, "{halted} MiB were taken for a client that reads nothing");
    let grown = resident(daemon)?.saturating_sub(before) >> 20;
    ensure!(grown < 16, "the daemon keeps {grown} MiB for it");
    let mut taken = vec![0; (usize::try_from(halted)? + 2) << 20];
    stdout.read_exact(&mut taken).await?;
    ensure!(written().await? > halted, "the writer goes on when the client reads");
    Ok(())
}

async fn client_gone(place: Arc<Place>) -> Result<()> {
    let api = running(&place).await?;
    let process = api.exec("w", sh("echo $$ > /root/pid; exec sleep 4242"), &AttachParams::default()).await?;
    let pid = eventually("the command runs", Duration::from_secs(10), || async {
        Ok(Some(place.sh("w", "cat /root/pid").await?).filter(|pid| !pid.is_empty()))
    })
    .await?;
    drop(process);
    eventually("the command is gone", Duration::from_secs(15), || async {
        let line = format!("test -d /proc/{pid} && echo there || echo gone");
        Ok((place.sh("w", &line).await? == "gone").then_some(()))
    })
    .await
}

async fn broken_stream(place: Arc<Place>) -> Result<()> {
    let api = running(&place).await?;
    let process = api.exec("w", ["sleep", "4242"], &AttachParams::default()).await?;
    let node = Component::Node(place.nodes().first().context("a node")?.clone());
    place.cluster().kill(&node).await?;
    let (_, _, status) = tokio::time::timeout(Duration::from_secs(30), finish(process)).await??;
    let message = status.message.clone().unwrap_or_default();
    ensure!(code(&status).is_none() && message.contains("lost"), "{status:?}");

    // Without a session there is an answer at once, and it says what is missing.
    let (got, message) = refused(api.exec("w", ["true"], &AttachParams::default()).await)?;
    ensure!(got == 503 && message.contains("session"), "{got} {message}");
    place.cluster().start(&node).await?;
    eventually("a command runs again", Duration::from_secs(30), || async { Ok(Some(place.sh("w", "true").await?)) })
        .await
        .map(drop)
}

async fn logs(place: Arc<Place>) -> Result<()> {
    place.node("1", "512Mi").await?;
    let mut template = place.template();
    let entrypoint =
        "echo first; echo second; while [ ! -e /root/go ]; do sleep 0.2; done; echo third; exec sleep infinity";
    template["spec"]["entrypoint"] = json!({"command": ["/bin/sh", "-c", entrypoint]});
    place.create(template).await?;
    place.create_workspace("w", json!({})).await?;
    place.available("w").await?;
    let api = streams(&place, None).await?;

    let params = LogParams { follow: true, ..LogParams::default() };
    let mut lines = api.log_stream("w", &params).await?.lines();
    let mut next = async || {
        let line = tokio::time::timeout(Duration::from_secs(20), futures::TryStreamExt::try_next(&mut lines)).await;
        line.context("no line came")?.map_err(anyhow::Error::from)?.context("the log ended")
    };
    ensure!(next().await? == "first" && next().await? == "second");
    place.sh("w", "touch /root/go").await?;
    ensure!(next().await? == "third", "a line that was written later");

    let tail = api.logs("w", &LogParams { tail_lines: Some(2), ..LogParams::default() }).await?;
    ensure!(tail == "second\nthird\n", "{tail:?}");
    let path = format!("/apis/subresources.kibotos.dev/v1alpha1/namespaces/{}/workspaces/w/log", place.namespace());
    let raw = place.kubectl(&["get", "--raw", &format!("{path}?tailLines=1")]).await?.ok()?;
    ensure!(raw == "third\n", "{raw:?}");

    place.power("w", json!({"state": "Stopped"})).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;
    let after = api.logs("w", &LogParams::default()).await?;
    ensure!(after.starts_with("first\nsecond\nthird\n"), "{after:?}");
    Ok(())
}
