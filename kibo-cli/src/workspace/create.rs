//! `kibo workspace create`.

use std::{collections::BTreeMap, path::PathBuf};

use clap::{Args, ValueEnum};
use kibo_crds::{
    CommandId, CpuQuantity, MemoryQuantity, NodeId, PoolId, SizeQuantity, Template, Volume, Workspace, WorkspaceId,
    workspace::{
        NewVolume, PowerRequest, PowerState, Resources, VolumeBinding, WorkspaceNetwork, WorkspaceSpec, WritableLayer,
    },
};
use kube::{Api, ResourceExt as _, api::PostParams};

use super::{
    power::{self, Unplaceable},
    target,
};
use crate::{
    cli::{WaitArgs, pair},
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject, from_status},
    manifest, node,
    output::{Form, OutputArgs, print},
};

/// Which command made a Workspace, and a digest of what was asked for: a replay is known by them.
const COMMAND_ANNOTATION: &str = "kibotos.dev/create-command";
const DIGEST_ANNOTATION: &str = "kibotos.dev/create-digest";

#[derive(Args, Debug)]
pub struct Create {
    /// Default: derived from --command-id, else made from the Template's name
    name: Option<String>,
    /// What it is made from
    #[arg(short, long, required_unless_present = "file")]
    template: Option<String>,
    /// Read the Workspace from a manifest instead (- for standard input)
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["name", "template", "cpu", "memory",
        "layer_size", "layer_pool", "volume", "new_volume", "egress", "node_selector", "labels", "annotations"])]
    file: Option<PathBuf>,
    /// CPU in cores or millicores; default: that of the Template
    #[arg(long)]
    cpu: Option<CpuQuantity>,
    /// Memory of the guest; default: that of the Template
    #[arg(long)]
    memory: Option<MemoryQuantity>,
    /// Size of the writable layer; default: that of the Template
    #[arg(long, value_name = "SIZE")]
    layer_size: Option<SizeQuantity>,
    /// Storage pool of the writable layer; default: that of the node of the first start
    #[arg(long, value_name = "POOL")]
    layer_pool: Option<PoolId>,
    /// Mount this Volume at this path
    #[arg(long, value_name = "VOLUME:PATH", value_parser = mount::<String>)]
    volume: Option<Mount<String>>,
    /// Make a Volume of this size, named like the Workspace, and mount it at this path
    #[arg(long, value_name = "SIZE:PATH", value_parser = mount::<SizeQuantity>, conflicts_with = "volume")]
    new_volume: Option<Mount<SizeQuantity>>,
    /// Storage pool of the new Volume
    #[arg(long, value_name = "POOL", requires = "new_volume")]
    volume_pool: Option<PoolId>,
    /// Deleting the Workspace deletes the Volume too
    #[arg(long)]
    delete_volume_with_workspace: bool,
    /// What the guest reaches beyond its host; default: allow
    #[arg(long, value_enum, value_name = "WHAT")]
    egress: Option<Egress>,
    /// Start it on this node or not at all; only this start is bound to it
    #[arg(long)]
    node: Option<NodeId>,
    /// Label that a node must carry; can be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    node_selector: Vec<(String, String)>,
    /// What to do while no node can take it
    #[arg(long, value_enum, value_name = "WHAT", default_value = "fail")]
    when_unplaceable: Unplaceable,
    /// Label; can be repeated
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    labels: Vec<(String, String)>,
    /// Annotation of the Workspace itself (spec.annotations); can be repeated
    #[arg(long = "annotation", value_name = "KEY=VALUE", value_parser = pair)]
    annotations: Vec<(String, String)>,
    #[command(flatten)]
    command: super::CommandArgs,
    #[command(flatten)]
    wait: WaitArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Egress {
    /// Everything that its host reaches
    Allow,
    /// Nothing: no default route, no DNS
    Deny,
}

impl From<Egress> for kibo_crds::workspace::Egress {
    fn from(choice: Egress) -> Self {
        match choice {
            Egress::Allow => Self::Allow,
            Egress::Deny => Self::Deny,
        }
    }
}

/// What is mounted, and where.
#[derive(Clone, Debug)]
pub struct Mount<T> {
    pub what: T,
    pub path: String,
}

