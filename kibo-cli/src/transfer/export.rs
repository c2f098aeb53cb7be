//! From a Workspace to an archive.

use bytes::{Bytes, BytesMut};
use clap::Args;
use kibo_archive::Prefix;

use super::{
    StoreArgs,
    location::{Location, Sink},
};
use crate::{
    client::Cluster,
    errors::{Error, Kind, Result, Subject},
    output::print,
    workspace::{
        stream::{
            channels::{self, FromServer, Receiver},
            cp::{Interrupt, Progress},
        },
        target,
    },
};

#[derive(Args, Debug)]
#[command(after_help = "\
The archive has the writable layer, the Volume that is bound, and the Workspace's description. Meanwhile the Workspace \
cannot be started. Credentials for s3:// come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, \
AWS_SESSION_TOKEN, AWS_REGION).

  kibo transfer export dev --to dev.kibo
  kibo transfer export dev --to s3://backups/dev.kibo --s3-endpoint https://store.example")]
pub struct Export {
    /// Name, or id (ws-…) in any namespace; it must be stopped
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// A new file, file:///PATH, or s3://BUCKET/KEY
    #[arg(long, value_name = "PLACE")]
    to: Location,
    #[command(flatten)]
    store: StoreArgs,
    /// Show no progress
    #[arg(short, long)]
    quiet: bool,
}

pub async fn run(cluster: &Cluster, args: Export) -> Result<()> {
    let mut interrupt = Interrupt::listen()?;
    let (_, subject) = interrupt.or(target::fetch(cluster, &args.workspace)).await?;
    let mut sink = super::make(&mut interrupt, args.to.create(&args.store), Sink::abort).await?;
    let progress = Progress::begin(&args.to.to_string(), args.quiet);
    let done = interrupt.or(async {
        receive(cluster, &subject, &mut sink, &progress).await?;
        sink.complete().await
    });
    if let Err(error) = done.await {
        progress.clear();
        sink.abort().await;
        return Err(error);
    }
    progress.end(&args.to.to_string());
    print(&format!("{subject} exported to {}\n", args.to))
}

/// Everything up to the word that the archive is complete.
async fn receive(cluster: &Cluster, subject: &Subject, sink: &mut Sink, progress: &Progress) -> Result<()> {
    // The way to the node stays open: its end would be ours.
    let (_sender, mut receiver) = channels::open(cluster, subject, "export", &[]).await?;
    let mut beginning = Some(BytesMut::new());
    while let Some(piece) = next(&mut receiver, subject).await? {
        progress.add(piece.len());
        let piece = match beginning.take() {
            None => piece,
            Some(mut read) => {
                read.extend_from_slice(&piece);
                match Prefix::read(&read).map_err(|error| Error::new(Kind::Other, format!("{subject}: {error}")))? {
                    None => {
                        beginning = Some(read);
                        continue;
                    }
                    Some(prefix) => {
                        sink.expect(prefix.description.data.0);
                        read.freeze()
                    }
                }
            }
        };
        sink.write(piece).await?;
    }
    match beginning {
        None => Ok(()),
        Some(_) => Err(Error::new(Kind::Unavailable, format!("{subject}: the archive ended before it began"))),
    }
}

/// The next piece of the archive; none: it is complete.
async fn next(receiver: &mut Receiver, subject: &Subject) -> Result<Option<Bytes>> {
    loop {
        match receiver.next().await {
            Ok(FromServer::Stdout(data)) => return Ok(Some(data)),
            Ok(FromServer::Ended(status)) if status.status.as_deref() == Some("Success") => return Ok(None),
            Ok(FromServer::Ended(status)) => return Err(channels::failure(&status, subject)),
            Ok(FromServer::Stderr(_) | FromServer::StdoutClosed) => {}
            Err(broken) => {
                let message = format!("{subject}: {broken}, before the archive was complete");
                return Err(Error::new(Kind::Unavailable, message).next("export again"));
            }
        }
    }
}
