//! The bytes of one image into another file: only what is data, in pieces that some threads read and write at once, so that
//! both disks have something to do. Then the whole of the other file is read back from its disk, and must be what was read:
//! whoever copied which part of it, and also where it ought to have holes.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use kibo_crds::PoolId;
use rustix::fs::{Advice, fadvise};

use crate::pool::sparse::{Content, Data, Piece, data_bytes, runs};

/// Threads of a copy, and of its reading back. Each has a piece in memory.
const THREADS: usize = 4;

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

/// A copy from one open image to another one of the same size.
pub struct Copy<'a> {
    pub source: &'a File,
    pub target: &'a File,
    pub size: u64,
    pub progress: &'a Progress,
}

/// What of an image is under way, in its order.
struct Pieces<'a, F> {
    data: Data<'a>,
    /// Those from the first one on that is not copied yet; with its content one is.
    begun: VecDeque<(u64, Option<Content>)>,
    /// How many came before them.
    done: u64,
    tell: F,
}

impl<F: FnMut(u64, Content) -> Result<(), CopyError>> Pieces<'_, F> {
    /// Number, offset and length of the next piece.
    fn begin(&mut self) -> io::Result<Option<(u64, u64, usize)>> {
        let Some((offset, len)) = self.data.next()? else { return Ok(None) };
        let number = self.done + self.begun.len() as u64;
        self.begun.push_back((offset + len as u64, None));
        Ok(Some((number, offset, len)))
    }

    fn end(&mut self, number: u64, content: Content) -> Result<(), CopyError> {
        let at = usize::try_from(number - self.done).unwrap_or(usize::MAX);
        if let Some((_, copied)) = self.begun.get_mut(at) {
            *copied = Some(content);
        }
        while let Some((end, Some(content))) = self.begun.front().copied() {
            self.begun.pop_front();
            self.done += 1;
            (self.tell)(end, content)?;
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whoever panics ends the copy.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does the same on some threads, until one of them fails or all have ended well.
fn on_threads(work: impl Fn(&AtomicBool) -> Result<(), CopyError> + Sync) -> Result<(), CopyError> {
    let has_failed = AtomicBool::new(false);
    let watched = || {
        let done = work(&has_failed);
        has_failed.fetch_or(done.is_err(), Ordering::Relaxed);
        done
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(watched)).collect();
        let ended = threads.into_iter().map(|thread| thread.join().unwrap_or(Err(CopyError::Stopped)));
        ended.fold(Ok(()), Result::and)
    })
}

impl Copy<'_> {
    /// Copies what follows `from`. `done` is told up to which byte everything was written, in their order, and what has come
    /// to that since it was told last; it may take its time now and then. `may_go_on` is asked before each piece is read,
    /// and again before it is written.
    pub fn run(
        &self,
        from: u64,
        done: impl FnMut(u64, Content) -> Result<(), CopyError> + Send,
        may_go_on: impl Fn() -> Result<(), CopyError> + Sync,
    ) -> Result<(), CopyError> {
        let before = data_bytes(self.source, 0, self.size).map_err(CopyError::Read)?;
        let rest = data_bytes(self.source, from, self.size).map_err(CopyError::Read)?;
        self.progress.total.store(before, Ordering::Relaxed);
        self.progress.copied.store(before - rest, Ordering::Relaxed);
        let data = Data::of(self.source, from, self.size);
        let pieces = Mutex::new(Pieces { data, begun: VecDeque::new(), done: 0, tell: done });
        on_threads(|has_failed| {
            let mut piece = Piece::new();
            while !has_failed.load(Ordering::Relaxed) {
                may_go_on()?;
                let Some((number, offset, len)) = lock(&pieces).begin().map_err(CopyError::Read)? else { break };
                piece.len = len;
                self.source.read_exact_at(piece.bytes_mut(), offset).map_err(CopyError::Read)?;
                let content = Content::of(offset, piece.bytes());
                may_go_on()?;
                for (begin, end) in runs(piece.bytes()) {
                    let bytes = &piece.bytes()[begin..end];
                    self.target.write_all_at(bytes, offset + begin as u64).map_err(CopyError::Write)?;
                }
                self.progress.copied.fetch_add(len as u64, Ordering::Relaxed);
                lock(&pieces).end(number, content)?;
                kibo_failpoint::reach_blocking("move-copying");
            }
            Ok(())
        })
    }
}

