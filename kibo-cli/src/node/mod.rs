//! `kibo node`: the hosts that run Workspaces.

mod adopt;
mod changes;
mod commanded;
mod drain;
mod end;
mod list;
mod outcome;
mod overcommit;
mod page;
mod settings;
#[cfg(test)]
mod tests;
mod view;

pub use crate::command::{Given, Recorded, WriteArgs};
use clap::Subcommand;
use kibo_crds::{Node, NodeId};
use kube::api::ListParams;
pub use outcome::Outcome;
pub use view::{HostUsageView, Measured, is_isolated, memory_tight, shares, yes_no};

use self::{
    adopt::{Adopt, adopt},
    drain::{CancelDrain, Drain, cancel_drain, drain},
    end::{Isolate, Retire, isolate, retire},
    list::Many,
    overcommit::Overcommit,
    page::One,
    settings::{Label, Slots, label, set_slots},
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
    /// Keep new Workspaces away from a node; those that are there stay
    Drain(Drain),
    /// Let new Workspaces come to a node again
    CancelDrain(CancelDrain),
    /// Declare that a host is off or cannot write, so that what it held goes on elsewhere
    Isolate(Isolate),
    /// End the registration of a node for ever
    Retire(Retire),
    /// How many Instances a node may run at once
    #[command(subcommand)]
    Slots(Slots),
    /// How much more than its hosts have a cluster hands out
    #[command(subcommand)]
    Overcommit(Overcommit),
    /// Set and remove labels, by which Workspaces select nodes
    Label(Label),
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
        Command::Drain(args) => drain(cluster, args).await,
        Command::CancelDrain(args) => cancel_drain(cluster, args).await,
        Command::Isolate(args) => isolate(cluster, args).await,
        Command::Retire(args) => retire(cluster, args).await,
        Command::Slots(Slots::Set(args)) => set_slots(cluster, args).await,
        Command::Overcommit(command) => overcommit::run(cluster, command).await,
        Command::Label(args) => label(cluster, args).await,
        Command::Adopt(args) => adopt(cluster, args).await,
        Command::Get { name, output } => {
            let node = cluster.cluster_wide::<Node>().get(&name).await.on(&subject(&name))?;
            let now = Cluster::now();
            let events = cluster.events(&node, now).await;
            present(output.form(), &One { node, events, now })
        }
    }
}

/// A command to a node.
pub type Submission = crate::command::Submission<Node>;

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
