//! `kibo workspace cp`: files and directories into a guest and out of it, as a tar stream.
//!
//! The semantics are those of `cp -a` and `docker cp`. What comes from a guest is not trusted: nothing of it leaves
//! the destination. A file gets its name when it is complete, on either side.

mod destination;
mod download;
mod entry;
mod pipe;
mod progress;
mod upload;

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
};

use clap::Args;
pub use progress::Progress;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::check_available;
use crate::{
    client::Cluster,
    errors::{Error, Kind, Result, Subject},
    workspace::target,
};

#[derive(Args, Debug)]
#[command(after_help = "\
A side in the guest is WORKSPACE:PATH, by name or id. SRC may end in /. for what is in a directory. - is a tar stream \
on standard input or output.

  kibo workspace cp notes.txt dev:/root/         into a directory
  kibo workspace cp dev:/var/log ./log           a directory, which becomes ./log
  kibo workspace cp - dev:/srv < site.tar        a tar stream into a directory")]
pub struct Copy {
    /// A local path, WORKSPACE:PATH, or -
    #[arg(value_name = "SRC")]
    source: OsString,
    /// A local path, WORKSPACE:PATH, or -
    #[arg(value_name = "DST")]
    destination: OsString,
    /// Do not keep owners and modes: files belong to root in the guest and to you here, with the usual rights
    #[arg(long)]
    no_preserve: bool,
    /// Show no progress
    #[arg(short, long)]
    quiet: bool,
}

/// One side of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Side {
    Local(PathBuf),
    Guest {
        workspace: String,
        path: String,
    },
    /// Standard input or output.
    Stream,
}

/// How a copy is made.
#[derive(Clone, Copy, Debug)]
struct Manner {
    preserve: bool,
    quiet: bool,
}

impl Side {
    /// `NAME:PATH` is in a guest, unless there is a `/` in front of the colon.
    fn parse(text: &OsString) -> Result<Self> {
        if text == "-" {
            return Ok(Self::Stream);
        }
        let in_guest = text.to_str().and_then(|text| text.split_once(':')).filter(|(name, _)| !name.contains('/'));
        let Some((workspace, path)) = in_guest else { return Ok(Self::Local(PathBuf::from(text))) };
        if workspace.is_empty() || path.is_empty() {
            return Err(Error::invalid(format!("{:?} is no WORKSPACE:PATH", text.to_string_lossy()))
                .next("a local path with a colon in it is written ./PATH"));
        }
        // As docker: from the root on.
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        Ok(Self::Guest { workspace: workspace.to_owned(), path })
    }
}

pub async fn copy(cluster: &Cluster, args: Copy) -> Result<()> {
    let manner = Manner { preserve: !args.no_preserve, quiet: args.quiet };
    let mut interrupt = Interrupt::listen()?;
    match (Side::parse(&args.source)?, Side::parse(&args.destination)?) {
        (Side::Guest { workspace, path }, to @ (Side::Local(_) | Side::Stream)) => {
            let subject = interrupt.or(running(cluster, &workspace)).await?;
            let to = if let Side::Local(to) = to { Some(to) } else { None };
            download::download(cluster, &subject, &path, to, manner, &mut interrupt).await
        }
        (from @ (Side::Local(_) | Side::Stream), Side::Guest { workspace, path }) => {
            let subject = interrupt.or(running(cluster, &workspace)).await?;
            let from = if let Side::Local(from) = from { Some(from) } else { None };
            upload::upload(cluster, &subject, from, &path, manner, &mut interrupt).await
        }
        (Side::Guest { .. }, Side::Guest { .. }) => Err(Error::invalid("one of SRC and DST must be local")
            .next("copy by way of a tar stream: kibo workspace cp A:PATH - | kibo workspace cp - B:PATH")),
        _ => Err(Error::invalid("one of SRC and DST must be in a Workspace: WORKSPACE:PATH")),
    }
}

/// The signals that end a copy; what is half is taken away before the program ends.
pub struct Interrupt {
    signals: [Signal; 3],
}

impl Interrupt {
    pub fn listen() -> Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = kinds.map(signal);
        Ok(Self { signals: [interrupt?, terminate?, hangup?] })
    }

    /// Does something unless a signal comes first.
    pub async fn or<T>(&mut self, doing: impl Future<Output = Result<T>>) -> Result<T> {
        let [interrupt, terminate, hangup] = &mut self.signals;
        tokio::select! {
            done = doing => return done,
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
        Err(Error::new(Kind::Interrupted, "interrupted: what was not complete is not there"))
    }
}

async fn running(cluster: &Cluster, workspace: &str) -> Result<Subject> {
    let (workspace, subject) = target::fetch(cluster, workspace).await?;
    check_available(&workspace, &subject, "its files cannot be reached")?;
    Ok(subject)
}

/// A local failure, with its path.
pub fn local(what: &str, path: &Path, error: &io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::NotFound => Kind::NotFound,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Kind::NotPermitted,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            Kind::ResourceExhausted
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory | io::ErrorKind::AlreadyExists => {
            Kind::FailedPrecondition
        }
        _ => Kind::Other,
    };
    Error::new(kind, format!("{what} {:?}: {error}", path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_colon_before_any_slash_names_a_workspace() {
        let side = |text: &str| Side::parse(&OsString::from(text)).unwrap();
        let guest = |workspace: &str, path: &str| Side::Guest { workspace: workspace.into(), path: path.into() };
        assert_eq!(side("dev:/etc/hosts"), guest("dev", "/etc/hosts"));
        assert_eq!(side("dev:notes"), guest("dev", "/notes"));
        assert_eq!(side("dev:/a:b"), guest("dev", "/a:b"));
        for local in ["/etc/hosts", "./a:b", "a/b:c", "plain"] {
            assert_eq!(side(local), Side::Local(local.into()));
        }
        assert_eq!(side("-"), Side::Stream);
        assert!(Side::parse(&OsString::from("dev:")).is_err() && Side::parse(&OsString::from(":/x")).is_err());
    }
}
