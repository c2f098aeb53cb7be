//! `kibo workspace update` and `resize`: what the next execution gets.

use clap::Args;
use kibo_crds::{
    Bytes, CommandId, CommandRecord, CommandResult, CpuQuantity, MemoryQuantity, SizeQuantity, Template, Workspace,
    digest,
    workspace::{WorkspaceNetwork, WritableLayer},
};
use serde_json::{Value, json};

use super::{
    CommandArgs,
    change::{Facet, Target, Wanted},
    create::Egress,
    power::fresh_id,
};
use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    output::OutputArgs,
    wait::Look,
};

#[derive(Args, Debug)]
pub struct Update {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// CPU of the next execution, in cores or millicores
    #[arg(long, required_unless_present_any = ["memory", "egress"])]
    cpu: Option<CpuQuantity>,
    /// Memory of the next execution
    #[arg(long)]
    memory: Option<MemoryQuantity>,
    /// What the guest reaches beyond its host at its next start
    #[arg(long, value_enum, value_name = "WHAT")]
    egress: Option<Egress>,
    /// Do it only if this is still the revision of its resources (revisions.resources in --json)
    #[arg(long, value_name = "N")]
    expected_revision: Option<u64>,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn update(cluster: &Cluster, args: Update) -> Result<()> {
    let target = Target::find(cluster, &args.workspace).await?;
    let expected = args.expected_revision.map(|revision| (Facet::Resources, revision));
    let written = target.change(expected, |workspace| Ok(wanted(workspace, &args))).await?;
    let done = match written {
        Some(_) => "updated; it counts from the next start",
        None => "is so already",
    };
    target.finish(args.output.form(), done).await
}

/// What is to be replaced.
fn wanted(workspace: &Workspace, args: &Update) -> Wanted {
    let mut spec = serde_json::Map::new();
    let resources = resources(workspace, args);
    if !resources.is_empty() {
        spec.insert("resources".into(), Value::Object(resources));
    }
    let own = workspace.spec.network.as_ref().and_then(|network| network.egress).unwrap_or_default();
    if let Some(egress) = args.egress.map(Into::into).filter(|egress| *egress != own) {
        spec.insert("network".into(), json!(WorkspaceNetwork { egress: Some(egress) }));
    }
    if spec.is_empty() { Wanted::Nothing } else { Wanted::Spec(Value::Object(spec)) }
}

/// What of the resources is to be replaced.
fn resources(workspace: &Workspace, args: &Update) -> serde_json::Map<String, Value> {
    let own = workspace.spec.resources.clone().unwrap_or_default();
    let amount = |text: &Option<CpuQuantity>| text.as_ref().and_then(|it| it.amount().ok());
    let bytes = |text: &Option<MemoryQuantity>| text.as_ref().and_then(|it| it.amount().ok());
    let mut changed = serde_json::Map::new();
    if args.cpu.is_some() && amount(&args.cpu) != amount(&own.cpu) {
        changed.insert("cpu".into(), json!(args.cpu));
    }
    if args.memory.is_some() && bytes(&args.memory) != bytes(&own.memory) {
        changed.insert("memory".into(), json!(args.memory));
    }
    changed
}

#[derive(Args, Debug)]
pub struct Resize {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// The size that the writable layer is to have, whole MiB; it only grows
    #[arg(long, value_name = "SIZE")]
    layer: SizeQuantity,
    #[command(flatten)]
    command: CommandArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// One request for a size.
struct Request {
    size: SizeQuantity,
    amount: Bytes,
    id: CommandId,
    is_named: bool,
}

pub async fn resize(cluster: &Cluster, args: Resize) -> Result<()> {
    let target = Target::find(cluster, &args.workspace).await?;
    let amount = args.layer.amount().map_err(|error| Error::invalid(error.to_string()))?;
    let request = Request {
        size: args.layer,
        amount,
        is_named: args.command.command_id.is_some(),
        id: args.command.command_id.unwrap_or_else(fresh_id),
    };
    let before = target.current().await?;
    let of_template = template_size(cluster, &before).await?;
    let written = target
        .change(None, |workspace| {
            if request.is_named && is_given(workspace, &request, &target.subject)? {
                return Ok(Wanted::Nothing);
            }
            size(workspace, &request, of_template, &target.subject)
        })
        .await?;
    if written.is_some() || request.is_named {
        outcome(&target, &request, &before).await?;
    }
    let done = if written.is_some() { "from the next start on" } else { "already, or from the next start on" };
    target.finish(args.output.form(), &format!("its writable layer has {} {done}", request.size)).await
}

/// The size of a layer that its Workspace does not name.
async fn template_size(cluster: &Cluster, workspace: &Workspace) -> Result<Option<Bytes>> {
    let name = &workspace.spec.template;
    let template = match cluster.cluster_wide::<Template>().get_opt(name).await {
        // The operator decides.
        Err(kube::Error::Api(status)) if status.is_forbidden() => None,
        answer => answer.on(&Subject::cluster("Template", name))?,
    };
    Ok(template.and_then(|template| template.spec.writable_layer.size.amount().ok()))
}

/// Whether this command was given before. The same id with another content is refused.
fn is_given(workspace: &Workspace, request: &Request, subject: &Subject) -> Result<bool> {
    let current = workspace.spec.writable_layer.as_ref().filter(|layer| layer.request_id.as_ref() == Some(&request.id));
    let same = match (record(workspace, request), current) {
        (Some(record), _) => record.operation == RESIZE && record.digest == digest(&request.amount),
        (None, Some(layer)) => amount(layer) == Some(request.amount),
        (None, None) => return Ok(false),
    };
    if same {
        return Ok(true);
    }
    let id = request.id.as_str();
    Err(Error::new(Kind::Aborted, format!("{subject}: the command id {id:?} was used for another command before"))
        .next("choose a new --command-id"))
}

/// As the operator names it.
const RESIZE: &str = "resize";

fn record<'w>(workspace: &'w Workspace, request: &Request) -> Option<&'w CommandRecord> {
    workspace.status.as_ref()?.commands.iter().find(|record| record.id == request.id)
}

