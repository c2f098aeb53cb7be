//! The custom resources of Kibotos: the only database of the system.
//!
//! `spec` is what people asked for, `status` is what is true; only the operator writes a status.
//! Rules about one object are CEL in its schema, rules about deletes are admission policies
//! ([`policy`]); both are generated into `crds/yaml/` and applied by the operator when it starts.
//!
//! The types carry the rules where they can: an [`Epoch`] cannot be mixed up with an
//! [`Incarnation`], an amount of CPU is a [`MilliCpu`] and of memory a [`Bytes`].

#![allow(clippy::duplicated_attributes, reason = "the columns of a kind repeat the name of their type")]

mod amounts;
mod command;
mod condition;
mod counters;
mod decimal;
mod hex;
mod ids;
mod labels;
mod moving;
mod names;
mod percent;
mod ratio;
mod rules;
mod transfer;

pub mod node;
pub mod overcommit_policy;
pub mod policy;
pub mod refusals;
pub mod storage_pool;
pub mod template;
pub mod tombstone;
pub mod usage;
pub mod volume;
pub mod workspace;
pub mod yaml;

pub use amounts::{AmountError, Bytes, CapacityQuantity, CpuQuantity, MemoryQuantity, MilliCpu, SizeQuantity};
pub use command::{CommandRecord, CommandResult, Order, Requested, digest};
pub use condition::{ConditionType, condition, set_condition};
pub use counters::{Epoch, Incarnation, SequenceNumber, Term};
pub use hex::{hex, short_digest};
pub use ids::{IdError, InstanceId, WorkspaceId};
pub use labels::{
    CLUSTER_ID_CONFIG_MAP, FIELD_MANAGER, GROUP, VERSION, VOLUME_FINALIZER, WORKSPACE_FINALIZER, is_reserved_label,
};
pub use moving::{MoveRequest, MoveState, MoveStatus};
pub use names::{CommandId, NameError, NodeId, ObjectUid, PoolId};
pub use node::Node;
pub use overcommit_policy::OvercommitPolicy;
pub use percent::{Percent, PercentError};
pub use ratio::{Ratio, RatioError};
pub use storage_pool::StoragePool;
pub use template::Template;
pub use tombstone::WorkspaceTombstone;
pub use transfer::{Import, TransferKind, TransferState, TransferStatus};
pub use volume::Volume;
pub use workspace::Workspace;
