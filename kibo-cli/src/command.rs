//! How a command reaches an object of the cluster: guarded by the version that was looked at, once for each id, and on
//! record before it is answered.

use std::{
    fmt,
    io::{self, BufRead as _, IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

use clap::Args;
use jiff::Timestamp;
use kibo_crds::{CommandId, CommandRecord, CommandResult, Order, Requested, refusals};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, VersionMatch},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    output::words::word,
    wait::{Look, Wait},
    workspace::fresh_id,
};

/// Conflicts are with the operator, which writes a busy object about once a second.
const ATTEMPTS: usize = 20;

/// A kind whose spec carries commands and whose status says what came of them.
pub trait Commanded: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned + Send + 'static {
    /// What people call the version that `--expected-version` takes.
    const VERSION: &'static str;

    fn subject(name: &str) -> Subject;
    fn requested(&self) -> Vec<Requested>;
    fn commands(&self) -> &[CommandRecord];
    /// What is different between two looks, a phrase for each part; never empty.
    fn changes(old: &Self, new: &Self, now: Timestamp) -> Vec<String>;
    /// Whether anything changed that a person decides by. Reports come all the time.
    fn changes_that_matter(old: &Self, new: &Self) -> bool;
    /// What a failed command means and what to do about it, by its reason.
    fn advice(_reason: &str, _subject: &Subject) -> Option<(Kind, String)> {
        None
    }
    /// What to give to go on with a wait that took too long.
    fn go_on(_operation: &str, subject: &Subject) -> String {
        subject.command("get")
    }
}

/// What every write takes.
#[derive(Args, Debug)]
pub struct WriteArgs {
    /// Id of this command: the same id again gives the same outcome instead of a second one
    #[arg(long, value_name = "ID")]
    pub command_id: Option<CommandId>,
    /// Do it only if this is still its version (of a node: registration_version)
    #[arg(long, value_name = "VERSION")]
    pub expected_version: Option<String>,
}

/// The same for what cannot be taken back: an id goes with the version that its caller has looked at.
#[derive(Args, Debug)]
pub struct FinalWriteArgs {
    /// Id of this command: the same id again gives the same outcome instead of a second one
    #[arg(long, value_name = "ID", requires = "expected_version")]
    command_id: Option<CommandId>,
    /// Do it only if this is still its version (of a node: registration_version)
    #[arg(long, value_name = "VERSION")]
    expected_version: Option<String>,
}

impl From<FinalWriteArgs> for WriteArgs {
    fn from(args: FinalWriteArgs) -> Self {
        Self { command_id: args.command_id, expected_version: args.expected_version }
    }
}

/// One command to one object.
pub struct Submission<K> {
    pub api: Api<K>,
    pub subject: Subject,
    operation: &'static str,
    digest: String,
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

/// What the operator has on record about a command, and the object as it was then.
#[derive(Clone, Debug)]
pub struct Recorded<K> {
    pub object: K,
    pub record: CommandRecord,
}

impl<K: Commanded> Submission<K>
where
    K: Resource<Scope = k8s_openapi::ClusterResourceScope>,
{
    pub fn new(cluster: &Cluster, name: &str, order: &impl Order, args: impl Into<WriteArgs>) -> Self {
        let args = args.into();
        Self {
            api: cluster.cluster_wide(),
            subject: K::subject(name),
            operation: order.operation(),
            digest: order.digest(),
            is_named: args.command_id.is_some(),
            id: args.command_id.unwrap_or_else(fresh_id),
            expected: args.expected_version,
            deadline: Instant::now() + cluster.timeout,
        }
    }
}

impl<K: Commanded> Submission<K> {
    /// The id for a part of the spec that is answered without waiting for its record: only where somebody asked for
    /// one does the next command have to wait for it.
    pub fn id_if_named(&self) -> Option<&CommandId> {
        self.is_named.then_some(&self.id)
    }

