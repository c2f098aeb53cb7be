//! `kibo node`: the hosts that run Workspaces.

mod adopt;
mod list;
mod page;
#[cfg(test)]
mod tests;
mod view;

use clap::Subcommand;
use kibo_crds::{Node, NodeId};
use kube::api::ListParams;

use self::{
    adopt::{Adopt, adopt},
    list::Many,
    page::One,
};
use crate::{
    client::{Cluster, Paging, remark_next_page},
    errors::{On as _, Result, Subject},
    output::{OutputArgs, present, remark},
};

#[derive(Subcommand, Debug)]
pub enum Command {
    /// List nodes with what they can give and have given
    #[command(alias = "ls")]
    List {
        /// Only those with these labels
        #[arg(short = 'l', long, value_name = "LABELS")]
        selector: Option<String>,
        #[command(flatten)]
        paging: Paging,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show one node
    Get {
        #[arg(value_name = "NODE")]
        name: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// End the quarantine of a node whose control plane was put back to an older state
    Adopt(Adopt),
}

pub async fn run(cluster: &Cluster, command: Command) -> Result<()> {
    match command {
        Command::List { selector, paging, output } => {
            let params = ListParams { label_selector: selector, ..ListParams::default() };
            let listed = paging.list(&cluster.cluster_wide::<Node>(), params, &subject("")).await?;
            if listed.items.is_empty() {
                remark(&format!("no nodes; a host becomes one with a token: {}", issue("NODE")));
            }
            let many = Many { listed, now: Cluster::now() };
            present(output.form(), &many)?;
            remark_next_page(&many.listed);
            Ok(())
        }
        Command::Adopt(args) => adopt(cluster, args).await,
        Command::Get { name, output } => {
            let node = cluster.cluster_wide::<Node>().get(&name).await.on(&subject(&name))?;
            let now = Cluster::now();
            let events = cluster.events(&node, now).await;
            present(output.form(), &One { node, events, now })
        }
    }
}

pub fn subject(name: &str) -> Subject {
    Subject::cluster("Node", name)
}

/// Fails when there is no such node. A user who may not read nodes passes: the operator decides.
pub async fn check_exists(cluster: &Cluster, id: &NodeId) -> Result<()> {
    cluster.check_exists::<Node>(&cluster.cluster_wide(), &subject(id.as_str())).await
}

/// The command that prints a token for a host that is to become this node.
fn issue(node: &str) -> String {
    format!("{} enrollment issue {node}", crate::errors::program())
}
