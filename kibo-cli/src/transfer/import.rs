//! From an archive to a Workspace.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use clap::Args;
use futures::StreamExt as _;
use kibo_archive::Prefix;
use kibo_crds::{PoolId, Template, Workspace, workspace::WorkspacePhase};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, PostParams, Preconditions},
};

use super::{
    CLEAN_UP_FOR, StoreArgs,
    location::{Location, Source},
    made::made,
};
use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    output::{print, remark},
    workspace::{
        stream::{
            channels::{self, Channel, FromServer, Receiver, Sender},
            cp::{Interrupt, Progress},
        },
        target,
    },
};

const CLEAN_UP_EVERY: Duration = Duration::from_millis(500);

#[derive(Args, Debug)]
#[command(after_help = "\
The Workspace is stopped when it is complete, and cannot be started before. Its Volume is made anew and has its name. \
Pools and nodes of the cluster that it comes from mean nothing here: it is placed as a new one.

  kibo transfer import dev.kibo
  kibo transfer import s3://backups/dev.kibo --name dev-2")]
pub struct Import {
    /// A file, file:///PATH, or s3://BUCKET/KEY
    #[arg(value_name = "SOURCE")]
    source: Location,
    /// Name of the new Workspace; default: the one that it had
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Template of the new Workspace, with the same root image; default: that of the name that it had
    #[arg(long, value_name = "TEMPLATE")]
    pub template: Option<String>,
    /// Storage pool of the writable layer; default: that of the node where it is placed
    #[arg(long, value_name = "POOL")]
    pub layer_pool: Option<PoolId>,
    /// Storage pool of the Volume; default: that of the node where it is placed
    #[arg(long, value_name = "POOL")]
    pub volume_pool: Option<PoolId>,
    #[command(flatten)]
    store: StoreArgs,
    /// Show no progress
    #[arg(short, long)]
    quiet: bool,
}

pub async fn run(cluster: &Cluster, args: Import) -> Result<()> {
    let mut interrupt = Interrupt::listen()?;
    let mut source = interrupt.or(args.source.read(&args.store)).await?;
    let (prefix, beginning) = interrupt.or(read_prefix(&mut source, &args.source)).await?;
    let workspace = made(&prefix, &args)?;
    let take_away = async |made: Workspace| give_up(cluster, &made, &target::subject(&made)).await;
    interrupt.or(check_template(cluster, &workspace.spec.template, prefix.description.root_image.as_deref())).await?;
    let created = Box::pin(super::make(&mut interrupt, create(cluster, &workspace), take_away)).await?;
    let subject = target::subject(&created);
    let progress = Progress::begin(&args.source.to_string(), args.quiet);
    if let Some(size) = source.size {
        progress.total(size);
    }
    let done = interrupt.or(send(cluster, &subject, beginning, source, &progress)).await;
    if let Err(error) = done {
        progress.clear();
        give_up(cluster, &created, &subject).await;
        return Err(error);
    }
    progress.end(&args.source.to_string());
    print(&format!("{subject} imported; start it: {}\n", subject.command("start")))
}

/// The archive's beginning, and what was read of it.
async fn read_prefix(source: &mut Source, location: &Location) -> Result<(Prefix, Bytes)> {
    let invalid = |what: String| Error::invalid(format!("{location}: {what}"));
    let mut read = BytesMut::new();
    loop {
        let known = Prefix::read(&read).map_err(|error| invalid(error.to_string()))?;
        if let Some(prefix) = known {
            return Ok((prefix, read.freeze()));
        }
        match source.pieces.next().await.transpose()? {
            Some(piece) => read.extend_from_slice(&piece),
            None => return Err(invalid("the archive is truncated: it ends before it is complete".to_owned())),
        }
    }
}

