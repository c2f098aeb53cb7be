//! The command line as a whole.

use clap::{ArgAction, Args, Parser, Subcommand};
use clap_complete::Shell;

use crate::{client::Global, enrollment, node, storage_pool, template, top, transfer, volume, workspace};

/// Run and look after Workspaces: microVMs with disks that outlive them.
///
/// Everything is a Kubernetes resource (group kibotos.dev); kibo uses your kubeconfig and your rights.
#[derive(Parser, Debug)]
#[command(name = "kibo", version = kibo_protocol::RELEASE, disable_help_subcommand = true, arg_required_else_help = true)]
#[command(after_help = EXIT_CODES)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "\
Exit status: 0 done, 1 other failure, 2 usage, 10 invalid argument, 11 not permitted, 12 not found, \
13 failed precondition, 14 aborted (changed meanwhile, or a command id used twice), 15 resources exhausted, \
16 timeout, 17 unavailable. `workspace exec` and `shell` exit with the remote command's own status.";

#[derive(Subcommand, Debug)]
pub enum Command {
    /// MicroVMs: create, start, stop, look inside
    #[command(subcommand, visible_alias = "ws", alias = "workspaces")]
    Workspace(workspace::Command),
    /// Disks that outlive Workspaces
    #[command(subcommand, alias = "volumes")]
    Volume(volume::Command),
    /// What Workspaces are made from
    #[command(subcommand, alias = "templates")]
    Template(template::Command),
    /// Hosts that run Workspaces
    #[command(subcommand, alias = "nodes")]
    Node(node::Command),
    /// Places for the disks of Workspaces
    #[command(subcommand, alias = "storage-pools")]
    StoragePool(storage_pool::Command),
    /// Workspaces into archives, and out of them
    #[command(subcommand)]
    Transfer(transfer::Command),
    /// How hosts are used
    #[command(subcommand)]
    Top(top::Command),
    /// Tokens with which hosts become nodes
    #[command(subcommand)]
    Enrollment(enrollment::Command),
    /// Print the script that makes a shell complete commands, options and names
    Completions {
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Print the version of this program
    Version,
}

/// Whether a command waits for the outcome of what it asked for.
#[derive(Args, Clone, Copy, Debug)]
pub struct WaitArgs {
    /// Wait until it is done (--wait=false: return when the request is recorded)
    #[arg(long, action = ArgAction::Set, default_value_t = true, default_missing_value = "true",
          num_args = 0..=1, require_equals = true, value_name = "BOOL")]
    wait: bool,
    /// The same as --wait=false
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
}

impl WaitArgs {
    pub fn wanted(self) -> bool {
        self.wait && !self.no_wait
    }
}

/// Reads `KEY=VALUE`.
pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("must be KEY=VALUE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn waiting_is_the_default_and_can_be_turned_off_in_two_ways() {
        let wanted = |args: &[&str]| {
            let line = [&["kibo", "workspace", "start", "dev"], args].concat();
            match Cli::try_parse_from(line).unwrap().command {
                Command::Workspace(workspace::Command::Start(start)) => start.wait.wanted(),
                other => panic!("{other:?}"),
            }
        };
        assert!(wanted(&[]) && wanted(&["--wait"]) && wanted(&["--wait=true"]));
        assert!(!wanted(&["--no-wait"]) && !wanted(&["--wait=false"]));
    }

    #[test]
    fn global_options_may_stand_anywhere() {
        for line in [
            vec!["kibo", "-n", "team", "--timeout", "30s", "workspace", "list"],
            vec!["kibo", "workspace", "list", "-n", "team", "--timeout", "30s"],
        ] {
            let cli = Cli::try_parse_from(line).unwrap();
            assert_eq!(cli.global.namespace.as_deref(), Some("team"));
            assert_eq!(cli.global.timeout.as_secs(), 30);
        }
    }

    #[test]
    fn pairs_have_a_key() {
        assert_eq!(pair("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert_eq!(pair("a="), Ok(("a".into(), String::new())));
        assert!(pair("=b").is_err() && pair("a").is_err());
    }
}
