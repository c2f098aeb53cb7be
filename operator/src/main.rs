//! `kibo-operator`.

use std::process::ExitCode;

use clap::Parser as _;
use kibo_operator::cli::{Cli, Command};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Crds => print_crds(),
        Command::Run(args) => kibo_operator::run::run(*args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn print_crds() -> anyhow::Result<()> {
    for (_, text) in kibo_crds::yaml::files()? {
        println!("---\n{}", text.trim_end());
    }
    Ok(())
}
