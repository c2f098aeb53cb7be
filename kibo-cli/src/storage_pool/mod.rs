//! `kibo storage-pool`: the places where the disks of Workspaces are.

mod change;
mod commanded;
mod objects;
mod view;

use clap::Subcommand;
use kibo_crds::StoragePool;
use kube::api::ListParams;

use self::{
    change::{DeclareLost, SetCapacity, declare_lost, set_capacity},
    objects::{Objects, objects},
    view::{Many, One},
};
use crate::{
    client::{Cluster, Paging, remark_next_page},
    errors::{On as _, Result, Subject},
    output::{OutputArgs, present, remark},
};

#[derive(Subcommand, Debug)]
pub enum Command {
    /// List storage pools
    #[command(alias = "ls")]
    List {
        #[command(flatten)]
        paging: Paging,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show one storage pool
    Get {
        #[arg(value_name = "POOL")]
        name: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List the disks in a storage pool, and what is there that belongs to nobody
    Objects(Objects),
    /// Move a Volume or a writable layer that nothing uses to another pool
    Move(crate::moving::Move),
    /// Set how much may be allocated in a storage pool
    SetCapacity(SetCapacity),
    /// Give up everything in a storage pool whose data is gone, for ever
    DeclareLost(DeclareLost),
}

pub async fn run(cluster: &Cluster, command: Command) -> Result<()> {
    match command {
        Command::List { paging, output } => {
            let api = cluster.cluster_wide::<StoragePool>();
            let listed = paging.list(&api, ListParams::default(), &subject("")).await?;
            if listed.items.is_empty() {
                remark("no storage pools; they appear when a node that declares one has its first session");
            }
            let many = Many { listed, now: Cluster::now() };
            present(output.form(), &many)?;
            remark_next_page(&many.listed);
            Ok(())
        }
        Command::Get { name, output } => {
            let pool = cluster.cluster_wide::<StoragePool>().get(&name).await.on(&subject(&name))?;
            let now = Cluster::now();
            let events = cluster.events(&pool, now).await;
            present(output.form(), &One { pool, events, now })
        }
        Command::Objects(args) => objects(cluster, args).await,
        Command::Move(args) => crate::moving::run(cluster, args).await,
        Command::SetCapacity(args) => set_capacity(cluster, args).await,
        Command::DeclareLost(args) => declare_lost(cluster, args).await,
    }
}

fn subject(name: &str) -> Subject {
    Subject::cluster("StoragePool", name)
}
