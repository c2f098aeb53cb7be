//! Archives in files.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::OpenOptionsExt as _,
    },
    path::{Path, PathBuf},
};

use bytes::{Bytes, BytesMut};
use futures::{StreamExt as _, stream};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use tokio::{
    fs::File,
    io::{AsyncReadExt as _, AsyncWriteExt as _},
};

use super::location::Source;
use crate::{
    errors::{Error, Kind, Result},
    workspace::stream::{channels::DATA, cp::local},
};

pub async fn read(path: &Path) -> Result<Source> {
    let cannot = |error: &io::Error| local("cannot read", path, error);
    let file = File::open(path).await.map_err(|error| cannot(&error))?;
    let metadata = file.metadata().await.map_err(|error| cannot(&error))?;
    if metadata.is_dir() {
        return Err(cannot(&io::ErrorKind::IsADirectory.into()));
    }
    let path = path.to_owned();
    let pieces = stream::unfold(Some(file), move |file| {
        let path = path.clone();
        async move {
            let mut file = file?;
            let mut piece = BytesMut::with_capacity(DATA);
            match file.read_buf(&mut piece).await {
                Ok(0) => None,
                Ok(_) => Some((Ok(piece.freeze()), Some(file))),
                Err(error) => Some((Err(local("cannot read", &path, &error)), None)),
            }
        }
    });
    // A pipe says nothing of how much will come.
    Ok(Source { pieces: pieces.boxed(), size: metadata.is_file().then_some(metadata.len()) })
}

/// A file under a temporary name beside its final one, which goes when it is dropped.
pub struct FileSink {
    path: PathBuf,
    temporary: Temporary,
    file: File,
}

struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // What got its final name is not there any more.
        let _ = fs::remove_file(&self.0);
    }
}

impl FileSink {
    pub fn create(path: &Path) -> Result<Self> {
        if path.symlink_metadata().is_ok() {
            return Err(exists(path));
        }
        let name =
            path.file_name().ok_or_else(|| Error::invalid(format!("{} is no name of a file", path.display())))?;
        let temporary = path.with_file_name(hidden(name.as_bytes()));
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let made = File::from_std(options.open(&temporary).map_err(|error| local("cannot make", path, &error))?);
        Ok(Self { path: path.to_owned(), temporary: Temporary(temporary), file: made })
    }

    pub async fn write(&mut self, piece: &Bytes) -> Result<()> {
        self.file.write_all(piece).await.map_err(|error| local("cannot write", &self.path, &error))
    }

    pub async fn complete(&mut self) -> Result<()> {
        let cannot = |error: &io::Error| local("cannot write", &self.path, error);
        self.file.flush().await.map_err(|error| cannot(&error))?;
        self.file.sync_all().await.map_err(|error| cannot(&error))?;
        name(&self.temporary.0, &self.path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => exists(&self.path),
            _ => cannot(&error),
        })?;
        let directory = self.path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(|error| cannot(&error))
    }
}

/// A name for what is not complete; not too long for a file system that takes the name itself.
fn hidden(name: &[u8]) -> OsString {
    let mark = format!(".{:016x}", rand::random::<u64>());
    let begin = &name[..name.len().min(254 - mark.len())];
    OsString::from_vec([b".", begin, mark.as_bytes()].concat())
}

/// Never in the place of another file, which may have come meanwhile.
fn name(temporary: &Path, path: &Path) -> io::Result<()> {
    match renameat_with(CWD, temporary, CWD, path, RenameFlags::NOREPLACE) {
        // A file system that cannot do it in one step.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => fs::hard_link(temporary, path),
        renamed => renamed.map_err(Into::into),
    }
}

fn exists(path: &Path) -> Error {
    Error::new(Kind::FailedPrecondition, format!("{} exists already", path.display()))
        .next("give another name, or remove it: an archive replaces nothing")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &tempfile::TempDir) -> Vec<String> {
        let entries = fs::read_dir(dir.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[tokio::test]
    async fn a_file_gets_its_name_when_it_is_complete_and_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dev.kibo");
        let mut sink = FileSink::create(&path).unwrap();
        sink.write(&Bytes::from_static(b"ab")).await.unwrap();
        assert!(!path.exists() && names(&dir).len() == 1);
        drop(sink);
        assert!(names(&dir).is_empty(), "given up: {:?}", names(&dir));
        let mut sink = FileSink::create(&path).unwrap();
        sink.write(&Bytes::from_static(b"abc")).await.unwrap();
        let mut late = FileSink::create(&path).unwrap();
        sink.complete().await.unwrap();
        assert_eq!(late.complete().await.unwrap_err().kind, Kind::FailedPrecondition);
        drop((sink, late));
        assert_eq!((names(&dir), fs::read(&path).unwrap()), (vec!["dev.kibo".to_owned()], b"abc".to_vec()));
        assert_eq!(FileSink::create(&path).err().unwrap().kind, Kind::FailedPrecondition);
        let source = read(&path).await.unwrap();
        assert_eq!(source.size, Some(3));
        assert_eq!(source.pieces.collect::<Vec<_>>().await, [Ok(Bytes::from_static(b"abc"))]);
        assert!(read(dir.path()).await.is_err());
    }

    #[tokio::test]
    async fn a_name_may_be_as_long_as_the_file_system_has_it_and_a_link_is_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("n".repeat(255));
        let mut sink = FileSink::create(&long).unwrap();
        sink.write(&Bytes::from_static(b"a")).await.unwrap();
        sink.complete().await.unwrap();
        drop(sink);
        assert_eq!(names(&dir), ["n".repeat(255)]);
        let (dangling, directory) = (dir.path().join("dangling"), dir.path().join("directory"));
        std::os::unix::fs::symlink("nowhere", &dangling).unwrap();
        fs::create_dir(&directory).unwrap();
        for there in [&dangling, &directory] {
            assert_eq!(FileSink::create(there).err().unwrap().kind, Kind::FailedPrecondition, "{}", there.display());
        }
        let nowhere = FileSink::create(&dir.path().join("no/such/dev.kibo")).err().unwrap();
        assert_eq!(nowhere.kind, Kind::NotFound);
        // /dev/full takes no byte.
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let temporary = Temporary(dir.path().join("none"));
        let mut sink = FileSink { path: dir.path().join("full"), temporary, file: File::from_std(full) };
        let wrote = sink.write(&Bytes::from_static(b"a")).await;
        let error = wrote.err().or(sink.complete().await.err()).unwrap();
        assert_eq!(error.kind, Kind::ResourceExhausted, "{error}");
        assert!(!dir.path().join("full").exists());
    }

    #[tokio::test]
    async fn a_pipe_can_be_read_and_has_no_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        rustix::fs::mknodat(CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let writer = std::thread::spawn({
            let path = path.clone();
            move || fs::write(path, b"abc").unwrap()
        });
        let source = read(&path).await.unwrap();
        assert_eq!(source.size, None);
        assert_eq!(source.pieces.collect::<Vec<_>>().await, [Ok(Bytes::from_static(b"abc"))]);
        writer.join().unwrap();
    }
}
