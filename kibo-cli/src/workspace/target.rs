//! Which Workspace is meant: a name in a namespace, or an id anywhere.

use kibo_crds::{Workspace, WorkspaceId};
use kube::{Api, ResourceExt as _, api::ListParams};

use crate::{
    client::{Cluster, answered},
    errors::{Error, Kind, Result, Subject},
};

/// Reads the Workspace that is meant.
pub async fn fetch(cluster: &Cluster, name_or_id: &str) -> Result<(Workspace, Subject)> {
    let Ok(id) = name_or_id.parse::<WorkspaceId>() else {
        let subject = Subject::namespaced("Workspace", name_or_id, cluster.namespace());
        let workspaces = cluster.namespaced::<Workspace>(cluster.namespace());
        let workspace = answered(&subject, workspaces.get(name_or_id)).await?;
        return Ok((workspace, subject));
    };
    let workspace = by_id(cluster, id).await?;
    let subject = subject(&workspace);
    Ok((workspace, subject))
}

/// Names a Workspace that was read.
pub fn subject(workspace: &Workspace) -> Subject {
    Subject::namespaced("Workspace", &workspace.name_any(), &workspace.namespace().unwrap_or_default())
}

async fn by_id(cluster: &Cluster, id: WorkspaceId) -> Result<Workspace> {
    let named = Subject::cluster("Workspace", &id.to_string());
    let params = ListParams::default().fields(&format!("status.id={id}"));
    let here = cluster.namespaced::<Workspace>(cluster.namespace());
    let in_here = async || answered(&named, here.list(&params)).await;
    let found = if cluster.explicit_namespace.is_some() {
        in_here().await?
    } else {
        let everywhere = Api::<Workspace>::all(cluster.client.clone());
        match answered(&named, everywhere.list(&params)).await {
            // Somebody whose rights end at a namespace still finds what is in it.
            Err(error) if error.kind == Kind::NotPermitted => in_here()
                .await
                .map_err(|error| error.next("you may not look in all namespaces: say with -n where it is"))?,
            answer => answer?,
        }
    };
    found.items.into_iter().next().ok_or_else(|| {
        Error::new(Kind::NotFound, format!("no Workspace has the id {id}"))
            .next(format!("see what there is: {} workspace list -A -o wide", crate::errors::program()))
    })
}
