//! `kibo top workspaces`: lists what runs, and joins what the operator knows of its use.

use std::collections::HashMap;

use clap::Args;
use jiff::Timestamp;
use kibo_crds::{
    InstanceId, NodeId, Workspace,
    usage::{PLURAL, WorkspaceUsage, WorkspaceUsageList},
    workspace::Execution,
};
use kube::{Api, ResourceExt as _, api::ListParams};
use serde::Serialize;

use crate::{
    client::{AGGREGATED_API, Cluster, Listed, Paging, nothing, remark_next_page},
    errors::{Error, On as _, Result, Subject},
    node::{self, shares},
    output::{
        OutputArgs, Present, Table, present, remark,
        words::{age, binary, cores, instant},
    },
};

#[derive(Args, Debug)]
pub struct Workspaces {
    /// In all namespaces
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// Only those with these labels, such as app=web,tier!=test
    #[arg(short = 'l', long, value_name = "LABELS")]
    selector: Option<String>,
    /// Only those that run on this node, in all namespaces unless -n is given
    #[arg(long)]
    node: Option<NodeId>,
    #[command(flatten)]
    paging: Paging,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn workspaces(cluster: &Cluster, args: Workspaces) -> Result<()> {
    let everywhere = args.all_namespaces || (args.node.is_some() && cluster.explicit_namespace.is_none());
    let api: Api<Workspace> =
        if everywhere { Api::all(cluster.client.clone()) } else { cluster.namespaced(cluster.namespace()) };
    if let Some(node) = &args.node {
        node::check_exists(cluster, node).await?;
    }
    let params = params(args.selector, args.node.as_ref());
    let listed = args.paging.list(&api, params, &Subject::namespaced("Workspace", "", cluster.namespace())).await?;
    let items: Vec<_> = listed.items.into_iter().filter_map(Running::of).collect();
    let listed = Listed { items, next_page_token: listed.next_page_token };
    if listed.items.is_empty() {
        remark(&nothing("running Workspaces", cluster, everywhere));
    }
    let used = if listed.items.is_empty() { HashMap::new() } else { usages(cluster, everywhere).await? };
    let many = Many { listed, used, namespaces: everywhere, now: Cluster::now() };
    present(args.output.form(), &many)?;
    remark_next_page(&many.listed);
    Ok(())
}

/// Only what runs uses anything.
fn params(selector: Option<String>, node: Option<&NodeId>) -> ListParams {
    let field_selector = match node {
        Some(node) => format!("status.execution.node={node}"),
        None => "status.execution.instanceId!=".to_owned(),
    };
    ListParams { label_selector: selector, field_selector: Some(field_selector), ..ListParams::default() }
}

async fn usages(cluster: &Cluster, everywhere: bool) -> Result<HashMap<InstanceId, WorkspaceUsage>> {
    let namespace = if everywhere { String::new() } else { format!("/namespaces/{}", cluster.namespace()) };
    let path = format!("{AGGREGATED_API}{namespace}/{PLURAL}");
    let request = http::Request::get(&path).body(Vec::new());
    let request = request.map_err(|error| Error::invalid(format!("{path} cannot be asked for: {error}")))?;
    let subject = Subject::namespaced("usage of Workspaces", "", cluster.namespace());
    let list: WorkspaceUsageList = cluster.client.request(request).await.on(&subject)?;
    Ok(list.items.into_iter().map(|usage| (usage.instance_id, usage)).collect())
}

struct Many {
    listed: Listed<Running>,
    used: HashMap<InstanceId, WorkspaceUsage>,
    /// They come from several namespaces.
    namespaces: bool,
    now: Timestamp,
}

/// What could not be measured is absent.
#[derive(Serialize)]
struct OneView {
    namespace: String,
    name: String,
    node_id: NodeId,
    instance_id: InstanceId,
    cpu_used_millis: Option<u64>,
    cpu_allocated_millis: u64,
    memory_used_bytes: Option<u64>,
    memory_allocated_bytes: u64,
    sampled_at: Option<String>,
}

/// A Workspace with its execution.
struct Running {
    workspace: Workspace,
    execution: Execution,
}

impl Running {
    /// `None`: it has stopped since it was picked.
    fn of(workspace: Workspace) -> Option<Self> {
        let execution = workspace.status.as_ref()?.execution.clone()?;
        Some(Self { workspace, execution })
    }
}

impl Many {
    /// What its node has told.
    fn usage(&self, running: &Running) -> Option<&WorkspaceUsage> {
        self.used.get(&running.execution.instance_id)
    }
}

impl Present for Many {
    fn view(&self) -> impl Serialize {
        let one = |running: &Running| {
            let (usage, Running { workspace, execution }) = (self.usage(running), running);
            OneView {
                namespace: workspace.namespace().unwrap_or_default(),
                name: workspace.name_any(),
                node_id: execution.node.clone(),
                instance_id: execution.instance_id,
                cpu_used_millis: usage.and_then(|usage| usage.used.cpu_milli).map(|cpu| cpu.0),
                cpu_allocated_millis: execution.cpu_milli.0,
                memory_used_bytes: usage.and_then(|usage| usage.used.memory_bytes).map(|memory| memory.0),
                memory_allocated_bytes: execution.memory_bytes.0,
                sampled_at: usage.map(|usage| instant(&usage.sampled_at)),
            }
        };
        self.listed.view("workspaces", one)
    }

