//! `kibo storage-pool move`: a Volume or a writable layer goes to another pool.

use clap::Args;
use kibo_crds::{CommandId, MoveRequest, MoveState, MoveStatus, PoolId, Volume, Workspace};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::{
    cli::WaitArgs,
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    output::{
        print,
        words::{binary, enum_word, word},
    },
    wait::{Look, Wait},
    workspace,
};

#[derive(Args, Debug)]
pub struct Move {
    /// volume/NAME, workspace/NAME (its writable layer), or the id of a Workspace (ws-…)
    #[arg(value_name = "OBJECT")]
    object: String,
    /// The pool that it is to be in
    #[arg(long, value_name = "POOL")]
    to: PoolId,
    /// Names this command, so that it can be given again without being done twice
    #[arg(long, value_name = "ID")]
    command_id: Option<CommandId>,
    #[command(flatten)]
    wait: WaitArgs,
}

/// A kind of object that can be moved.
trait Movable: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static {
    fn request(&self) -> Option<&MoveRequest>;
    fn moving(&self) -> Option<&MoveStatus>;
}

impl Movable for Volume {
    fn request(&self) -> Option<&MoveRequest> {
        self.spec.r#move.as_ref()
    }

    fn moving(&self) -> Option<&MoveStatus> {
        self.status.as_ref()?.r#move.as_ref()
    }
}

impl Movable for Workspace {
    fn request(&self) -> Option<&MoveRequest> {
        self.spec.r#move.as_ref()
    }

    fn moving(&self) -> Option<&MoveStatus> {
        self.status.as_ref()?.r#move.as_ref()
    }
}

pub async fn run(cluster: &Cluster, args: Move) -> Result<()> {
    let (kind, name) = args.object.split_once('/').unwrap_or(("workspace", &args.object));
    match kind {
        "volume" | "volumes" | "kvol" => {
            let subject = Subject::namespaced("Volume", name, cluster.namespace());
            let api: Api<Volume> = cluster.namespaced(cluster.namespace());
            let volume = api.get(name).await.on(&subject)?;
            submit_and_wait(cluster, api, &subject, volume, &args).await
        }
        "workspace" | "workspaces" | "ws" if args.object.contains('/') || name.starts_with("ws-") => {
            let (found, subject) = workspace::target::fetch(cluster, name).await?;
            let api: Api<Workspace> = cluster.namespaced(&found.namespace().unwrap_or_default());
            submit_and_wait(cluster, api, &subject, found, &args).await
        }
        _ => Err(Error::invalid(format!(
            "{:?} is neither volume/NAME nor workspace/NAME nor the id of a Workspace",
            args.object
        ))),
    }
}

async fn submit_and_wait<K: Movable>(
    cluster: &Cluster,
    api: Api<K>,
    subject: &Subject,
    object: K,
    args: &Move,
) -> Result<()> {
    let request = MoveRequest {
        to: args.to.clone(),
        request_id: Some(args.command_id.clone().unwrap_or_else(workspace::fresh_id)),
    };
    submit(&api, subject, object, &request, args.command_id.is_some()).await?;
    let to = &request.to;
    if !args.wait.wanted() {
        return print(&format!(
            "{subject}: move to storage pool {to} requested; see status.move: {}\n",
            subject.command("get")
        ));
    }
    let remains = "the move stays requested";
    let go_on = subject.command("get");
    let goal = format!("to be in storage pool {to}");
    let wait = Wait { api, subject, goal: &goal, timeout: cluster.timeout, remains, go_on };
    wait.until(|seen| look(seen, &request, subject)).await?;
    print(&format!("{subject} is in storage pool {to}\n"))
}

/// Writes the request, guarded by the version of what was read.
async fn submit<K: Movable>(
    api: &Api<K>,
    subject: &Subject,
    mut object: K,
    request: &MoveRequest,
    is_named: bool,
) -> Result<()> {
    const ATTEMPTS: usize = 20;
    let generation = object.meta().generation;
    for _ in 0..ATTEMPTS {
        if is_named && is_replay(&object, request, subject)? {
            return Ok(());
        }
        if object.meta().generation != generation {
            return Err(Error::new(Kind::Aborted, format!("{subject} got another request at the same moment"))
                .next(format!("look at it and try again: {}", subject.command("get"))));
        }
        let patch = json!({
            "metadata": { "resourceVersion": object.resource_version() },
            "spec": { "move": { "to": request.to, "requestId": request.request_id } },
        });
        match api.patch(&subject.name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(kube::Error::Api(status)) if status.is_conflict() => {
                object = api.get(&subject.name).await.on(subject)?;
            }
            answer => return answer.map(drop).on(subject),
        }
    }
    Err(Error::new(Kind::Aborted, format!("{subject} changes too often to be written"))
        .next(format!("look at it and try again: {}", subject.command("get"))))
}

/// Whether this command was given before. The same id with another pool is refused.
fn is_replay<K: Movable>(object: &K, request: &MoveRequest, subject: &Subject) -> Result<bool> {
    let id = request.request_id.as_ref();
    let asked = object.request().filter(|known| known.request_id.as_ref() == id).map(|known| &known.to);
    let answered = object.moving().filter(|known| known.request_id.as_ref() == id).map(|known| &known.to);
    match asked.or(answered) {
        None => Ok(false),
        Some(to) if *to == request.to => Ok(true),
        Some(to) => {
            let id = id.map(CommandId::as_str).unwrap_or_default();
            let text = format!("{subject}: the command id {id:?} was used before, for a move to storage pool {to}");
            Err(Error::new(Kind::Aborted, text).next("choose a new --command-id"))
        }
    }
}

