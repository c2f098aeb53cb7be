//! The next status of a Workspace while it is being worked out.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kibo_crds::{
    CommandId, CommandRecord, CommandResult, ConditionType, NodeId, Workspace, condition, digest, is_reserved_label,
    set_condition,
    workspace::{
        Execution, LastExecution, PowerRequest, PowerState, PowerStatus, Revision, Revisions, StopMode, WorkspacePhase,
        WorkspaceStatus, WritableLayer,
    },
};
use serde::Serialize;

use super::sight::{COMMANDS_KEPT, MAX_COMMANDS};
use crate::growth::AT_NEXT_START;

/// Something that a person is told by a Kubernetes Event: failures, and what happens the first time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub is_warning: bool,
    pub reason: String,
    pub message: String,
}

impl Notice {
    pub fn warning(reason: &str, message: &str) -> Self {
        Self { is_warning: true, reason: reason.to_owned(), message: message.to_owned() }
    }

    pub fn normal(reason: &str, message: &str) -> Self {
        Self { is_warning: false, reason: reason.to_owned(), message: message.to_owned() }
    }
}

/// What a Workspace waits for, in the condition that it concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    pub condition: ConditionType,
    pub reason: &'static str,
    pub message: String,
}

impl Wait {
    pub fn placement(reason: &'static str, message: impl Into<String>) -> Self {
        Self { condition: ConditionType::Placed, reason, message: message.into() }
    }

    pub fn node(reason: &'static str, message: impl Into<String>) -> Self {
        Self { condition: ConditionType::NodeReachable, reason, message: message.into() }
    }
}

/// A status under construction. [`Draft::finish`] makes its conditions agree with the rest.
#[derive(Clone)]
pub struct Draft<'a> {
    pub workspace: &'a Workspace,
    pub status: WorkspaceStatus,
    pub notices: Vec<Notice>,
    /// Nothing of it counts: it depends on what is about to be stored elsewhere, and is to be worked out again.
    pub is_undecided: bool,
    now: Time,
    wait: Option<Wait>,
    /// Where it could be placed, though nobody asks for it.
    place: Option<Wait>,
    /// What is stored of it stands, as long as nobody asks for it.
    place_stands: bool,
    /// Whether the execution's node is reachable; `None`: what is stored stands.
    reachable: Option<bool>,
    /// Conditions that are there only while something is not as it was asked for, with reason and message. Of what is not
    /// here, what is stored stands.
    judged: Vec<(ConditionType, Option<(&'static str, String)>)>,
}

fn bump(revision: &mut Revision, content: &impl Serialize) {
    let digest = digest(content);
    if revision.digest != digest {
        *revision = Revision { revision: revision.revision + 1, digest };
    }
}

/// Labels that belong to the Workspace's owner.
pub fn own_labels(workspace: &Workspace) -> BTreeMap<&String, &String> {
    workspace.metadata.labels.iter().flatten().filter(|(key, _)| !is_reserved_label(key)).collect()
}

fn revisions(workspace: &Workspace, old: Option<Revisions>) -> Revisions {
    let mut revisions = old.unwrap_or_default();
    bump(&mut revisions.labels, &own_labels(workspace));
    bump(&mut revisions.annotations, &workspace.spec.annotations);
    // The name of a request is no content.
    let layer = workspace.spec.writable_layer.clone().map(|layer| WritableLayer { request_id: None, ..layer });
    bump(&mut revisions.resources, &(&workspace.spec.resources, &layer));
    bump(&mut revisions.binding, &workspace.spec.volume);
    revisions
}

/// Name of what a power request does, in its command record.
fn operation(request: &PowerRequest) -> &'static str {
    match (request.state, request.stop_mode) {
        (PowerState::Running, _) => "start",
        (PowerState::Stopped, None) => "stop",
        (PowerState::Stopped, Some(StopMode::Force)) => "force-stop",
    }
}

