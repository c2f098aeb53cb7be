//! What a node proves to have, against a control plane that was put back to an older state: the Instances that run
//! there, and what the holder records in its pools say. Read once, checked where it enters.

use std::collections::{BTreeMap, BTreeSet};

use kibo_crds::{
    Bytes, Epoch, Incarnation, InstanceId, MilliCpu, NodeId, ObjectUid, PoolId, SequenceNumber,
    node::{Holder, HolderEnd, PreviousHolder},
};
use kibo_protocol::v1;

use crate::right::Right;

/// An inventory that makes no sense, with the part that does not.
#[derive(Debug, thiserror::Error)]
#[error("{field} {value:?}: {problem}")]
pub struct InvalidEvidence {
    field: &'static str,
    value: String,
    problem: String,
}

/// Who took an object last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastTaker {
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub epoch: Epoch,
    /// Absent: it was taken for a move.
    pub instance: Option<InstanceId>,
    /// Its use was not ended, and nobody declared it dead: it may write.
    pub holds: bool,
}

/// The records of one object in a pool of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectEvidence {
    pub pool: PoolId,
    pub highest: Epoch,
    pub last: Option<LastTaker>,
    /// Absent: no image.
    pub size: Option<Bytes>,
}

/// An Instance that runs, or is being started or stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceEvidence {
    pub instance: InstanceId,
    pub workspace_uid: String,
    /// Namespace and name, for people.
    pub workspace: String,
    pub workspace_name: String,
    pub cpu: MilliCpu,
    /// Guest memory and the VMM's own.
    pub memory: Bytes,
    pub state: v1::InstanceState,
    pub available: bool,
    pub acked: SequenceNumber,
    /// By which grant it uses its layer.
    pub layer_epoch: Epoch,
    /// Uids of its Volumes, with the epochs of their grants.
    pub volumes: BTreeMap<String, Epoch>,
}

/// Everything that one node proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evidence {
    pub node: NodeId,
    /// The life that the node leads from now on.
    pub incarnation: Incarnation,
    /// By the Workspace's uid: the one Instance with the newest grant of its layer.
    pub running: BTreeMap<String, InstanceEvidence>,
    /// Instances that have ended, with events that come yet.
    pub ended: BTreeSet<InstanceId>,
    /// By uid.
    pub objects: BTreeMap<String, ObjectEvidence>,
}

fn parse<T>(field: &'static str, value: &str) -> Result<T, InvalidEvidence>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    value.parse().map_err(|error: T::Err| InvalidEvidence {
        field,
        value: value.to_owned(),
        problem: error.to_string(),
    })
}

impl Evidence {
    pub fn read(node: &NodeId, incarnation: Incarnation, inventory: &v1::Inventory) -> Result<Self, InvalidEvidence> {
        let mut running: BTreeMap<String, InstanceEvidence> = BTreeMap::new();
        let mut ended = BTreeSet::new();
        for instance in &inventory.instances {
            let evidence = instance_of(instance)?;
            if instance.state() == v1::InstanceState::Ended {
                ended.insert(evidence.instance);
                continue;
            }
            let newer =
                running.get(&evidence.workspace_uid).is_none_or(|known| known.layer_epoch < evidence.layer_epoch);
            if newer {
                running.insert(evidence.workspace_uid.clone(), evidence);
            }
        }
        let mut objects = BTreeMap::new();
        for object in &inventory.objects {
            let uid: ObjectUid = parse("object", &object.uid)?;
            let new = object_of(object)?;
            let known = objects.remove(uid.as_str());
            let kept = known.map_or(new.clone(), |known| the_object(known, new));
            objects.insert(uid.to_string(), kept);
        }
        Ok(Self { node: node.clone(), incarnation, running, ended, objects })
    }

    /// The Instance that uses the Workspace's layer by right: its record is the newest that is not closed, or it is
    /// just about to take it by a grant that is newer than everything known.
    pub fn rightful(
        &self,
        workspace_uid: &str,
        stored: Option<Epoch>,
        stored_for: Option<InstanceId>,
    ) -> Option<&InstanceEvidence> {
        let instance = self.running.get(workspace_uid)?;
        let epoch = instance.layer_epoch;
        self.uses(workspace_uid, instance, epoch, stored, stored_for).then_some(instance)
    }

    /// Whether an Instance of this node uses an object by right, with the grant of `epoch`.
    pub fn uses(
        &self,
        uid: &str,
        instance: &InstanceEvidence,
        epoch: Epoch,
        stored: Option<Epoch>,
        stored_for: Option<InstanceId>,
    ) -> bool {
        let records = self.objects.get(uid);
        let last = records.and_then(|records| records.last.as_ref());
        let holds =
            last.is_some_and(|last| last.holds && last.node == self.node && last.instance == Some(instance.instance));
        let is_new_on_disk = records.is_none_or(|records| epoch > records.highest);
        let is_newest = Some(epoch) > stored || (Some(epoch) == stored && stored_for == Some(instance.instance));
        holds || (instance.state == v1::InstanceState::Starting && is_new_on_disk && is_newest)
    }

