//! `kibo enrollment revoke`.

use clap::Args;
use kibo_crds::{Node, node::NodeCommand};
use serde_json::{Value, json};

use crate::{
    client::Cluster,
    errors::Result,
    node::{Outcome, Recorded, Submission, WriteArgs},
    output::{OutputArgs, present},
};

#[derive(Args, Debug)]
pub struct Revoke {
    #[arg(value_name = "NODE")]
    node: String,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn revoke(cluster: &Cluster, args: Revoke) -> Result<()> {
    let submission = Submission::new(cluster, &args.node, &NodeCommand::Revoke, args.write);
    let patch = |_: &Node| -> Result<Value> {
        Ok(json!({ "spec": { "enrollment": null, "revocation": { "requestId": submission.id } } }))
    };
    let Recorded { object: node, record } = submission.run(patch).await?;
    let lived = node.status.as_ref().is_some_and(|status| status.key_hash.is_some());
    let text = if lived {
        format!("{} is REVOKED: a host becomes it again only with a new token", submission.subject)
    } else {
        format!("{}: no token works any more", submission.subject)
    };
    present(args.output.form(), &Outcome { node: args.node, record, text })
}
