//! Execs: the guest's windows on one side, bounded channels on the other.

use bytes::Bytes;
use kibo_guest_protocol::{ProcessEnd, v1};
use kibo_protocol::v1::StreamFailure;
use tokio::sync::{mpsc, oneshot};

use super::{Command, ExecId, Guest};
use crate::instance::{ExecExit, ExecOutput, ExecStream, StreamError};

/// Pieces that wait in a channel beside what the windows allow.
const CHANNEL: usize = 4;

/// An exec that the guest was asked for.
#[derive(Debug)]
pub(super) struct Opened {
    pub id: ExecId,
    /// Bounded by the guest's windows: what is not passed on is not granted again.
    pub events: mpsc::UnboundedReceiver<ExecEvent>,
}

#[derive(Debug)]
pub(super) enum ExecEvent {
    Output(v1::Output, Vec<u8>),
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

/// Moves bytes both ways until the process has ended or nobody wants it any more.
pub(super) fn pump(guest: Guest, opened: Opened) -> ExecStream {
    let (stdin, incoming) = mpsc::channel(CHANNEL);
    let (outgoing, output) = mpsc::channel(CHANNEL);
    let input = tokio::spawn(pump_stdin(guest.clone(), opened.id, incoming));
    tokio::spawn(async move {
        pump_output(&guest, opened, outgoing).await;
        input.abort();
    });
    ExecStream { stdin, output }
}

async fn pump_stdin(guest: Guest, exec: ExecId, mut incoming: mpsc::Receiver<Bytes>) {
    while let Some(data) = incoming.recv().await {
        let (taken, done) = oneshot::channel();
        guest.command(Command::Stdin { exec, data, taken });
        // Refused when the stream is over.
        if done.await.is_err() {
            return;
        }
    }
    guest.command(Command::CloseStdin(exec));
}

async fn pump_output(guest: &Guest, mut opened: Opened, outgoing: mpsc::Sender<ExecOutput>) {
    let exec = opened.id;
    loop {
        let event = tokio::select! {
            event = opened.events.recv() => event.unwrap_or(ExecEvent::Lost),
            () = outgoing.closed() => return guest.command(Command::Abandon(exec)),
        };
        let (output, piece) = match event {
            ExecEvent::Output(output, data) => (output, data),
            ExecEvent::Ended(end) => {
                for output in ended(end) {
                    let _ = outgoing.send(output).await;
                }
                return;
            }
            ExecEvent::Lost => return drop(outgoing.send(ExecOutput::Failed(lost())).await),
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

fn lost() -> StreamError {
    let message = "the connection to the guest was lost, and the process with it".to_owned();
    StreamError { failure: StreamFailure::GuestUnavailable, message }
}

/// What a client sees of the end. A program that cannot be run ends as in a shell: the reason on standard
/// error, and a status that every client understands.
fn ended(end: ProcessEnd) -> Vec<ExecOutput> {
    let number = |number: u32| i32::try_from(number).unwrap_or(i32::MAX);
    let as_shell = |message: String, code| {
        vec![ExecOutput::Stderr(Bytes::from(message + "\n")), ExecOutput::Exit(ExecExit::Code(code))]
    };
    match end {
        ProcessEnd::Code(code) => vec![ExecOutput::Exit(ExecExit::Code(number(code)))],
        ProcessEnd::Signal(signal) => vec![ExecOutput::Exit(ExecExit::Signal(number(signal)))],
        ProcessEnd::NotStarted(failure) => match failure.reason() {
            v1::StartFailureReason::NotFound => as_shell(failure.message, 127),
            v1::StartFailureReason::PermissionDenied => as_shell(failure.message, 126),
            v1::StartFailureReason::NotReady | v1::StartFailureReason::TooMany => {
                let message = failure.message;
                vec![ExecOutput::Failed(StreamError { failure: StreamFailure::GuestUnavailable, message })]
            }
            _ => {
                let message = failure.message;
                vec![ExecOutput::Failed(StreamError { failure: StreamFailure::Invalid, message })]
            }
        },
    }
}
