//! What the session asks of the Instances of this host.

use std::future::Future;

use futures::stream::BoxStream;
use kibo_crds::{InstanceId, ObjectUid};
use kibo_protocol::v1;

use crate::{
    instance::{ExecStream, LogChunk, StopMode, StreamError, Summary},
    launch::Launch,
};

/// An Instance with everything that it was made from, for an adoption.
#[derive(Clone, Debug)]
pub struct Inventoried {
    pub launch: v1::Launch,
    pub state: v1::InstanceState,
    /// Its guest was configured.
    pub available: bool,
}

/// Runs Instances. What changes something returns as soon as the change is asked for; the work goes
/// on in the background and ends in events.
pub trait InstanceControl: Send + Sync + 'static {
    /// Everything that is on this host, also what is being cleaned up.
    fn list(&self) -> Vec<Summary>;

    /// Why an Instance that is here can neither be started nor stopped before somebody has helped.
    fn problem(&self, instance: InstanceId) -> Option<String>;

    /// The same with what each was made from; an error says for which that is not known now. Reads the disk.
    fn inventory(&self) -> Result<Vec<Inventoried>, String>;

    /// Idempotent by the Instance's id; the Instance is in the list when this returns, or its end is
    /// in the spool.
    fn start(&self, launch: Launch) -> impl Future<Output = ()> + Send;

    /// Idempotent; a forced stop supersedes a normal one. `false` when the Instance is not here.
    fn stop(&self, instance: InstanceId, mode: StopMode) -> bool;

    /// `false` when the Instance is not here.
    fn tear_down(&self, instance: InstanceId, reason: &str) -> bool;

    /// Returns when nothing runs any more, or when it takes too long: see what is left.
    fn destroy_all(&self, reason: v1::EndReason, message: &str) -> impl Future<Output = ()> + Send;

    fn exec(&self, request: v1::ExecRequest) -> impl Future<Output = Result<ExecStream, StreamError>> + Send;

    fn connect(&self, request: v1::ConnectRequest) -> impl Future<Output = Result<ExecStream, StreamError>> + Send;

    fn archive(&self, request: v1::ArchiveRequest) -> impl Future<Output = Result<ExecStream, StreamError>> + Send;

    fn log(&self, request: &v1::LogRequest) -> Result<BoxStream<'static, LogChunk>, StreamError>;

    /// What a Workspace printed goes with its writable layer, whose uid is the Workspace's. Blocks for a moment.
    fn forget_log(&self, layer: &ObjectUid);
}
