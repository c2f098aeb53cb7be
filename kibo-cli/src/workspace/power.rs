//! Start and stop: one power request each, written into the spec, and the wait for its outcome.

use clap::ValueEnum;
use kibo_crds::{
    CommandId, CommandRecord, CommandResult, Workspace,
    workspace::{PowerRequest, PowerState, StopMode, WhenUnplaceable, WorkspacePhase, WorkspaceStatus},
};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use ulid::Ulid;

use super::{Start, Stop, page::One, target};
use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    node,
    output::{
        Form, OutputArgs, present, print,
        words::{enum_word, word},
    },
    wait::{Look, Wait},
};

/// What a start does while no node can take the Workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Unplaceable {
    /// Stay in line until a node has room
    Wait,
    /// Fail at once
    Fail,
}

impl From<Unplaceable> for WhenUnplaceable {
    fn from(choice: Unplaceable) -> Self {
        match choice {
            Unplaceable::Wait => Self::Wait,
            Unplaceable::Fail => Self::Fail,
        }
    }
}

/// A command id that nobody else has.
pub fn fresh_id() -> CommandId {
    let id = format!("kibo-{}", Ulid::new().to_string().to_ascii_lowercase());
    id.parse().expect("a ULID has only letters and digits")
}

pub async fn start(cluster: &Cluster, args: Start) -> Result<()> {
    let request = PowerRequest {
        state: PowerState::Running,
        request_id: Some(args.command.command_id.clone().unwrap_or_else(fresh_id)),
        stop_mode: None,
        node: args.node,
        when_unplaceable: Some(args.when_unplaceable.into()),
    };
    let named = args.command.command_id.is_some();
    Box::pin(submit_and_wait(cluster, &args.workspace, &request, named, args.wait.wanted(), &args.output)).await
}

pub async fn stop(cluster: &Cluster, args: Stop) -> Result<()> {
    let request = PowerRequest {
        state: PowerState::Stopped,
        request_id: Some(args.command.command_id.clone().unwrap_or_else(fresh_id)),
        stop_mode: args.force.then_some(StopMode::Force),
        node: None,
        when_unplaceable: None,
    };
    let named = args.command.command_id.is_some();
    Box::pin(submit_and_wait(cluster, &args.workspace, &request, named, args.wait.wanted(), &args.output)).await
}

async fn submit_and_wait(
    cluster: &Cluster,
    name_or_id: &str,
    request: &PowerRequest,
    named: bool,
    wait: bool,
    output: &OutputArgs,
) -> Result<()> {
    let (workspace, subject) = target::fetch(cluster, name_or_id).await?;
    if let Some(id) = &request.node {
        node::check_exists(cluster, id).await?;
    }
    let namespace = workspace.namespace().unwrap_or_default();
    let api: Api<Workspace> = cluster.namespaced(&namespace);
    let workspace = submit(&api, &subject, workspace, request, named).await?;
    let workspace = if wait { outcome(cluster, api, &subject, request).await? } else { workspace };
    finish(cluster, &subject, workspace, wait, output.form()).await
}

/// Says what came of it.
pub async fn finish(
    cluster: &Cluster,
    subject: &Subject,
    workspace: Workspace,
    waited: bool,
    form: Form,
) -> Result<()> {
    if !matches!(form, Form::Text { .. }) {
        return present(form, &One::gather(cluster, workspace).await);
    }
    if !waited {
        let (verb, awaited) = words(workspace.power_request().state);
        return print(&format!(
            "{subject}: {verb} requested; wait for it: {} --for {awaited}\n",
            subject.command("wait")
        ));
    }
    let status = workspace.status.unwrap_or_default();
    let state = status.phase.as_ref().map(enum_word).unwrap_or_default();
    let node = status.execution.map(|execution| format!(" on {}", execution.node)).unwrap_or_default();
    let id = status.id.map(|id| format!(" ({id})")).unwrap_or_default();
    print(&format!("{subject} is {state}{node}{id}\n"))
}

