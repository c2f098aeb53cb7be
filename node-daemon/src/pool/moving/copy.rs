//! The bytes of one image into another file: only what is data, in pieces that some threads read and write at once, so that
//! both disks have something to do. What was written is made durable again and again, and only then read back from its disk
//! while what follows is still being copied ([`line`]). In the end the whole of the other file must be what was read: whoever
//! copied which part of it, and also where it ought to have holes.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use kibo_crds::PoolId;
use rustix::fs::{Advice, fadvise};

use super::line::{Line, Mark};
use crate::pool::sparse::{Content, Piece, data_bytes, runs};

/// Threads that copy, and that read back. Each has a piece in memory.
const COPIERS: usize = 4;
const READERS: usize = 4;

/// How far a move has come, for whoever looks on, and the order to stop.
#[derive(Debug, Default)]
pub struct Progress {
    copied: AtomicU64,
    total: AtomicU64,
    stop: AtomicBool,
    awaited: Mutex<Option<String>>,
}

impl Progress {
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// The copy ends as soon as what is under way returns.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// For people: what it does or waits for while nothing is copied.
    pub fn waits_for(&self, what: Option<String>) {
        *lock(&self.awaited) = what;
    }

    pub fn awaited(&self) -> Option<String> {
        lock(&self.awaited).clone()
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error("failed to read the image: {0}")]
    Read(io::Error),
    #[error("failed to write the copy: {0}")]
    Write(io::Error),
    #[error("failed to read the copy back: {0}")]
    ReadBack(io::Error),
    #[error(
        "the copy that was read back from its disk is not what was read from the image: one of the disks is damaged"
    )]
    Differs,
    #[error("it was stopped")]
    Stopped,
    #[error("storage pool {0} was declared lost")]
    Lost(PoolId),
}

