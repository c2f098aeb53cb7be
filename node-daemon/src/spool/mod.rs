//! Events of Instances, kept on disk until the operator has acknowledged them.
//!
//! One journal for each Instance. An event is durable when [`EventSpool::append`] returns, its
//! number is never used again, and a crash in the middle of a write loses at most the event that
//! was never reported as written. The journal goes when the last event of its Instance, an Ended,
//! is acknowledged.
//!
//! The bound: of the kinds that a guest can cause again and again (responsiveness, entrypoint exits) an
//! Instance keeps the newest [`MAX_REPEATED`] that are not acknowledged. For each one more the oldest is
//! dropped and never told, so that the last word on a guest is always there. ObjectsTaken, Available and
//! Ended come at most once each and are never dropped. Texts are cut at [`MAX_TEXT`] bytes, and a journal
//! is written anew when it is several times as long as what is left in it. New Instances come only over a
//! session, so without one the number of journals does not grow either.
//!
//! A journal that the disk has changed stops nobody: it is put aside, what is whole in it stands, and numbers go on far
//! beyond all that it had given away, since the operator takes no number twice.

mod journal;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use kibo_crds::InstanceId;
use kibo_protocol::v1::{self, instance_event::Kind};
use tokio::sync::watch;

use journal::Journal;

use crate::{clock, durable};

/// Unacknowledged events of one Instance, beside the essential ones.
pub const MAX_REPEATED: usize = 256;
/// Of a text in an event.
pub const MAX_TEXT: usize = 2048;

const SUFFIX: &str = ".events";

#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    #[error("failed to {action} the event journal {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{instance} has ended already: no event comes after that")]
    Ended { instance: InstanceId },
}

/// All journals. Calls that write wait for the disk: a few milliseconds on a healthy one.
pub struct EventSpool {
    dir: PathBuf,
    journals: Mutex<BTreeMap<InstanceId, Journal>>,
    changed: watch::Sender<u64>,
}

impl EventSpool {
    /// Reads what an earlier daemon left; makes the directory when it is missing.
    pub fn open(dir: &Path) -> Result<Self, SpoolError> {
        let failed = |action| move |source| SpoolError::Io { action, path: dir.to_owned(), source };
        fs::create_dir_all(dir).map_err(failed("make the directory of"))?;
        let mut journals = BTreeMap::new();
        for entry in fs::read_dir(dir).map_err(failed("list"))? {
            let path = entry.map_err(failed("list"))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Some(instance) = name.strip_suffix(SUFFIX).and_then(|id| id.parse().ok()) else { continue };
            let journal = Journal::load(&path)?;
            // Killed between the last acknowledgement and the removal.
            if journal.is_finished() {
                fs::remove_file(&path).map_err(failed("remove a finished journal in"))?;
            } else {
                journals.insert(instance, journal);
            }
        }
        Ok(Self { dir: dir.to_owned(), journals: Mutex::new(journals), changed: watch::Sender::new(0) })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<InstanceId, Journal>> {
        // A journal is consistent at every point where a panic could happen.
        self.journals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores an event and gives its number, the next of its Instance.
    ///
    /// On an I/O error nothing was stored and the number stays free: call again later.
    pub fn append(&self, instance: InstanceId, workspace_uid: &str, kind: Kind) -> Result<u64, SpoolError> {
        let mut journals = self.lock();
        if let Some(journal) = journals.get(&instance) {
            if journal.has_ended() {
                return Err(SpoolError::Ended { instance });
            }
        } else {
            let path = self.dir.join(format!("{instance}{SUFFIX}"));
            let journal = Journal::create(&path)?;
            durable::sync_dir(&self.dir).map_err(|source| SpoolError::Io { action: "sync", path, source })?;
            journals.insert(instance, journal);
        }
        let Some(journal) = journals.get_mut(&instance) else { unreachable!("it was there or has just been inserted") };
        let seq = journal.last_seq() + 1;
        journal.append(v1::InstanceEvent {
            instance_id: instance.to_string(),
            workspace_uid: workspace_uid.to_owned(),
            seq,
            unix_nanos: clock::unix_nanos(),
            kind: Some(shortened(kind)),
        })?;
        drop(journals);
        self.changed.send_modify(|count| *count += 1);
        Ok(seq)
    }

    /// Drops the events of an Instance up to `seq`, which the operator has stored the effects of.
    /// An acknowledgement that a crash forgets only sends an event twice, so it need not be durable.
    pub fn ack(&self, instance: InstanceId, seq: u64) {
        let mut journals = self.lock();
        let Some(journal) = journals.get_mut(&instance) else { return };
        if let Err(error) = journal.ack(seq) {
            tracing::warn!(%instance, %error, "failed to note an acknowledgement; its events will be sent again");
        }
        if journal.is_finished() {
            let path = self.dir.join(format!("{instance}{SUFFIX}"));
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "failed to remove a finished event journal");
            }
            journals.remove(&instance);
        }
        drop(journals);
        self.changed.send_modify(|count| *count += 1);
    }

    /// Every event that waits for its acknowledgement; those of one Instance in their order, the Instances by the time
    /// of their first. The clock may be set back, so that it says nothing about the order within an Instance.
    pub fn unacked(&self) -> Vec<v1::InstanceEvent> {
        let journals = self.lock();
        let mut pending: Vec<_> = journals.values().map(Journal::pending).collect();
        pending.sort_by_key(|events| events.front().map(|first| first.unix_nanos));
        pending.into_iter().flatten().cloned().collect()
    }

    /// Number of the last event made for an Instance; 0 when none is known.
    pub fn last_seq(&self, instance: InstanceId) -> u64 {
        self.lock().get(&instance).map_or(0, Journal::last_seq)
    }

    /// Number up to which the events of an Instance are acknowledged, and do not come again.
    pub fn acked_seq(&self, instance: InstanceId) -> u64 {
        let journals = self.lock();
        let acked = |journal: &Journal| journal.pending().front().map_or(journal.last_seq(), |first| first.seq - 1);
        journals.get(&instance).map_or(0, acked)
    }

    /// Whether the last event of this Instance is recorded and waits for its acknowledgement.
    pub fn has_ended(&self, instance: InstanceId) -> bool {
        self.lock().get(&instance).is_some_and(Journal::has_ended)
    }

    /// Instances that have ended and whose last events are not acknowledged, with their Workspaces' uids.
    pub fn ended(&self) -> Vec<(InstanceId, String)> {
        let journals = self.lock();
        let ended = journals.iter().filter(|(_, journal)| journal.has_ended());
        ended.map(|(id, journal)| (*id, journal.workspace_uid().to_owned())).collect()
    }

    /// Changes whenever an event came or was acknowledged.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}

/// What comes at most once.
fn is_essential(event: &v1::InstanceEvent) -> bool {
    match event.kind {
        Some(Kind::ObjectsTaken(_) | Kind::Available(_) | Kind::Ended(_)) => true,
        Some(
            Kind::GuestUnresponsive(_)
            | Kind::GuestResponsive(_)
            | Kind::EntrypointExited(_)
            | Kind::Blocked(_)
            | Kind::Paused(_)
            | Kind::Resumed(_),
        )
        | None => false,
    }
}

fn shortened(mut kind: Kind) -> Kind {
    if let Kind::Ended(v1::Ended { message, .. })
    | Kind::Blocked(v1::Blocked { message })
    | Kind::Paused(v1::Paused { message, .. }) = &mut kind
    {
        message.truncate(message.floor_char_boundary(MAX_TEXT));
    }
    kind
}
