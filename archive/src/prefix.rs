//! The beginning of an archive.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `KIBOTOS` and a line feed |
//! | 4 | version of the format, little-endian |
//! | 4 | length of the description, little-endian |
//! | … | the description: JSON |
//! | 32 | SHA-256 of everything before |

use std::collections::BTreeMap;

use kibo_crds::{Bytes, workspace::WorkspaceSpec};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub const MAGIC: [u8; 8] = *b"KIBOTOS\n";
/// The one version that this release writes and reads.
pub const VERSION: u32 = 1;
/// A Workspace's object is far smaller, since the API server's own limit is.
const MAX_DESCRIPTION: usize = 1 << 20;
const FIXED: usize = 16;
const DIGEST: usize = 32;

/// What an archive has, in the words of the cluster that it comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Description {
    /// RFC 3339.
    pub exported_at: String,
    pub origin: Origin,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Without the requests that were under way.
    pub spec: WorkspaceSpec,
    /// The root image that the writable layer lies on; on another one its changes make no sense. Absent: the Template was
    /// gone when it was exported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_image: Option<String>,
    /// Size of the writable layer's image.
    pub layer: Bytes,
    /// Size of the Volume's image; absent: there is none, or it was never made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<Bytes>,
    /// What the images occupied together, and thus what the archive has at most before compression.
    pub data: Bytes,
}

/// Where it comes from; for people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Origin {
    pub namespace: String,
    pub name: String,
    pub id: String,
}

impl Description {
    /// The images that follow, in their order, with their sizes.
    pub(crate) fn sizes(&self) -> Vec<u64> {
        std::iter::once(self.layer).chain(self.volume).map(|size| size.0).collect()
    }

    fn check(&self) -> Result<(), PrefixError> {
        let sizes = [("layer", Some(self.layer)), ("volume", self.volume)];
        for (field, size) in sizes.into_iter().filter_map(|(field, size)| Some((field, size?))) {
            if size.as_mib().is_none_or(|mib| mib == 0) {
                return Err(PrefixError::Size { field, size });
            }
        }
        if self.volume.is_some() && self.spec.volume.is_none() {
            return Err(PrefixError::NoBinding);
        }
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum PrefixError {
    #[error("this is no archive of a Workspace: it does not begin like one")]
    NotAnArchive,
    #[error(
        "the archive has version {0} of the format, and this release reads version {VERSION} only: use the release that it was exported with, or a later one that reads it"
    )]
    Version(u32),
    #[error("the archive's description claims {0} bytes, and {MAX_DESCRIPTION} are the most")]
    TooLong(u32),
    #[error("the archive's beginning is damaged: its digest does not match")]
    Damaged,
    #[error("the archive's description is not understood: {0}")]
    Description(#[from] serde_json::Error),
    #[error("the archive's description says that the {field} has {size}: that is not a whole number of MiB above 0")]
    Size { field: &'static str, size: Bytes },
    #[error("the archive has the bytes of a Volume, and its Workspace binds none")]
    NoBinding,
}

/// The beginning of an archive, as it is in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefix {
    pub description: Description,
    bytes: Vec<u8>,
}

impl Prefix {
    pub fn new(description: Description) -> Result<Self, PrefixError> {
        description.check()?;
        let json = serde_json::to_vec(&description)?;
        let length = u32::try_from(json.len()).unwrap_or(u32::MAX);
        if json.len() > MAX_DESCRIPTION {
            return Err(PrefixError::TooLong(length));
        }
        let mut bytes = Vec::with_capacity(FIXED + json.len() + DIGEST);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&json);
        let digest = Sha256::digest(&bytes);
        bytes.extend_from_slice(&digest);
        Ok(Self { description, bytes })
    }

    /// Reads it from the first bytes of an archive; `None`: more of them are needed.
    pub fn read(bytes: &[u8]) -> Result<Option<Self>, PrefixError> {
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Err(PrefixError::NotAnArchive);
        }
        let number = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let Some(version) = number(MAGIC.len()) else { return Ok(None) };
        if version != VERSION {
            return Err(PrefixError::Version(version));
        }
        let Some(length) = number(MAGIC.len() + 4) else { return Ok(None) };
        let json = usize::try_from(length).ok().filter(|length| *length <= MAX_DESCRIPTION);
        let json = json.ok_or(PrefixError::TooLong(length))?;
        let Some(bytes) = bytes.get(..FIXED + json + DIGEST) else { return Ok(None) };
        let (signed, digest) = bytes.split_at(FIXED + json);
        if Sha256::digest(signed).as_slice() != digest {
            return Err(PrefixError::Damaged);
        }
        let description: Description = serde_json::from_slice(&signed[FIXED..])?;
        description.check()?;
        Ok(Some(Self { description, bytes: bytes.to_vec() }))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// What tells this archive from every other one.
    pub fn digest(&self) -> &[u8] {
        &self.bytes[self.bytes.len() - DIGEST..]
    }

    /// The same in hexadecimal digits.
    pub fn id(&self) -> String {
        kibo_crds::hex(self.digest())
    }
}
