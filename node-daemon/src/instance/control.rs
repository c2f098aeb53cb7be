//! What the session asks of the Instances.

use futures::{StreamExt as _, stream::BoxStream};
use kibo_crds::{InstanceId, ObjectUid};
use kibo_protocol::v1;

use super::{ExecStream, Instances, LogChunk, StopMode, StreamError, Summary};
use crate::{
    launch::Launch,
    session::{InstanceControl, Inventoried},
};

impl InstanceControl for Instances {
    fn list(&self) -> Vec<Summary> {
        self.list()
    }

    fn problem(&self, instance: InstanceId) -> Option<String> {
        self.problem(instance)
    }

    fn inventory(&self) -> Result<Vec<Inventoried>, String> {
        self.inventory()
    }

    async fn start(&self, launch: Launch) {
        self.start(launch);
    }

    fn stop(&self, instance: InstanceId, mode: StopMode) -> bool {
        self.stop(instance, mode)
    }

    fn tear_down(&self, instance: InstanceId, reason: &str) -> bool {
        self.tear_down(instance, reason)
    }

    async fn destroy_all(&self, reason: v1::EndReason, message: &str) {
        self.destroy_all(reason, message).await;
    }

    async fn exec(&self, request: v1::ExecRequest) -> Result<ExecStream, StreamError> {
        self.exec(request).await
    }

    async fn connect(&self, request: v1::ConnectRequest) -> Result<ExecStream, StreamError> {
        self.connect(request).await
    }

    async fn archive(&self, request: v1::ArchiveRequest) -> Result<ExecStream, StreamError> {
        self.archive(request).await
    }

    fn log(&self, request: &v1::LogRequest) -> Result<BoxStream<'static, LogChunk>, StreamError> {
        Ok(self.log(request)?.boxed())
    }

    fn forget_log(&self, layer: &ObjectUid) {
        self.forget_log(layer);
    }
}
