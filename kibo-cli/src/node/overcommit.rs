//! `kibo node overcommit`: how much more than its hosts have a cluster hands out.

use std::str::FromStr;

use clap::{Args, Subcommand};
use kibo_crds::{
    Node, OvercommitPolicy, Ratio, digest,
    node::{NodeCommand, NodeOvercommit},
    overcommit_policy::{DEFAULT, OvercommitPolicySpec},
};
use kube::{
    ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Recorded, Submission, WriteArgs, outcome::Outcome};
use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject, program},
    output::{OutputArgs, Page, Present, present},
};

/// Conflicts are with other people.
const ATTEMPTS: usize = 5;

#[derive(Subcommand, Debug)]
pub enum Overcommit {
    /// Show the cluster-wide ratios
    Get {
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Change the cluster-wide ratios, which hold for every node without its own
    SetDefault(SetDefault),
    /// Change the ratios of one node
    Set(Set),
}

#[derive(Args, Debug)]
pub struct SetDefault {
    /// CPU that is handed out for each CPU of a host: 0 to 16, at most three decimal places
    #[arg(long, value_name = "RATIO")]
    cpu: Option<Ratio>,
    /// The same for memory
    #[arg(long, value_name = "RATIO")]
    memory: Option<Ratio>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Debug)]
pub struct Set {
    #[arg(value_name = "NODE")]
    node: String,
    /// CPU that is handed out for each CPU of the host: 0 to 16, at most three decimal places; or `default`: as the cluster
    #[arg(long, value_name = "RATIO")]
    cpu: Option<OwnRatio>,
    /// The same for memory
    #[arg(long, value_name = "RATIO")]
    memory: Option<OwnRatio>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// A ratio of a node's own, or that of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OwnRatio(Option<Ratio>);

impl FromStr for OwnRatio {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "default" {
            return Ok(Self(None));
        }
        text.parse()
            .map(|ratio| Self(Some(ratio)))
            .map_err(|error: kibo_crds::RatioError| format!("{error}, or default"))
    }
}

/// Which of the two ratios a command gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gives {
    Neither,
    One,
    Both,
}

impl Gives {
    fn of<T>(cpu: Option<T>, memory: Option<T>) -> Self {
        match (cpu, memory) {
            (Some(_), Some(_)) => Self::Both,
            (None, None) => Self::Neither,
            _ => Self::One,
        }
    }

    /// What a command says must not depend on what it read, when it is to be given again.
    fn check(self, is_named: bool, has_version: bool) -> Result<()> {
        match self {
            Self::Neither => Err(Error::invalid("nothing to change: give --cpu, --memory or both")),
            Self::Both if !is_named || has_version => Ok(()),
            Self::One if !is_named => Ok(()),
            _ => Err(Error::invalid(
                "with --command-id, both --cpu and --memory and --expected-version must be given, so that a repetition asks for the same",
            )),
        }
    }
}

pub async fn run(cluster: &Cluster, command: Overcommit) -> Result<()> {
    match command {
        Overcommit::Get { output } => {
            let policy = cluster.cluster_wide::<OvercommitPolicy>().get(DEFAULT).await.on(&policy_subject())?;
            present(output.form(), &Shown { policy, text: None })
        }
        Overcommit::SetDefault(args) => set_default(cluster, args).await,
        Overcommit::Set(args) => set(cluster, args).await,
    }
}

fn policy_subject() -> Subject {
    Subject::cluster("OvercommitPolicy", DEFAULT)
}

async fn set_default(cluster: &Cluster, args: SetDefault) -> Result<()> {
    let WriteArgs { command_id, expected_version } = &args.write;
    let (cpu, memory) = (args.cpu, args.memory);
    Gives::of(cpu, memory).check(command_id.is_some(), expected_version.is_some())?;
    let api = cluster.cluster_wide::<OvercommitPolicy>();
    let digest = digest(&json!({ "operation": "set-default", "cpu": cpu, "memory": memory }));
    for _ in 0..ATTEMPTS {
        let policy = api.get(DEFAULT).await.on(&policy_subject())?;
        let known = policy.spec.request.as_ref().filter(|known| Some(&known.request_id) == command_id.as_ref());
        match known {
            Some(known) if known.digest == digest => {
                return present(args.output.form(), &Shown { text: Some(told(&policy.spec)), policy });
            }
            Some(known) => {
                let text = format!("the command id {:?} was used with other ratios before", known.request_id.as_str());
                return Err(Error::new(Kind::Aborted, text).next("choose a new --command-id"));
            }
            None => {}
        }
        check_version(&policy, expected_version.as_deref())?;
        let request = command_id.as_ref().map(|id| json!({ "requestId": id, "digest": digest }));
        let patch = json!({
            "metadata": { "resourceVersion": policy.resource_version() },
            "spec": {
                "cpu": cpu.unwrap_or(policy.spec.cpu),
                "memory": memory.unwrap_or(policy.spec.memory),
                "request": request,
            },
        });
        match api.patch(DEFAULT, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(kube::Error::Api(status)) if status.is_conflict() => {}
            answer => {
                let policy = answer.on(&policy_subject())?;
                return present(args.output.form(), &Shown { text: Some(told(&policy.spec)), policy });
            }
        }
    }
    let text = "the cluster-wide ratios change too often to be written";
    Err(Error::new(Kind::Aborted, text).next(format!("try again; see who changes them: {}", get_command())))
}