/// The verb for a power state, and the state that it leads to.
fn words(state: PowerState) -> (&'static str, &'static str) {
    match state {
        PowerState::Running => ("start", "available"),
        PowerState::Stopped => ("stop", "stopped"),
    }
}

/// Writes the request, guarded by the version of what was read. A conflict that leaves the spec as it
/// was (the operator wrote a status) is no reason to give up.
pub async fn submit(
    api: &Api<Workspace>,
    subject: &Subject,
    mut workspace: Workspace,
    request: &PowerRequest,
    named: bool,
) -> Result<Workspace> {
    const ATTEMPTS: usize = 20;
    let generation = workspace.metadata.generation;
    for _ in 0..ATTEMPTS {
        if named && is_replay(&workspace, request, subject)? {
            return Ok(workspace);
        }
        if workspace.metadata.generation != generation {
            return Err(Error::new(Kind::Aborted, format!("{subject} got another request at the same moment"))
                .next(format!("look at it and try again: {}", subject.command("get"))));
        }
        let patch = serde_json::json!({
            "metadata": { "resourceVersion": workspace.resource_version() },
            // A merge patch keeps what it does not name, so that every field of the request is named.
            "spec": { "power": {
                "state": request.state,
                "requestId": request.request_id,
                "stopMode": request.stop_mode,
                "node": request.node,
                "whenUnplaceable": request.when_unplaceable,
            }},
        });
        match api.patch(&subject.name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(kube::Error::Api(status)) if status.is_conflict() => {
                workspace = api.get(&subject.name).await.on(subject)?;
            }
            answer => return answer.on(subject),
        }
    }
    Err(Error::new(Kind::Aborted, format!("{subject} changes too often to be written, and nothing was done"))
        .next(format!("give the command again in a moment; see how it stands: {}", subject.command("get"))))
}

/// Whether this command was given before. The same id with another content is refused.
pub fn is_replay(workspace: &Workspace, request: &PowerRequest, subject: &Subject) -> Result<bool> {
    let reused = || {
        let id = request.request_id.as_ref().map(CommandId::as_str).unwrap_or_default();
        Error::new(Kind::Aborted, format!("{subject}: the command id {id:?} was used for another command before"))
            .next("choose a new --command-id")
    };
    if let Some(current) = workspace.spec.power.as_ref().filter(|current| current.request_id == request.request_id) {
        return if current == request { Ok(true) } else { Err(reused()) };
    }
    match record(workspace, request) {
        Some(record) if record.digest != digest(request) => Err(reused()),
        record => Ok(record.is_some()),
    }
}

/// What the operator noted about the command with this request's id.
fn record<'a>(workspace: &'a Workspace, request: &PowerRequest) -> Option<&'a CommandRecord> {
    let commands = workspace.status.as_ref().map(|status| &status.commands)?;
    commands.iter().find(|command| Some(&command.id) == request.request_id.as_ref())
}

/// The digest under which the operator notes a request.
fn digest(request: &PowerRequest) -> String {
    kibo_crds::digest(request)
}

/// Waits for the outcome of a request that is recorded.
pub async fn outcome(
    cluster: &Cluster,
    api: Api<Workspace>,
    subject: &Subject,
    request: &PowerRequest,
) -> Result<Workspace> {
    let (goal, remains) = match request.state {
        PowerState::Running => ("to be AVAILABLE", "the start stays requested"),
        PowerState::Stopped => ("to be STOPPED", "the stop stays requested"),
    };
    let (_, awaited) = words(request.state);
    let go_on = format!("{} --for {awaited}", subject.command("wait"));
    let wait = Wait { api, subject, goal, timeout: cluster.timeout, remains, go_on };
    wait.until(|seen| look(seen, request, subject)).await
}