fn amount(layer: &WritableLayer) -> Option<Bytes> {
    layer.size.as_ref().and_then(|size| size.amount().ok())
}

/// What is to be written for a size.
fn size(workspace: &Workspace, request: &Request, of_template: Option<Bytes>, subject: &Subject) -> Result<Wanted> {
    let own = workspace.spec.writable_layer.as_ref().and_then(amount);
    let made = workspace.status.as_ref().and_then(|status| status.writable_layer.as_ref());
    // What was accepted is what it has, though it is made so by the next start only.
    let capacity = made.map(|made| made.grow_to.unwrap_or(made.size)).or(own).or(of_template);
    if capacity == Some(request.amount) {
        // A size that was refused may stand in its spec.
        let layer = json!({ "size": request.size, "requestId": null });
        let is_asked = own.is_none_or(|own| own == request.amount);
        return Ok(if is_asked { Wanted::Nothing } else { Wanted::Spec(json!({ "writableLayer": layer })) });
    }
    if let Some(least) = capacity.filter(|capacity| request.amount < *capacity) {
        let message = format!("{subject}: its writable layer has {least}, and only grows: {} is less", request.size);
        return Err(Error::invalid(message));
    }
    Ok(Wanted::Spec(json!({ "writableLayer": { "size": request.size, "requestId": request.id } })))
}

