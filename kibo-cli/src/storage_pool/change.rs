//! `kibo storage-pool set-capacity` and `declare-lost`.

use std::str::FromStr;

use clap::Args;
use kibo_crds::{CapacityQuantity, CommandRecord, Order as _, StoragePool, storage_pool::PoolCommand};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    client::Cluster,
    command::{FinalWriteArgs, Question, Recorded, Submission, WriteArgs, confirm},
    errors::Result,
    output::{
        OutputArgs, Present, present,
        words::{enum_word, instant},
    },
};

#[derive(Args, Debug)]
pub struct SetCapacity {
    #[arg(value_name = "POOL")]
    name: String,
    /// The sum of the sizes of all disks, a quantity in whole MiB; or `default`: the size of the file system. Disks
    /// are thin, so it may be more than the file system has
    #[arg(value_name = "CAPACITY")]
    capacity: Capacity,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// A capacity, or that of the file system.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Capacity(Option<CapacityQuantity>);

impl FromStr for Capacity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "default" {
            return Ok(Self(None));
        }
        let capacity = text.parse().map_err(|error: kibo_crds::AmountError| format!("{error}; or default"))?;
        Ok(Self(Some(capacity)))
    }
}

#[derive(Args, Debug)]
pub struct DeclareLost {
    #[arg(value_name = "POOL")]
    name: String,
    /// You assert it: the data in the pool is gone, and nobody will ask for it again
    #[arg(long, required = true)]
    confirm_data_is_gone: bool,
    /// Do not ask
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    write: FinalWriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn set_capacity(cluster: &Cluster, args: SetCapacity) -> Result<()> {
    let capacity = args.capacity.0;
    let order = PoolCommand::SetCapacity { capacity: capacity.clone() };
    let digest = order.digest();
    let submission = Submission::<StoragePool>::new(cluster, &args.name, &order, args.write);
    let patch = |_: &StoragePool| -> Result<Value> {
        let request = json!({ "requestId": submission.id, "digest": digest });
        Ok(json!({ "spec": { "capacity": capacity, "capacityRequest": request } }))
    };
    let Recorded { record, .. } = submission.run(patch).await?;
    let shown = capacity.as_ref().map_or_else(|| "what its file system has".to_owned(), ToString::to_string);
    let text = format!("{}: capacity set to {shown}", submission.subject);
    present(args.output.form(), &Outcome { pool: args.name, record, text })
}

pub async fn declare_lost(cluster: &Cluster, args: DeclareLost) -> Result<()> {
    let submission = Submission::<StoragePool>::new(cluster, &args.name, &PoolCommand::DeclareLost, args.write);
    if !args.yes {
        confirm(&Question {
            subject: &submission.subject,
            act: "Declare",
            consequence: "lost for ever? What is in it is not used again, also when it comes back.",
            outcome: "is lost for ever",
            verb: "declare-lost",
        })?;
    }
    let patch = |_: &StoragePool| -> Result<Value> {
        let lost = json!({ "confirmDataIsGone": args.confirm_data_is_gone, "requestId": submission.id });
        Ok(json!({ "spec": { "lost": lost } }))
    };
    let Recorded { record, .. } = submission.run(patch).await?;
    let text = format!(
        "{} is LOST: {}; delete what was there",
        submission.subject,
        match record.counts.get("objects").copied().unwrap_or_default() {
            1 => "1 object".to_owned(),
            count => format!("{count} objects"),
        }
    );
    present(args.output.form(), &Outcome { pool: args.name, record, text })
}

/// What a command answers: its record, which a replay shows as it was.
struct Outcome {
    pool: String,
    record: CommandRecord,
    /// For people; without a line feed at its end.
    text: String,
}

#[derive(Serialize)]
struct View<'a> {
    pool_id: &'a str,
    command_id: &'a str,
    operation: &'a str,
    result: String,
    /// Of a declaration of loss: the disks that were there.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost_objects: Option<u32>,
    started_at: String,
    finished_at: Option<String>,
}

impl Present for Outcome {
    fn view(&self) -> impl Serialize {
        View {
            pool_id: &self.pool,
            command_id: self.record.id.as_str(),
            operation: &self.record.operation,
            result: enum_word(&self.record.result),
            lost_objects: self.record.counts.get("objects").copied(),
            started_at: instant(&self.record.started_at),
            finished_at: self.record.finished_at.as_ref().map(instant),
        }
    }

    fn names(&self) -> Vec<String> {
        vec![self.pool.clone()]
    }

    fn text(&self, _wide: bool) -> String {
        format!("{}\n", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capacity_is_an_amount_or_the_default() {
        assert_eq!("default".parse(), Ok(Capacity(None)));
        assert_eq!("10Gi".parse(), Ok(Capacity(Some("10Gi".parse().unwrap()))));
        for bad in ["", "-1", "ten"] {
            assert!(bad.parse::<Capacity>().is_err(), "{bad}");
        }
    }
}
