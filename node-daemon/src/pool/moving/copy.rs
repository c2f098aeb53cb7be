//! The bytes of one image into another file: only what is data, in pieces that are read, written and read back at the
//! same time by three threads. A piece counts once it was read back from the target and is the same.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    sync::{
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

use kibo_crds::PoolId;
use rustix::fs::{Advice, SeekFrom, fadvise, seek};

/// Direct I/O wants addresses, offsets and lengths in whole blocks.
const BLOCK: usize = 4096;
/// Zeros of this length stay holes.
const SPARSE: usize = 64 << 10;
pub const PIECE: usize = 1 << 20;
/// Pieces on their way: one is read, one written, one compared, and each may be ahead by one.
const PIECES: usize = 6;

static ZEROS: [u8; SPARSE] = [0; SPARSE];

/// How far a move has come, for whoever looks on, and the order to stop.
#[derive(Debug, Default)]
pub struct Progress {
    copied: AtomicU64,
    total: AtomicU64,
    stop: AtomicBool,
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
}

#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error("failed to read the image: {0}")]
    Read(io::Error),
    #[error("failed to write the copy: {0}")]
    Write(io::Error),
    #[error("failed to read the copy back: {0}")]
    ReadBack(io::Error),
    #[error("what was read back at byte {0} of the copy is not what was written: its disk is damaged")]
    Differs(u64),
    #[error("it was stopped")]
    Stopped,
    #[error("storage pool {0} was declared lost")]
    Lost(PoolId),
}

/// A copy from one open image to another one of the same size.
pub struct Copy<'a> {
    pub source: &'a File,
    pub target: &'a File,
    /// The target bypasses the page cache, so that what is read back comes from its disk.
    pub target_is_direct: bool,
    pub size: u64,
    pub progress: &'a Progress,
}

/// A part of the image in memory, at an address for direct I/O.
pub struct Piece {
    memory: Vec<u8>,
    at: usize,
    pub len: usize,
    offset: u64,
}

impl Piece {
    pub fn new() -> Self {
        let memory = vec![0; PIECE + BLOCK];
        let at = memory.as_ptr().align_offset(BLOCK);
        Self { memory, at, len: 0, offset: 0 }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.at..self.at + self.len]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.at..self.at + self.len]
    }

    fn end(&self) -> u64 {
        self.offset + self.len as u64
    }
}

