//! Which shell a person gets who did not say what to run.

use std::os::fd::AsFd;

use kibo_guest_protocol::v1::{self, StartFailure, StartFailureReason};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, openat2};

use super::{start_failure, user};
use crate::configure::Workspace;

/// The first that there is: SHELL of the entrypoint's environment, the user's own, bash, sh.
pub fn find(workspace: &Workspace, user: &str, base: &[v1::EnvVar]) -> Result<String, StartFailure> {
    let user = user::resolve(&workspace.root, user)
        .map_err(|error| start_failure(StartFailureReason::Invalid, error.to_string()))?;
    let wanted = base.iter().rev().find(|variable| variable.name == "SHELL").map(|variable| variable.value.clone());
    candidates(wanted, user.shell).into_iter().find(|shell| is_program(workspace, shell)).ok_or_else(|| {
        let message = "the workspace has no shell: put one into its root image, or say which command to run";
        start_failure(StartFailureReason::NotFound, message)
    })
}

/// A user that may not log in has a shell that only says so.
fn candidates(wanted: Option<String>, own: String) -> Vec<String> {
    let usual = ["/bin/bash", "/bin/sh"].map(str::to_owned);
    let all = wanted.into_iter().chain([own]).chain(usual);
    all.filter(|shell| shell.starts_with('/') && !shell.ends_with("/nologin") && !shell.ends_with("/false")).collect()
}

fn is_program(workspace: &Workspace, path: &str) -> bool {
    let found = openat2(
        workspace.root.as_fd(),
        path,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
    );
    found
        .and_then(fstat)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_mode & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entrypoints_shell_comes_first_and_one_that_only_refuses_never() {
        let of = |wanted: Option<&str>, own: &str| candidates(wanted.map(str::to_owned), own.to_owned());
        assert_eq!(of(Some("/bin/zsh"), "/bin/dash"), ["/bin/zsh", "/bin/dash", "/bin/bash", "/bin/sh"]);
        assert_eq!(of(None, "/usr/sbin/nologin"), ["/bin/bash", "/bin/sh"]);
        assert_eq!(of(Some("zsh"), ""), ["/bin/bash", "/bin/sh"]);
    }
}
