//! The command line.

use std::{
    fs,
    io::{IsTerminal as _, stderr},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand, ValueEnum};
use kibo_crds::PoolId;
use tracing_subscriber::EnvFilter;

use crate::{
    config::{Config, check_host},
    daemon, pool,
    vmm::LaunchArgs,
};

/// Runs the microVMs of one host.
#[derive(Debug, Parser)]
#[command(name = "kibo-node-daemon", version = kibo_protocol::RELEASE)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Debug, Args)]
struct ConfigArg {
    /// The configuration, TOML.
    #[arg(long, value_name = "FILE", default_value = "/etc/kibotos/node-daemon.toml")]
    config: PathBuf,
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    config: ConfigArg,
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon (the default). Exits 0 when it is asked to end, and then its VMs go on; 3 after
    /// the node was isolated, and then it is to be started again.
    Run(RunArgs),
    /// Check the configuration on this host and print what it means; starts nothing.
    Check(ConfigArg),
    /// Storage pools.
    #[command(subcommand)]
    Pool(PoolCommand),
    /// The network of the guests.
    #[command(subcommand)]
    Network(NetworkCommand),
    #[command(hide = true)]
    VmLaunch(LaunchArgs),
}

#[derive(Debug, Subcommand)]
enum NetworkCommand {
    /// Take off this host what a daemon that was killed left: its packet filter rules. A daemon that ends without VMs
    /// does so itself.
    Remove(ConfigArg),
}

#[derive(Debug, Subcommand)]
enum PoolCommand {
    /// Make an empty directory a storage pool. Doing it again with the same id changes nothing.
    Init {
        #[arg(long)]
        id: PoolId,
        #[arg(long)]
        path: PathBuf,
    },
    /// Say what is where the storage pools are declared. Fails when one of them cannot be used.
    List(ConfigArg),
}

/// Runs what the command line says and gives the exit status.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command.unwrap_or(Command::Run(cli.run)) {
        Command::Run(args) => run(&args),
        Command::Check(args) => check(&args.config),
        Command::Pool(PoolCommand::Init { id, path }) => init_pool(&id, &path),
        Command::Pool(PoolCommand::List(args)) => list_pools(&args.config),
        Command::Network(NetworkCommand::Remove(args)) => remove_network(&args.config),
        Command::VmLaunch(args) => launch(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// Before any thread is started: the user is changed for one thread only.
fn launch(args: &LaunchArgs) -> anyhow::Result<ExitCode> {
    match crate::vmm::launch(args)? {}
}

fn read_config(path: &Path) -> anyhow::Result<Config> {
    let text = fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))?;
    Config::parse(&text).with_context(|| format!("{} is not valid", path.display()))
}

fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr);
    match args.log_format {
        LogFormat::Text => logs.with_ansi(stderr().is_terminal()).init(),
        LogFormat::Json => logs.json().init(),
    }
    let path = &args.config.config;
    let config = read_config(path)?;
    check_host(&config).with_context(|| format!("{} does not fit this host", path.display()))?;
    daemon::run(config)
}

fn check(path: &Path) -> anyhow::Result<ExitCode> {
    let config = read_config(path)?;
    println!("{config}");
    check_host(&config).with_context(|| format!("{} does not fit this host", path.display()))?;
    for pool in &config.storage_pools {
        let marker = pool::read_marker(&pool.path, &pool.id)?;
        println!("pool {} has the uid {}", pool.id, marker.uid);
    }
    println!("the configuration is good");
    Ok(ExitCode::SUCCESS)
}

fn remove_network(path: &Path) -> anyhow::Result<ExitCode> {
    daemon::remove_network(&read_config(path)?)?;
    println!("this host has no rules of this daemon's guests");
    Ok(ExitCode::SUCCESS)
}

fn init_pool(id: &PoolId, path: &Path) -> anyhow::Result<ExitCode> {
    if !path.is_absolute() {
        anyhow::bail!("--path {}: must be an absolute path", path.display());
    }
    let marker = pool::init(path, id)?;
    println!("{} is the storage pool {id}, uid {}", path.display(), marker.uid);
    Ok(ExitCode::SUCCESS)
}

fn list_pools(path: &Path) -> anyhow::Result<ExitCode> {
    let mut all_are_good = true;
    for config in &read_config(path)?.storage_pools {
        let found = match pool::read_marker(&config.path, &config.id) {
            Ok(marker) => format!("uid {}", marker.uid),
            Err(error) => {
                all_are_good = false;
                format!("cannot be used: {error}")
            }
        };
        let default = if config.default { " (default)" } else { "" };
        println!("{}{default} at {}: {found}", config.id, config.path.display());
    }
    Ok(if all_are_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn run_is_the_default() {
        let cli = Cli::parse_from(["kibo-node-daemon", "--config", "/a"]);
        assert!(cli.command.is_none());
        assert_eq!(cli.run.config.config, Path::new("/a"));
        let cli = Cli::parse_from(["kibo-node-daemon", "run", "--config", "/a"]);
        assert!(matches!(cli.command, Some(Command::Run(args)) if args.config.config == Path::new("/a")));
    }
}
