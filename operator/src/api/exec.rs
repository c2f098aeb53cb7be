//! `exec`: a command in the guest, over a WebSocket.

use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use futures::{
    SinkExt as _, StreamExt as _,
    stream::{SplitSink, SplitStream},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use tokio::time::{Instant, interval_at, timeout};
use tokio_util::sync::CancellationToken;

use super::{
    remote_command::{self, Channel, FromClient, Protocol},
    status::ApiError,
};
use crate::streams::{Input, NodeStream, Output, OutputFrame};

/// A client that went away without a word is noticed when it does not take a sign of life. It is a pong that nobody
/// asked for: client-go gives up after a minute without one, and its own pings wait behind the input that a slow
/// command has not taken.
const SIGN_EVERY: Duration = Duration::from_secs(5);
/// How long a client may take to end its side after it was told how the command ended.
const FAREWELL: Duration = Duration::from_secs(5);
/// The same when the leadership ends, since the Lease waits for it.
const HASTY_FAREWELL: Duration = Duration::from_secs(1);
/// Clients send pieces of some 32 KiB.
pub const MAX_MESSAGE: usize = 1024 * 1024;

/// What the query of an exec request says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecOptions {
    pub command: Vec<String>,
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
}

impl ExecOptions {
    /// Reads the parameters that `pods/exec` has. A Workspace has one guest, so `container` means nothing.
    pub fn from_query(query: &str) -> Result<Self, ApiError> {
        let mut options = Self::default();
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*key {
                "command" => options.command.push(value.into_owned()),
                "stdin" => options.stdin = is_true(&value),
                "stdout" => options.stdout = is_true(&value),
                "stderr" => options.stderr = is_true(&value),
                "tty" if is_true(&value) => {
                    return Err(bad("tty=true is not supported yet: run the command without a terminal"));
                }
                _ => {}
            }
        }
        if options.command.first().is_none_or(String::is_empty) {
            return Err(bad("no command: give command=PROGRAM, and command= once more for each argument"));
        }
        if !(options.stdin || options.stdout || options.stderr) {
            return Err(bad("at least one of stdin, stdout and stderr must be true"));
        }
        Ok(options)
    }
}

fn bad(message: &str) -> ApiError {
    ApiError::BadRequest(message.to_owned())
}

/// As Kubernetes reads a boolean parameter: its presence says yes.
pub fn is_true(value: &str) -> bool {
    !value.eq_ignore_ascii_case("false") && value != "0"
}

/// Passes everything on between client and guest until the command has ended or one of the two is gone.
/// `stop` ends it early, since this process does not lead any more.
pub async fn serve(
    socket: WebSocket,
    protocol: Protocol,
    options: ExecOptions,
    stream: NodeStream,
    stop: CancellationToken,
) {
    let (sink, mut source) = socket.split();
    let NodeStream { output, input } = stream;
    let mut client = ToClient { sink, stdout: options.stdout, stderr: options.stderr };
    let pass_on = async {
        let mut output = output;
        tokio::select! {
            end = client.pass_on(&mut output) => end,
            () = stop.cancelled() => {
                Some(remote_command::status_of_failure("the operator's leader changes: the command was ended, run it again"))
            }
        }
    };
    let end = tokio::select! {
        end = pass_on => end,
        gone = take_input(&mut source, protocol, options.stdin, &input) => match gone {
            Gone::Closed => None,
            Gone::Wrong(error) => {
                client.close(close_code::PROTOCOL, &error).await;
                None
            }
        },
    };
    let Some(status) = end else {
        tracing::debug!("the client of an exec went away");
        return;
    };
    let farewell = async {
        client.finish(&status).await;
        // What a client still sends is read, or the connection would be reset under the status.
        while let Some(Ok(_)) = source.next().await {}
    };
    let _ = timeout(if stop.is_cancelled() { HASTY_FAREWELL } else { FAREWELL }, farewell).await;
}

/// The way to the client.
struct ToClient {
    sink: SplitSink<WebSocket, Message>,
    stdout: bool,
    stderr: bool,
}