fn get_command() -> String {
    format!("{} node overcommit get", program())
}

fn check_version(policy: &OvercommitPolicy, expected: Option<&str>) -> Result<()> {
    let now = policy.resource_version().unwrap_or_default();
    match expected {
        Some(expected) if expected != now => {
            let OvercommitPolicySpec { cpu, memory, .. } = &policy.spec;
            let text = format!(
                "the cluster-wide ratios have changed since version {expected}: they are cpu {cpu}, memory {memory} now, version {now}, and nothing was done"
            );
            Err(Error::new(Kind::Aborted, text).next(format!("look at them and decide again: {}", get_command())))
        }
        _ => Ok(()),
    }
}

fn told(spec: &OvercommitPolicySpec) -> String {
    format!("cluster-wide ratios: cpu {}, memory {}", spec.cpu, spec.memory)
}

async fn set(cluster: &Cluster, args: Set) -> Result<()> {
    let (cpu, memory) = (args.cpu, args.memory);
    Gives::of(cpu, memory).check(args.write.command_id.is_some(), args.write.expected_version.is_some())?;
    let wanted = move |node: &Node| {
        let own = node.spec.overcommit.clone().unwrap_or_default();
        (cpu.map_or(own.cpu, |cpu| cpu.0), memory.map_or(own.memory, |memory| memory.0))
    };
    let subject = super::subject(&args.node);
    // What is not given stays what it is, and is part of what this command asks for.
    let ratios = wanted(&cluster.cluster_wide().get(&args.node).await.on(&subject)?);
    let command = NodeCommand::SetOvercommit { cpu: ratios.0, memory: ratios.1 };
    let submission = Submission::new(cluster, &args.node, &command, args.write);
    let patch = |node: &Node| -> Result<Value> {
        if wanted(node) != ratios {
            let text = format!("the ratios of {subject} changed meanwhile, and nothing was done");
            return Err(Error::new(Kind::Aborted, text).next(format!("look at it: {}", subject.command("get"))));
        }
        // An absent ratio is taken out of the object.
        Ok(json!({ "spec": { "overcommit": { "cpu": ratios.0, "memory": ratios.1, "requestId": submission.id } } }))
    };
    let Recorded { record, .. } = submission.run(patch).await?;
    let own = NodeOvercommit { cpu: ratios.0, memory: ratios.1, request_id: None };
    let text = format!("{subject}: cpu {}, memory {}", shown(own.cpu), shown(own.memory));
    present(args.output.form(), &Outcome { node: args.node, record, text })
}

fn shown(ratio: Option<Ratio>) -> String {
    ratio.map_or_else(|| "as the cluster".to_owned(), |ratio| format!("x {ratio}"))
}

/// The policy, or what was done to it.
struct Shown {
    policy: OvercommitPolicy,
    text: Option<String>,
}

#[derive(Serialize)]
struct View {
    cpu: String,
    memory: String,
    memory_tight_enter_below_percent: u8,
    memory_tight_leave_above_percent: u8,
    version: Option<String>,
}

impl Present for Shown {
    fn view(&self) -> impl Serialize {
        let spec = &self.policy.spec;
        View {
            cpu: spec.cpu.to_string(),
            memory: spec.memory.to_string(),
            memory_tight_enter_below_percent: spec.memory_tight.enter_below_percent,
            memory_tight_leave_above_percent: spec.memory_tight.leave_above_percent,
            version: self.policy.resource_version(),
        }
    }

    fn names(&self) -> Vec<String> {
        vec![self.policy.name_any()]
    }

    fn text(&self, _wide: bool) -> String {
        if let Some(text) = &self.text {
            return format!("{text}\n");
        }
        let spec = &self.policy.spec;
        let tight = spec.memory_tight;
        let mut page = Page::default();
        page.fact("CPU", spec.cpu.to_string());
        page.fact("Memory", spec.memory.to_string());
        page.fact(
            "Memory tight",
            format!("below {} % available, until above {} %", tight.enter_below_percent, tight.leave_above_percent),
        );
        page.fact("Version", self.policy.resource_version().unwrap_or_default());
        page.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_of_a_node_is_a_number_or_the_default() {
        assert_eq!("default".parse(), Ok(OwnRatio(None)));
        assert_eq!("2.5".parse(), Ok(OwnRatio(Some("2.5".parse().unwrap()))));
        for bad in ["", "16.001", "1.0001", "-1", "1e3", "NaN", "Default"] {
            let rule = bad.parse::<OwnRatio>().unwrap_err();
            assert!(rule.contains("0 to 16") && rule.contains("default"), "{bad}: {rule}");
        }
    }

    #[test]
    fn a_command_that_can_be_repeated_says_everything() {
        assert!(Gives::One.check(false, false).is_ok());
        assert!(Gives::Both.check(true, true).is_ok());
        for (gives, is_named, has_version) in
            [(Gives::Neither, false, false), (Gives::One, true, true), (Gives::Both, true, false)]
        {
            assert_eq!(gives.check(is_named, has_version).unwrap_err().kind, Kind::InvalidArgument);
        }
    }
}
