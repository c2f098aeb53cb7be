//! Makes an archive of a file or directory.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{sendfile, statfs};
use rustix::io::Errno;
use tar::{Builder, EntryType, Header, HeaderMode};

use super::{Error, absolute};

/// What is moved at once where the kernel does not move it by itself.
const BUFFER: usize = 128 * 1024;
const BLOCK: u64 = 512;

/// File systems that hold no files: /proc, /sys, cgroups, terminals. An archive has their directory alone.
const KERNELS_OWN: [u64; 4] = [0x9fa0, 0x6265_6572, 0x6367_7270, 0x1cd1];

/// Writes the archive of `path` to `output`, names relative to its parent.
pub fn read(path: &Path, output: File) -> Result<(), Error> {
    let path = absolute(path)?;
    let name = path.file_name().map_or_else(|| PathBuf::from("."), PathBuf::from);
    let mut archive = Archive { builder: Builder::new(output), links: HashMap::new() };
    let found = path.symlink_metadata().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Error::NotFound { path: path.clone(), advice: "see how it is spelled" }
        }
        _ => Error::File { what: "look at", path: path.clone(), source },
    })?;
    archive.add(&path, &name, &found)?;
    archive.builder.finish().map_err(broken)
}

fn broken(source: io::Error) -> Error {
    Error::Archive { what: "send", source }
}

struct Archive {
    builder: Builder<File>,
    /// Files with several names, by device and inode: the name that is in the archive.
    links: HashMap<(u64, u64), PathBuf>,
}

impl Archive {
    fn add(&mut self, path: &Path, name: &Path, found: &Metadata) -> Result<(), Error> {
        let kind = found.file_type();
        let mut header = Header::new_gnu();
        header.set_metadata_in_mode(found, HeaderMode::Complete);
        header.set_size(0);
        if kind.is_dir() {
            self.append(&mut header, name)?;
            return self.add_children(path, name);
        }
        if kind.is_symlink() {
            let target = fs::read_link(path).map_err(Error::file("read the link", path))?;
            return self.builder.append_link(&mut header, name, target).map_err(broken);
        }
        if kind.is_socket() {
            return Ok(());
        }
        if found.nlink() > 1 {
            if let Some(first) = self.links.get(&(found.dev(), found.ino())) {
                header.set_entry_type(EntryType::Link);
                let first = first.clone();
                return self.builder.append_link(&mut header, name, first).map_err(broken);
            }
            self.links.insert((found.dev(), found.ino()), name.to_owned());
        }
        if kind.is_file() { self.add_file(header, path, name) } else { self.append(&mut header, name) }
    }

    fn append(&mut self, header: &mut Header, name: &Path) -> Result<(), Error> {
        self.builder.append_data(header, name, io::empty()).map_err(broken)
    }

    fn add_children(&mut self, path: &Path, name: &Path) -> Result<(), Error> {
        let is_kernels_own =
            statfs(path).is_ok_and(|fs| u64::try_from(fs.f_type).is_ok_and(|id| KERNELS_OWN.contains(&id)));
        if is_kernels_own {
            return Ok(());
        }
        let listed = fs::read_dir(path).and_then(|entries| {
            entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<io::Result<Vec<OsString>>>()
        });
        let mut children = match listed {
            Ok(children) => children,
            Err(error) if is_gone(&error) => return Ok(()),
            Err(error) => return Err(Error::file("list", path)(error)),
        };
        children.sort();
        for child in children {
            let path = path.join(&child);
            match path.symlink_metadata() {
                Ok(found) => self.add(&path, &name.join(&child), &found)?,
                // What goes while it is looked at was as good as gone before.
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(Error::file("look at", path)(error)),
            }
        }
        Ok(())
    }

