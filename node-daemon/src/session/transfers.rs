//! The transfers that run on this node: disks into an archive, or out of one. Each lives and ends with the stream that it
//! was asked for on.

use std::{
    collections::BTreeSet,
    io::{self, BufRead, Read, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use kibo_archive::Description;
use kibo_crds::{Epoch, ObjectUid, PoolId};
use kibo_protocol::v1;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{control::InstanceControl, node::Node};
use crate::{
    instance::{ExecExit, ExecInput, ExecOutput, ExecStream, StreamError},
    launch::{GrantedObject, InvalidMessage, Taker},
    pool::{Disks, TransferError},
};

/// Pieces on their way in each direction.
const PIECES: usize = 8;
const PIECE: usize = 64 << 10;
/// At once on one node: each has a thread, of which there are not many more for everything else.
const MOST: usize = 64;

/// All transfers of this node.
pub struct Transfers {
    running: Mutex<Vec<Running>>,
    ended: watch::Sender<u64>,
}

struct Running {
    number: u64,
    grants: Vec<(ObjectUid, Epoch)>,
    pools: BTreeSet<PoolId>,
    stop: CancellationToken,
}

impl Running {
    /// With a pool that was declared lost it may hang for good. What it has begun to write it may write yet, to a copy of its
    /// own: what that becomes is looked at under the object's lock.
    fn goes_on(&self, is_lost: impl Fn(&PoolId) -> bool) -> bool {
        !self.pools.iter().any(is_lost)
    }
}

impl Default for Transfers {
    fn default() -> Self {
        Self { running: Mutex::default(), ended: watch::Sender::new(0) }
    }
}

impl Transfers {
    fn lock(&self) -> MutexGuard<'_, Vec<Running>> {
        // Every change under the lock is one insertion or removal.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any runs.
    pub fn go_on(&self, is_lost: impl Fn(&PoolId) -> bool) -> bool {
        self.lock().iter().any(|running| running.goes_on(&is_lost))
    }

    /// Whether one uses this object by this grant.
    pub fn is_running(&self, uid: &ObjectUid, epoch: Epoch, is_lost: impl Fn(&PoolId) -> bool) -> bool {
        let is_it = |(of, by): &(ObjectUid, Epoch)| (of, *by) == (uid, epoch);
        self.lock().iter().any(|running| running.grants.iter().any(is_it) && running.goes_on(&is_lost))
    }

    /// Stops those that use an object up to this epoch, and returns when nothing of them runs any more.
    pub async fn stop(&self, uid: &ObjectUid, until: Epoch, is_lost: impl Fn(&PoolId) -> bool) {
        let is_of_it = |running: &Running| running.grants.iter().any(|(of, epoch)| of == uid && *epoch <= until);
        self.stop_where(is_of_it, is_lost).await;
    }

    /// Whoever waits looks again: a pool was declared lost.
    pub fn look_again(&self) {
        self.ended.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Stops all of them, and returns when none goes on.
    pub async fn stop_all(&self, is_lost: impl Fn(&PoolId) -> bool) {
        self.stop_where(|_| true, is_lost).await;
    }

    async fn stop_where(&self, which: impl Fn(&Running) -> bool, is_lost: impl Fn(&PoolId) -> bool) {
        let mut ended = self.ended.subscribe();
        loop {
            ended.mark_unchanged();
            let left = {
                let running = self.lock();
                let stopped = running.iter().filter(|running| which(running)).inspect(|running| running.stop.cancel());
                stopped.filter(|running| running.goes_on(&is_lost)).count()
            };
            if left == 0 || ended.changed().await.is_err() {
                return;
            }
        }
    }

    /// From now on it can be stopped; dropped, it has ended.
    fn begin(self: &Arc<Self>, disks: &Disks, is_lost: impl Fn(&PoolId) -> bool) -> Result<Begun, StreamError> {
        let (number, stop) = (rand::random(), CancellationToken::new());
        let mut running = self.lock();
        if running.iter().filter(|running| running.goes_on(&is_lost)).count() >= MOST {
            let message = format!("{MOST} transfers run on this node, which are the most: try again when one is over");
            return Err(StreamError { failure: v1::StreamFailure::TooMany, message });
        }
        running.push(Running { number, grants: disks.grants(), pools: disks.pools(), stop: stop.clone() });
        Ok(Begun { transfers: Arc::clone(self), number, stop })
    }
}

struct Begun {
    transfers: Arc<Transfers>,
    number: u64,
    stop: CancellationToken,
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.transfers.lock().retain(|running| running.number != self.number);
        self.transfers.look_again();
    }
}

/// A transfer under way: its bytes, and the order to stop it.
pub struct Transfer {
    pub stream: ExecStream,
    pub stop: CancellationToken,
}

pub fn stopped() -> StreamError {
    TransferError::Stopped.into()
}

impl From<TransferError> for StreamError {
    fn from(error: TransferError) -> Self {
        Self { failure: error.failure(), message: error.to_string() }
    }
}

fn invalid(field: &'static str, problem: &impl ToString) -> StreamError {
    let error = InvalidMessage { field, problem: problem.to_string() };
    StreamError { failure: v1::StreamFailure::Invalid, message: error.to_string() }
}

fn disks(layer: Option<&v1::Object>, volume: Option<&v1::Object>) -> Result<Disks, StreamError> {
    let granted = |object: &v1::Object| GrantedObject::try_from(object).map_err(|error| invalid("object", &error));
    let layer = layer.ok_or_else(|| invalid("layer", &"it is missing"))?;
    Ok(Disks { layer: granted(layer)?, volume: volume.map(granted).transpose()? })
}

/// Begins to read disks into an archive.
pub fn export<I: InstanceControl>(
    node: &Node<I>,
    taker: Taker,
    request: &v1::ExportRequest,
) -> Result<Transfer, StreamError> {
    let disks = disks(request.layer.as_ref(), request.volume.as_ref())?;
    let description: Description =
        serde_json::from_slice(&request.description).map_err(|error| invalid("description", &error))?;
    let pools = Arc::clone(&node.pools);
    begin(node, disks, move |disks, stop, _, to| pools.export(disks, description, &taker, stop, to))
}

/// Begins to make disks out of an archive.
pub fn import<I: InstanceControl>(
    node: &Node<I>,
    taker: Taker,
    request: v1::ImportRequest,
) -> Result<Transfer, StreamError> {
    let disks = disks(request.layer.as_ref(), request.volume.as_ref())?;
    let pools = Arc::clone(&node.pools);
    begin(node, disks, move |disks, stop, from, _| pools.import(disks, &request.archive, &taker, stop, from))
}

fn begin<I: InstanceControl>(
    node: &Node<I>,
    disks: Disks,
    work: impl FnOnce(&Disks, &CancellationToken, Input, Output) -> Result<(), TransferError> + Send + 'static,
) -> Result<Transfer, StreamError> {
    let begun = node.transfers.begin(&disks, node.is_lost())?;
    let stop = begun.stop.clone();
    let ((input, from), (to, output)) = (mpsc::channel(PIECES), mpsc::channel(PIECES));
    tokio::task::spawn_blocking(move || {
        let grants = disks.grants();
        tracing::info!(?grants, "a transfer begins");
        let from = Input { pieces: from, current: Bytes::new(), closed: false };
        let done = work(&disks, &begun.stop, from, Output(to.clone()));
        tracing::info!(?grants, problem = done.as_ref().err().map(ToString::to_string), "a transfer ended");
        // Before the last word: whoever hears that may ask what became of the grants.
        drop(begun);
        // Nobody may be there to hear it.
        let _ = to.blocking_send(match done {
            Ok(()) => ExecOutput::Exit(ExecExit::Code(0)),
            Err(error) => ExecOutput::Failed(error.into()),
        });
    });
    Ok(Transfer { stream: ExecStream { input, output }, stop })
}

/// What is read from an archive's sender.
struct Input {
    pieces: mpsc::Receiver<ExecInput>,
    current: Bytes,
    closed: bool,
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let piece = self.fill_buf()?;
        let length = piece.len().min(buffer.len());
        buffer[..length].copy_from_slice(&piece[..length]);
        self.consume(length);
        Ok(length)
    }
}

impl BufRead for Input {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.current.is_empty() && !self.closed {
            match self.pieces.blocking_recv() {
                Some(ExecInput::Data(data)) => self.current = data,
                Some(ExecInput::Close) => self.closed = true,
                Some(ExecInput::Resize { .. } | ExecInput::Signal(_)) => {}
                None => {
                    let lost = "whoever sends the archive went away before its end";
                    return Err(io::Error::new(io::ErrorKind::ConnectionAborted, lost));
                }
            }
        }
        Ok(&self.current)
    }

    fn consume(&mut self, length: usize) {
        let _ = self.current.split_to(length);
    }
}

