//! What is held where. Pure.
//!
//! A node's word goes first: it reports the end of a run only when every process, file and rule of it is gone, and
//! records the release of a disk. Where it cannot give its word any more (isolated, retired, back in a newer life),
//! the control plane's state says it.

use std::collections::{BTreeMap, BTreeSet};

use kibo_crds::{
    Incarnation, Node, NodeId,
    node::{Admission, Holder, HolderEnd, IsolationState, PreviousHolder},
    workspace::{Execution, LastExecution, WorkspacePhase},
};
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum State {
    /// A node has it, and says so.
    Held,
    /// It is being ended.
    Releasing,
    /// Its use is over and on record; the right stays with the node, since no other node reaches its pool.
    Retained,
    /// The node that has it cannot be asked.
    Unknown,
    Released,
}

/// Who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Source {
    Node,
    ControlPlane,
}

/// One thing that a Workspace can hold on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub state: State,
    pub source: Source,
    pub node: Option<NodeId>,
    pub detail: String,
}

impl Part {
    fn new(state: State, source: Source, node: Option<&NodeId>, detail: impl Into<String>) -> Self {
        Self { state, source, node: node.cloned(), detail: detail.into() }
    }

    fn never(detail: &str) -> Self {
        Self::new(State::Released, Source::ControlPlane, None, detail)
    }
}

/// The use right of a disk, and who had it before.
pub type Right = (Option<Holder>, Option<PreviousHolder>);

/// What the objects say.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub is_deleted: bool,
    pub phase: Option<WorkspacePhase>,
    pub execution: Option<Execution>,
    pub last: Option<LastExecution>,
    pub layer: Right,
    /// Absent: no Volume is bound.
    pub volume: Option<Right>,
}

impl Seen {
    /// Every node that it names.
    pub fn nodes(&self) -> BTreeSet<NodeId> {
        let rights = [Some(&self.layer), self.volume.as_ref()];
        let holders = rights.into_iter().flatten().flat_map(|(holder, previous)| {
            [holder.as_ref().map(|holder| &holder.node), previous.as_ref().map(|previous| &previous.node)]
        });
        let runs = [self.execution.as_ref().map(|it| &it.node), self.last.as_ref().map(|it| &it.node)];
        holders.chain(runs).flatten().cloned().collect()
    }
}

/// What matters of a node.
#[derive(Clone, Copy, Debug, Default)]
pub struct NodeFacts {
    pub is_alive: bool,
    pub incarnation: Option<Incarnation>,
    /// The highest incarnation whose isolation was carried out.
    pub isolated: Option<Incarnation>,
    pub is_retired: bool,
    /// Who asks may not read nodes.
    pub is_hidden: bool,
}

impl NodeFacts {
    pub const HIDDEN: Self =
        Self { is_alive: false, incarnation: None, isolated: None, is_retired: false, is_hidden: true };

    pub fn of(node: &Node) -> Self {
        let Some(status) = &node.status else { return Self::default() };
        let isolated = status.isolation.as_ref().filter(|isolation| isolation.state == IsolationState::Finished);
        Self {
            is_alive: status.has_live_session(),
            incarnation: status.incarnation,
            isolated: isolated.map(|isolation| isolation.incarnation),
            is_retired: status.admission == Some(Admission::Retired),
            is_hidden: false,
        }
    }
}

type Nodes = BTreeMap<NodeId, NodeFacts>;

/// Why what this life of the node had is void, if it is.
fn void(nodes: &Nodes, node: &NodeId, incarnation: Incarnation) -> Option<String> {
    let facts = nodes.get(node)?;
    if facts.is_retired {
        Some("the node is retired".to_owned())
    } else if facts.isolated >= Some(incarnation) {
        Some(format!("incarnation {incarnation} of the node was isolated"))
    } else if facts.incarnation > Some(incarnation) {
        Some("the node came back in a newer incarnation, without it".to_owned())
    } else {
        None
    }
}

fn is_retired(nodes: &Nodes, node: &NodeId) -> bool {
    nodes.get(node).is_some_and(|facts| facts.is_retired)
}

/// Why the node's word is not to be had: it has no session, or whoever asks may not see whether it has one.
fn unheard(nodes: &Nodes, node: &NodeId) -> Option<&'static str> {
    match nodes.get(node) {
        Some(facts) if facts.is_hidden => {
            Some("when it was last heard of, which may be long ago: you may not read nodes")
        }
        Some(facts) if !facts.is_alive => Some("when it was last heard of"),
        Some(_) | None => None,
    }
}

/// The grant is written, and the node may not have heard of it.
fn is_starting(phase: Option<WorkspacePhase>) -> bool {
    matches!(phase, Some(WorkspacePhase::Creating | WorkspacePhase::Starting))
}

/// Runtime, attachment of the Volume, and what a run leaves behind, which is the writable layer.
pub fn decide(seen: &Seen, nodes: &Nodes) -> [Part; 3] {
    let runtime = runtime(seen, nodes);
    if seen.is_deleted {
        return deleted(seen, nodes, runtime);
    }
    let volume = match &seen.volume {
        Some(volume) => right(volume, nodes, seen.phase, "the Volume"),
        None => Part::never("no Volume is bound"),
    };
    [runtime, volume, right(&seen.layer, nodes, seen.phase, "the writable layer")]
}

