//! What the operator asks for, checked once where it enters.

use kibo_crds::{Bytes, Epoch, Incarnation, InstanceId, MilliCpu, NodeId, ObjectUid, PoolId};
use kibo_protocol::v1;
use serde::{Deserialize, Serialize};

/// A message of the operator that makes no sense; the text names the field.
#[derive(Debug, thiserror::Error)]
#[error("invalid {field}: {problem}")]
pub struct InvalidMessage {
    pub field: &'static str,
    pub problem: String,
}

impl InvalidMessage {
    fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self { field, problem: problem.into() }
    }

    fn missing(field: &'static str) -> Self {
        Self::new(field, "it is missing")
    }
}

/// Whoever takes an object, in one life of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Taker {
    pub node: NodeId,
    pub incarnation: Incarnation,
    #[serde(flatten)]
    pub by: By,
}

/// What an object is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum By {
    /// It runs, and writes.
    Instance(InstanceId),
    /// The node itself does something with the files. A grant is for one operation, so its epoch says which one.
    Operation(Operation),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Operation {
    Deletion,
    /// Taken in both pools: where the object is, and where it is copied to.
    Move,
    /// Read into an archive, or made out of one.
    Transfer,
}

impl Taker {
    /// Only its Instance, if it is one.
    pub fn instance(&self) -> Option<InstanceId> {
        match self.by {
            By::Instance(instance) => Some(instance),
            By::Operation(_) => None,
        }
    }

    pub fn is_deletion(&self) -> bool {
        self.by == By::Operation(Operation::Deletion)
    }

    pub fn is_move(&self) -> bool {
        self.by == By::Operation(Operation::Move)
    }

    pub fn is_transfer(&self) -> bool {
        self.by == By::Operation(Operation::Transfer)
    }
}

impl std::fmt::Display for Taker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.by {
            By::Instance(instance) => write!(f, "{} as {instance}", self.node),
            By::Operation(Operation::Deletion) => write!(f, "{} for its deletion", self.node),
            By::Operation(Operation::Move) => write!(f, "{} for a move", self.node),
            By::Operation(Operation::Transfer) => write!(f, "{} for a transfer", self.node),
        }
    }
}

/// The bytes of a Volume or of a writable layer, without the right to use them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    pub uid: ObjectUid,
    pub pool: PoolId,
    pub size: Bytes,
    /// The image must be there; else it is made when it is missing.
    pub must_exist: bool,
    /// An image that is smaller grows to `size`, unless it is smaller than this; absent: it has that size or more.
    pub grows_from: Option<Bytes>,
}

/// An object with the right to use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantedObject {
    pub object: Object,
    pub grant: Grant,
}

/// The right to use one object in one epoch, and what became of the grant before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Grant {
    pub epoch: Epoch,
    /// 0 with the first grant.
    pub predecessor: Epoch,
    pub predecessor_end: PredecessorEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PredecessorEnd {
    /// There was none.
    None,
    Released,
    Refused,
    /// An operator asserted that the holder is dead.
    Isolated,
    /// The node came back and proved that nothing of that incarnation runs.
    IncarnationEnded,
}

impl PredecessorEnd {
    /// Whether the control plane vouches that earlier holders are gone though the pool has no
    /// release of theirs.
    pub fn voids_unreleased(self) -> bool {
        matches!(self, Self::Isolated | Self::IncarnationEnded)
    }
}

/// Everything that an Instance is made from, with the right to use its objects.
#[derive(Clone, Debug)]
pub struct Launch {
    pub instance: InstanceId,
    pub taker: Taker,
    pub workspace: v1::WorkspaceRef,
    pub cpu: MilliCpu,
    /// Guest memory, without the VMM's own.
    pub memory: Bytes,
    /// Guest memory and the VMM's own.
    pub allocated_memory: Bytes,
    pub root_image: RootImageName,
    pub layer: GrantedObject,
    pub volumes: Vec<GrantedVolume>,
    pub entrypoint: Option<v1::Entrypoint>,
    pub hostname: String,
    pub egress: Egress,
    /// The message that this was read from, to be stored as it came.
    pub message: v1::Launch,
}

#[derive(Clone, Debug)]
pub struct GrantedVolume {
    pub object: GrantedObject,
    /// Absolute path in the guest.
    pub mount_path: String,
}

impl Launch {
    pub fn instance(&self) -> InstanceId {
        self.instance
    }

    /// Layer first, then the Volumes.
    pub fn objects(&self) -> impl Iterator<Item = &GrantedObject> {
        std::iter::once(&self.layer).chain(self.volumes.iter().map(|volume| &volume.object))
    }

