//! How a command reaches a Node: guarded by the version that was looked at, once for each id, and on record before it
//! is answered.

use std::time::{Duration, Instant};

use clap::Args;
use kibo_crds::{CommandId, CommandRecord, CommandResult, Node, node::NodeCommand};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, VersionMatch},
};
use serde_json::{Value, json};

use super::{changes::changes, subject};
use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    output::words::word,
    wait::{Look, Wait},
    workspace::fresh_id,
};

/// Conflicts are with the operator, which writes a busy Node about once a second.
const ATTEMPTS: usize = 20;

/// What every write takes.
#[derive(Args, Debug)]
pub struct WriteArgs {
    /// Id of this command: the same id again gives the same outcome instead of a second one
    #[arg(long, value_name = "ID")]
    pub command_id: Option<CommandId>,
    /// Do it only if this is still the node's registration_version
    #[arg(long, value_name = "VERSION")]
    pub expected_version: Option<String>,
}

/// One command to one node.
pub struct Submission {
    pub api: Api<Node>,
    pub subject: Subject,
    command: NodeCommand,
    pub id: CommandId,
    /// The caller chose the id, so it may have been used before.
    is_named: bool,
    expected: Option<String>,
    deadline: Instant,
}

/// Whether a command was new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    Now,
    Before,
}

/// What the operator has on record about a command, and the Node as it was then.
#[derive(Clone, Debug)]
pub struct Recorded {
    pub node: Node,
    pub record: CommandRecord,
}

impl Submission {
    pub fn new(cluster: &Cluster, node: &str, command: NodeCommand, args: WriteArgs) -> Self {
        Self {
            api: cluster.cluster_wide(),
            subject: subject(node),
            command,
            is_named: args.command_id.is_some(),
            id: args.command_id.unwrap_or_else(fresh_id),
            expected: args.expected_version,
            deadline: Instant::now() + cluster.timeout,
        }
    }

    /// The id for a part of the spec that is answered without waiting for its record: only where somebody asked for
    /// one does the next command have to wait for it.
    pub fn id_if_named(&self) -> Option<&CommandId> {
        self.is_named.then_some(&self.id)
    }

    /// Writes what `patch` makes of the Node, unless this command was given before, and waits for its record.
    pub async fn run(&self, patch: impl Fn(&Node) -> Result<Value>) -> Result<Recorded> {
        self.submit(patch).await?;
        self.outcome().await
    }

    /// The same without waiting.
    pub async fn submit(&self, patch: impl Fn(&Node) -> Result<Value>) -> Result<Given> {
        let mut node = self.api.get(&self.subject.name).await.on(&self.subject)?;
        let first = node.clone();
        for _ in 0..ATTEMPTS {
            if self.is_named && self.is_replay(&node)? {
                return Ok(Given::Before);
            }
            self.check_version(&first, &node).await?;
            let mut patch = patch(&node)?;
            patch["metadata"]["resourceVersion"] = json!(node.resource_version());
            match self.api.patch(&self.subject.name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Err(kube::Error::Api(status)) if status.is_conflict() => {
                    node = self.api.get(&self.subject.name).await.on(&self.subject)?;
                }
                Err(kube::Error::Api(status)) if status.message.contains(NOT_ON_RECORD) => {
                    node = self.recorded_all().await?;
                }
                answer => return answer.map(|_| Given::Now).on(&self.subject),
            }
        }
        Err(Error::new(Kind::Aborted, format!("{} changes too often to be written", self.subject)))
    }

    /// Whether this command was given before. The same id with another input is refused.
    fn is_replay(&self, node: &Node) -> Result<bool> {
        let known = node.spec.requested();
        let known = known.iter().map(|it| (&it.id, it.operation, it.digest.as_str()));
        let records = node.status.iter().flat_map(|status| &status.commands);
        let records = records.map(|it| (&it.id, it.operation.as_str(), it.digest.as_str()));
        let Some((_, operation, digest)) = known.chain(records).find(|(id, ..)| **id == self.id) else {
            return Ok(false);
        };
        if (operation, digest) == (self.command.operation(), self.command.digest().as_str()) {
            return Ok(true);
        }
        let what = if operation == self.command.operation() { "with another input" } else { "for another command" };
        let text =
            format!("{}: the command id {:?} was used {what} before ({operation})", self.subject, self.id.as_str());
        Err(Error::new(Kind::Aborted, text).next("choose a new --command-id"))
    }

    /// With an expected version, nothing may have changed since; without one, nothing that a person decides by.
    async fn check_version(&self, first: &Node, node: &Node) -> Result<()> {
        let now = node.resource_version().unwrap_or_default();
        let Some(expected) = &self.expected else {
            let changed = changes(first, node, Cluster::now());
            let telling: Vec<_> = changes_that_matter(first, node).then_some(changed).into_iter().flatten().collect();
            return if telling.is_empty() { Ok(()) } else { Err(self.stale("meanwhile", &telling, &now)) };
        };
        if *expected == now {
            return Ok(());
        }
        let changed = match self.at_version(expected).await {
            Some(old) => changes(&old, node, Cluster::now()),
            None => vec!["what it was then is not known any more".to_owned()],
        };
        Err(self.stale(&format!("since version {expected}"), &changed, &now))
    }

