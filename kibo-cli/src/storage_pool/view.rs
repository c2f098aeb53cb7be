//! A storage pool as a page, as a row and in JSON.

use jiff::Timestamp;
use kibo_crds::{
    Bytes, ConditionType, StoragePool,
    storage_pool::{PoolMember, StoragePoolStatus},
};
use kube::ResourceExt;
use serde::Serialize;

use crate::{
    client::Listed,
    output::{
        ConditionView, Page, Present, Table, conditions, is_telling,
        words::{ABSENT, age, binary, instant, or_absent, when},
    },
};

/// A storage pool in JSON.
#[derive(Serialize)]
struct View {
    pool_id: String,
    status: &'static str,
    uid: Option<String>,
    members: Vec<MemberView>,
    capacity_bytes: Option<u64>,
    used_bytes: Option<u64>,
    free_bytes: Option<u64>,
    allocated_bytes: Option<u64>,
    objects: Option<u32>,
    unowned_count: u32,
    unowned_bytes: u64,
    /// What `--expected-version` takes.
    version: Option<String>,
    created_at: Option<String>,
    conditions: Vec<ConditionView>,
}

#[derive(Serialize)]
struct MemberView {
    node_id: String,
    available: bool,
}

/// Where a pool stands, in one word.
fn word(status: &StoragePoolStatus) -> &'static str {
    let is = |kind: ConditionType| {
        let found = status.conditions.iter().find(|condition| condition.type_ == kind.to_string());
        found.map(|condition| condition.status == "True")
    };
    match (is(ConditionType::Lost), is(ConditionType::Ready), is(ConditionType::DiskFull)) {
        (Some(true), ..) => "LOST",
        (_, Some(true), Some(true)) => "FULL",
        (_, Some(true), _) => "READY",
        (_, Some(false), _) => "NOT_READY",
        (_, None, _) => ABSENT,
    }
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
            status: word(&status),
            members: status.members.iter().map(member).collect(),
            capacity_bytes: bytes(status.capacity.as_ref()).map(|bytes| bytes.0),
            used_bytes: bytes(status.used.as_ref()).map(|bytes| bytes.0),
            free_bytes: bytes(status.free.as_ref()).map(|bytes| bytes.0),
            allocated_bytes: status.allocated.map(|bytes| bytes.0),
            objects: status.objects,
            unowned_count: status.unowned.as_ref().map_or(0, |unowned| unowned.count),
            unowned_bytes: status.unowned.as_ref().map_or(0, |unowned| unowned.bytes.0),
            version: pool.resource_version(),
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

pub struct One {
    pub pool: StoragePool,
    pub events: Table,
    pub now: Timestamp,
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
        page.state("Status", word(&status).to_owned());
        page.fact("Capacity", or_absent(bytes(status.capacity.as_ref()).map(binary)));
        page.fact("Used", or_absent(bytes(status.used.as_ref()).map(binary)));
        page.fact("Free", or_absent(bytes(status.free.as_ref()).map(binary)));
        page.fact("Allocated", or_absent(status.allocated.map(binary)));
        page.fact("Objects", or_absent(status.objects));
        if let Some(unowned) = &status.unowned {
            let see = format!("{} storage-pool objects {}", crate::errors::program(), self.pool.name_any());
            page.fact("Unowned", format!("{} with {}: {see}", unowned.count, binary(unowned.bytes)));
        }
        if wide {
            page.fact("Version", self.pool.resource_version().unwrap_or_default());
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

pub struct Many {
    pub listed: Listed<StoragePool>,
    pub now: Timestamp,
}

impl Present for Many {
    fn view(&self) -> impl Serialize {
        self.listed.view("storage_pools", View::from)
    }

    fn names(&self) -> Vec<String> {
        self.listed.items.iter().map(ResourceExt::name_any).collect()
    }

    fn text(&self, wide: bool) -> String {
        let mut table =
            Table::new(["POOL", "STATUS", "NODES", "CAPACITY", "USED", "FREE", "ALLOCATED", "OBJECTS", "AGE"]);
        if wide {
            table = table.columns(["UID", "VERSION"]);
        }
        for pool in &self.listed.items {
            let status = pool.status.clone().unwrap_or_default();
            let mut row = vec![
                pool.name_any(),
                word(&status).to_owned(),
                members(&status.members, if wide { usize::MAX } else { 3 }),
                or_absent(bytes(status.capacity.as_ref()).map(binary)),
                or_absent(bytes(status.used.as_ref()).map(binary)),
                or_absent(bytes(status.free.as_ref()).map(binary)),
                or_absent(status.allocated.map(binary)),
                or_absent(status.objects),
                age(pool.creation_timestamp().as_ref(), self.now),
            ];
            if wide {
                row.push(status.uid.unwrap_or_default());
                row.push(pool.resource_version().unwrap_or_default());
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
                "capacity": "107374182400", "free": "50Gi", "used": "50Gi", "allocated": 1_610_612_736, "objects": 2,
                "conditions": [{ "type": "Ready", "status": "True", "reason": "Available", "message": "",
                                 "lastTransitionTime": "1970-01-01T00:00:00Z" }],
            },
        }))
        .unwrap();
        let many = Many { listed: Listed { items: vec![pool], next_page_token: None }, now: Timestamp::UNIX_EPOCH };
        let expected = "\
POOL     STATUS   NODES            CAPACITY   USED     FREE     ALLOCATED   OBJECTS   AGE
shared   READY    n1,n2(!),n3,+1   100.0Gi    50.0Gi   50.0Gi   1.5Gi       2         -
";
        assert_eq!(many.text(false), expected);
    }
}