pub fn mount<T: std::str::FromStr<Err: ToString>>(text: &str) -> Result<Mount<T>, String> {
    let (what, path) = text.split_once(':').ok_or("must have a colon before the path: data:/data")?;
    let what = what.parse().map_err(|error: T::Err| error.to_string())?;
    Ok(Mount { what, path: path.to_owned() })
}

pub async fn create(cluster: &Cluster, args: Create) -> Result<()> {
    let (wait, form, command_id) = (args.wait.wanted(), args.output.form(), args.command.command_id.clone());
    let workspace = match &args.file {
        Some(file) => from_manifest(manifest::read(file)?, &args)?,
        None => built(args)?,
    };
    let namespace = workspace.namespace().unwrap_or_else(|| cluster.namespace().to_owned());
    let api: Api<Workspace> = cluster.namespaced(&namespace);
    // The command is looked up before anything is checked: what it needed may be gone meanwhile.
    let created = if let Some(found) = before(&api, &namespace, &workspace, command_id.as_ref()).await? {
        found
    } else {
        check_parts(cluster, &workspace, &namespace).await?;
        submit(&api, &namespace, &workspace, command_id.as_ref()).await?
    };
    let subject = target::subject(&created);
    if !wait && matches!(form, Form::Text { .. }) {
        return print(&format!("{subject} created; wait for it: {}\n", subject.command("wait")));
    }
    let request = created.power_request();
    let created = if wait && request.state == PowerState::Running {
        power::outcome(cluster, api, &subject, &workspace.power_request()).await?
    } else {
        created
    };
    power::finish(cluster, &subject, created, true, form).await
}

/// What a Workspace names must exist now. (A manifest that is applied may come before its parts and
/// waits for them; somebody at a terminal wants to hear of a typing mistake.)
async fn check_parts(cluster: &Cluster, workspace: &Workspace, namespace: &str) -> Result<()> {
    let spec = &workspace.spec;
    cluster.check_exists::<Template>(&cluster.cluster_wide(), &Subject::cluster("Template", &spec.template)).await?;
    if let Some(claim) = spec.volume.as_ref().and_then(|volume| volume.claim.as_ref()) {
        let volume = Subject::namespaced("Volume", claim, namespace);
        cluster.check_exists::<Volume>(&cluster.namespaced(namespace), &volume).await?;
    }
    match spec.power.as_ref().and_then(|power| power.node.as_ref()) {
        Some(id) => node::check_exists(cluster, id).await,
        None => Ok(()),
    }
}

/// Creates it, unless the same command did so at the same moment.
async fn submit(
    api: &Api<Workspace>,
    namespace: &str,
    workspace: &Workspace,
    command_id: Option<&CommandId>,
) -> Result<Workspace> {
    match api.create(&PostParams::default(), workspace).await {
        Err(kube::Error::Api(status)) if status.is_already_exists() && command_id.is_some() => {
            let found = before(api, namespace, workspace, command_id).await?;
            found.ok_or_else(|| from_status(&status, &named(workspace, namespace)))
        }
        answer => answer.on(&named(workspace, namespace)),
    }
}

/// What the same command created before; an object of that name by another command is refused.
async fn before(
    api: &Api<Workspace>,
    namespace: &str,
    workspace: &Workspace,
    command_id: Option<&CommandId>,
) -> Result<Option<Workspace>> {
    let (Some(_), Some(name)) = (command_id, workspace.metadata.name.as_deref()) else { return Ok(None) };
    let subject = named(workspace, namespace);
    let Some(found) = api.get_opt(name).await.on(&subject)? else { return Ok(None) };
    let same = |key: &str| workspace.annotations().get(key) == found.annotations().get(key);
    let what = match (same(COMMAND_ANNOTATION), same(DIGEST_ANNOTATION)) {
        (true, true) => return Ok(Some(found)),
        (true, false) => "was created by the same command id with another input",
        (false, _) => "exists already and was not created by this command",
    };
    Err(Error::new(Kind::Aborted, format!("{subject} {what}"))
        .next("choose a new --command-id, or give the input of before"))
}

fn named(workspace: &Workspace, namespace: &str) -> Subject {
    let name = workspace.metadata.name.as_ref().or(workspace.metadata.generate_name.as_ref());
    Subject::namespaced("Workspace", name.map_or("", String::as_str), namespace)
}

