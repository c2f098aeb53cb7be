//! What is in the pools and belongs to nobody: found by looking, told in the status, and removed only where it is proven
//! that its owner was deleted.
//!
//! That no Workspace and no Volume has an object's uid proves nothing: a control plane that was put back to an older state
//! does not know what was made since. Uids are never used twice, so the record of a deletion is a proof: the tombstone of
//! the Workspace, or the pool's own record that a deletion was granted and has begun. How old something is never counts.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use kibo_crds::{
    Bytes, Incarnation, NodeId, PoolId, StoragePool, WorkspaceTombstone,
    storage_pool::{UnownedObject, UnownedObjects, UnownedReason},
};
use kibo_protocol::v1;
use kube::{Api, ResourceExt as _, api::ListParams, runtime::reflector::Store};

use crate::{
    clock::now,
    context::Ctx,
    guarded,
    session::{CommandFailure, ObjectCommand, hooks::Usage},
};

/// Names in the status.
const TOLD: usize = 32;
/// Entries in one answer of a node.
const PAGE: u32 = 2000;
/// Removed in one look; the next one goes on.
const REMOVED_AT_ONCE: usize = 256;
const TOMBSTONES_PAGE: u32 = 500;

#[derive(Debug, thiserror::Error)]
enum LookError {
    #[error(transparent)]
    Node(#[from] CommandFailure),
    #[error("{0}")]
    Pool(String),
    #[error("failed to list the tombstones: {0}")]
    Tombstones(Box<kube::Error>),
}

/// What a member found that no Workspace and no Volume has.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Unowned {
    name: String,
    used: Bytes,
    reason: UnownedReason,
}

/// Looks at every pool again and again, until the leadership ends.
pub async fn run(ctx: Ctx, usage: Arc<dyn Usage>, pools: Store<StoragePool>, period: Duration) {
    loop {
        tokio::select! {
            () = ctx.stop.cancelled() => return,
            () = tokio::time::sleep(period) => {}
        }
        for pool in pools.state() {
            let Ok(id) = pool.name_any().parse::<PoolId>() else { continue };
            let Some((member, incarnation)) = member(&ctx, &id).filter(|_| pool.spec.lost.is_none()) else { continue };
            let look = Look { ctx: &ctx, usage: &*usage, pool: &pool, id: &id, member: &member, incarnation };
            if let Err(error) = look.once().await {
                tracing::warn!(pool = %id, node = %member, %error, "failed to look for what belongs to nobody");
            }
        }
    }
}

/// A node with a session that reaches the pool.
fn member(ctx: &Ctx, pool: &PoolId) -> Option<(NodeId, Incarnation)> {
    let reaches = |node: &crate::session::NodeSnapshot| {
        node.desired_sent
            && node.pools.iter().any(|p| p.id == *pool && p.available && ctx.pools.has_marker(pool, &p.uid))
    };
    let mut nodes = ctx.registry.snapshot();
    nodes.sort_by(|a, b| a.id.cmp(&b.id));
    nodes.into_iter().find(reaches).map(|node| (node.id, node.incarnation))
}

/// One look at one pool.
struct Look<'a> {
    ctx: &'a Ctx,
    usage: &'a dyn Usage,
    pool: &'a StoragePool,
    id: &'a PoolId,
    member: &'a NodeId,
    incarnation: Incarnation,
}

impl Look<'_> {
    async fn once(&self) -> Result<(), LookError> {
        let uid = self.pool.status.as_ref().and_then(|status| status.uid.clone()).unwrap_or_default();
        let mut found = Vec::new();
        let mut after = String::new();
        loop {
            let listed = self.ctx.registry.list_pool(self.member, self.incarnation, self.id, &after, PAGE).await?;
            if !listed.problem.is_empty() {
                return Err(LookError::Pool(listed.problem));
            }
            if listed.pool_uid != uid {
                return Err(LookError::Pool(format!("the node looks at another pool, {}", listed.pool_uid)));
            }
            let next = listed.entries.last().map(|entry| entry.name.clone());
            found.extend(listed.entries.into_iter().filter(|entry| !self.usage.owns(&entry.name)));
            match next.filter(|next| listed.more && *next > after) {
                Some(next) => after = next,
                None => break,
            }
        }
        let tombstones = if found.is_empty() { BTreeSet::new() } else { tombstones(self.ctx).await? };
        let found = judge(found, |uid| tombstones.contains(uid));
        let left = self.remove(&uid, found).await;
        self.tell(left).await;
        Ok(())
    }

    /// Removes what is proven to be deleted; gives back what stays.
    async fn remove(&self, pool_uid: &str, found: Vec<Unowned>) -> Vec<Unowned> {
        let mut left = Vec::new();
        let mut tried = 0;
        for entry in found {
            if entry.reason != UnownedReason::Deleted || tried >= REMOVED_AT_ONCE || self.usage.owns(&entry.name) {
                left.push(entry);
                continue;
            }
            tried += 1;
            let remove = v1::RemoveUnowned {
                command_id: ulid::Ulid::new().to_string(),
                pool: self.id.to_string(),
                pool_uid: pool_uid.to_owned(),
                uid: entry.name.clone(),
            };
            let command = ObjectCommand::RemoveUnowned(remove);
            match self.ctx.registry.object_command(self.member, self.incarnation, command).await {
                Ok(result) if result.ok => {
                    tracing::info!(pool = %self.id, object = entry.name, bytes = entry.used.0, "removed what was left of a deleted object");
                    metrics::counter!("kibotos_unowned_objects_removed_total").increment(1);
                }
                Ok(result) => {
                    tracing::warn!(pool = %self.id, object = entry.name, message = result.message, "what is left of a deleted object stays");
                    left.push(entry);
                }
                Err(error) => {
                    tracing::warn!(pool = %self.id, object = entry.name, %error, "what is left of a deleted object stays");
                    left.push(entry);
                }
            }
        }
        left
    }

    /// Writes what was found, when it is news. A conflict makes way for the next look.
    async fn tell(&self, left: Vec<Unowned>) {
        let found = summary(left, self.member);
        let mut status = self.pool.status.clone().unwrap_or_default();
        if is_same(status.unowned.as_ref(), found.as_ref()) {
            return;
        }
        status.unowned = found;
        let api = Api::<StoragePool>::all(self.ctx.client.clone());
        if let Err(error) = guarded::replace_status(&api, self.pool, status, self.ctx.term).await {
            self.ctx.end_if_overtaken(&error);
            tracing::debug!(pool = %self.id, %error, "what belongs to nobody is told after the next look");
        }
    }
}

