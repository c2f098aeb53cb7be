//! `kibo-local`: a local cluster from the command line. `hack/local` builds what it runs and calls it.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};
use comfy_table::{Table, presets};
use kibo_e2e::local::{
    Accelerator, CONTROL_PLANE, Component, Layout, LocalCluster, Need, Ports, Programs, Progress, Record,
};

/// A Kubernetes control plane, the operator and node daemons as plain processes of this machine.
#[derive(Parser)]
#[command(name = "hack/local", bin_name = "hack/local", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start what does not run yet
    Up(Up),
    /// Print shell exports for this cluster: eval "$(hack/local env)"
    Env(State),
    /// Show each part, its process and whether it runs
    Status(State),
    /// Stop everything; disks and objects stay unless --delete
    Down(Down),
}

#[derive(Args)]
struct State {
    /// Directory that holds all that this cluster has
    #[arg(long, env = "KIBOTOS_STATE", default_value = ".state/local", value_name = "DIR")]
    state: PathBuf,
}

#[derive(Args)]
struct Up {
    #[command(flatten)]
    state: State,
    /// Have at least this many nodes; more stay what they are
    #[arg(long, default_value_t = 1, value_name = "N")]
    nodes: usize,
    /// CPU that each new node gives to virtual machines
    #[arg(long, default_value = "4", value_name = "QUANTITY")]
    node_cpu: String,
    /// Memory that each new node gives to virtual machines
    #[arg(long, default_value = "4Gi", value_name = "QUANTITY")]
    node_memory: String,
    /// How new nodes run virtual machines; kvm needs a host whose /dev/kvm really runs guests
    #[arg(long, value_enum, default_value = "tcg")]
    accelerator: AcceleratorName,
    /// Start etcd, kube-apiserver and kube-controller-manager only
    #[arg(long)]
    control_plane_only: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum AcceleratorName {
    Kvm,
    Tcg,
}

#[derive(Args)]
struct Down {
    #[command(flatten)]
    state: State,
    /// Remove the state directory as well
    #[arg(long)]
    delete: bool,
}

impl State {
    fn root(&self) -> Result<PathBuf> {
        std::path::absolute(&self.state).with_context(|| format!("failed to resolve {}", self.state.display()))
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Up(args) => up(args).await,
        Command::Env(args) => print_env(&args),
        Command::Status(args) => status(&args),
        Command::Down(args) => down(args).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn up(args: Up) -> Result<()> {
    let begun = Instant::now();
    let root = args.state.root()?;
    let need = if args.control_plane_only { Need::ControlPlane } else { Need::Everything };
    let cluster = LocalCluster::open(root, Programs::find(need)?, Progress::Shown)?;
    if args.control_plane_only {
        cluster.up_control_plane().await?;
    } else {
        add_nodes(&cluster, &args)?;
        cluster.up().await?;
    }
    cluster.progress().say(&format!(
        "up after {:.1} s; next: eval \"$(hack/local env{})\"",
        begun.elapsed().as_secs_f32(),
        state_flag(&args.state),
    ));
    Ok(())
}

/// Adds what is missing of node-1 to node-N.
fn add_nodes(cluster: &LocalCluster, args: &Up) -> Result<()> {
    let known = cluster.recorded().nodes;
    for number in 1..=args.nodes {
        let id = format!("node-{number}");
        if known.iter().any(|node| node.id == id) {
            continue;
        }
        let mut node = cluster.usual_node(&id, &args.node_cpu, &args.node_memory, args.nodes > 1);
        node.accelerator = match args.accelerator {
            AcceleratorName::Kvm => Accelerator::Kvm,
            AcceleratorName::Tcg => Accelerator::Tcg,
        };
        cluster.add_node(node)?;
    }
    Ok(())
}

/// The flag that a later command needs to find the same cluster.
fn state_flag(state: &State) -> String {
    if *state.state == *".state/local" || env::var_os("KIBOTOS_STATE").is_some() {
        String::new()
    } else {
        format!(" --state {}", state.state.display())
    }
}

fn print_env(args: &State) -> Result<()> {
    let layout = Layout::new(args.root()?);
    load(&layout)?;
    println!("export KUBECONFIG={}", quoted(&layout.kubeconfig().display().to_string()));
    println!("export PATH={}:\"$PATH\"", quoted(&layout.bin().display().to_string()));
    Ok(())
}

/// A word for the shell, whatever is in it.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn load(layout: &Layout) -> Result<Record> {
    Record::load(&layout.record())?
        .with_context(|| format!("there is no local cluster in {}: start one with up", layout.root().display()))
}

fn status(args: &State) -> Result<()> {
    let layout = Layout::new(args.root()?);
    let record = load(&layout)?;
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(["COMPONENT", "STATE", "PID", "SINCE", "ADDRESS"]);
    let nodes = record.nodes.iter().map(|node| Component::Node(node.id.clone()));
    let components = CONTROL_PLANE.into_iter().chain([Component::Operator]).chain(nodes);
    for component in components {
        let process = record.alive(&component);
        let since = record.processes.get(&component).filter(|_| process.is_some());
        table.add_row([
            component.to_string(),
            if process.is_some() { "running" } else { "stopped" }.to_owned(),
            process.map_or_else(|| "-".to_owned(), |process| process.pid.to_string()),
            since.map_or_else(|| "-".to_owned(), |started| format!("{:.0}", started.at)),
            address(&component, record.ports),
        ]);
    }
    println!("{table}");
    Ok(())
}

fn address(component: &Component, ports: Ports) -> String {
    let port = match component {
        Component::Etcd => ports.etcd_client,
        Component::ApiServer => ports.apiserver,
        Component::ControllerManager => ports.controller_manager,
        Component::Operator => ports.session,
        // A daemon listens nowhere: it opens its session to the operator.
        Component::Node(_) => return "-".to_owned(),
    };
    format!("https://127.0.0.1:{port}")
}

async fn down(args: Down) -> Result<()> {
    let root = args.state.root()?;
    let programs = Programs::find(Need::Nothing)?;
    let cluster = LocalCluster::open_existing(root.clone(), programs, Progress::Shown)?;
    cluster.down().await?;
    if args.delete {
        std::fs::remove_dir_all(&root).with_context(|| format!("failed to remove {}", root.display()))?;
    } else {
        cluster
            .progress()
            .say(&format!("stopped; its disks and objects stay in {} (down --delete removes them)", root.display()));
    }
    Ok(())
}