/// Waits for the operator's word. A size that is refused is taken out of the spec again.
async fn outcome(target: &Target<'_>, request: &Request, before: &Workspace) -> Result<()> {
    let look = |workspace: &Workspace| {
        let record = record(workspace, request).filter(|record| record.result == CommandResult::Failed);
        Ok(Look::Done(record.map(|record| record.message.clone().unwrap_or_default())))
    };
    let refused = target.once_seen("to take the new size", "the new size stays requested", look).await?;
    let Some(message) = refused else { return Ok(()) };
    let refusal = Error::new(Kind::ResourceExhausted, format!("{}: {message}", target.subject))
        .next(format!("see what the pools have left: {} storage-pool list", crate::errors::program()));
    // What a command before left there that was cut off is no wish of anybody.
    let layer = before.spec.writable_layer.as_ref().map(|layer| {
        let size = layer.size.as_ref().filter(|_| layer.request_id.as_ref() != Some(&request.id));
        json!({ "size": size, "requestId": null })
    });
    let is_mine = |workspace: &Workspace| {
        workspace.spec.writable_layer.as_ref().is_some_and(|layer| layer.request_id.as_ref() == Some(&request.id))
    };
    Err(target.take_back(json!({ "writableLayer": layer.unwrap_or(Value::Null) }), is_mine, refusal).await)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace(spec: &Value, status: &Value) -> Workspace {
        let mut all = json!({ "template": "t" });
        all.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        serde_json::from_value(json!({ "metadata": { "name": "dev" }, "spec": all, "status": status })).unwrap()
    }

    fn request(size: &str) -> Request {
        let size: SizeQuantity = size.parse().unwrap();
        Request { amount: size.amount().unwrap(), size, id: "a".parse().unwrap(), is_named: true }
    }

    fn decided(spec: &Value, status: &Value, wanted: &str) -> Result<Option<Value>> {
        let subject = Subject::namespaced("Workspace", "dev", "default");
        match size(&workspace(spec, status), &request(wanted), Some(Bytes::mib(1024)), &subject)? {
            Wanted::Nothing => Ok(None),
            Wanted::Spec(spec) => Ok(Some(spec["writableLayer"].clone())),
        }
    }

    fn made(mib: u32, grow_to: Option<u32>) -> Value {
        let grow_to = grow_to.map(|mib| Bytes::mib(mib).0);
        json!({ "writableLayer": { "pool": "p", "size": Bytes::mib(mib).0, "growTo": grow_to, "created": true } })
    }

    #[test]
    fn a_layer_is_asked_to_grow() {
        let asked = json!({ "size": "2Gi", "requestId": "a" });
        assert_eq!(decided(&json!({}), &json!({}), "2Gi").unwrap(), Some(asked.clone()), "it does not exist yet");
        assert_eq!(decided(&json!({}), &made(1024, None), "2Gi").unwrap(), Some(asked.clone()));
        assert_eq!(decided(&json!({}), &made(512, Some(1024)), "2Gi").unwrap(), Some(asked), "once more");
    }

    #[test]
    fn the_size_that_it_has_is_a_plain_success() {
        assert_eq!(decided(&json!({}), &json!({}), "1Gi").unwrap(), None, "the Template's");
        assert_eq!(decided(&json!({}), &made(2048, None), "2048Mi").unwrap(), None);
        assert_eq!(decided(&json!({}), &made(1024, Some(2048)), "2Gi").unwrap(), None);
        let refused = json!({ "writableLayer": { "size": "9Ti", "requestId": "b" } });
        let back = json!({ "size": "1Gi", "requestId": null });
        assert_eq!(decided(&refused, &made(1024, None), "1Gi").unwrap(), Some(back));
    }

    #[test]
    fn less_than_there_is_is_no_size_for_it() {
        for (spec, status) in [
            (json!({}), json!({})),
            (json!({ "writableLayer": { "size": "1Gi" } }), json!({})),
            (json!({}), made(1024, None)),
            (json!({}), made(512, Some(1024))),
        ] {
            let error = decided(&spec, &status, "1023Mi").unwrap_err();
            assert_eq!(error.kind, Kind::InvalidArgument, "{error}");
        }
    }

    #[test]
    fn the_same_command_again_is_known_and_another_one_of_its_id_refused() {
        let subject = Subject::namespaced("Workspace", "dev", "default");
        let given = |spec, status, size| is_given(&workspace(&spec, &status), &request(size), &subject);
        let asked = json!({ "writableLayer": { "size": "2Gi", "requestId": "a" } });
        assert_eq!(given(json!({}), json!({}), "2Gi"), Ok(false));
        assert_eq!(given(asked.clone(), json!({}), "2Gi"), Ok(true));
        assert_eq!(given(asked, json!({}), "3Gi").unwrap_err().kind, Kind::Aborted);
        let record = |operation| {
            json!({ "commands": [{
                "id": "a", "operation": operation, "digest": digest(&Bytes::mib(2048)), "result": "Succeeded",
                "startedAt": "2026-01-01T00:00:00Z",
            }]})
        };
        assert_eq!(given(json!({}), record("resize"), "2Gi"), Ok(true));
        assert_eq!(given(json!({}), record("resize"), "3Gi").unwrap_err().kind, Kind::Aborted);
        assert_eq!(given(json!({}), record("start"), "2Gi").unwrap_err().kind, Kind::Aborted);
    }

    #[test]
    fn what_is_the_same_is_not_written() {
        use clap::Parser as _;
        let update = |args: &[&str]| {
            let line = [&["kibo", "workspace", "update", "dev"], args].concat();
            match crate::cli::Cli::try_parse_from(line).unwrap().command {
                crate::cli::Command::Workspace(super::super::Command::Update(update)) => update,
                other => panic!("{other:?}"),
            }
        };
        let spec = json!({ "resources": { "cpu": "1", "memory": "1Gi" } });
        let written = |spec: &Value, args: &[&str]| match wanted(&workspace(spec, &json!({})), &update(args)) {
            Wanted::Nothing => None,
            Wanted::Spec(spec) => Some(spec),
        };
        let changed = |args: &[&str]| written(&spec, args).map(|spec| spec["resources"].clone());
        assert_eq!(changed(&["--cpu", "1000m", "--memory", "1024Mi"]), None);
        assert_eq!(changed(&["--cpu", "2", "--memory", "1Gi"]), Some(json!({ "cpu": "2" })));
        assert_eq!(changed(&["--memory", "2Gi"]), Some(json!({ "memory": "2Gi" })));
        let deny = json!({ "network": { "egress": "Deny" } });
        assert_eq!(written(&spec, &["--egress", "allow"]), None, "absent is allow");
        assert_eq!(written(&spec, &["--egress", "deny"]), Some(deny.clone()));
        assert_eq!(written(&deny, &["--egress", "deny"]), None);
        assert_eq!(written(&deny, &["--egress", "allow"]), Some(json!({ "network": { "egress": "Allow" } })));
    }
}
