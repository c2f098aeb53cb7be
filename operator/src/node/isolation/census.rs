//! What names an incarnation of a node: read with a quorum, and counted.

use kibo_crds::{
    Incarnation, NodeId, Volume, Workspace,
    node::{Holder, IsolationResult},
};
use kube::{Api, Client, Resource, api::ListParams};
use serde::de::DeserializeOwned;

const PAGE: u32 = 500;

/// What an isolation does away with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    pub volumes: u32,
    /// Of running and of stopped Workspaces.
    pub layers: u32,
    /// Workspaces that run there and are not being deleted: they fail.
    pub workspaces: u32,
    /// Those that are being deleted: they go on elsewhere.
    pub leaving: u32,
}

impl Census {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// With these counts stored, it is decided.
    pub fn store_in(self, result: &IsolationResult) -> IsolationResult {
        IsolationResult {
            released_volumes: Some(self.volumes),
            released_layers: Some(self.layers),
            failed_workspaces: Some(self.workspaces),
            ..result.clone()
        }
    }

    fn add_workspace(&mut self, workspace: &Workspace, node: &NodeId, until: Incarnation) {
        let status = workspace.status.as_ref();
        let execution = status.and_then(|status| status.execution.as_ref());
        if execution.is_some_and(|execution| execution.node == *node && execution.incarnation <= until) {
            let is_leaving = workspace.metadata.deletion_timestamp.is_some();
            *(if is_leaving { &mut self.leaving } else { &mut self.workspaces }) += 1;
        }
    }

    fn add_layer(&mut self, workspace: &Workspace, node: &NodeId, until: Incarnation) {
        let holder = workspace.status.as_ref().and_then(|status| status.holder.as_ref());
        self.layers += u32::from(is_held(holder, node, until));
    }

    fn add_volume(&mut self, volume: &Volume, node: &NodeId, until: Incarnation) {
        let holder = volume.status.as_ref().and_then(|status| status.holder.as_ref());
        self.volumes += u32::from(is_held(holder, node, until));
    }
}

fn is_held(holder: Option<&Holder>, node: &NodeId, until: Incarnation) -> bool {
    holder.is_some_and(|holder| holder.node == *node && holder.incarnation <= until)
}

/// Everything that names `node` in this incarnation or an earlier one, as it is stored now.
pub async fn take(client: &Client, node: &NodeId, until: Incarnation) -> Result<Census, kube::Error> {
    let mut census = Census::default();
    let workspaces = Api::<Workspace>::all(client.clone());
    each(&workspaces, &format!("status.execution.node={node}"), |it| census.add_workspace(it, node, until)).await?;
    let holder = format!("status.holder.node={node}");
    each(&workspaces, &holder, |it| census.add_layer(it, node, until)).await?;
    each(&Api::<Volume>::all(client.clone()), &holder, |it| census.add_volume(it, node, until)).await?;
    Ok(census)
}

async fn each<K>(api: &Api<K>, fields: &str, mut look: impl FnMut(&K)) -> Result<(), kube::Error>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    let mut params = ListParams::default().fields(fields).limit(PAGE);
    loop {
        let page = api.list(&params).await?;
        page.items.iter().for_each(&mut look);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(()),
        }
    }
}
