//! `kibo volume`: disks with a life of their own, bound by at most one Workspace each.

mod resize;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use jiff::Timestamp;
use kibo_crds::{PoolId, SizeQuantity, Volume, volume::VolumeSpec};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, PostParams, Preconditions},
};
use serde::Serialize;

use crate::{
    cli::{WaitArgs, pair},
    client::{Cluster, Listed, Paging},
    errors::{Error, Kind, On as _, Result, Subject},
    manifest,
    output::{
        ConditionView, Form, OutputArgs, Page, Present, Table, conditions, is_telling, present, print, remark,
        words::{age, enum_word, instant, or_absent, when},
    },
    wait::{Look, Wait},
};

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Create a Volume; its disk is made at the first start of a Workspace that binds it
    Create(Create),
    /// Show one Volume
    Get {
        #[arg(value_name = "VOLUME")]
        name: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List Volumes
    #[command(alias = "ls")]
    List(List),
    /// Make the disk of a Volume larger, from the next start of a Workspace with it on
    Resize(Resize),
    /// Delete Volumes that no Workspace binds, with their data
    #[command(alias = "rm")]
    Delete {
        #[arg(required = true, value_name = "VOLUME")]
        names: Vec<String>,
        #[command(flatten)]
        wait: WaitArgs,
    },
}

#[derive(Args, Debug)]
pub struct Create {
    #[arg(required_unless_present = "file", conflicts_with = "file")]
    name: Option<String>,
    /// Read the Volume from a manifest instead (- for standard input)
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["size", "pool", "labels"])]
    file: Option<PathBuf>,
    /// Size of the disk, whole MiB
    #[arg(long, required_unless_present = "file")]
    size: Option<SizeQuantity>,
    /// Storage pool; default: that of the node that makes the disk
    #[arg(long)]
    pool: Option<PoolId>,
    /// Label; can be repeated
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    labels: Vec<(String, String)>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Debug)]
pub struct Resize {
    #[arg(value_name = "VOLUME")]
    name: String,
    /// The size that the disk is to have, whole MiB; it only grows
    #[arg(long)]
    size: SizeQuantity,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Debug)]
