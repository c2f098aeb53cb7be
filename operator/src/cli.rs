//! The command line: what is told to the program, and checked, before anything runs.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use clap::{Args, Parser, Subcommand, ValueEnum};
use kibo_crds::Bytes;

use crate::{
    placement::Strategy,
    session::{EnrollmentPolicy, HostLabel, ServiceAccount},
    watchdog::Periods,
};

/// Reconciles Kibotos resources and speaks with the nodes.
#[derive(Debug, Parser)]
#[command(name = "kibo-operator", version = kibo_protocol::RELEASE)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run until SIGTERM
    Run(Box<Run>),
    /// Print the custom resource definitions and admission policies as YAML
    Crds,
}

#[derive(Debug, Args)]
pub struct Run {
    /// Credentials for the API server; absent: $KUBECONFIG, or the pod's service account
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the operator's own objects
    #[arg(long, env = "KIBOTOS_NAMESPACE", default_value = "kibotos-system")]
    pub namespace: String,
    /// Where nodes open their control sessions
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:7443")]
    pub session_listen: SocketAddr,
    /// Names and addresses under which nodes reach --session-listen, for its certificate
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "localhost")]
    pub session_name: Vec<String>,
    /// Where the API server reaches the aggregated API
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:7444")]
    pub api_listen: SocketAddr,
    /// Make the Service of the aggregated API one of type ExternalName with this name, for clusters whose
    /// API server does not reach pods
    #[arg(long, value_name = "NAME")]
    pub api_service_external_name: Option<String>,
    /// Address of this replica that the API server reaches; the leader puts it behind the Service
    #[arg(long, env = "KIBOTOS_ADVERTISE_ADDRESS", value_name = "ADDRESS")]
    pub advertise_address: Option<IpAddr>,
    /// Where /healthz, /readyz and /metrics are served
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:7445")]
    pub health_listen: SocketAddr,
    /// Let hosts of this cluster enroll by the tokens of their daemons' pods, which run as this ServiceAccount; absent:
    /// each host needs a token of its own from `kibo enrollment issue`
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub enroll_service_account: Option<ServiceAccount>,
    /// Label of the cluster's nodes that may enroll in that way
    #[arg(long, value_name = "KEY=VALUE", default_value = "node-restriction.kubernetes.io/kibotos-host=true")]
    pub enroll_node_label: HostLabel,
    /// Let nodes of the cluster enroll in that way that do not carry the label
    #[arg(long)]
    pub allow_untagged_nodes: bool,
    /// What each VM needs beyond its guest's memory; counts in the allocation
    #[arg(long, value_name = "QUANTITY", default_value = "64Mi", value_parser = parse_bytes)]
    pub vm_overhead: Bytes,
    /// Where a Workspace goes among the nodes that could take it
    #[arg(long, value_enum, default_value_t = Strategy::Spread)]
    pub placement: Strategy,
    /// How many days the record of a deleted Workspace is kept
    #[arg(long, value_name = "DAYS", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=3650))]
    pub tombstone_days: u16,
    /// Name of this replica, which no other process has at the same time (a pod's name). One that comes back
    /// under its name leads again at once; absent: a random one
    #[arg(long, env = "KIBOTOS_IDENTITY", value_name = "NAME")]
    pub identity: Option<String>,
    /// How long a leader that fell silent stays the leader
    #[arg(long, env = "KIBOTOS_LEASE_SECONDS", value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u16).range(3..=300))]
    pub lease_seconds: u16,
    /// After this silence a node is Unreachable and its session ends; nodes say three times as often that they live
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u16).range(3..=3600))]
    pub unreachable_seconds: u16,
    /// After this silence a node is Offline and its Workspaces say so; at least --unreachable-seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u16).range(3..=7200))]
    pub offline_seconds: u16,
    /// How often the clock of each node is measured
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub clock_seconds: u16,
    /// How often each storage pool is looked through for what belongs to nobody
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=604_800))]
    pub pool_audit_seconds: u32,
    /// For people or for machines
    #[arg(long, value_enum, default_value_t = LogFormat::Human)]
    pub log_format: LogFormat,
}

impl Run {
    pub fn tombstone_ttl(&self) -> Duration {
        Duration::from_secs(u64::from(self.tombstone_days) * 24 * 3600)
    }

    /// Absent: hosts enroll by issued tokens alone.
    pub fn enrollment_policy(&self) -> Option<EnrollmentPolicy> {
        let account = self.enroll_service_account.clone()?;
        let (label, allow_untagged) = (self.enroll_node_label.clone(), self.allow_untagged_nodes);
        Some(EnrollmentPolicy { account, label, allow_untagged })
    }

    /// How long which silence of a node is.
    pub fn periods(&self) -> Periods {
        let unreachable = Duration::from_secs(self.unreachable_seconds.into());
        Periods { unreachable, offline: unreachable.max(Duration::from_secs(self.offline_seconds.into())) }
    }

    pub fn clock_period(&self) -> Duration {
        Duration::from_secs(self.clock_seconds.into())
    }

    pub fn pool_audit_period(&self) -> Duration {
        Duration::from_secs(self.pool_audit_seconds.into())
    }

    pub fn lease_duration(&self) -> Duration {
        Duration::from_secs(self.lease_seconds.into())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Human,
    Json,
}

fn parse_bytes(text: &str) -> Result<Bytes, String> {
    text.parse().map_err(|error: kibo_crds::AmountError| error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
