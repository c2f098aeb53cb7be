//! The one session of this node with the operator: opened by the node, for as long as the daemon
//! runs. What the operator refuses is acted upon; everything else is tried again.

mod ack;
mod backoff;
mod connect;
mod control;
mod enroll;
mod handle;
mod hello;
mod inventory;
mod live;
mod moves;
mod node;
mod outbox;
mod report;
mod settle;
mod streams;
#[cfg(test)]
mod tests;
mod transfers;

use std::{sync::Arc, time::Duration};

use kibo_protocol::v1::SessionRefusal;
use tokio_util::sync::CancellationToken;

pub use control::{InstanceControl, Inventoried};
pub use enroll::{EnrollError, Proof};
pub use node::{Node, NodeParts};

use backoff::{End, Next, Past};
use connect::Trust;

use crate::{config::Endpoint, state::Credentials};

/// Why the sessions are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The daemon was asked to end; VMs go on.
    Shutdown,
    /// The node was isolated: nothing of it runs any more, and the next daemon begins a new life.
    Isolated,
}

/// A session that lived so long counts as one: the waits begin anew.
const LIVED: Duration = Duration::from_secs(10);

/// Keeps a session open until the daemon ends or is isolated.
pub async fn run<I: InstanceControl>(node: Arc<Node<I>>, shutdown: CancellationToken) -> Outcome {
    let outcome = keep_open(&node, shutdown).await;
    node.streams.end().await;
    outcome
}

async fn keep_open<I: InstanceControl>(node: &Arc<Node<I>>, shutdown: CancellationToken) -> Outcome {
    let mut failures: u32 = 0;
    let mut lost_at = None;
    let mut last_end = None;
    for attempt in 0usize.. {
        let endpoints = &node.config.control.endpoints;
        let endpoint = &endpoints[attempt % endpoints.len()];
        let begun = tokio::time::Instant::now();
        let end = match one_session(node, endpoint, &shutdown).await {
            End::Refused { reason, message } if wants_enrollment(reason) => {
                enroll_anew(node, endpoint, reason, message).await
            }
            end => end,
        };
        let had_session = node.leaves_session();
        failures = if had_session && begun.elapsed() >= LIVED { 1 } else { failures.saturating_add(1) };
        if had_session {
            lost_at = Some(tokio::time::Instant::now());
        }
        let alone_for = lost_at.map(|at| at.elapsed());
        let past = Past { failures, alone_for, return_within: node.return_within() };
        let next = backoff::next(&end, past);
        tell(endpoint, &end, next, last_end.as_ref() == Some(&end));
        let wait = match next {
            Next::Exit => return Outcome::Shutdown,
            Next::Isolate => {
                node.isolate().await;
                return Outcome::Isolated;
            }
            Next::Retry(wait) => backoff::jittered(wait, rand::random(), past),
        };
        last_end = Some(end);
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = shutdown.cancelled() => return Outcome::Shutdown,
        }
    }
    Outcome::Shutdown
}

/// One line for each new cause; the same again is only for those who look closely.
fn tell(endpoint: &Endpoint, end: &End, next: Next, repeated: bool) {
    let what = match end {
        End::Shutdown => return,
        End::Refused { reason, message } => format!("refused ({}): {message}", reason.as_str_name()),
        End::Lost(text) | End::Disobeyed(text) | End::NotEnrolled(text) | End::Local(text) => text.clone(),
    };
    if repeated {
        tracing::debug!(%endpoint, ?next, "no session: {what}");
    } else {
        tracing::warn!(%endpoint, ?next, "no session: {what}");
    }
}

async fn one_session<I: InstanceControl>(
    node: &Arc<Node<I>>,
    endpoint: &Endpoint,
    shutdown: &CancellationToken,
) -> End {
    let session = async {
        let credentials = match credentials(node, endpoint).await {
            Ok(credentials) => credentials,
            Err(end) => return end,
        };
        let trust = match Trust::read(&node.config.control.ca_file, None) {
            Ok(trust) => trust,
            Err(error) => return End::Local(error.to_string()),
        };
        match connect::connect(endpoint, &trust).await {
            Ok(channel) => {
                let way = streams::Way { endpoint: endpoint.clone(), trust, session: channel.clone() };
                live::run(node, &credentials, way, channel).await
            }
            Err(error) => End::Lost(error.to_string()),
        }
    };
    tokio::select! {
        end = session => end,
        () = shutdown.cancelled() => End::Shutdown,
    }
}

/// What an earlier enrollment stored, or a new enrollment.
async fn credentials<I: InstanceControl>(node: &Node<I>, endpoint: &Endpoint) -> Result<Credentials, End> {
    match Credentials::load(&node.dir) {
        Ok(Some(credentials)) if credentials.node_id == node.id => return Ok(credentials),
        Ok(Some(credentials)) => {
            let stored = credentials.node_id;
            return Err(End::Local(format!("the stored key is of node {stored}, but this node is {}", node.id)));
        }
        Ok(None) => {}
        Err(error) => return Err(End::Local(error.to_string())),
    }
    enroll_with_what_is_there(node, endpoint).await
}

/// The operator does not take this host's key (any more).
fn wants_enrollment(reason: SessionRefusal) -> bool {
    matches!(reason, SessionRefusal::Revoked | SessionRefusal::UnknownNode | SessionRefusal::WrongKey)
}

/// An admin may have put a new token on this host since it was enrolled. Without one it stays refused.
async fn enroll_anew<I: InstanceControl>(
    node: &Node<I>,
    endpoint: &Endpoint,
    reason: SessionRefusal,
    message: String,
) -> End {
    if Proof::of_node(&node.config.control, &node.id).is_err() {
        return End::Refused { reason, message };
    }
    match enroll_with_what_is_there(node, endpoint).await {
        Ok(_) => End::Lost("the former key was not taken any more, and this host has a new one now".into()),
        Err(End::NotEnrolled(why)) => End::Refused { reason, message: format!("{message}; {why}") },
        Err(_) => End::Refused { reason, message },
    }
}

async fn enroll_with_what_is_there<I: InstanceControl>(
    node: &Node<I>,
    endpoint: &Endpoint,
) -> Result<Credentials, End> {
    let control = &node.config.control;
    let proof = Proof::of_node(control, &node.id).map_err(|error| End::NotEnrolled(error.to_string()))?;
    let trust = Trust::read(&control.ca_file, proof.ca_hash());
    let trust = trust.map_err(|error| End::NotEnrolled(error.to_string()))?;
    let channel = connect::connect(endpoint, &trust).await.map_err(|error| End::Lost(error.to_string()))?;
    match enroll::enroll(channel, proof, node.id.clone(), &node.dir).await {
        Ok(credentials) => {
            tracing::info!(node = %credentials.node_id, cluster = credentials.cluster_id, "enrolled");
            Ok(credentials)
        }
        Err(error @ EnrollError::Unavailable(_)) => Err(End::Lost(error.to_string())),
        Err(error) => Err(End::NotEnrolled(error.to_string())),
    }
}
