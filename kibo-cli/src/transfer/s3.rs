//! Archives in object stores that speak S3. Credentials come from the environment, as for every other client of them.

use std::time::Duration;

use bytes::Bytes;
use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use object_store::{
    ClientConfigKey, ClientOptions, GetOptions, GetRange, HeaderMap, HeaderValue, ObjectStore as _,
    ObjectStoreExt as _, RetryConfig,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
    client::{HttpClient, HttpConnector, ReqwestConnector},
    path::Path,
};

use super::{StoreArgs, location::Source, upload::Upload};
use crate::errors::{Error, Kind, Result, root};

/// One after the other; a store that is not there is reported after seconds.
const RETRIES: usize = 6;

/// What a bucket is used for. An archive takes as long as it takes: limits are on silence, not on the whole of a request.
#[derive(Clone, Copy)]
enum Use {
    /// One request, whose body is read at the pace of a node. It is taken up again where it broke, however late.
    Read,
    /// One request for each part, and one that has the store put them together.
    Write,
}

impl Use {
    /// For the next bytes; when writing, for a part and its answer.
    fn silence(self) -> Duration {
        Duration::from_secs(match self {
            Self::Read => 60,
            Self::Write => 15 * 60,
        })
    }

    /// From the begin of a request on. One that is written is repeated as it was signed, which holds for a quarter of an hour.
    fn retry_for(self) -> Duration {
        match self {
            Self::Read => NEVER,
            Self::Write => Duration::from_secs(10 * 60),
        }
    }
}

/// Longer than any transfer.
const NEVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Has a store refuse what would take the place of another object, if it knows the condition. For the last request of an
/// upload only: the same header means something else in every other one.
#[derive(Debug)]
struct OnlyNew;

impl HttpConnector for OnlyNew {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let condition = HeaderMap::from_iter([(http::header::IF_NONE_MATCH, HeaderValue::from_static("*"))]);
        ReqwestConnector::default().connect(&options.clone().with_default_headers(condition))
    }
}

