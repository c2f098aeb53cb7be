//! Files that are whole after any crash.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

/// Makes the entries of a directory durable.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Replaces a file, readable by its owner alone: after a crash it has the old content or the new
/// one, and when this returns, the new one.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let dir = path.parent().ok_or_else(|| io::Error::other("the path has no directory"))?;
    let mut name = path.file_name().ok_or_else(|| io::Error::other("the path has no file name"))?.to_owned();
    name.push(".new");
    let temporary = dir.join(name);
    // A left-over of a crash may have another mode; it is nobody's.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    sync_dir(dir)
}