/// How far a request has come.
fn look(seen: Option<&Workspace>, request: &PowerRequest, subject: &Subject) -> Result<Look<Workspace>> {
    let over = |how: &str| Error::new(Kind::FailedPrecondition, format!("{subject} {how}"));
    let workspace = seen.ok_or_else(|| over("was deleted meanwhile"))?;
    if workspace.metadata.deletion_timestamp.is_some() {
        return Err(over("is being deleted, which nothing takes back"));
    }
    let status = workspace.status.clone().unwrap_or_default();
    let current = workspace.spec.power.as_ref();
    // A forced stop in place of a normal one leads to what was waited for.
    let replaced = current.filter(|current| {
        request.state == PowerState::Stopped
            && current.state == PowerState::Stopped
            && !current.is_same_request(request)
    });
    let awaited = replaced.unwrap_or(request);
    let (reason, message) = (status.reason.as_deref(), status.message.as_deref());
    match record(workspace, awaited) {
        Some(record) if record.result == CommandResult::Succeeded => return Ok(Look::Done(workspace.clone())),
        Some(record) if record.result == CommandResult::Failed => {
            return Err(failure(subject, awaited, record.reason.as_deref().or(reason), record.message.as_deref()));
        }
        _ => {}
    }
    let consumed = status.power.as_ref().is_some_and(|power| power.consumed.is_same_request(awaited));
    let superseded = current.is_none_or(|current| !current.is_same_request(awaited));
    if !consumed && superseded {
        let message = format!("{subject}: another power request took the place of this one");
        return Err(Error::new(Kind::Aborted, message).next(format!("look at it: {}", subject.command("get"))));
    }
    if !consumed {
        return Ok(Look::Waiting(waits_for(workspace)));
    }
    match (request.state, status.phase) {
        (PowerState::Running, Some(WorkspacePhase::Available))
        | (PowerState::Stopped, Some(WorkspacePhase::Stopped)) => Ok(Look::Done(workspace.clone())),
        // Failed; or it came up and was stopped again, or the other way round, before we looked.
        (_, Some(WorkspacePhase::Failed))
        | (PowerState::Running, Some(WorkspacePhase::Stopped))
        | (PowerState::Stopped, Some(WorkspacePhase::Available)) => Err(failure(subject, request, reason, message)),
        _ => Ok(Look::Waiting(waits_for(workspace))),
    }
}

/// The state with what it waits for, in the words of the operator.
pub fn waits_for(workspace: &Workspace) -> String {
    let Some(status) = &workspace.status else { return "the operator has not seen it yet".to_owned() };
    let phase = status.phase.as_ref().map_or_else(|| "not seen by the operator yet".to_owned(), enum_word);
    match obstacle(status) {
        Some(message) => format!("{phase}: {message}"),
        None => phase,
    }
}

/// What stands in the way, when the operator says so.
pub fn obstacle(status: &WorkspaceStatus) -> Option<&str> {
    let of = |kind: &&str| {
        let mut conditions = status.conditions.iter();
        conditions.find(|condition| condition.type_ == *kind && condition.status == "False")
    };
    let unmet = ["Placed", "NodeReachable", "GuestResponsive"].iter().filter_map(of).map(|it| it.message.as_str());
    unmet.chain(status.message.as_deref()).find(|message| !message.is_empty())
}

/// The error for a request that ended otherwise, by the reason that the operator gave.
fn failure(subject: &Subject, request: &PowerRequest, reason: Option<&str>, message: Option<&str>) -> Error {
    let verb = match request.state {
        PowerState::Running => "did not start",
        PowerState::Stopped => "did not stop",
    };
    let error = failed(subject, verb, reason, message);
    match &request.node {
        Some(id) if error.kind == Kind::ResourceExhausted => {
            error.next(format!("see why: {}", node::subject(id.as_str()).command("get")))
        }
        _ => error,
    }
}