/// A failure of the store, with what it was about.
pub fn failed(what: &str, object: &str, error: &object_store::Error) -> Error {
    use object_store::Error as E;
    let kind = match error {
        E::NotFound { .. } => Kind::NotFound,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => Kind::NotPermitted,
        E::InvalidPath { .. } => Kind::InvalidArgument,
        E::AlreadyExists { .. } | E::Precondition { .. } => Kind::FailedPrecondition,
        _ => Kind::Unavailable,
    };
    let failed = Error::new(kind, format!("{what} {object}: {}", in_words(&root(error))));
    match kind {
        Kind::NotPermitted => {
            failed.next("give the store's credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        }
        Kind::NotFound => failed.next("check the bucket, the key, and the store (--s3-endpoint)"),
        _ => failed,
    }
}

/// Stores say what is wrong in XML, within the words of their client.
fn in_words(said: &str) -> String {
    let part = |tag: &str| {
        let (_, after) = said.split_once(&format!("<{tag}>"))?;
        after.split_once(&format!("</{tag}>")).map(|(text, _)| text)
    };
    match (part("Code"), part("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        _ => said.to_owned(),
    }
}

fn builder(bucket: &str, args: &StoreArgs, what_for: Use) -> AmazonS3Builder {
    // The HTTP client of the store takes the one that the program has; the cluster's client brings its own.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let retry = RetryConfig { max_retries: RETRIES, retry_timeout: what_for.retry_for(), ..RetryConfig::default() };
    let limit = |key, limit: Duration| (AmazonS3ConfigKey::Client(key), format!("{}s", limit.as_secs()));
    let (whole, silence) =
        (limit(ClientConfigKey::Timeout, NEVER), limit(ClientConfigKey::ReadTimeout, what_for.silence()));
    let builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_retry(retry)
        .with_config(whole.0, whole.1)
        .with_config(silence.0, silence.1);
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let known = || variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL"));
    match args.s3_endpoint.clone().or_else(known) {
        // Who names a store without TLS means it.
        Some(endpoint) => builder.with_allow_http(endpoint.starts_with("http://")).with_endpoint(endpoint),
        None => builder,
    }
}

fn open(bucket: &str, builder: AmazonS3Builder) -> Result<AmazonS3> {
    builder.build().map_err(|error| failed("cannot use the bucket", bucket, &error))
}

/// The key, and the object as people name it.
fn object(bucket: &str, key: &str) -> Result<(Path, String)> {
    let name = format!("s3://{bucket}/{key}");
    let path = Path::parse(key).map_err(|error| Error::invalid(format!("{name}: {error}")))?;
    Ok((path, name))
}

pub async fn read(bucket: &str, key: &str, args: &StoreArgs) -> Result<Source> {
    let store = open(bucket, builder(bucket, args, Use::Read))?;
    let (path, name) = object(bucket, key)?;
    let found = store.get(&path).await.map_err(|error| failed("cannot read", &name, &error))?;
    let (size, e_tag) = (found.meta.size, found.meta.e_tag.clone());
    let reading = Reading { store, path, name, e_tag, size, at: 0, begun_at: 0, body: found.into_stream() };
    Ok(Source { pieces: reading.pieces(), size: Some(size) })
}

/// An object that is being read. The store's client takes it up again a few times where it broke off; here it begins anew
/// with that as long as more of it comes, since a large one takes as many days as its node needs for it.
struct Reading {
    store: AmazonS3,
    path: Path,
    name: String,
    /// Tells the object from one that takes its place.
    e_tag: Option<String>,
    size: u64,
    at: u64,
    /// Of the current request.
    begun_at: u64,
    body: BoxStream<'static, object_store::Result<Bytes>>,
}

impl Reading {
    fn pieces(self) -> BoxStream<'static, Result<Bytes>> {
        let next = |reading: Option<Self>| async move {
            let mut reading = reading?;
            let piece = reading.next().await?;
            // After a failure there is nothing more.
            let reading = Some(reading).filter(|_| piece.is_ok());
            Some((piece, reading))
        };
        stream::unfold(Some(self), next).boxed()
    }

    async fn next(&mut self) -> Option<Result<Bytes>> {
        loop {
            match self.body.next().await? {
                Ok(piece) => {
                    self.at += piece.len() as u64;
                    return Some(Ok(piece));
                }
                // All of it is here, and of nothing there is no range to be asked for.
                Err(_) if self.at == self.size => return None,
                Err(broken) if self.at == self.begun_at || self.e_tag.is_none() => {
                    return Some(Err(failed("cannot read", &self.name, &broken)));
                }
                Err(_) => {
                    let rest = GetOptions {
                        range: Some(GetRange::Offset(self.at)),
                        if_match: self.e_tag.clone(),
                        ..GetOptions::default()
                    };
                    match self.store.get_opts(&self.path, rest).await {
                        Ok(rest) => (self.begun_at, self.body) = (self.at, rest.into_stream()),
                        Err(error) => return Some(Err(failed("cannot read", &self.name, &error))),
                    }
                }
            }
        }
    }
}

pub async fn create(bucket: &str, key: &str, args: &StoreArgs) -> Result<Upload> {
    let (path, name) = object(bucket, key)?;
    let store = open(bucket, builder(bucket, args, Use::Write))?;
    let only_new = builder(bucket, args, Use::Write)
        // Whoever gives them out is asked without the condition.
        .with_credentials(store.credentials().clone())
        .with_http_connector(OnlyNew);
    Upload::begin(store, open(bucket, only_new)?, path, name).await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The object as far as it comes before its connection breaks, from a store that does not answer any more.
    async fn read_until_it_breaks(size: u64) -> Vec<Result<Bytes>> {
        let args = StoreArgs { s3_endpoint: Some("http://127.0.0.1:1".to_owned()) };
        let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let builder = builder("b", &args, Use::Read).with_retry(retry).with_skip_signature(true);
        let (path, name) = object("b", "k").unwrap();
        let broken = object_store::Error::Generic { store: "S3", source: "connection reset".into() };
        let body = stream::iter([Ok(Bytes::from_static(b"archive")), Err(broken)]).boxed();
        let e_tag = Some("e".to_owned());
        let store = open("b", builder).unwrap();
        Reading { store, path, name, e_tag, size, at: 0, begun_at: 0, body }.pieces().collect().await
    }

    #[tokio::test]
    async fn a_connection_that_breaks_after_the_last_byte_is_no_failure() {
        let [whole] = read_until_it_breaks(7).await.try_into().unwrap();
        assert_eq!(whole.unwrap(), "archive");
        let [begun, rest] = read_until_it_breaks(8).await.try_into().unwrap();
        assert!(begun.is_ok() && rest.is_err(), "the rest is asked for");
    }

    #[test]
    fn what_a_store_says_is_said_without_its_dress() {
        let said = "Server returned non-2xx status code: 404 Not Found: <?xml version=\"1.0\"?><Error>\
                    <Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>";
        assert_eq!(in_words(said), "NoSuchBucket: The specified bucket does not exist");
        for plain in ["error trying to connect: refused", "<Code>half"] {
            assert_eq!(in_words(plain), plain);
        }
    }
}
