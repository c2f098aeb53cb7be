//! Streams: the guest's windows on one side, bounded channels on the other.

use std::time::Duration;

use bytes::Bytes;
use kibo_guest_protocol::{MAX_STREAMS, ProcessEnd, v1};
use kibo_protocol::v1::StreamFailure;
use tokio::sync::{mpsc, oneshot};

use super::{Command, ExecId, Guest, Open, pieces::Hearer};
use crate::instance::{ExecExit, ExecInput, ExecOutput, ExecStream, StreamError};

/// Pieces, of up to a whole run, that wait in a channel beside what the windows allow.
const CHANNEL: usize = 2;

/// Between the loss of a guest and the word of its Instance that it has ended.
const WORD_WITHIN: Duration = Duration::from_secs(2);

/// How the end of a stream reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Command,
    Connection,
    Archive,
}

impl Kind {
    pub const fn of(what: &Open) -> Self {
        match what {
            Open::Exec(_) => Self::Command,
            Open::Connect { .. } => Self::Connection,
            Open::Archive(_) => Self::Archive,
        }
    }
}

/// A stream that the guest was asked for.
#[derive(Debug)]
pub(super) struct Opened {
    pub id: ExecId,
    /// Bounded by the guest's windows: what is not passed on is not granted again.
    pub events: Hearer,
}

#[derive(Debug, PartialEq)]
pub(super) enum ExecEvent {
    Output(v1::Output, Vec<u8>),
    Closed(v1::Output),
    Ended(ProcessEnd),
    /// The connection is gone, and the process with it.
    Lost,
}

pub(super) fn unavailable() -> StreamError {
    StreamError {
        failure: StreamFailure::GuestUnavailable,
        message: "the guest does not answer: wait until it is available, or look at its console".to_owned(),
    }
}

pub(super) fn too_many() -> StreamError {
    StreamError {
        failure: StreamFailure::TooMany,
        message: format!("{MAX_STREAMS} streams are open already: end some first"),
    }
}

pub(super) fn too_old() -> StreamError {
    StreamError {
        failure: StreamFailure::Failed,
        message:
            "the guest was started by an older node-daemon, which had no terminals, copies and port-forwards yet: \
                  stop the workspace and start it again"
                .to_owned(),
    }
}

/// Moves bytes both ways until the process has ended or nobody wants it any more.
pub(super) fn pump(guest: Guest, kind: Kind, opened: Opened) -> ExecStream {
    let (input, incoming) = mpsc::channel(CHANNEL);
    let (outgoing, output) = mpsc::channel(CHANNEL);
    let pumped = tokio::spawn(pump_input(guest.clone(), opened.id, incoming));
    tokio::spawn(async move {
        pump_output(&guest, kind, opened, outgoing).await;
        pumped.abort();
    });
    ExecStream { input, output }
}

async fn pump_input(guest: Guest, exec: ExecId, mut incoming: mpsc::Receiver<ExecInput>) {
    while let Some(input) = incoming.recv().await {
        match input {
            ExecInput::Data(data) => {
                let (taken, done) = oneshot::channel();
                guest.command(Command::Stdin { exec, data, taken });
                // Refused when the stream is over.
                if done.await.is_err() {
                    return;
                }
            }
            ExecInput::Close => guest.command(Command::CloseStdin(exec)),
            ExecInput::Resize { columns, rows } => guest.command(Command::Resize { exec, columns, rows }),
            ExecInput::Signal(number) => guest.command(Command::Signal { exec, number }),
        }
    }
    guest.command(Command::CloseStdin(exec));
}