/// What is sent to an archive's reader.
struct Output(mpsc::Sender<ExecOutput>);

impl Write for Output {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let piece = &data[..data.len().min(PIECE)];
        let sent = self.0.blocking_send(ExecOutput::Stdout(Bytes::copy_from_slice(piece)));
        let lost = |_| io::Error::new(io::ErrorKind::BrokenPipe, "whoever reads the archive went away");
        sent.map(|()| piece.len()).map_err(lost)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(uid: &str, epoch: u64) -> (ObjectUid, Epoch) {
        (uid.parse().unwrap(), Epoch(epoch))
    }

    const A: &str = "6f9619ff-8b86-d011-b42d-00c04fc964ff";
    const B: &str = "6f9619ff-8b86-d011-b42d-00c04fc964f0";

    fn begun(transfers: &Arc<Transfers>, number: u64, grants: Vec<(ObjectUid, Epoch)>) -> Begun {
        let (stop, pools) = (CancellationToken::new(), ["p".parse().unwrap()].into());
        transfers.lock().push(Running { number, grants, pools, stop: stop.clone() });
        Begun { transfers: Arc::clone(transfers), number, stop }
    }

    #[tokio::test]
    async fn a_stop_waits_for_what_it_stops_and_for_nothing_else() {
        let transfers = Arc::new(Transfers::default());
        let old = begun(&transfers, 1, vec![grant(A, 3), grant(B, 1)]);
        let new = begun(&transfers, 2, vec![grant(A, 5)]);
        let is_running = |uid: &str, epoch| transfers.is_running(&uid.parse().unwrap(), Epoch(epoch), |_| false);
        assert!(is_running(B, 1) && is_running(A, 3) && is_running(A, 5));
        assert!(!is_running(A, 4) && !is_running(B, 5), "by another grant");
        let stop = old.stop.clone();
        tokio::spawn(async move {
            stop.cancelled().await;
            drop(old);
        });
        transfers.stop(&A.parse().unwrap(), Epoch(4), |_| false).await;
        assert!(!new.stop.is_cancelled() && !is_running(B, 1));
        // What hangs with a lost pool is stopped and not waited for.
        assert!(transfers.go_on(|_| false) && !transfers.go_on(|_| true));
        transfers.stop_all(|_| true).await;
        assert!(new.stop.is_cancelled() && is_running(A, 5));
        drop(new);
        transfers.stop_all(|_| false).await;
        assert!(!is_running(A, 5));
    }

    #[test]
    fn an_input_that_is_not_closed_is_no_end() {
        let (sender, pieces) = mpsc::channel(4);
        let mut input = Input { pieces, current: Bytes::new(), closed: false };
        sender.blocking_send(ExecInput::Data(Bytes::from_static(b"ab"))).unwrap();
        let mut byte = [0; 1];
        assert!(
            (input.read(&mut byte).unwrap(), byte) == (1, *b"a")
                && (input.read(&mut byte).unwrap(), byte) == (1, *b"b")
        );
        drop(sender);
        assert_eq!(input.read(&mut byte).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        let (sender, pieces) = mpsc::channel(4);
        let mut input = Input { pieces, current: Bytes::new(), closed: false };
        sender.blocking_send(ExecInput::Close).unwrap();
        assert_eq!(input.read(&mut byte).unwrap(), 0);
    }
}
