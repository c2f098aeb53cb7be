//! The local directory that an archive goes into.
//!
//! Every name is opened from the directory above it and never through a symbolic link, so that no entry leaves the
//! destination, whatever the archive made before. Files and links are made under another name and renamed.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write as _},
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, chownat, fchmod, fchown, futimens, linkat,
        mkdirat, openat, renameat, statat, symlinkat, unlinkat, utimensat,
    },
    process::{geteuid, umask},
};

use super::{
    entry::{Attributes, Names},
    local,
};
use crate::errors::{Error, Kind, Result};

const BUFFER: usize = 128 * 1024;

/// Where a copy goes, as the command line says it.
#[derive(Debug, PartialEq, Eq)]
pub enum Spot {
    /// Into a directory that exists, under its own name.
    Into(PathBuf),
    /// What the source has in it comes into a directory, which is made when it is missing.
    Contents(PathBuf),
    /// Under this name in a directory that exists.
    As { directory: PathBuf, name: OsString, must_be: MustBe },
}

/// What the source must be to get the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MustBe {
    Anything,
    /// The destination ends in a slash and is missing.
    Directory,
    /// The destination is a file.
    File,
}

impl Spot {
    /// Looks what is there. Nothing is made yet: a copy that fails at once leaves nothing.
    pub fn find(to: &Path, contents: bool) -> Result<Self> {
        let there = match to.metadata() {
            Ok(there) => Some(there),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(local("cannot look at", to, &error)),
        };
        let is_directory = there.as_ref().map(std::fs::Metadata::is_dir);
        if contents {
            return match is_directory {
                Some(false) => Err(not_a_directory(to)),
                _ => Ok(Self::Contents(to.to_owned())),
            };
        }
        let (to, must_be) = match is_directory {
            Some(true) => return Ok(Self::Into(to.to_owned())),
            Some(false) => {
                let real = to.canonicalize().map_err(|error| local("cannot look at", to, &error))?;
                (real, MustBe::File)
            }
            None if to.as_os_str().as_encoded_bytes().ends_with(b"/") => (to.to_owned(), MustBe::Directory),
            None => (to.to_owned(), MustBe::Anything),
        };
        let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match parent.metadata() {
            Ok(parent) if parent.is_dir() => {}
            Ok(_) => return Err(not_a_directory(parent)),
            Err(error) => return Err(local("cannot copy into", parent, &error)),
        }
        let name = to.file_name().ok_or_else(|| not_a_directory(&to))?.to_owned();
        Ok(Self::As { directory: parent.to_owned(), name, must_be })
    }

    /// The directory that the names are below.
    pub fn directory(&self) -> &Path {
        match self {
            Self::Into(directory) | Self::Contents(directory) | Self::As { directory, .. } => directory,
        }
    }

    /// What the top of the archive is called here; none: nothing, only what is in it comes.
    pub fn name(&self, own: &OsStr) -> Option<OsString> {
        match self {
            Self::Into(_) => Some(own.to_owned()),
            Self::Contents(_) => None,
            Self::As { name, .. } => Some(name.clone()),
        }
    }

    /// Whether the source can be there.
    pub fn check(&self, is_directory: bool) -> Result<()> {
        match self {
            Self::As { directory, name, must_be: MustBe::File } if is_directory => {
                Err(not_a_directory(&directory.join(name)))
            }
            Self::As { directory, name, must_be: MustBe::Directory } if !is_directory => {
                let path = directory.join(name);
                Err(Error::new(Kind::NotFound, format!("no directory {:?} to copy into", path.display().to_string())))
            }
            Self::Contents(_) if !is_directory => {
                Err(Error::new(Kind::FailedPrecondition, "the source is not a directory: leave out /. at its end"))
            }
            _ => Ok(()),
        }
    }
}

fn not_a_directory(path: &Path) -> Error {
    Error::new(Kind::FailedPrecondition, format!("{:?} is not a directory", path.display().to_string()))
}

/// A directory and what is made below it.
pub struct Tree {
    path: PathBuf,
    root: OwnedFd,
    /// Modes and times are those of the archive.
    preserve: bool,
    /// Owners too: only root may give files away.
    gives_away: bool,
    umask: u32,
    /// The directory that the last entry was in.
    last: Option<(Names, OwnedFd)>,
    /// Those that were made here: they get their modes and times at the end, when nothing is made in them any more.
    made: Vec<(Names, Attributes)>,
}

