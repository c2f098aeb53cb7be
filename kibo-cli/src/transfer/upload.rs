//! An archive on its way into an object store, in parts: the object is there when they are put together, or not at all.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use object_store::{
    Attribute, Attributes, GetOptions, MultipartId, ObjectStore as _, PutMultipartOptions, PutPayload,
    aws::AmazonS3,
    multipart::{MultipartStore as _, PartId},
    path::Path,
};
use tokio::{task::JoinSet, time::timeout};

use super::{CLEAN_UP_FOR, s3::failed};
use crate::{
    errors::{Error, Kind, Result, root},
    output::remark,
};

/// Stores want parts of at least 5 MiB, and at most 10,000 of them.
const SMALLEST_PART: u64 = 8 << 20;
const PARTS: u64 = 9_000;
/// Parts on their way at once.
const AT_ONCE: usize = 4;
/// Says in the metadata of an object which upload made it.
const MADE_BY: &str = "kibotos-upload";

pub struct Upload {
    store: AmazonS3,
    /// The same store, which refuses to replace an object.
    only_new: AmazonS3,
    path: Path,
    name: String,
    id: MultipartId,
    /// Tells its object from that of every other upload.
    mark: String,
    /// Size of a part; the last one is smaller.
    part: u64,
    pieces: VecDeque<Bytes>,
    gathered: u64,
    begun: usize,
    done: BTreeMap<usize, PartId>,
    sending: JoinSet<object_store::Result<(usize, PartId)>>,
}

/// What is under the name of an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum There {
    Nothing,
    /// What this upload has made.
    Ours,
    Other,
}

/// What became of an upload whose last request failed.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// The answer was lost, or the request was repeated after it had been carried out.
    Complete,
    Exists,
    /// Another one is being completed under the same name, or was removed at this moment.
    Contended,
    /// The store does not know the condition.
    WithoutCondition,
    Failed,
}

fn outcome(error: &object_store::Error, there: Option<There>) -> Outcome {
    use object_store::Error as E;
    match (there, error) {
        (Some(There::Ours), _) => Outcome::Complete,
        (Some(There::Other), _) => Outcome::Exists,
        (Some(There::Nothing), E::Precondition { .. } | E::AlreadyExists { .. }) => Outcome::Contended,
        (Some(There::Nothing), E::Generic { .. }) if root(error).contains("501 Not Implemented") => {
            Outcome::WithoutCondition
        }
        _ => Outcome::Failed,
    }
}

impl Upload {
    /// Unless there is something under its name.
    pub async fn begin(store: AmazonS3, only_new: AmazonS3, path: Path, name: String) -> Result<Self> {
        let mark = format!("{:032x}", rand::random::<u128>());
        let attributes = Attributes::from_iter([(Attribute::Metadata(MADE_BY.into()), mark.clone())]);
        let mut upload = Self {
            store,
            only_new,
            path,
            name,
            id: MultipartId::new(),
            mark,
            part: SMALLEST_PART,
            pieces: VecDeque::new(),
            gathered: 0,
            begun: 0,
            done: BTreeMap::new(),
            sending: JoinSet::new(),
        };
        if upload.there().await? != There::Nothing {
            return Err(upload.exists());
        }
        let options = PutMultipartOptions { attributes, ..PutMultipartOptions::default() };
        let id = upload.store.create_multipart_opts(&upload.path, options).await;
        upload.id = id.map_err(|error| upload.failed(&error))?;
        Ok(upload)
    }

    /// How much will come at most.
    pub fn expect(&mut self, bytes: u64) {
        self.part = SMALLEST_PART.max(bytes.div_ceil(PARTS));
    }

    fn failed(&self, error: &object_store::Error) -> Error {
        failed("cannot write", &self.name, error)
    }

    fn exists(&self) -> Error {
        Error::new(Kind::FailedPrecondition, format!("{} exists already", self.name))
            .next("give another key, or remove it: an archive replaces nothing")
    }