impl ToClient {
    /// Sends what the guest says; the status at its end, or none when the client is gone.
    async fn pass_on(&mut self, output: &mut Output) -> Option<Status> {
        // Kubernetes says with an empty message that the command is under way; some clients wait for it.
        let first = if self.stdout {
            Channel::Stdout
        } else if self.stderr {
            Channel::Stderr
        } else {
            Channel::Error
        };
        self.send(Message::Binary(remote_command::encode(first, &[]))).await?;
        let mut sign = interval_at(Instant::now() + SIGN_EVERY, SIGN_EVERY);
        loop {
            let frame = tokio::select! {
                frame = output.next() => frame,
                _ = sign.tick() => {
                    self.send(Message::Pong(axum::body::Bytes::new())).await?;
                    continue;
                }
            };
            match frame {
                Ok(Some(OutputFrame::Stdout(data))) if self.stdout => self.output(Channel::Stdout, &data).await?,
                Ok(Some(OutputFrame::Stderr(data))) if self.stderr => self.output(Channel::Stderr, &data).await?,
                Ok(Some(OutputFrame::Stdout(_) | OutputFrame::Stderr(_))) => {}
                Ok(Some(OutputFrame::Exit(exit))) => return Some(remote_command::status_of_exit(exit)),
                Ok(None) => {
                    let message =
                        format!("node {} ended the stream without saying how the command ended", output.node());
                    return Some(remote_command::status_of_failure(&message));
                }
                Err(lost) => return Some(remote_command::status_of_failure(&lost.to_string())),
            }
        }
    }

    async fn output(&mut self, channel: Channel, data: &[u8]) -> Option<()> {
        if data.is_empty() {
            return Some(());
        }
        self.send(Message::Binary(remote_command::encode(channel, data))).await
    }

    async fn finish(&mut self, status: &Status) {
        if self.send(Message::Binary(remote_command::encode_status(status))).await.is_some() {
            self.close(close_code::NORMAL, "").await;
        }
    }

    async fn close(&mut self, code: u16, reason: &str) {
        let frame = CloseFrame { code, reason: reason.into() };
        // The client may be gone already.
        let _ = self.send(Message::Close(Some(frame))).await;
    }

    /// Waits until the client has taken the message; none: it is gone.
    async fn send(&mut self, message: Message) -> Option<()> {
        self.sink.send(message).await.ok()
    }
}

/// Why no more input comes.
enum Gone {
    Closed,
    Wrong(String),
}

/// Takes the client's messages until it is gone. Also while no input is wanted (`open` is false, or became so)
/// they are looked at, since pings and the end of the connection come among them.
async fn take_input(source: &mut SplitStream<WebSocket>, protocol: Protocol, mut open: bool, input: &Input) -> Gone {
    loop {
        let message = match source.next().await {
            None | Some(Err(_) | Ok(Message::Close(_))) => return Gone::Closed,
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => continue,
            Some(Ok(Message::Text(_))) => return Gone::Wrong(remote_command::ProtocolError::Text.to_string()),
            Some(Ok(Message::Binary(data))) => data,
        };
        match remote_command::decode(protocol, &message) {
            Err(error) => return Gone::Wrong(error.to_string()),
            // A node that listens no more has sent, or is about to send, how the command ended.
            Ok(FromClient::Stdin(data)) if open => open = input.write(&data).await,
            Ok(FromClient::StdinClosed) if open => {
                input.close().await;
                open = false;
            }
            Ok(FromClient::Stdin(_) | FromClient::StdinClosed | FromClient::Nothing) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_of_pods_exec_is_understood() {
        let query = "command=sh&command=-c&command=echo%20%22a+b%22&stdin=1&stdout=true&stderr=false&container=x";
        let expected = ExecOptions {
            command: ["sh", "-c", "echo \"a b\""].map(str::to_owned).into(),
            stdin: true,
            stdout: true,
            stderr: false,
        };
        assert_eq!(ExecOptions::from_query(query).unwrap(), expected);
    }

    #[test]
    fn what_cannot_be_done_is_refused_with_what_to_write() {
        for (query, word) in [
            ("stdout=true", "command=PROGRAM"),
            ("command=&stdout=true", "command=PROGRAM"),
            ("command=ls", "at least one"),
            ("command=sh&stdout=true&tty=true", "tty=true"),
        ] {
            let error = ExecOptions::from_query(query).unwrap_err();
            assert_eq!(error.to_status().code, Some(400));
            assert!(error.to_string().contains(word), "{error}");
        }
        assert!(ExecOptions::from_query("command=sh&stdout=true&tty=false").is_ok());
    }
}