impl Tree {
    pub fn open(path: &Path, preserve: bool) -> Result<Self> {
        let root = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let root = root.map_err(|error| local("cannot copy into", path, &error.into()))?;
        let mask = umask(Mode::empty());
        umask(mask);
        Ok(Self {
            path: path.to_owned(),
            root,
            preserve,
            gives_away: preserve && geteuid().is_root(),
            umask: mask.bits(),
            last: None,
            made: Vec::new(),
        })
    }

    pub fn path_of(&self, names: &Names) -> PathBuf {
        names.iter().fold(self.path.clone(), |path, name| path.join(name))
    }

    /// Makes a directory, unless it is there; one that is there is left as it is.
    pub fn directory(&mut self, names: &Names, attributes: Attributes) -> Result<()> {
        let Some((name, above)) = names.split_last() else { return Ok(()) };
        let path = self.path_of(names);
        let parent = self.parent(above)?;
        match mkdirat(&parent, name, Mode::RWXU) {
            Ok(()) => self.made.push((names.clone(), attributes)),
            Err(rustix::io::Errno::EXIST) => {
                let there = statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW);
                let there = there.map_err(|error| local("cannot look at", &path, &error.into()))?;
                if FileType::from_raw_mode(there.st_mode) != FileType::Directory {
                    self.last = Some((above.to_vec(), parent));
                    return Err(not_a_directory(&path));
                }
            }
            Err(error) => return Err(local("cannot make the directory", &path, &error.into())),
        }
        self.last = Some((above.to_vec(), parent));
        Ok(())
    }

    /// Writes a file; it has its name when it is complete. `content` fails with what is wrong with the archive.
    pub fn file(
        &mut self,
        names: &Names,
        attributes: Attributes,
        content: &mut dyn Read,
        size: u64,
    ) -> Result<(), Failure> {
        self.replace(names, |tree, parent, name| {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut file = File::from(openat(parent, name, flags, Mode::RUSR | Mode::WUSR).map_err(io::Error::from)?);
            let mut buffer = vec![0; BUFFER];
            let mut written = 0;
            loop {
                let length = content.read(&mut buffer).map_err(Failure::Archive)?;
                if length == 0 {
                    break;
                }
                file.write_all(&buffer[..length])?;
                written += length as u64;
            }
            if written != size {
                return Err(Failure::Archive(io::ErrorKind::UnexpectedEof.into()));
            }
            tree.dress(&file, attributes, false)?;
            Ok(())
        })
    }

    pub fn symbolic_link(&mut self, names: &Names, target: &Path, attributes: Attributes) -> Result<(), Failure> {
        self.replace(names, |tree, parent, name| {
            symlinkat(target, parent, name).map_err(io::Error::from)?;
            if tree.gives_away {
                let (uid, gid) = owner(attributes)?;
                chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).map_err(io::Error::from)?;
            }
            if tree.preserve {
                let times = times(attributes);
                utimensat(parent, name, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(io::Error::from)?;
            }
            Ok(())
        })
    }

    /// Another name for a file that came before.
    pub fn hard_link(&mut self, names: &Names, to: &Names) -> Result<(), Failure> {
        let path = self.path_of(to);
        let (name, above) = to.split_last().ok_or_else(|| not_a_directory(&path))?;
        let directory = self.parent(above)?;
        let there = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW);
        let there = there.map_err(|error| local("cannot link to", &path, &error.into()))?;
        if FileType::from_raw_mode(there.st_mode) != FileType::RegularFile {
            let message = format!("cannot link to {:?}: it is not a file", path.display().to_string());
            return Err(Error::new(Kind::FailedPrecondition, message).into());
        }
        self.replace(names, |_, parent, new| {
            Ok(linkat(&directory, name, parent, new, AtFlags::empty()).map_err(io::Error::from)?)
        })
    }

    /// Gives the directories that were made their modes, owners and times.
    pub fn finish(mut self) -> Result<()> {
        for (names, attributes) in std::mem::take(&mut self.made).into_iter().rev() {
            let directory = self.parent(&names)?;
            let dressed = self.dress(&directory, attributes, true);
            dressed.map_err(|error| local("cannot set the attributes of", &self.path_of(&names), &error))?;
        }
        Ok(())
    }

    /// Makes something under another name, and gives it its own when that has succeeded.
    fn replace(
        &mut self,
        names: &Names,
        make: impl FnOnce(&Self, &OwnedFd, &OsStr) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let path = self.path_of(names);
        let (name, above) = names.split_last().ok_or_else(|| not_a_directory(&path))?;
        let parent = self.parent(above)?;
        let temporary = Temporary::new(&parent);
        let made = make(self, &parent, &temporary.name).and_then(|()| {
            renameat(&parent, &temporary.name, &parent, name).map_err(|error| Failure::Io(error.into()))
        });
        drop(temporary);
        self.last = Some((above.to_vec(), parent));
        made.map_err(|failure| match failure {
            Failure::Io(error) => Failure::Local(local("cannot write", &path, &error)),
            other => other,
        })
    }

    /// Opens a directory below the root, name by name; missing ones are made.
    fn parent(&mut self, names: &[OsString]) -> Result<OwnedFd> {
        if let Some((of, directory)) = self.last.take_if(|(of, _)| of == names) {
            drop(of);
            return Ok(directory);
        }
        let path = || names.iter().fold(self.path.clone(), |path, name| path.join(name));
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut directory = self.root.try_clone().map_err(|error| local("cannot open", &self.path, &error))?;
        for name in names {
            let mut opened = openat(&directory, name, flags, Mode::empty());
            if matches!(opened, Err(rustix::io::Errno::NOENT)) {
                let mode = Mode::from_raw_mode(0o777 & !self.umask);
                mkdirat(&directory, name, mode).map_err(|error| local("cannot make", &path(), &error.into()))?;
                opened = openat(&directory, name, flags, Mode::empty());
            }
            directory = opened.map_err(|error| match error {
                rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP => Error::new(
                    Kind::FailedPrecondition,
                    format!(
                        "{:?} leads through {:?}, which is a link or a file: nothing is written there",
                        path().display().to_string(),
                        name.display().to_string()
                    ),
                ),
                error => local("cannot open", &path(), &error.into()),
            })?;
        }
        Ok(directory)
    }

    fn dress(&self, file: impl std::os::fd::AsFd, attributes: Attributes, is_directory: bool) -> io::Result<()> {
        let file = file.as_fd();
        if self.gives_away {
            let (uid, gid) = owner(attributes)?;
            fchown(file, Some(uid), Some(gid))?;
        }
        // A guest may not put a program with somebody's rights on this host.
        let allowed = if is_directory { 0o1777 } else { 0o777 };
        let kept = if self.preserve { allowed } else { 0o777 & !self.umask };
        fchmod(file, Mode::from_raw_mode(attributes.mode & kept))?;
        if self.preserve {
            futimens(file, &times(attributes))?;
        }
        Ok(())
    }
}

