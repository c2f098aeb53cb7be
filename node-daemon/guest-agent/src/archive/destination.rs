//! Where an archive goes: names of its entries become places below one directory, and nothing gets out of it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, linkat, mkdirat, openat, openat2, renameat, statat, unlinkat,
};
use rustix::io::Errno;

use super::{Error, absolute};

pub struct Destination {
    base: OwnedFd,
    /// Of the base, for messages.
    path: PathBuf,
    top: Top,
    /// The directory that was used last.
    last: Option<(PathBuf, OwnedFd)>,
    temporaries: u32,
}

/// What the names begin with.
enum Top {
    /// Anything.
    Any,
    /// All the same, and it becomes `name`, or stays what it is.
    One { name: Option<OsString>, found: Option<OsString>, must_be_directory: bool },
}

/// A place for an entry: its directory, and its name there.
pub struct Place {
    /// Below the base; empty: the base itself.
    pub relative: PathBuf,
    /// For messages.
    pub path: PathBuf,
}

impl Place {
    pub fn name(&self) -> &OsStr {
        self.relative.file_name().unwrap_or_default()
    }
}

impl Destination {
    pub fn open(path: &Path, into_directory: bool) -> Result<Self, Error> {
        let must_be_directory = path.as_os_str().as_encoded_bytes().ends_with(b"/");
        let path = absolute(path)?;
        match open_directory(&path) {
            Ok(base) => {
                let one = Top::One { name: None, found: None, must_be_directory: false };
                Ok(Self::at(base, path, if into_directory { Top::Any } else { one }))
            }
            Err(Errno::NOENT) if into_directory => {
                Err(Error::NotFound { path, advice: "make the directory first, or leave the / at the end out" })
            }
            Err(Errno::NOTDIR) if into_directory => {
                Err(Error::Invalid(format!("{} is no directory: nothing can be put into it", path.display())))
            }
            Err(Errno::NOENT | Errno::NOTDIR) => Self::open_parent(&path, must_be_directory),
            Err(errno) => Err(Error::file("open", path)(errno.into())),
        }
    }

