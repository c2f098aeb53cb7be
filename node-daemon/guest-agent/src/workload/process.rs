//! Starts processes in the Workspace: in its mount namespace, as the user that is asked for, in a session of its own.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use kibo_guest_protocol::v1::{self, StartFailure, StartFailureReason};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use rustix::process::{Gid, Pid, Uid};
use rustix::thread::LinkNameSpaceType;

use super::{start_failure, user};
use crate::configure::Workspace;
use crate::turn::Turn;

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Where a process's standard streams go.
pub struct Streams {
    pub stdin: Stdio,
    pub stdout: Stdio,
    pub stderr: Stdio,
    /// They are a terminal of this type (TERM; empty: not said), which becomes the process's own.
    pub terminal: Option<String>,
}

/// Starts `process`. `base` is the environment below its own: for exec that of the entrypoint.
///
/// Only the loop may call this: a child that fails to start is reaped here, another thread's reaping would interfere.
pub fn spawn(
    workspace: &Workspace,
    process: &v1::Process,
    base: &[v1::EnvVar],
    streams: Streams,
) -> Result<Pid, StartFailure> {
    let command = command(workspace, process, base, streams.terminal.as_deref())?;
    let pid = start(command, streams).map_err(|error| explain(&error, process))?;
    Ok(pid)
}

fn command(
    workspace: &Workspace,
    process: &v1::Process,
    base: &[v1::EnvVar],
    terminal: Option<&str>,
) -> Result<Command, StartFailure> {
    let invalid = |message: String| start_failure(StartFailureReason::Invalid, message);
    let Some((program, arguments)) = process.argv.split_first().filter(|(program, _)| !program.is_empty()) else {
        return Err(invalid("the command is empty".to_owned()));
    };
    if let Some(argument) = process.argv.iter().find(|argument| argument.contains('\0')) {
        return Err(invalid(format!("the argument {argument:?} has a zero byte in it")));
    }
    let user = user::resolve(&workspace.root, &process.user).map_err(|error| invalid(error.to_string()))?;
    let cwd = if process.cwd.is_empty() { "/" } else { &process.cwd };
    check_directory(&workspace.root, cwd)?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear();
    command.envs([("PATH", PATH), ("HOME", &user.home), ("USER", &user.name), ("TERM", "xterm")]);
    set_environment(&mut command, base)?;
    match terminal {
        Some("") => drop(command.env_remove("TERM")),
        Some(term) if term.contains('\0') => return Err(invalid(format!("{term:?} is no kind of a terminal"))),
        // The terminal is the client's, not the entrypoint's.
        Some(term) => drop(command.env("TERM", term)),
        None => {}
    }
    set_environment(&mut command, &process.env)?;
    let cwd = CString::new(cwd).map_err(|_| invalid(format!("the directory {cwd:?} has a zero byte in it")))?;
    enter_before_exec(&mut command, &workspace.namespace, cwd, &user, terminal.is_some());
    Ok(command)
}

fn set_environment(command: &mut Command, variables: &[v1::EnvVar]) -> Result<(), StartFailure> {
    for variable in variables {
        if variable.name.is_empty() || variable.name.contains(['=', '\0']) || variable.value.contains('\0') {
            let message = format!("{:?} cannot be the name of an environment variable", variable.name);
            return Err(start_failure(StartFailureReason::Invalid, message));
        }
        command.env(&variable.name, &variable.value);
    }
    Ok(())
}

/// What the child does between fork and exec.
fn enter_before_exec(command: &mut Command, namespace: &OwnedFd, cwd: CString, user: &user::User, has_terminal: bool) {
    let namespace = namespace.as_raw_fd();
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    let groups: Vec<Gid> = user.groups.iter().copied().map(Gid::from_raw).collect();
    let enter = move || {
        #[allow(unsafe_code, reason = "a closure for pre_exec cannot borrow")]
        // SAFETY: the descriptor belongs to the Workspace, which outlives the call of spawn, and so does the fork's copy.
        let namespace = unsafe { BorrowedFd::borrow_raw(namespace) };
        rustix::process::setsid()?;
        Turn::Ordinary.take()?;
        if has_terminal {
            #[allow(unsafe_code, reason = "the library's handle would take memory and a lock, see below")]
            // SAFETY: the child's standard input was put there before this runs, and stays.
            let terminal = unsafe { BorrowedFd::borrow_raw(0) };
            rustix::process::ioctl_tiocsctty(terminal)?;
            rustix::fs::fchown(terminal, Some(uid), None)?;
        }
        rustix::thread::move_into_link_name_space(namespace, Some(LinkNameSpaceType::Mount))?;
        rustix::process::umask(Mode::WGRP | Mode::WOTH);
        rustix::thread::set_thread_groups(&groups)?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        // As the user: a directory that is not its own is refused here, not later.
        rustix::process::chdir(cwd.as_c_str())?;
        Ok(())
    };
    #[allow(unsafe_code, reason = "nothing but pre_exec runs between fork and exec")]
    // SAFETY: only system calls, no allocation and no lock: safe after a fork of a process with threads.
    unsafe {
        command.pre_exec(enter);
    }
}

fn start(mut command: Command, streams: Streams) -> std::io::Result<Pid> {
    command.stdin(streams.stdin).stdout(streams.stdout).stderr(streams.stderr);
    // The handle is dropped: the loop reaps by pid.
    let child = command.spawn()?;
    Pid::from_raw(child.id().cast_signed()).ok_or_else(|| std::io::Error::other("a process without a pid"))
}

/// A missing directory and a missing program are the same error to exec; look first.
fn check_directory(root: &OwnedFd, cwd: &str) -> Result<(), StartFailure> {
    let invalid = |message: String| start_failure(StartFailureReason::Invalid, message);
    if !cwd.starts_with('/') {
        return Err(invalid(format!("the directory {cwd:?} is not absolute")));
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat2(root.as_fd(), cwd, flags, Mode::empty(), ResolveFlags::IN_ROOT)
        .map(drop)
        .map_err(|errno| invalid(format!("the directory {cwd} cannot be entered: {errno}")))
}

fn explain(error: &std::io::Error, process: &v1::Process) -> StartFailure {
    let program = process.argv.first().map_or("", String::as_str);
    let errno = Errno::from_io_error(error);
    let (reason, what) = match errno {
        Some(Errno::NOENT) => (StartFailureReason::NotFound, "no such program in the workspace".to_owned()),
        Some(Errno::ACCESS) => (StartFailureReason::PermissionDenied, "permission denied".to_owned()),
        Some(Errno::NOEXEC) => (StartFailureReason::Invalid, "it is no program that this kernel runs".to_owned()),
        Some(Errno::TOOBIG) => (StartFailureReason::Invalid, "its arguments and environment are too long".to_owned()),
        _ => (StartFailureReason::Other, error.to_string()),
    };
    start_failure(reason, format!("failed to start {program:?}: {what}"))
}