    async fn there(&self) -> Result<There> {
        let head = GetOptions { head: true, ..GetOptions::default() };
        match self.store.get_opts(&self.path, head).await {
            Err(object_store::Error::NotFound { .. }) => Ok(There::Nothing),
            Err(error) => Err(self.failed(&error)),
            Ok(found) => {
                let mark = found.attributes.get(&Attribute::Metadata(MADE_BY.into()));
                Ok(if mark.is_some_and(|mark| mark.as_ref() == self.mark) { There::Ours } else { There::Other })
            }
        }
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
        let (store, path, id, number) = (self.store.clone(), self.path.clone(), self.id.clone(), self.begun);
        self.begun += 1;
        self.sending.spawn(async move { Ok((number, store.put_part(&path, &id, number, part).await?)) });
        Ok(())
    }

    /// Waits for one of those that are under way.
    async fn sent(&mut self) -> Result<()> {
        match self.sending.join_next().await {
            None => Ok(()),
            Some(Ok(Ok((number, part)))) => {
                self.done.insert(number, part);
                Ok(())
            }
            Some(Ok(Err(error))) => Err(self.failed(&error)),
            Some(Err(error)) => Err(Error::new(Kind::Other, format!("cannot write {}: {error}", self.name))),
        }
    }

    /// Has the store put the parts together. It can be dropped, as the rest can: then nobody knows whether it has.
    pub async fn complete(&mut self) -> Result<()> {
        if self.gathered > 0 {
            self.send().await?;
        }
        while !self.sending.is_empty() {
            self.sent().await?;
        }
        // A store that does not know the condition does not say it.
        if self.there().await? == There::Other {
            return Err(self.exists());
        }
        let parts: Vec<PartId> = self.done.values().cloned().collect();
        let completed = self.only_new.complete_multipart(&self.path, &self.id, parts.clone()).await;
        let Err(error) = completed else { return Ok(()) };
        match outcome(&error, self.there().await.ok()) {
            Outcome::Complete => Ok(()),
            Outcome::Exists => Err(self.exists()),
            Outcome::Contended => {
                let message = format!("something else was written to {} at the same moment", self.name);
                Err(Error::new(Kind::FailedPrecondition, message).next("look what is there, and export again"))
            }
            Outcome::WithoutCondition => {
                let completed = self.store.complete_multipart(&self.path, &self.id, parts).await;
                completed.map(drop).map_err(|error| self.failed(&error))
            }
            Outcome::Failed => Err(self.failed(&error)),
        }
    }

    /// Takes the parts away again.
    pub async fn abort(mut self) {
        self.sending.shutdown().await;
        let why = match timeout(CLEAN_UP_FOR, self.store.abort_multipart(&self.path, &self.id)).await {
            Ok(Ok(())) => return,
            Ok(Err(object_store::Error::NotFound { .. })) => match self.there().await {
                Ok(There::Ours) => return remark(&format!("{} had just become complete: it is there", self.name)),
                _ => return,
            },
            Ok(Err(error)) => root(&error),
            Err(_) => format!("the store did not answer within {} s", CLEAN_UP_FOR.as_secs()),
        };
        remark(&format!("the parts of {} that were uploaded could not be removed: {why}", self.name));
    }
}

#[cfg(test)]
mod tests {
    use object_store::Error as E;

    use super::*;

    fn generic(text: &str) -> E {
        E::Generic { store: "S3", source: text.into() }
    }

    #[test]
    fn what_became_of_an_upload_is_what_is_there() {
        let path = || "dev.kibo".to_owned();
        let taken = || E::Precondition { path: path(), source: "412".into() };
        let conflict = || E::AlreadyExists { path: path(), source: "409".into() };
        let gone = || E::NotFound { path: path(), source: "no such upload".into() };
        let table = [
            // The answer to the first request was lost: the second finds no upload any more, or its own object.
            (gone(), Some(There::Ours), Outcome::Complete),
            (taken(), Some(There::Ours), Outcome::Complete),
            (generic("the connection was closed"), Some(There::Ours), Outcome::Complete),
            (taken(), Some(There::Other), Outcome::Exists),
            (conflict(), Some(There::Nothing), Outcome::Contended),
            (
                generic("Server returned non-2xx status code: 501 Not Implemented: "),
                Some(There::Nothing),
                Outcome::WithoutCondition,
            ),
            (generic("Server returned non-2xx status code: 500"), Some(There::Nothing), Outcome::Failed),
            (gone(), Some(There::Nothing), Outcome::Failed),
            (taken(), None, Outcome::Failed),
        ];
        for (error, there, expected) in table {
            assert_eq!(outcome(&error, there), expected, "{error} {there:?}");
        }
    }
}