/// The request that creation makes.
fn first_request(args: &Create) -> PowerRequest {
    PowerRequest {
        state: PowerState::Running,
        request_id: Some(args.command.command_id.clone().unwrap_or_else(power::fresh_id)),
        stop_mode: None,
        node: args.node.clone(),
        when_unplaceable: Some(args.when_unplaceable.into()),
    }
}

fn from_manifest(mut workspace: Workspace, args: &Create) -> Result<Workspace> {
    if workspace.spec.power.is_some() && (args.node.is_some() || args.command.command_id.is_some()) {
        return Err(Error::invalid("the manifest has a spec.power, so --node and --command-id have no place")
            .next("leave spec.power out of the manifest, or the options"));
    }
    workspace.status = None;
    if workspace.spec.power.is_none() {
        mark(&mut workspace, args.command.command_id.as_ref())?;
        workspace.spec.power = Some(first_request(args));
    }
    check_name(workspace)
}

fn built(args: Create) -> Result<Workspace> {
    let template = args.template.clone().unwrap_or_default();
    let request = first_request(&args);
    let binding = |mount_path: String| VolumeBinding {
        claim: None,
        new: None,
        mount_path,
        delete_with_workspace: args.delete_volume_with_workspace,
    };
    let volume = match (args.volume, args.new_volume) {
        (Some(mount), _) => Some(VolumeBinding { claim: Some(mount.what), ..binding(mount.path) }),
        (None, Some(mount)) => {
            let new = NewVolume { size: mount.what, pool: args.volume_pool };
            Some(VolumeBinding { new: Some(new), ..binding(mount.path) })
        }
        (None, None) if args.delete_volume_with_workspace => {
            return Err(Error::new(Kind::Usage, "--delete-volume-with-workspace goes with --volume or --new-volume"));
        }
        (None, None) => None,
    };
    let resources = Resources { cpu: args.cpu, memory: args.memory };
    let layer = WritableLayer { size: args.layer_size, pool: args.layer_pool, request_id: None };
    let spec = WorkspaceSpec {
        template: template.clone(),
        resources: (resources != Resources::default()).then_some(resources),
        writable_layer: (layer != WritableLayer::default()).then_some(layer),
        volume,
        power: None,
        node_selector: args.node_selector.into_iter().collect(),
        network: args.egress.map(|egress| WorkspaceNetwork { egress: Some(egress.into()) }),
        r#move: None,
        import: None,
        annotations: args.annotations.into_iter().collect(),
    };
    let mut workspace = Workspace::new("", spec);
    let labels: BTreeMap<_, _> = args.labels.into_iter().collect();
    workspace.metadata.labels = (!labels.is_empty()).then_some(labels);
    workspace.metadata.name = args.name.or_else(|| args.command.command_id.as_ref().map(derived_name));
    if workspace.metadata.name.is_none() {
        // The API server adds five letters.
        let stem: String = template.chars().take(57).collect();
        workspace.metadata.generate_name = Some(format!("{}-", stem.trim_end_matches(['-', '.'])));
    }
    mark(&mut workspace, args.command.command_id.as_ref())?;
    workspace.spec.power = Some(request);
    check_name(workspace)
}

/// The name of a Workspace that its creator did not name: the same for the same command.
fn derived_name(id: &CommandId) -> String {
    format!("cmd-{}", kibo_crds::short_digest(id.as_str()))
}

/// Notes the command and its input, without the power request, which carries the id.
fn mark(workspace: &mut Workspace, command_id: Option<&CommandId>) -> Result<()> {
    let Some(id) = command_id else { return Ok(()) };
    let input = serde_json::to_vec(&(&workspace.spec, workspace.labels())).map_err(std::io::Error::other)?;
    let digest = kibo_crds::short_digest(&input);
    let annotations = workspace.annotations_mut();
    annotations.insert(COMMAND_ANNOTATION.to_owned(), id.to_string());
    annotations.insert(DIGEST_ANNOTATION.to_owned(), digest);
    Ok(())
}

