//! Archives in files.

use std::{
    fs, io,
    os::unix::fs::OpenOptionsExt as _,
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
    workspace::stream::{channels::PIECE, cp::local},
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
            let mut piece = BytesMut::with_capacity(PIECE);
            match file.read_buf(&mut piece).await {
                Ok(0) => None,
                Ok(_) => Some((Ok(piece.freeze()), Some(file))),
                Err(error) => Some((Err(local("cannot read", &path, &error)), None)),
            }
        }
    });
    Ok(Source { pieces: pieces.boxed(), size: metadata.len() })
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
        let temporary = path.with_file_name(format!(".{}.{:016x}", name.to_string_lossy(), rand::random::<u64>()));
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let made = File::from_std(options.open(&temporary).map_err(|error| local("cannot make", path, &error))?);
        Ok(Self { path: path.to_owned(), temporary: Temporary(temporary), file: made })
    }

    pub async fn write(&mut self, piece: &Bytes) -> Result<()> {
        self.file.write_all(piece).await.map_err(|error| local("cannot write", &self.path, &error))
    }

    pub async fn complete(mut self) -> Result<()> {
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
        let late = FileSink::create(&path).unwrap();
        sink.complete().await.unwrap();
        assert_eq!(late.complete().await.unwrap_err().kind, Kind::FailedPrecondition);
        assert_eq!((names(&dir), fs::read(&path).unwrap()), (vec!["dev.kibo".to_owned()], b"abc".to_vec()));
        assert_eq!(FileSink::create(&path).err().unwrap().kind, Kind::FailedPrecondition);
        let source = read(&path).await.unwrap();
        assert_eq!(source.size, 3);
        assert_eq!(source.pieces.collect::<Vec<_>>().await, [Ok(Bytes::from_static(b"abc"))]);
        assert!(read(dir.path()).await.is_err());
    }
}
