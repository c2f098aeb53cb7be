//! The daemon's side of a guest: one task per VM that keeps the conversation with its agent going, whatever breaks.
//!
//! It says hello with a fresh nonce on every connection, pings, stores the log and acknowledges it, and carries execs.
//! Nothing is queued across connections: who wants something of the guest asks again after [`GuestEvent::Connected`].

mod connection;
mod exec;
#[cfg(test)]
mod tests;

use bytes::Bytes;
use kibo_guest_protocol::v1;
use tokio::sync::{mpsc, oneshot};

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
}

/// Names an exec over all connections.
type ExecId = u64;

#[derive(Debug)]
enum Command {
    Configure(Box<v1::Configure>),
    Sync(u64),
    Shutdown { grace_millis: u32 },
    Exec { process: v1::Process, stdin: bool, opened: oneshot::Sender<Result<exec::Opened, StreamError>> },
    Stdin { exec: ExecId, data: Bytes, taken: oneshot::Sender<()> },
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
        (Self { commands }, outgoing, task)
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

    /// Starts a process in the guest.
    pub async fn exec(&self, process: v1::Process, stdin: bool) -> Result<ExecStream, StreamError> {
        let (opened, answer) = oneshot::channel();
        self.command(Command::Exec { process, stdin, opened });
        let opened = answer.await.map_err(|_| exec::unavailable())??;
        Ok(exec::pump(self.clone(), opened))
    }

    fn command(&self, command: Command) {
        // The task is gone only when the VM is.
        let _ = self.commands.send(command);
    }
}
