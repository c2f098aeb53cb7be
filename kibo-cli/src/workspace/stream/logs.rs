//! `kibo workspace logs`.

use std::{future, io, time::Duration};

use clap::Args;
use futures::{AsyncReadExt as _, StreamExt as _, TryStreamExt as _};
use http::Request;
use jiff::Timestamp;
use kibo_crds::{NodeId, Workspace, workspace::WorkspacePhase};
use kube::{
    ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::{
    io::AsyncWriteExt as _,
    sync::watch,
    time::{sleep, timeout},
};

use super::{path, phase, resume::Follower};
use crate::{
    client::{Cluster, answered, duration},
    errors::{Error, Kind, Result, Subject, root},
    output::{remark, words::enum_word},
    workspace::target,
};

/// Between two attempts to go on, at first and at most.
const PAUSE: Duration = Duration::from_millis(300);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Nothing tells a log in which nobody writes from a connection whose other end is gone without a word. So it is opened
/// anew after so much silence, and goes on where it was.
const QUIET: Duration = Duration::from_secs(120);
/// After the Workspace is gone, its log ends by itself.
const LAST_WORDS: Duration = Duration::from_secs(3);

#[derive(Args, Debug)]
pub struct Logs {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// Go on with what comes, also when the Workspace starts again, until it is deleted
    #[arg(short, long)]
    follow: bool,
    /// Begin with the last N lines
    #[arg(long, value_name = "N")]
    tail: Option<u32>,
    /// Only what was printed in the last while, such as 90s, 5m or 1h
    #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with = "since_time")]
    since: Option<Duration>,
    /// Only what was printed from this time on, such as 2026-01-31T08:00:00Z
    #[arg(long, value_name = "TIME")]
    since_time: Option<Timestamp>,
    /// Begin each line with the time at which it was printed
    #[arg(long)]
    timestamps: bool,
}

/// Prints the log as it is, byte for byte.
pub async fn logs(cluster: &Cluster, args: Logs) -> Result<()> {
    let (workspace, subject) = target::fetch(cluster, &args.workspace).await?;
    let log = Log { cluster, subject };
    if args.follow { log.follow(&args, &workspace).await } else { log.print(&args).await }
}

struct Log<'a> {
    cluster: &'a Cluster,
    subject: Subject,
}

/// How a log that is followed ended.
enum Ended {
    /// In order: the node has no more of it.
    Whole,
    /// Not at all, perhaps.
    Quiet,
    Broken(Error),
}

