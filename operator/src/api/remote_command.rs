//! The Kubernetes remote-command protocol over WebSocket, without I/O: what exec, files and portforward speak.
//!
//! Every binary message is one byte that names a channel and the bytes for it. How the stream
//! ended is one `Status` object on the error channel. Version 5 adds a message that closes a
//! channel, which is how a side says that nothing more comes on it; version 4 cannot say that.
//! Channel 5 is ours: a signal for the command, by its name.

use axum::body::Bytes;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Status, StatusCause, StatusDetails};
use kibo_protocol::v1::{ExitStatus, StreamFailure};
use serde::Deserialize;

use crate::streams::StreamLost;

/// First byte of a message that closes the channel named by its second byte.
const CLOSE: u8 = 255;

/// Versions that are spoken, the preferred one first.
pub const PROTOCOLS: [&str; 2] = ["v5.channel.k8s.io", "v4.channel.k8s.io"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    V4,
    V5,
}

impl Protocol {
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "v5.channel.k8s.io" => Some(Self::V5),
            "v4.channel.k8s.io" => Some(Self::V4),
            _ => None,
        }
    }
}

/// What the server writes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    Stdout = 1,
    Stderr = 2,
    /// Carries the `Status` that ends the session.
    Error = 3,
}

/// What a client can say.
#[derive(Debug, PartialEq, Eq)]
pub enum FromClient {
    Stdin(Bytes),
    /// The input has ended; nothing more comes on it.
    StdinClosed,
    Resize(WindowSize),
    /// By its Linux number.
    Signal(u32),
    /// Means nothing here: an empty message, the end of a channel that the client does not write on.
    Nothing,
}

/// Of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct WindowSize {
    #[serde(rename = "Width")]
    pub columns: u16,
    #[serde(rename = "Height")]
    pub rows: u16,
}

/// A message that the protocol does not know.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    #[error("a message came on channel {0}, which a client does not write on")]
    Channel(u8),
    #[error("a text message came: the channel protocols v4 and v5 are binary")]
    Text,
    #[error("a window size must be {{\"Width\":COLUMNS,\"Height\":ROWS}}: {0}")]
    WindowSize(String),
    #[error("no signal has the name {0:?}: send one such as INT or TERM")]
    Signal(String),
}

/// Reads one binary message of a client.
pub fn decode(protocol: Protocol, message: &Bytes) -> Result<FromClient, ProtocolError> {
    const STDIN: u8 = 0;
    const RESIZE: u8 = 4;
    const SIGNAL: u8 = 5;
    match (message.first(), message.get(1)) {
        (None, _) | (Some(&(STDIN | RESIZE | SIGNAL)), None) => Ok(FromClient::Nothing),
        (Some(&STDIN), Some(_)) => Ok(FromClient::Stdin(message.slice(1..))),
        (Some(&RESIZE), Some(_)) => serde_json::from_slice(&message[1..])
            .map(FromClient::Resize)
            .map_err(|error| ProtocolError::WindowSize(error.to_string())),
        (Some(&SIGNAL), Some(_)) => signal_number(&message[1..])
            .map(FromClient::Signal)
            .ok_or_else(|| ProtocolError::Signal(String::from_utf8_lossy(&message[1..]).into_owned())),
        (Some(&CLOSE), Some(&STDIN)) if protocol == Protocol::V5 => Ok(FromClient::StdinClosed),
        (Some(&CLOSE), Some(_)) if protocol == Protocol::V5 => Ok(FromClient::Nothing),
        (Some(&other), _) => Err(ProtocolError::Channel(other)),
    }
}

/// Makes one binary message for the client.
pub fn encode(channel: Channel, data: &[u8]) -> Bytes {
    let mut message = Vec::with_capacity(data.len() + 1);
    message.push(channel as u8);
    message.extend_from_slice(data);
    message.into()
}

/// Says that nothing more comes on a channel; version 4 has no words for it.
pub fn encode_closed(protocol: Protocol, channel: Channel) -> Option<Bytes> {
    (protocol == Protocol::V5).then(|| Bytes::copy_from_slice(&[CLOSE, channel as u8]))
}

/// The message on the error channel that ends a session.
pub fn encode_status(status: &Status) -> Bytes {
    let json = serde_json::to_vec(status).expect("a Status is plain data");
    encode(Channel::Error, &json)
}

