//! From here into a guest.

use std::{
    ffi::OsString,
    fs::{self, File, Metadata},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use futures::future::pending;
use tar::{Builder, EntryType, Header};
use tokio::{
    io::AsyncReadExt as _,
    sync::mpsc,
    task::{JoinHandle, spawn_blocking},
};

use super::{
    Interrupt, Manner, local,
    pipe::{self, Writer},
    progress::{Counted, Progress},
};
use crate::{
    client::Cluster,
    errors::{Error, Kind, Result, Subject},
    workspace::stream::channels::{self, Channel, FromServer, PIECE, Receiver, Sender},
};

/// Rights that a copy without `--preserve` keeps.
const USUAL_MODE: u32 = 0o755;

/// Copies a file or directory from here, or a tar stream from standard input, to `path` of the guest.
pub async fn upload(
    cluster: &Cluster,
    subject: &Subject,
    from: Option<PathBuf>,
    to: &str,
    manner: Manner,
    interrupt: &mut Interrupt,
) -> Result<()> {
    let source = from.map(Source::find).transpose()?;
    let send = Send { cluster, subject, manner };
    let Some(source) = source else {
        let (messages, feed) = stdin();
        return send.send(to, true, messages, feed, &Progress::begin("-", true), interrupt).await;
    };
    let is_directory = source.metadata.is_dir();
    let trimmed = to.trim_end_matches('/');
    let as_name = if trimmed.is_empty() { "/" } else { trimmed };
    // A directory gets the name or goes into what has it; a slash behind a file's place asks for a directory.
    let (path, into_directory) = match (is_directory, source.contents) {
        (true, false) => (as_name, false),
        (false, _) => (to, to.ends_with('/')),
        (true, true) => (to, true),
    };
    let sent = send.files(&source, path, into_directory, interrupt).await;
    match sent {
        // Then the directory is made, as what it is here.
        Err(error) if source.contents && error.kind == Kind::NotFound => {
            send.files(&Source { contents: false, ..source }, as_name, false, interrupt).await
        }
        sent => sent,
    }
}

/// What is copied.
struct Source {
    path: PathBuf,
    /// Of its top entry.
    name: OsString,
    /// Only what is in the directory.
    contents: bool,
    metadata: Metadata,
}

impl Source {
    fn find(path: PathBuf) -> Result<Self> {
        let cannot = |error: io::Error| local("cannot copy", &path, &error);
        let metadata = path.symlink_metadata().map_err(cannot)?;
        let bytes = path.as_os_str().as_encoded_bytes();
        let contents = metadata.is_dir() && (bytes == b"." || bytes.ends_with(b"/."));
        let name = match path.file_name() {
            Some(name) if !contents => Some(name.to_owned()),
            _ => path.canonicalize().map_err(cannot)?.file_name().map(ToOwned::to_owned),
        };
        // The root has no name; what is in it has.
        let name = name.unwrap_or_else(|| "root".into());
        Ok(Self { path, name, contents, metadata })
    }
}

struct Send<'a> {
    cluster: &'a Cluster,
    subject: &'a Subject,
    manner: Manner,
}

type Feed = JoinHandle<Result<u64>>;

impl Send<'_> {
    async fn files(&self, source: &Source, to: &str, into_directory: bool, interrupt: &mut Interrupt) -> Result<()> {
        let progress = Progress::begin(&source.path.display().to_string(), self.manner.quiet);
        let (writer, messages) = pipe::writer();
        let packing = Packing {
            archive: Builder::new(Counted { inner: writer, progress: progress.clone() }),
            preserve: self.manner.preserve,
            progress: progress.clone(),
            files: 0,
        };
        let (path, name) = (source.path.clone(), PathBuf::from(&source.name));
        let (contents, metadata) = (source.contents, source.metadata.clone());
        let feed = spawn_blocking(move || packing.run(&path, &name, contents, &metadata));
        self.send(to, into_directory, messages, feed, &progress, interrupt).await
    }

    /// Sends messages to their end and waits for what the guest says.
    async fn send(
        &self,
        to: &str,
        into_directory: bool,
        messages: mpsc::Receiver<Bytes>,
        feed: Feed,
        progress: &Progress,
        interrupt: &mut Interrupt,
    ) -> Result<()> {
        let said = |yes: bool| if yes { "true" } else { "false" };
        let query = [
            ("mode", "write"),
            ("path", to),
            ("intoDirectory", said(into_directory)),
            ("keepOwner", said(self.manner.preserve)),
        ];
        let copied = interrupt.or(async {
            let (sender, receiver) = channels::open(self.cluster, self.subject, "files", &query).await?;
            let mut files = 0;
            tokio::select! {
                error = give(sender, messages, feed, &mut files) => Err(error),
                ended = ended(receiver, self.subject) => ended,
            }
            .map(|()| files)
        });
        match copied.await {
            Ok(files) => {
                progress.end(&format!("{files} {} to {to}", if files == 1 { "file" } else { "files" }));
                Ok(())
            }
            Err(error) => {
                progress.clear();
                Err(error)
            }
        }
    }
}