fn owner(attributes: Attributes) -> io::Result<(Uid, Gid)> {
    let number = |id: u64| u32::try_from(id).map_err(|_| io::Error::other(format!("{id} is no owner")));
    Ok((Uid::from_raw(number(attributes.uid)?), Gid::from_raw(number(attributes.gid)?)))
}

fn times(attributes: Attributes) -> Timestamps {
    let seconds = i64::try_from(attributes.modified).unwrap_or(i64::MAX);
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

/// Why something is not there.
#[derive(Debug)]
pub enum Failure {
    /// The archive cannot be read on.
    Archive(io::Error),
    Local(Error),
    /// Not yet said on what.
    Io(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Local(error)
    }
}

/// A name that is not there any more when this is dropped, whatever happened meanwhile.
struct Temporary<'a> {
    directory: &'a OwnedFd,
    name: OsString,
}

impl<'a> Temporary<'a> {
    fn new(directory: &'a OwnedFd) -> Self {
        Self { directory, name: format!(".kibo-{:016x}.part", rand::random::<u64>()).into() }
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        // After a rename there is none; only two names of one file leave both.
        let _ = unlinkat(self.directory.as_fd(), &self.name, AtFlags::empty());
    }
}

#[cfg(test)]
#[path = "destination_tests.rs"]
mod tests;
