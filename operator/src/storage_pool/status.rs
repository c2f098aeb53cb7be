//! What is true of a StoragePool, computed from the Nodes that declare it. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{
    Bytes, ConditionType, Node, NodeId, StoragePool, condition,
    node::{Admission, NodePool},
    set_condition,
    storage_pool::{PoolMember, StoragePoolStatus},
};

use super::commands;
use crate::session::hooks::PoolUsage;

/// With less free than this a pool is full: what needs space waits, and new disks go elsewhere.
const FULL_BELOW: Bytes = Bytes::mib(16);

/// A Node that declares the pool.
#[derive(Clone, Debug)]
pub struct Declaration<'a> {
    pub node: NodeId,
    pub pool: &'a NodePool,
    /// The node has a live session, so what it said is of now.
    pub alive: bool,
}

/// The declaration of `id` by a node that is a member of the cluster.
pub fn declaration<'a>(node: &'a Node, id: &str) -> Option<Declaration<'a>> {
    let status = node.status.as_ref()?;
    if status.admission != Some(Admission::Admitted) {
        return None;
    }
    Some(Declaration {
        node: node.metadata.name.as_deref()?.parse().ok()?,
        pool: status.pools.iter().find(|pool| pool.id.as_str() == id)?,
        alive: status.has_live_session(),
    })
}