async fn pump_output(guest: &Guest, kind: Kind, mut opened: Opened, outgoing: mpsc::Sender<ExecOutput>) {
    let exec = opened.id;
    loop {
        let event = tokio::select! {
            event = opened.events.hear() => event,
            () = outgoing.closed() => return guest.command(Command::Abandon(exec)),
        };
        let (output, piece) = match event {
            ExecEvent::Output(output, data) => (output, data),
            ExecEvent::Closed(v1::Output::Stdout) if kind == Kind::Connection => {
                let _ = outgoing.send(ExecOutput::StdoutClosed).await;
                continue;
            }
            ExecEvent::Closed(_) => continue,
            ExecEvent::Ended(end) => {
                let ending = guest.ending.borrow().clone();
                for output in ended(kind, end, ending.as_deref()) {
                    let _ = outgoing.send(output).await;
                }
                return;
            }
            ExecEvent::Lost => return drop(outgoing.send(ExecOutput::Failed(lost(guest).await)).await),
        };
        let len = piece.len();
        let piece = Bytes::from(piece);
        let piece = if output == v1::Output::Stderr { ExecOutput::Stderr(piece) } else { ExecOutput::Stdout(piece) };
        if outgoing.send(piece).await.is_err() {
            return guest.command(Command::Abandon(exec));
        }
        guest.command(Command::Consumed { exec, output, len });
    }
}

/// What became of a stream whose guest cannot be heard any more.
async fn lost(guest: &Guest) -> StreamError {
    let mut ending = guest.ending.subscribe();
    let word = tokio::time::timeout(WORD_WITHIN, ending.wait_for(Option::is_some)).await;
    match word.ok().and_then(Result::ok).and_then(|ending| ending.clone()) {
        Some(message) => StreamError { failure: StreamFailure::Interrupted, message },
        None => StreamError {
            failure: StreamFailure::GuestUnavailable,
            message: "the connection to the guest was lost, and what ran over it: see whether the workspace still runs"
                .to_owned(),
        },
    }
}

/// What a client sees of the end. `ending`: why the guest itself ends, if it does.
fn ended(kind: Kind, end: ProcessEnd, ending: Option<&str>) -> Vec<ExecOutput> {
    let number = |number: u32| i32::try_from(number).unwrap_or(i32::MAX);
    match (end, ending) {
        (ProcessEnd::Code(0), _) => vec![ExecOutput::Exit(ExecExit::Code(0))],
        (ProcessEnd::Code(code), None) => vec![ExecOutput::Exit(ExecExit::Code(number(code)))],
        (ProcessEnd::Code(code), Some(_)) if kind == Kind::Command => {
            vec![ExecOutput::Exit(ExecExit::Code(number(code)))]
        }
        (ProcessEnd::Signal(signal), None) => vec![ExecOutput::Exit(ExecExit::Signal(number(signal)))],
        // The guest that goes down ends what runs in it.
        (ProcessEnd::Code(_) | ProcessEnd::Signal(_), Some(why)) => {
            let failure = StreamFailure::Interrupted;
            vec![ExecOutput::Failed(StreamError { failure, message: why.to_owned() })]
        }
        (ProcessEnd::NotStarted(failure), Some(why)) if kind == Kind::Archive => {
            let message = format!("{why}; {}", failure.message);
            vec![ExecOutput::Failed(StreamError { failure: StreamFailure::Interrupted, message })]
        }
        (ProcessEnd::NotStarted(failure), _) => not_started(kind, failure),
    }
}

/// A program that cannot be run ends as in a shell: the reason on standard error, and a status that every client
/// understands.
fn not_started(kind: Kind, failure: v1::StartFailure) -> Vec<ExecOutput> {
    use v1::StartFailureReason as Reason;
    let reason = failure.reason();
    let as_shell = |message: String, code| {
        vec![ExecOutput::Stderr(Bytes::from(message + "\n")), ExecOutput::Exit(ExecExit::Code(code))]
    };
    let failure_kind = match reason {
        Reason::NotFound if kind == Kind::Command => return as_shell(failure.message, 127),
        Reason::PermissionDenied if kind == Kind::Command => return as_shell(failure.message, 126),
        Reason::NotReady => StreamFailure::GuestUnavailable,
        Reason::TooMany => StreamFailure::TooMany,
        Reason::NotFound => StreamFailure::NotFound,
        Reason::Refused => StreamFailure::Refused,
        Reason::Invalid => StreamFailure::Invalid,
        Reason::PermissionDenied | Reason::Other | Reason::Unspecified => StreamFailure::Failed,
    };
    vec![ExecOutput::Failed(StreamError { failure: failure_kind, message: failure.message })]
}
