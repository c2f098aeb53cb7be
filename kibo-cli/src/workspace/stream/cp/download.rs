//! From a guest to here.

use std::path::PathBuf;

use bytes::Bytes;
use tokio::{io::AsyncWriteExt as _, sync::mpsc, task::spawn_blocking};

use super::{
    Interrupt, Manner,
    destination::{Failure, Spot, Tree},
    entry::{Attributes, Bounded, Names, Renaming, names},
    local,
    pipe::{self, Piece, Reader},
    progress::{Counted, Progress},
};
use crate::{
    client::Cluster,
    errors::{Error, Kind, Result, Subject},
    workspace::stream::channels::{self, FromServer, Receiver},
};

/// Copies `path` of the guest to a place here, or as a tar stream to standard output.
pub async fn download(
    cluster: &Cluster,
    subject: &Subject,
    path: &str,
    to: Option<PathBuf>,
    manner: Manner,
    interrupt: &mut Interrupt,
) -> Result<()> {
    let (path, contents) = what(path);
    let spot = to.map(|to| Spot::find(&to, contents)).transpose()?;
    let query = [("mode", "read"), ("path", path)];
    let opened = interrupt.or(channels::open(cluster, subject, "files", &query)).await?;
    // The way to the guest stays open: its end would be ours.
    let (_sender, receiver) = opened;
    let Some(spot) = spot else { return interrupt.or(print(receiver, subject)).await };
    let progress = Progress::begin(path, manner.quiet);
    let (pieces, reader) = pipe::reader();
    let unpacking = spawn_blocking({
        let progress = progress.clone();
        move || unpack(reader, &spot, manner, &progress)
    });
    // What it holds of the pipe is dropped with it; then the unpacking ends too, and takes what is half away.
    let received = interrupt.or(receive(receiver, pieces, subject)).await;
    let unpacked = unpacking.await.map_err(std::io::Error::other)?;
    match received.and(unpacked) {
        Ok(files) => {
            progress.end(&format!("{path} ({files} {})", if files == 1 { "file" } else { "files" }));
            Ok(())
        }
        Err(error) => {
            progress.clear();
            Err(error)
        }
    }
}

/// The path without what is only said to us: `/.` at its end means what is in the directory.
fn what(path: &str) -> (&str, bool) {
    let trimmed = path.trim_end_matches('/');
    let (path, contents) = match trimmed.strip_suffix("/.") {
        Some(directory) => (directory.trim_end_matches('/'), true),
        None => (trimmed, false),
    };
    // Of the root there is nothing but what is in it.
    if path.is_empty() { ("/", true) } else { (path, contents) }
}

/// Hands on what comes, to the end. That nobody takes it any more is no failure of this side.
async fn receive(mut receiver: Receiver, pieces: mpsc::Sender<Piece>, subject: &Subject) -> Result<()> {
    loop {
        let piece = tokio::select! {
            data = next(&mut receiver, subject) => data?.map_or(Piece::End, Piece::Data),
            () = pieces.closed() => return Ok(()),
        };
        let is_end = matches!(piece, Piece::End);
        if pieces.send(piece).await.is_err() || is_end {
            return Ok(());
        }
    }
}

async fn print(mut receiver: Receiver, subject: &Subject) -> Result<()> {
    let mut stdout = tokio::io::stdout();
    while let Some(data) = next(&mut receiver, subject).await? {
        stdout.write_all(&data).await?;
    }
    Ok(stdout.flush().await?)
}

/// The next piece of the archive; none: it is complete.
async fn next(receiver: &mut Receiver, subject: &Subject) -> Result<Option<Bytes>> {
    loop {
        match receiver.next().await {
            Ok(FromServer::Stdout(data)) => return Ok(Some(data)),
            Ok(FromServer::Ended(status)) if status.status.as_deref() == Some("Success") => return Ok(None),
            Ok(FromServer::Ended(status)) => return Err(channels::failure(&status, subject)),
            Ok(FromServer::Stderr(_) | FromServer::StdoutClosed) => {}
            Err(broken) => {
                return Err(Error::new(
                    Kind::Unavailable,
                    format!("{subject}: {broken}, before the copy was complete"),
                ));
            }
        }
    }
}

