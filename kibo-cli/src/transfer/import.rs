//! From an archive to a Workspace.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use clap::Args;
use futures::StreamExt as _;
use kibo_archive::{Description, Prefix};
use kibo_crds::{
    self as crds, Bytes as Amount, PoolId, SizeQuantity, Template, Workspace, WorkspaceId,
    workspace::{NewVolume, PowerRequest, PowerState, VolumeBinding, WritableLayer},
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, PostParams, Preconditions},
};

use super::{
    CLEAN_UP_FOR, StoreArgs,
    location::{Location, Source},
};
use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    output::{print, remark},
    workspace::{
        fresh_id,
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
    name: Option<String>,
    /// Template of the new Workspace, with the same root image; default: that of the name that it had
    #[arg(long, value_name = "TEMPLATE")]
    template: Option<String>,
    /// Storage pool of the writable layer; default: that of the node where it is placed
    #[arg(long, value_name = "POOL")]
    layer_pool: Option<PoolId>,
    /// Storage pool of the Volume; default: that of the node where it is placed
    #[arg(long, value_name = "POOL")]
    volume_pool: Option<PoolId>,
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
    progress.total(source.size);
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

/// The Workspace that is to be made.
fn made(prefix: &Prefix, args: &Import) -> Result<Workspace> {
    let Description { origin, labels, spec, layer, volume, .. } = prefix.description.clone();
    let name = args.name.clone().unwrap_or(origin.name);
    if name.parse::<WorkspaceId>().is_ok() {
        return Err(Error::invalid(format!("{name} has the form of an id, so it cannot be a name")));
    }
    let mut spec = spec;
    if let Some(template) = &args.template {
        spec.template.clone_from(template);
    }
    spec.r#move = None;
    spec.import = Some(crds::Import { archive: prefix.id(), volume: volume.is_some() });
    spec.writable_layer =
        Some(WritableLayer { size: Some(size(layer)?), pool: args.layer_pool.clone(), request_id: None });
    spec.volume = match (spec.volume.take(), volume) {
        (Some(binding), Some(volume)) => {
            let new = NewVolume { size: size(volume)?, pool: args.volume_pool.clone() };
            Some(VolumeBinding { claim: None, new: Some(new), ..binding })
        }
        // It has no bytes yet: it is made as it would have been.
        (Some(VolumeBinding { new: Some(new), claim: None, mount_path, delete_with_workspace }), None) => {
            let new = NewVolume { pool: args.volume_pool.clone(), ..new };
            Some(VolumeBinding { claim: None, new: Some(new), mount_path, delete_with_workspace })
        }
        (Some(_), None) => {
            remark(
                "note: the Volume that was bound had no bytes yet, so none is made; bind one with kibo workspace bind",
            );
            None
        }
        (None, _) => None,
    };
    if spec.volume.is_none() && args.volume_pool.is_some() {
        return Err(Error::new(Kind::Usage, "--volume-pool is for an archive with a Volume, and this one has none"));
    }
    spec.power = Some(PowerRequest {
        state: PowerState::Stopped,
        request_id: Some(fresh_id()),
        stop_mode: None,
        node: None,
        when_unplaceable: None,
    });
    let mut workspace = Workspace::new(&name, spec);
    workspace.metadata.labels = (!labels.is_empty()).then_some(labels);
    Ok(workspace)
}

fn size(bytes: Amount) -> Result<SizeQuantity> {
    let text = bytes.as_mib().map(|mib| format!("{mib}Mi")).unwrap_or_default();
    text.parse::<SizeQuantity>()
        .map_err(|error| Error::invalid(format!("the archive has an image of {bytes}: {error}")))
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
            Err(Error::new(Kind::Aborted, format!("{subject} already exists"))
                .next("give the new one another name: --name NAME"))
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
            let part = bytes.split_to(bytes.len().min(channels::PIECE));
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
                Ok(_) => return,
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return,
                Err(_) => tokio::time::sleep(CLEAN_UP_EVERY).await,
            }
        }
    };
    if tokio::time::timeout(CLEAN_UP_FOR, deleted).await.is_err() {
        remark(&format!("{subject} is left, without its disks; delete it: {}", subject.command("delete")));
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use kibo_archive::Origin;
    use serde_json::{Value, json};

    use super::*;
    use crate::cli::Cli;

    fn args(line: &[&str]) -> Import {
        let line = [&["kibo", "transfer", "import", "a"], line].concat();
        match Cli::try_parse_from(line).unwrap().command {
            crate::cli::Command::Transfer(super::super::Command::Import(import)) => *import,
            other => panic!("{other:?}"),
        }
    }

    fn prefix(spec: Value, volume: Option<Amount>) -> Prefix {
        Prefix::new(Description {
            exported_at: "2026-11-30T09:00:00Z".to_owned(),
            origin: Origin { namespace: "team".into(), name: "dev".into(), id: String::new() },
            labels: [("a".to_owned(), "b".to_owned())].into(),
            spec: serde_json::from_value(spec).unwrap(),
            root_image: Some("debian-12".to_owned()),
            layer: Amount::mib(2048),
            volume,
            data: Amount::mib(1),
        })
        .unwrap()
    }

    #[test]
    fn the_workspace_is_as_it_was_and_placed_anew() {
        let spec = json!({
            "template": "t", "resources": { "cpu": "2" }, "annotations": { "n": "x" },
            "writableLayer": { "size": "1Gi", "pool": "theirs" },
            "volume": { "claim": "data", "mountPath": "/data", "deleteWithWorkspace": true },
        });
        let prefix = prefix(spec, Some(Amount::mib(64)));
        let made = serde_json::to_value(made(&prefix, &args(&["--volume-pool", "fast"])).unwrap()).unwrap();
        assert_eq!(made["metadata"], json!({ "name": "dev", "labels": { "a": "b" } }));
        let mut spec = made["spec"].clone();
        let power = spec.as_object_mut().unwrap().remove("power").unwrap();
        assert_eq!(power["state"], "Stopped");
        assert_eq!(
            spec,
            json!({
                "template": "t", "resources": { "cpu": "2" }, "annotations": { "n": "x" },
                "writableLayer": { "size": "2048Mi" },
                "volume": {
                    "new": { "size": "64Mi", "pool": "fast" }, "mountPath": "/data", "deleteWithWorkspace": true,
                },
                "import": { "archive": prefix.id(), "volume": true },
            })
        );
    }

    #[test]
    fn a_volume_without_bytes_is_made_as_it_would_have_been_or_left_out() {
        let new =
            json!({ "template": "t", "volume": { "new": { "size": "1Gi", "pool": "theirs" }, "mountPath": "/d" } });
        let made_new = made(&prefix(new, None), &args(&["--name", "other"])).unwrap();
        assert_eq!(made_new.name_any(), "other");
        let elsewhere = made(&prefix(json!({ "template": "t" }), None), &args(&["--template", "theirs"])).unwrap();
        assert_eq!(elsewhere.spec.template, "theirs");
        let volume = serde_json::to_value(&made_new.spec.volume).unwrap();
        assert_eq!(volume, json!({ "new": { "size": "1Gi" }, "mountPath": "/d", "deleteWithWorkspace": false }));
        assert!(!made_new.spec.import.unwrap().volume);
        let claim = json!({ "template": "t", "volume": { "claim": "data", "mountPath": "/d" } });
        assert!(made(&prefix(claim, None), &args(&[])).unwrap().spec.volume.is_none());
        let none = made(&prefix(json!({ "template": "t" }), None), &args(&["--volume-pool", "p"])).unwrap_err();
        assert_eq!(none.kind, Kind::Usage);
    }
}
