//! `kibo node slots set` and `kibo node label`.

use std::{collections::BTreeMap, str::FromStr};

use clap::{Args, Subcommand};
use kibo_crds::{Node, Order as _, node::NodeCommand};
use serde_json::{Value, json};

use super::{Recorded, Submission, WriteArgs, outcome::Outcome};
use crate::{
    client::Cluster,
    errors::{Error, Result},
    output::{OutputArgs, present},
};

#[derive(Subcommand, Debug)]
pub enum Slots {
    /// Set how many Instances the node may run at once
    Set(SetSlots),
}

#[derive(Args, Debug)]
pub struct SetSlots {
    #[arg(value_name = "NODE")]
    node: String,
    /// A number, or `default`: what the node's own configuration says
    #[arg(value_name = "SLOTS")]
    slots: SlotCount,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// A number of slots, or the node's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SlotCount(Option<u32>);

impl FromStr for SlotCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "default" {
            return Ok(Self(None));
        }
        let number = text.parse().ok().filter(|number| *number <= 100_000);
        number.map(|number| Self(Some(number))).ok_or_else(|| "must be 0 to 100000, or default".to_owned())
    }
}

#[derive(Args, Debug)]
pub struct Label {
    #[arg(value_name = "NODE")]
    node: String,
    /// KEY=VALUE sets a label, KEY- removes it
    #[arg(value_name = "CHANGE", required = true)]
    changes: Vec<LabelChange>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// A label that gets a value, or goes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LabelChange {
    key: String,
    value: Option<String>,
}

impl FromStr for LabelChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = match (text.split_once('='), text.strip_suffix('-')) {
            (Some((key, value)), _) => (key, Some(value.to_owned())),
            (None, Some(key)) => (key, None),
            (None, None) => ("", None),
        };
        if key.is_empty() {
            return Err("must be KEY=VALUE, or KEY- to remove a label".to_owned());
        }
        Ok(Self { key: key.to_owned(), value })
    }
}

pub async fn set_slots(cluster: &Cluster, args: SetSlots) -> Result<()> {
    let command = NodeCommand::SetSlots { slots: args.slots.0 };
    let digest = command.digest();
    let submission = Submission::new(cluster, &args.node, &command, args.write);
    let patch = |_: &Node| -> Result<Value> {
        let request = json!({ "requestId": submission.id, "digest": digest });
        Ok(json!({ "spec": { "slots": args.slots.0, "slotsRequest": request } }))
    };
    let Recorded { record, .. } = submission.run(patch).await?;
    let slots = args.slots.0.map_or_else(|| "what its configuration says".to_owned(), |slots| slots.to_string());
    let text = format!("{}: slots set to {slots}", submission.subject);
    present(args.output.form(), &Outcome { node: args.node, record, text })
}

pub async fn label(cluster: &Cluster, args: Label) -> Result<()> {
    let mut changes = BTreeMap::new();
    for LabelChange { key, value } in args.changes {
        if changes.insert(key.clone(), value).is_some() {
            return Err(Error::invalid(format!("label {key:?} is given twice")));
        }
    }
    let command = NodeCommand::Label { changes: changes.clone() };
    let digest = command.digest();
    let submission = Submission::new(cluster, &args.node, &command, args.write);
    let patch = |_: &Node| -> Result<Value> {
        let request = json!({ "requestId": submission.id, "digest": digest });
        Ok(json!({ "metadata": { "labels": changes }, "spec": { "labelRequest": request } }))
    };
    let Recorded { record, .. } = submission.run(patch).await?;
    let text = format!("{} labelled", submission.subject);
    present(args.output.form(), &Outcome { node: args.node, record, text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_a_number_or_the_default() {
        assert_eq!("0".parse(), Ok(SlotCount(Some(0))));
        assert_eq!("default".parse(), Ok(SlotCount(None)));
        for bad in ["", "-1", "100001", "x"] {
            assert!(bad.parse::<SlotCount>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_label_is_set_or_removed() {
        let change = |key: &str, value: Option<&str>| LabelChange { key: key.into(), value: value.map(Into::into) };
        assert_eq!("zone=a".parse(), Ok(change("zone", Some("a"))));
        assert_eq!("zone=".parse(), Ok(change("zone", Some(""))));
        assert_eq!("zone-".parse(), Ok(change("zone", None)));
        assert_eq!("a-b=c-".parse(), Ok(change("a-b", Some("c-"))));
        for bad in ["", "zone", "=a", "-"] {
            assert!(bad.parse::<LabelChange>().is_err(), "{bad}");
        }
    }
}
