//! `log`: what the Workspace's entrypoint wrote, as plain text.

use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::stream;
use kibo_protocol::v1;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{exec::is_true, status::ApiError};
use crate::streams::{NodeStream, Output, OutputFrame, StreamLost};

/// A node answers at once; a log that is followed may have nothing to say yet.
const FIRST_PIECE: Duration = Duration::from_millis(500);

/// What the query of a log request says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    pub follow: bool,
    pub tail_lines: Option<u64>,
}

impl LogOptions {
    /// Reads the parameters that `pods/log` has; those that would change the answer and are not understood
    /// are refused.
    pub fn from_query(query: &str) -> Result<Self, ApiError> {
        let mut options = Self::default();
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*key {
                "follow" => options.follow = is_true(&value),
                "tailLines" => {
                    let lines = value.parse().map_err(|_| {
                        ApiError::BadRequest(format!("tailLines must be a whole number from 0 on, not {value:?}"))
                    })?;
                    options.tail_lines = Some(lines);
                }
                "previous" | "timestamps" if !is_true(&value) => {}
                "previous" | "timestamps" | "sinceSeconds" | "sinceTime" | "limitBytes" => {
                    return Err(ApiError::BadRequest(format!("{key} is not supported yet: use follow and tailLines")));
                }
                _ => {}
            }
        }
        Ok(options)
    }

    pub fn request(&self, workspace_uid: &str) -> v1::LogRequest {
        v1::LogRequest {
            workspace_uid: workspace_uid.to_owned(),
            follow: self.follow,
            tail_lines: self.tail_lines,
            ..v1::LogRequest::default()
        }
    }
}

/// The end of a log that is not its end: the connection breaks, so that nobody takes a part for the whole.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error(transparent)]
    Lost(#[from] StreamLost),
    #[error("the operator's leader changes")]
    Stopped,
}

/// The log as a body that is read from the node as fast as the client takes it. A node that has no such log says so
/// in place of its first piece, while the answer can still be an error.
pub async fn body(mut stream: NodeStream, stop: CancellationToken) -> Result<Body, StreamLost> {
    let first = match timeout(FIRST_PIECE, next_data(&mut stream.output)).await {
        Ok(first) => match first? {
            Some(data) => Some(data),
            None => return Ok(Body::empty()),
        },
        Err(_) => None,
    };
    Ok(Body::from_stream(stream::try_unfold((first, stream, stop), |(first, mut stream, stop)| async move {
        if let Some(data) = first {
            return Ok(Some((data, (None, stream, stop))));
        }
        let next = tokio::select! {
            next = next_data(&mut stream.output) => next.map_err(Broken::from),
            () = stop.cancelled() => Err(Broken::Stopped),
        };
        match next {
            Ok(data) => Ok(data.map(|data| (data, (None, stream, stop)))),
            Err(broken) => {
                tracing::info!(error = %broken, "a log ended early");
                Err(broken)
            }
        }
    })))
}

async fn next_data(output: &mut Output) -> Result<Option<Bytes>, StreamLost> {
    loop {
        match output.next().await? {
            Some(OutputFrame::Stdout(data) | OutputFrame::Stderr(data)) if data.is_empty() => {}
            Some(OutputFrame::Stdout(data) | OutputFrame::Stderr(data)) => return Ok(Some(data)),
            Some(OutputFrame::Exit(_)) | None => return Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_of_pods_log_is_understood() {
        let options = LogOptions::from_query("follow=true&tailLines=10&previous=false&container=x").unwrap();
        assert_eq!(options, LogOptions { follow: true, tail_lines: Some(10) });
        assert_eq!(LogOptions::from_query("").unwrap(), LogOptions::default());
    }

    #[test]
    fn what_would_change_the_answer_is_not_ignored() {
        for query in ["tailLines=-1", "tailLines=many", "sinceSeconds=5", "timestamps=true", "limitBytes=3"] {
            let error = LogOptions::from_query(query).unwrap_err();
            assert_eq!(error.to_status().code, Some(400), "{query}");
        }
    }
}
