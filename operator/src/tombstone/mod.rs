//! WorkspaceTombstone: records of deleted Workspaces, removed when their time is over.

use std::time::Duration;

use futures::TryStreamExt as _;
use kibo_crds::WorkspaceTombstone;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Preconditions},
};
use tokio_util::sync::CancellationToken;

const PERIOD: Duration = Duration::from_mins(5);
const PAGE: u32 = 500;

/// Removes expired records until `stop`.
pub async fn run(client: kube::Client, stop: CancellationToken) {
    let api: Api<WorkspaceTombstone> = Api::all(client);
    loop {
        if let Err(error) = collect(&api).await {
            tracing::warn!(%error, "failed to remove expired tombstones, trying again later");
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(PERIOD) => {}
        }
    }
}

fn is_expired(tombstone: &WorkspaceTombstone, now: jiff::Timestamp) -> bool {
    tombstone.spec.expires_at.0 <= now
}

async fn collect(api: &Api<WorkspaceTombstone>) -> Result<(), kube::Error> {
    let mut token = None;
    loop {
        let mut params = ListParams::default().limit(PAGE);
        params.continue_token = token;
        let page = api.list(&params).await?;
        let now = jiff::Timestamp::now();
        let expired = page.items.iter().filter(|tombstone| is_expired(tombstone, now));
        let deletions = expired.map(|tombstone| Ok::<_, kube::Error>((tombstone.name_any(), tombstone.uid())));
        futures::stream::iter(deletions)
            .try_for_each(|(name, uid)| async move {
                let preconditions = Some(Preconditions { uid, resource_version: None });
                match api.delete(&name, &DeleteParams { preconditions, ..DeleteParams::default() }).await {
                    Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
                    other => other.map(drop),
                }
            })
            .await?;
        token = page.metadata.continue_.filter(|token| !token.is_empty());
        if token.is_none() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use kibo_crds::{WorkspaceId, tombstone::WorkspaceTombstoneSpec};

    use super::*;

    #[test]
    fn a_record_is_kept_until_its_time_is_over() {
        let at = |second| jiff::Timestamp::from_second(second).unwrap();
        let id = WorkspaceId::generate();
        let spec = WorkspaceTombstoneSpec {
            id,
            namespace: "default".into(),
            name: "box".into(),
            uid: String::new(),
            template: "t".into(),
            deleted_at: Time(at(100)),
            expires_at: Time(at(200)),
            last_execution: None,
        };
        let tombstone = WorkspaceTombstone::new(&id.to_string(), spec);
        assert!(!is_expired(&tombstone, at(199)));
        assert!(is_expired(&tombstone, at(200)));
    }
}
