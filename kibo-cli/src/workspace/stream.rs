//! `kibo workspace exec` and `logs`: streams through the aggregated API, so that a kubeconfig is all
//! that it takes and RBAC on `workspaces/exec` and `workspaces/log` decides.

use std::borrow::Cow;

use clap::Args;
use futures::AsyncReadExt as _;
use k8s_openapi::{NamespaceResourceScope, apimachinery::pkg::apis::meta::v1::Status};
use kibo_crds::workspace::WorkspacePhase;
use kube::{
    Resource,
    api::{AttachParams, AttachedProcess, Execute, Log, LogParams, ObjectMeta},
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    task::JoinHandle,
};

use super::target;
use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject, from_status, root},
    output::words::enum_word,
};

#[derive(Args, Debug)]
pub struct Exec {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// Hand standard input to the command
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Program and arguments, not run through a shell
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Args, Debug)]
pub struct Logs {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// Go on with what comes
    #[arg(short, long)]
    follow: bool,
    /// Begin with the last N lines
    #[arg(long, value_name = "N")]
    tail: Option<u32>,
}

/// `workspaces` of the aggregated API: it serves nothing but subresources.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Streams {
    metadata: ObjectMeta,
}

impl Resource for Streams {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Workspace".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "subresources.kibotos.dev".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1alpha1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "workspaces".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl Execute for Streams {}
impl Log for Streams {}

/// Runs a command in the guest and gives its exit status.
pub async fn exec(cluster: &Cluster, args: Exec) -> Result<u8> {
    const BUFFER: usize = 256 * 1024;
    let (workspace, subject) = target::fetch(cluster, &args.workspace).await?;
    let phase = workspace.status.as_ref().and_then(|status| status.phase);
    if phase != Some(WorkspacePhase::Available) {
        return Err(not_available(&subject, phase));
    }
    let params = AttachParams {
        stdin: args.stdin,
        stdout: true,
        stderr: true,
        tty: false,
        max_stdin_buf_size: Some(BUFFER),
        max_stdout_buf_size: Some(BUFFER),
        max_stderr_buf_size: Some(BUFFER),
        ..AttachParams::default()
    };
    let namespace = subject.namespace.clone().unwrap_or_default();
    let api = cluster.namespaced::<Streams>(&namespace);
    let mut process = api.exec(&subject.name, args.command, &params).await.on(&subject)?;
    pass_through(&mut process, &subject).await
}

fn not_available(subject: &Subject, phase: Option<WorkspacePhase>) -> Error {
    let state = phase.as_ref().map_or_else(|| "not AVAILABLE yet".to_owned(), enum_word);
    let error = Error::new(Kind::FailedPrecondition, format!("{subject} is {state}, so nothing can be run in it"));
    match phase {
        Some(WorkspacePhase::Stopped | WorkspacePhase::Failed) => {
            error.next(format!("start it: {}", subject.command("start")))
        }
        Some(WorkspacePhase::Stopping | WorkspacePhase::Deleting) => {
            error.next(format!("see what it waits for: {}", subject.command("get")))
        }
        _ => error.next(format!("wait for it: {}", subject.command("wait"))),
    }
}

/// Connects the streams of the command with our own until it ends.
async fn pass_through(process: &mut AttachedProcess, subject: &Subject) -> Result<u8> {
    let status = process.take_status().ok_or_else(|| lost(subject))?;
    let stdin = process.stdin().map(|writer| tokio::spawn(copy(tokio::io::stdin(), writer)));
    let stdout = process.stdout().map(|reader| tokio::spawn(copy(reader, tokio::io::stdout())));
    let stderr = process.stderr().map(|reader| tokio::spawn(copy(reader, tokio::io::stderr())));
    // The status comes when all output has been sent; the output is written to its end before we exit.
    // A reader of ours that has gone ends all of it, also when the command has nothing more to say.
    let status = async { status.await.ok_or_else(|| lost(subject)) };
    let ended = tokio::try_join!(status, finished(stdout), finished(stderr));
    if let Some(stdin) = stdin {
        stdin.abort();
    }
    exit_code(&ended?.0, subject)
}

async fn finished(copy: Option<JoinHandle<std::io::Result<()>>>) -> Result<()> {
    match copy {
        Some(copy) => Ok(copy.await.map_err(std::io::Error::other)??),
        None => Ok(()),
    }
}

/// Copies to the end, each piece at once, and closes the other end.
async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..length]).await?;
        to.flush().await?;
    }
}