/// How a command ended, in the words that the kubelet uses, since clients look for them.
pub fn status_of_exit(exit: ExitStatus) -> Status {
    match (exit.code, exit.signal) {
        (Some(0), _) => Status { status: Some("Success".to_owned()), ..Status::default() },
        (Some(code), _) => non_zero(code, format!("command terminated with exit code {code}")),
        (None, Some(signal)) => {
            let code = 128 + signal;
            let name = signal_name(signal).map(|name| format!(" (SIG{name})")).unwrap_or_default();
            non_zero(code, format!("command was ended by signal {signal}{name}: exit code {code}"))
        }
        (None, None) => status_of_failure("the node did not say how the command ended"),
    }
}

/// The end of a stream of which nobody knows how it went on.
pub fn status_of_failure(message: &str) -> Status {
    failure(500, "InternalError", message)
}

/// The end of a stream that broke, or that the node ended with an error.
pub fn status_of_lost(lost: &StreamLost) -> Status {
    let message = lost.to_string();
    let StreamLost::Failed { failure: kind, .. } = lost else { return status_of_failure(&message) };
    match kind {
        StreamFailure::Invalid => failure(400, "BadRequest", &message),
        StreamFailure::NotFound => failure(404, "NotFound", &message),
        StreamFailure::NoInstance => failure(409, "Conflict", &message),
        StreamFailure::TooMany => failure(429, "TooManyRequests", &message),
        // As a gateway says it of the server behind it.
        StreamFailure::Refused => failure(502, "ConnectionRefused", &message),
        // As WebDAV says it of a disk that is full.
        StreamFailure::NoSpace => failure(507, "InsufficientStorage", &message),
        StreamFailure::Failed => failure(500, "Failed", &message),
        StreamFailure::Interrupted => failure(503, "ServiceUnavailable", &message),
        StreamFailure::Unspecified | StreamFailure::GuestUnavailable => status_of_failure(&message),
    }
}

/// Whether a stream that ended so may have ended because its Workspace stopped.
pub fn may_be_of_a_stop(status: &Status) -> bool {
    let mut causes = status.details.iter().flat_map(|details| details.causes.iter().flatten());
    let code = causes.find_map(|cause| cause.message.as_deref()?.parse::<i32>().ok());
    match code {
        Some(code) => code > 128,
        None => matches!(status.code, Some(409 | 500 | 503)),
    }
}

fn failure(code: i32, reason: &str, message: &str) -> Status {
    Status {
        status: Some("Failure".to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        code: Some(code),
        ..Status::default()
    }
}

fn non_zero(code: i32, message: String) -> Status {
    let cause =
        StatusCause { reason: Some("ExitCode".to_owned()), message: Some(code.to_string()), ..StatusCause::default() };
    Status {
        status: Some("Failure".to_owned()),
        reason: Some("NonZeroExitCode".to_owned()),
        message: Some(message),
        details: Some(StatusDetails { causes: Some(vec![cause]), ..StatusDetails::default() }),
        ..Status::default()
    }
}

/// The usual ones, by which people know SIGKILL better than by 9.
const SIGNALS: [(u8, &str); 15] = [
    (1, "HUP"),
    (2, "INT"),
    (3, "QUIT"),
    (6, "ABRT"),
    (9, "KILL"),
    (10, "USR1"),
    (11, "SEGV"),
    (12, "USR2"),
    (13, "PIPE"),
    (14, "ALRM"),
    (15, "TERM"),
    (18, "CONT"),
    (19, "STOP"),
    (20, "TSTP"),
    (28, "WINCH"),
];

fn signal_name(signal: i32) -> Option<&'static str> {
    SIGNALS.iter().find(|(number, _)| i32::from(*number) == signal).map(|(_, name)| *name)
}

