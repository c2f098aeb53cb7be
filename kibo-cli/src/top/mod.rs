//! `kibo top`: how hosts are used, and by whom.

mod nodes;
mod workspaces;

use clap::Subcommand;

use crate::{client::Cluster, errors::Result};

#[derive(Subcommand, Debug)]
pub enum Command {
    /// How the hosts of nodes are used: by all their VMs, and at all
    #[command(alias = "node")]
    Nodes(nodes::Nodes),
    /// What running Workspaces use of what their nodes keep for them
    #[command(alias = "workspace")]
    Workspaces(workspaces::Workspaces),
}

pub async fn run(cluster: &Cluster, command: Command) -> Result<()> {
    match command {
        Command::Nodes(args) => nodes::nodes(cluster, args).await,
        Command::Workspaces(args) => workspaces::workspaces(cluster, args).await,
    }
}
