//! The daemon's side of a guest: one task per VM that keeps the conversation with its agent going, whatever breaks.
//!
//! It says hello with a fresh nonce on every connection, pings, stores the log and acknowledges it, and carries streams:
//! commands, connections, archives.
//! Nothing is queued across connections: who wants something of the guest asks again after [`GuestEvent::Connected`].

mod connection;
mod pieces;
mod streams;
#[cfg(test)]
mod tests;

use bytes::Bytes;
use kibo_guest_protocol::v1;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, timeout_at},
};

use crate::{
    instance::{ExecStream, StreamError},
    vmm::SocketDir,
};

/// Events that wait for the Instance; a guest that makes more waits with them, since it could make them without end.
const EVENTS: usize = 16;

/// What the guest did, as far as it concerns its Instance.
#[derive(Clone, Debug, PartialEq)]
pub enum GuestEvent {
    /// The agent answered a hello; comes again after every loss of the connection.
    Connected(v1::HelloReply),
    Configured(v1::ConfigureResult),
    /// An error, or all was written back.
    Synced {
        id: u64,
        error: String,
    },
    ShuttingDown,
    Entrypoint(v1::EntrypointState),
    /// Nothing was heard of it for a while.
    Unresponsive,
    Responsive,
}

/// Takes what the entrypoint printed.
pub trait LogSink: Send + 'static {
    /// The first byte of the log that is not stored yet.
    fn offset(&self) -> u64;
    /// Stores one piece; what was stored before is skipped.
    fn store(&mut self, data: &v1::LogData);
}

/// A handle on the conversation. The task ends with the last clone.
#[derive(Clone, Debug)]
pub struct Guest {
    commands: mpsc::UnboundedSender<Command>,
    /// Why its streams end, once it is known that the guest does.
    ending: watch::Sender<Option<String>>,
}

/// Names a stream over all connections.
type ExecId = u64;

/// What a stream is.
#[derive(Clone, Debug, PartialEq)]
pub enum Open {
    /// The stream's id is filled in.
    Exec(v1::Exec),
    Connect {
        port: u32,
    },
    Archive(v1::archive::Direction),
}

#[derive(Debug)]
enum Command {
    Configure(Box<v1::Configure>),
    Sync(u64),
    Shutdown { grace_millis: u32 },
    Open { what: Open, opened: oneshot::Sender<Result<streams::Opened, StreamError>> },
    Stdin { exec: ExecId, data: Bytes, taken: oneshot::Sender<()> },
    Resize { exec: ExecId, columns: u32, rows: u32 },
    Signal { exec: ExecId, number: u32 },
    CloseStdin(ExecId),
    Consumed { exec: ExecId, output: v1::Output, len: usize },
    Abandon(ExecId),
}

impl Guest {
    /// A conversation over the agent's socket: its handle, what the guest does, and the task that carries it. It goes on
    /// trying until the handle is dropped or the task aborted.
    /// `known`: it had answered before, so its silence is an event from the start.
    pub fn converse(
        sockets: SocketDir,
        log: impl LogSink,
        known: bool,
    ) -> (Self, mpsc::Receiver<GuestEvent>, impl Future<Output = ()> + Send + 'static) {
        let (commands, incoming) = mpsc::unbounded_channel();
        let (events, outgoing) = mpsc::channel(EVENTS);
        let task = connection::converse(sockets, incoming, events, log, known);
        (Self { commands, ending: watch::Sender::new(None) }, outgoing, task)
    }

    /// Makes the guest the guest of one Instance. Time and entropy are filled in when it is sent.
    pub fn configure(&self, configure: v1::Configure) {
        self.command(Command::Configure(Box::new(configure)));
    }

    /// Asks for everything to be written back; answered by [`GuestEvent::Synced`] with the same id.
    pub fn sync(&self, id: u64) {
        self.command(Command::Sync(id));
    }

    pub fn shut_down(&self, grace_millis: u32) {
        self.command(Command::Shutdown { grace_millis });
    }

    /// Starts a process, a connection or an archive in the guest.
    pub async fn open(&self, what: Open) -> Result<ExecStream, StreamError> {
        let (opened, answer) = oneshot::channel();
        let kind = streams::Kind::of(&what);
        self.command(Command::Open { what, opened });
        let by = Instant::now() + streams::BEGINS_WITHIN;
        let answer = timeout_at(by, answer).await.map_err(|_| streams::not_begun())?;
        let opened = answer.map_err(|_| streams::unavailable())??;
        Ok(streams::pump(self.clone(), kind, opened, by))
    }

    /// The guest is going to end: what its streams' clients are told when they end with it. The first word stands.
    pub fn ends(&self, why: impl Into<String>) {
        self.ending.send_if_modified(|ending| {
            let is_first = ending.is_none();
            if is_first {
                *ending = Some(why.into());
            }
            is_first
        });
    }

    fn command(&self, command: Command) {
        // The task is gone only when the VM is.
        let _ = self.commands.send(command);
    }
}