    /// Writes what `patch` makes of the object, unless this command was given before, and waits for its record.
    pub async fn run(&self, patch: impl Fn(&K) -> Result<Value>) -> Result<Recorded<K>> {
        self.submit(patch).await?;
        self.outcome().await
    }

    /// The same without waiting.
    pub async fn submit(&self, patch: impl Fn(&K) -> Result<Value>) -> Result<Given> {
        let mut object = self.api.get(&self.subject.name).await.on(&self.subject)?;
        let first = object.clone();
        for _ in 0..ATTEMPTS {
            if self.is_named && self.is_replay(&object)? {
                return Ok(Given::Before);
            }
            self.check_version(&first, &object).await?;
            let mut patch = patch(&object)?;
            patch["metadata"]["resourceVersion"] = json!(object.resource_version());
            match self.api.patch(&self.subject.name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Err(kube::Error::Api(status)) if status.is_conflict() => {
                    object = self.api.get(&self.subject.name).await.on(&self.subject)?;
                }
                Err(kube::Error::Api(status)) if status.message.contains(refusals::NOT_ON_RECORD) => {
                    object = self.recorded_all().await?;
                }
                answer => return answer.map(|_| Given::Now).on(&self.subject),
            }
        }
        Err(Error::new(
            Kind::Aborted,
            format!("{} changes too often to be written, and nothing was done", self.subject),
        )
        .next(format!("give the command again in a moment; see how it stands: {}", self.subject.command("get"))))
    }

    /// Whether this command was given before. The same id with another input is refused.
    fn is_replay(&self, object: &K) -> Result<bool> {
        let known = object.requested();
        let known = known.iter().map(|it| (&it.id, it.operation, it.digest.as_str()));
        let records = object.commands().iter().map(|it| (&it.id, it.operation.as_str(), it.digest.as_str()));
        let Some((_, operation, digest)) = known.chain(records).find(|(id, ..)| **id == self.id) else {
            return Ok(false);
        };
        if (operation, digest) == (self.operation, self.digest.as_str()) {
            return Ok(true);
        }
        let what = if operation == self.operation { "with another input" } else { "for another command" };
        let text =
            format!("{}: the command id {:?} was used {what} before ({operation})", self.subject, self.id.as_str());
        Err(Error::new(Kind::Aborted, text).next("choose a new --command-id"))
    }

    /// With an expected version, nothing may have changed since; without one, nothing that a person decides by.
    async fn check_version(&self, first: &K, object: &K) -> Result<()> {
        let now = object.resource_version().unwrap_or_default();
        let Some(expected) = &self.expected else {
            let changed = K::changes(first, object, Cluster::now());
            let telling: Vec<_> =
                K::changes_that_matter(first, object).then_some(changed).into_iter().flatten().collect();
            return if telling.is_empty() { Ok(()) } else { Err(self.stale("meanwhile", &telling, &now)) };
        };
        if *expected == now {
            return Ok(());
        }
        let changed = match self.at_version(expected).await {
            Some(old) => K::changes(&old, object, Cluster::now()),
            None => vec!["what it was then is not known any more".to_owned()],
        };
        Err(self.stale(&format!("since version {expected}"), &changed, &now))
    }

    fn stale(&self, since: &str, changes: &[String], version: &str) -> Error {
        let text = format!(
            "{} has changed {since}: {}; its {} is {version} now, and nothing was done",
            self.subject,
            changes.join("; "),
            K::VERSION
        );
        Error::new(Kind::Aborted, text).next(format!("look at it and decide again: {}", self.subject.command("get")))
    }

    /// The object as it was at a version, while the API server still has it.
    async fn at_version(&self, version: &str) -> Option<K> {
        version.parse::<u64>().ok().filter(|version| *version > 0)?;
        let params = ListParams::default().fields(&format!("metadata.name={}", self.subject.name));
        let params = params.at(version).matching(VersionMatch::Exact);
        self.api.list(&params).await.ok()?.items.into_iter().next()
    }

