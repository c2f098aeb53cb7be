//! Takes an archive.
//!
//! A regular file appears under its name when it is complete, with its owner, mode and time; whatever ends the archive
//! early leaves no half of one. Nothing that an archive says leads out of its destination ([`super::destination`]).

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use kibo_guest_protocol::MAX_RUN;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, Timespec, Timestamps, UTIME_OMIT, Uid, chownat, fchmod, fchown, futimens, linkat,
    makedev, mkdirat, mknodat, symlinkat, utimensat,
};
use rustix::io::Errno;
use rustix::pipe::{SpliceFlags, splice};
use tar::{Archive, Entry, EntryType, Header};

use super::Error;
use super::destination::{Destination, Place, is_directory, replace};

/// What the pipe from the agent holds: each change between the two processes costs as much as many pages.
const BUFFER: usize = MAX_RUN;

/// The archive's bytes; knows whether they ended.
struct Input {
    file: File,
    is_at_end: bool,
    moved: Rc<Cell<u64>>,
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Whoever reads these wants to know where they end, and not what they are.
        let moved = usize::try_from(self.moved.get()).unwrap_or(usize::MAX).min(buffer.len());
        if moved > 0 {
            self.moved.set(self.moved.get() - moved as u64);
            return Ok(moved);
        }
        let len = self.file.read(buffer)?;
        self.is_at_end |= len == 0 && !buffer.is_empty();
        Ok(len)
    }
}

/// Owner, mode and time of an entry.
struct Attributes {
    owner: (u32, u32),
    mode: Mode,
    times: Timestamps,
}

struct Extraction {
    destination: Destination,
    /// The archive's bytes once more, for those that go from the pipe into a file without being read.
    pipe: File,
    /// How many of them did, and have still to be passed over in the archive.
    moved: Rc<Cell<u64>>,
    keep_owner: bool,
    buffer: Vec<u8>,
    /// A directory's time changes with what goes into it: it comes last.
    directories: Vec<(PathBuf, Timestamps)>,
}

/// Takes the archive from `input` to its end.
pub fn write(path: &Path, into_directory: bool, keep_owner: bool, input: File) -> Result<(), Error> {
    let destination = Destination::open(path, into_directory)?;
    let (pipe, moved) = (input.try_clone().map_err(unreadable)?, Rc::default());
    let (buffer, directories) = (vec![0; BUFFER], Vec::new());
    let mut extraction = Extraction { destination, pipe, moved, keep_owner, buffer, directories };
    let moved = extraction.moved.clone();
    let mut archive = Archive::new(Input { file: input, is_at_end: false, moved });
    let taken = extraction.take(&mut archive);
    // Also what was there before a cut gets the times that it should have.
    let timed = extraction.finish_directories();
    let mut input = archive.into_inner();
    if input.is_at_end {
        return Err(Error::Cut);
    }
    taken?;
    timed?;
    // Archives are padded beyond their end.
    while input.read(&mut extraction.buffer).map_err(unreadable)? > 0 {}
    Ok(())
}

fn unreadable(source: io::Error) -> Error {
    Error::Archive { what: "read", source }
}

impl Extraction {
    fn take(&mut self, archive: &mut Archive<Input>) -> Result<(), Error> {
        for entry in archive.entries().map_err(unreadable)? {
            self.take_entry(&mut entry.map_err(unreadable)?)?;
        }
        Ok(())
    }

