//! Streams into guests: asked for on a node's session, dialled by the node.
//!
//! An entry exists from the question until the node has dialled, refused, or had its time; it is removed in
//! every case. A stream that its user drops before its end is closed at the node. Nothing is buffered here
//! beyond one frame in each direction: who reads slowly stops the sender through HTTP/2's flow control.

mod stream;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures::{StreamExt as _, stream::BoxStream};
use kibo_crds::{Incarnation, NodeId};
use kibo_protocol::v1::{self, open_stream, to_node};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::async_trait;

use crate::session::{NoSession, Registry, hooks::StreamAcceptor};

pub use stream::{Input, NodeStream, Output, OutputFrame, StreamLost};

/// A node dials at once; much later nobody would still wait.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Why no stream came about.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    NoSession(#[from] NoSession),
    #[error("node {node} refused the stream: {message}")]
    Refused { node: NodeId, failure: v1::StreamFailure, message: String },
    #[error("node {0} did not open the stream in time")]
    Timeout(NodeId),
    #[error("the control session of node {0} ended before it opened the stream")]
    SessionLost(NodeId),
}

/// Streams that were asked for and have not come. Cheap to clone.
#[derive(Clone)]
pub struct StreamRegistry(Arc<Inner>);

struct Inner {
    sessions: Registry,
    waiting: Mutex<HashMap<String, Waiting>>,
}

struct Waiting {
    node: NodeId,
    answer: oneshot::Sender<Answer>,
}

enum Answer {
    Dialled(Dialled),
    Refused(v1::StreamRefused),
}

/// Both directions of a stream that a node has opened.
pub(crate) struct Dialled {
    pub from_node: BoxStream<'static, Result<v1::StreamFromNode, tonic::Status>>,
    pub to_node: mpsc::Sender<Result<v1::StreamToNode, tonic::Status>>,
}

impl StreamRegistry {
    pub fn new(sessions: Registry) -> Self {
        Self(Arc::new(Inner { sessions, waiting: Mutex::default() }))
    }

    /// Asks the node for a stream and waits until it has dialled.
    pub async fn open(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        kind: open_stream::Kind,
    ) -> Result<NodeStream, OpenError> {
        let id = new_stream_id();
        let (answer, answered) = oneshot::channel();
        self.waiting().insert(id.clone(), Waiting { node: node.clone(), answer });
        let asked = Asked { registry: self, node, incarnation, id: &id, open: true };
        let message = v1::OpenStream { stream_id: id.clone(), kind: Some(kind) };
        self.0.sessions.send(node, incarnation, to_node::Message::OpenStream(message))?;
        match tokio::time::timeout(DIAL_TIMEOUT, answered).await {
            Ok(Ok(Answer::Dialled(dialled))) => {
                asked.settled();
                let close = Close { sessions: self.0.sessions.clone(), node: node.clone(), incarnation, id };
                Ok(NodeStream::new(dialled, close))
            }
            Ok(Ok(Answer::Refused(refused))) => {
                asked.settled();
                let failure = refused.failure();
                Err(OpenError::Refused { node: node.clone(), failure, message: refused.message })
            }
            Ok(Err(_)) => Err(OpenError::SessionLost(node.clone())),
            Err(_) => Err(OpenError::Timeout(node.clone())),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<String, Waiting>> {
        self.0.waiting.lock().expect("no holder of this lock panics")
    }

    /// Takes the entry out, if it is that node's: an id is worth nothing to another node.
    fn take(&self, node: &NodeId, id: &str) -> Option<Waiting> {
        let mut waiting = self.waiting();
        let is_of_node = waiting.get(id).is_some_and(|entry| entry.node == *node);
        if is_of_node { waiting.remove(id) } else { None }
    }

    /// Gives a dialled stream to whoever asked for it.
    pub(crate) fn dialled(
        &self,
        hello: &v1::AttachHello,
        from_node: BoxStream<'static, Result<v1::StreamFromNode, tonic::Status>>,
    ) -> Result<BoxStream<'static, Result<v1::StreamToNode, tonic::Status>>, tonic::Status> {
        let unknown = || tonic::Status::not_found("nobody waits for this stream (any more)");
        let node: NodeId = hello.node_id.parse().map_err(|_| unknown())?;
        let waiting = self.take(&node, &hello.stream_id).ok_or_else(unknown)?;
        let (to_node, outbound) = mpsc::channel(1);
        waiting.answer.send(Answer::Dialled(Dialled { from_node, to_node })).map_err(|_| unknown())?;
        Ok(ReceiverStream::new(outbound).boxed())
    }
}

#[async_trait]
impl StreamAcceptor for StreamRegistry {
    async fn attach(
        &self,
        hello: v1::AttachHello,
        inbound: tonic::Streaming<v1::StreamFromNode>,
    ) -> Result<BoxStream<'static, Result<v1::StreamToNode, tonic::Status>>, tonic::Status> {
        self.dialled(&hello, inbound.boxed())
    }

    fn refused(&self, node: &NodeId, refused: v1::StreamRefused) {
        if let Some(waiting) = self.take(node, &refused.stream_id) {
            // Whoever asked may have gone; then nobody needs the answer.
            let _ = waiting.answer.send(Answer::Refused(refused));
        }
    }

    fn session_ended(&self, node: &NodeId) {
        self.waiting().retain(|_, waiting| waiting.node != *node);
    }
}

/// 128 random bits: knowing the id is what lets a node attach.
fn new_stream_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// A question on its way; whatever happens to the one who asked, the entry goes and the node is told.
struct Asked<'a> {
    registry: &'a StreamRegistry,
    node: &'a NodeId,
    incarnation: Incarnation,
    id: &'a str,
    open: bool,
}

impl Asked<'_> {
    fn settled(mut self) {
        self.open = false;
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if self.open {
            self.registry.take(self.node, self.id);
            close_at_node(&self.registry.0.sessions, self.node, self.incarnation, self.id);
        }
    }
}

/// The way to end a stream at its node.
pub(crate) struct Close {
    pub sessions: Registry,
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub id: String,
}

impl Close {
    pub fn send(&self) {
        close_at_node(&self.sessions, &self.node, self.incarnation, &self.id);
    }
}

fn close_at_node(sessions: &Registry, node: &NodeId, incarnation: Incarnation, id: &str) {
    let message = to_node::Message::CloseStream(v1::CloseStream { stream_id: id.to_owned() });
    // Without a session there is nobody to tell; the node sees the end of the call as well.
    let _ = sessions.send(node, incarnation, message);
}

#[cfg(test)]
mod tests;
