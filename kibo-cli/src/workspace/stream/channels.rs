//! The client's end of a stream: Kubernetes' remote-command protocol over a WebSocket.
//!
//! kube's own is made for pods: it has no channel for signals, no half-close of an output, and copies every byte
//! through two more buffers. Here a message is taken apart where it lies, and nothing is read ahead: who reads slowly
//! stops the sender.

use std::{pin::Pin, time::Duration};

use bytes::{BufMut as _, Bytes, BytesMut};
use futures::{Sink, SinkExt as _, StreamExt as _, stream::BoxStream};
use http::Request;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::{self, Message};

use super::path;
use crate::{
    client::{Cluster, answered},
    errors::{Error, Kind, Result, Subject, from_status, root},
};

/// The bytes that are sent at once: so many that their frames cost nothing and a guest gets in one run all that it can, so
/// few that a terminal's keystrokes pass between two pieces.
pub const DATA: usize = 256 * 1024;

/// The same with the channel before them.
pub const PIECE: usize = 1 + DATA;

/// The operator gives a sign of life every five seconds.
const SILENCE: Duration = Duration::from_secs(30);

/// First byte of a message that closes the channel named by its second byte.
const CLOSE: u8 = 255;

/// What a client writes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    Stdin = 0,
    Resize = 4,
    Signal = 5,
}

/// The way to the guest.
pub struct Sender(Pin<Box<dyn Sink<Message, Error = tungstenite::Error> + Send>>);

/// The way from it.
pub struct Receiver {
    messages: BoxStream<'static, Result<Message, tungstenite::Error>>,
}

/// What comes from the guest, or from the operator about it.
#[derive(Debug, PartialEq)]
pub enum FromServer {
    Stdout(Bytes),
    Stderr(Bytes),
    /// Nothing more comes on stdout; the other direction is open.
    StdoutClosed,
    /// How the stream ended.
    Ended(Box<Status>),
}

/// The connection ended before the stream did.
#[derive(Debug, thiserror::Error)]
#[error("the connection broke: {0}")]
pub struct Broken(String);

/// Opens a stream. Nothing was done when this fails.
pub async fn open(
    cluster: &Cluster,
    subject: &Subject,
    subresource: &str,
    query: &[(&str, &str)],
) -> Result<(Sender, Receiver)> {
    let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(query).finish();
    let request = Request::get(format!("{}?{query}", path(subject, subresource))).body(Vec::new());
    let request = request.map_err(|error| Error::invalid(format!("{subject}: {error}")))?;
    let connection = answered(subject, cluster.client.connect(request)).await?;
    if !connection.supports_stream_close() {
        let message = format!("{subject}: the operator is too old: it cannot be told where an input ends");
        return Err(Error::new(Kind::Unavailable, message));
    }
    let (sink, messages) = connection.into_stream().split();
    Ok((Sender(Box::pin(sink)), Receiver { messages: messages.boxed() }))
}

/// Standard input. A pipe gets room for a whole piece.
pub fn stdin() -> tokio::io::Stdin {
    // Anything else than a pipe refuses, and is as it is.
    let _ = rustix::pipe::fcntl_setpipe_size(std::io::stdin(), DATA);
    tokio::io::stdin()
}

impl Sender {
    /// Sends and waits until the connection has taken it.
    pub async fn send(&mut self, channel: Channel, data: &[u8]) -> Result<(), Broken> {
        let mut message = BytesMut::with_capacity(data.len() + 1);
        message.put_u8(channel as u8);
        message.extend_from_slice(data);
        self.send_framed(message.freeze()).await
    }

    /// The same for what begins with the channel already.
    pub async fn send_framed(&mut self, message: Bytes) -> Result<(), Broken> {
        self.0.send(Message::Binary(message)).await.map_err(|error| Broken(root(&error)))
    }

    /// Says that the input has ended.
    pub async fn close_stdin(&mut self) -> Result<(), Broken> {
        self.send_framed(Bytes::from_static(&[CLOSE, Channel::Stdin as u8])).await
    }
}

impl Receiver {
    /// The next piece. After [`FromServer::Ended`] there is none. Cancel safe.
    pub async fn next(&mut self) -> Result<FromServer, Broken> {
        loop {
            let message = timeout(SILENCE, self.messages.next()).await;
            match message.map_err(|_| Broken(format!("nothing was heard for {} s", SILENCE.as_secs())))? {
                Some(Ok(Message::Binary(message))) => {
                    if let Some(known) = decode(&message)? {
                        return Ok(known);
                    }
                }
                Some(Ok(Message::Close(Some(frame)))) if !frame.reason.is_empty() => {
                    return Err(Broken(frame.reason.to_string()));
                }
                None | Some(Ok(Message::Close(_))) => return Err(Broken("it was closed early".to_owned())),
                Some(Err(error)) => return Err(Broken(root(&error))),
                Some(Ok(_)) => {}
            }
        }
    }
}

