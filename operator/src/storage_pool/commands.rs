//! The commands of a StoragePool that carry an id. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{CommandRecord, ConditionType, StoragePool, storage_pool::StoragePoolStatus};

use crate::commands::{self, Outcome};

/// The records as they should be, `status` being right in everything else.
pub fn records(pool: &StoragePool, status: &StoragePoolStatus, now: &Time) -> Vec<CommandRecord> {
    commands::records(&pool.spec.requested(), &status.commands, now, |record, _| match record.operation.as_str() {
        // Its condition is what everything else goes by.
        "declare-lost" => {
            let counts = status.objects.map(|objects| ("objects".to_owned(), objects));
            Outcome { counts: counts.into_iter().collect(), ..Outcome::done_when(is_lost(status)) }
        }
        // The request itself is all of it: placement reads the spec.
        _ => Outcome::done_when(true),
    })
}

fn is_lost(status: &StoragePoolStatus) -> bool {
    let lost = ConditionType::Lost.to_string();
    status.conditions.iter().any(|condition| condition.type_ == lost && condition.status == "True")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use kibo_crds::{
        CommandResult, Order as _, condition,
        node::ChangeRequest,
        storage_pool::{PoolCommand, PoolLoss, StoragePoolSpec},
    };

    use super::*;

    #[test]
    fn a_capacity_is_set_at_once_and_a_loss_when_the_status_says_it() {
        let now = Time(Timestamp::from_second(1).unwrap());
        let capacity: kibo_crds::CapacityQuantity = "1Gi".parse().unwrap();
        let digest = PoolCommand::SetCapacity { capacity: Some(capacity.clone()) }.digest();
        let spec = StoragePoolSpec {
            capacity: Some(capacity),
            capacity_request: Some(ChangeRequest { request_id: "a".parse().unwrap(), digest }),
            lost: Some(PoolLoss { confirm_data_is_gone: true, request_id: Some("b".parse().unwrap()) }),
        };
        let pool = StoragePool::new("p", spec);
        let mut status = StoragePoolStatus { objects: Some(3), ..StoragePoolStatus::default() };
        status.commands = records(&pool, &status, &now);
        let results: Vec<_> = status.commands.iter().map(|it| (it.operation.as_str(), it.result)).collect();
        assert_eq!(results, [("set-capacity", CommandResult::Succeeded), ("declare-lost", CommandResult::Processing)]);
        status.conditions = vec![condition(ConditionType::Lost, Some(true), "DeclaredLost", "", None, &now)];
        let done = records(&pool, &status, &now);
        assert_eq!((done[1].result, done[1].counts["objects"]), (CommandResult::Succeeded, 3));
    }
}