    fn add_file(&mut self, mut header: Header, path: &Path, name: &Path) -> Result<(), Error> {
        let mut file = match File::open(path) {
            Ok(file) => file,
            Err(error) if is_gone(&error) => return Ok(()),
            Err(error) => return Err(Error::file("read", path)(error)),
        };
        // Of what was opened: the name may be another file's by now.
        let found = file.metadata().map_err(Error::file("look at", path))?;
        header.set_metadata_in_mode(&found, HeaderMode::Complete);
        let size = found.size();
        // Head and bytes apart: the kernel moves the bytes, the library would copy them in small pieces.
        header.set_size(0);
        self.append_sized(&mut header, name, size)?;
        send_bytes(&mut file, self.builder.get_mut(), size, path)?;
        let rest = usize::try_from(size.next_multiple_of(BLOCK) - size).unwrap_or_default();
        self.builder.get_mut().write_all(&vec![0; rest]).map_err(broken)
    }

    /// The head of an entry whose bytes follow by themselves.
    fn append_sized(&mut self, header: &mut Header, name: &Path, size: u64) -> Result<(), Error> {
        if header.set_path(name).is_err() {
            // A name beyond what a head holds goes before it; the library does that together with the head.
            return self.append_long(header, name, size);
        }
        header.set_size(size);
        header.set_cksum();
        self.builder.get_mut().write_all(header.as_bytes()).map_err(broken)
    }

    fn append_long(&mut self, header: &mut Header, name: &Path, size: u64) -> Result<(), Error> {
        use std::os::unix::ffi::OsStrExt;
        let bytes = name.as_os_str().as_bytes();
        let mut long = Header::new_gnu();
        if let Some(gnu) = long.as_gnu_mut() {
            gnu.name[..13].copy_from_slice(b"././@LongLink");
        }
        long.set_mode(0o644);
        long.set_uid(0);
        long.set_gid(0);
        long.set_mtime(0);
        long.set_size(bytes.len() as u64 + 1);
        long.set_entry_type(EntryType::GNULongName);
        long.set_cksum();
        let ended = [bytes, &[0]].concat();
        self.builder.append(&long, ended.as_slice()).map_err(broken)?;
        let cut = &bytes[..bytes.len().min(99)];
        if let Some(gnu) = header.as_gnu_mut() {
            gnu.name[..cut.len()].copy_from_slice(cut);
        }
        header.set_size(size);
        header.set_cksum();
        self.builder.get_mut().write_all(header.as_bytes()).map_err(broken)
    }
}

/// Sends exactly `size` bytes. A file that became shorter ends the archive: nobody shall take what is not its content.
fn send_bytes(file: &mut File, output: &mut File, size: u64, path: &Path) -> Result<(), Error> {
    let mut left = size;
    while left > 0 {
        let want = usize::try_from(left).unwrap_or(usize::MAX).min(1 << 30);
        match sendfile(&*output, &*file, None, want) {
            Ok(0) => return Err(shorter(path)),
            Ok(len) => left -= len as u64,
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Some file systems cannot give their pages away.
            Err(Errno::INVAL | Errno::NOSYS) => return copy_bytes(file, output, left, path),
            Err(errno @ (Errno::PIPE | Errno::CONNRESET)) => return Err(broken(errno.into())),
            Err(errno) => return Err(Error::file("read", path)(errno.into())),
        }
    }
    Ok(())
}

fn copy_bytes(file: &mut File, output: &mut File, mut left: u64, path: &Path) -> Result<(), Error> {
    let mut buffer = vec![0; BUFFER];
    while left > 0 {
        let want = usize::try_from(left).unwrap_or(usize::MAX).min(BUFFER);
        let len = file.read(&mut buffer[..want]).map_err(Error::file("read", path))?;
        if len == 0 {
            return Err(shorter(path));
        }
        output.write_all(&buffer[..len]).map_err(broken)?;
        left -= len as u64;
    }
    Ok(())
}

fn shorter(path: &Path) -> Error {
    Error::Invalid(format!("{} became shorter while it was read: copy it again when nobody writes it", path.display()))
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}