pub struct List {
    /// In all namespaces
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// Only those with these labels, such as app=web,tier!=test
    #[arg(short = 'l', long, value_name = "LABELS")]
    selector: Option<String>,
    #[command(flatten)]
    paging: Paging,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn run(cluster: &Cluster, command: Command) -> Result<()> {
    match command {
        Command::Create(args) => create(cluster, args).await,
        Command::Get { name, output } => {
            let volume = api(cluster).get(&name).await.on(&subject(cluster, &name))?;
            let now = Cluster::now();
            let events = cluster.events(&volume, now).await;
            present(output.form(), &One { volume, events, now })
        }
        Command::List(args) => list(cluster, args).await,
        Command::Resize(args) => resize::resize(cluster, args).await,
        Command::Delete { names, wait } => {
            for name in names {
                delete(cluster, &name, wait.wanted()).await?;
            }
            Ok(())
        }
    }
}

fn api(cluster: &Cluster) -> Api<Volume> {
    cluster.namespaced(cluster.namespace())
}

fn subject(cluster: &Cluster, name: &str) -> Subject {
    Subject::namespaced("Volume", name, cluster.namespace())
}

async fn create(cluster: &Cluster, args: Create) -> Result<()> {
    let form = args.output.form();
    let volume: Volume = match (&args.file, args.size) {
        (None, Some(size)) => {
            let mut volume =
                Volume::new(&args.name.unwrap_or_default(), VolumeSpec { size, pool: args.pool, r#move: None });
            volume.metadata.labels = (!args.labels.is_empty()).then(|| args.labels.into_iter().collect());
            volume
        }
        (file, _) => manifest::read(file.as_deref().unwrap_or_else(|| "-".as_ref()))?,
    };
    let namespace = volume.namespace().unwrap_or_else(|| cluster.namespace().to_owned());
    let subject = Subject::namespaced("Volume", &volume.name_any(), &namespace);
    let volume = cluster.namespaced(&namespace).create(&PostParams::default(), &volume).await.on(&subject)?;
    if matches!(form, Form::Text { .. }) {
        return print(&format!("{subject} created\n"));
    }
    present(form, &One { volume, events: Table::default(), now: Cluster::now() })
}

async fn list(cluster: &Cluster, args: List) -> Result<()> {
    let api = if args.all_namespaces { Api::all(cluster.client.clone()) } else { api(cluster) };
    let params = ListParams { label_selector: args.selector, ..ListParams::default() };
    let listed = args.paging.list(&api, params, &subject(cluster, "")).await?;
    if listed.items.is_empty() {
        remark(&crate::client::nothing("Volumes", cluster, args.all_namespaces));
    }
    let many = Many { listed, namespaces: args.all_namespaces, now: Cluster::now() };
    present(args.output.form(), &many)?;
    crate::client::remark_next_page(&many.listed);
    Ok(())
}

/// A bound Volume is refused here: its deletion would only wait for the Workspace's.
async fn delete(cluster: &Cluster, name: &str, wait: bool) -> Result<()> {
    let (api, subject) = (api(cluster), subject(cluster, name));
    let volume = api.get(name).await.on(&subject)?;
    if let Some(bound) = volume.status.as_ref().and_then(|status| status.bound_to.as_ref()) {
        return Err(Error::new(Kind::FailedPrecondition, format!("{subject} is bound to Workspace {:?}", bound.name))
            .next(format!(
                "delete that first: {}",
                Subject::namespaced("Workspace", &bound.name, cluster.namespace()).command("delete")
            )));
    }
    let uid = volume.uid();
    let params = DeleteParams {
        preconditions: Some(Preconditions { uid: uid.clone(), resource_version: volume.resource_version() }),
        ..DeleteParams::default()
    };
    api.delete(name, &params).await.map(|_| ()).on(&subject)?;
    if wait {
        let wait = Wait {
            api,
            subject: &subject,
            goal: "to be gone",
            timeout: cluster.timeout,
            remains: "the deletion goes on",
            go_on: subject.command("delete"),
        };
        wait.until(|seen: Option<&Volume>| {
            Ok(match seen.filter(|volume| volume.uid() == uid) {
                None => Look::Done(()),
                Some(volume) => Look::Waiting(format!("finalizers: {}", volume.finalizers().join(", "))),
            })
        })
        .await?;
        return print(&format!("{subject} deleted\n"));
    }
    print(&format!("{subject} is being deleted\n"))
}

/// A Volume in JSON.
#[derive(Serialize)]
struct View {
    name: String,
    namespace: Option<String>,
    state: Option<String>,
    size: String,
    size_bytes: Option<u64>,
    /// What the next start makes it.
    grows_to_bytes: Option<u64>,
    pool_id: Option<String>,
    workspace: Option<String>,
    holder: Option<HolderView>,
    epoch: Option<u64>,
    labels: std::collections::BTreeMap<String, String>,
    created_at: Option<String>,
    conditions: Vec<ConditionView>,
}

#[derive(Serialize)]
struct HolderView {
    node_id: String,
    incarnation: u64,
    epoch: u64,
    idle: bool,
}

impl From<&Volume> for View {
    fn from(volume: &Volume) -> Self {
        let status = volume.status.clone().unwrap_or_default();
        Self {
            name: volume.name_any(),
            namespace: volume.namespace(),
            state: status.phase.as_ref().map(enum_word),
            size: volume.spec.size.to_string(),
            size_bytes: status.size.map(|size| size.0),
            grows_to_bytes: status.grow_to.map(|size| size.0),
            pool_id: pool(volume),
            workspace: status.bound_to.map(|bound| bound.name),
            holder: status.holder.map(|holder| HolderView {
                node_id: holder.node.to_string(),
                incarnation: holder.incarnation.0,
                epoch: holder.epoch.0,
                idle: holder.idle,
            }),
            epoch: status.epoch.map(|epoch| epoch.0),
            labels: volume.labels().clone(),
            created_at: volume.creation_timestamp().as_ref().map(instant),
            conditions: status.conditions.iter().map(Into::into).collect(),
        }
    }
}

/// Where the disk is, or where it will be.
fn pool(volume: &Volume) -> Option<String> {
    let made = volume.status.as_ref().and_then(|status| status.pool.as_ref());
    made.or(volume.spec.pool.as_ref()).map(ToString::to_string)
}

struct One {
    volume: Volume,
    events: Table,
    now: Timestamp,
}

impl Present for One {
    fn view(&self) -> impl Serialize {
        View::from(&self.volume)
    }

    fn names(&self) -> Vec<String> {
        vec![self.volume.name_any()]
    }

    fn text(&self, wide: bool) -> String {
        let status = self.volume.status.clone().unwrap_or_default();
        let mut page = Page::default();
        page.fact("Name", self.volume.name_any());
        page.fact("Namespace", self.volume.namespace().unwrap_or_default());
        page.state("State", status.phase.as_ref().map(enum_word).unwrap_or_default());
        page.fact("Size", self.volume.spec.size.to_string());
        page.fact("Pool", pool(&self.volume).unwrap_or_default());
        page.fact_if("Move", crate::moving::fact(status.r#move.as_ref()));
        page.fact("Workspace", status.bound_to.as_ref().map(|bound| bound.name.clone()).unwrap_or_default());
        page.fact(
            "Held by",
            status
                .holder
                .as_ref()
                .map(|holder| format!("{}{}", holder.node, if holder.idle { " (idle)" } else { "" }))
                .unwrap_or_default(),
        );
        if wide {
            page.fact("Incarnation", or_absent(status.holder.as_ref().map(|holder| holder.incarnation)));
            page.fact("Epoch", or_absent(status.epoch));
            page.fact("UID", self.volume.uid().unwrap_or_default());
        }
        page.fact("Created", when(self.volume.creation_timestamp().as_ref(), self.now, wide));
        let shown = status.conditions.iter().filter(|condition| wide || is_telling(condition));
        page.section("Conditions", conditions(shown, self.now));
        page.section("Events", self.events.clone());
        page.render()
    }
}

struct Many {
    listed: Listed<Volume>,
    namespaces: bool,
    now: Timestamp,
}

impl Present for Many {
    fn view(&self) -> impl Serialize {
        self.listed.view("volumes", View::from)
    }

    fn names(&self) -> Vec<String> {
        self.listed.items.iter().map(ResourceExt::name_any).collect()
    }

    fn text(&self, wide: bool) -> String {
        let mut table = Table::new(["NAME", "STATE", "SIZE", "POOL", "WORKSPACE", "AGE"]);
        if self.namespaces {
            table = table.column_before("NAMESPACE");
        }
        if wide {
            table = table.columns(["HELD_BY", "EPOCH"]);
        }
        for volume in &self.listed.items {
            let status = volume.status.clone().unwrap_or_default();
            let mut row = vec![
                volume.name_any(),
                status.phase.as_ref().map(enum_word).unwrap_or_default(),
                volume.spec.size.to_string(),
                pool(volume).unwrap_or_default(),
                status.bound_to.map(|bound| bound.name).unwrap_or_default(),
                age(volume.creation_timestamp().as_ref(), self.now),
            ];
            if self.namespaces {
                row.insert(0, volume.namespace().unwrap_or_default());
            }
            if wide {
                row.push(or_absent(status.holder.map(|holder| holder.node)));
                row.push(or_absent(status.epoch));
            }
            table.row(row);
        }
        table.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(json: serde_json::Value) -> Volume {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn the_table_of_volumes() {
        let items = vec![
            volume(serde_json::json!({
                "metadata": { "name": "data", "namespace": "default", "creationTimestamp": "1970-01-01T00:00:00Z" },
                "spec": { "size": "10Gi" },
                "status": {
                    "phase": "Bound", "pool": "local-a", "boundTo": { "name": "dev", "uid": "u" }, "epoch": 3,
                    "holder": { "node": "node-1", "incarnation": 1, "epoch": 3 },
                },
            })),
            volume(serde_json::json!({
                "metadata": { "name": "new", "namespace": "default" }, "spec": { "size": "1Gi", "pool": "shared" },
            })),
        ];
        let now = Timestamp::from_second(300).unwrap();
        let mut many = Many { listed: Listed { items, next_page_token: None }, namespaces: false, now };
        let expected = "\
NAME   STATE   SIZE   POOL      WORKSPACE   AGE
data   BOUND   10Gi   local-a   dev         5m
new    -       1Gi    shared    -           -
";
        assert_eq!(many.text(false), expected);
        many.namespaces = true;
        let expected = "\
NAMESPACE   NAME   STATE   SIZE   POOL      WORKSPACE   AGE   HELD_BY   EPOCH
default     data   BOUND   10Gi   local-a   dev         5m    node-1    3
default     new    -       1Gi    shared    -           -     -         -
";
        assert_eq!(many.text(true), expected);
    }

    #[test]
    fn the_json_of_a_volume() {
        let volume = volume(serde_json::json!({
            "metadata": { "name": "new", "namespace": "default", "labels": { "a": "b" } },
            "spec": { "size": "1Gi", "pool": "shared" },
            "status": { "phase": "Available", "size": 1_073_741_824 },
        }));
        let expected = serde_json::json!({
            "name": "new", "namespace": "default", "state": "AVAILABLE", "size": "1Gi", "size_bytes": 1_073_741_824,
            "grows_to_bytes": null, "pool_id": "shared", "workspace": null, "holder": null, "epoch": null, "labels": { "a": "b" },
            "created_at": null, "conditions": [],
        });
        assert_eq!(serde_json::to_value(View::from(&volume)).unwrap(), expected);
    }
}
