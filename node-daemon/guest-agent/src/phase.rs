//! What the guest is: generic, on its way, an Instance's, or of no use to anybody.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use kibo_guest_protocol::v1::{self, ConfigureStage, Failure, guest_state::Kind};

use crate::configure::Workspace;
use crate::request::{Entrypoint as EntrypointSpec, failure};
use crate::workload::entrypoint::{self, Entrypoint};

pub enum Phase {
    Unconfigured,
    Configuring { instance_id: String },
    Ready(Box<Ready>),
    Failed { instance_id: String, failure: Failure },
}

pub struct Ready {
    pub instance_id: String,
    pub workspace: Workspace,
    pub entrypoint: Option<Entrypoint>,
    /// Shared with the syncs that are under way.
    writable: Writable,
}

/// The file systems that can be written, each by its name for people.
pub type Writable = Arc<Vec<(String, OwnedFd)>>;

/// What a configure message is answered with.
#[derive(Debug, PartialEq)]
pub enum OnConfigure {
    Start,
    /// It is under way; the answer comes when it is known.
    Wait,
    Answer(Option<Failure>),
}

impl Phase {
    /// Configuring is idempotent for the same Instance and refused for another one.
    pub fn on_configure(&self, asked: &str) -> OnConfigure {
        let (owner, answer) = match self {
            Self::Unconfigured => return OnConfigure::Start,
            Self::Configuring { instance_id } => (instance_id, OnConfigure::Wait),
            Self::Ready(ready) => (&ready.instance_id, OnConfigure::Answer(None)),
            Self::Failed { instance_id, failure } => (instance_id, OnConfigure::Answer(Some(failure.clone()))),
        };
        if owner == asked {
            return answer;
        }
        let message = format!("this guest belongs to instance {owner}: start another one for {asked}");
        OnConfigure::Answer(Some(failure(ConfigureStage::Request, message)))
    }

    pub fn message(&self, shuts_down: bool) -> v1::GuestState {
        let kind = match self {
            _ if shuts_down => Kind::ShuttingDown(v1::ShuttingDown {}),
            Self::Unconfigured => Kind::Unconfigured(v1::Unconfigured {}),
            Self::Configuring { instance_id } => {
                Kind::Configuring(v1::Configuring { instance_id: instance_id.clone() })
            }
            Self::Ready(ready) => Kind::Ready(v1::Ready {
                instance_id: ready.instance_id.clone(),
                entrypoint: Some(ready.entrypoint_state()),
            }),
            Self::Failed { instance_id, failure } => {
                Kind::Failed(v1::Failed { instance_id: instance_id.clone(), failure: Some(failure.clone()) })
            }
        };
        v1::GuestState { kind: Some(kind) }
    }

    pub fn entrypoint(&self) -> Option<&Entrypoint> {
        match self {
            Self::Ready(ready) => ready.entrypoint.as_ref(),
            _ => None,
        }
    }

    pub fn entrypoint_mut(&mut self) -> Option<&mut Entrypoint> {
        match self {
            Self::Ready(ready) => ready.entrypoint.as_mut(),
            _ => None,
        }
    }

    /// What a sync writes back; nothing while nothing is mounted.
    pub fn writable(&self) -> Writable {
        match self {
            Self::Ready(ready) => Arc::clone(&ready.writable),
            _ => Arc::default(),
        }
    }
}

impl Ready {
    /// Starts the entrypoint in the Workspace that was just set up.
    pub fn start(instance_id: &str, mut workspace: Workspace, spec: Option<EntrypointSpec>) -> Result<Self, Failure> {
        let writable = Arc::new(std::mem::take(&mut workspace.writable));
        let start = |spec| Entrypoint::start(spec, &workspace, Instant::now());
        let entrypoint =
            spec.map(start).transpose().map_err(|error| failure(ConfigureStage::Entrypoint, error.message))?;
        Ok(Self { instance_id: instance_id.to_owned(), workspace, entrypoint, writable })
    }

    pub fn entrypoint_state(&self) -> v1::EntrypointState {
        self.entrypoint.as_ref().map_or_else(entrypoint::none, Entrypoint::message)
    }
}

/// Writes all file systems back; says what failed, or nothing.
pub fn sync_all(writable: &Writable) -> String {
    let failed = writable.iter().filter_map(|(name, fd)| {
        let errno = rustix::fs::syncfs(fd).err()?;
        Some(format!("failed to write back {name}: {errno}"))
    });
    failed.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuring_again_is_answered_with_what_became_of_it() {
        let owner = || "inst-1".to_owned();
        let broken = failure(ConfigureStage::Volume, "gone");
        let configuring = Phase::Configuring { instance_id: owner() };
        let failed = Phase::Failed { instance_id: owner(), failure: broken.clone() };
        assert_eq!(Phase::Unconfigured.on_configure("inst-1"), OnConfigure::Start);
        assert_eq!(configuring.on_configure("inst-1"), OnConfigure::Wait);
        assert_eq!(failed.on_configure("inst-1"), OnConfigure::Answer(Some(broken)));
        for phase in [configuring, failed] {
            let OnConfigure::Answer(Some(refusal)) = phase.on_configure("inst-2") else { panic!("it was taken") };
            assert_eq!(refusal.stage(), ConfigureStage::Request);
        }
    }
}
