//! Commands that the host starts, with pipes or with a terminal.

use std::io;
use std::process::Stdio;

use kibo_guest_protocol::flow::Widths;
use kibo_guest_protocol::v1::{self, Output, StartFailure, StartFailureReason};

use super::inlet::{Inlet, Sink};
use super::outlet::{Outlet, Source};
use super::process::{Streams as Fds, spawn};
use super::streams::{Kind, Process, Stream};
use super::terminal::Terminal;
use super::{pipe, shell, start_failure};
use crate::configure::Workspace;

pub(super) fn start(
    request: &v1::Exec,
    workspace: &Workspace,
    base: &[v1::EnvVar],
    widths: Widths,
) -> Result<Stream, StartFailure> {
    let mut process = request.process.clone().unwrap_or_default();
    let mut base = base.to_vec();
    if request.login_shell {
        let shell = shell::find(workspace, &process.user, &base)?;
        base.push(v1::EnvVar { name: "SHELL".to_owned(), value: shell.clone() });
        process.argv = vec![shell];
    }
    match &request.terminal {
        Some(terminal) => with_terminal(terminal, (request.stdin, widths), &process, workspace, &base),
        None => with_pipes((request.stdin, widths), &process, workspace, &base),
    }
}

fn with_terminal(
    asked: &v1::Terminal,
    (stdin, widths): (bool, Widths),
    process: &v1::Process,
    workspace: &Workspace,
    base: &[v1::EnvVar],
) -> Result<Stream, StartFailure> {
    let (terminal, slave) = Terminal::open(workspace, asked)?;
    let clone = || slave.try_clone().map(Stdio::from).map_err(|error| no_descriptor(&error));
    let fds = Fds { stdin: clone()?, stdout: clone()?, stderr: clone()?, terminal: Some(asked.term.clone()) };
    let pid = spawn(workspace, process, base, fds)?;
    // Without input, whoever reads finds a terminal at which nobody types.
    let inlet = stdin.then(|| Inlet::new(Sink::Terminal(terminal.clone()), widths.input));
    let outlets = vec![Outlet::new(Output::Stdout, Source::Terminal(terminal.clone()), widths.output)];
    let kind = Kind::Command { process: Process::new(pid), terminal: Some(terminal) };
    Ok(Stream { kind, inlet, outlets, hung_up: false })
}

fn with_pipes(
    (stdin, widths): (bool, Widths),
    process: &v1::Process,
    workspace: &Workspace,
    base: &[v1::EnvVar],
) -> Result<Stream, StartFailure> {
    let broken = |error| no_descriptor(&error);
    let (stdout, stdout_writer) = pipe::readable().map_err(broken)?;
    let (stderr, stderr_writer) = pipe::readable().map_err(broken)?;
    let (inlet, stdin) = if stdin {
        let (writer, reader) = pipe::writable().map_err(broken)?;
        (Some(Inlet::new(Sink::Pipe(writer), widths.input)), Stdio::from(reader))
    } else {
        (None, Stdio::null())
    };
    let fds = Fds { stdin, stdout: stdout_writer.into(), stderr: stderr_writer.into(), terminal: None };
    let pid = spawn(workspace, process, base, fds)?;
    let outlet = |output, pipe| Outlet::new(output, Source::Pipe(pipe), widths.output);
    let outlets = vec![outlet(Output::Stdout, stdout), outlet(Output::Stderr, stderr)];
    let kind = Kind::Command { process: Process::new(pid), terminal: None };
    Ok(Stream { kind, inlet, outlets, hung_up: false })
}

fn no_descriptor(error: &io::Error) -> StartFailure {
    start_failure(StartFailureReason::Other, format!("failed to make the command's standard streams: {error}"))
}