    fn take_entry(&mut self, entry: &mut Entry<'_, Input>) -> Result<(), Error> {
        let kind = entry.header().entry_type();
        // What concerns the whole archive, not a file.
        if matches!(kind, EntryType::XGlobalHeader) {
            return Ok(());
        }
        let name = entry.path().map_err(unreadable)?.into_owned();
        let Some(place) = self.destination.place(&name, kind.is_dir())? else { return Ok(()) };
        let attributes = self.attributes(entry.header()).map_err(unreadable)?;
        match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => self.file(entry, &place, &attributes),
            EntryType::Directory => self.directory(&place, &attributes),
            EntryType::Symlink => {
                let target = link_target(entry, &place)?;
                self.node(&place, &attributes, |parent, name| symlinkat(&target, parent, name))
            }
            EntryType::Link => self.hard_link(entry, &place),
            EntryType::Fifo => self.device(&place, &attributes, FileType::Fifo, 0),
            EntryType::Char | EntryType::Block => {
                let header = entry.header();
                let number = |part: io::Result<Option<u32>>| part.map(Option::unwrap_or_default).map_err(unreadable);
                let device = makedev(number(header.device_major())?, number(header.device_minor())?);
                let kind = if kind == EntryType::Char { FileType::CharacterDevice } else { FileType::BlockDevice };
                self.device(&place, &attributes, kind, device)
            }
            other => Err(Error::Invalid(format!("{} is of a kind that is not known ({other:?})", name.display()))),
        }
    }

    fn attributes(&self, header: &Header) -> io::Result<Attributes> {
        let number = |id: u64| u32::try_from(id).map_err(|_| io::Error::other(format!("{id} is no user or group")));
        let owner = if self.keep_owner { (number(header.uid()?)?, number(header.gid()?)?) } else { (0, 0) };
        // What runs with its owner's rights shall not run with root's because it has become root's.
        let mode = header.mode()? & if self.keep_owner { 0o7777 } else { 0o1777 };
        let seconds = i64::try_from(header.mtime()?).unwrap_or(i64::MAX);
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec { tv_sec: seconds, tv_nsec: 0 },
        };
        Ok(Attributes { owner, mode: Mode::from_raw_mode(mode), times })
    }

    fn file(&mut self, entry: &mut Entry<'_, Input>, place: &Place, attributes: &Attributes) -> Result<(), Error> {
        let temporary = self.destination.temporary(place)?;
        let mut file = &temporary.file;
        // What a sparse file says of its holes is for the archive's reader alone.
        let is_plain = !matches!(entry.header().entry_type(), EntryType::GNUSparse);
        let mut moved = if is_plain { self.move_bytes(file, entry.size(), &place.path)? } else { 0 };
        let mut written: u64 = 0;
        loop {
            let len = entry.read(&mut self.buffer).map_err(unreadable)?;
            if len == 0 {
                break;
            }
            let here = usize::try_from(moved).unwrap_or(usize::MAX).min(len);
            moved -= here as u64;
            file.write_all(&self.buffer[here..len]).map_err(Error::file("write", &place.path))?;
            written += len as u64;
        }
        // The end of the archive in the middle of a file looks like the file's own end.
        if written != entry.size() {
            return Err(Error::Cut);
        }
        let (uid, gid) = ids(attributes);
        let dressed = fchown(file, uid, gid)
            .and_then(|()| fchmod(file, attributes.mode))
            .and_then(|()| futimens(file, &attributes.times));
        dressed.map_err(|errno| Error::file("set the owner, mode and time of", &place.path)(errno.into()))?;
        temporary.publish(place.name()).map_err(Error::file("write", &place.path))
    }

    /// Moves bytes of the archive into a file, which spares copying them twice. Gives how many; what is left is read.
    fn move_bytes(&self, file: &File, size: u64, path: &Path) -> Result<u64, Error> {
        let mut moved = 0;
        while moved < size {
            let want = usize::try_from(size - moved).unwrap_or(usize::MAX).min(BUFFER);
            match splice(&self.pipe, None, file, None, want, SpliceFlags::empty()) {
                // Some file systems take no pages.
                Ok(0) | Err(Errno::INVAL | Errno::NOSYS) => break,
                Ok(len) => moved += len as u64,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => return Err(Error::file("write", path)(errno.into())),
            }
        }
        self.moved.set(moved);
        Ok(moved)
    }

    /// One that is there already stays as it is.
    fn directory(&mut self, place: &Place, attributes: &Attributes) -> Result<(), Error> {
        let parent = self.destination.parent(place)?;
        let name = place.name();
        match mkdirat(parent, name, Mode::RWXU) {
            Ok(()) => {}
            Err(Errno::EXIST) if is_directory(parent, name) => return Ok(()),
            Err(Errno::EXIST) => {
                let message = format!("{} is there already and is no directory", place.path.display());
                return Err(Error::Invalid(message));
            }
            Err(errno) => return Err(Error::file("make the directory", &place.path)(errno.into())),
        }
        dress(parent, place, attributes)?;
        self.directories.push((place.relative.clone(), attributes.times.clone()));
        Ok(())
    }

    /// A link to a file of this archive, by the name that it has in the archive.
    fn hard_link(&mut self, entry: &Entry<'_, Input>, place: &Place) -> Result<(), Error> {
        let target = link_target(entry, place)?;
        let Some(target) = self.destination.place(&target, false)? else {
            return Err(Error::Invalid(format!("{} is a hard link to a directory", place.path.display())));
        };
        let of = self.destination.parent(&target)?.try_clone_to_owned().map_err(Error::file("open", &target.path))?;
        let spare = self.destination.spare_name();
        let parent = self.destination.parent(place)?;
        let failed = |error: io::Error| Error::file("make the link", &place.path)(error);
        linkat(&of, target.name(), parent, &spare, AtFlags::empty()).map_err(|errno| failed(errno.into()))?;
        replace(parent, &spare, place.name()).map_err(failed)?;
        // Two names of one file already: the kernel does nothing then, and the spare one is left.
        let _ = rustix::fs::unlinkat(parent, &spare, AtFlags::empty());
        Ok(())
    }

    fn device(&mut self, place: &Place, attributes: &Attributes, kind: FileType, device: u64) -> Result<(), Error> {
        self.node(place, attributes, |parent, name| mknodat(parent, name, kind, Mode::RUSR | Mode::WUSR, device))
    }

    /// Makes something that has no bytes, and puts it in place of what has its name.
    fn node(
        &mut self,
        place: &Place,
        attributes: &Attributes,
        make: impl FnOnce(BorrowedFd<'_>, &std::ffi::OsStr) -> Result<(), Errno>,
    ) -> Result<(), Error> {
        let spare = self.destination.spare_name();
        let parent = self.destination.parent(place)?;
        make(parent, &spare).map_err(|errno| Error::file("make", &place.path)(errno.into()))?;
        let spare_place = Place { relative: PathBuf::from(&spare), path: place.path.clone() };
        dress(parent, &spare_place, attributes).inspect_err(|_| {
            let _ = rustix::fs::unlinkat(parent, &spare, AtFlags::empty());
        })?;
        replace(parent, &spare, place.name()).map_err(Error::file("make", &place.path))
    }

    fn finish_directories(&mut self) -> Result<(), Error> {
        for (relative, times) in std::mem::take(&mut self.directories).into_iter().rev() {
            let place = Place { path: relative.clone(), relative };
            let parent = self.destination.parent(&place)?;
            match utimensat(parent, place.name(), &times, AtFlags::SYMLINK_NOFOLLOW) {
                // Somebody else removed it meanwhile.
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(Error::file("set the time of", place.path)(errno.into())),
            }
        }
        Ok(())
    }
}

/// Owner, mode and time of what has a name. A link has no mode of its own.
fn dress(parent: BorrowedFd<'_>, place: &Place, attributes: &Attributes) -> Result<(), Error> {
    let (uid, gid) = ids(attributes);
    let name = place.name();
    let is_link = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink);
    let dressed = chownat(parent, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
        .and_then(
            |()| if is_link { Ok(()) } else { rustix::fs::chmodat(parent, name, attributes.mode, AtFlags::empty()) },
        )
        .and_then(|()| utimensat(parent, name, &attributes.times, AtFlags::SYMLINK_NOFOLLOW));
    dressed.map_err(|errno| Error::file("set the owner, mode and time of", &place.path)(errno.into()))
}

fn ids(attributes: &Attributes) -> (Option<Uid>, Option<Gid>) {
    let (uid, gid) = attributes.owner;
    (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
}

fn link_target(entry: &Entry<'_, Input>, place: &Place) -> Result<PathBuf, Error> {
    let target = entry.link_name().map_err(unreadable)?;
    let missing = || Error::Invalid(format!("the link {} has no target in the archive", place.path.display()));
    Ok(target.ok_or_else(missing)?.into_owned())
}