/// A copy from one open image to another one of the same size, which can be read too.
pub struct Copy<'a> {
    pub source: &'a File,
    pub target: &'a File,
    pub size: u64,
    pub progress: &'a Progress,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whoever panics ends the copy.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Copy<'_> {
    /// Copies what follows a mark, up to which an earlier one came, and compares all of the copy with what was read of the
    /// image. `durable` is told up to where the copy is on its disk, now and then and at last for all of it; it may take its
    /// time. `may_go_on` is asked before anything is read, written or made durable.
    pub fn run(
        &self,
        from: Mark,
        durable: impl FnMut(Mark) -> Result<(), CopyError>,
        may_go_on: impl Fn() -> Result<(), CopyError> + Sync,
    ) -> Result<(), CopyError> {
        let before = data_bytes(self.source, 0, self.size).map_err(CopyError::Read)?;
        let rest = data_bytes(self.source, from.at, self.size).map_err(CopyError::Read)?;
        self.progress.total.store(before, Ordering::Relaxed);
        self.progress.copied.store(before - rest, Ordering::Relaxed);
        self.forget();
        let device = |file: &File| file.metadata().map(|metadata| metadata.dev());
        let is_one_disk =
            device(self.source).map_err(CopyError::Read)? == device(self.target).map_err(CopyError::Write)?;
        let line = Line::new(self.source, self.target, self.size, from, is_one_disk);
        let copied = || line.unless_it_fails(|| self.copy(&line, &may_go_on));
        let read = || line.unless_it_fails(|| self.read_back(&line, &may_go_on));
        thread::scope(|scope| {
            let copiers = (0..COPIERS).map(|_| scope.spawn(copied));
            let threads: Vec<_> = copiers.chain((0..READERS).map(|_| scope.spawn(read))).collect();
            let synced = line.unless_it_fails(|| self.make_durable(&line, durable, &may_go_on));
            let ended = threads.into_iter().map(|thread| thread.join().unwrap_or(Err(CopyError::Stopped)));
            ended.fold(synced, Result::and)
        })?;
        if line.is_the_same() { Ok(()) } else { Err(CopyError::Differs) }
    }

    fn copy(&self, line: &Line<'_>, may_go_on: impl Fn() -> Result<(), CopyError>) -> Result<(), CopyError> {
        let mut piece = Piece::new();
        while let Some((number, offset, len)) = line.begin().map_err(CopyError::Read)? {
            may_go_on()?;
            piece.len = len;
            self.source.read_exact_at(piece.bytes_mut(), offset).map_err(CopyError::Read)?;
            let content = Content::of(offset, piece.bytes());
            may_go_on()?;
            for (begin, end) in runs(piece.bytes()) {
                let bytes = &piece.bytes()[begin..end];
                self.target.write_all_at(bytes, offset + begin as u64).map_err(CopyError::Write)?;
            }
            self.progress.copied.fetch_add(len as u64, Ordering::Relaxed);
            kibo_failpoint::reach_blocking("move-copying");
            line.end(number, len, content);
        }
        Ok(())
    }

    fn make_durable(
        &self,
        line: &Line<'_>,
        mut durable: impl FnMut(Mark) -> Result<(), CopyError>,
        may_go_on: impl Fn() -> Result<(), CopyError>,
    ) -> Result<(), CopyError> {
        while let Some(written) = line.to_sync() {
            may_go_on()?;
            let is_whole = written.at == self.size;
            let synced = if is_whole { self.target.sync_all() } else { self.target.sync_data() };
            synced.map_err(CopyError::Write)?;
            self.forget();
            line.is_durable(written);
            durable(written)?;
        }
        Ok(())
    }

    fn read_back(&self, line: &Line<'_>, may_go_on: impl Fn() -> Result<(), CopyError>) -> Result<(), CopyError> {
        let mut piece = Piece::new();
        while let Some((offset, len)) = line.to_read().map_err(CopyError::ReadBack)? {
            may_go_on()?;
            piece.len = len;
            self.target.read_exact_at(piece.bytes_mut(), offset).map_err(CopyError::ReadBack)?;
            line.was_read(Content::of(offset, piece.bytes()));
        }
        Ok(())
    }

    /// What is read back must come from the disk. Where there is no direct I/O, what was synced can be dropped from the cache;
    /// where not even that, the cache is what there is.
    fn forget(&self) {
        let _ = fadvise(self.target, 0, None, Advice::DontNeed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn file(dir: &tempfile::TempDir, name: &str, size: u64) -> File {
        let file = File::options().read(true).write(true).create_new(true).open(dir.path().join(name)).unwrap();
        file.set_len(size).unwrap();
        file
    }

    /// What was told to be durable.
    fn run(source: &File, target: &File, size: u64, from: Mark, progress: &Progress) -> Result<Vec<Mark>, CopyError> {
        let mut durable = Vec::new();
        let copy = Copy { source, target, size, progress };
        copy.run(
            from,
            |mark| {
                durable.push(mark);
                Ok(())
            },
            || if progress.is_stopped() { Err(CopyError::Stopped) } else { Ok(()) },
        )?;
        Ok(durable)
    }

    fn all(file: &File, size: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(size).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// As an earlier daemon left it.
    fn mark(source: &File, at: u64) -> Mark {
        Mark { at, content: Content::of(0, &all(source, at)) }
    }

    #[test]
    fn data_is_copied_and_holes_and_zeros_stay_holes() {
        let dir = tempfile::tempdir().unwrap();
        let size = 64 * MIB;
        let (source, target) = (file(&dir, "source", size), file(&dir, "target", size));
        source.write_all_at(&[1; 100], 0).unwrap();
        source.write_all_at(&vec![2; 9 << 20], 20 * MIB + 4096).unwrap();
        source.write_all_at(&vec![0; 8 << 20], 40 * MIB).unwrap();
        source.write_all_at(&[3; 1], size - 1).unwrap();
        let progress = Progress::default();
        let durable = run(&source, &target, size, Mark::default(), &progress).unwrap();
        assert!(all(&source, size) == all(&target, size));
        assert_eq!(durable.last(), Some(&mark(&source, size)));
        assert_eq!(progress.copied(), progress.total());
        let occupied = target.metadata().unwrap().blocks() * 512;
        assert!(occupied < 11 * MIB, "{occupied} bytes: zeros were written");
    }

    #[test]
    fn between_two_disks_much_is_read_back_while_the_rest_is_copied() {
        let dir = tempfile::tempdir().unwrap();
        let size = 160 * MIB;
        let (source, target) = (file(&dir, "source", size), file(&dir, "target", size));
        source.write_all_at(&vec![7; 160 << 20], 0).unwrap();
        target.write_all_at(&vec![7; 160 << 20], 0).unwrap();
        let line = Line::new(&source, &target, size, Mark::default(), false);
        let mut durable = Vec::new();
        while let Some((number, _, len)) = line.begin().unwrap() {
            line.end(number, len, Content::default());
            if number == 100 {
                let mark = line.to_sync().unwrap();
                durable.push(mark.at);
                line.is_durable(mark);
                assert_eq!(line.to_read().unwrap().map(|(at, _)| at), Some(0));
            }
        }
        durable.extend(line.to_sync().map(|mark| mark.at));
        assert_eq!(durable, [101 * MIB, size]);
    }

    #[test]
    fn what_was_done_is_not_done_again_and_still_compared() {
        let dir = tempfile::tempdir().unwrap();
        let size = 16 * MIB;
        let (source, target) = (file(&dir, "source", size), file(&dir, "target", size));
        source.write_all_at(&vec![7; 16 << 20], 0).unwrap();
        let before = Mark { at: 12 * MIB, content: Content::default() };
        let progress = Progress::default();
        // By its mark nothing but zeros was there.
        run(&source, &target, size, before, &progress).unwrap();
        assert_eq!(progress.copied(), size);
        let copied = all(&target, size);
        assert!(copied[..12 << 20].iter().all(|byte| *byte == 0) && copied[12 << 20..].iter().all(|byte| *byte == 7));
        for at in [12 * MIB, size] {
            let result = run(&source, &target, size, mark(&source, at), &progress);
            assert!(matches!(result, Err(CopyError::Differs)), "{result:?}");
        }
    }

    #[test]
    fn a_stop_and_a_failure_end_it_with_their_reason() {
        let dir = tempfile::tempdir().unwrap();
        let size = 64 * MIB;
        let (source, target) = (file(&dir, "source", size), file(&dir, "target", size));
        source.write_all_at(&vec![7; 64 << 20], 0).unwrap();
        let (none, stopped) = (Mark::default(), Progress::default());
        stopped.stop();
        assert!(matches!(run(&source, &target, size, none, &stopped), Err(CopyError::Stopped)));
        let read_only = File::open(dir.path().join("target")).unwrap();
        assert!(matches!(run(&source, &read_only, size, none, &Progress::default()), Err(CopyError::Write(_))));
        let write_only = File::options().write(true).open(dir.path().join("target")).unwrap();
        assert!(matches!(run(&source, &write_only, size, none, &Progress::default()), Err(CopyError::ReadBack(_))));
        let noted = |_| Err(CopyError::Write(io::ErrorKind::StorageFull.into()));
        let copy = Copy { source: &source, target: &target, size, progress: &stopped };
        assert!(matches!(copy.run(none, noted, || Ok(())), Err(CopyError::Write(_))));
    }

    #[test]
    fn damage_anywhere_in_the_copy_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let size = 16 * MIB;
        let (source, target) = (file(&dir, "source", size), file(&dir, "target", size));
        source.write_all_at(&vec![7; 2 << 20], 0).unwrap();
        run(&source, &target, size, Mark::default(), &Progress::default()).unwrap();
        let whole = mark(&source, size);
        let is_whole = || run(&source, &target, size, whole, &Progress::default());
        is_whole().unwrap();
        for at in [5, 8 * MIB, size - 1] {
            let mut byte = [0];
            target.read_exact_at(&mut byte, at).unwrap();
            target.write_all_at(&[byte[0] ^ 4], at).unwrap();
            assert!(matches!(is_whole(), Err(CopyError::Differs)), "at {at}");
            target.write_all_at(&byte, at).unwrap();
            is_whole().unwrap();
        }
    }
}