    /// Waits until every command that stands in the spec is on record.
    async fn recorded_all(&self) -> Result<K> {
        let missing = |object: &K| {
            let mut requested = object.requested().into_iter();
            requested.find(|it| !object.commands().iter().any(|known| known.id == it.id)).map(|it| it.operation)
        };
        let wait = self.wait("to take the command before", "nothing was changed");
        wait.until(|seen| {
            let object = seen.ok_or_else(|| self.gone())?;
            Ok(match missing(object) {
                Some(operation) => Look::Waiting(format!("the operator has not recorded a {operation} yet")),
                None => Look::Done(object.clone()),
            })
        })
        .await
    }

    /// Waits for what comes of the command.
    async fn outcome(&self) -> Result<Recorded<K>> {
        let remains = format!("the {} stays requested", self.operation);
        let wait = self.wait("to carry out the command", &remains);
        wait.until(|seen| self.look(seen)).await
    }

    fn look(&self, seen: Option<&K>) -> Result<Look<Recorded<K>>> {
        let object = seen.ok_or_else(|| self.gone())?;
        let Some(record) = object.commands().iter().find(|record| record.id == self.id) else {
            return Ok(Look::Waiting("the operator has not seen it yet".to_owned()));
        };
        match record.result {
            CommandResult::Processing => Ok(Look::Waiting("the operator carries it out".to_owned())),
            CommandResult::Succeeded => Ok(Look::Done(Recorded { object: object.clone(), record: record.clone() })),
            CommandResult::Failed => Err(self.failure(record)),
        }
    }

    fn failure(&self, record: &CommandRecord) -> Error {
        let reason = record.reason.as_deref().unwrap_or_default();
        let (kind, next) = K::advice(reason, &self.subject).unwrap_or_else(|| {
            let kind = if reason == "Superseded" { Kind::Aborted } else { Kind::Other };
            (kind, format!("look at it: {}", self.subject.command("get")))
        });
        let message = record.message.as_deref().unwrap_or_default();
        let text = format!("{}: {} failed: {}: {message}", self.subject, record.operation, word(reason));
        Error::new(kind, text).next(next)
    }

    fn gone(&self) -> Error {
        Error::gone(&self.subject)
    }

    /// A wait for this object, in what is left of the time.
    pub fn wait<'b>(&'b self, goal: &'b str, remains: &'b str) -> Wait<'b, K> {
        let timeout = self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let go_on = if self.is_named {
            "give the same command again, with the same --command-id".to_owned()
        } else {
            K::go_on(self.operation, &self.subject)
        };
        Wait { api: self.api.clone(), subject: &self.subject, goal, timeout, remains, go_on }
    }
}

/// What a person is asked before something that cannot be taken back.
pub struct Question<'a> {
    pub subject: &'a Subject,
    /// Before the subject: `Retire`.
    pub act: &'a str,
    /// After it: `for ever?`, and what that means.
    pub consequence: &'a str,
    /// What is to be confirmed, after the subject: `is retired for ever`.
    pub outcome: &'a str,
    /// Of the command that asks.
    pub verb: &'a str,
}

/// Asks on the terminal.
pub fn confirm(question: &Question<'_>) -> Result<()> {
    let Question { subject, act, consequence, outcome, verb } = question;
    if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        return Err(Error::invalid(format!("there is no terminal to confirm that {subject} {outcome}"))
            .next(format!("{} --yes", subject.command(verb))));
    }
    let mut stderr = io::stderr();
    write!(stderr, "{act} {subject} {consequence} Type yes: ")?;
    stderr.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    if answer.trim().eq_ignore_ascii_case("yes") {
        return Ok(());
    }
    Err(Error::new(Kind::FailedPrecondition, format!("not confirmed, so {subject} stays as it is")))
}
