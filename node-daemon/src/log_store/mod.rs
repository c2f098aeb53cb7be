//! What the entrypoints printed: kept on the host, per Workspace, bounded.
//!
//! A log outlives its Instance and the daemon; the oldest part goes when there is too much. What the daemon stored and
//! acknowledged, the guest forgets, so a piece is written before it counts; it is not synced to the disk, since a host
//! that loses its page cache loses the guest as well.

mod lines;
mod segment;

use std::{
    collections::{HashMap, VecDeque},
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use futures::{Stream, stream};
use kibo_crds::{InstanceId, ObjectUid};
use kibo_guest_protocol::v1;
use tokio::sync::watch;

use crate::{guest::LogSink, instance::LogChunk};
use lines::Lines;
use segment::{LastLines, Record, Segment, read_from};

pub use lines::Wanted;

/// How much is kept of each Workspace.
#[derive(Clone, Copy, Debug)]
pub struct LogBounds {
    pub segment_bytes: u64,
    pub segments: usize,
    /// Of a Workspace that was deleted where this node was not asked.
    pub unused: Duration,
}

impl Default for LogBounds {
    fn default() -> Self {
        Self { segment_bytes: 1 << 20, segments: 16, unused: Duration::from_secs(30 * 24 * 3600) }
    }
}

/// All logs of this node.
#[derive(Debug)]
pub struct LogStore {
    directory: PathBuf,
    bounds: LogBounds,
    live: Mutex<HashMap<ObjectUid, Live>>,
}

/// A log that somebody writes or follows.
#[derive(Clone, Debug)]
struct Live {
    /// How many write, changed also when something was written.
    writers: watch::Sender<usize>,
}

impl LogStore {
    /// Makes the directory when it is missing; removes the logs that nobody has written for long.
    pub fn open(directory: PathBuf, bounds: LogBounds) -> io::Result<Self> {
        fs::create_dir_all(&directory)?;
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            let age = entry.metadata()?.modified()?.elapsed().unwrap_or_default();
            if age > bounds.unused {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(Self { directory, bounds, live: Mutex::default() })
    }

    /// Goes on with the log of an Instance where it ended. A log that cannot be read or written is no reason not to run.
    pub fn writer(&self, workspace: &ObjectUid, instance: InstanceId) -> LogWriter {
        let directory = self.directory(workspace);
        let end = End::find(&directory, instance).unwrap_or_else(|error| {
            let directory = directory.display();
            tracing::warn!(%instance, %directory, %error, "the stored log cannot be read; a new part begins");
            End::default()
        });
        let live = self.live(workspace);
        live.writers.send_modify(|writers| *writers += 1);
        LogWriter { directory, bounds: self.bounds, instance, end, live, failing: false }
    }

    /// What is wanted of what is kept, over all Instances, the oldest first; with `follow`, what comes as long as somebody
    /// writes.
    pub fn read(
        &self,
        workspace: &ObjectUid,
        wanted: Wanted,
        follow: bool,
    ) -> io::Result<impl Stream<Item = LogChunk> + Send + use<>> {
        let directory = self.directory(workspace);
        // Before the first look, so that nothing is missed after it.
        let changes = follow.then(|| self.live(workspace).writers.subscribe());
        let lines = Lines::new(wanted);
        let mut reader = Reader { directory, position: None, ready: VecDeque::new(), lines, changes };
        reader.start(wanted.tail)?;
        Ok(stream::unfold(reader, |mut reader| async move { Some((reader.next().await?, reader)) }))
    }

    /// Forgets a Workspace's log. Idempotent.
    pub fn remove(&self, workspace: &ObjectUid) -> io::Result<()> {
        match fs::remove_dir_all(self.directory(workspace)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn directory(&self, workspace: &ObjectUid) -> PathBuf {
        self.directory.join(workspace.as_str())
    }

    fn live(&self, workspace: &ObjectUid) -> Live {
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody writes and nobody follows: whoever comes next makes it anew.
        live.retain(|_, live| *live.writers.borrow() > 0 || live.writers.receiver_count() > 0);
        live.entry(workspace.clone()).or_insert_with(|| Live { writers: watch::Sender::new(0) }).clone()
    }
}

#[derive(Debug)]
struct Current {
    file: File,
    size: u64,
}

/// Where a log goes on.
#[derive(Debug, Default)]
struct End {
    /// The first byte that is not stored yet.
    offset: u64,
    current: Option<Current>,
    next_number: u64,
    /// Of the last piece, of whichever Instance. Times do not go back, whatever a guest's clock does: who reads on
    /// from a time misses nothing.
    unix_nanos: u64,
}

impl End {
    fn find(directory: &Path, instance: InstanceId) -> io::Result<Self> {
        let segments = Segment::list(directory)?;
        let next_number = segments.last().map_or(0, |segment| segment.number + 1);
        let mut end = Self { next_number, unix_nanos: last_time(directory, &segments)?, ..Self::default() };
        for segment in segments.iter().rev().filter(|segment| segment.instance == instance) {
            let path = segment.path(directory);
            let (records, size) = read_from(&path, 0)?;
            if end.current.is_none() {
                let file = OpenOptions::new().append(true).open(&path)?;
                file.set_len(size)?;
                end.current = Some(Current { file, size });
            }
            if let Some(last) = records.last() {
                end.offset = last.end();
                break;
            }
        }
        Ok(end)
    }
}

/// When the last piece that is stored was printed.
fn last_time(directory: &Path, segments: &[Segment]) -> io::Result<u64> {
    for segment in segments.iter().rev() {
        let (records, _) = read_unless_gone(&segment.path(directory), 0)?;
        if let Some(last) = records.last() {
            return Ok(last.unix_nanos);
        }
    }
    Ok(0)
}

/// Writes the log of one Instance.
#[derive(Debug)]
pub struct LogWriter {
    directory: PathBuf,
    bounds: LogBounds,
    instance: InstanceId,
    end: End,
    live: Live,
    /// The last piece could not be stored; said once, not for every piece.
    failing: bool,
}

impl LogSink for LogWriter {
    fn offset(&self) -> u64 {
        self.end.offset
    }

    /// What cannot be stored (a full disk) is lost: an entrypoint that blocks on its log would be worse.
    fn store(&mut self, data: &v1::LogData) {
        let end = data.offset.saturating_add(data.data.len() as u64);
        if end <= self.end.offset {
            return;
        }
        let known = usize::try_from(self.end.offset.saturating_sub(data.offset)).unwrap_or(0);
        let record = Record {
            offset: data.offset + known as u64,
            unix_nanos: data.time_unix_nanos.max(self.end.unix_nanos),
            is_stderr: data.output() == v1::Output::Stderr,
            data: data.data[known..].to_vec(),
        };
        (self.end.offset, self.end.unix_nanos) = (end, record.unix_nanos);
        match self.append(&record) {
            Ok(()) => self.failing = false,
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    let directory = self.directory.display();
                    tracing::warn!(instance = %self.instance, %directory, %error, "the log cannot be stored and is lost");
                }
            }
        }
        self.live.writers.send_modify(|_| ());
    }
}

impl LogWriter {
    fn append(&mut self, record: &Record) -> io::Result<()> {
        if self.end.current.as_ref().is_none_or(|current| current.size >= self.bounds.segment_bytes) {
            self.end.current = Some(self.begin_segment()?);
        }
        let Some(current) = self.end.current.as_mut() else { return Ok(()) };
        let bytes = record.encode();
        match current.file.write_all(&bytes) {
            Ok(()) => current.size += bytes.len() as u64,
            Err(error) => {
                // A torn record would hide all that comes after it.
                let _ = current.file.set_len(current.size);
                return Err(error);
            }
        }
        Ok(())
    }

    fn begin_segment(&mut self) -> io::Result<Current> {
        fs::create_dir_all(&self.directory)?;
        let mut segments = Segment::list(&self.directory)?;
        while segments.len() >= self.bounds.segments.max(1) {
            fs::remove_file(segments.remove(0).path(&self.directory))?;
        }
        let segment = Segment { number: self.end.next_number, instance: self.instance };
        self.end.next_number += 1;
        let file = OpenOptions::new().append(true).create(true).open(segment.path(&self.directory))?;
        Ok(Current { file, size: 0 })
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        self.live.writers.send_modify(|writers| *writers -= 1);
    }
}

/// Where somebody is in a log.
struct Reader {
    directory: PathBuf,
    /// Segment, and the place in its file; nothing when there was nothing yet.
    position: Option<(Segment, u64)>,
    ready: VecDeque<(InstanceId, Record)>,
    lines: Lines,
    /// Absent: what is there now is all.
    changes: Option<watch::Receiver<usize>>,
}

impl Reader {
    fn start(&mut self, tail: Option<u64>) -> io::Result<()> {
        let Some(lines) = tail else { return Ok(()) };
        let mut last = LastLines::new(lines);
        let mut instance = None;
        for segment in Segment::list(&self.directory)?.into_iter().rev() {
            if instance.replace(segment.instance).is_some_and(|later| later != segment.instance) {
                last.begin_instance();
            }
            let (records, end) = read_unless_gone(&segment.path(&self.directory), 0)?;
            self.position.get_or_insert((segment, end));
            for record in last.take(records).into_iter().rev() {
                self.ready.push_front((segment.instance, record));
            }
            if last.is_complete() {
                break;
            }
        }
        Ok(())
    }

    async fn next(&mut self) -> Option<LogChunk> {
        loop {
            if self.lines.is_over() {
                return None;
            }
            if let Some((instance, record)) = self.ready.pop_front() {
                match self.lines.take(instance, &record) {
                    Some(chunk) => return Some(chunk),
                    None => continue,
                }
            }
            // In this order: what is written after the look marks a change.
            let writers = self.changes.as_mut().map(|changes| *changes.borrow_and_update());
            match self.advance() {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(directory = %self.directory.display(), %error, "a log cannot be read");
                    return None;
                }
            }
            if writers.is_none_or(|writers| writers == 0) {
                return None;
            }
            self.changes.as_mut()?.changed().await.ok()?;
        }
    }

    /// Reads on; whether there was anything.
    fn advance(&mut self) -> io::Result<bool> {
        if let Some((segment, position)) = self.position {
            let (records, end) = read_unless_gone(&segment.path(&self.directory), position)?;
            if !records.is_empty() {
                self.position = Some((segment, end));
                self.ready.extend(records.into_iter().map(|record| (segment.instance, record)));
                return Ok(true);
            }
        }
        let after = self.position.map(|(segment, _)| segment);
        let next = Segment::list(&self.directory)?.into_iter().find(|segment| Some(*segment) > after);
        let Some(next) = next else { return Ok(false) };
        self.position = Some((next, 0));
        Ok(true)
    }
}

/// A segment that was removed because there was too much is as good as read.
fn read_unless_gone(path: &Path, position: u64) -> io::Result<(Vec<Record>, u64)> {
    match read_from(path, position) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok((Vec::new(), position)),
        result => result,
    }
}

#[cfg(test)]
mod tests;
