//! `kibo storage-pool objects`: whose disks are in a pool.

use clap::Args;
use kibo_crds::{
    Bytes, PoolId, StoragePool, Volume, Workspace,
    storage_pool::{UnownedObject, UnownedObjects},
};
use kube::{Api, ResourceExt as _, api::ListParams};
use serde::Serialize;

use super::subject;
use crate::{
    client::{Cluster, Paging},
    errors::{On as _, Result, Subject},
    output::{
        OutputArgs, Present, Table, present, remark,
        words::{ABSENT, binary, enum_word, or_absent},
    },
};

#[derive(Args, Debug)]
pub struct Objects {
    #[arg(value_name = "POOL")]
    name: PoolId,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn objects(cluster: &Cluster, args: Objects) -> Result<()> {
    let pool = cluster.cluster_wide::<StoragePool>().get(args.name.as_str()).await.on(&subject(args.name.as_str()))?;
    let all = Paging::default();
    let workspaces = Api::<Workspace>::all(cluster.client.clone());
    let workspaces = all.list(&workspaces, ListParams::default(), &Subject::cluster("Workspace", "")).await?.items;
    let volumes = Api::<Volume>::all(cluster.client.clone());
    let volumes = all.list(&volumes, ListParams::default(), &Subject::cluster("Volume", "")).await?.items;
    let mut owned: Vec<_> = workspaces
        .iter()
        .filter_map(|workspace| Owned::layer(workspace, &args.name))
        .chain(volumes.iter().filter_map(|volume| Owned::volume(volume, &args.name)))
        .collect();
    owned.sort_by(|a, b| (&a.namespace, a.kind, &a.name).cmp(&(&b.namespace, b.kind, &b.name)));
    let unowned = pool.status.and_then(|status| status.unowned);
    if owned.is_empty() && unowned.is_none() {
        remark(&format!("no objects in storage pool {}", args.name));
    }
    present(args.output.form(), &Everything { pool: args.name.to_string(), owned, unowned })
}

/// A disk with the Workspace or Volume that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Owned {
    /// `workspace`: its writable layer; or `volume`.
    kind: &'static str,
    namespace: String,
    name: String,
    uid: String,
    state: Option<String>,
    size_bytes: Option<u64>,
    holder_node_id: Option<String>,
    epoch: Option<u64>,
}

impl Owned {
    fn layer(workspace: &Workspace, pool: &PoolId) -> Option<Self> {
        let status = workspace.status.as_ref()?;
        let layer = status.writable_layer.as_ref().filter(|layer| layer.pool == *pool)?;
        Some(Self {
            kind: "workspace",
            namespace: workspace.namespace().unwrap_or_default(),
            name: workspace.name_any(),
            uid: workspace.uid().unwrap_or_default(),
            state: status.phase.as_ref().map(enum_word),
            size_bytes: Some(layer.size.0),
            holder_node_id: status.holder.as_ref().map(|holder| holder.node.to_string()),
            epoch: status.epoch.map(|epoch| epoch.0),
        })
    }

    fn volume(volume: &Volume, pool: &PoolId) -> Option<Self> {
        let status = volume.status.as_ref().filter(|status| status.pool.as_ref() == Some(pool))?;
        Some(Self {
            kind: "volume",
            namespace: volume.namespace().unwrap_or_default(),
            name: volume.name_any(),
            uid: volume.uid().unwrap_or_default(),
            state: status.phase.as_ref().map(enum_word),
            size_bytes: status.size.or_else(|| volume.spec.size.amount().ok()).map(|size| size.0),
            holder_node_id: status.holder.as_ref().map(|holder| holder.node.to_string()),
            epoch: status.epoch.map(|epoch| epoch.0),
        })
    }
}

struct Everything {
    pool: String,
    owned: Vec<Owned>,
    unowned: Option<UnownedObjects>,
}

#[derive(Serialize)]
struct View<'a> {
    pool_id: &'a str,
    objects: &'a [Owned],
    /// How many entries of the pool belong to nobody; `unowned` has the first of them.
    unowned_count: u32,
    unowned_bytes: u64,
    unowned: Vec<UnownedView<'a>>,
}