/// Sends everything and says that it is all; ends only with a failure of this side. A guest that is told of no end
/// keeps nothing that is half.
async fn give(mut sender: Sender, mut messages: mpsc::Receiver<Bytes>, feed: Feed, files: &mut u64) -> Error {
    while let Some(message) = messages.recv().await {
        if sender.send_framed(message).await.is_err() {
            // The other direction knows why.
            return pending().await;
        }
    }
    match feed.await {
        Ok(Ok(count)) => *files = count,
        Ok(Err(error)) => return error,
        Err(error) => return io::Error::other(error).into(),
    }
    let _ = sender.close_stdin().await;
    pending().await
}

/// Waits for what the guest says of the copy.
async fn ended(mut receiver: Receiver, subject: &Subject) -> Result<()> {
    loop {
        match receiver.next().await {
            Ok(FromServer::Ended(status)) if status.status.as_deref() == Some("Success") => return Ok(()),
            Ok(FromServer::Ended(status)) => return Err(channels::failure(&status, subject)),
            Ok(_) => {}
            Err(broken) => {
                let message = format!("{subject}: {broken}, before the copy was complete");
                return Err(Error::new(Kind::Unavailable, message));
            }
        }
    }
}

/// Standard input as messages; the guest counts what is in it.
fn stdin() -> (mpsc::Receiver<Bytes>, Feed) {
    let (messages, received) = mpsc::channel(2);
    let feed = tokio::spawn(async move {
        let mut stdin = channels::stdin();
        loop {
            let mut piece = vec![0; PIECE];
            piece[0] = Channel::Stdin as u8;
            let length = stdin.read(&mut piece[1..]).await?;
            piece.truncate(length + 1);
            if length == 0 || messages.send(piece.into()).await.is_err() {
                return Ok(0);
            }
        }
    });
    (received, feed)
}

/// Makes the archive.
struct Packing {
    archive: Builder<Counted<Writer>>,
    preserve: bool,
    progress: Progress,
    files: u64,
}

impl Packing {
    fn run(mut self, path: &Path, name: &Path, contents: bool, metadata: &Metadata) -> Result<u64> {
        if self.progress.is_shown() {
            self.progress.total(size(path, metadata));
        }
        // What is still to be added: memory for the names of a directory, not for a tree.
        let mut left = vec![(path.to_owned(), name.to_owned())];
        if contents {
            left.clear();
            children(path, Path::new(""), &mut left)?;
        }
        while let Some((path, name)) = left.pop() {
            let metadata = path.symlink_metadata().map_err(|error| local("cannot copy", &path, &error))?;
            let added = self.add(&path, &name, &metadata);
            added.map_err(|error| local("cannot copy", &path, &error))?;
            if metadata.is_dir() {
                children(&path, &name, &mut left)?;
            }
        }
        let flushed = self.archive.into_inner().and_then(|mut writer| writer.flush());
        flushed.map_err(|error| local("cannot copy", path, &error))?;
        Ok(self.files)
    }

    fn add(&mut self, path: &Path, name: &Path, metadata: &Metadata) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_metadata(metadata);
        if !self.preserve {
            header.set_uid(0);
            header.set_gid(0);
            header.set_mode(header.mode()? & USUAL_MODE);
        }
        let kind = metadata.file_type();
        if kind.is_symlink() {
            header.set_entry_type(EntryType::Symlink);
            header.set_size(0);
            self.archive.append_link(&mut header, name, fs::read_link(path)?)?;
        } else if kind.is_dir() {
            header.set_size(0);
            return self.archive.append_data(&mut header, name, io::empty());
        } else if kind.is_file() {
            let content = Exactly { file: File::open(path)?, left: metadata.len() };
            self.archive.append_data(&mut header, name, content)?;
        } else {
            self.progress.remark(&format!("left out {}: neither a file, a directory nor a link", path.display()));
            return Ok(());
        }
        self.files += 1;
        Ok(())
    }
}

/// What is in a directory, so that it comes off the end in order.
fn children(path: &Path, name: &Path, to: &mut Vec<(PathBuf, PathBuf)>) -> Result<()> {
    let read = || -> io::Result<Vec<OsString>> {
        fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.file_name())).collect()
    };
    let mut names = read().map_err(|error| local("cannot copy", path, &error))?;
    names.sort_unstable_by(|one, other| other.cmp(one));
    to.extend(names.into_iter().map(|child| (path.join(&child), name.join(&child))));
    Ok(())
}

/// How many bytes the archive will have, roughly. What cannot be read here fails later, with its name.
fn size(path: &Path, metadata: &Metadata) -> u64 {
    const HEADER: u64 = 512;
    if !metadata.is_dir() {
        return HEADER + if metadata.is_file() { metadata.len().next_multiple_of(HEADER) } else { 0 };
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| Some(size(&entry.path(), &entry.metadata().ok()?)));
    HEADER + sizes.sum::<u64>()
}

/// A file of the size that its header says, also when it grows meanwhile.
struct Exactly {
    file: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let length = self.file.read(&mut buffer[..wanted])?;
        if length == 0 && wanted > 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it became shorter while it was copied"));
        }
        self.left -= length as u64;
        Ok(length)
    }
}