impl Log<'_> {
    async fn open(&self, query: &[(&str, String)]) -> Result<impl futures::AsyncRead + Unpin + use<>> {
        let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(query).finish();
        let request = Request::get(format!("{}?{query}", path(&self.subject, "log"))).body(Vec::new());
        let request = request.map_err(|error| Error::invalid(format!("{}: {error}", self.subject)))?;
        Ok(Box::pin(answered(&self.subject, self.cluster.client.request_stream(request)).await?))
    }

    async fn print(&self, args: &Logs) -> Result<()> {
        let mut log = self.open(&first_query(args)).await?;
        let mut stdout = tokio::io::stdout();
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let read = timeout(QUIET, log.read(&mut buffer)).await;
            let length = read.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(|error| {
                self.broken(&error).next(format!("read on: {}", self.subject.command("logs --since-time TIME")))
            })?;
            if length == 0 {
                return Ok(());
            }
            stdout.write_all(&buffer[..length]).await?;
            stdout.flush().await?;
        }
    }

    fn broken(&self, error: &io::Error) -> Error {
        Error::new(Kind::Unavailable, format!("{}: the log broke off before its end: {}", self.subject, root(error)))
    }

    /// Goes on wherever it breaks off, until the Workspace is gone.
    async fn follow(&self, args: &Logs, workspace: &Workspace) -> Result<()> {
        let begun = Timestamp::now();
        let (seen, mut changes) = watch::channel(Seen::of(workspace));
        let watching = self.watch(workspace, &seen);
        let following = async {
            let mut follower = Follower::new(args.timestamps);
            let mut query = with_times(first_query(args));
            let (mut pause, mut is_first, mut was_told) = (PAUSE, true, false);
            loop {
                let mut is_quiet = false;
                let node = changes.borrow_and_update().node.clone();
                let opened = self.open(&query).await;
                match opened {
                    Ok(log) => {
                        is_first = false;
                        if std::mem::take(&mut was_told) {
                            remark("the log goes on");
                        }
                        let (was_new, ended) = self.read(log, &mut follower, &mut changes, node.as_ref()).await?;
                        if was_new {
                            pause = PAUSE;
                        }
                        match ended {
                            Ended::Whole => {}
                            Ended::Quiet => is_quiet = true,
                            Ended::Broken(error) => was_told = tell(&error, false),
                        }
                    }
                    Err(error) if is_first || !may_pass(error.kind) => return Err(error),
                    Err(error) => was_told = tell(&error, was_told),
                }
                if changes.borrow().is_gone || self.is_gone(workspace).await {
                    return Ok(());
                }
                if !is_quiet {
                    // The log of a Workspace that is stopped ends at once, until it starts again.
                    tokio::select! {
                        () = sleep(pause) => {}
                        _ = changes.changed() => {}
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                query = with_times(match follower.reopen() {
                    Some(time) => vec![("follow", "true".to_owned()), ("sinceTime", time.to_string())],
                    // Nothing was to be printed of what was there at first.
                    None if args.tail == Some(0) => {
                        vec![("follow", "true".to_owned()), ("sinceTime", begun.to_string())]
                    }
                    None => first_query(args),
                });
            }
        };
        tokio::select! {
            ended = following => ended?,
            () = watching => {}
        }
        remark(&format!("{} was deleted: its log has ended", self.subject));
        Ok(())
    }

    /// Prints what comes until it breaks off, or is on another node; whether there was anything.
    async fn read(
        &self,
        mut log: impl futures::AsyncRead + Unpin,
        follower: &mut Follower,
        changes: &mut watch::Receiver<Seen>,
        node: Option<&NodeId>,
    ) -> Result<(bool, Ended)> {
        let mut was_new = false;
        let mut stdout = tokio::io::stdout();
        let (mut buffer, mut out) = (vec![0; 64 * 1024], Vec::new());
        loop {
            let read = tokio::select! {
                read = log.read(&mut buffer) => read,
                () = sleep(QUIET) => return Ok((was_new, Ended::Quiet)),
                moved = moved(changes, node) => {
                    remark(&format!("{} runs on node {moved} now: going on with the log there", self.subject));
                    return Ok((was_new, Ended::Whole));
                }
            };
            let length = match read {
                Ok(0) => return Ok((was_new, Ended::Whole)),
                Ok(length) => length,
                Err(error) => return Ok((was_new, Ended::Broken(self.broken(&error)))),
            };
            if follower.take(&buffer[..length], &mut out).is_err() {
                remark("lines may be missing here: the node does not have the last one any more");
            }
            was_new |= !out.is_empty();
            stdout.write_all(&out).await?;
            stdout.flush().await?;
            out.clear();
        }
    }

    /// Says when the Workspace stops or starts. Ends a moment after the Workspace does; never for somebody who may not
    /// watch.
    async fn watch(&self, workspace: &Workspace, seen: &watch::Sender<Seen>) {
        let uid = workspace.uid();
        let namespace = self.subject.namespace.clone().unwrap_or_default();
        let api = self.cluster.namespaced::<Workspace>(&namespace);
        let mut objects = watcher::watch_object(api, &self.subject.name).default_backoff().boxed();
        loop {
            match objects.try_next().await {
                Ok(Some(Some(now))) if now.uid() == uid => {
                    let now = Seen::of(&now);
                    let before = seen.send_replace(now.clone());
                    if let Some(said) = said(before.phase, now.phase) {
                        remark(&format!("{} {said}", self.subject));
                    }
                }
                Ok(Some(_)) => break,
                Ok(None) => return future::pending().await,
                Err(_) => {}
            }
        }
        seen.send_modify(|seen| seen.is_gone = true);
        sleep(LAST_WORDS).await;
    }

    /// None knows better than the API server; somebody who may not ask goes on.
    async fn is_gone(&self, workspace: &Workspace) -> bool {
        let namespace = self.subject.namespace.clone().unwrap_or_default();
        let workspaces = self.cluster.namespaced::<Workspace>(&namespace);
        let now = answered(&self.subject, workspaces.get_metadata_opt(&self.subject.name)).await;
        now.is_ok_and(|now| now.is_none_or(|now| now.uid() != workspace.uid()))
    }
}

/// What matters of the Workspace while its log is followed.
#[derive(Clone, Debug, Default)]
struct Seen {
    phase: Option<WorkspacePhase>,
    node: Option<NodeId>,
    is_gone: bool,
}

impl Seen {
    fn of(workspace: &Workspace) -> Self {
        let execution = workspace.status.as_ref().and_then(|status| status.execution.as_ref());
        Self { phase: phase(workspace), node: execution.map(|it| it.node.clone()), is_gone: false }
    }
}

/// Waits until the Workspace runs on another node than the one whose log is read.
async fn moved(changes: &mut watch::Receiver<Seen>, from: Option<&NodeId>) -> NodeId {
    loop {
        if let Some(now) = changes.borrow_and_update().node.as_ref().filter(|now| Some(*now) != from)
            && from.is_some()
        {
            return now.clone();
        }
        if changes.changed().await.is_err() {
            return future::pending().await;
        }
    }
}

/// What somebody who reads a quiet log wants to know.
fn said(before: Option<WorkspacePhase>, now: Option<WorkspacePhase>) -> Option<String> {
    use WorkspacePhase as P;
    let now = now.filter(|now| Some(*now) != before)?;
    match now {
        P::Stopped | P::Failed => {
            Some(format!("is {}: the log goes on when it starts again (Ctrl-C ends this)", enum_word(&now)))
        }
        P::Available if matches!(before, Some(P::Stopped | P::Failed | P::Starting)) => {
            Some("is AVAILABLE again".to_owned())
        }
        _ => None,
    }
}

/// Says once why nothing comes; whether it has been said.
fn tell(error: &Error, was_told: bool) -> bool {
    if !was_told {
        remark(&format!("{error}; trying to go on"));
    }
    true
}

/// Whether the same question may be answered later.
fn may_pass(kind: Kind) -> bool {
    matches!(kind, Kind::Unavailable | Kind::FailedPrecondition | Kind::Aborted | Kind::NotFound | Kind::Other)
}

fn first_query(args: &Logs) -> Vec<(&'static str, String)> {
    let since = args.since.map(|since| Timestamp::now().checked_sub(since).unwrap_or(Timestamp::MIN));
    let mut query = Vec::new();
    query.extend(args.follow.then(|| ("follow", "true".to_owned())));
    query.extend(args.tail.map(|lines| ("tailLines", lines.to_string())));
    query.extend(args.since_time.or(since).map(|time| ("sinceTime", time.to_string())));
    query.extend((args.timestamps && !args.follow).then(|| ("timestamps", "true".to_owned())));
    query
}

/// A log that is followed goes on by its times, whether they are shown or not.
fn with_times(mut query: Vec<(&'static str, String)>) -> Vec<(&'static str, String)> {
    query.push(("timestamps", "true".to_owned()));
    query
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Says one line, and nothing any more.
    struct Silent(&'static [u8]);

    impl futures::AsyncRead for Silent {
        fn poll_read(
            mut self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
            buffer: &mut [u8],
        ) -> std::task::Poll<io::Result<usize>> {
            let said = std::mem::take(&mut self.0);
            if said.is_empty() {
                return std::task::Poll::Pending;
            }
            buffer[..said.len()].copy_from_slice(said);
            std::task::Poll::Ready(Ok(said.len()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_log_that_is_silent_for_long_is_opened_anew_where_it_was() {
        let cluster = Cluster::at("http://127.0.0.1:1", Duration::from_secs(1));
        let log = Log { cluster: &cluster, subject: Subject::namespaced("Workspace", "dev", "default") };
        let (_seen, mut changes) = watch::channel(Seen::default());
        let mut follower = Follower::new(false);
        let line = Silent(b"2026-01-01T00:00:01Z said\n");
        let (was_new, ended) = log.read(line, &mut follower, &mut changes, None).await.unwrap();
        assert!(was_new && matches!(ended, Ended::Quiet));
        assert_eq!(follower.reopen(), Some("2026-01-01T00:00:01Z".parse().unwrap()));
    }
}