    /// The one entry gets the last part of `path` as its name.
    fn open_parent(path: &Path, must_be_directory: bool) -> Result<Self, Error> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Error::Invalid("the root directory cannot be replaced".to_owned()));
        };
        let base = open_directory(parent).map_err(|errno| match errno {
            Errno::NOENT => Error::NotFound { path: parent.to_owned(), advice: "make the directory first" },
            Errno::NOTDIR => Error::Invalid(format!("{} is no directory", parent.display())),
            errno => Error::file("open", parent)(errno.into()),
        })?;
        let top = Top::One { name: Some(name.to_owned()), found: None, must_be_directory };
        Ok(Self::at(base, parent.to_owned(), top))
    }

    fn at(base: OwnedFd, path: PathBuf, top: Top) -> Self {
        Self { base, path, top, last: None, temporaries: 0 }
    }

    /// The place of an entry; `None` for the directory that everything goes into.
    pub fn place(&mut self, name: &Path, is_directory: bool) -> Result<Option<Place>, Error> {
        let mut parts = Vec::new();
        for component in name.components() {
            match component {
                Component::CurDir => {}
                Component::Normal(part) => parts.push(part.to_owned()),
                Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                    return Err(leaves(name));
                }
            }
        }
        if let Top::One { name: becomes, found, must_be_directory } = &mut self.top {
            let Some(first) = parts.first_mut() else {
                return Err(Error::Invalid("the archive has no entry of a name of its own at its top".to_owned()));
            };
            if let Some(found) = found.as_ref().filter(|found| *found != first) {
                return Err(Error::Invalid(format!(
                    "the archive has more than one entry at its top, {} and {}: they need a directory to go into",
                    found.display(),
                    first.display()
                )));
            }
            found.get_or_insert_with(|| first.clone());
            if let Some(becomes) = becomes {
                first.clone_from(becomes);
            }
            if *must_be_directory && parts.len() == 1 && !is_directory {
                let path = self.path.join(&parts[0]);
                return Err(Error::NotFound {
                    path,
                    advice: "make the directory first, or leave the / at the end out",
                });
            }
        }
        if parts.is_empty() {
            return Ok(None);
        }
        let relative: PathBuf = parts.iter().collect();
        let path = self.path.join(&relative);
        Ok(Some(Place { relative, path }))
    }

    /// The directory of a place. Links are followed as long as they stay below the base.
    pub fn parent(&mut self, place: &Place) -> Result<BorrowedFd<'_>, Error> {
        let wanted = place.relative.parent().unwrap_or(Path::new(""));
        if wanted.as_os_str().is_empty() {
            return Ok(self.base.as_fd());
        }
        if self.last.as_ref().is_none_or(|(path, _)| path != wanted) {
            let opened = match self.open_beneath(wanted) {
                Err(Errno::NOENT) => self.make_beneath(wanted),
                opened => opened,
            };
            let opened = opened.map_err(|errno| match errno {
                Errno::XDEV => leaves(&place.path),
                errno => Error::file("open the directory of", &place.path)(errno.into()),
            })?;
            self.last = Some((wanted.to_owned(), opened));
        }
        Ok(self.last.as_ref().map_or(self.base.as_fd(), |(_, fd)| fd.as_fd()))
    }

    fn open_beneath(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat2(&self.base, path, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS)
    }

    /// Directories that the archive takes for granted.
    fn make_beneath(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let mut made = PathBuf::new();
        let mut parent = self.base.try_clone().map_err(|_| Errno::MFILE)?;
        for part in path.components() {
            made.push(part);
            parent = match self.open_beneath(&made) {
                Err(Errno::NOENT) => {
                    mkdirat(&parent, part.as_os_str(), Mode::from_raw_mode(0o755))?;
                    self.open_beneath(&made)?
                }
                opened => opened?,
            };
        }
        Ok(parent)
    }

    /// A file for the bytes of an entry, without a name where the file system can, else with one that goes away.
    pub fn temporary(&mut self, place: &Place) -> Result<Temporary, Error> {
        self.temporaries += 1;
        let name = format!(".kibo-{}-{}", rustix::process::getpid().as_raw_nonzero(), self.temporaries);
        let parent =
            self.parent(place)?.try_clone_to_owned().map_err(Error::file("open the directory of", &place.path))?;
        let mode = Mode::RUSR | Mode::WUSR;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let (fd, is_named) = match openat(&parent, ".", flags | OFlags::TMPFILE, mode) {
            Ok(fd) => (fd, false),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {
                let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
                let fd = openat(&parent, &name, flags, mode);
                (fd.map_err(|errno| Error::file("write", &place.path)(errno.into()))?, true)
            }
            Err(errno) => return Err(Error::file("write", &place.path)(errno.into())),
        };
        Ok(Temporary { file: File::from(fd), parent, name: OsString::from(name), is_named })
    }

    /// A name beside the place that is nobody's.
    pub fn spare_name(&mut self) -> OsString {
        self.temporaries += 1;
        format!(".kibo-{}-{}", rustix::process::getpid().as_raw_nonzero(), self.temporaries).into()
    }
}

fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

fn leaves(name: &Path) -> Error {
    Error::Invalid(format!(
        "{} leads out of the directory that the archive goes into: nothing of it is taken",
        name.display()
    ))
}

/// A file that is not complete. Dropped: gone.
pub struct Temporary {
    pub file: File,
    parent: OwnedFd,
    name: OsString,
    is_named: bool,
}

impl Temporary {
    /// Gives it its name, in place of what has that name now.
    pub fn publish(mut self, name: &OsStr) -> io::Result<()> {
        if !self.is_named {
            match linkat(&self.file, "", &self.parent, name, AtFlags::EMPTY_PATH) {
                Ok(()) => return Ok(()),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
            linkat(&self.file, "", &self.parent, &self.name, AtFlags::EMPTY_PATH)?;
            self.is_named = true;
        }
        replace(&self.parent, &self.name, name)?;
        self.is_named = false;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if self.is_named {
            let _ = unlinkat(&self.parent, &self.name, AtFlags::empty());
        }
    }
}

/// Renames within a directory; what cannot be renamed does not stay.
pub fn replace(parent: impl AsFd, from: &OsStr, to: &OsStr) -> io::Result<()> {
    let parent = parent.as_fd();
    renameat(parent, from, parent, to).inspect_err(|_| {
        let _ = unlinkat(parent, from, AtFlags::empty());
    })?;
    Ok(())
}

/// Whether a name is a directory's, without following a link.
pub fn is_directory(parent: impl AsFd, name: &OsStr) -> bool {
    statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}