/// A name in the form of an id could not be told from one.
fn check_name(workspace: Workspace) -> Result<Workspace> {
    match workspace.metadata.name.as_deref().map(str::parse::<WorkspaceId>) {
        Some(Ok(id)) => Err(Error::invalid(format!("{id} has the form of an id, so it cannot be a name"))),
        _ => Ok(workspace),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use serde_json::{Value, json};

    use super::*;
    use crate::cli::Cli;

    fn parse(args: &[&str]) -> Result<Create, clap::Error> {
        let line = [&["kibo", "workspace", "create"], args].concat();
        match Cli::try_parse_from(line)?.command {
            crate::cli::Command::Workspace(super::super::Command::Create(create)) => Ok(*create),
            other => panic!("{other:?}"),
        }
    }

    fn made(args: &[&str]) -> Value {
        serde_json::to_value(built(parse(args).unwrap()).unwrap()).unwrap()
    }

    #[test]
    fn options_make_a_workspace() {
        let made = made(&[
            "dev",
            "--template",
            "t",
            "--cpu",
            "0.5",
            "--memory",
            "256Mi",
            "--layer-size",
            "2Gi",
            "--new-volume",
            "1Gi:/data",
            "--delete-volume-with-workspace",
            "--egress",
            "deny",
            "--node",
            "node-1",
            "--label",
            "a=b",
            "--annotation",
            "n=x",
            "--node-selector",
            "zone=a",
            "--command-id",
            "c1",
        ]);
        assert_eq!(
            made["spec"],
            json!({
                "template": "t",
                "resources": { "cpu": "0.5", "memory": "256Mi" },
                "writableLayer": { "size": "2Gi" },
                "volume": { "new": { "size": "1Gi" }, "mountPath": "/data", "deleteWithWorkspace": true },
                "power": { "state": "Running", "requestId": "c1", "node": "node-1", "whenUnplaceable": "Fail" },
                "nodeSelector": { "zone": "a" },
                "network": { "egress": "Deny" },
                "annotations": { "n": "x" },
            })
        );
        assert_eq!(made["metadata"]["name"], "dev");
        assert_eq!(made["metadata"]["labels"], json!({ "a": "b" }));
        assert_eq!(made["metadata"]["annotations"][COMMAND_ANNOTATION], "c1");
    }

    #[test]
    fn what_is_not_given_is_left_to_the_template() {
        let made = made(&["dev", "-t", "t", "--volume", "data:/data", "--when-unplaceable", "wait"]);
        assert_eq!(
            made["spec"]["volume"],
            json!({ "claim": "data", "mountPath": "/data", "deleteWithWorkspace": false })
        );
        assert_eq!(made["spec"]["power"]["whenUnplaceable"], "Wait");
        assert!(made["spec"].get("resources").is_none() && made["metadata"].get("annotations").is_none());
    }

    #[test]
    fn a_name_comes_from_the_command_id_or_from_the_template() {
        let first = made(&["-t", "t", "--command-id", "c1"])["metadata"].clone();
        assert_eq!(first, made(&["-t", "t", "--command-id", "c1"])["metadata"]);
        assert_ne!(first["name"], made(&["-t", "t", "--command-id", "c2"])["metadata"]["name"]);
        let other = made(&["-t", "t", "--command-id", "c1", "--cpu", "2"])["metadata"].clone();
        assert_eq!(first["name"], other["name"]);
        assert_ne!(first["annotations"][DIGEST_ANNOTATION], other["annotations"][DIGEST_ANNOTATION]);
        assert_eq!(made(&["-t", "debian-12"])["metadata"], json!({ "generateName": "debian-12-" }));
    }

    #[test]
    fn mistakes_are_found_before_anything_is_sent() {
        for bad in [
            &["dev"][..],
            &["dev", "-t", "t", "--volume", "data"],
            &["dev", "-t", "t", "--new-volume", "huge:/data"],
            &["dev", "-t", "t", "--volume", "a:/a", "--new-volume", "1Gi:/b"],
            &["dev", "-t", "t", "--cpu", "many"],
            &["dev", "-t", "t", "--label", "x"],
            &["dev", "-t", "t", "--egress", "some"],
            &["-f", "w.yaml", "-t", "t"],
            &["-f", "w.yaml", "--egress", "deny"],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        let error = built(parse(&["dev", "-t", "t", "--delete-volume-with-workspace"]).unwrap()).unwrap_err();
        assert_eq!(error.kind, Kind::Usage);
        let error = built(parse(&["ws-01kb8z4w3w0000000000000000", "-t", "t"]).unwrap()).unwrap_err();
        assert_eq!(error.kind, Kind::InvalidArgument);
    }
}
