//! `kibo workspace bind` and `unbind`: which Volume a stopped Workspace mounts from its next start on.

use clap::Args;
use kibo_crds::{ConditionType, Volume, Workspace, volume::VolumePhase, workspace::WorkspaceStatus};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::{
    change::{Facet, Target, Wanted},
    create::{Mount, mount},
    view::volume_name,
};
use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    output::OutputArgs,
    wait::Look,
};

#[derive(Args, Debug)]
pub struct Bind {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// The Volume, and where it is mounted; the one of before is released and keeps its data
    #[arg(value_name = "VOLUME:PATH", value_parser = mount::<String>)]
    volume: Mount<String>,
    /// Deleting the Workspace deletes the Volume too
    #[arg(long)]
    delete_volume_with_workspace: bool,
    #[command(flatten)]
    expected: ExpectedBinding,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Debug)]
pub struct Unbind {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    #[command(flatten)]
    expected: ExpectedBinding,
    #[command(flatten)]
    output: OutputArgs,
}

/// The binding that was looked at.
#[derive(Args, Debug)]
struct ExpectedBinding {
    /// Do it only if this is still the revision of its binding (revisions.binding in --json)
    #[arg(long, value_name = "N")]
    expected_revision: Option<u64>,
}

impl ExpectedBinding {
    fn facet(&self) -> Option<(Facet, u64)> {
        self.expected_revision.map(|revision| (Facet::Binding, revision))
    }
}

pub async fn bind(cluster: &Cluster, args: Bind) -> Result<()> {
    let target = Target::find(cluster, &args.workspace).await?;
    let before = target.current().await?;
    check_volume(cluster, &target, &before, &args.volume.what).await?;
    target.change(args.expected.facet(), |workspace| Ok(wanted(workspace, &args))).await?;
    bound(&target, &args, &before).await?;
    let Mount { what, path } = &args.volume;
    target.finish(args.output.form(), &format!("mounts Volume {what} at {path} from the next start on")).await
}

/// What can be said at once. The operator decides, since somebody may come first.
async fn check_volume(cluster: &Cluster, target: &Target<'_>, workspace: &Workspace, name: &str) -> Result<()> {
    let subject = Subject::namespaced("Volume", name, target.namespace());
    let volume = match cluster.namespaced::<Volume>(target.namespace()).get(name).await {
        Err(kube::Error::Api(status)) if status.is_forbidden() => return Ok(()),
        answer => answer.on(&subject)?,
    };
    let refused = |text: String| Err(Error::new(Kind::FailedPrecondition, format!("{subject} {text}")));
    let status = volume.status.clone().unwrap_or_default();
    match status.bound_to {
        Some(bound) if Some(&bound.uid) != workspace.uid().as_ref() => {
            let other = Subject::namespaced("Workspace", &bound.name, target.namespace());
            refused(format!("is bound to Workspace {:?}", bound.name))
                .map_err(|error| error.next(format!("release it there: {}", other.command("unbind"))))
        }
        _ if volume.metadata.deletion_timestamp.is_some() => refused("is being deleted".to_owned()),
        _ if status.phase == Some(VolumePhase::Lost) => refused("was in a storage pool that is lost".to_owned()),
        _ => Ok(()),
    }
}

fn wanted(workspace: &Workspace, args: &Bind) -> Wanted {
    let Mount { what, path } = &args.volume;
    let is_same = volume_name(workspace).as_ref() == Some(what)
        && workspace.spec.volume.as_ref().is_some_and(|binding| {
            binding.mount_path == *path && binding.delete_with_workspace == args.delete_volume_with_workspace
        });
    if is_same {
        return Wanted::Nothing;
    }
    Wanted::Spec(json!({ "volume": {
        "claim": what,
        "new": null,
        "mountPath": path,
        "deleteWithWorkspace": args.delete_volume_with_workspace,
    }}))
}

/// Why the Volume in the spec is not bound.
fn obstacle(status: &WorkspaceStatus) -> Option<String> {
    let mut conditions = status.conditions.iter();
    let unmet = conditions.find(|it| it.type_ == ConditionType::VolumeBound.to_string() && it.status == "False")?;
    Some(unmet.message.clone())
}

fn look_at_binding(workspace: &Workspace, name: Option<&str>) -> Look<Option<String>> {
    let status = workspace.status.clone().unwrap_or_default();
    if let Some(message) = obstacle(&status) {
        return Look::Done(Some(message));
    }
    let bound = status.volume.map(|volume| volume.name);
    match (bound.as_deref() == name, name) {
        (true, _) => Look::Done(None),
        (false, Some(name)) => Look::Waiting(format!("Volume {name} is being bound")),
        (false, None) => Look::Waiting("its Volume is being released".to_owned()),
    }
}