fn signal_number(name: &[u8]) -> Option<u32> {
    SIGNALS.iter().find(|(_, known)| known.as_bytes() == name).map(|(number, _)| u32::from(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(data: &[u8]) -> Bytes {
        Bytes::copy_from_slice(data)
    }

    #[test]
    fn input_is_read_as_it_is_whatever_its_bytes() {
        let all: Vec<u8> = (0..=255).collect();
        let message = [&[0][..], &all].concat();
        assert_eq!(decode(Protocol::V5, &bytes(&message)), Ok(FromClient::Stdin(bytes(&all))));
    }

    #[test]
    fn only_version_five_closes_the_input() {
        assert_eq!(decode(Protocol::V5, &bytes(&[255, 0])), Ok(FromClient::StdinClosed));
        assert_eq!(decode(Protocol::V5, &bytes(&[255, 1])), Ok(FromClient::Nothing));
        assert_eq!(decode(Protocol::V4, &bytes(&[255, 0])), Err(ProtocolError::Channel(255)));
    }

    #[test]
    fn what_means_nothing_does_no_harm() {
        for message in [&[][..], &[0], &[4], &[5]] {
            assert_eq!(decode(Protocol::V5, &bytes(message)), Ok(FromClient::Nothing), "{message:?}");
        }
    }

    #[test]
    fn a_client_that_writes_on_a_channel_of_the_server_is_refused() {
        for channel in [1, 2, 3, 6, 200] {
            assert_eq!(decode(Protocol::V5, &bytes(&[channel, 7])), Err(ProtocolError::Channel(channel)));
        }
    }

    #[test]
    fn a_terminal_says_its_size_and_signals_have_names() {
        let resize = decode(Protocol::V4, &bytes(b"\x04{\"Width\":132,\"Height\":43}"));
        assert_eq!(resize, Ok(FromClient::Resize(WindowSize { columns: 132, rows: 43 })));
        for wrong in [&b"\x04{}"[..], b"\x04x", b"\x04{\"Width\":-1,\"Height\":4}"] {
            assert!(matches!(decode(Protocol::V5, &bytes(wrong)), Err(ProtocolError::WindowSize(_))), "{wrong:?}");
        }
        assert_eq!(decode(Protocol::V5, &bytes(b"\x05INT")), Ok(FromClient::Signal(2)));
        assert_eq!(decode(Protocol::V5, &bytes(b"\x05TERM")), Ok(FromClient::Signal(15)));
        for wrong in [&b"\x05SIGINT"[..], b"\x05int", b"\x05\xff", b"\x052"] {
            assert!(matches!(decode(Protocol::V5, &bytes(wrong)), Err(ProtocolError::Signal(_))), "{wrong:?}");
        }
    }

    #[test]
    fn a_failure_says_of_which_kind_it_is() {
        let of = |failure| status_of_lost(&StreamLost::Failed { failure, message: "words".to_owned() });
        let not_found = of(StreamFailure::NotFound);
        assert_eq!((not_found.code, not_found.message.as_deref()), (Some(404), Some("words")));
        assert_eq!(of(StreamFailure::Refused).reason.as_deref(), Some("ConnectionRefused"));
        assert_eq!(of(StreamFailure::GuestUnavailable).code, Some(500));
    }

    #[test]
    fn a_message_names_its_channel_first() {
        assert_eq!(encode(Channel::Stdout, b"a\0b"), bytes(b"\x01a\0b"));
        assert_eq!(encode(Channel::Stderr, b""), bytes(b"\x02"));
        assert_eq!(encode_closed(Protocol::V5, Channel::Stdout), Some(bytes(b"\xff\x01")));
        assert_eq!(encode_closed(Protocol::V4, Channel::Stdout), None);
    }

    #[test]
    fn a_status_says_the_exit_code_as_the_kubelet_does() {
        let of = |code, signal| status_of_exit(ExitStatus { code, signal });
        assert_eq!(of(Some(0), None).status.as_deref(), Some("Success"));
        let code = |status: &Status| {
            let causes = status.details.as_ref().and_then(|details| details.causes.as_ref())?;
            causes.iter().find(|cause| cause.reason.as_deref() == Some("ExitCode"))?.message.clone()
        };
        let seven = of(Some(7), None);
        assert_eq!((code(&seven).as_deref(), seven.reason.as_deref()), (Some("7"), Some("NonZeroExitCode")));
        let killed = of(None, Some(9));
        assert_eq!(code(&killed).as_deref(), Some("137"));
        assert!(killed.message.unwrap().contains("signal 9 (SIGKILL)"));
        assert_eq!(code(&of(None, None)), None, "an unknown end is not an exit code");
    }

    #[test]
    fn the_protocol_is_one_that_both_sides_know() {
        assert_eq!(PROTOCOLS.map(Protocol::from_name), [Some(Protocol::V5), Some(Protocol::V4)]);
        assert_eq!(Protocol::from_name("channel.k8s.io"), None);
    }
}