/// An error with the exit status of a Workspace's reason.
pub fn failed(subject: &Subject, what: &str, reason: Option<&str>, message: Option<&str>) -> Error {
    let kind = kind_of(reason.unwrap_or_default());
    let reason = reason.map(word);
    let text = match (reason, message) {
        (Some(reason), Some(message)) => format!("{subject} {what}: {reason}: {message}"),
        (Some(text), None) => format!("{subject} {what}: {text}"),
        (None, Some(text)) => format!("{subject} {what}: {text}"),
        (None, None) => format!("{subject} {what}"),
    };
    Error::new(kind, text).next(match kind {
        Kind::ResourceExhausted => {
            format!(
                "see what the nodes have left: {} node list; or let it wait: --when-unplaceable wait",
                crate::errors::program()
            )
        }
        _ => format!("look at it: {}", subject.command("get")),
    })
}

/// The exit status for a reason of the operator.
fn kind_of(reason: &str) -> Kind {
    match reason {
        "ResourceExhausted" => Kind::ResourceExhausted,
        "Unavailable" | "NodeUnreachable" | "NodeRestarted" => Kind::Unavailable,
        "HolderUnreachable" | "HolderConflict" | "VolumeInUse" | "VolumeNameTaken" | "VolumeDeleting"
        | "VolumeLost" | "StoragePoolLost" | "VolumeOutOfReach" | "NoPoolMember" | "RunsElsewhere" | "NoExecution"
        | "Deleting" | "Transferring" | "ImportPending" | "Importing" | "ImportFailed" => Kind::FailedPrecondition,
        "Superseded" => Kind::Aborted,
        "InvalidAmounts" => Kind::InvalidArgument,
        reason if reason.ends_with("NotFound") => Kind::NotFound,
        _ => Kind::Other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn subject() -> Subject {
        Subject::namespaced("Workspace", "dev", "default")
    }

    fn workspace(power: &Value, status: &Value) -> Workspace {
        serde_json::from_value(json!({
            "metadata": { "name": "dev", "namespace": "default" },
            "spec": { "template": "t", "power": power },
            "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn what_is_lost_or_out_of_reach_is_a_failed_precondition() {
        for reason in ["StoragePoolLost", "VolumeLost", "VolumeOutOfReach", "HolderConflict"] {
            assert_eq!(kind_of(reason), Kind::FailedPrecondition, "{reason}");
        }
    }

    fn request(state: &str, id: &str) -> (Value, PowerRequest) {
        let value = json!({ "state": state, "requestId": id });
        (value.clone(), serde_json::from_value(value).unwrap())
    }

    fn seen(state: &str, status: &Value) -> Result<Look<Workspace>> {
        let (value, request) = request(state, "a");
        look(Some(&workspace(&value, status)), &request, &subject())
    }

    fn consumed(state: &str) -> Value {
        json!({ "consumed": { "state": state, "requestId": "a" }, "consumedAt": "2026-01-01T00:00:00Z" })
    }

    #[test]
    fn a_request_that_is_not_consumed_is_waited_for() {
        assert_eq!(
            seen("Running", &json!({ "phase": "Stopped" })).unwrap(),
            Look::Waiting("STOPPED".into()),
            "the phase of before says nothing"
        );
        let waiting = json!({ "phase": "Creating", "conditions": [{
            "type": "Placed", "status": "False", "reason": "ResourceExhausted", "message": "2 nodes lack memory",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]});
        assert_eq!(seen("Running", &waiting).unwrap(), Look::Waiting("CREATING: 2 nodes lack memory".into()));
    }

    #[test]
    fn a_consumed_request_ends_with_the_phase() {
        let at = |state, phase: &str| seen(state, &json!({ "phase": phase, "power": consumed(state) }));
        assert!(matches!(at("Running", "Starting"), Ok(Look::Waiting(_))));
        assert!(matches!(at("Running", "Available"), Ok(Look::Done(_))));
        assert!(matches!(at("Stopped", "Stopping"), Ok(Look::Waiting(_))));
        assert!(matches!(at("Stopped", "Stopped"), Ok(Look::Done(_))));
        assert_eq!(at("Running", "Failed").unwrap_err().kind, Kind::Other);
    }

    #[test]
    fn a_failure_carries_the_status_of_its_reason() {
        let table = [
            ("ResourceExhausted", Kind::ResourceExhausted),
            ("Unavailable", Kind::Unavailable),
            ("TemplateNotFound", Kind::NotFound),
            ("HolderUnreachable", Kind::FailedPrecondition),
            ("GuestFailed", Kind::Other),
        ];
        for (reason, kind) in table {
            let status = json!({
                "phase": "Failed", "reason": reason, "message": "because", "power": consumed("Running"),
            });
            let error = seen("Running", &status).unwrap_err();
            assert_eq!(error.kind, kind, "{reason}");
            assert!(error.message.ends_with(": because"), "{error}");
        }
    }

    #[test]
    fn another_request_in_its_place_aborts_the_wait() {
        let (_, mine) = request("Running", "mine");
        let (other, _) = request("Stopped", "other");
        let workspace = workspace(&other, &json!({ "phase": "Stopping" }));
        assert_eq!(look(Some(&workspace), &mine, &subject()).unwrap_err().kind, Kind::Aborted);
        assert_eq!(look(None, &mine, &subject()).unwrap_err().kind, Kind::FailedPrecondition);
    }

    #[test]
    fn a_forced_stop_serves_who_waits_for_the_normal_one() {
        let (_, mine) = request("Stopped", "mine");
        let forced = json!({ "state": "Stopped", "requestId": "forced", "stopMode": "Force" });
        let stopping = workspace(&forced, &json!({ "phase": "Stopping" }));
        assert!(matches!(look(Some(&stopping), &mine, &subject()), Ok(Look::Waiting(_))));
        let power = json!({ "consumed": forced, "consumedAt": "2026-01-01T00:00:00Z" });
        let stopped = workspace(&forced, &json!({ "phase": "Stopped", "power": power }));
        assert!(matches!(look(Some(&stopped), &mine, &subject()), Ok(Look::Done(_))));
    }

    #[test]
    fn the_record_of_a_command_decides() {
        let seen = |result: &str, reason: &str| {
            let record = json!({
                "id": "a", "operation": "start", "digest": "", "result": result, "reason": reason, "message": "because",
                "startedAt": "2026-01-01T00:00:00Z",
            });
            seen("Running", &json!({ "phase": "Stopped", "power": consumed("Running"), "commands": [record] }))
        };
        assert!(matches!(seen("Succeeded", ""), Ok(Look::Done(_))), "also when it was stopped since");
        assert_eq!(seen("Failed", "RunsElsewhere").unwrap_err().kind, Kind::FailedPrecondition);
        assert_eq!(seen("Failed", "Superseded").unwrap_err().kind, Kind::Aborted);
        assert_eq!(seen("Failed", "ResourceExhausted").unwrap_err().kind, Kind::ResourceExhausted);
    }

    #[test]
    fn the_same_command_id_is_a_replay_and_with_another_content_refused() {
        let (value, same) = request("Running", "a");
        let current = workspace(&value, &json!({}));
        assert_eq!(is_replay(&current, &same, &subject()), Ok(true));
        let (_, other) = request("Stopped", "a");
        assert_eq!(is_replay(&current, &other, &subject()).unwrap_err().kind, Kind::Aborted);
        let (_, new) = request("Running", "b");
        assert_eq!(is_replay(&current, &new, &subject()), Ok(false));
        let recorded = workspace(
            &value,
            &json!({ "commands": [{
                "id": "b", "operation": "start", "digest": digest(&new), "result": "Succeeded", "startedAt": "2026-01-01T00:00:00Z",
            }]}),
        );
        assert_eq!(is_replay(&recorded, &new, &subject()), Ok(true));
        let (_, stop) = request("Stopped", "b");
        assert_eq!(is_replay(&recorded, &stop, &subject()).unwrap_err().kind, Kind::Aborted);
    }

    #[test]
    fn ids_are_fresh() {
        assert_ne!(fresh_id(), fresh_id());
    }
}