/// The next data at or after an offset, in whole blocks; `None`: only holes follow.
pub fn next_data(file: &File, from: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    if from >= size {
        return Ok(None);
    }
    let begin = match seek(file, SeekFrom::Data(from)) {
        Ok(begin) if begin < size => begin,
        Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let end = seek(file, SeekFrom::Hole(begin))?.min(size);
    let block = BLOCK as u64;
    let begin = (begin / block * block).max(from);
    Ok(Some((begin, end.div_ceil(block).saturating_mul(block).min(size))))
}

/// How much of a file is data, from an offset on.
pub fn data_bytes(file: &File, from: u64, size: u64) -> io::Result<u64> {
    let (mut at, mut sum) = (from, 0);
    while let Some((begin, end)) = next_data(file, at, size)? {
        sum += end - begin;
        at = end;
    }
    Ok(sum)
}

/// The parts of a piece that are not all zeros.
pub fn runs(bytes: &[u8]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (number, part) in bytes.chunks(SPARSE).enumerate() {
        let (begin, end) = (number * SPARSE, number * SPARSE + part.len());
        match runs.last_mut() {
            _ if *part == ZEROS[..part.len()] => {}
            Some(last) if last.1 == begin => last.1 = end,
            _ => runs.push((begin, end)),
        }
    }
    runs
}

impl Copy<'_> {
    /// Copies what follows `from`. `done` is told up to which byte everything was compared; it may take its time now and
    /// then. `may_go_on` is asked before each piece is read, and again before it is written.
    pub fn run(
        &self,
        from: u64,
        mut done: impl FnMut(u64) -> Result<(), CopyError>,
        may_go_on: impl Fn() -> Result<(), CopyError> + Sync,
    ) -> Result<(), CopyError> {
        let before = data_bytes(self.source, 0, self.size).map_err(CopyError::Read)?;
        let rest = data_bytes(self.source, from, self.size).map_err(CopyError::Read)?;
        self.progress.total.store(before, Ordering::Relaxed);
        self.progress.copied.store(before - rest, Ordering::Relaxed);
        let (free, blank) = sync_channel(PIECES);
        for _ in 0..PIECES {
            // It has room for all of them.
            let _ = free.send(Piece::new());
        }
        let (read, to_write) = sync_channel(1);
        let (written, to_compare) = sync_channel(1);
        thread::scope(|scope| {
            let may_go_on = &may_go_on;
            let reader = scope.spawn(move || self.read(from, &blank, &read, may_go_on));
            let writer = scope.spawn(move || self.write(&to_write, &written, may_go_on));
            let compared = self.compare(&to_compare, &free, &mut done);
            // Whoever waits for one of the others hears that it is gone.
            drop((to_compare, free));
            let ended = |thread: thread::ScopedJoinHandle<'_, Result<(), CopyError>>| {
                thread.join().unwrap_or(Err(CopyError::Stopped))
            };
            compared.and(ended(writer)).and(ended(reader))
        })
    }

    fn read(
        &self,
        from: u64,
        blank: &Receiver<Piece>,
        read: &SyncSender<Piece>,
        may_go_on: &impl Fn() -> Result<(), CopyError>,
    ) -> Result<(), CopyError> {
        let mut at = from;
        while let Some((begin, end)) = next_data(self.source, at, self.size).map_err(CopyError::Read)? {
            at = begin;
            while at < end {
                may_go_on()?;
                // Without it, another thread has failed and says why.
                let Ok(mut piece) = blank.recv() else { return Ok(()) };
                piece.offset = at;
                piece.len = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
                self.source.read_exact_at(piece.bytes_mut(), at).map_err(CopyError::Read)?;
                at = piece.end();
                if read.send(piece).is_err() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn write(
        &self,
        to_write: &Receiver<Piece>,
        written: &SyncSender<Piece>,
        may_go_on: &impl Fn() -> Result<(), CopyError>,
    ) -> Result<(), CopyError> {
        for piece in to_write {
            may_go_on()?;
            for (begin, end) in runs(piece.bytes()) {
                let bytes = &piece.bytes()[begin..end];
                self.target.write_all_at(bytes, piece.offset + begin as u64).map_err(CopyError::Write)?;
            }
            if written.send(piece).is_err() {
                break;
            }
        }
        Ok(())
    }

    fn compare(
        &self,
        to_compare: &Receiver<Piece>,
        free: &SyncSender<Piece>,
        done: &mut impl FnMut(u64) -> Result<(), CopyError>,
    ) -> Result<(), CopyError> {
        let mut found = Piece::new();
        for piece in to_compare {
            if !self.target_is_direct {
                self.drop_from_cache(&piece)?;
            }
            found.len = piece.len;
            self.target.read_exact_at(found.bytes_mut(), piece.offset).map_err(CopyError::ReadBack)?;
            if found.bytes() != piece.bytes() {
                return Err(CopyError::Differs(piece.offset));
            }
            self.progress.copied.fetch_add(piece.len as u64, Ordering::Relaxed);
            done(piece.end())?;
            kibo_failpoint::reach_blocking("move-copying");
            // The reader may have had its last one.
            let _ = free.send(piece);
        }
        Ok(())
    }

    fn drop_from_cache(&self, piece: &Piece) -> Result<(), CopyError> {
        self.target.sync_data().map_err(CopyError::Write)?;
        let len = std::num::NonZeroU64::new(piece.len as u64);
        // Where it cannot be dropped, the cache is what there is.
        let _ = fadvise(self.target, piece.offset, len, Advice::DontNeed);
        Ok(())
    }
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

    fn run(source: &File, target: &File, size: u64, from: u64, progress: &Progress) -> Result<Vec<u64>, CopyError> {
        let mut done = Vec::new();
        let copy = Copy { source, target, target_is_direct: false, size, progress };
        copy.run(
            from,
            |at| {
                done.push(at);
                Ok(())
            },
            || if progress.is_stopped() { Err(CopyError::Stopped) } else { Ok(()) },
        )?;
        Ok(done)
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
        let done = run(&source, &target, size, 0, &progress).unwrap();
        assert!(all(&source, size) == all(&target, size));
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
        let read_only = File::open(dir.path().join("target")).unwrap();
        assert!(matches!(run(&source, &read_only, size, 0, &Progress::default()), Err(CopyError::Write(_))));
        let short = file(&dir, "short", MIB);
        let copy = Copy { source: &short, target: &target, target_is_direct: false, size, progress: &stopped };
        assert!(copy.run(0, |_| Ok(()), || Ok(())).is_ok(), "there is no data in it");
    }

    #[test]
    fn damage_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let size = 16 * MIB;
        let (source, target) = (file(&dir, "source", size), file(&dir, "target", size));
        source.write_all_at(&vec![7; 16 << 20], 0).unwrap();
        // What lies in the target where the source has zeros was not written by the copy.
        source.write_all_at(&vec![0; 1 << 20], 8 * MIB).unwrap();
        target.write_all_at(&[1], 8 * MIB + 5).unwrap();
        assert!(
            matches!(run(&source, &target, size, 0, &Progress::default()), Err(CopyError::Differs(at)) if at == 8 * MIB)
        );
    }
}
