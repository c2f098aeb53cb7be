//! `kibo enrollment`: how hosts become nodes, and how that ends.

mod issue;
mod list;
mod revoke;

use clap::Subcommand;

use self::{issue::Issue, list::List, revoke::Revoke};
use crate::{client::Cluster, errors::Result};

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Print a single-use token with which one host becomes this node; the Node is made if missing
    Issue(Issue),
    /// List nodes with their enrollment
    #[command(alias = "ls")]
    List(List),
    /// Take a token back; a host that has become the node loses that: no session, no member of any pool
    Revoke(Revoke),
}

pub async fn run(cluster: &Cluster, command: Command) -> Result<()> {
    match command {
        Command::Issue(args) => issue::issue(cluster, args).await,
        Command::List(args) => list::list(cluster, args).await,
        Command::Revoke(args) => revoke::revoke(cluster, args).await,
    }
}