/// The layer is only what differs from its root image.
async fn check_template(cluster: &Cluster, name: &str, root_image: Option<&str>) -> Result<()> {
    let subject = Subject::cluster("Template", name);
    let found = match cluster.cluster_wide::<Template>().get_opt(name).await {
        // Whoever may not read it is told by the operator what else is wrong.
        Err(kube::Error::Api(status)) if status.is_forbidden() => return Ok(()),
        answer => answer.on(&subject)?,
    };
    let Some(template) = found else {
        let message = format!("{subject}, from which the archive's Workspace is made, is not in this cluster");
        return Err(Error::new(Kind::NotFound, message)
            .next("name one with the same root image (--template TEMPLATE), or create one of that name"));
    };
    match root_image {
        Some(wanted) if template.spec.root_image != wanted => {
            let found = &template.spec.root_image;
            let message = format!("{subject} has the root image {found:?}, and the archive's layer lies on {wanted:?}");
            Err(Error::new(Kind::FailedPrecondition, message)
                .next(format!("name a Template with the root image {wanted:?}: --template TEMPLATE")))
        }
        _ => Ok(()),
    }
}

async fn create(cluster: &Cluster, workspace: &Workspace) -> Result<Workspace> {
    let subject = Subject::namespaced("Workspace", &workspace.name_any(), cluster.namespace());
    let api: Api<Workspace> = cluster.namespaced(cluster.namespace());
    let error = match api.create(&PostParams::default(), workspace).await {
        Ok(created) => return Ok(created),
        Err(error) => error,
    };
    match error {
        kube::Error::Api(status) if status.is_already_exists() => {
            let there = api.get_opt(&subject.name).await.ok().flatten();
            Err(taken(&subject, there.as_ref()))
        }
        kube::Error::Api(status) if status.code < 500 => {
            Err(crate::errors::from_kube(kube::Error::Api(status), &subject))
        }
        // The answer is lost, and the Workspace may be there.
        error => match tokio::time::timeout(CLEAN_UP_FOR, created_all_the_same(&api, workspace)).await {
            Ok(Some(created)) => Ok(created),
            Ok(None) => Err(crate::errors::from_kube(error, &subject)),
            Err(_) => Err(crate::errors::from_kube(error, &subject)
                .next(format!("it may be there, without its disks: then delete it: {}", subject.command("delete")))),
        },
    }
}

/// Something has the name; what an import has left there can go.
fn taken(subject: &Subject, there: Option<&Workspace>) -> Error {
    let left = there.filter(|there| there.spec.import.is_some());
    let status = left.and_then(|left| left.status.as_ref()).filter(|status| !status.imported);
    let (what, next) = match status.map(|status| status.phase) {
        None => ("already exists", "give the new one another name: --name NAME".to_owned()),
        Some(Some(WorkspacePhase::Failed)) => (
            "is left of an import that did not complete",
            format!("delete it, and import again: {}", subject.command("delete")),
        ),
        Some(_) => (
            "is there, and its import is not complete",
            format!(
                "let that end, or give another name (--name NAME); delete what nobody imports any more: {}",
                subject.command("delete")
            ),
        ),
    };
    Error::new(Kind::Aborted, format!("{subject} {what}")).next(next)
}

/// The Workspace of this request, and no other one of its name.
async fn created_all_the_same(api: &Api<Workspace>, workspace: &Workspace) -> Option<Workspace> {
    let request = |workspace: &Workspace| workspace.spec.power.as_ref().and_then(|power| power.request_id.clone());
    loop {
        match api.get_opt(&workspace.name_any()).await {
            Ok(found) => {
                return found.filter(|it| it.spec.import == workspace.spec.import && request(it) == request(workspace));
            }
            Err(_) => tokio::time::sleep(CLEAN_UP_EVERY).await,
        }
    }
}

async fn send(
    cluster: &Cluster,
    subject: &Subject,
    beginning: Bytes,
    source: Source,
    progress: &Progress,
) -> Result<()> {
    let (mut sender, mut receiver) = channels::open(cluster, subject, "import", &[]).await?;
    // Whatever the node has to say ends the sending.
    tokio::select! {
        biased;
        ended = ended(&mut receiver, subject) => ended,
        sent = feed(&mut sender, beginning, source, progress) => {
            sent?;
            ended(&mut receiver, subject).await
        }
    }
}