    /// Who may use an object from now on. The records in the pool are the truth about who may write; the epoch never
    /// falls below any of them; where they say nothing against it, the stored word stands.
    pub fn right(&self, uid: &str, stored: &Right, taking: Option<Epoch>, others_reach_it: bool) -> Right {
        let records = self.objects.get(uid);
        let highest = records.map(|records| records.highest).max(taking).max(stored.epoch);
        let last = records.and_then(|records| records.last.as_ref());
        let own = |epoch| Holder { node: self.node.clone(), incarnation: self.incarnation, epoch, idle: false };
        let mut right = Right { epoch: highest, ..stored.clone() };
        if let Some(epoch) = taking {
            right.holder = Some(own(epoch));
            return right;
        }
        match last {
            Some(last) if last.holds => {
                let holder =
                    Holder { node: last.node.clone(), incarnation: last.incarnation, epoch: last.epoch, idle: false };
                if stored.holder.as_ref() != Some(&holder) {
                    right.holder = Some(holder);
                }
            }
            Some(last) => {
                let is_settled = |holder: &Holder| holder.node == self.node || holder.epoch <= last.epoch;
                let is_idle = |holder: &Holder| holder.idle && holder.node == last.node && holder.epoch == last.epoch;
                if stored.holder.as_ref().is_none_or(|holder| is_settled(holder) && !is_idle(holder)) {
                    let idle = !others_reach_it && last.node == self.node && last.instance.is_some();
                    right.previous = Some(ended(last));
                    right.holder =
                        idle.then(|| Holder { idle: true, incarnation: last.incarnation, ..own(last.epoch) });
                }
            }
            // Never taken here: a grant for this node came to nothing.
            None if stored.holder.as_ref().is_some_and(|holder| holder.node == self.node) => right.holder = None,
            None => {}
        }
        right
    }
}

/// Of two copies of an object the one that is it: a move marks that by its release, and everything later happens there.
fn the_object(one: ObjectEvidence, other: ObjectEvidence) -> ObjectEvidence {
    let rank =
        |copy: &ObjectEvidence| (copy.highest, copy.last.as_ref().is_some_and(|last| !last.holds), copy.size.is_some());
    if rank(&other) > rank(&one) { other } else { one }
}

impl ObjectEvidence {
    /// Whether it is in this pool now, whatever a store says that knows nothing after `stored`.
    pub fn has_moved_here(&self, stored: Option<Epoch>) -> bool {
        let is_copy = self.last.as_ref().is_some_and(|last| last.holds && last.instance.is_none());
        self.size.is_some() && Some(self.highest) > stored && !is_copy
    }
}

fn ended(last: &LastTaker) -> PreviousHolder {
    PreviousHolder {
        node: last.node.clone(),
        incarnation: last.incarnation,
        epoch: last.epoch,
        ended: HolderEnd::Released,
    }
}

fn instance_of(instance: &v1::InventoryInstance) -> Result<InstanceEvidence, InvalidEvidence> {
    let launch = instance.launch.clone().unwrap_or_default();
    let workspace = launch.workspace.unwrap_or_default();
    let uid: ObjectUid = parse("workspace", &workspace.uid)?;
    let epoch_of = |object: &v1::Object| Epoch(object.grant.as_ref().map(|grant| grant.epoch).unwrap_or_default());
    let volumes = launch.volumes.iter().filter_map(|volume| volume.object.as_ref());
    Ok(InstanceEvidence {
        instance: parse("instance", &launch.instance_id)?,
        workspace_uid: uid.to_string(),
        workspace: format!("{}/{}", workspace.namespace, workspace.name),
        workspace_name: workspace.name,
        cpu: MilliCpu(launch.cpu_milli),
        memory: Bytes(launch.allocated_memory_bytes),
        state: instance.state(),
        available: instance.available,
        acked: SequenceNumber(instance.acked_seq),
        layer_epoch: launch.layer.as_ref().map(epoch_of).unwrap_or_default(),
        volumes: volumes.map(|object| (object.uid.clone(), epoch_of(object))).collect(),
    })
}

fn object_of(object: &v1::InventoryObject) -> Result<ObjectEvidence, InvalidEvidence> {
    let last = object.last.as_ref().map(|last| {
        let instance = (!last.instance_id.is_empty()).then(|| parse("instance", &last.instance_id)).transpose()?;
        Ok(LastTaker {
            node: parse("node", &last.node_id)?,
            incarnation: Incarnation(last.incarnation),
            epoch: Epoch(last.epoch),
            instance,
            holds: object.held,
        })
    });
    Ok(ObjectEvidence {
        pool: parse("pool", &object.pool)?,
        highest: Epoch(object.highest_epoch),
        last: last.transpose()?,
        size: object.size_bytes.map(Bytes),
    })
}
