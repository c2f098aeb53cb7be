//! `kibo transfer`: a stopped Workspace with its disks into an archive, and a Workspace out of one.
//!
//! The archive is made and read by a node; here it only passes through, in pieces, between the aggregated API and a file
//! or an object store. It gets its name when it is complete, and an import that is given up takes its Workspace with it.

mod cancel;
mod export;
mod file;
mod import;
mod location;
mod made;
mod s3;
mod upload;

use std::{pin::pin, time::Duration};

use clap::{Args, Subcommand};
use kibo_crds::{TransferState, TransferStatus};

use crate::{client::Cluster, errors::Result, output::words::enum_word, workspace::stream::cp::Interrupt};

/// How long what came to nothing is tried to be taken away, while its cluster or store does not answer.
const CLEAN_UP_FOR: Duration = Duration::from_secs(30);

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Write the disks of a stopped Workspace, and what it is, into an archive
    Export(export::Export),
    /// Make a stopped Workspace out of an archive
    Import(Box<import::Import>),
    /// End an export or an import of somebody who is not there to end it
    Cancel(cancel::Cancel),
}

/// How an object store is reached.
#[derive(Args, Clone, Debug, Default)]
pub struct StoreArgs {
    /// Where the object store of an s3:// place is; default: $AWS_ENDPOINT_URL_S3, then $AWS_ENDPOINT_URL, then Amazon's
    #[arg(long, value_name = "URL")]
    s3_endpoint: Option<String>,
}

pub async fn run(cluster: &Cluster, command: Command) -> Result<()> {
    match command {
        Command::Export(args) => export::run(cluster, args).await,
        Command::Import(args) => Box::pin(import::run(cluster, *args)).await,
        Command::Cancel(args) => cancel::run(cluster, args).await,
    }
}

/// Makes something unless a signal comes first. What is on its way then is waited for, and taken away again.
async fn make<T>(
    interrupt: &mut Interrupt,
    making: impl Future<Output = Result<T>>,
    take_away: impl AsyncFnOnce(T),
) -> Result<T> {
    let mut making = pin!(making);
    match interrupt.or(async { Ok(making.as_mut().await) }).await {
        Ok(made) => made,
        Err(interrupted) => {
            if let Ok(Ok(made)) = tokio::time::timeout(CLEAN_UP_FOR, making).await {
                take_away(made).await;
            }
            Err(interrupted)
        }
    }
}

/// A transfer that is not finished, on the page of its Workspace: which, whose, where, and why not.
pub fn fact(transfer: Option<&TransferStatus>) -> Option<String> {
    let transfer = transfer.filter(|transfer| transfer.state != TransferState::Finished)?;
    let TransferStatus { kind, user, node, state, message, .. } = transfer;
    let why = message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
    Some(format!("{} by {user} on {node}: {}{why}", enum_word(kind), enum_word(state)))
}
