//! Files that are whole after any crash.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

/// Makes the entries of a directory durable.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Replaces a file, readable by its owner alone: after a crash it has the old content or the new
/// one, and when this returns, the new one.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let (_, unsettled) = swap(path, content)?;
    unsettled.settle()
}

/// A new file stands under its name, while after a crash the old one may.
#[derive(Debug)]
#[must_use]
pub struct Unsettled {
    dir: PathBuf,
}

impl Unsettled {
    /// Makes the new content outlive a crash.
    pub fn settle(&self) -> io::Result<()> {
        sync_dir(&self.dir)
    }
}

/// The first half of [`replace`], for whoever goes on with the file: once the name stands for it, nothing can fail that
/// would leave the caller with the old one. On an error the old one is still there. The file is open for reading and
/// writing.
pub fn swap(path: &Path, content: &[u8]) -> io::Result<(File, Unsettled)> {
    let dir = path.parent().ok_or_else(|| io::Error::other("the path has no directory"))?;
    let mut name = path.file_name().ok_or_else(|| io::Error::other("the path has no file name"))?.to_owned();
    name.push(".new");
    let temporary = dir.join(name);
    // A left-over of a crash may have another mode; it is nobody's.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    Ok((file, Unsettled { dir: dir.to_owned() }))
}
