//! Streams: the guest's windows on one side, bounded channels on the other.

use std::{pin::pin, time::Duration};

use bytes::Bytes;
use kibo_guest_protocol::{MAX_RUN, MAX_STREAMS, ProcessEnd, v1};
use kibo_protocol::v1::StreamFailure;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};

use super::{Command, ExecId, Guest, Open, pieces::Hearer};
use crate::instance::{ExecExit, ExecInput, ExecOutput, ExecStream, StreamError};

/// Pieces that wait in a channel.
const CHANNEL: usize = 2;

/// Longer pieces are passed on in several: what HTTP/2 has taken is counted by nobody any more.
const PIECE: usize = 128 * 1024;

/// A guest that is asked for a stream says at once that it has begun it, or why not. One that stands still, or that is so
/// busy, does not.
pub(super) const BEGINS_WITHIN: Duration = Duration::from_secs(60);

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
    Started,
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

pub(super) fn not_begun() -> StreamError {
    let seconds = BEGINS_WITHIN.as_secs();
    StreamError {
        failure: StreamFailure::GuestUnavailable,
        message: format!(
            "the guest has not begun it within {seconds} s, and ends it should it come to it: see whether the workspace is \
             paused, or its node overloaded"
        ),
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
/// It has begun by `by`.
pub(super) fn pump(guest: Guest, kind: Kind, opened: Opened, by: Instant) -> ExecStream {
    let (input, incoming) = mpsc::channel(CHANNEL);
    let (outgoing, output) = mpsc::channel(CHANNEL);
    let pumped = tokio::spawn(pump_input(guest.clone(), opened.id, incoming));
    tokio::spawn(async move {
        pump_output(&guest, kind, opened, by, outgoing).await;
        pumped.abort();
    });
    ExecStream { input, output }
}

async fn pump_input(guest: Guest, exec: ExecId, mut incoming: mpsc::Receiver<ExecInput>) {
    let mut next = None;
    loop {
        let input = match next.take() {
            None => incoming.recv().await,
            input => input,
        };
        let Some(input) = input else { break };
        match input {
            ExecInput::Data(data) => {
                let data = gathered(data, &mut incoming, &mut next);
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

/// Input with what waits behind it, as much as goes in one run: each costs a guest as much as many kilobytes. `next`: what
/// was taken from the channel and does not belong to it.
fn gathered(first: Bytes, incoming: &mut mpsc::Receiver<ExecInput>, next: &mut Option<ExecInput>) -> Bytes {
    let mut len = first.len();
    let mut pieces = vec![first];
    while let Ok(input) = incoming.try_recv() {
        match input {
            ExecInput::Data(data) if len + data.len() <= MAX_RUN => {
                len += data.len();
                pieces.push(data);
            }
            other => {
                *next = Some(other);
                break;
            }
        }
    }
    if pieces.len() == 1 { pieces.swap_remove(0) } else { pieces.concat().into() }
}

async fn pump_output(guest: &Guest, kind: Kind, mut opened: Opened, by: Instant, outgoing: mpsc::Sender<ExecOutput>) {
    let exec = opened.id;
    let mut overdue = pin!(sleep_until(by));
    let mut has_begun = false;
    loop {
        let event = tokio::select! {
            event = opened.events.hear() => event,
            () = outgoing.closed() => return guest.command(Command::Abandon(exec)),
            () = &mut overdue, if !has_begun => {
                guest.command(Command::Abandon(exec));
                return drop(outgoing.send(ExecOutput::Failed(not_begun())).await);
            }
        };
        has_begun = true;
        let (output, piece) = match event {
            ExecEvent::Output(output, data) => (output, data),
            ExecEvent::Closed(v1::Output::Stdout) if kind == Kind::Connection => {
                let _ = outgoing.send(ExecOutput::StdoutClosed).await;
                continue;
            }
            ExecEvent::Started | ExecEvent::Closed(_) => continue,
            ExecEvent::Ended(end) => {
                let ending = guest.ending.borrow().clone();
                for output in ended(kind, end, ending.as_deref()) {
                    let _ = outgoing.send(output).await;
                }
                return;
            }
            ExecEvent::Lost => return drop(outgoing.send(ExecOutput::Failed(lost(guest).await)).await),
        };
        let mut rest = Bytes::from_owner(OnItsWay { piece, guest: guest.clone(), exec, output });
        while !rest.is_empty() {
            let piece = rest.split_to(rest.len().min(PIECE));
            let piece =
                if output == v1::Output::Stderr { ExecOutput::Stderr(piece) } else { ExecOutput::Stdout(piece) };
            if outgoing.send(piece).await.is_err() {
                return guest.command(Command::Abandon(exec));
            }
        }
    }
}

/// What the guest printed, on its way to the client. It is granted again when it is dropped, so that what waits anywhere
/// on the way waits within its window.
struct OnItsWay {
    piece: Vec<u8>,
    guest: Guest,
    exec: ExecId,
    output: v1::Output,
}

impl AsRef<[u8]> for OnItsWay {
    fn as_ref(&self) -> &[u8] {
        &self.piece
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        let Self { exec, output, .. } = *self;
        self.guest.command(Command::Consumed { exec, output, len: self.piece.len() });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn input_that_waits_goes_in_few_runs_and_in_its_order() {
        let (sender, mut incoming) = mpsc::channel(16);
        let pieces = [vec![2; 100_000], vec![3; 100_000], vec![4; 100_000]];
        for piece in &pieces {
            sender.send(ExecInput::Data(piece.clone().into())).await.unwrap();
        }
        sender.send(ExecInput::Close).await.unwrap();
        let mut next = None;
        let run = gathered(Bytes::from_static(&[1]), &mut incoming, &mut next);
        assert_eq!(run, [vec![1], pieces[0].clone(), pieces[1].clone()].concat());
        let Some(ExecInput::Data(third)) = next.take() else { panic!("what did not fit is lost: {next:?}") };
        assert_eq!(gathered(third, &mut incoming, &mut next), pieces[2]);
        assert!(matches!(next, Some(ExecInput::Close)), "{next:?}");
    }
}
