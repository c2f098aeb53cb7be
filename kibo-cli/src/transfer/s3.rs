//! Archives in object stores that speak S3. Credentials come from the environment, as for every other client of them.

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use futures::StreamExt as _;
use object_store::{
    ClientConfigKey, MultipartUpload, ObjectStoreExt as _, PutPayload, RetryConfig,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
    path::Path,
};
use tokio::task::JoinSet;

use super::{StoreArgs, location::Source};
use crate::{
    errors::{Error, Kind, Result, root},
    output::remark,
};

/// Stores want parts of at least 5 MiB, and at most 10,000 of them.
const SMALLEST_PART: u64 = 8 << 20;
const PARTS: u64 = 9_000;
/// Parts on their way at once.
const AT_ONCE: usize = 4;
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

pub struct Bucket {
    store: AmazonS3,
    name: String,
}

/// A failure of the store, with what it was about.
fn failed(what: &str, object: &str, error: &object_store::Error) -> Error {
    use object_store::Error as E;
    let kind = match error {
        E::NotFound { .. } => Kind::NotFound,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => Kind::NotPermitted,
        E::InvalidPath { .. } => Kind::InvalidArgument,
        E::AlreadyExists { .. } | E::Precondition { .. } => Kind::FailedPrecondition,
        _ => Kind::Unavailable,
    };
    let failed = Error::new(kind, format!("{what} {object}: {}", root(error)));
    match kind {
        Kind::NotPermitted => {
            failed.next("give the store's credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        }
        Kind::NotFound => failed.next("check the bucket, the key, and the store (--s3-endpoint)"),
        _ => failed,
    }
}

impl Bucket {
    fn open(name: &str, args: &StoreArgs, what_for: Use) -> Result<Self> {
        // The HTTP client of the store takes the one that the program has; the cluster's client brings its own.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig { max_retries: RETRIES, retry_timeout: what_for.retry_for(), ..RetryConfig::default() };
        let limit = |key, limit: Duration| (AmazonS3ConfigKey::Client(key), format!("{}s", limit.as_secs()));
        let (whole, silence) =
            (limit(ClientConfigKey::Timeout, NEVER), limit(ClientConfigKey::ReadTimeout, what_for.silence()));
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(name)
            .with_retry(retry)
            .with_config(whole.0, whole.1)
            .with_config(silence.0, silence.1);
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let known = || variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL"));
        if let Some(endpoint) = args.s3_endpoint.clone().or_else(known) {
            // Who names a store without TLS means it.
            builder = builder.with_allow_http(endpoint.starts_with("http://")).with_endpoint(endpoint);
        }
        let store = builder.build().map_err(|error| failed("cannot use the bucket", name, &error))?;
        Ok(Self { store, name: name.to_owned() })
    }

    fn object(&self, key: &str) -> Result<(Path, String)> {
        let name = format!("s3://{}/{key}", self.name);
        let path = Path::parse(key).map_err(|error| Error::invalid(format!("{name}: {error}")))?;
        Ok((path, name))
    }

    pub async fn read(bucket: &str, key: &str, args: &StoreArgs) -> Result<Source> {
        let bucket = Self::open(bucket, args, Use::Read)?;
        let (path, name) = bucket.object(key)?;
        let found = bucket.store.get(&path).await.map_err(|error| failed("cannot read", &name, &error))?;
        let size = found.meta.size;
        let pieces = found.into_stream().map(move |piece| piece.map_err(|error| failed("cannot read", &name, &error)));
        Ok(Source { pieces: pieces.boxed(), size })
    }

    pub async fn create(bucket: &str, key: &str, args: &StoreArgs) -> Result<Upload> {
        let bucket = Self::open(bucket, args, Use::Write)?;
        let (path, name) = bucket.object(key)?;
        bucket.is_free(&path, &name).await?;
        let parts = bucket.store.put_multipart(&path).await.map_err(|error| failed("cannot write", &name, &error))?;
        Ok(Upload {
            parts,
            bucket,
            path,
            name,
            part: SMALLEST_PART,
            pieces: VecDeque::new(),
            gathered: 0,
            sending: JoinSet::new(),
        })
    }

    async fn is_free(&self, path: &Path, name: &str) -> Result<()> {
        match self.store.head(path).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(failed("cannot write", name, &error)),
            Ok(_) => Err(Error::new(Kind::FailedPrecondition, format!("{name} exists already"))
                .next("give another key, or remove it: an archive replaces nothing")),
        }
    }
}

/// An upload in parts: the object is there when it is completed, or not at all.
pub struct Upload {
    parts: Box<dyn MultipartUpload>,
    bucket: Bucket,
    path: Path,
    name: String,
    /// Size of a part; the last one is smaller.
    part: u64,
    pieces: VecDeque<Bytes>,
    gathered: u64,
    sending: JoinSet<object_store::Result<()>>,
}

impl Upload {
    pub fn expect(&mut self, bytes: u64) {
        self.part = SMALLEST_PART.max(bytes.div_ceil(PARTS));
    }

    fn failed(&self, error: &object_store::Error) -> Error {
        failed("cannot write", &self.name, error)
    }

    pub async fn write(&mut self, mut piece: Bytes) -> Result<()> {
        while !piece.is_empty() {
            let room = usize::try_from(self.part - self.gathered).unwrap_or(usize::MAX);
            let taken = piece.split_to(room.min(piece.len()));
            self.gathered += taken.len() as u64;
            self.pieces.push_back(taken);
            if self.gathered == self.part {
                self.send().await?;
            }
        }
        Ok(())
    }

    async fn send(&mut self) -> Result<()> {
        while self.sending.len() >= AT_ONCE {
            self.sent().await?;
        }
        self.gathered = 0;
        let part: PutPayload = self.pieces.drain(..).collect();
        self.sending.spawn(self.parts.put_part(part));
        Ok(())
    }

    /// Waits for one of those that are under way.
    async fn sent(&mut self) -> Result<()> {
        match self.sending.join_next().await {
            None | Some(Ok(Ok(()))) => Ok(()),
            Some(Ok(Err(error))) => Err(self.failed(&error)),
            Some(Err(error)) => Err(Error::new(Kind::Other, format!("cannot write {}: {error}", self.name))),
        }
    }

    pub async fn complete(mut self) -> Result<()> {
        let done = self.finish().await;
        if done.is_err() {
            self.abort().await;
        }
        done
    }

    async fn finish(&mut self) -> Result<()> {
        if self.gathered > 0 {
            self.send().await?;
        }
        while !self.sending.is_empty() {
            self.sent().await?;
        }
        // Somebody else may have been faster.
        self.bucket.is_free(&self.path, &self.name).await?;
        self.parts.complete().await.map(drop).map_err(|error| self.failed(&error))
    }

    pub async fn abort(mut self) {
        self.sending.shutdown().await;
        if let Err(error) = self.parts.abort().await {
            remark(&format!("the parts of {} that were uploaded could not be removed: {}", self.name, root(&error)));
        }
    }
}
