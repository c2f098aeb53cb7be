//! `kibo workspace list`.

use clap::Args;
use kibo_crds::{InstanceId, NodeId, Workspace, workspace::WorkspacePhase};
use kube::{Api, api::ListParams};

use super::table::Many;
use crate::{
    client::{Cluster, Paging, nothing, remark_next_page},
    errors::{Kind, Result, Subject},
    node,
    output::{OutputArgs, present, remark},
};

#[derive(Args, Debug)]
pub struct List {
    /// In all namespaces
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// Only those in this state, such as available or failed; can be repeated
    #[arg(long = "state", value_name = "STATE", value_parser = phase)]
    states: Vec<WorkspacePhase>,
    /// Only those with these labels, such as app=web,tier!=test
    #[arg(short = 'l', long, visible_alias = "label", value_name = "LABELS")]
    selector: Option<String>,
    /// Only those that run on this node, in all namespaces unless -n is given
    #[arg(long, conflicts_with_all = ["states", "selector"])]
    node: Option<NodeId>,
    /// Only the one that runs as this Instance (inst-…), in any namespace unless -n is given
    #[arg(long, value_name = "ID", conflicts_with_all = ["states", "selector", "node"])]
    instance: Option<InstanceId>,
    #[command(flatten)]
    paging: Paging,
    #[command(flatten)]
    output: OutputArgs,
}

/// Reads a state in any spelling: `AVAILABLE`, `Available`, `available`.
fn phase(text: &str) -> Result<WorkspacePhase, String> {
    let mut camel = text.to_ascii_lowercase();
    if let Some(first) = camel.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    serde_json::from_value(serde_json::Value::String(camel))
        .map_err(|_| "must be one of creating, starting, available, stopping, stopped, failed, deleting".to_owned())
}

pub async fn list(cluster: &Cluster, args: List) -> Result<()> {
    // What runs on a host does not stop at the namespace that the user works in.
    let by_place = args.node.is_some() || args.instance.is_some();
    let everywhere = args.all_namespaces || (by_place && cluster.explicit_namespace.is_none());
    let api: Api<Workspace> =
        if everywhere { Api::all(cluster.client.clone()) } else { cluster.namespaced(cluster.namespace()) };
    if let Some(node) = &args.node {
        // An empty list for a node that does not exist would hide a typing mistake.
        node::check_exists(cluster, node).await?;
    }
    let subject = Subject::namespaced("Workspace", "", cluster.namespace());
    let listed = args.paging.list(&api, params(&args), &subject).await;
    let mut listed = listed.map_err(|error| match error.kind {
        Kind::NotPermitted if by_place && everywhere => {
            error.next("you may not look in all namespaces: say with -n where it is")
        }
        _ => error,
    })?;
    if args.states.len() > 1 {
        listed.items.retain(|workspace| {
            workspace.status.as_ref().and_then(|status| status.phase).is_some_and(|phase| args.states.contains(&phase))
        });
    }
    if listed.items.is_empty() {
        remark(&nothing("Workspaces", cluster, everywhere));
    }
    let many = Many { listed, namespaces: everywhere, now: Cluster::now() };
    present(args.output.form(), &many)?;
    remark_next_page(&many.listed);
    Ok(())
}

/// The server filters, as far as its selectors reach: several states cannot be said in one.
fn params(args: &List) -> ListParams {
    let mut params = ListParams::default();
    params.label_selector.clone_from(&args.selector);
    params.field_selector = match (&args.node, &args.instance, args.states.as_slice()) {
        (Some(node), _, _) => Some(format!("status.execution.node={node}")),
        (None, Some(instance), _) => Some(format!("status.execution.instanceId={instance}")),
        (None, None, [state]) => Some(format!("status.phase={state:?}")),
        _ => None,
    };
    params
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::Cli;

    fn parse(args: &[&str]) -> Result<List, clap::Error> {
        let line = [&["kibo", "workspace", "list"], args].concat();
        match Cli::try_parse_from(line)?.command {
            crate::cli::Command::Workspace(super::super::Command::List(list)) => Ok(list),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn filters_become_selectors_of_the_server() {
        let fields = |args: &[&str]| params(&parse(args).unwrap()).field_selector;
        assert_eq!(fields(&["--state", "AVAILABLE"]).as_deref(), Some("status.phase=Available"));
        assert_eq!(fields(&["--state", "available", "--state", "Failed"]), None);
        assert_eq!(fields(&["--node", "node-a"]).as_deref(), Some("status.execution.node=node-a"));
        assert_eq!(params(&parse(&["-l", "a=b"]).unwrap()).label_selector.as_deref(), Some("a=b"));
        assert_eq!(fields(&[]), None);
    }

    #[test]
    fn filters_that_exclude_each_other_are_refused() {
        for bad in [
            &["--node", "a", "--state", "failed"][..],
            &["--node", "a", "-l", "a=b"],
            &["--node", "a", "--instance", "inst-01kb8z4w3w0000000000000000"],
            &["--state", "broken"],
            &["--instance", "x"],
            &["-A", "-n", "team"],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
