//! The journal of one Instance: records one after the other, each with length and checksum.

use std::{
    collections::VecDeque,
    fs::{self, File, OpenOptions},
    io::{self, Seek as _, SeekFrom, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use kibo_protocol::v1::{InstanceEvent, instance_event::Kind};
use prost::Message as _;
use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};

use super::{MAX_REPEATED, SpoolError, is_essential};
use crate::durable;

/// Length and CRC-32 of what follows, both little endian.
const HEADER: usize = 8;
/// No event comes near; a longer length is a torn or damaged record.
const MAX_RECORD: usize = 1 << 20;
/// A journal is written anew when it is longer than this, and several times as long as what is left in it.
const COMPACT_ABOVE: u64 = 64 << 10;
const COMPACT_TIMES: u64 = 4;

/// Several times what the events of a usual Instance need.
const RESERVED: u64 = 16 << 10;

const EVENT: u8 = 1;
/// Everything up to this number is acknowledged; at the head of a compacted journal also the last number used.
const ACKED: u8 = 2;
/// Whose journal it is, for one that holds no event any more.
const WORKSPACE: u8 = 3;
/// Numbers up to this one were used, by events that were dropped.
const USED: u8 = 4;

/// Further than any Instance comes: numbers that a damaged journal had given away are not given again.
const BEYOND_DAMAGE: u64 = 1 << 32;

pub struct Journal {
    path: PathBuf,
    file: File,
    /// Set after a compaction until the new file is sure to outlive a crash: before, an event in it would not be durable.
    unsettled: Option<durable::Unsettled>,
    /// What is written and checked; everything beyond is the rest of a failed write.
    len: u64,
    workspace_uid: String,
    last_seq: u64,
    ended: bool,
    pending: VecDeque<InstanceEvent>,
}

fn frame(kind: u8, content: &[u8]) -> Vec<u8> {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&[kind]);
    crc.update(content);
    let length = u32::try_from(content.len() + 1).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(HEADER + 1 + content.len());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&crc.finalize().to_le_bytes());
    bytes.push(kind);
    bytes.extend_from_slice(content);
    bytes
}

/// The first whole record, and how long it is.
fn first_record(bytes: &[u8]) -> Option<(u8, &[u8], usize)> {
    let number = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let length = usize::try_from(number(0)?).ok().filter(|length| (1..=MAX_RECORD).contains(length))?;
    let body = bytes.get(HEADER..HEADER + length)?;
    (crc32fast::hash(body) == number(4)?).then(|| (body[0], &body[1..], HEADER + length))
}

/// Where the next whole record begins in what begins with none.
fn next_record(bytes: &[u8]) -> Option<usize> {
    (1..bytes.len()).find(|at| first_record(&bytes[*at..]).is_some())
}

/// Whether this is as long as it says, so that it was not cut off in the middle of a write.
fn is_complete(bytes: &[u8]) -> bool {
    let length = bytes.first_chunk().map(|length| u32::from_le_bytes(*length) as usize);
    length.is_some_and(|length| (1..=MAX_RECORD).contains(&length) && HEADER + length <= bytes.len())
}

/// Holds room for the events that every Instance has, so that its end can also be told when the disk is full.
fn reserve(file: &File) {
    if let Err(error) = fallocate(file, FallocateFlags::KEEP_SIZE, 0, RESERVED) {
        tracing::debug!(%error, "no room is held for an event journal");
    }
}

/// Where a damaged journal is kept for who wants to know what happened.
fn aside(path: &Path) -> PathBuf {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".damaged");
    aside.into()
}

impl Journal {
    fn error(&self, action: &'static str) -> impl FnOnce(io::Error) -> SpoolError + use<> {
        let path = self.path.clone();
        move |source| SpoolError::Io { action, path, source }
    }

    fn empty(path: &Path, file: File) -> Self {
        Self {
            path: path.to_owned(),
            file,
            unsettled: None,
            len: 0,
            workspace_uid: String::new(),
            last_seq: 0,
            ended: false,
            pending: VecDeque::new(),
        }
    }