    fn names(&self) -> Vec<String> {
        self.listed.items.iter().map(|running| running.workspace.name_any()).collect()
    }

    fn text(&self, _wide: bool) -> String {
        let mut table = Table::new(["WORKSPACE", "NODE", "CPU_USED/ALLOC", "MEM_USED/ALLOC", "SAMPLE_AGE"]);
        if self.namespaces {
            table = table.column_before("NAMESPACE");
        }
        for running in &self.listed.items {
            let (usage, Running { workspace, execution }) = (self.usage(running), running);
            let used = usage.map(|usage| usage.used).unwrap_or_default();
            let mut row = vec![
                workspace.name_any(),
                execution.node.to_string(),
                shares(used.cpu_milli, Some(execution.cpu_milli), cores),
                shares(used.memory_bytes, Some(execution.memory_bytes), binary),
                age(usage.map(|usage| &usage.sampled_at), self.now),
            ];
            if self.namespaces {
                row.insert(0, workspace.namespace().unwrap_or_default());
            }
            table.row(row);
        }
        table.render()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn workspace(name: &str, instance: InstanceId) -> Workspace {
        serde_json::from_value(json!({
            "metadata": { "name": name, "namespace": "team" }, "spec": { "template": "debian-12" },
            "status": { "execution": {
                "instanceId": instance, "node": "node-1", "incarnation": 1, "cpuMilli": 2000, "memoryBytes": 335_544_320,
                "lastSeq": 0, "startedAt": "1970-01-01T00:00:00Z",
            }},
        }))
        .unwrap()
    }

    #[test]
    fn what_a_node_has_not_told_is_absent_and_never_nothing() {
        let (measured, silent) = (InstanceId::generate(), InstanceId::generate());
        let usage: WorkspaceUsage = serde_json::from_value(json!({
            "apiVersion": "subresources.kibotos.dev/v1alpha1", "kind": "WorkspaceUsage", "metadata": {},
            "instanceId": measured, "node": "node-1", "sampledAt": "1970-01-01T00:01:20Z",
            "allocated": { "cpuMilli": 2000, "memoryBytes": 335_544_320 },
            "used": { "cpuMilli": 125, "memoryBytes": 104_857_600 },
        }))
        .unwrap();
        let stopped = serde_json::from_value(json!({
            "metadata": { "name": "off", "namespace": "team" }, "spec": { "template": "debian-12" },
        }));
        let items = [workspace("busy", measured), workspace("new", silent), stopped.unwrap()];
        let items = items.into_iter().filter_map(Running::of).collect();
        let many = Many {
            listed: Listed { items, next_page_token: None },
            used: [(measured, usage)].into(),
            namespaces: true,
            now: Timestamp::from_second(90).unwrap(),
        };
        let expected = "\
NAMESPACE   WORKSPACE   NODE     CPU_USED/ALLOC   MEM_USED/ALLOC    SAMPLE_AGE
team        busy        node-1   0.125/2          100.0Mi/320.0Mi   10s
team        new         node-1   -/2              -/320.0Mi         -
";
        assert_eq!(many.text(false), expected);
        let view = serde_json::to_value(many.view()).unwrap();
        let new = &view["workspaces"][1];
        assert!(new["memory_used_bytes"].is_null() && new["cpu_used_millis"].is_null(), "{new}");
    }

    #[test]
    fn the_server_picks_what_runs() {
        let fields =
            |node: Option<&str>| params(None, node.map(|id| id.parse().unwrap()).as_ref()).field_selector.unwrap();
        assert_eq!(fields(None), "status.execution.instanceId!=");
        assert_eq!(fields(Some("node-1")), "status.execution.node=node-1");
    }
}
