//! What the session asks of the Instances of this host.

use std::future::Future;

use futures::stream::BoxStream;
use kibo_crds::InstanceId;
use kibo_protocol::v1;

use crate::{
    instance::{ExecStream, LogChunk, StopMode, StreamError, Summary},
    launch::Launch,
};

/// Runs Instances. The calls that change something return as soon as the change is recorded; the
/// work goes on in the background and ends in events.
pub trait InstanceControl: Send + Sync + 'static {
    /// Everything that is on this host, also what is being cleaned up.
    fn list(&self) -> Vec<Summary>;

    /// Idempotent by the Instance's id; the Instance is in the list when this returns, or its end is
    /// in the spool.
    fn start(&self, launch: Launch) -> impl Future<Output = ()> + Send;

    /// Idempotent; a forced stop supersedes a normal one.
    fn stop(&self, instance: InstanceId, mode: StopMode) -> impl Future<Output = ()> + Send;

    fn tear_down(&self, instance: InstanceId, reason: String) -> impl Future<Output = ()> + Send;

    /// Returns when nothing runs any more.
    fn destroy_all(&self, reason: v1::EndReason) -> impl Future<Output = ()> + Send;

    fn exec(
        &self,
        instance: InstanceId,
        request: v1::ExecRequest,
    ) -> impl Future<Output = Result<ExecStream, StreamError>> + Send;

    fn log(
        &self,
        workspace_uid: &str,
        tail_lines: Option<u64>,
        follow: bool,
    ) -> Result<BoxStream<'static, LogChunk>, StreamError>;
}