#[derive(Serialize)]
struct UnownedView<'a> {
    name: &'a str,
    bytes: u64,
    owner: String,
}

impl<'a> From<&'a UnownedObject> for UnownedView<'a> {
    fn from(object: &'a UnownedObject) -> Self {
        Self { name: &object.name, bytes: object.bytes.0, owner: enum_word(&object.owner) }
    }
}

impl Present for Everything {
    fn view(&self) -> impl Serialize {
        let unowned = self.unowned.as_ref();
        View {
            pool_id: &self.pool,
            objects: &self.owned,
            unowned_count: unowned.map_or(0, |unowned| unowned.count),
            unowned_bytes: unowned.map_or(0, |unowned| unowned.bytes.0),
            unowned: unowned.into_iter().flat_map(|unowned| &unowned.entries).map(Into::into).collect(),
        }
    }

    fn names(&self) -> Vec<String> {
        self.owned.iter().map(|object| format!("{}/{}/{}", object.kind, object.namespace, object.name)).collect()
    }

    fn text(&self, wide: bool) -> String {
        let mut table = Table::new(["OBJECT", "NAMESPACE", "STATE", "SIZE", "HELD_BY"]);
        if wide {
            table = table.columns(["EPOCH", "UID"]);
        }
        for object in &self.owned {
            let mut row = vec![
                format!("{}/{}", object.kind, object.name),
                object.namespace.clone(),
                or_absent(object.state.as_ref()),
                or_absent(object.size_bytes.map(|size| binary(Bytes(size)))),
                or_absent(object.holder_node_id.as_ref()),
            ];
            if wide {
                row.extend([or_absent(object.epoch), object.uid.clone()]);
            }
            table.row(row);
        }
        let unowned = self.unowned.as_ref();
        for entry in unowned.into_iter().flat_map(|unowned| &unowned.entries) {
            let state = format!("UNOWNED ({})", enum_word(&entry.owner));
            let nothing = || ABSENT.to_owned();
            let mut row = vec![entry.name.clone(), nothing(), state, binary(entry.bytes), nothing()];
            if wide {
                row.extend([nothing(), nothing()]);
            }
            table.row(row);
        }
        let more = unowned.map_or(0, |unowned| (unowned.count as usize).saturating_sub(unowned.entries.len()));
        let more = if more > 0 { format!("and {more} more that belong to nobody\n") } else { String::new() };
        table.render() + &more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_a_pool_is_listed_with_its_owner_and_without() {
        let workspace: Workspace = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "dev", "namespace": "team", "uid": "u1" }, "spec": { "template": "t" },
            "status": { "phase": "Stopped", "writableLayer": { "pool": "p", "size": 1 << 30, "created": true } },
        }))
        .unwrap();
        let volume: Volume = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "data", "namespace": "team", "uid": "u2" }, "spec": { "size": "64Mi" },
            "status": { "phase": "Bound", "pool": "p",
                        "holder": { "node": "n1", "incarnation": 1, "epoch": 3 }, "epoch": 3 },
        }))
        .unwrap();
        let pool = "p".parse().unwrap();
        let (other, everything) = ("q".parse().unwrap(), |entries: Vec<UnownedObject>| Everything {
            pool: "p".to_owned(),
            owned: vec![Owned::layer(&workspace, &pool).unwrap(), Owned::volume(&volume, &pool).unwrap()],
            unowned: Some(UnownedObjects {
                count: 2,
                bytes: Bytes(1 << 20),
                entries,
                seen_by: "n1".parse().unwrap(),
                seen_at: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH),
            }),
        });
        assert_eq!((Owned::layer(&workspace, &other), Owned::volume(&volume, &other)), (None, None));
        let owner = kibo_crds::storage_pool::UnownedReason::Unknown;
        let entry = UnownedObject { name: "u3".to_owned(), bytes: Bytes(1 << 20), owner };
        let expected = "\
OBJECT          NAMESPACE   STATE               SIZE     HELD_BY
workspace/dev   team        STOPPED             1.0Gi    -
volume/data     team        BOUND               64.0Mi   n1
u3              -           UNOWNED (UNKNOWN)   1.0Mi    -
and 1 more that belong to nobody
";
        assert_eq!(everything(vec![entry]).text(false), expected);
    }
}
