//! Where an archive is: a file here, or an object in a store.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use bytes::Bytes;
use futures::stream::BoxStream;

use super::{
    StoreArgs,
    file::{self, FileSink},
    s3,
    upload::Upload,
};
use crate::errors::Result;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    File(PathBuf),
    S3 { bucket: String, key: String },
}

impl FromStr for Location {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return match text {
                "" => Err("must not be empty".to_owned()),
                "-" => Err("is no place for an archive: give the path of a file (./- is one of that name)".to_owned()),
                directory if directory.ends_with('/') => Err("must be the path of a file".to_owned()),
                path => Ok(Self::File(path.into())),
            };
        };
        match scheme {
            "file" if rest.starts_with('/') && !rest.ends_with('/') && Path::new(rest).file_name().is_some() => {
                Ok(Self::File(rest.into()))
            }
            "file" => Err("must be file:///PATH, with the whole path of a file".to_owned()),
            "s3" => match rest.split_once('/') {
                Some((bucket, key)) if !bucket.is_empty() && !key.is_empty() && !key.ends_with('/') => {
                    Ok(Self::S3 { bucket: bucket.to_owned(), key: key.to_owned() })
                }
                _ => Err("must be s3://BUCKET/KEY".to_owned()),
            },
            _ => Err(format!("{scheme}:// is not known: give a path, file:///PATH or s3://BUCKET/KEY")),
        }
    }
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::S3 { bucket, key } => write!(f, "s3://{bucket}/{key}"),
        }
    }
}

/// An archive that is being read.
pub struct Source {
    pub pieces: BoxStream<'static, Result<Bytes>>,
    /// Absent: nobody knows it yet.
    pub size: Option<u64>,
}

impl Location {
    pub async fn read(&self, store: &StoreArgs) -> Result<Source> {
        match self {
            Self::File(path) => file::read(path).await,
            Self::S3 { bucket, key } => s3::read(bucket, key, store).await,
        }
    }

    /// A place for a new archive; nothing is there under its name before it is complete. What is there is not replaced.
    pub async fn create(&self, store: &StoreArgs) -> Result<Sink> {
        Ok(match self {
            Self::File(path) => Sink::File(FileSink::create(path)?),
            Self::S3 { bucket, key } => Sink::S3(s3::create(bucket, key, store).await?),
        })
    }
}

/// An archive that is being written. Dropped, it comes to nothing; [`Sink::abort`] says when that does not work.
pub enum Sink {
    File(FileSink),
    S3(Upload),
}

impl Sink {
    /// How much it will be at most, before the first piece.
    pub fn expect(&mut self, bytes: u64) {
        if let Self::S3(upload) = self {
            upload.expect(bytes);
        }
    }

    pub async fn write(&mut self, piece: Bytes) -> Result<()> {
        match self {
            Self::File(file) => file.write(&piece).await,
            Self::S3(upload) => upload.write(piece).await,
        }
    }

    /// From here on it is there, and safe.
    pub async fn complete(&mut self) -> Result<()> {
        match self {
            Self::File(file) => file.complete().await,
            Self::S3(upload) => upload.complete().await,
        }
    }

    pub async fn abort(self) {
        match self {
            Self::File(_) => {}
            Self::S3(upload) => upload.abort().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_path_or_an_object() {
        let is = |text: &str| text.parse::<Location>();
        let s3 = |bucket: &str, key: &str| Ok(Location::S3 { bucket: bucket.into(), key: key.into() });
        assert_eq!(is("dev.kibo"), Ok(Location::File("dev.kibo".into())));
        assert_eq!(is("a:b"), Ok(Location::File("a:b".into())));
        assert_eq!(is("./-"), Ok(Location::File("./-".into())));
        assert_eq!(is("file:///backups/dev"), Ok(Location::File("/backups/dev".into())));
        assert_eq!(is("s3://b/k"), s3("b", "k"));
        assert_eq!(is("s3://b/a/k.kibo"), s3("b", "a/k.kibo"));
        for bad in [
            "",
            "-",
            "backups/",
            "file:///backups/",
            "file://host/x",
            "file://",
            "file:///",
            "s3://b",
            "s3://b/",
            "s3:///k",
            "s3://b/d/",
            "gs://b/k",
        ] {
            assert!(is(bad).is_err(), "{bad}");
        }
    }
}