fn runtime(seen: &Seen, nodes: &Nodes) -> Part {
    if let Some(run) = &seen.execution {
        let node = Some(&run.node);
        if let Some(why) = void(nodes, &run.node, run.incarnation) {
            return Part::new(State::Released, Source::ControlPlane, node, why);
        }
        let id = run.instance_id;
        if let Some(when) = unheard(nodes, &run.node) {
            let detail = format!("{id} was on the node {when}");
            return Part::new(State::Unknown, Source::ControlPlane, node, detail);
        }
        if is_starting(seen.phase) {
            return Part::new(State::Held, Source::ControlPlane, node, format!("{id} is being started"));
        }
        return if matches!(seen.phase, Some(WorkspacePhase::Stopping | WorkspacePhase::Deleting)) {
            Part::new(State::Releasing, Source::Node, node, format!("{id} is being ended"))
        } else {
            Part::new(State::Held, Source::Node, node, format!("{id} runs there"))
        };
    }
    let Some(last) = &seen.last else { return Part::never("it has never run") };
    let node = Some(&last.node);
    if is_retired(nodes, &last.node) {
        return Part::new(State::Released, Source::ControlPlane, node, "the node is retired");
    }
    match last.reason.as_str() {
        "Unavailable" => {
            let detail = format!("incarnation {} of the node was isolated", last.incarnation);
            Part::new(State::Released, Source::ControlPlane, node, detail)
        }
        "NodeRestarted" | "ExecutionLost" => {
            Part::new(State::Released, Source::ControlPlane, node, "the node came back without it")
        }
        _ => {
            Part::new(State::Released, Source::Node, node, format!("the node reported the end of {}", last.instance_id))
        }
    }
}

fn right((holder, previous): &Right, nodes: &Nodes, phase: Option<WorkspacePhase>, what: &str) -> Part {
    let Some(holder) = holder else { return released(previous.as_ref(), nodes, what) };
    let node = Some(&holder.node);
    if let Some(why) = void(nodes, &holder.node, holder.incarnation)
        // A node that only came back keeps what lies idle in a pool that it alone reaches.
        && !(holder.idle && nodes.get(&holder.node).is_some_and(|facts| !facts.is_retired && facts.isolated < Some(holder.incarnation)))
    {
        return Part::new(State::Released, Source::ControlPlane, node, why);
    }
    if holder.idle {
        let detail = format!("{what} is not in use, and only this node reaches its storage pool");
        return Part::new(State::Retained, Source::Node, node, detail);
    }
    if let Some(when) = unheard(nodes, &holder.node) {
        let detail = format!("the node held {what} {when}");
        return Part::new(State::Unknown, Source::ControlPlane, node, detail);
    }
    if is_starting(phase) {
        return Part::new(State::Held, Source::ControlPlane, node, format!("{what} is granted to the node"));
    }
    if matches!(phase, Some(WorkspacePhase::Stopping | WorkspacePhase::Deleting)) {
        return Part::new(State::Releasing, Source::Node, node, format!("{what} is being released"));
    }
    Part::new(State::Held, Source::Node, node, format!("the node holds {what}"))
}

fn released(previous: Option<&PreviousHolder>, nodes: &Nodes, what: &str) -> Part {
    let Some(previous) = previous else { return Part::never(&format!("no node has held {what}")) };
    let node = Some(&previous.node);
    if is_retired(nodes, &previous.node) {
        return Part::new(State::Released, Source::ControlPlane, node, "the node is retired");
    }
    match previous.ended {
        HolderEnd::Released => Part::new(State::Released, Source::Node, node, format!("the node released {what}")),
        HolderEnd::Refused => Part::new(State::Released, Source::Node, node, format!("the node did not take {what}")),
        HolderEnd::Isolated => {
            let detail = format!("incarnation {} of the node was isolated", previous.incarnation);
            Part::new(State::Released, Source::ControlPlane, node, detail)
        }
        HolderEnd::IncarnationEnded => {
            let detail = "the node came back in a newer incarnation, without it";
            Part::new(State::Released, Source::ControlPlane, node, detail)
        }
        HolderEnd::PoolLost => {
            Part::new(State::Released, Source::ControlPlane, node, "the storage pool was declared lost")
        }
    }
}

/// A Workspace is gone only when nothing of it runs, its layer is removed and its Volume is let go.
fn deleted(seen: &Seen, nodes: &Nodes, runtime: Part) -> [Part; 3] {
    let node = seen.last.as_ref().map(|last| &last.node);
    let volume = Part::new(State::Released, Source::ControlPlane, node, "let go with the deletion");
    let residual = match node {
        None => Part::never("it has never run"),
        Some(node) if is_retired(nodes, node) => {
            Part::new(State::Released, Source::ControlPlane, Some(node), "the node is retired")
        }
        Some(_) => Part::new(State::Released, Source::Node, node, "the writable layer was removed with the deletion"),
    };
    [runtime, volume, residual]
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