/// Waits until it is bound. A binding that is refused is taken out of the spec again.
async fn bound(target: &Target<'_>, args: &Bind, before: &Workspace) -> Result<()> {
    let name = &args.volume.what;
    let look = |workspace: &Workspace| {
        if volume_name(workspace).as_ref() != Some(name) {
            let message = format!("{} was given another Volume meanwhile", target.subject);
            return Err(Error::new(Kind::Aborted, message));
        }
        Ok(look_at_binding(workspace, Some(name)))
    };
    let refused = target.once_seen("to bind the Volume", "the binding stays requested", look).await?;
    let Some(message) = refused else { return Ok(()) };
    let refusal = Error::new(Kind::FailedPrecondition, format!("{}: {message}", target.subject));
    if volume_name(before).as_ref() == Some(name) {
        return Err(refusal);
    }
    let is_mine = |workspace: &Workspace| volume_name(workspace).as_ref() == Some(name);
    Err(target.take_back(json!({ "volume": as_it_was(before) }), is_mine, refusal).await)
}

/// For a merge. A Volume that was made with the Workspace is an existing one by now.
fn as_it_was(before: &Workspace) -> Value {
    let Some(binding) = &before.spec.volume else { return Value::Null };
    json!({
        "claim": volume_name(before),
        "new": null,
        "mountPath": binding.mount_path,
        "deleteWithWorkspace": binding.delete_with_workspace,
    })
}

pub async fn unbind(cluster: &Cluster, args: Unbind) -> Result<()> {
    let target = Target::find(cluster, &args.workspace).await?;
    let written = target
        .change(args.expected.facet(), |workspace| {
            let is_bound = workspace.spec.volume.is_some();
            Ok(if is_bound { Wanted::Spec(json!({ "volume": null })) } else { Wanted::Nothing })
        })
        .await?;
    let look = |workspace: &Workspace| match &workspace.spec.volume {
        Some(_) => Err(Error::new(Kind::Aborted, format!("{} was given a Volume meanwhile", target.subject))),
        None => Ok(look_at_binding(workspace, None)),
    };
    target.once_seen("to release its Volume", "the release stays requested", look).await?;
    let done = if written.is_some() { "its Volume is released, with its data" } else { "has no Volume" };
    target.finish(args.output.form(), done).await
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    fn args(line: &[&str]) -> Bind {
        let line = [&["kibo", "workspace", "bind", "dev"], line].concat();
        match Cli::try_parse_from(line).unwrap().command {
            Command::Workspace(super::super::Command::Bind(bind)) => bind,
            other => panic!("{other:?}"),
        }
    }

    fn workspace(volume: &Value, status: &Value) -> Workspace {
        serde_json::from_value(json!({
            "metadata": { "name": "dev" }, "spec": { "template": "t", "volume": volume }, "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn the_same_binding_is_not_written() {
        let claim = json!({ "claim": "data", "mountPath": "/data" });
        let new = json!({ "new": { "size": "1Gi" }, "mountPath": "/data" });
        let is_written = |volume: &Value, line: &[&str]| {
            matches!(wanted(&workspace(volume, &json!({})), &args(line)), Wanted::Spec(_))
        };
        assert!(!is_written(&claim, &["data:/data"]));
        assert!(!is_written(&new, &["dev:/data"]), "the one that was made with it");
        for line in [&["data:/other"] as &[&str], &["other:/data"], &["data:/data", "--delete-volume-with-workspace"]] {
            assert!(is_written(&claim, line), "{line:?}");
        }
        assert!(is_written(&Value::Null, &["data:/data"]));
    }

    #[test]
    fn a_refused_binding_is_put_back_as_one_of_a_volume_that_exists() {
        let new = json!({ "new": { "size": "1Gi" }, "mountPath": "/data", "deleteWithWorkspace": true });
        let back = json!({ "claim": "dev", "new": null, "mountPath": "/data", "deleteWithWorkspace": true });
        assert_eq!(as_it_was(&workspace(&new, &json!({}))), back);
        assert_eq!(as_it_was(&workspace(&Value::Null, &json!({}))), Value::Null);
    }

    #[test]
    fn a_binding_is_waited_for_until_it_is_so_or_refused() {
        let bound = json!({ "volume": { "name": "data", "uid": "u" } });
        assert_eq!(look_at_binding(&workspace(&Value::Null, &bound), Some("data")), Look::Done(None));
        assert!(matches!(look_at_binding(&workspace(&Value::Null, &bound), Some("other")), Look::Waiting(_)));
        assert!(matches!(look_at_binding(&workspace(&Value::Null, &bound), None), Look::Waiting(_)));
        let refused = json!({ "conditions": [{
            "type": "VolumeBound", "status": "False", "reason": "VolumeInUse", "message": "taken",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]});
        let look = look_at_binding(&workspace(&Value::Null, &refused), Some("data"));
        assert_eq!(look, Look::Done(Some("taken".to_owned())));
    }
}