    /// Reads the Launch of a Go or of the desired set, where every object carries its grant.
    pub fn read(message: v1::Launch, node: NodeId, incarnation: Incarnation) -> Result<Self, InvalidMessage> {
        let request = LaunchRequest::read(&message)?;
        let layer = message.layer.as_ref().ok_or_else(|| InvalidMessage::missing("launch.layer"))?;
        let volumes = message
            .volumes
            .iter()
            .map(|volume| {
                let object = volume.object.as_ref().ok_or_else(|| InvalidMessage::missing("launch.volumes.object"))?;
                Ok(GrantedVolume { object: object.try_into()?, mount_path: volume.mount_path.clone() })
            })
            .collect::<Result<_, InvalidMessage>>()?;
        Ok(Self {
            instance: request.instance,
            taker: Taker { node, incarnation, by: By::Instance(request.instance) },
            workspace: request.workspace,
            cpu: request.cpu,
            memory: request.memory,
            allocated_memory: request.allocated_memory,
            root_image: request.root_image,
            layer: layer.try_into()?,
            volumes,
            entrypoint: message.entrypoint.clone(),
            hostname: message.hostname.clone(),
            egress: request.egress,
            message,
        })
    }
}

/// What an Offer asks for: the same without the right to use the objects.
#[derive(Clone, Debug)]
pub struct LaunchRequest {
    pub instance: InstanceId,
    pub workspace: v1::WorkspaceRef,
    pub cpu: MilliCpu,
    pub memory: Bytes,
    pub allocated_memory: Bytes,
    pub root_image: RootImageName,
    pub egress: Egress,
    pub objects: Vec<Object>,
}

impl LaunchRequest {
    pub fn read(message: &v1::Launch) -> Result<Self, InvalidMessage> {
        let layer = message.layer.as_ref().ok_or_else(|| InvalidMessage::missing("launch.layer"))?;
        let mut objects = vec![Object::try_from(layer)?];
        for volume in &message.volumes {
            let object = volume.object.as_ref().ok_or_else(|| InvalidMessage::missing("launch.volumes.object"))?;
            objects.push(object.try_into()?);
        }
        let memory = Bytes(message.memory_bytes);
        let allocated_memory = Bytes(message.allocated_memory_bytes);
        if message.cpu_milli == 0 {
            return Err(InvalidMessage::new("launch.cpu_milli", "it must be at least 1"));
        }
        if memory.as_mib().is_none_or(|mib| mib == 0) {
            return Err(InvalidMessage::new("launch.memory_bytes", format!("{memory} is not a whole number of MiB")));
        }
        if allocated_memory < memory {
            return Err(InvalidMessage::new("launch.allocated_memory_bytes", "it is less than the guest's memory"));
        }
        Ok(Self {
            instance: instance_id(&message.instance_id)?,
            workspace: message.workspace.clone().ok_or_else(|| InvalidMessage::missing("launch.workspace"))?,
            cpu: MilliCpu(message.cpu_milli),
            memory,
            allocated_memory,
            root_image: message.root_image.parse()?,
            egress: egress(message)?,
            objects,
        })
    }
}

/// What a guest may send to the outside of its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Egress {
    #[default]
    Allow,
    Deny,
}

/// A word that this daemon does not know must not be taken for leave.
fn egress(message: &v1::Launch) -> Result<Egress, InvalidMessage> {
    let field = "launch.network.egress";
    let number = message.network.as_ref().map_or(0, |network| network.egress);
    match v1::Egress::try_from(number) {
        Ok(v1::Egress::Unspecified | v1::Egress::Allow) => Ok(Egress::Allow),
        Ok(v1::Egress::Deny) => Ok(Egress::Deny),
        Err(_) => Err(InvalidMessage::new(field, format!("{number} is of a newer operator: update this daemon"))),
    }
}

/// Reads the id of an Instance.
pub fn instance_id(text: &str) -> Result<InstanceId, InvalidMessage> {
    text.parse().map_err(|error: kibo_crds::IdError| InvalidMessage::new("instance_id", error.to_string()))
}

/// Name of a root image: one file name without its suffix, so that it cannot leave the images' directory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RootImageName(String);

impl RootImageName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for RootImageName {
    type Err = InvalidMessage;

