//! `kibo workspace`: microVMs, from creation to deletion.

mod bind;
mod change;
mod cleanup;
mod create;
mod delete;
mod list;
mod page;
mod power;
mod relocate;
pub mod stream;
mod table;
pub mod target;
#[cfg(test)]
mod tests;
mod update;
mod view;
mod wait;

use clap::{Args, Subcommand};
use kibo_crds::{CommandId, NodeId};
pub use power::fresh_id;

use crate::{
    cli::WaitArgs,
    client::Cluster,
    errors::Result,
    output::{OutputArgs, present},
};

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Create a Workspace and start it
    Create(Box<create::Create>),
    /// Show one Workspace: what it is, where it runs, what it waits for
    Get {
        /// Name, or id (ws-…) in any namespace
        #[arg(value_name = "WORKSPACE")]
        workspace: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List Workspaces
    #[command(alias = "ls")]
    List(list::List),
    /// Start a stopped or failed Workspace
    Start(Start),
    /// Stop a Workspace; its disks are kept for the next start
    Stop(Stop),
    /// Stop a Workspace and start it on another node
    Move(relocate::Move),
    /// Change what a stopped Workspace gets of CPU, memory and network at its next start
    Update(update::Update),
    /// Make the writable layer of a stopped Workspace larger, from its next start on
    Resize(update::Resize),
    /// Bind an existing Volume to a stopped Workspace, or mount the one that it has elsewhere
    Bind(bind::Bind),
    /// Release the Volume of a stopped Workspace; its data is kept
    Unbind(bind::Unbind),
    /// Delete Workspaces, with their writable layers
    #[command(alias = "rm")]
    Delete(delete::Delete),
    /// Run a command inside a Workspace; the exit status is that of the command
    Exec(stream::exec::Exec),
    /// Open the login shell of a Workspace
    Shell(stream::exec::Shell),
    /// Copy files and directories into a Workspace or out of it
    Cp(stream::cp::Copy),
    /// Print what the entrypoint of a Workspace wrote
    Logs(stream::logs::Logs),
    /// Lead local ports to ports inside a Workspace
    PortForward(stream::port_forward::PortForward),
    /// Show what of a Workspace is still held on a node, and how that is known
    CleanupStatus(cleanup::CleanupStatus),
    /// Wait until a Workspace is in a state, is gone, or has a condition
    Wait(wait::WaitFor),
}

#[derive(Args, Debug)]
pub struct Start {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// Start it on this node or not at all; only this start is bound to it
    #[arg(long)]
    node: Option<NodeId>,
    /// What to do while no node can take it
    #[arg(long, value_enum, value_name = "WHAT", default_value = "fail")]
    when_unplaceable: power::Unplaceable,
    #[command(flatten)]
    command: CommandArgs,
    #[command(flatten)]
    pub wait: WaitArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Debug)]
pub struct Stop {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// Do not wait for the guest to write back what it has in memory: the newest writes may be lost
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    command: CommandArgs,
    #[command(flatten)]
    wait: WaitArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// The id of a write.
#[derive(Args, Debug)]
pub struct CommandArgs {
    /// Id of this command: the same id again gives the same outcome instead of a second one
    #[arg(long, value_name = "ID")]
    command_id: Option<CommandId>,
}

/// Runs a verb; its exit status is 0, save for `exec` and `shell`.
pub async fn run(cluster: &Cluster, command: Command) -> Result<u8> {
    match command {
        Command::Exec(args) => return stream::exec::exec(cluster, args).await,
        Command::Shell(args) => return stream::exec::shell(cluster, args).await,
        Command::Create(args) => Box::pin(create::create(cluster, *args)).await?,
        Command::Get { workspace, output } => {
            let (workspace, _) = target::fetch(cluster, &workspace).await?;
            let page = page::One::gather(cluster, workspace).await;
            present(output.form(), &page)?;
        }
        Command::List(args) => list::list(cluster, args).await?,
        Command::Start(args) => power::start(cluster, args).await?,
        Command::Stop(args) => power::stop(cluster, args).await?,
        Command::Move(args) => relocate::relocate(cluster, args).await?,
        Command::Update(args) => update::update(cluster, args).await?,
        Command::Resize(args) => update::resize(cluster, args).await?,
        Command::Bind(args) => bind::bind(cluster, args).await?,
        Command::Unbind(args) => bind::unbind(cluster, args).await?,
        Command::Delete(args) => delete::delete(cluster, args).await?,
        Command::Cp(args) => stream::cp::copy(cluster, args).await?,
        Command::Logs(args) => stream::logs::logs(cluster, args).await?,
        Command::PortForward(args) => stream::port_forward::port_forward(cluster, args).await?,
        Command::CleanupStatus(args) => cleanup::cleanup_status(cluster, args).await?,
        Command::Wait(args) => wait::wait(cluster, args).await?,
    }
    Ok(0)
}