/// How far a move has come. It is done once the object is in the new pool: what is left over is removed without anybody
/// waiting.
fn look<K: Movable>(seen: Option<&K>, request: &MoveRequest, subject: &Subject) -> Result<Look<()>> {
    let over = |how: &str| Error::new(Kind::FailedPrecondition, format!("{subject} {how}"));
    let object = seen.ok_or_else(|| over("was deleted meanwhile"))?;
    let Some(moving) = object.moving().filter(|moving| moving.answers(request)) else {
        if object.request() != Some(request) {
            return Err(Error::new(Kind::Aborted, format!("{subject} got another request meanwhile"))
                .next(format!("look at it: {}", subject.command("get"))));
        }
        return Ok(Look::Waiting("the operator has not seen it yet".to_owned()));
    };
    let message = moving.message.clone().unwrap_or_default();
    match moving.state {
        MoveState::Finished | MoveState::Removing => Ok(Look::Done(())),
        // It stays where it was, and can be used there.
        MoveState::Failed | MoveState::Cancelled | MoveState::Clearing => {
            let reason = moving.reason.as_deref().unwrap_or_default();
            let kind = match reason {
                "PoolFull" => Kind::ResourceExhausted,
                _ => Kind::FailedPrecondition,
            };
            let text = format!("{subject} was not moved to storage pool {}: {}: {message}", moving.to, word(reason));
            Err(Error::new(kind, text).next(format!("look at it: {}", subject.command("get"))))
        }
        state => Ok(Look::Waiting(match (moving.copied_bytes, moving.total_bytes) {
            _ if !message.is_empty() => format!("{}: {message}", enum_word(&state)),
            (Some(copied), Some(total)) => format!("{} of {} copied", binary(copied), binary(total)),
            _ => enum_word(&state),
        })),
    }
}

/// A move that is not finished, on the page of its object: where to, how far, and why not.
pub fn fact(moving: Option<&MoveStatus>) -> Option<String> {
    let moving = moving.filter(|moving| !matches!(moving.state, MoveState::Finished | MoveState::Cancelled))?;
    let far = match (moving.state, moving.copied_bytes, moving.total_bytes) {
        (MoveState::Copying, Some(copied), Some(total)) => format!(", {} of {}", binary(copied), binary(total)),
        _ => String::new(),
    };
    let node = moving.node.as_ref().map(|node| format!(" by {node}")).unwrap_or_default();
    let why = moving.message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
    Some(format!("to {}: {}{node}{far}{why}", moving.to, enum_word(&moving.state)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(request: (&str, &str), status: Option<(&str, &str, &str)>) -> Volume {
        serde_json::from_value(json!({
            "metadata": { "name": "data" },
            "spec": { "size": "1Gi", "move": { "requestId": request.0, "to": request.1 } },
            "status": status.map(|(id, to, state)| json!({ "move": {
                "requestId": id, "to": to, "state": state, "startedAt": "2026-11-30T00:00:00Z",
                "copiedBytes": 1 << 20, "totalBytes": 3 << 20, "reason": "PoolFull",
            } })),
        }))
        .unwrap()
    }

    fn request(id: &str, to: &str) -> MoveRequest {
        MoveRequest { to: to.parse().unwrap(), request_id: Some(id.parse().unwrap()) }
    }

    #[test]
    fn the_same_command_again_is_done_once_and_never_for_another_pool() {
        let subject = Subject::namespaced("Volume", "data", "default");
        let volume = volume(("b", "new"), Some(("a", "old", "Finished")));
        for (id, to, expected) in [("b", "new", Some(true)), ("a", "old", Some(true)), ("c", "new", Some(false))] {
            assert_eq!(is_replay(&volume, &request(id, to), &subject).ok(), expected, "{id} {to}");
        }
        for (id, to) in [("b", "old"), ("a", "new")] {
            assert_eq!(is_replay(&volume, &request(id, to), &subject).unwrap_err().kind, Kind::Aborted, "{id} {to}");
        }
    }

    #[test]
    fn what_a_wait_sees() {
        let subject = Subject::namespaced("Volume", "data", "default");
        let mine = request("a", "new");
        let look = |status| look(Some(&volume(("a", "new"), status)), &mine, &subject);
        let state = |state| Some(("a", "new", state));
        assert!(matches!(look(None), Ok(Look::Waiting(_))));
        assert!(matches!(look(state("Copying")), Ok(Look::Waiting(text)) if text == "1.0Mi of 3.0Mi copied"));
        assert!(matches!(look(state("Removing")), Ok(Look::Done(()))));
        assert_eq!(look(state("Failed")).unwrap_err().kind, Kind::ResourceExhausted);
        let fact = |state| fact(volume(("a", "new"), Some(("a", "new", state))).moving());
        assert_eq!(fact("Copying").as_deref(), Some("to new: COPYING, 1.0Mi of 3.0Mi"));
        assert_eq!(fact("Finished"), None);
        let other = volume(("b", "new"), None);
        assert_eq!(super::look(Some(&other), &mine, &subject).unwrap_err().kind, Kind::Aborted);
    }
}