    fn from_str(text: &str) -> Result<Self, InvalidMessage> {
        let good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b);
        let ends_well = |b: &u8| b.is_ascii_alphanumeric();
        let bytes = text.as_bytes();
        let is_name = bytes.len() <= 63
            && bytes.iter().copied().all(good)
            && bytes.first().is_some_and(ends_well)
            && bytes.last().is_some_and(ends_well);
        if !is_name {
            return Err(InvalidMessage::new(
                "root_image",
                format!("{text:?} must be at most 63 characters of a-z, 0-9, '.', '_' and '-'"),
            ));
        }
        Ok(Self(text.to_owned()))
    }
}

impl std::fmt::Display for RootImageName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}

impl TryFrom<&v1::Object> for Object {
    type Error = InvalidMessage;

    fn try_from(message: &v1::Object) -> Result<Self, InvalidMessage> {
        let size = Bytes(message.size_bytes);
        if size.as_mib().is_none_or(|mib| mib == 0) {
            return Err(InvalidMessage::new("object.size_bytes", format!("{size} is not a whole number of MiB")));
        }
        Ok(Self {
            uid: message
                .uid
                .parse()
                .map_err(|error: kibo_crds::NameError| InvalidMessage::new("object.uid", error.to_string()))?,
            pool: message
                .pool
                .parse()
                .map_err(|error: kibo_crds::NameError| InvalidMessage::new("object.pool", error.to_string()))?,
            size,
            must_exist: message.must_exist,
            grows_from: (message.grows_from_bytes > 0).then_some(Bytes(message.grows_from_bytes)),
        })
    }
}

impl TryFrom<&v1::Object> for GrantedObject {
    type Error = InvalidMessage;

    fn try_from(message: &v1::Object) -> Result<Self, InvalidMessage> {
        let grant = message.grant.as_ref().ok_or_else(|| InvalidMessage::missing("object.grant"))?;
        Ok(Self { object: message.try_into()?, grant: grant.try_into()? })
    }
}

impl TryFrom<&v1::Grant> for Grant {
    type Error = InvalidMessage;

    fn try_from(message: &v1::Grant) -> Result<Self, InvalidMessage> {
        use v1::PredecessorEnd as Wire;
        let predecessor_end = match message.predecessor_end() {
            Wire::None => PredecessorEnd::None,
            Wire::Released => PredecessorEnd::Released,
            Wire::Refused => PredecessorEnd::Refused,
            Wire::Isolated => PredecessorEnd::Isolated,
            Wire::IncarnationEnded => PredecessorEnd::IncarnationEnded,
            Wire::Unspecified => return Err(InvalidMessage::missing("grant.predecessor_end")),
        };
        if message.epoch == 0 || message.predecessor_epoch >= message.epoch {
            return Err(InvalidMessage::new(
                "grant.epoch",
                format!("{} must be above its predecessor {}", message.epoch, message.predecessor_epoch),
            ));
        }
        Ok(Self { epoch: Epoch(message.epoch), predecessor: Epoch(message.predecessor_epoch), predecessor_end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_image_name_cannot_leave_its_directory() {
        for good in ["debian-12", "a", "a.b_c-1"] {
            assert!(good.parse::<RootImageName>().is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "../a", "a/b", "A", "a ", ".a", "-a", &"a".repeat(64)] {
            assert!(bad.parse::<RootImageName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_taker_is_read_as_older_daemons_wrote_it() {
        let instance = InstanceId::generate();
        let text = format!(r#"{{"node":"a","incarnation":3,"instance":"{instance}"}}"#);
        let taker: Taker = serde_json::from_str(&text).unwrap();
        assert_eq!(taker.by, By::Instance(instance));
        assert_eq!(serde_json::to_string(&taker).unwrap(), text);
        let moves = Taker { by: By::Operation(Operation::Move), ..taker };
        let text = serde_json::to_string(&moves).unwrap();
        assert_eq!(text, r#"{"node":"a","incarnation":3,"operation":"move"}"#);
        assert_eq!(serde_json::from_str::<Taker>(&text).unwrap(), moves);
    }

    #[test]
    fn a_grant_is_above_its_predecessor() {
        let grant = |epoch, predecessor_epoch| v1::Grant {
            epoch,
            predecessor_epoch,
            predecessor_end: v1::PredecessorEnd::Released.into(),
        };
        assert!(Grant::try_from(&grant(2, 1)).is_ok());
        assert!(Grant::try_from(&grant(1, 1)).is_err());
        assert!(Grant::try_from(&grant(0, 0)).is_err());
        assert!(Grant::try_from(&v1::Grant { predecessor_end: 0, ..grant(2, 1) }).is_err());
    }
}