/// Sends all of it. A connection that breaks is for who listens to explain.
async fn feed(sender: &mut Sender, beginning: Bytes, mut source: Source, progress: &Progress) -> Result<()> {
    let mut piece = Some(beginning);
    while let Some(mut bytes) = piece {
        progress.add(bytes.len());
        while !bytes.is_empty() {
            let part = bytes.split_to(bytes.len().min(channels::DATA));
            if sender.send(Channel::Stdin, &part).await.is_err() {
                return std::future::pending().await;
            }
        }
        piece = source.pieces.next().await.transpose()?;
    }
    if sender.close_stdin().await.is_err() {
        return std::future::pending().await;
    }
    Ok(())
}

async fn ended(receiver: &mut Receiver, subject: &Subject) -> Result<()> {
    loop {
        match receiver.next().await {
            Ok(FromServer::Ended(status)) if status.status.as_deref() == Some("Success") => return Ok(()),
            Ok(FromServer::Ended(status)) => return Err(channels::failure(&status, subject)),
            Ok(FromServer::Stdout(_) | FromServer::Stderr(_) | FromServer::StdoutClosed) => {}
            Err(broken) => {
                let message = format!("{subject}: {broken}, before the import was complete");
                return Err(Error::new(Kind::Unavailable, message).next("import again"));
            }
        }
    }
}

/// Takes the Workspace away that was made for nothing: only that one, whatever has its name.
async fn give_up(cluster: &Cluster, created: &Workspace, subject: &Subject) {
    let api: Api<Workspace> = cluster.namespaced(&created.namespace().unwrap_or_default());
    let preconditions = Some(Preconditions { uid: created.uid(), resource_version: None });
    let params = DeleteParams { preconditions, ..DeleteParams::default() };
    let deleted = async {
        loop {
            match api.delete(&subject.name, &params).await {
                Ok(_) => return None,
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return None,
                // It will not become allowed by being asked again.
                Err(kube::Error::Api(status)) if status.code < 500 && status.code != 429 => {
                    return Some(status.message);
                }
                Err(_) => tokio::time::sleep(CLEAN_UP_EVERY).await,
            }
        }
    };
    let why = match tokio::time::timeout(CLEAN_UP_FOR, deleted).await {
        Ok(None) => return,
        Ok(Some(why)) => why,
        Err(_) => format!("the API server did not take it within {} s", CLEAN_UP_FOR.as_secs()),
    };
    remark(&format!("{subject} is left, without its disks: {why}"));
    remark(&format!("  have it deleted: {}", subject.command("delete")));
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn who_has_the_name_is_said_with_the_way_out() {
        let subject = Subject::namespaced("Workspace", "dev", "team");
        let there = |import: Option<Value>, status: Value| -> Workspace {
            serde_json::from_value(json!({
                "metadata": { "name": "dev" }, "spec": { "template": "t", "import": import }, "status": status,
            }))
            .unwrap()
        };
        let import = || Some(json!({ "archive": "ab".repeat(32) }));
        let table = [
            (None, "--name"),
            (Some(there(None, json!({ "phase": "Failed" }))), "--name"),
            (Some(there(import(), json!({ "phase": "Stopped", "imported": true }))), "--name"),
            (Some(there(import(), json!({ "phase": "Failed" }))), "delete it, and import again: kibo workspace delete"),
            (Some(there(import(), json!({ "phase": "Creating" }))), "let that end"),
        ];
        for (there, next) in table {
            let error = taken(&subject, there.as_ref());
            assert_eq!(error.kind, Kind::Aborted);
            assert!(error.next.as_deref().is_some_and(|said| said.contains(next)), "{error:?}");
        }
    }
}