fn shortened(message: &str, max: usize) -> String {
    message.chars().take(max).collect()
}

impl<'a> Draft<'a> {
    pub fn new(workspace: &'a Workspace, now: Time) -> Self {
        let mut status = workspace.status.clone().unwrap_or_default();
        status.observed_generation = workspace.metadata.generation;
        status.revisions = Some(revisions(workspace, status.revisions.take()));
        let keep_from = now.0 - COMMANDS_KEPT;
        status.commands.retain(|command| command.finished_at.as_ref().is_none_or(|at| at.0 >= keep_from));
        status.phase.get_or_insert(WorkspacePhase::Creating);
        Self {
            workspace,
            status,
            notices: Vec::new(),
            is_undecided: false,
            now,
            wait: None,
            place: None,
            place_stands: false,
            reachable: None,
            judged: Vec::new(),
        }
    }

    pub fn phase(&self) -> WorkspacePhase {
        self.status.phase.unwrap_or(WorkspacePhase::Creating)
    }

    /// A phase that needs no explanation.
    pub fn enter(&mut self, phase: WorkspacePhase) {
        self.status.phase = Some(phase);
        (self.status.reason, self.status.message) = (None, None);
    }

    pub fn enter_because(&mut self, phase: WorkspacePhase, reason: &str, message: &str) {
        self.status.phase = Some(phase);
        self.explain(reason, message);
    }

    pub fn explain(&mut self, reason: &str, message: &str) {
        self.status.reason = Some(shortened(reason, 128));
        self.status.message = (!message.is_empty()).then(|| shortened(message, 1024));
    }

    /// The Workspace cannot go on until something happens; said in a condition and in the reason.
    pub fn wait_for(&mut self, wait: Wait) {
        self.explain(wait.reason, &wait.message);
        self.wait = Some(wait);
    }

    /// Says in the condition Placed where it could start; it waits for nothing.
    pub fn could_be_placed(&mut self, place: Wait) {
        self.place = Some(place);
    }

    /// Nothing new is known of where it could start.
    pub fn place_stands(&mut self) {
        self.place_stands = true;
    }

    /// Says how the execution's node stands.
    pub fn node_is_reachable(&mut self, reachable: bool) {
        self.reachable = Some(reachable);
    }