/// Reads all of a copy from its disk, where it was synced, and compares it with what was read of the image. `may_go_on` is
/// asked before each piece.
pub fn verify(
    copy: &File,
    size: u64,
    expected: Content,
    may_go_on: impl Fn() -> Result<(), CopyError> + Sync,
) -> Result<(), CopyError> {
    // Where it cannot be dropped, the cache is what there is.
    let _ = fadvise(copy, 0, None, Advice::DontNeed);
    let (data, found) = (Mutex::new(Data::of(copy, 0, size)), Mutex::new(Content::default()));
    on_threads(|has_failed| {
        let (mut piece, mut content) = (Piece::new(), Content::default());
        while !has_failed.load(Ordering::Relaxed) {
            may_go_on()?;
            let Some((offset, len)) = lock(&data).next().map_err(CopyError::ReadBack)? else { break };
            piece.len = len;
            copy.read_exact_at(piece.bytes_mut(), offset).map_err(CopyError::ReadBack)?;
            content.add(Content::of(offset, piece.bytes()));
        }
        lock(&found).add(content);
        Ok(())
    })?;
    if *lock(&found) == expected { Ok(()) } else { Err(CopyError::Differs) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn file(dir: &tempfile::TempDir, name: &str, size: u64) -> File {
        let file = File::options().read(true).write(true).create_new(true).open(dir.path().join(name)).unwrap();
        file.set_len(size).unwrap();
        file
    }

    /// The ends of the pieces, and what was read.
    fn run(
        source: &File,
        target: &File,
        size: u64,
        from: u64,
        progress: &Progress,
    ) -> Result<(Vec<u64>, Content), CopyError> {
        let (mut done, mut content) = (Vec::new(), Content::default());
        let copy = Copy { source, target, size, progress };
        copy.run(
            from,
            |at, more| {
                done.push(at);
                content.add(more);
                Ok(())
            },
            || if progress.is_stopped() { Err(CopyError::Stopped) } else { Ok(()) },
        )?;
        Ok((done, content))
    }

    fn all(file: &File, size: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(size).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
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
        let (done, content) = run(&source, &target, size, 0, &progress).unwrap();
        assert!(all(&source, size) == all(&target, size));
        verify(&target, size, content, || Ok(())).unwrap();
        assert!(done.is_sorted() && done.last() == Some(&size), "{done:?}");
        assert_eq!(progress.copied(), progress.total());
        let occupied = target.metadata().unwrap().blocks() * 512;
        assert!(occupied < 11 * MIB, "{occupied} bytes: zeros were written");
    }

    #[test]
    fn what_was_done_is_not_done_again() {
        let dir = tempfile::tempdir().unwrap();
        let size = 16 * MIB;
        let (source, target) = (file(&dir, "source", size), file(&dir, "target", size));
        source.write_all_at(&vec![7; 16 << 20], 0).unwrap();
        let progress = Progress::default();
        run(&source, &target, size, 12 * MIB, &progress).unwrap();
        assert_eq!(progress.copied(), size);
        let copied = all(&target, size);
        assert!(copied[..12 << 20].iter().all(|byte| *byte == 0) && copied[12 << 20..].iter().all(|byte| *byte == 7));
    }

    #[test]
    fn a_stop_and_a_failure_end_it_with_their_reason() {
        let dir = tempfile::tempdir().unwrap();
        let size = 64 * MIB;
        let (source, target) = (file(&dir, "source", size), file(&dir, "target", size));
        source.write_all_at(&vec![7; 64 << 20], 0).unwrap();
        let stopped = Progress::default();
        stopped.stop();
        assert!(matches!(run(&source, &target, size, 0, &stopped), Err(CopyError::Stopped)));
        assert!(matches!(
            verify(&source, size, Content::default(), || Err(CopyError::Stopped)),
            Err(CopyError::Stopped)
        ));
        let read_only = File::open(dir.path().join("target")).unwrap();
        assert!(matches!(run(&source, &read_only, size, 0, &Progress::default()), Err(CopyError::Write(_))));
        let short = file(&dir, "short", MIB);
        let copy = Copy { source: &short, target: &target, size, progress: &stopped };
        assert!(copy.run(0, |_, _| Ok(()), || Ok(())).is_ok(), "there is no data in it");
    }

    #[test]
    fn damage_anywhere_in_the_copy_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let size = 16 * MIB;
        let (source, target) = (file(&dir, "source", size), file(&dir, "target", size));
        source.write_all_at(&vec![7; 2 << 20], 0).unwrap();
        let (_, content) = run(&source, &target, size, 0, &Progress::default()).unwrap();
        let is_whole = || verify(&target, size, content, || Ok(()));
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
