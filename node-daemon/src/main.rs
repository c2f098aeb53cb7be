//! The node-daemon's command line.

use std::process::ExitCode;

use clap::Parser;
use kibo_node_daemon::vmm;

/// Runs the microVMs of one host.
#[derive(Debug, Parser)]
#[command(name = "kibo-node-daemon", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Becomes the QEMU process of an Instance.
    #[command(hide = true)]
    VmLaunch(vmm::LaunchArgs),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        // Before any thread is started: the user is changed for one thread only.
        Command::VmLaunch(args) => {
            let Err(error) = vmm::launch(&args);
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
