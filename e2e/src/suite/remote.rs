//! A pool on a network, as its clients see it: a FUSE file system over a directory. It caches names, missing names and
//! attributes for long, and can stop answering. Whoever uses the directory itself is another client of the same server.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, SessionACL, TimeOrNow, WriteFlags,
};

/// As of a server that has many requests in hand when it stops answering: who waits for one of those cannot be killed.
const THREADS: usize = 16;

/// So long the kernel believes what it was told of names, missing names and attributes.
const CACHED: Duration = Duration::from_secs(30);

/// Mounted; dropped, it is gone, and whoever waits for it gets an error.
pub struct Remote {
    served: PathBuf,
    mount: PathBuf,
    gate: Arc<Gate>,
    _session: BackgroundSession,
}

impl Remote {
    /// In a directory that is made for it.
    pub fn mount(directory: &Path) -> Result<Self> {
        let (served, mount) = (directory.join("served"), directory.join("mounted"));
        for made in [&served, &mount] {
            fs::create_dir_all(made).with_context(|| format!("failed to make {}", made.display()))?;
        }
        let gate = Arc::new(Gate::default());
        let server = Server { gate: gate.clone(), ..Server::new(served.clone()) };
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("kibo-e2e".to_owned())];
        config.acl = SessionACL::All;
        config.n_threads = Some(THREADS);
        let session = fuser::spawn_mount(server, &mount, &config).context("failed to mount a FUSE file system")?;
        Ok(Self { served, mount, gate, _session: session })
    }

    /// The pool as a client behind the network sees it.
    pub fn pool(&self) -> PathBuf {
        self.mount.join("pool")
    }

    /// The same pool without caches.
    pub fn pool_at_the_server(&self) -> PathBuf {
        self.served.join("pool")
    }

    /// Whether it does what it is made for: a name that was missing is missing, though somebody made it at the server.
    pub fn caches_names(&self) -> Result<()> {
        let name = "made-at-the-server";
        let (seen, made) = (self.pool().join(name), self.pool_at_the_server().join(name));
        ensure!(!seen.exists(), "{} is there", seen.display());
        File::create_new(&made)?;
        ensure!(!seen.exists(), "missing names are not cached");
        Ok(fs::remove_file(&made)?)
    }

    /// It answers nobody any more, and breaks nothing off.
    pub fn hang(&self) {
        self.gate.set(State::Hangs);
    }

    pub fn go_on(&self) {
        self.gate.set(State::Answers);
    }

    /// As after a forced unmount: whoever waits for it gets an error, and so does everybody who comes later.
    pub fn give_up(&self) {
        self.gate.set(State::Gone);
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.gate.set(State::Gone);
        // Lazily: a daemon that is being ended may still have files open.
        let unmounted = Command::new("umount").arg("--lazy").arg(&self.mount).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            eprintln!("failed to unmount {}", self.mount.display());
        }
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    Answers,
    Hangs,
    Gone,
}

