//! Guarded status writes: a leader is a leader only for the one write that it just makes.
//!
//! Every write replaces the whole status of an object at the resourceVersion that the decision was
//! made on, and carries the term of the leadership. So a decision on an old object, and a write of a
//! leader that was replaced in the meantime, are refused by the API server and never merged in.

use std::{fmt::Debug, time::Duration};

use kibo_crds::{
    Term, node::NodeStatus, storage_pool::StoragePoolStatus, volume::VolumeStatus, workspace::WorkspaceStatus,
};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
    core::object::HasStatus,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;

/// How often a write whose outcome is unknown is tried again; each try is guarded as the first.
const ATTEMPTS: u32 = 4;
const PAUSE: Duration = Duration::from_millis(250);
/// A single request that hangs longer has an unknown outcome.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a guarded write did not happen.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Somebody else wrote first: read the object anew and decide again.
    #[error("{object} has changed since it was read")]
    Conflict { object: String },
    #[error("{object} does not exist any more")]
    Gone { object: String },
    /// A newer leader has written the object: this process must not act any more.
    #[error("{object} was written by a leader of a later term than {term}")]
    StaleTerm { object: String, term: Term },
    /// The API server's rules refuse the content; trying again does not help.
    #[error("the API server refuses the write of {object}: {message}")]
    Refused { object: String, message: String },
    /// Whether the write happened could not be found out.
    #[error("the outcome of the write of {object} is unknown: {source}")]
    Unknown { object: String, source: Box<kube::Error> },
}

impl WriteError {
    /// Whether reading the object anew and deciding again can lead on.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Conflict { .. } | Self::Unknown { .. })
    }
}

/// A status that records the term of its last writer.
pub trait Termed {
    fn term(&self) -> Option<Term>;
    fn set_term(&mut self, term: Term);
}

macro_rules! termed {
    ($($status:ty),*) => {$(
        impl Termed for $status {
            fn term(&self) -> Option<Term> {
                self.term
            }

            fn set_term(&mut self, term: Term) {
                self.term = Some(term);
            }
        }
    )*};
}
termed!(NodeStatus, StoragePoolStatus, VolumeStatus, WorkspaceStatus);

/// What guarded writes can be made of.
pub trait Guarded:
    Resource<DynamicType = ()>
    + HasStatus<Status: Termed + Clone + PartialEq>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
{
}

impl<K> Guarded for K where
    K: Resource<DynamicType = ()>
        + HasStatus<Status: Termed + Clone + PartialEq>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned
{
}

/// `Workspace ns/name`, for messages.
pub fn describe<K: Resource<DynamicType = ()>>(object: &K) -> String {
    let name = object.meta().name.as_deref().unwrap_or_default();
    match &object.meta().namespace {
        Some(namespace) => format!("{} {namespace}/{name}", K::kind(&())),
        None => format!("{} {name}", K::kind(&())),
    }
}

/// Puts `status` in the place of the one of `observed`, if `observed` is still what is stored.
///
/// A request whose answer is lost is sent again with the same guard; a conflict is read back, since
/// it may be the echo of a try that had gone through.
pub async fn replace_status<K: Guarded>(
    api: &Api<K>,
    observed: &K,
    mut status: K::Status,
    term: Term,
) -> Result<K, WriteError> {
    status.set_term(term);
    let mut wanted = observed.clone();
    wanted.meta_mut().managed_fields = None;
    *wanted.status_mut() = Some(status);
    let name = observed.name_any();
    let mut attempt = 1;
    loop {
        let params = PostParams::default();
        let request = api.replace_status(&name, &params, &wanted);
        let error = match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
            Ok(Ok(written)) => return Ok(written),
            Ok(Err(error)) => error,
            Err(_) => kube::Error::Service("the request timed out".into()),
        };
        match classify(&error, &wanted, term) {
            Some(WriteError::Conflict { object }) => return read_back(api, &wanted, object).await,
            Some(refusal) => return Err(refusal),
            None if attempt == ATTEMPTS => {
                return Err(WriteError::Unknown { object: describe(&wanted), source: Box::new(error) });
            }
            None => {
                tracing::warn!(object = describe(&wanted), %error, attempt, "status write failed, trying again");
                tokio::time::sleep(PAUSE * attempt).await;
                attempt += 1;
            }
        }
    }
}

/// Changes metadata (finalizers, labels) of exactly the observed version of an object.
pub async fn patch_metadata<K: Guarded>(
    api: &Api<K>,
    observed: &K,
    mut metadata: serde_json::Value,
) -> Result<K, WriteError> {
    metadata["resourceVersion"] = json!(observed.resource_version());
    metadata["uid"] = json!(observed.uid());
    let (name, params) = (observed.name_any(), PatchParams::default());
    let patch = Patch::Merge(json!({ "metadata": metadata }));
    let request = api.patch(&name, &params, &patch);
    let error = match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(written)) => return Ok(written),
        Ok(Err(error)) => error,
        Err(_) => kube::Error::Service("the request timed out".into()),
    };
    let object = describe(observed);
    Err(classify(&error, observed, Term::default()).unwrap_or(WriteError::Unknown { object, source: Box::new(error) }))
}

/// What an error says about the write; `None`: nothing is known, try again.
fn classify<K: Guarded>(error: &kube::Error, wanted: &K, term: Term) -> Option<WriteError> {
    let object = describe(wanted);
    let kube::Error::Api(status) = error else { return None };
    match status.code {
        409 => Some(WriteError::Conflict { object }),
        404 => Some(WriteError::Gone { object }),
        422 if status.message.contains(kibo_crds::refusals::TERM_FELL) => Some(WriteError::StaleTerm { object, term }),
        400 | 401 | 403 | 413 | 422 => Some(WriteError::Refused { object, message: status.message.clone() }),
        _ => None,
    }
}

/// Tells a conflict with somebody else from the echo of an own write.
async fn read_back<K: Guarded>(api: &Api<K>, wanted: &K, object: String) -> Result<K, WriteError> {
    match tokio::time::timeout(REQUEST_TIMEOUT, api.get_opt(&wanted.name_any())).await {
        Ok(Ok(Some(stored))) if stored.uid() == wanted.uid() && stored.status() == wanted.status() => Ok(stored),
        Ok(Ok(Some(stored))) if stored.uid() == wanted.uid() => Err(WriteError::Conflict { object }),
        Ok(Ok(_)) => Err(WriteError::Gone { object }),
        Ok(Err(error)) => Err(WriteError::Unknown { object, source: Box::new(error) }),
        Err(_) => Err(WriteError::Unknown { object, source: Box::new(kube::Error::Service("timed out".into())) }),
    }
}
