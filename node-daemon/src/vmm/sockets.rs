//! The unix sockets in an Instance's directory.
//!
//! A socket's path may have 107 bytes, which the state directory alone can use up: all go through a descriptor of the
//! directory.

use std::{
    fs::File,
    io,
    os::{fd::AsRawFd as _, unix::net::UnixListener},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::{Mode, OFlags};
use tokio::net::UnixStream;

use super::VmmError;

/// An open directory whose sockets can be reached whatever the length of its path.
#[derive(Clone, Debug)]
pub struct SocketDir {
    path: PathBuf,
    directory: Arc<File>,
}

impl SocketDir {
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self { path: path.to_owned(), directory: Arc::new(directory.into()) })
    }

    /// Makes a socket that listens, in place of one that was left behind.
    pub fn listen(&self, name: &str) -> Result<UnixListener, VmmError> {
        let short = self.short(name);
        let make = || {
            match std::fs::remove_file(&short) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            UnixListener::bind(&short)
        };
        make().map_err(|source| VmmError::Socket { path: self.path.join(name), source })
    }

    pub async fn connect(&self, name: &str) -> io::Result<UnixStream> {
        UnixStream::connect(self.short(name)).await
    }

    fn short(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.directory.as_raw_fd()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_deep_directory_can_have_sockets() {
        let root = tempfile::tempdir().unwrap();
        let deep = root.path().join("d".repeat(120));
        std::fs::create_dir(&deep).unwrap();
        let sockets = SocketDir::open(&deep).unwrap();
        drop(sockets.listen("a.sock").unwrap());
        let listener = sockets.listen("a.sock").unwrap();
        sockets.connect("a.sock").await.unwrap();
        listener.accept().unwrap();
    }
}