#[derive(Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
    fn set(&self, state: State) {
        *lock(&self.state) = state;
        self.changed.notify_all();
    }

    /// Waits as long as it hangs.
    fn pass(&self) -> io::Result<()> {
        let hangs = |state: &mut State| *state == State::Hangs;
        let state = self.changed.wait_while(lock(&self.state), hangs).unwrap_or_else(PoisonError::into_inner);
        if *state == State::Gone { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves a directory.
struct Server {
    root: PathBuf,
    gate: Arc<Gate>,
    /// Where a file was seen; a link makes a second place.
    paths: Mutex<HashMap<u64, Vec<PathBuf>>>,
    open: Mutex<HashMap<u64, Arc<File>>>,
    next: AtomicU64,
}

impl Server {
    fn new(root: PathBuf) -> Self {
        let (paths, open) = (Mutex::default(), Mutex::default());
        Self { root, gate: Arc::default(), paths, open, next: AtomicU64::new(1) }
    }

    /// Does something once it answers.
    fn answer<T>(&self, act: impl FnOnce() -> io::Result<T>) -> Result<T, Errno> {
        self.gate.pass().and_then(|()| act()).map_err(Errno::from)
    }

    fn path(&self, ino: INodeNo) -> io::Result<PathBuf> {
        if ino == INodeNo::ROOT {
            return Ok(self.root.clone());
        }
        let is_it = |path: &&PathBuf| fs::symlink_metadata(path).is_ok_and(|found| found.ino() == ino.0);
        let paths = lock(&self.paths);
        paths.get(&ino.0).into_iter().flatten().find(is_it).cloned().ok_or(io::ErrorKind::NotFound.into())
    }

    fn child(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        Ok(self.path(parent)?.join(name))
    }

    fn note(&self, path: PathBuf) -> io::Result<FileAttr> {
        let found = fs::symlink_metadata(&path)?;
        let mut paths = lock(&self.paths);
        let known = paths.entry(found.ino()).or_default();
        if !known.contains(&path) {
            known.push(path);
        }
        Ok(attributes(&found))
    }

    fn keep(&self, file: File) -> FileHandle {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.open).insert(number, Arc::new(file));
        FileHandle(number)
    }

    fn file(&self, handle: FileHandle) -> io::Result<Arc<File>> {
        lock(&self.open).get(&handle.0).cloned().ok_or(io::Error::from_raw_os_error(9))
    }
}

fn attributes(found: &Metadata) -> FileAttr {
    let time = |seconds: i64| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.try_into().unwrap_or_default());
    FileAttr {
        ino: INodeNo(found.ino()),
        size: found.size(),
        blocks: found.blocks(),
        atime: time(found.atime()),
        mtime: time(found.mtime()),
        ctime: time(found.ctime()),
        crtime: time(found.ctime()),
        kind: FileType::from_std(found.file_type()).unwrap_or(FileType::RegularFile),
        perm: u16::try_from(found.permissions().mode() & 0o7777).unwrap_or_default(),
        nlink: u32::try_from(found.nlink()).unwrap_or_default(),
        uid: found.uid(),
        gid: found.gid(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn nothing() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: SystemTime::UNIX_EPOCH,
        mtime: SystemTime::UNIX_EPOCH,
        ctime: SystemTime::UNIX_EPOCH,
        crtime: SystemTime::UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn empty(result: Result<(), Errno>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

fn entry(result: Result<FileAttr, Errno>, reply: ReplyEntry) {
    match result {
        Ok(found) => reply.entry(&CACHED, &found, Generation(0)),
        Err(error) => reply.error(error),
    }
}

fn attr(result: Result<FileAttr, Errno>, reply: ReplyAttr) {
    match result {
        Ok(found) => reply.attr(&CACHED, &found),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for Server {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.answer(|| match self.note(self.child(parent, name)?) {
            // Told as an answer, a missing name is cached too.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(nothing()),
            found => found,
        });
        entry(found, reply);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.answer(|| {
            let found = match handle.and_then(|handle| self.file(handle).ok()) {
                Some(file) => file.metadata()?,
                None => fs::symlink_metadata(self.path(ino)?)?,
            };
            let attributes = attributes(&found);
            Ok(if ino == INodeNo::ROOT { FileAttr { ino, ..attributes } } else { attributes })
        });
        attr(found, reply);
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changed = self.answer(|| {
            let path = self.path(ino)?;
            if let Some(mode) = mode {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
            }
            if let Some(size) = size {
                OpenOptions::new().write(true).open(&path)?.set_len(size)?;
            }
            self.note(path)
        });
        attr(changed, reply);
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        let made = self.answer(|| {
            let path = self.child(parent, name)?;
            fs::DirBuilder::new().mode(mode).create(&path)?;
            self.note(path)
        });
        entry(made, reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        empty(self.answer(|| fs::remove_file(self.child(parent, name)?)), reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        empty(self.answer(|| fs::remove_dir(self.child(parent, name)?)), reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        to: INodeNo,
        new: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let renamed = self.answer(|| {
            let path = self.child(to, new)?;
            fs::rename(self.child(parent, name)?, &path)?;
            self.note(path).map(drop)
        });
        empty(renamed, reply);
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let linked = self.answer(|| {
            let path = self.child(parent, name)?;
            fs::hard_link(self.path(ino)?, &path)?;
            self.note(path)
        });
        entry(linked, reply);
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let writes = flags.0 & 0b11 != 0;
        let opened = self.answer(|| OpenOptions::new().read(true).write(writes).open(self.path(ino)?));
        match opened {
            Ok(file) => reply.opened(self.keep(file), FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn create(&self, _: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, flags: i32, reply: ReplyCreate) {
        const O_EXCL: i32 = 0o200;
        let created = self.answer(|| {
            let path = self.child(parent, name)?;
            let mut options = OpenOptions::new();
            options.read(true).write(true).mode(mode);
            if flags & O_EXCL == 0 {
                options.create(true)
            } else {
                options.create_new(true)
            };
            Ok((options.open(&path)?, self.note(path)?))
        });
        match created {
            Ok((file, found)) => reply.created(&CACHED, &found, Generation(0), self.keep(file), FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = self.answer(|| {
            let mut bytes = vec![0; size as usize];
            let file = self.file(handle)?;
            let mut done = 0;
            while done < bytes.len() {
                match file.read_at(&mut bytes[done..], offset + done as u64)? {
                    0 => break,
                    count => done += count,
                }
            }
            bytes.truncate(done);
            Ok(bytes)
        });
        match read {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.answer(|| self.file(handle)?.write_all_at(data, offset)) {
            Ok(()) => reply.written(u32::try_from(data.len()).unwrap_or_default()),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        empty(self.answer(|| Ok(())), reply);
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        lock(&self.open).remove(&handle.0);
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        empty(self.answer(|| self.file(handle)?.sync_data()), reply);
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        empty(self.answer(|| Ok(())), reply);
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let listed = self.answer(|| {
            let mut entries = Vec::new();
            for entry in fs::read_dir(self.path(ino)?)? {
                let entry = entry?;
                entries.push((entry.file_name(), entry.metadata()?.ino(), entry.file_type()?));
            }
            // The same order for each part of a long list.
            entries.sort_by(|a: &(std::ffi::OsString, u64, fs::FileType), b| a.0.cmp(&b.0));
            Ok(entries)
        });
        match listed {
            Ok(entries) => {
                for (index, (name, ino, kind)) in (1..).zip(entries).skip(usize::try_from(offset).unwrap_or_default()) {
                    let kind = FileType::from_std(kind).unwrap_or(FileType::RegularFile);
                    if reply.add(INodeNo(ino), index, kind, name) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(error) => reply.error(error),
        }
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        match self.answer(|| Ok(rustix::fs::statvfs(&self.root)?)) {
            Ok(space) => {
                let size = u32::try_from(space.f_frsize).unwrap_or(4096);
                reply.statfs(
                    space.f_blocks,
                    space.f_bfree,
                    space.f_bavail,
                    space.f_files,
                    space.f_ffree,
                    size,
                    255,
                    size,
                );
            }
            Err(error) => reply.error(error),
        }
    }
}
