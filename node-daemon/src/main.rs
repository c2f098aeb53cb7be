//! The node-daemon's program.

use std::process::ExitCode;

fn main() -> ExitCode {
    kibo_node_daemon::cli::main()
}