    /// A new journal; the caller makes its directory entry durable.
    pub fn create(path: &Path) -> Result<Self, SpoolError> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path);
        let file = file.map_err(|source| SpoolError::Io { action: "make", path: path.to_owned(), source })?;
        reserve(&file);
        Ok(Self::empty(path, file))
    }

    /// Reads a journal and cuts off what a crash left of an unfinished write. Of a damaged one a copy is put aside, and
    /// what is whole in it stands: a node must not be lost for what one Instance had to say.
    pub fn load(path: &Path) -> Result<Self, SpoolError> {
        let failed = |action| move |source| SpoolError::Io { action, path: path.to_owned(), source };
        let bytes = match fs::read(path) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::IO) => return Self::unreadable(path),
            bytes => bytes.map_err(failed("read"))?,
        };
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed("open"))?;
        let mut journal = Self::empty(path, file);
        let (mut rest, mut damage) = (bytes.as_slice(), None);
        loop {
            if let Some((kind, content, length)) = first_record(rest) {
                damage = journal.replay(kind, content).err().or(damage);
                journal.len += length as u64;
                rest = &rest[length..];
            } else if let Some(next) = next_record(rest) {
                damage = Some("a record in the middle is not what was written");
                rest = &rest[next..];
            } else {
                break;
            }
        }
        if is_complete(rest) {
            damage = Some("the last record is not what was written");
        }
        if let Some(problem) = damage {
            durable::replace(&aside(path), &bytes).map_err(failed("put aside a copy of"))?;
            journal.begin_anew(problem)?;
        } else if !rest.is_empty() {
            tracing::warn!(path = %path.display(), bytes = rest.len(), "cut off an unfinished event record");
            journal.file.set_len(journal.len).map_err(failed("cut"))?;
            journal.file.sync_all().map_err(failed("sync"))?;
        }
        Ok(journal)
    }

    /// A journal in the place of one that the disk does not give back.
    fn unreadable(path: &Path) -> Result<Self, SpoolError> {
        let failed = |action| move |source| SpoolError::Io { action, path: path.to_owned(), source };
        fs::rename(path, aside(path)).map_err(failed("put aside"))?;
        let mut journal = Self::create(path)?;
        journal.begin_anew("the disk does not give it back")?;
        Ok(journal)
    }

    /// Goes on with what is known, beyond all numbers that were given away.
    fn begin_anew(&mut self, problem: &str) -> Result<(), SpoolError> {
        self.last_seq += BEYOND_DAMAGE;
        self.compact()?;
        if let Some(unsettled) = self.unsettled.take() {
            unsettled.settle().map_err(self.error("sync"))?;
        }
        tracing::error!(
            path = %self.path.display(), problem, aside = %aside(&self.path).display(), kept = self.pending.len(),
            "an event journal is damaged: what was not acknowledged and is not whole in it is never told; look at the disk"
        );
        Ok(())
    }

    /// Takes in one record; says what is wrong with it.
    fn replay(&mut self, kind: u8, content: &[u8]) -> Result<(), &'static str> {
        match kind {
            EVENT => {
                let event = InstanceEvent::decode(content).map_err(|_| "an event cannot be decoded")?;
                if event.seq <= self.last_seq {
                    return Err("an event stands behind a later one");
                }
                let is_next = event.seq == self.last_seq + 1;
                self.note(event);
                if !is_next {
                    return Err("an event is missing");
                }
            }
            ACKED | USED => {
                let seq = content.try_into().map(u64::from_le_bytes).map_err(|_| "a number is missing")?;
                self.last_seq = self.last_seq.max(seq);
                if kind == ACKED {
                    self.pending.retain(|event| event.seq > seq);
                }
            }
            WORKSPACE => self.workspace_uid = String::from_utf8_lossy(content).into_owned(),
            // Written by a newer daemon: nothing that this one needs.
            _ => {}
        }
        Ok(())
    }

    fn note(&mut self, event: InstanceEvent) {
        self.last_seq = event.seq;
        self.ended |= matches!(event.kind, Some(Kind::Ended(_)));
        self.workspace_uid.clone_from(&event.workspace_uid);
        self.pending.push_back(event);
        let repeated = |event: &InstanceEvent| !is_essential(event);
        if self.pending.iter().filter(|event| repeated(event)).count() > MAX_REPEATED
            && let Some(oldest) = self.pending.iter().position(repeated)
        {
            // Nothing is written for it: whoever reads the journal comes to the same.
            self.pending.remove(oldest);
        }
    }

    /// Whether most of what stands in it is about events that are acknowledged or dropped.
    fn is_wasteful(&self) -> bool {
        let left = || self.pending.iter().map(|event| (HEADER + 1 + event.encoded_len()) as u64).sum::<u64>();
        self.len > COMPACT_ABOVE && self.len > COMPACT_TIMES * left()
    }

    /// Writes at the end of what is known to be good, over the rest of a failed write.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.len))?;
        self.file.write_all(bytes)
    }

    /// Durable when it returns. On an error the journal is as before.
    pub fn append(&mut self, event: InstanceEvent) -> Result<(), SpoolError> {
        if self.is_wasteful()
            && let Err(error) = self.compact()
        {
            // On a full disk the event itself has its room.
            tracing::warn!(path = %self.path.display(), %error, "an event journal grows on");
        }
        if let Some(unsettled) = &self.unsettled {
            unsettled.settle().map_err(self.error("sync"))?;
            self.unsettled = None;
        }
        let bytes = frame(EVENT, &event.encode_to_vec());
        if let Err(error) = self.write(&bytes).and_then(|()| self.file.sync_data()) {
            // A whole record that was reported as failed must not come back after a restart.
            let cut = self.file.set_len(self.len).and_then(|()| self.file.sync_data());
            if let Err(error) = cut {
                tracing::error!(path = %self.path.display(), %error, "failed to cut off a failed event record");
            }
            // The cut gave that back too.
            reserve(&self.file);
            return Err(self.error("write to")(error));
        }
        self.len += bytes.len() as u64;
        self.note(event);
        Ok(())
    }

    pub fn ack(&mut self, seq: u64) -> Result<(), SpoolError> {
        let seq = seq.min(self.last_seq);
        let before = self.pending.len();
        self.pending.retain(|event| event.seq > seq);
        if self.pending.len() == before || self.is_finished() {
            return Ok(());
        }
        if self.is_wasteful() {
            return self.compact();
        }
        let bytes = frame(ACKED, &seq.to_le_bytes());
        self.write(&bytes).map_err(self.error("write to"))?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn compact(&mut self) -> Result<(), SpoolError> {
        let mut bytes = frame(WORKSPACE, self.workspace_uid.as_bytes());
        let mut used = self.pending.front().map_or(self.last_seq, |first| first.seq - 1);
        bytes.extend(frame(ACKED, &used.to_le_bytes()));
        for event in &self.pending {
            if event.seq > used + 1 {
                bytes.extend(frame(USED, &(event.seq - 1).to_le_bytes()));
            }
            bytes.extend(frame(EVENT, &event.encode_to_vec()));
            used = event.seq;
        }
        if self.last_seq > used {
            bytes.extend(frame(USED, &self.last_seq.to_le_bytes()));
        }
        // Nothing is opened again, which could fail and leave the journal writing into the file that is gone.
        let (file, unsettled) = durable::swap(&self.path, &bytes).map_err(self.error("compact"))?;
        reserve(&file);
        (self.file, self.unsettled) = (file, Some(unsettled));
        self.len = bytes.len() as u64;
        Ok(())
    }

    pub fn pending(&self) -> &VecDeque<InstanceEvent> {
        &self.pending
    }

    #[cfg(test)]
    pub fn pending_mut(&mut self) -> &mut VecDeque<InstanceEvent> {
        &mut self.pending
    }

    pub fn last_seq(&self) -> u64 {
        self.last_seq
    }

    pub fn workspace_uid(&self) -> &str {
        &self.workspace_uid
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Ended, and everything acknowledged.
    pub fn is_finished(&self) -> bool {
        self.ended && self.pending.is_empty()
    }
}
