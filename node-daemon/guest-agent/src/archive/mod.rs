//! Archives of the Workspace's files: a process of its own, the agent's program with other arguments.
//!
//! It enters the Workspace's mount namespace before it touches anything there, and makes a tar stream on its standard
//! output or takes one from its standard input. A failure is a message for people on standard error and a status that
//! says of which kind it is ([`reason_of`]).
//!
//! [`read`] makes archives, [`write`] takes them; [`destination`] keeps what is taken where it belongs.

mod destination;
mod read;
mod write;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kibo_guest_protocol::v1::StartFailureReason;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// What the archiver is to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Order {
    Read { path: String },
    Write { path: String, into_directory: bool, keep_owner: bool },
}

const READ: &str = "archive-read";
const WRITE: &str = "archive-write";
/// Statuses from here on are failures that explain themselves.
const FAILED: u32 = 10;

impl Order {
    /// The archiver's arguments; `namespace` is a descriptor of the mount namespace to enter.
    pub fn arguments(&self, namespace: RawFd) -> Vec<String> {
        let namespace = namespace.to_string();
        match self {
            Self::Read { path } => vec![READ.to_owned(), namespace, path.clone()],
            Self::Write { path, into_directory, keep_owner } => {
                let flag = |is_set: bool| if is_set { "yes" } else { "no" }.to_owned();
                vec![WRITE.to_owned(), namespace, path.clone(), flag(*into_directory), flag(*keep_owner)]
            }
        }
    }

    fn parse(arguments: &[String]) -> Option<(RawFd, Self)> {
        let (order, namespace) = match arguments {
            [what, namespace, path] if what == READ => (Self::Read { path: path.clone() }, namespace),
            [what, namespace, path, into_directory, keep_owner] if what == WRITE => {
                let (into_directory, keep_owner) = (into_directory == "yes", keep_owner == "yes");
                (Self::Write { path: path.clone(), into_directory, keep_owner }, namespace)
            }
            _ => return None,
        };
        Some((namespace.parse().ok()?, order))
    }
}

/// What kind of failure a status stands for.
pub fn reason_of(status: u32) -> StartFailureReason {
    let number = status.checked_sub(FAILED).and_then(|number| i32::try_from(number).ok());
    number.and_then(|number| StartFailureReason::try_from(number).ok()).unwrap_or(StartFailureReason::Other)
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{} is not in the workspace: {advice}", .path.display())]
    NotFound { path: PathBuf, advice: &'static str },
    #[error("{0}")]
    Invalid(String),
    #[error("failed to {what} {}: {}", .path.display(), explain(.source))]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error("failed to {what} the archive: {source}")]
    Archive { what: &'static str, source: io::Error },
    #[error("the archive ended early: what was complete is there, nothing else")]
    Cut,
    #[error("failed to enter the workspace: {0}")]
    Enter(io::Error),
}

impl Error {
    const fn reason(&self) -> StartFailureReason {
        match self {
            Self::NotFound { .. } => StartFailureReason::NotFound,
            Self::Invalid(_) => StartFailureReason::Invalid,
            Self::File { .. } | Self::Archive { .. } | Self::Cut | Self::Enter(_) => StartFailureReason::Other,
        }
    }

    fn file(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }
}

fn explain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::StorageFull => format!("{error}: the disk is full, remove something there"),
        io::ErrorKind::ReadOnlyFilesystem => format!("{error}: choose a place that can be written"),
        _ => error.to_string(),
    }
}

/// Carries out what the arguments say; `None` when they are none of an archiver.
pub fn main(arguments: &[String]) -> Option<ExitCode> {
    let (namespace, order) = Order::parse(arguments)?;
    Some(match run(namespace, &order) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            let reason = u32::try_from(error.reason() as i32).unwrap_or_default();
            ExitCode::from(u8::try_from(FAILED + reason).unwrap_or(u8::MAX))
        }
    })
}

fn run(namespace: RawFd, order: &Order) -> Result<(), Error> {
    enter(namespace).map_err(Error::Enter)?;
    match order {
        Order::Read { path } => read::read(Path::new(path), standard(io::stdout())?),
        Order::Write { path, into_directory, keep_owner } => {
            // A guest that goes down asks everybody to end: the end of the input does that here, after clearing up.
            signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::new(AtomicBool::new(false)))
                .map_err(Error::Enter)?;
            let input = standard(io::stdin())?;
            write::write(Path::new(path), *into_directory, *keep_owner, input)
        }
    }
}

fn enter(namespace: RawFd) -> io::Result<()> {
    #[allow(unsafe_code, reason = "a descriptor that was inherited is only a number")]
    // SAFETY: the agent left it open for this process alone, which closes it never.
    let namespace = unsafe { BorrowedFd::borrow_raw(namespace) };
    // Root and working directory become the namespace's.
    move_into_link_name_space(namespace, Some(LinkNameSpaceType::Mount))?;
    rustix::process::umask(rustix::fs::Mode::empty());
    Ok(())
}

/// A standard stream without the buffer that the library puts before it.
fn standard(stream: impl AsFd) -> Result<File, Error> {
    let fd: OwnedFd = stream.as_fd().try_clone_to_owned().map_err(Error::Enter)?;
    Ok(File::from(fd))
}

/// A path of the Workspace, cleaned of `.` and doubled slashes.
fn absolute(path: &Path) -> Result<PathBuf, Error> {
    use std::path::Component::{CurDir, Normal, ParentDir, Prefix, RootDir};
    let mut clean = PathBuf::from("/");
    for component in path.components() {
        match component {
            RootDir | CurDir => {}
            Normal(name) => clean.push(name),
            ParentDir | Prefix(_) => {
                return Err(Error::Invalid(format!("{} has .. in it: give the path without", path.display())));
            }
        }
    }
    if path.is_absolute() {
        Ok(clean)
    } else {
        Err(Error::Invalid(format!("{:?} is no absolute path: let it begin with /", path.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_survives_its_arguments() {
        let orders = [
            Order::Read { path: "/a b".to_owned() },
            Order::Write { path: "/".to_owned(), into_directory: true, keep_owner: false },
            Order::Write { path: "/x".to_owned(), into_directory: false, keep_owner: true },
        ];
        for order in orders {
            assert_eq!(Order::parse(&order.arguments(7)), Some((7, order)));
        }
        assert_eq!(Order::parse(&[]), None);
    }

    #[test]
    fn a_status_says_what_kind_of_failure_it_was() {
        let missing = Error::NotFound { path: "/x".into(), advice: "" };
        let status = FAILED + missing.reason() as u32;
        assert_eq!(reason_of(status), StartFailureReason::NotFound);
        assert_eq!(reason_of(101), StartFailureReason::Other);
    }

    #[test]
    fn paths_are_cleaned_and_those_that_climb_are_refused() {
        assert_eq!(absolute(Path::new("/a//b/./c/")).unwrap(), Path::new("/a/b/c"));
        assert_eq!(absolute(Path::new("/")).unwrap(), Path::new("/"));
        assert!(absolute(Path::new("/a/../b")).is_err() && absolute(Path::new("a")).is_err());
    }
}