    /// Says that something is not as it was asked for, or that it is.
    pub fn judge(&mut self, kind: ConditionType, unmet: Option<(&'static str, String)>) {
        self.judged.push((kind, unmet));
    }

    /// Records the request in force as acted upon. Its command is `Processing` until something ends it.
    pub fn consume(&mut self, request: &PowerRequest) {
        self.status.power = Some(PowerStatus { consumed: request.clone(), consumed_at: self.now.clone() });
        let Some(id) = &request.request_id else { return };
        self.record(CommandRecord {
            id: id.clone(),
            operation: operation(request).to_owned(),
            digest: digest(request),
            result: CommandResult::Processing,
            reason: None,
            message: None,
            counts: BTreeMap::new(),
            started_at: self.now.clone(),
            finished_at: None,
        });
    }

    fn record(&mut self, record: CommandRecord) {
        self.status.commands.retain(|command| command.id != record.id);
        self.status.commands.push(record);
        let surplus = self.status.commands.len().saturating_sub(MAX_COMMANDS);
        self.status.commands.drain(..surplus);
    }

    /// Records a command that was done, or refused, the moment it was seen.
    pub fn record_finished(
        &mut self,
        id: &CommandId,
        operation: &str,
        digest: String,
        failure: Option<(&'static str, String)>,
    ) {
        self.record(CommandRecord {
            id: id.clone(),
            operation: operation.to_owned(),
            digest,
            result: if failure.is_some() { CommandResult::Failed } else { CommandResult::Succeeded },
            reason: failure.as_ref().map(|(reason, _)| (*reason).to_owned()),
            message: failure.map(|(_, message)| shortened(&message, 512)),
            counts: BTreeMap::new(),
            started_at: self.now.clone(),
            finished_at: Some(self.now.clone()),
        });
    }

    /// Ends every command that is still open: all of them were about the execution that this is about.
    pub fn finish_commands(&mut self, failure: Option<(&str, &str)>) {
        for command in self.status.commands.iter_mut().filter(|c| c.result == CommandResult::Processing) {
            command.finished_at = Some(self.now.clone());
            command.result = if failure.is_some() { CommandResult::Failed } else { CommandResult::Succeeded };
            command.reason = failure.map(|(reason, _)| reason.to_owned());
            command.message = failure.map(|(_, message)| shortened(message, 512));
        }
    }

    /// Takes the execution away and remembers it.
    pub fn end_execution(&mut self, reason: &str) -> Option<Execution> {
        let execution = self.status.execution.take()?;
        self.status.last_execution = Some(LastExecution {
            instance_id: execution.instance_id,
            node: execution.node.clone(),
            incarnation: execution.incarnation,
            ended_at: self.now.clone(),
            reason: shortened(reason, 128),
        });
        self.forget(ConditionType::GuestResponsive);
        self.forget(ConditionType::Blocked);
        self.forget(ConditionType::Paused);
        Some(execution)
    }

    /// Takes a condition away; whether it was there.
    pub fn forget(&mut self, kind: ConditionType) -> bool {
        let before = self.status.conditions.len();
        self.status.conditions.retain(|condition| condition.type_ != kind.to_string());
        self.status.conditions.len() < before
    }

    pub fn set(&mut self, kind: ConditionType, status: bool, reason: &str, message: &str) {
        let generation = self.workspace.metadata.generation;
        let message = shortened(message, 1024);
        let new = condition(kind, Some(status), reason, &message, generation, &self.now);
        set_condition(&mut self.status.conditions, new);
    }

    /// Sets the conditions; `None` when the status is what is stored already.
    pub fn finish(mut self) -> Outcome {
        let phase = self.phase();
        let word = format!("{phase:?}");
        let reason = self.status.reason.clone().unwrap_or_else(|| word.clone());
        let available = phase == WorkspacePhase::Available;
        let message = self.status.message.clone().unwrap_or_default();
        self.set(ConditionType::Available, available, if available { "Running" } else { &reason }, &message);
        let stopped = phase == WorkspacePhase::Stopped;
        let message = if stopped { message } else { String::new() };
        self.set(ConditionType::Stopped, stopped, if stopped { &reason } else { &word }, &message);
        self.set_placed();
        self.set_node_reachable();
        let mut consumer = self.workspace.clone();
        consumer.status = Some(self.status.clone());
        let consumed = consumer.is_power_request_consumed();
        let pending = self.wait.as_ref().map_or("Pending", |wait| wait.reason);
        self.set(ConditionType::PowerRequestConsumed, consumed, if consumed { "Consumed" } else { pending }, "");
        if let Some(responsive) = self.condition(ConditionType::GuestResponsive).cloned() {
            self.set(
                ConditionType::GuestResponsive,
                responsive.status == "True",
                &responsive.reason,
                &responsive.message,
            );
        }
        self.set_judged();
        let stored = self.workspace.status.as_ref();
        let changed = Some(&self.status) != stored;
        Outcome { status: changed.then_some(Box::new(self.status)), notices: self.notices }
    }

    pub fn condition(&self, kind: ConditionType) -> Option<&Condition> {
        self.status.conditions.iter().find(|condition| condition.type_ == kind.to_string())
    }

    fn set_placed(&mut self) {
        let place = self.place.clone();
        match (&self.status.execution, self.wait.clone().filter(|it| it.condition == ConditionType::Placed).or(place)) {
            (Some(execution), _) => {
                let message = format!("on node {}", execution.node);
                self.set(ConditionType::Placed, true, "Placed", &message);
            }
            (None, Some(wait)) => {
                self.set(ConditionType::Placed, false, wait.reason, &wait.message);
            }
            (None, None) if self.place_stands && self.is_unplaced() => self.confirm(ConditionType::Placed),
            (None, None) => self.set(ConditionType::Placed, false, "NoExecution", ""),
        }
    }

    /// As it is stored.
    fn is_unplaced(&self) -> bool {
        self.condition(ConditionType::Placed).is_some_and(|stored| stored.status == "False")
    }

    fn set_node_reachable(&mut self) {
        match self.wait.clone() {
            Some(wait) if wait.condition == ConditionType::NodeReachable => {
                self.set(ConditionType::NodeReachable, false, wait.reason, &wait.message);
            }
            _ => match (&self.status.execution, self.reachable) {
                (None, _) => drop(self.forget(ConditionType::NodeReachable)),
                (Some(_), Some(true)) => self.set(ConditionType::NodeReachable, true, "SessionAlive", ""),
                (Some(execution), Some(false)) => {
                    let message = offline(&execution.node);
                    self.set(ConditionType::NodeReachable, false, "NodeOffline", &message);
                }
                (Some(_), None) => self.confirm(ConditionType::NodeReachable),
            },
        }
    }

    fn set_judged(&mut self) {
        let has_grown = self.status.writable_layer.as_ref().is_none_or(|layer| layer.grow_to.is_none());
        let said = self.condition(ConditionType::Resized).map(|condition| condition.reason.clone());
        if has_grown && said.as_deref() == Some(AT_NEXT_START) {
            self.forget(ConditionType::Resized);
        }
        for kind in [ConditionType::Resized, ConditionType::VolumeBound] {
            self.confirm(kind);
        }
        for (kind, unmet) in std::mem::take(&mut self.judged) {
            match unmet {
                Some((reason, message)) => self.set(kind, false, reason, &message),
                None => _ = self.forget(kind),
            }
        }
    }

    /// What is stored stands, also for the newest spec.
    fn confirm(&mut self, kind: ConditionType) {
        let generation = self.workspace.metadata.generation;
        let stored = self.status.conditions.iter_mut().find(|condition| condition.type_ == kind.to_string());
        if let Some(condition) = stored {
            condition.observed_generation = generation;
        }
    }
}

fn offline(node: &NodeId) -> String {
    format!(
        "node {node} has not been heard of for long: what runs there may go on, and is as it was when the node is back; \
         when its host is off for good or can no longer write, isolate it: `kibo node isolate {node} \
         --confirm-host-cannot-write`"
    )
}

/// A finished draft.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// What is to be written; `None`: the stored status is right.
    pub status: Option<Box<WorkspaceStatus>>,
    /// To be told once that is written.
    pub notices: Vec<Notice>,
}

/// How much of a status is new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// Something happened.
    Facts,
    /// Where it could be placed, for which nobody asks.
    Place,
    /// The messages, in other words.
    Words,
}

/// How much of the second status is new to who knows the first.
pub fn news(known: &WorkspaceStatus, new: &WorkspaceStatus) -> News {
    let placeless = |status: &WorkspaceStatus| {
        let mut status = status.clone();
        status.conditions.retain(|condition| condition.type_ != ConditionType::Placed.to_string());
        status
    };
    if differ_in_words_only(known, new) {
        News::Words
    } else if differ_in_words_only(&placeless(known), &placeless(new)) {
        News::Place
    } else {
        News::Facts
    }
}

/// Whether two statuses differ in nothing but the words of their messages.
pub fn differ_in_words_only(a: &WorkspaceStatus, b: &WorkspaceStatus) -> bool {
    let wordless = |status: &WorkspaceStatus| {
        let mut status = status.clone();
        status.message = None;
        status.conditions.iter_mut().for_each(|condition| condition.message.clear());
        status
    };
    wordless(a) == wordless(b)
}