    fn stale(&self, since: &str, changes: &[String], version: &str) -> Error {
        let text = format!(
            "{} has changed {since}: {}; its registration_version is {version} now, and nothing was done",
            self.subject,
            changes.join("; ")
        );
        Error::new(Kind::Aborted, text).next(format!("look at it and decide again: {}", self.subject.command("get")))
    }

    /// The Node as it was at a version, while the API server still has it.
    async fn at_version(&self, version: &str) -> Option<Node> {
        version.parse::<u64>().ok().filter(|version| *version > 0)?;
        let params = ListParams::default().fields(&format!("metadata.name={}", self.subject.name));
        let params = params.at(version).matching(VersionMatch::Exact);
        self.api.list(&params).await.ok()?.items.into_iter().next()
    }

    /// Waits until every command that stands in the spec is on record.
    async fn recorded_all(&self) -> Result<Node> {
        let missing = |node: &Node| {
            let known = node.status.as_ref().map(|status| status.commands.as_slice()).unwrap_or_default();
            let mut requested = node.spec.requested().into_iter();
            requested.find(|it| !known.iter().any(|known| known.id == it.id)).map(|it| it.operation)
        };
        let wait = self.wait("to take the command before", "nothing was changed");
        wait.until(|seen| {
            let node = seen.ok_or_else(|| self.gone())?;
            Ok(match missing(node) {
                Some(operation) => Look::Waiting(format!("the operator has not recorded a {operation} yet")),
                None => Look::Done(node.clone()),
            })
        })
        .await
    }

    /// Waits for what comes of the command.
    async fn outcome(&self) -> Result<Recorded> {
        let remains = format!("the {} stays requested", self.command.operation());
        let wait = self.wait("to carry out the command", &remains);
        wait.until(|seen| self.look(seen)).await
    }

    fn look(&self, seen: Option<&Node>) -> Result<Look<Recorded>> {
        let node = seen.ok_or_else(|| self.gone())?;
        let records = node.status.as_ref().map(|status| status.commands.as_slice()).unwrap_or_default();
        let Some(record) = records.iter().find(|record| record.id == self.id) else {
            return Ok(Look::Waiting("the operator has not seen it yet".to_owned()));
        };
        match record.result {
            CommandResult::Processing => Ok(Look::Waiting("the operator carries it out".to_owned())),
            CommandResult::Succeeded => Ok(Look::Done(Recorded { node: node.clone(), record: record.clone() })),
            CommandResult::Failed => Err(self.failure(record)),
        }
    }

    fn failure(&self, record: &CommandRecord) -> Error {
        let reason = record.reason.as_deref().unwrap_or_default();
        let kind = match reason {
            "HostStillWrites" => Kind::FailedPrecondition,
            "Superseded" => Kind::Aborted,
            _ => Kind::Other,
        };
        let message = record.message.as_deref().unwrap_or_default();
        let text = format!("{}: {} failed: {}: {message}", self.subject, record.operation, word(reason));
        Error::new(kind, text).next(match reason {
            "HostStillWrites" => format!(
                "see to it that the host is off, then isolate it again (with a new --command-id); if you know better: {} --confirm-host-cannot-write --force-despite-evidence",
                self.subject.command("isolate")
            ),
            _ => format!("look at it: {}", self.subject.command("get")),
        })
    }

    fn gone(&self) -> Error {
        Error::new(Kind::NotFound, format!("{} was deleted meanwhile", self.subject))
    }

    /// A wait for this node, in what is left of the time.
    pub fn wait<'b>(&'b self, goal: &'b str, remains: &'b str) -> Wait<'b, Node> {
        let timeout = self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let go_on = if self.is_named {
            "give the same command again, with the same --command-id".to_owned()
        } else if self.command == NodeCommand::Drain {
            format!("{} --wait", self.subject.command("drain"))
        } else {
            self.subject.command("get")
        };
        Wait { api: self.api.clone(), subject: &self.subject, goal, timeout, remains, go_on }
    }
}

/// Part of the message of the API's rule.
const NOT_ON_RECORD: &str = "is not in status.commands yet";

/// What a person looked at before deciding: what was asked for, and who the node is. Reports come all the time.
fn changes_that_matter(old: &Node, new: &Node) -> bool {
    let session = |node: &Node| node.status.as_ref()?.session.as_ref().map(|session| session.id.clone());
    let admission = |node: &Node| node.status.as_ref()?.admission;
    old.spec != new.spec
        || old.labels() != new.labels()
        || session(old) != session(new)
        || admission(old) != admission(new)
}
