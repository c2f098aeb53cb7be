//! The Kubernetes remote-command protocol over WebSocket, without I/O.
//!
//! Every binary message is one byte that names a channel and the bytes for it. How the command
//! ended is one `Status` object on the error channel. Version 5 adds a message that closes a
//! channel, which is how a client says that its input has ended; version 4 cannot say that.

use axum::body::Bytes;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Status, StatusCause, StatusDetails};
use kibo_protocol::v1::ExitStatus;

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
    /// Means nothing here: an empty message, a window size without a terminal, the end of a channel that
    /// the client does not write on.
    Nothing,
}

/// A message that the protocol does not know.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    #[error("a message came on channel {0}, which a client does not write on")]
    Channel(u8),
    #[error("a text message came: the channel protocols v4 and v5 are binary")]
    Text,
}

/// Reads one binary message of a client.
pub fn decode(protocol: Protocol, message: &Bytes) -> Result<FromClient, ProtocolError> {
    const STDIN: u8 = 0;
    const RESIZE: u8 = 4;
    match (message.first(), message.get(1)) {
        (None | Some(&RESIZE), _) | (Some(&STDIN), None) => Ok(FromClient::Nothing),
        (Some(&STDIN), Some(_)) => Ok(FromClient::Stdin(message.slice(1..))),
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
            let name = signal_name(signal);
            non_zero(code, format!("command was ended by signal {signal}{name}: exit code {code}"))
        }
        (None, None) => status_of_failure("the node did not say how the command ended"),
    }
}

/// The end of a session whose command may still run, or whose result nobody knows.
pub fn status_of_failure(message: &str) -> Status {
    Status {
        status: Some("Failure".to_owned()),
        reason: Some("InternalError".to_owned()),
        message: Some(message.to_owned()),
        code: Some(500),
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

/// The usual ones by name, since people know SIGKILL better than 9.
fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => " (SIGHUP)",
        2 => " (SIGINT)",
        3 => " (SIGQUIT)",
        6 => " (SIGABRT)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        13 => " (SIGPIPE)",
        14 => " (SIGALRM)",
        15 => " (SIGTERM)",
        _ => "",
    }
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
        for message in [&[][..], &[0], b"\x04{\"Width\":80,\"Height\":24}"] {
            assert_eq!(decode(Protocol::V5, &bytes(message)), Ok(FromClient::Nothing), "{message:?}");
        }
    }

    #[test]
    fn a_client_that_writes_on_a_channel_of_the_server_is_refused() {
        for channel in [1, 2, 3, 5, 200] {
            assert_eq!(decode(Protocol::V5, &bytes(&[channel, 7])), Err(ProtocolError::Channel(channel)));
        }
    }

    #[test]
    fn a_message_names_its_channel_first() {
        assert_eq!(encode(Channel::Stdout, b"a\0b"), bytes(b"\x01a\0b"));
        assert_eq!(encode(Channel::Stderr, b""), bytes(b"\x02"));
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
