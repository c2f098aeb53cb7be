//! `kibo workspace move`: a stop and a start on another node, which can be given again where it was cut off.

use clap::Args;
use kibo_crds::{
    CommandId, Node, NodeId, PoolId, Volume, Workspace,
    workspace::{PowerRequest, PowerState, WhenUnplaceable, WorkspacePhase},
};
use kube::{Api, ResourceExt as _};

use super::{
    CommandArgs,
    power::{finish, fresh_id, is_replay, outcome, submit},
    target,
};
use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    node,
    output::{OutputArgs, words::enum_word},
};

#[derive(Args, Debug)]
pub struct Move {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// The node that it is to run on
    #[arg(long, value_name = "NODE")]
    node: NodeId,
    #[command(flatten)]
    command: CommandArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// The two requests that a move is made of. Their ids are that of the move, with `/stop` and `/start`.
#[derive(Debug)]
struct Requests {
    stop: PowerRequest,
    start: PowerRequest,
    /// Somebody gave the id, so that it may have been used before.
    are_named: bool,
}

impl Requests {
    fn new(node: &NodeId, id: Option<CommandId>) -> Result<Self> {
        let are_named = id.is_some();
        let id = id.unwrap_or_else(fresh_id);
        let sub_id = |step: &str| {
            format!("{id}/{step}")
                .parse::<CommandId>()
                .map_err(|error| Error::invalid(format!("--command-id: {error}")))
        };
        let request = |state, id| PowerRequest {
            state,
            request_id: Some(id),
            stop_mode: None,
            node: None,
            when_unplaceable: None,
        };
        let (stop, start) =
            (request(PowerState::Stopped, sub_id("stop")?), request(PowerState::Running, sub_id("start")?));
        let when_unplaceable = Some(WhenUnplaceable::Fail);
        Ok(Self { stop, start: PowerRequest { node: Some(node.clone()), when_unplaceable, ..start }, are_named })
    }
}

/// What is left to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It runs there.
    Nothing,
    Stop,
    Start,
    /// It was requested before.
    AwaitStop,
    AwaitStart,
}

fn next(workspace: &Workspace, requests: &Requests, subject: &Subject) -> Result<Step> {
    if requests.are_named && is_replay(workspace, &requests.start, subject)? {
        return Ok(Step::AwaitStart);
    }
    if requests.are_named && is_replay(workspace, &requests.stop, subject)? {
        return Ok(Step::AwaitStop);
    }
    let status = workspace.status.clone().unwrap_or_default();
    match status.phase {
        Some(WorkspacePhase::Available) => {
            let here = status.execution.map(|execution| execution.node);
            Ok(if here == requests.start.node { Step::Nothing } else { Step::Stop })
        }
        Some(WorkspacePhase::Stopped | WorkspacePhase::Failed) => Ok(Step::Start),
        phase => {
            let phase = phase.as_ref().map_or_else(|| "not seen by the operator yet".to_owned(), enum_word);
            let text = format!("{subject} is {phase}: only one that is AVAILABLE, STOPPED or FAILED can be moved");
            Err(Error::new(Kind::FailedPrecondition, text).next(format!("look at it: {}", subject.command("get"))))
        }
    }
}

pub async fn relocate(cluster: &Cluster, args: Move) -> Result<()> {
    let (mut workspace, subject) = target::fetch(cluster, &args.workspace).await?;
    let requests = Requests::new(&args.node, args.command.command_id)?;
    let api: Api<Workspace> = cluster.namespaced(&workspace.namespace().unwrap_or_default());
    let mut step = next(&workspace, &requests, &subject)?;
    if matches!(step, Step::Stop | Step::Start) {
        check(cluster, &workspace, &subject, &args.node).await?;
    }
    if step == Step::Stop {
        workspace = submit(&api, &subject, workspace, &requests.stop, requests.are_named).await?;
        step = Step::AwaitStop;
    }
    if step == Step::AwaitStop {
        workspace = outcome(cluster, api.clone(), &subject, &requests.stop).await?;
        step = Step::Start;
    }
    let started = async {
        if step == Step::Start {
            workspace = submit(&api, &subject, workspace, &requests.start, requests.are_named).await?;
            step = Step::AwaitStart;
        }
        if step == Step::AwaitStart {
            workspace = outcome(cluster, api, &subject, &requests.start).await?;
        }
        Ok(workspace)
    };
    let workspace = started.await.map_err(|error: Error| {
        let again = format!("{} --node {}", subject.command("start"), args.node);
        match error.kind {
            // The start stays requested, or somebody asked for something else: nothing is to be started again.
            Kind::Timeout | Kind::Interrupted | Kind::Aborted => error,
            _ => error.next(format!("it does not run now; start it: {again}")),
        }
    })?;
    finish(cluster, &subject, workspace, true, args.output.form()).await
}