fn lost(subject: &Subject) -> Error {
    Error::new(
        Kind::Unavailable,
        format!("{subject}: the stream broke before the command ended, so its exit status is not known"),
    )
    .next(format!("see whether it still runs: {}", subject.command("get")))
}

/// The exit status in the last message of the remote-command protocol.
fn exit_code(status: &Status, subject: &Subject) -> Result<u8> {
    if status.status.as_deref() == Some("Success") {
        return Ok(0);
    }
    let causes = status.details.iter().flat_map(|details| details.causes.iter().flatten());
    let code = causes
        .filter(|cause| cause.reason.as_deref() == Some("ExitCode"))
        .find_map(|cause| cause.message.as_deref()?.parse::<i32>().ok());
    if let Some(code) = code {
        return Ok(u8::try_from(code).unwrap_or(u8::MAX));
    }
    let status = kube::core::Status {
        code: status.code.and_then(|code| u16::try_from(code).ok()).unwrap_or(0),
        message: status.message.clone().unwrap_or_default(),
        reason: status.reason.clone().unwrap_or_default(),
        ..kube::core::Status::default()
    };
    // What the streams' API calls internal is a node, a session or a leader that went away.
    let mut error = from_status(&status, subject);
    if error.kind == Kind::Other {
        error.kind = Kind::Unavailable;
    }
    Err(error)
}

/// Prints the log as it is, byte for byte.
pub async fn logs(cluster: &Cluster, args: Logs) -> Result<()> {
    let (_, subject) = target::fetch(cluster, &args.workspace).await?;
    let params = LogParams { follow: args.follow, tail_lines: args.tail.map(i64::from), ..LogParams::default() };
    let namespace = subject.namespace.clone().unwrap_or_default();
    let api = cluster.namespaced::<Streams>(&namespace);
    let mut log = Box::pin(api.log_stream(&subject.name, &params).await.on(&subject)?);
    let mut stdout = tokio::io::stdout();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = log.read(&mut buffer).await;
        let length = read.map_err(|error| {
            let go_on = if args.follow { "logs -f --tail 10" } else { "logs" };
            Error::new(Kind::Unavailable, format!("{subject}: the log broke off before its end: {}", root(&error)))
                .next(format!("read on: {}", subject.command(go_on)))
        })?;
        if length == 0 {
            return Ok(());
        }
        stdout.write_all(&buffer[..length]).await?;
        stdout.flush().await?;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn code(status: Value) -> Result<u8> {
        let subject = Subject::namespaced("Workspace", "dev", "default");
        exit_code(&serde_json::from_value(status).unwrap(), &subject)
    }

    #[test]
    fn the_exit_status_is_that_of_the_remote_command() {
        assert_eq!(code(json!({ "status": "Success" })), Ok(0));
        let failed = json!({
            "status": "Failure", "reason": "NonZeroExitCode", "message": "command terminated with exit code 3",
            "details": { "causes": [{ "reason": "ExitCode", "message": "3" }] },
        });
        assert_eq!(code(failed), Ok(3));
    }

    #[test]
    fn a_failure_of_the_stream_is_no_exit_status() {
        let error = code(json!({ "status": "Failure", "reason": "InternalError", "message": "no such node" }));
        let error = error.unwrap_err();
        assert_eq!(error.kind, Kind::Unavailable);
        assert!(error.message.ends_with("no such node"), "{error}");
    }

    #[test]
    fn the_paths_are_those_of_the_aggregated_api() {
        assert_eq!(
            Streams::url_path(&(), Some("team")),
            "/apis/subresources.kibotos.dev/v1alpha1/namespaces/team/workspaces"
        );
    }
}