/// Reads one message; none: it means nothing, or is from a newer server.
fn decode(message: &Bytes) -> Result<Option<FromServer>, Broken> {
    Ok(match (message.first(), message.get(1)) {
        (Some(1), Some(_)) => Some(FromServer::Stdout(message.slice(1..))),
        (Some(2), Some(_)) => Some(FromServer::Stderr(message.slice(1..))),
        (Some(3), Some(_)) => {
            let status = serde_json::from_slice(&message[1..]);
            let status = status.map_err(|error| Broken(format!("its end is not understood: {error}")))?;
            Some(FromServer::Ended(Box::new(status)))
        }
        (Some(&CLOSE), Some(1)) => Some(FromServer::StdoutClosed),
        _ => None,
    })
}

/// The exit status of what ran in the guest; an error when nobody knows it.
pub fn exit_code(status: &Status, subject: &Subject) -> Result<u8> {
    if status.status.as_deref() == Some("Success") {
        return Ok(0);
    }
    let code = cause(status, "ExitCode").and_then(|code| code.parse::<i32>().ok());
    match code {
        Some(code) => Ok(u8::try_from(code).unwrap_or(u8::MAX)),
        None => Err(failure(status, subject)),
    }
}

/// What became of the Workspace, when the stream ended because of it.
pub fn became_of_workspace(status: &Status) -> Option<&str> {
    cause(status, "Workspace")
}

fn cause<'a>(status: &'a Status, reason: &str) -> Option<&'a str> {
    let mut causes = status.details.iter().flat_map(|details| details.causes.iter().flatten());
    causes.find(|cause| cause.reason.as_deref() == Some(reason))?.message.as_deref()
}

/// A stream that did not do what it was for.
pub fn failure(status: &Status, subject: &Subject) -> Error {
    let message = status.message.clone().unwrap_or_default();
    let kind = match status.reason.as_deref() {
        // What the operator calls internal is a node, a session or a leader that went away.
        Some("InternalError" | "ServiceUnavailable" | "ConnectionRefused") => Kind::Unavailable,
        Some("NotFound") => Kind::NotFound,
        Some("BadRequest") => Kind::InvalidArgument,
        Some("TooManyRequests" | "InsufficientStorage") => Kind::ResourceExhausted,
        Some("Conflict") => Kind::FailedPrecondition,
        Some("Failed" | "NonZeroExitCode") => Kind::Other,
        reason => {
            let status = kube::core::Status {
                code: status.code.and_then(|code| u16::try_from(code).ok()).unwrap_or(0),
                message,
                reason: reason.unwrap_or_default().to_owned(),
                ..kube::core::Status::default()
            };
            return from_status(&status, subject);
        }
    };
    Error::new(kind, format!("{subject}: {message}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn code(status: Value) -> Result<u8> {
        let subject = Subject::namespaced("Workspace", "dev", "default");
        exit_code(&serde_json::from_value(status).unwrap(), &subject)
    }

    #[test]
    fn the_exit_status_is_that_of_the_remote_command() {
        assert_eq!(code(json!({ "status": "Success" })), Ok(0));
        let failed = json!({
            "status": "Failure", "reason": "NonZeroExitCode", "message": "command terminated with exit code 3",
            "details": { "causes": [{ "reason": "ExitCode", "message": "3" }] },
        });
        assert_eq!(code(failed), Ok(3));
    }

    #[test]
    fn a_failure_of_the_stream_is_no_exit_status() {
        for (reason, kind) in [
            ("InternalError", Kind::Unavailable),
            ("ServiceUnavailable", Kind::Unavailable),
            ("NotFound", Kind::NotFound),
            ("BadRequest", Kind::InvalidArgument),
            ("Conflict", Kind::FailedPrecondition),
            ("Failed", Kind::Other),
            ("Forbidden", Kind::NotPermitted),
        ] {
            let error = code(json!({ "status": "Failure", "reason": reason, "message": "no such node" })).unwrap_err();
            assert_eq!(error.kind, kind, "{reason}");
            assert!(error.message.ends_with("no such node"), "{error}");
        }
    }

    #[test]
    fn messages_are_taken_apart() {
        let decoded = |message: &'static [u8]| decode(&Bytes::from_static(message)).unwrap();
        assert_eq!(decoded(b"\x01a\0b"), Some(FromServer::Stdout(Bytes::from_static(b"a\0b"))));
        assert_eq!(decoded(b"\x02x"), Some(FromServer::Stderr(Bytes::from_static(b"x"))));
        assert_eq!(decoded(b"\xff\x01"), Some(FromServer::StdoutClosed));
        for nothing in [&b""[..], b"\x01", b"\x03", b"\xff\x02", b"\x09x"] {
            assert_eq!(decoded(nothing), None, "{nothing:?}");
        }
        match decoded(b"\x03{\"status\":\"Success\"}") {
            Some(FromServer::Ended(status)) => assert_eq!(status.status.as_deref(), Some("Success")),
            other => panic!("{other:?}"),
        }
        assert!(decode(&Bytes::from_static(b"\x03nonsense")).is_err());
    }
}