/// Whether the node takes new Workspaces and reaches the pools that hold the disks, before anything is stopped. Who
/// may not read nodes leaves that to the start.
async fn check(cluster: &Cluster, workspace: &Workspace, subject: &Subject, target: &NodeId) -> Result<()> {
    let disks = disks(cluster, workspace).await?;
    let named = node::subject(target.as_str());
    let node = match cluster.cluster_wide::<Node>().get(target.as_str()).await {
        Err(kube::Error::Api(status)) if status.is_forbidden() => None,
        answer => Some(answer.on(&named)?),
    };
    obstacle(&disks, node.as_ref()).map_or(Ok(()), |obstacle| {
        let text = format!("{subject} is left as it is: {obstacle}");
        Err(Error::new(Kind::FailedPrecondition, text)
            .next(format!("see how the node stands: {}", named.command("get"))))
    })
}

/// A disk of the Workspace, where it is.
#[derive(Clone, Debug)]
struct Disk {
    what: String,
    pool: PoolId,
    moves_to: Option<PoolId>,
}

async fn disks(cluster: &Cluster, workspace: &Workspace) -> Result<Vec<Disk>> {
    let status = workspace.status.clone().unwrap_or_default();
    let moving = |of: Option<kibo_crds::MoveStatus>| of.filter(|it| it.state.holds()).map(|it| it.to);
    let layer = status.writable_layer.map(|layer| Disk {
        what: "its writable layer".to_owned(),
        pool: layer.pool,
        moves_to: moving(status.r#move),
    });
    let mut disks: Vec<Disk> = layer.into_iter().collect();
    if let Some(bound) = &status.volume {
        let volumes: Api<Volume> = cluster.namespaced(&workspace.namespace().unwrap_or_default());
        let subject = Subject::namespaced("Volume", &bound.name, &workspace.namespace().unwrap_or_default());
        let volume = volumes.get(&bound.name).await.on(&subject)?.status.unwrap_or_default();
        let what = format!("Volume {:?}", bound.name);
        disks.extend(volume.pool.map(|pool| Disk { what, pool, moves_to: moving(volume.r#move) }));
    }
    Ok(disks)
}

/// Why the start on this node is not even tried.
fn obstacle(disks: &[Disk], node: Option<&Node>) -> Option<String> {
    if let Some((disk, to)) = disks.iter().find_map(|disk| Some((disk, disk.moves_to.as_ref()?))) {
        return Some(format!("{} is being moved to storage pool {to}", disk.what));
    }
    let node = node?;
    let name = node.name_any();
    let status = node.status.clone().unwrap_or_default();
    if !status.has_live_session() {
        return Some(format!("node {name} has no control session"));
    }
    if node.spec.drain.as_ref().is_some_and(|drain| drain.requested) {
        return Some(format!("node {name} is draining"));
    }
    let reaches = |pool: &PoolId| status.pools.iter().any(|it| it.id == *pool && it.available);
    let disk = disks.iter().find(|disk| !reaches(&disk.pool))?;
    Some(format!("{} is in storage pool {}, which node {name} does not reach", disk.what, disk.pool))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn workspace(power: &Value, status: &Value) -> Workspace {
        let object =
            json!({ "metadata": { "name": "dev" }, "spec": { "template": "t", "power": power }, "status": status });
        serde_json::from_value(object).unwrap()
    }

    fn subject() -> Subject {
        Subject::namespaced("Workspace", "dev", "default")
    }

    fn step(power: &Value, status: &Value) -> Result<Step> {
        let requests = Requests::new(&"b".parse().unwrap(), Some("m".parse().unwrap())).unwrap();
        next(&workspace(power, status), &requests, &subject())
    }

    fn at(phase: &str, node: &str) -> Value {
        json!({ "phase": phase, "execution": {
            "instanceId": "inst-01kb8z4w3w0000000000000000", "node": node, "incarnation": 1, "cpuMilli": 1, "memoryBytes": 1,
            "lastSeq": 0, "startedAt": "2026-01-01T00:00:00Z",
        }})
    }

    #[test]
    fn each_state_has_its_next_step() {
        let none = json!(null);
        assert_eq!(step(&none, &at("Available", "a")).unwrap(), Step::Stop);
        assert_eq!(step(&none, &at("Available", "b")).unwrap(), Step::Nothing);
        assert_eq!(step(&none, &json!({ "phase": "Stopped" })).unwrap(), Step::Start);
        assert_eq!(step(&none, &json!({ "phase": "Failed" })).unwrap(), Step::Start);
        for phase in ["Starting", "Stopping", "Creating", "Deleting"] {
            assert_eq!(step(&none, &at(phase, "a")).unwrap_err().kind, Kind::FailedPrecondition, "{phase}");
        }
        assert_eq!(step(&none, &json!({})).unwrap_err().kind, Kind::FailedPrecondition);
    }

    #[test]
    fn a_move_goes_on_where_it_was_cut_off() {
        let stop = json!({ "state": "Stopped", "requestId": "m/stop" });
        assert_eq!(step(&stop, &at("Stopping", "a")).unwrap(), Step::AwaitStop);
        let start = json!({ "state": "Running", "requestId": "m/start", "node": "b", "whenUnplaceable": "Fail" });
        assert_eq!(step(&start, &at("Starting", "b")).unwrap(), Step::AwaitStart);
        let elsewhere = json!({ "state": "Running", "requestId": "m/start", "node": "c", "whenUnplaceable": "Fail" });
        assert_eq!(step(&elsewhere, &at("Starting", "c")).unwrap_err().kind, Kind::Aborted);
    }

    #[test]
    fn what_stands_in_the_way_is_said_before_anything_is_stopped() {
        let node = |spec: Value, alive: bool, available: bool| -> Node {
            serde_json::from_value(json!({ "metadata": { "name": "b" }, "spec": spec, "status": {
                "session": { "id": "s", "alive": alive, "incarnation": 1, "bootId": "b", "version": "v", "startedAt": "2026-01-01T00:00:00Z" },
                "pools": [{ "id": "shared", "uid": "u", "default": false, "available": available }],
            }})).unwrap()
        };
        let disk = |pool: &str, to: Option<&str>| {
            vec![Disk {
                what: "its writable layer".into(),
                pool: pool.parse().unwrap(),
                moves_to: to.map(|to| to.parse().unwrap()),
            }]
        };
        let fine = node(json!({}), true, true);
        assert_eq!(obstacle(&disk("shared", None), Some(&fine)), None);
        assert_eq!(obstacle(&disk("private", None), None), None, "nodes may not be read");
        for (disks, node, expected) in [
            (disk("shared", Some("other")), fine.clone(), "is being moved to storage pool other"),
            (disk("private", None), fine, "is in storage pool private, which node b does not reach"),
            (disk("shared", None), node(json!({}), true, false), "which node b does not reach"),
            (disk("shared", None), node(json!({}), false, true), "has no control session"),
            (disk("shared", None), node(json!({ "drain": { "requested": true } }), true, true), "is draining"),
        ] {
            let found = obstacle(&disks, Some(&node)).unwrap_or_default();
            assert!(found.contains(expected), "{found}");
        }
    }
}
