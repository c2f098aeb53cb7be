//! What somebody asks of a StoragePool, and how it is told again: an id, an operation and a digest of its input.

use serde::Serialize;

use super::StoragePoolSpec;
use crate::{CapacityQuantity, Order, Requested, digest};

/// One command with everything that its caller gave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "operation", rename_all = "kebab-case")]
pub enum PoolCommand {
    SetCapacity {
        /// Absent: the size of the file system.
        capacity: Option<CapacityQuantity>,
    },
    DeclareLost,
}

impl Order for PoolCommand {
    fn operation(&self) -> &'static str {
        match self {
            Self::SetCapacity { .. } => "set-capacity",
            Self::DeclareLost => "declare-lost",
        }
    }

    fn digest(&self) -> String {
        digest(self)
    }
}

impl StoragePoolSpec {
    /// Every command with an id that stands in this spec: of each kind the newest.
    pub fn requested(&self) -> Vec<Requested> {
        let capacity = self.capacity_request.as_ref().map(|request| Requested {
            id: request.request_id.clone(),
            operation: "set-capacity",
            digest: request.digest.clone(),
        });
        let lost = self.lost.as_ref().and_then(|lost| lost.request_id.as_ref());
        capacity.into_iter().chain(lost.map(|id| Requested::new(id, &PoolCommand::DeclareLost))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{node::ChangeRequest, storage_pool::PoolLoss};

    #[test]
    fn a_spec_tells_the_commands_that_stand_in_it() {
        let capacity = PoolCommand::SetCapacity { capacity: Some("1Gi".parse().unwrap()) };
        let spec = StoragePoolSpec {
            capacity: Some("1Gi".parse().unwrap()),
            capacity_request: Some(ChangeRequest { request_id: "a".parse().unwrap(), digest: capacity.digest() }),
            lost: Some(PoolLoss { confirm_data_is_gone: true, request_id: Some("b".parse().unwrap()) }),
        };
        let expected = [("a", capacity), ("b", PoolCommand::DeclareLost)];
        assert_eq!(spec.requested(), expected.map(|(id, command)| Requested::new(&id.parse().unwrap(), &command)));
        assert_eq!(StoragePoolSpec::default().requested(), []);
    }
}
