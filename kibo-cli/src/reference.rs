//! `docs/cli.md` is written from the program's own help and from a recorded session; a test fails when it has
//! drifted. The end-to-end test `transcript` repeats the session.

use std::{fmt::Write as _, fs, path::Path};

use clap::{Command, CommandFactory as _};

use crate::cli::Cli;

/// What stands before the commands.
const INTRODUCTION: &str = include_str!("reference.md");

/// The session that the page shows.
const TRANSCRIPT: &str = include_str!("transcript.txt");

/// Commands that are not in the session: their output is a script for a shell.
const WITHOUT_TRANSCRIPT: &[&str] = &["kibo completions"];

/// What the session has under a heading, as a block; empty when there is nothing.
fn transcript(heading: &str) -> String {
    let begin = format!("{heading}\n");
    let parts = TRANSCRIPT.split("\n## ").skip(1).filter_map(|part| part.strip_prefix(&begin));
    let shown = |part: &str| -> String {
        let lines = part.lines().filter(|line| !line.starts_with("% "));
        lines.collect::<Vec<_>>().join("\n").trim_end().replace("\n$ ", "\n\n$ ")
    };
    let parts: Vec<_> = parts.map(shown).collect();
    if parts.is_empty() { String::new() } else { format!("\n```console\n{}\n```\n", parts.join("\n\n")) }
}

/// The whole page.
fn reference() -> String {
    let mut text = INTRODUCTION.to_owned();
    text.push_str(&transcript("errors"));
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
            for global in ["namespace", "kubeconfig", "context", "as_user", "as_groups", "timeout", "color"] {
                *command = command.clone().mut_arg(global, |arg| arg.hide(true));
            }
        }
        let help = command.render_help().to_string();
        let _ = write!(text, "\n## {title}\n\n```text\n{}\n```\n{}", trimmed(&help), transcript(&title));
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

/// Add what is typed to `transcript.txt`, and run the end-to-end test `transcript` with `KIBOTOS_UPDATE=1`.
#[test]
fn every_command_is_in_the_session() {
    fn leaves(command: &Command, into: &mut Vec<String>) {
        if !command.has_subcommands() {
            into.push(command.get_bin_name().unwrap_or_default().to_owned());
        }
        command.get_subcommands().for_each(|sub| leaves(sub, into));
    }
    let mut root = Cli::command();
    root.build();
    let mut all = Vec::new();
    leaves(&root, &mut all);
    let missing: Vec<_> =
        all.iter().filter(|name| !WITHOUT_TRANSCRIPT.contains(&name.as_str()) && transcript(name).is_empty()).collect();
    assert!(missing.is_empty(), "without a transcript: {missing:?}");
}
