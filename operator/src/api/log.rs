//! `log`: what the Workspace's entrypoint wrote, as plain text.

use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::stream;
use kibo_protocol::v1;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use jiff::Timestamp;

use super::{exec::is_true, status::ApiError};
use crate::streams::{NodeStream, Output, OutputFrame, StreamLost};

/// A node answers at once; a log that is followed may have nothing to say yet.
const FIRST_PIECE: Duration = Duration::from_millis(500);

/// What the query of a log request says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    pub follow: bool,
    pub tail_lines: Option<u64>,
    pub since: Option<Since>,
    pub timestamps: bool,
    pub limit_bytes: Option<u64>,
}

/// From when on lines are of interest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    Ago(Duration),
    Time(Timestamp),
}

impl LogOptions {
    /// Reads the parameters that `pods/log` has; those that would change the answer and are not understood
    /// are refused.
    pub fn from_query(query: &str) -> Result<Self, ApiError> {
        let mut options = Self::default();
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*key {
                "follow" => options.follow = is_true(&value),
                "timestamps" => options.timestamps = is_true(&value),
                "tailLines" => options.tail_lines = Some(number(&key, &value, 0)?),
                "limitBytes" => options.limit_bytes = Some(number(&key, &value, 1)?),
                "sinceSeconds" => options.begin(Since::Ago(Duration::from_secs(number(&key, &value, 1)?)))?,
                "sinceTime" => options.begin(Since::Time(time(&value)?))?,
                "previous" if !is_true(&value) => {}
                "stream" if value == "All" => {}
                "previous" | "stream" => {
                    let message =
                        format!("{key} is not supported: the log of a Workspace has all its runs and outputs");
                    return Err(ApiError::BadRequest(message));
                }
                _ => {}
            }
        }
        Ok(options)
    }

    fn begin(&mut self, since: Since) -> Result<(), ApiError> {
        if self.since.replace(since).is_some() {
            return Err(ApiError::BadRequest("give one of sinceSeconds and sinceTime".to_owned()));
        }
        Ok(())
    }

    pub fn request(&self, workspace_uid: &str, now: Timestamp) -> v1::LogRequest {
        let since = self.since.map(|since| match since {
            Since::Ago(ago) => now.checked_sub(ago).unwrap_or(Timestamp::MIN),
            Since::Time(time) => time,
        });
        v1::LogRequest {
            workspace_uid: workspace_uid.to_owned(),
            follow: self.follow,
            tail_lines: self.tail_lines,
            // What began before 1970 began before every line.
            since_unix_nanos: since.map(|time| u64::try_from(time.as_nanosecond()).unwrap_or(0)),
            timestamps: self.timestamps,
            limit_bytes: self.limit_bytes,
        }
    }
}

fn number(key: &str, value: &str, least: u64) -> Result<u64, ApiError> {
    let number = value.parse().ok().filter(|number| *number >= least);
    number.ok_or_else(|| ApiError::BadRequest(format!("{key} must be a whole number from {least} on, not {value:?}")))
}

fn time(value: &str) -> Result<Timestamp, ApiError> {
    value.parse().map_err(|_| {
        ApiError::BadRequest(format!("sinceTime must be a time such as 2026-01-31T08:00:00Z, not {value:?}"))
    })
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
            Some(OutputFrame::StdoutClosed) => {}
            Some(OutputFrame::Exit(_)) | None => return Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_of_pods_log_is_understood() {
        let options = LogOptions::from_query("follow=true&tailLines=10&previous=false&container=x&stream=All").unwrap();
        assert_eq!(options, LogOptions { follow: true, tail_lines: Some(10), ..LogOptions::default() });
        assert_eq!(LogOptions::from_query("").unwrap(), LogOptions::default());
        let query = "timestamps=true&limitBytes=5&sinceTime=1970-01-01T00:00:01.000000002Z";
        let request = LogOptions::from_query(query).unwrap().request("uid", Timestamp::UNIX_EPOCH);
        assert!(request.timestamps && request.limit_bytes == Some(5));
        assert_eq!(request.since_unix_nanos, Some(1_000_000_002));
    }

    #[test]
    fn seconds_count_back_from_now() {
        let now: Timestamp = "1970-01-01T00:01:00Z".parse().unwrap();
        let since = |query| LogOptions::from_query(query).unwrap().request("uid", now).since_unix_nanos;
        assert_eq!(since("sinceSeconds=10"), Some(50_000_000_000));
        assert_eq!(since("sinceSeconds=100"), Some(0), "before 1970 there was nothing");
        assert_eq!(since("sinceSeconds=18446744073709551615"), Some(0));
        assert_eq!(since(""), None);
    }

    #[test]
    fn what_would_change_the_answer_is_not_ignored() {
        for query in [
            "tailLines=-1",
            "tailLines=many",
            "sinceSeconds=0",
            "sinceTime=yesterday",
            "sinceSeconds=5&sinceTime=2026-01-01T00:00:00Z",
            "limitBytes=0",
            "previous=true",
            "stream=Stderr",
        ] {
            let error = LogOptions::from_query(query).unwrap_err();
            assert_eq!(error.to_status().code, Some(400), "{query}");
        }
    }
}