/// Makes what the archive has; how many files there were.
fn unpack(reader: Reader, spot: &Spot, manner: Manner, progress: &Progress) -> Result<u64> {
    let counted = Counted { inner: reader, progress: progress.clone() };
    let (bounded, bound) = Bounded::new(counted);
    let mut archive = tar::Archive::new(bounded);
    let mut unpacking: Option<Unpacking> = None;
    let mut files = 0;
    let mut entries = archive.entries().map_err(|error| unreadable(&error))?;
    loop {
        bound.headers();
        let Some(entry) = entries.next() else { break };
        let mut entry = entry.map_err(|error| unreadable(&error))?;
        bound.contents();
        let path = entry.path().map_err(|error| unreadable(&error))?.into_owned();
        let names = names(&path).ok_or_else(|| leaves(&path.display().to_string()))?;
        let unpacking = match &mut unpacking {
            Some(unpacking) => unpacking,
            first => {
                if entry.header().entry_type().is_file() {
                    progress.total(entry.size());
                }
                first.insert(Unpacking::begin(spot, &names, entry.header().entry_type().is_dir(), manner)?)
            }
        };
        files += u64::from(unpacking.take(&mut entry, names, progress)?);
    }
    // What is behind the archive's end, and whether the guest says that this was all.
    bound.contents();
    std::io::copy(&mut archive.into_inner(), &mut std::io::sink()).map_err(|error| unreadable(&error))?;
    let unpacking = unpacking.ok_or_else(|| Error::new(Kind::Other, "the guest sent an empty archive"))?;
    unpacking.tree.finish()?;
    Ok(files)
}

struct Unpacking {
    tree: Tree,
    renaming: Renaming,
}

impl Unpacking {
    fn begin(spot: &Spot, first: &Names, is_directory: bool, manner: Manner) -> Result<Self> {
        spot.check(is_directory)?;
        if let Spot::Contents(directory) = spot
            && !directory.exists()
        {
            std::fs::create_dir(directory).map_err(|error| local("cannot make the directory", directory, &error))?;
        }
        let tree = Tree::open(spot.directory(), manner.preserve)?;
        Ok(Self { tree, renaming: Renaming::of(first, |own| spot.name(own)) })
    }

    /// Whether it was a file.
    fn take(
        &mut self,
        entry: &mut tar::Entry<'_, impl std::io::Read>,
        names: Names,
        progress: &Progress,
    ) -> Result<bool> {
        use tar::EntryType as T;
        let shown = entry.path_bytes().into_owned();
        let shown = String::from_utf8_lossy(&shown);
        let names = self.renaming.apply(names).ok_or_else(|| leaves(&shown))?;
        let attributes = Attributes::of(entry.header());
        let link = || -> Result<PathBuf> {
            let target = entry.link_name().map_err(|error| unreadable(&error))?;
            Ok(target.map(std::borrow::Cow::into_owned).unwrap_or_default())
        };
        let made = match entry.header().entry_type() {
            T::Regular | T::Continuous => {
                let size = entry.size();
                self.tree.file(&names, attributes, entry, size).map(|()| true)
            }
            T::Directory => self.tree.directory(&names, attributes).map(|()| false).map_err(Failure::from),
            T::Symlink => self.tree.symbolic_link(&names, &link()?, attributes).map(|()| true),
            T::Link => {
                let target = link()?;
                let to = super::entry::names(&target).and_then(|to| self.renaming.apply(to));
                let to = to.ok_or_else(|| leaves(&format!("{shown}, a link to {}", target.display())))?;
                self.tree.hard_link(&names, &to).map(|()| true)
            }
            T::XGlobalHeader => Ok(false),
            _ => {
                progress.remark(&format!("left out {shown}: neither a file, a directory nor a link"));
                Ok(false)
            }
        };
        made.map_err(|failure| match failure {
            Failure::Archive(error) => unreadable(&error),
            Failure::Local(error) => error,
            Failure::Io(error) => error.into(),
        })
    }
}

fn unreadable(error: &std::io::Error) -> Error {
    Error::new(Kind::Other, format!("what came from the guest is no whole archive: {error}"))
}

fn leaves(shown: &str) -> Error {
    Error::new(
        Kind::FailedPrecondition,
        format!(
            "the guest's archive has the entry {shown:?}, which is not below what was asked for: the copy ends here"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_path_says_what_of_it_is_wanted() {
        for (path, expected) in [
            ("/etc", ("/etc", false)),
            ("/etc/", ("/etc", false)),
            ("/etc/.", ("/etc", true)),
            ("/etc/./", ("/etc", true)),
            ("/", ("/", true)),
            ("/.", ("/", true)),
        ] {
            assert_eq!(what(path), expected, "{path}");
        }
    }
}
