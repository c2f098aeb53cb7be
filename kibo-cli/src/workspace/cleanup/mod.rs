//! `kibo workspace cleanup-status`: what of a Workspace is still held on some node, and how that is known.

mod decide;

use std::collections::BTreeMap;

use clap::Args;
use kibo_crds::{Node, NodeId, Volume, Workspace, WorkspaceId, WorkspaceTombstone};
use kube::{
    ResourceExt as _,
    api::{Api, ListParams},
};
use serde::Serialize;

use self::decide::{NodeFacts, Part, Seen, State, decide};
use super::{target, view::volume_name};
use crate::{
    client::{Cluster, Paging},
    errors::{Kind, On as _, Result, Subject},
    output::{
        OutputArgs, Page, Present, Table, present,
        words::{enum_word, instant, or_absent},
    },
};

#[derive(Args, Debug)]
pub struct CleanupStatus {
    /// Name, or id (ws-…) in any namespace; also of a Workspace that was deleted lately
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn cleanup_status(cluster: &Cluster, args: CleanupStatus) -> Result<()> {
    let status = match target::fetch(cluster, &args.workspace).await {
        Ok((workspace, _)) => of_workspace(cluster, workspace).await?,
        Err(error) if error.kind == Kind::NotFound => match tombstone(cluster, &args.workspace).await? {
            Some(tombstone) => of_deleted(cluster, tombstone).await?,
            None => return Err(error),
        },
        Err(error) => return Err(error),
    };
    present(args.output.form(), &status)
}

async fn of_workspace(cluster: &Cluster, workspace: Workspace) -> Result<Status> {
    let namespace = workspace.namespace().unwrap_or_default();
    let volume = match volume_name(&workspace) {
        Some(name) => {
            let subject = Subject::namespaced("Volume", &name, &namespace);
            cluster.namespaced::<Volume>(&namespace).get_opt(&name).await.on(&subject)?
        }
        None => None,
    };
    let status = workspace.status.clone().unwrap_or_default();
    let seen = Seen {
        is_deleted: false,
        phase: status.phase,
        execution: status.execution,
        last: status.last_execution,
        layer: (status.holder, status.previous_holder),
        volume: volume
            .map(|volume| volume.status.map(|status| (status.holder, status.previous_holder)).unwrap_or_default()),
    };
    Ok(Status {
        id: status.id,
        name: workspace.name_any(),
        namespace,
        deleted_at: None,
        parts: decide(&seen, &facts(cluster, &seen).await?),
    })
}

async fn of_deleted(cluster: &Cluster, tombstone: WorkspaceTombstone) -> Result<Status> {
    let spec = tombstone.spec;
    let seen = Seen { is_deleted: true, last: spec.last_execution, ..Seen::default() };
    Ok(Status {
        id: Some(spec.id),
        name: spec.name,
        namespace: spec.namespace,
        deleted_at: Some(instant(&spec.deleted_at)),
        parts: decide(&seen, &facts(cluster, &seen).await?),
    })
}

/// The record of a deleted Workspace: by its id, or the newest of a name.
async fn tombstone(cluster: &Cluster, name_or_id: &str) -> Result<Option<WorkspaceTombstone>> {
    let api: Api<WorkspaceTombstone> = cluster.cluster_wide();
    let subject = Subject::cluster("WorkspaceTombstone", name_or_id);
    if let Ok(id) = name_or_id.parse::<WorkspaceId>() {
        return api.get_opt(&id.to_string()).await.on(&subject);
    }
    let all = match Paging::default().list(&api, ListParams::default(), &subject).await {
        // Somebody whose rights end at a namespace reads none of them.
        Err(error) if error.kind == Kind::NotPermitted => return Ok(None),
        listed => listed?.items,
    };
    let of_name = |it: &WorkspaceTombstone| it.spec.name == name_or_id && it.spec.namespace == cluster.namespace();
    Ok(all.into_iter().filter(of_name).max_by_key(|it| it.spec.deleted_at.0))
}

/// What is known of the nodes that are named.
async fn facts(cluster: &Cluster, seen: &Seen) -> Result<BTreeMap<NodeId, NodeFacts>> {
    let mut facts = BTreeMap::new();
    for id in seen.nodes() {
        let subject = crate::node::subject(id.as_str());
        match cluster.cluster_wide::<Node>().get_opt(id.as_str()).await {
            Err(kube::Error::Api(status)) if status.is_forbidden() => {
                facts.insert(id, NodeFacts::HIDDEN);
            }
            answer => {
                let node = answer.on(&subject)?;
                facts.extend(node.map(|node| (id, NodeFacts::of(&node))));
            }
        }
    }
    Ok(facts)
}

struct Status {
    id: Option<WorkspaceId>,
    name: String,
    namespace: String,
    deleted_at: Option<String>,
    parts: [Part; 3],
}

#[derive(Serialize)]
struct View<'a> {
    workspace_id: Option<String>,
    name: &'a str,
    namespace: &'a str,
    deleted_at: Option<&'a str>,
    runtime: PartView<'a>,
    volume_attachment: PartView<'a>,
    residual: PartView<'a>,
}

#[derive(Serialize)]
struct PartView<'a> {
    state: String,
    source: String,
    node_id: Option<&'a str>,
    detail: &'a str,
}

impl<'a> From<&'a Part> for PartView<'a> {
    fn from(part: &'a Part) -> Self {
        Self {
            state: enum_word(&part.state),
            source: enum_word(&part.source),
            node_id: part.node.as_ref().map(NodeId::as_str),
            detail: &part.detail,
        }
    }
}

impl Present for Status {
    fn view(&self) -> impl Serialize {
        let [runtime, volume_attachment, residual] = self.parts.each_ref().map(PartView::from);
        View {
            workspace_id: self.id.map(|id| id.to_string()),
            name: &self.name,
            namespace: &self.namespace,
            deleted_at: self.deleted_at.as_deref(),
            runtime,
            volume_attachment,
            residual,
        }
    }

    /// What is not released yet.
    fn names(&self) -> Vec<String> {
        let names = ["RUNTIME", "VOLUME_ATTACHMENT", "RESIDUAL"].iter().zip(&self.parts);
        names.filter(|(_, part)| part.state != State::Released).map(|(name, _)| (*name).to_owned()).collect()
    }

    fn text(&self, _wide: bool) -> String {
        let mut page = Page::default();
        page.fact("Name", &self.name);
        page.fact("Namespace", &self.namespace);
        page.fact("ID", or_absent(self.id));
        page.fact_if("Deleted", self.deleted_at.clone());
        let mut table = Table::new(["WHAT", "STATE", "SOURCE", "NODE", "DETAIL"]);
        for (name, part) in ["RUNTIME", "VOLUME_ATTACHMENT", "RESIDUAL"].into_iter().zip(&self.parts) {
            table.row(vec![
                name.to_owned(),
                enum_word(&part.state),
                enum_word(&part.source),
                or_absent(part.node.as_ref()),
                part.detail.clone(),
            ]);
        }
        page.section("Held", table);
        page.render()
    }
}
