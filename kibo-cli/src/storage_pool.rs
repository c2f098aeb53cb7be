//! `kibo storage-pool`: the places where the disks of Workspaces are.

use clap::Subcommand;
use jiff::Timestamp;
use kibo_crds::{Bytes, StoragePool, storage_pool::PoolMember};
use kube::{ResourceExt, api::ListParams};
use serde::Serialize;

use crate::{
    client::{Cluster, Listed, Paging, remark_next_page},
    errors::{On as _, Result, Subject},
    output::{
        ConditionView, OutputArgs, Page, Present, Table, conditions, is_telling, present, remark,
        words::{age, binary, instant, or_absent, when},
    },
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
    }
}

fn subject(name: &str) -> Subject {
    Subject::cluster("StoragePool", name)
}

/// A storage pool in JSON.
#[derive(Serialize)]
struct View {
    pool_id: String,
    uid: Option<String>,
    members: Vec<MemberView>,
    capacity_bytes: Option<u64>,
    free_bytes: Option<u64>,
    allocated_bytes: Option<u64>,
    objects: Option<u32>,
    created_at: Option<String>,
    conditions: Vec<ConditionView>,
}

#[derive(Serialize)]
struct MemberView {
    node_id: String,
    available: bool,
}

fn bytes(text: Option<&String>) -> Option<Bytes> {
    text.and_then(|text| text.parse().ok())
}

impl From<&StoragePool> for View {
    fn from(pool: &StoragePool) -> Self {
        let status = pool.status.clone().unwrap_or_default();
        let member = |member: &PoolMember| MemberView { node_id: member.node.to_string(), available: member.available };
        Self {
            pool_id: pool.name_any(),
            members: status.members.iter().map(member).collect(),
            capacity_bytes: bytes(status.capacity.as_ref()).map(|bytes| bytes.0),
            free_bytes: bytes(status.free.as_ref()).map(|bytes| bytes.0),
            allocated_bytes: status.allocated.map(|bytes| bytes.0),
            objects: status.objects,
            uid: status.uid,
            created_at: pool.creation_timestamp().as_ref().map(instant),
            conditions: status.conditions.iter().map(Into::into).collect(),
        }
    }
}

/// The members by name, those out of reach marked; of many only the first ones.
fn members(members: &[PoolMember], shown: usize) -> String {
    let name = |member: &PoolMember| format!("{}{}", member.node, if member.available { "" } else { "(!)" });
    let mut names: Vec<_> = members.iter().take(shown).map(name).collect();
    if members.len() > shown {
        names.push(format!("+{}", members.len() - shown));
    }
    names.join(",")
}

struct One {
    pool: StoragePool,
    events: Table,
    now: Timestamp,
}

impl Present for One {
    fn view(&self) -> impl Serialize {
        View::from(&self.pool)
    }

    fn names(&self) -> Vec<String> {
        vec![self.pool.name_any()]
    }

    fn text(&self, wide: bool) -> String {
        let status = self.pool.status.clone().unwrap_or_default();
        let mut page = Page::default();
        page.fact("Pool", self.pool.name_any());
        page.fact("Capacity", or_absent(bytes(status.capacity.as_ref()).map(binary)));
        page.fact("Free", or_absent(bytes(status.free.as_ref()).map(binary)));
        page.fact("Allocated", or_absent(status.allocated.map(binary)));
        page.fact("Objects", or_absent(status.objects));
        if wide {
            page.fact("UID", status.uid.clone().unwrap_or_default());
        }
        page.fact("Created", when(self.pool.creation_timestamp().as_ref(), self.now, wide));
        let mut table = Table::new(["NODE", "AVAILABLE"]);
        for member in &status.members {
            table.row(vec![member.node.to_string(), if member.available { "yes" } else { "no" }.to_owned()]);
        }
        page.section("Members", table);
        let shown = status.conditions.iter().filter(|condition| wide || is_telling(condition));
        page.section("Conditions", conditions(shown, self.now));
        page.section("Events", self.events.clone());
        page.render()
    }
}

struct Many {
    listed: Listed<StoragePool>,
    now: Timestamp,
}

#[derive(Serialize)]
struct ManyView {
    storage_pools: Vec<View>,
    next_page_token: Option<String>,
}

impl Present for Many {
    fn view(&self) -> impl Serialize {
        ManyView {
            storage_pools: self.listed.items.iter().map(View::from).collect(),
            next_page_token: self.listed.next_page_token.clone(),
        }
    }

    fn names(&self) -> Vec<String> {
        self.listed.items.iter().map(ResourceExt::name_any).collect()
    }

    fn text(&self, wide: bool) -> String {
        let mut table = Table::new(["POOL", "NODES", "CAPACITY", "FREE", "ALLOCATED", "OBJECTS", "AGE"]);
        if wide {
            table = table.columns(["UID"]);
        }
        for pool in &self.listed.items {
            let status = pool.status.clone().unwrap_or_default();
            let mut row = vec![
                pool.name_any(),
                members(&status.members, if wide { usize::MAX } else { 3 }),
                or_absent(bytes(status.capacity.as_ref()).map(binary)),
                or_absent(bytes(status.free.as_ref()).map(binary)),
                or_absent(status.allocated.map(binary)),
                or_absent(status.objects),
                age(pool.creation_timestamp().as_ref(), self.now),
            ];
            if wide {
                row.push(status.uid.unwrap_or_default());
            }
            table.row(row);
        }
        table.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_pools() {
        let member = |node: &str, available| serde_json::json!({ "node": node, "available": available });
        let pool: StoragePool = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "shared" }, "spec": {},
            "status": {
                "members": [member("n1", true), member("n2", false), member("n3", true), member("n4", true)],
                "capacity": "107374182400", "free": "50Gi", "allocated": 1_610_612_736, "objects": 2,
            },
        }))
        .unwrap();
        let many = Many { listed: Listed { items: vec![pool], next_page_token: None }, now: Timestamp::UNIX_EPOCH };
        let expected = "\
POOL     NODES            CAPACITY   FREE     ALLOCATED   OBJECTS   AGE
shared   n1,n2(!),n3,+1   100.0Gi    50.0Gi   1.5Gi       2         -
";
        assert_eq!(many.text(false), expected);
    }
}
