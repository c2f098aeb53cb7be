//! `kibo`: the command line of Kibotos, a thin client of its custom resources.
//!
//! Each noun has a module with the same verbs. `errors` holds the exit statuses, `output` the forms
//! of results, `wait` the waiting, `client` the connection.

mod cli;
mod client;
mod command;
mod complete;
mod enrollment;
mod errors;
mod manifest;
mod moving;
mod node;
mod output;
#[cfg(test)]
mod reference;
mod storage_pool;
mod template;
mod top;
mod transfer;
mod volume;
mod wait;
mod workspace;

use std::process::exit;

use clap::{CommandFactory as _, FromArgMatches as _, error::ErrorKind};

use crate::{
    cli::{Cli, Command},
    client::Cluster,
    errors::{Error, Kind, Result, program},
    output::colour,
};

fn main() {
    if complete::answer() {
        return;
    }
    let cli = parse();
    colour::choose(cli.global.color);
    output::page::measure_terminal();
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => exit(i32::from(report(&error.into()))),
    };
    let code = match runtime.block_on(run(cli)) {
        Ok(code) => code,
        Err(error) => report(&error),
    };
    // Not by dropping the runtime: a thread may hang in a read of standard input.
    exit(i32::from(code));
}

/// Parses the command line or exits as clap does, save that a bad value is an invalid argument.
fn parse() -> Cli {
    let parsed =
        Cli::command().bin_name(program()).try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.unwrap_or_else(|error| {
        if error.kind() == ErrorKind::ValueValidation {
            let _ = error.print();
            exit(i32::from(Kind::InvalidArgument.exit_code()));
        }
        error.exit()
    })
}

/// Shows a failure and gives its exit status.
fn report(error: &Error) -> u8 {
    if error.kind != Kind::BrokenPipe {
        output::remark(&format!("{} {}", colour::error_word(), error.message));
        if let Some(next) = &error.next {
            output::remark(&format!("  {} {next}", colour::next_word()));
        }
    }
    error.kind.exit_code()
}

/// Runs a command; its status is 0, save for `exec`, which hands on that of the remote command.
async fn run(cli: Cli) -> Result<u8> {
    match cli.command {
        Command::Completions { shell } => complete::script(shell).map(|()| 0),
        Command::Version => output::print(&format!("kibo {}\n", kibo_protocol::RELEASE)).map(|()| 0),
        command => {
            let cluster = Cluster::open(&cli.global).await?;
            Box::pin(dispatch(&cluster, command)).await.map_err(|error| error.with_server(&cluster.server))
        }
    }
}

async fn dispatch(cluster: &Cluster, command: Command) -> Result<u8> {
    match command {
        Command::Workspace(command) => return Box::pin(workspace::run(cluster, command)).await,
        Command::Volume(command) => volume::run(cluster, command).await?,
        Command::Template(command) => template::run(cluster, command).await?,
        Command::Node(command) => node::run(cluster, command).await?,
        Command::StoragePool(command) => storage_pool::run(cluster, command).await?,
        Command::Transfer(command) => Box::pin(transfer::run(cluster, command)).await?,
        Command::Top(command) => top::run(cluster, command).await?,
        Command::Enrollment(command) => enrollment::run(cluster, command).await?,
        Command::Completions { .. } | Command::Version => {}
    }
    Ok(0)
}