/// Which entries are proven to be deleted.
fn judge(found: Vec<v1::PoolEntry>, is_buried: impl Fn(&str) -> bool) -> Vec<Unowned> {
    let judge = |entry: v1::PoolEntry| {
        let reason = match () {
            () if !entry.is_object => UnownedReason::Foreign,
            () if entry.is_deleted || is_buried(&entry.name) => UnownedReason::Deleted,
            () => UnownedReason::Unknown,
        };
        Unowned { name: entry.name, used: Bytes(entry.used_bytes), reason }
    };
    found.into_iter().map(judge).collect()
}

fn summary(found: Vec<Unowned>, seen_by: &NodeId) -> Option<UnownedObjects> {
    let count = u32::try_from(found.len()).unwrap_or(u32::MAX);
    let bytes = found.iter().fold(0, |sum: u64, entry| sum.saturating_add(entry.used.0));
    let name = |name: String| name.chars().take(255).collect();
    let entry = |it: Unowned| UnownedObject { name: name(it.name), bytes: it.used, owner: it.reason };
    let entries: Vec<_> = found.into_iter().take(TOLD).map(entry).collect();
    (count > 0).then(|| UnownedObjects {
        count,
        bytes: Bytes(bytes),
        entries,
        seen_by: seen_by.clone(),
        seen_at: now(),
    })
}

/// Whether two looks saw the same, by whom and whenever.
fn is_same(old: Option<&UnownedObjects>, new: Option<&UnownedObjects>) -> bool {
    match (old, new) {
        (Some(old), Some(new)) => (old.count, old.bytes, &old.entries) == (new.count, new.bytes, &new.entries),
        (old, new) => old.is_none() && new.is_none(),
    }
}

/// Uids of the Workspaces whose deletion is on record.
async fn tombstones(ctx: &Ctx) -> Result<BTreeSet<String>, LookError> {
    let api = Api::<WorkspaceTombstone>::all(ctx.client.clone());
    let mut params = ListParams::default().limit(TOMBSTONES_PAGE);
    let mut uids = BTreeSet::new();
    loop {
        let page = api.list(&params).await.map_err(|error| LookError::Tombstones(Box::new(error)))?;
        uids.extend(page.items.into_iter().map(|tombstone| tombstone.spec.uid));
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(uids);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, is_object: bool, is_deleted: bool) -> v1::PoolEntry {
        v1::PoolEntry { name: name.to_owned(), is_object, used_bytes: 4096, is_deleted }
    }

    #[test]
    fn only_the_record_of_a_deletion_is_a_proof() {
        let found = vec![
            entry("buried", true, false),
            entry("begun", true, true),
            entry("nobody-knows", true, false),
            entry("lost+found", false, false),
        ];
        let judged = judge(found, |uid| uid == "buried" || uid == "lost+found");
        let reasons: Vec<_> = judged.iter().map(|it| (it.name.as_str(), it.reason)).collect();
        let expected = [
            ("buried", UnownedReason::Deleted),
            ("begun", UnownedReason::Deleted),
            ("nobody-knows", UnownedReason::Unknown),
            ("lost+found", UnownedReason::Foreign),
        ];
        assert_eq!(reasons, expected);
    }

    #[test]
    fn of_many_the_first_are_named_and_all_are_counted() {
        let node = "a".parse().unwrap();
        let found = judge((0..100).map(|n| entry(&format!("{n:03}"), true, false)).collect(), |_| false);
        let told = summary(found.clone(), &node).unwrap();
        assert_eq!((told.count, told.bytes, told.entries.len()), (100, Bytes(409_600), TOLD));
        let later = summary(found, &"b".parse().unwrap());
        assert!(is_same(Some(&told), later.as_ref()), "another member saw the same");
        assert!(!is_same(Some(&told), None) && is_same(None, None));
        assert_eq!(summary(Vec::new(), &node), None);
    }
}
