//! `kibo-bench`: what Kibotos costs on this machine, beside what it is made of. `hack/bench` builds what it runs and calls
//! it.
//!
//! Every figure that has an aim is a ratio of two things measured in turns in one run, or a count, or an amount of
//! memory: none depends on how fast the machine is, and none is a test.

mod audit;
mod bare;
mod cpu;
mod figures;
mod page;
mod report;
mod site;
mod spread;
mod watch;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use kibo_e2e::local::Progress;

use figures::{Extent, Figure, Sizes};
use report::Section;
use site::Site;

/// Measures Kibotos on a local cluster of its own, which is gone afterwards.
#[derive(Parser)]
#[command(name = "hack/bench", bin_name = "hack/bench", version)]
struct Cli {
    /// What to measure; without a name, everything
    #[arg(value_enum, value_name = "FIGURE")]
    figures: Vec<Figure>,
    /// Starts beside as many bare boots
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Numbers of simulated nodes on which placement is measured
    #[arg(long, default_values_t = [1000, 5000], value_delimiter = ',', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=9999))]
    nodes: Vec<u32>,
    /// Objects that are placed on them
    #[arg(long, default_value_t = 5000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    objects: u32,
    /// Size of the large file
    #[arg(long, default_value_t = 4096, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=4096))]
    large_mib: u32,
    /// Write everything into this file as well, as docs/figures.md is
    #[arg(long, value_name = "FILE", conflicts_with = "figures")]
    markdown: Option<PathBuf>,
    /// Keep the cluster's directory with its logs
    #[arg(long)]
    keep: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let _ = rustls::crypto::ring::default_provider().install_default();
    match run(Cli::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(cli: Cli) -> Result<()> {
    let site = Site::open()?;
    let sections = tokio::select! {
        measured = measure(&cli, &site) => measured,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    let down = site.down(cli.keep || sections.is_err()).await;
    let sections = sections?;
    down?;
    if let Some(path) = &cli.markdown {
        let page = page::page(&sections)?;
        std::fs::write(path, page).with_context(|| format!("failed to write {}", path.display()))?;
        eprintln!("written: {}", path.display());
    }
    Ok(())
}

/// Measures and prints one figure after the other.
async fn measure(cli: &Cli, site: &Site) -> Result<Vec<Section>> {
    site.up().await?;
    let figures = if cli.figures.is_empty() { Figure::value_variants() } else { &cli.figures };
    let placement = Sizes { nodes: cli.nodes.clone(), objects: cli.objects };
    let extent = Extent { pairs: cli.pairs, large_mib: cli.large_mib, placement };
    let mut sections = Vec::new();
    for figure in figures {
        let name = figure.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        let measured = Progress::Shown.step(&name, Box::pin(figure.measure(site, &extent))).await?;
        for section in &measured {
            println!("\n{}", section.text());
        }
        sections.extend(measured);
        site.clear().await?;
    }
    Ok(sections)
}
