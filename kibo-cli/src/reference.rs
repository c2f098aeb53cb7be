//! `docs/cli.md` is written from the program's own help; a test fails when it has drifted.

use std::{fmt::Write as _, fs, path::Path};

use clap::{Command, CommandFactory as _};

use crate::cli::Cli;

const INTRODUCTION: &str = "\
# kibo

The command line of Kibotos. It uses your kubeconfig and your rights: what it does, `kubectl` can do too.
Under the name `kubectl-kibo` in your `PATH` it is also `kubectl kibo`.

Every verb on Workspaces takes a name, in the namespace of `-n`, or an id (`ws-…`) from any namespace.
Tables show `-` for what is not there. `--json` prints `{\"result\": …}` with field names in snake_case and
states in capitals (`AVAILABLE`), as does `-o yaml`; `-q` prints only ids or names, one on each line.

Quantities are those of Kubernetes: `500m` or `0.5` CPUs, `512Mi`, `1.5Gi`. In a manifest, write fractions in
quotes (`cpu: \"0.5\"`): without them YAML makes a number of it, which the API refuses.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | any other failure |
| 2 | the command line is not understood |
| 10 | invalid argument: a value breaks a rule, which the message names |
| 11 | not permitted |
| 12 | not found |
| 13 | failed precondition: not in this state |
| 14 | aborted: changed meanwhile, exists already, or a command id used with another input |
| 15 | resources exhausted |
| 16 | timeout: what was asked for goes on |
| 17 | unavailable: no connection, or a node is out of reach |
| 130 | interrupted with Ctrl-C: what was asked for goes on |

`workspace exec` and `shell` exit with the status of the remote command; 127 and 126 say, as in a shell, that there is no
such program or that it cannot be run.

With `-t`, and in `shell`, the program in the guest has your terminal: its size, its keys, `Ctrl-C`. Without, the first
`Ctrl-C` (or SIGTERM) goes to the command as a signal, and the second ends kibo. When kibo ends, so does the command.

`workspace cp` copies as `cp -a` does: modes, times, symbolic links, and numeric owners, which here only root can give.
Programs from a guest never get the set-user-ID bit on this host. A file gets its name when it is complete: a copy that
fails or is interrupted leaves the old file, or none. Directories are filled one file after the other.

`workspace logs -f` goes on through restarts of the guest, its node and the operator, from the line where it was, and says
on standard error when lines may be missing; it ends when the Workspace is deleted. `port-forward` ends with the run of
the Workspace.

Completions for a shell: `source <(kibo completions bash)`, or the same for zsh, fish, elvish and powershell.
";

/// The whole page.
fn reference() -> String {
    let mut text = INTRODUCTION.to_owned();
    let mut root = Cli::command().term_width(100);
    root.build();
    section(&mut root, &mut text, 2);
    text
}

fn section(command: &mut Command, text: &mut String, level: usize) {
    let title = command.get_bin_name().unwrap_or("kibo").to_owned();
    let is_leaf = !command.has_subcommands();
    if is_leaf || level == 2 {
        // The options of every command are shown once, with the program's own.
        if level > 2 {
            for global in ["namespace", "kubeconfig", "context", "as_user", "as_groups", "timeout"] {
                *command = command.clone().mut_arg(global, |arg| arg.hide(true));
            }
        }
        let help = command.render_help().to_string();
        let _ = write!(text, "\n## {title}\n\n```text\n{}\n```\n", trimmed(&help));
    }
    let mut commands: Vec<_> = command.get_subcommands().filter(|sub| sub.get_name() != "help").cloned().collect();
    for sub in &mut commands {
        section(sub, text, level + 1);
    }
}

fn trimmed(help: &str) -> String {
    help.trim_end().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// Run with `KIBOTOS_UPDATE=1` to write the file anew.
#[test]
fn docs_cli_md_is_what_the_program_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cli.md");
    let text = reference();
    if std::env::var_os("KIBOTOS_UPDATE").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == text, "docs/cli.md has drifted: run with KIBOTOS_UPDATE=1");
}