/// `declarations` in the order of the nodes' names.
pub fn compute(
    pool: &StoragePool,
    declarations: &[Declaration<'_>],
    usage: PoolUsage,
    now: &Time,
) -> StoragePoolStatus {
    let mut status = pool.status.clone().unwrap_or_default();
    let generation = pool.metadata.generation;
    status.observed_generation = generation;
    if status.uid.is_none() {
        status.uid = declarations.iter().map(|d| &d.pool.uid).find(|uid| !uid.is_empty()).cloned();
    }
    let is_member = |declaration: &&Declaration<'_>| status.uid.as_deref() == Some(&declaration.pool.uid);
    let members: Vec<_> = declarations.iter().filter(is_member).collect();
    let strangers: Vec<_> =
        declarations.iter().filter(|d| !is_member(d) && !d.pool.uid.is_empty()).map(|d| d.node.to_string()).collect();
    let is_lost = pool.spec.lost.is_some();
    let reaches = |member: &&&Declaration<'_>| member.pool.available && member.alive && !is_lost;
    let reached: Vec<_> = members.iter().filter(reaches).collect();
    let conflict = conflict(pool, &strangers);
    let ready = if is_lost { lost(&members) } else { ready(members.len(), reached.len()) };
    status.members =
        members.iter().map(|member| PoolMember { node: member.node.clone(), available: reaches(&member) }).collect();
    // All members see one file system; when their readings differ by their age, the smaller one counts.
    if !reached.is_empty() {
        let of_file_system = reached.iter().filter_map(|member| member.pool.capacity).max();
        status.capacity = limit(pool).or(of_file_system).map(for_people);
        status.free = reached.iter().filter_map(|member| member.pool.free).min().map(for_people);
        status.used = reached.iter().filter_map(|member| member.pool.used).max().map(for_people);
        let (value, reason, message) = full(&reached);
        let full = condition(ConditionType::DiskFull, Some(value), reason, &message, generation, now);
        set_condition(&mut status.conditions, full);
    }
    status.allocated = Some(usage.allocated);
    status.objects = Some(usage.objects);
    for (kind, (value, reason, message)) in [(ConditionType::Ready, ready), (ConditionType::MarkerConflict, conflict)] {
        set_condition(&mut status.conditions, condition(kind, Some(value), reason, &message, generation, now));
    }
    if is_lost {
        // What was free or found there says nothing any more.
        (status.free, status.used, status.unowned) = (None, None, None);
        status.conditions.retain(|condition| condition.type_ != ConditionType::DiskFull.to_string());
        let message = "everything in it is given up; a new pool needs another id";
        let lost = condition(ConditionType::Lost, Some(true), "DeclaredLost", message, generation, now);
        set_condition(&mut status.conditions, lost);
    }
    status.commands = commands::records(pool, &status, now);
    status
}

/// What may be allocated, when somebody limited it.
fn limit(pool: &StoragePool) -> Option<Bytes> {
    pool.spec.capacity.as_ref()?.amount().ok()
}

fn lost(members: &[&Declaration<'_>]) -> (bool, &'static str, String) {
    let came_back: Vec<_> = members.iter().filter(|member| member.alive).map(|member| member.node.as_str()).collect();
    let message = if came_back.is_empty() {
        "declared lost: delete the Workspaces and Volumes whose disks were here".to_owned()
    } else {
        let nodes = came_back.iter().take(16).copied().collect::<Vec<_>>().join(", ");
        format!(
            "declared lost, and not used though these nodes still declare it: {nodes}; take it out of their configuration"
        )
    };
    (false, "Lost", message)
}

fn full(reached: &[&&Declaration<'_>]) -> (bool, &'static str, String) {
    let waiting = reached.iter().fold(0, |sum: u32, member| sum.saturating_add(member.pool.waiting_guests));
    let free = reached.iter().filter_map(|member| member.pool.free).min();
    if waiting > 0 {
        let guests = if waiting == 1 { "1 guest stands".to_owned() } else { format!("{waiting} guests stand") };
        (true, "GuestsWait", format!("{guests} still until there is space: free some, or enlarge the file system"))
    } else if free.is_some_and(|free| free < FULL_BELOW) {
        (true, "NoSpace", "there is no space left: free some, or enlarge the file system".to_owned())
    } else {
        (false, "Space", String::new())
    }
}

/// Whole GiB, or MiB of what is small, rounded down: `kubectl get` shows it as it stands.
fn for_people(bytes: Bytes) -> String {
    const MEBI: u64 = 1 << 20;
    const GIBI: u64 = 1 << 30;
    let unit = match bytes.0 {
        ..MEBI => 1,
        MEBI..TEN_GIBI => MEBI,
        _ => GIBI,
    };
    Bytes(bytes.0 / unit * unit).to_string()
}

/// From here on MiB say nothing any more.
const TEN_GIBI: u64 = 10 << 30;

fn ready(members: usize, reached: usize) -> (bool, &'static str, String) {
    if members == 0 {
        (false, "NoMembers", "no admitted node declares this pool".to_owned())
    } else if reached == 0 {
        (false, "OutOfReach", "none of the member nodes reaches the pool now".to_owned())
    } else {
        (true, "Available", format!("{reached} of {members} member nodes reach the pool"))
    }
}

fn conflict(pool: &StoragePool, strangers: &[String]) -> (bool, &'static str, String) {
    let name = pool.metadata.name.as_deref().unwrap_or_default();
    if strangers.is_empty() {
        return (false, "OneMarker", "all nodes that declare this pool mean the same one".to_owned());
    }
    let nodes = strangers.iter().take(16).map(String::as_str).collect::<Vec<_>>().join(", ");
    let message = format!(
        "these nodes have a directory with another marker under the id {name} and are no members: {nodes}; give their pool an id of its own, or mount the right file system there"
    );
    (true, "AnotherMarker", message)
}

/// Whether more differs than readings that move all the time.
pub fn is_more_than_readings(old: Option<&StoragePoolStatus>, new: &StoragePoolStatus) -> bool {
    let Some(old) = old else { return true };
    let mut same = new.clone();
    same.free.clone_from(&old.free);
    same.used.clone_from(&old.used);
    same.allocated.clone_from(&old.allocated);
    same.objects = old.objects;
    same != *old
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use kibo_crds::storage_pool::{PoolLoss, StoragePoolSpec};

    use super::*;

    #[test]
    fn sizes_are_rounded_down_to_what_people_read() {
        let table = [
            (100, "100"),
            (1 << 20, "1Mi"),
            ((5 << 30) + 7, "5Gi"),
            ((5 << 30) - 7, "5119Mi"),
            (33_980_817_408, "31Gi"),
        ];
        for (bytes, text) in table {
            assert_eq!(for_people(Bytes(bytes)), text);
        }
    }

    fn declared(uid: &str, available: bool, free: u64) -> NodePool {
        NodePool {
            id: "shared".parse().unwrap(),
            uid: uid.into(),
            default: false,
            available,
            capacity: Some(Bytes(100)),
            free: Some(Bytes(free << 20)),
            used: None,
            waiting_guests: 0,
        }
    }

    fn condition_of(status: &StoragePoolStatus, kind: ConditionType) -> (&str, &str) {
        let found = status.conditions.iter().find(|c| c.type_ == kind.to_string()).unwrap();
        (&found.status, &found.reason)
    }

    #[test]
    fn another_marker_is_no_member_and_is_named() {
        let pools =
            [declared("u1", true, 50), declared("u2", true, 10), declared("u1", true, 40), declared("", false, 0)];
        let declarations: Vec<_> = pools
            .iter()
            .enumerate()
            .map(|(i, pool)| Declaration { node: format!("node-{i}").parse().unwrap(), pool, alive: i != 2 })
            .collect();
        let now = Time(Timestamp::from_second(1).unwrap());
        let mut pool = StoragePool::new("shared", StoragePoolSpec::default());
        let status = compute(&pool, &declarations, PoolUsage::default(), &now);
        assert_eq!(status.uid.as_deref(), Some("u1"));
        let members: Vec<_> = status.members.iter().map(|m| (m.node.as_str(), m.available)).collect();
        assert_eq!(members, [("node-0", true), ("node-2", false)]);
        assert_eq!(status.free.as_deref(), Some("50Mi"));
        assert_eq!(condition_of(&status, ConditionType::Ready), ("True", "Available"));
        assert_eq!(condition_of(&status, ConditionType::MarkerConflict), ("True", "AnotherMarker"));
        assert!(status.conditions.iter().any(|c| c.message.contains("node-1")));

        // The marker of the first stays, also when only others are left.
        pool.status = Some(status);
        let status = compute(&pool, &declarations[1..2], PoolUsage::default(), &now);
        assert_eq!(status.uid.as_deref(), Some("u1"));
        assert_eq!(condition_of(&status, ConditionType::Ready), ("False", "NoMembers"));
    }

    #[test]
    fn a_pool_is_full_when_guests_wait_or_nothing_is_left() {
        let mut pools = [declared("u1", true, 500), declared("u1", true, 500)];
        let now = Time(Timestamp::from_second(1).unwrap());
        let pool = StoragePool::new("shared", StoragePoolSpec::default());
        let seen = |pools: &[NodePool]| {
            let declarations: Vec<_> =
                pools.iter().map(|pool| Declaration { node: "a".parse().unwrap(), pool, alive: true }).collect();
            let status = compute(&pool, &declarations, PoolUsage::default(), &now);
            let (value, reason) = condition_of(&status, ConditionType::DiskFull);
            (value.to_owned(), reason.to_owned())
        };
        assert_eq!(seen(&pools), ("False".into(), "Space".into()));
        pools[1].waiting_guests = 2;
        assert_eq!(seen(&pools), ("True".into(), "GuestsWait".into()));
        pools = [declared("u1", true, 15), declared("u1", true, 500)];
        assert_eq!(seen(&pools), ("True".into(), "NoSpace".into()));
    }

    #[test]
    fn what_is_lost_stays_lost_when_it_comes_back() {
        let now = Time(Timestamp::from_second(1).unwrap());
        let mut pool = StoragePool::new("p", StoragePoolSpec::default());
        let back = [declared("u1", true, 50)];
        let declarations = [Declaration { node: "a".parse().unwrap(), pool: &back[0], alive: true }];
        pool.status = Some(compute(&pool, &declarations, PoolUsage::default(), &now));
        pool.spec.lost = Some(PoolLoss { confirm_data_is_gone: true, request_id: None });
        let status = compute(&pool, &declarations, PoolUsage { allocated: Bytes(1), objects: 2 }, &now);
        assert_eq!(condition_of(&status, ConditionType::Ready), ("False", "Lost"));
        assert_eq!(condition_of(&status, ConditionType::Lost), ("True", "DeclaredLost"));
        assert!(!status.members[0].available && status.free.is_none());
        assert!(status.conditions.iter().any(|c| c.type_ == "Ready" && c.message.contains("still declare it: a;")));
        assert_eq!(status.uid.as_deref(), Some("u1"));
    }

    #[test]
    fn free_space_alone_is_a_reading() {
        let pool = StoragePool::new("shared", StoragePoolSpec::default());
        let now = Time(Timestamp::from_second(1).unwrap());
        let status = compute(&pool, &[], PoolUsage::default(), &now);
        let used = compute(&pool, &[], PoolUsage { allocated: Bytes(1), objects: 1 }, &now);
        assert!(is_more_than_readings(None, &status));
        assert!(!is_more_than_readings(Some(&status), &used));
    }
}
