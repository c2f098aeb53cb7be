//! What an Instance is made from, out of the stored objects.

use kibo_crds::{
    AmountError, Bytes, MilliCpu, PoolId, Template, Volume, Workspace,
    template::{Entrypoint, RestartPolicy},
    workspace::Egress,
};
use kibo_protocol::v1;
use kube::ResourceExt as _;

use crate::right::HasRight as _;

/// What one execution of a Workspace gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amounts {
    pub cpu: MilliCpu,
    /// Guest memory, without the VMM's own.
    pub memory: Bytes,
    /// Size of a new writable layer.
    pub layer: Bytes,
}

/// The Workspace's own amounts, or its Template's.
pub fn amounts(workspace: &Workspace, template: &Template) -> Result<Amounts, AmountError> {
    let own = workspace.spec.resources.clone().unwrap_or_default();
    let layer = workspace.spec.writable_layer.clone().unwrap_or_default().size;
    Ok(Amounts {
        cpu: own.cpu.unwrap_or_else(|| template.spec.resources.cpu.clone()).amount()?,
        memory: own.memory.unwrap_or_else(|| template.spec.resources.memory.clone()).amount()?,
        layer: layer.unwrap_or_else(|| template.spec.writable_layer.size.clone()).amount()?,
    })
}

/// The execution that the stored Workspace holds, for an Offer, a Go or a desired set. A Template that
/// was deleted leaves its part empty: what runs goes on, and what would have to start fails on the node.
pub fn launch(workspace: &Workspace, template: Option<&Template>, volume: Option<&Volume>) -> Option<v1::Launch> {
    let status = workspace.status.as_ref()?;
    let execution = status.execution.as_ref()?;
    let amounts = template.and_then(|template| amounts(workspace, template).ok());
    Some(v1::Launch {
        instance_id: execution.instance_id.to_string(),
        workspace: Some(reference(workspace)),
        cpu_milli: execution.cpu_milli.0,
        memory_bytes: amounts.map_or(execution.memory_bytes, |amounts| amounts.memory).0,
        allocated_memory_bytes: execution.memory_bytes.0,
        root_image: template.map(|template| template.spec.root_image.clone()).unwrap_or_default(),
        layer: layer(workspace),
        volumes: volume.into_iter().filter_map(|volume| mount(workspace, volume)).collect(),
        entrypoint: template.and_then(|template| template.spec.entrypoint.as_ref()).map(entrypoint),
        hostname: workspace.name_any(),
        network: Some(network(workspace)),
    })
}

/// The same without the grants, which an Offer does not have yet.
pub fn without_grants(mut launch: v1::Launch) -> v1::Launch {
    let volumes = launch.volumes.iter_mut().filter_map(|volume| volume.object.as_mut());
    volumes.chain(launch.layer.as_mut()).for_each(|object| object.grant = None);
    launch
}

fn network(workspace: &Workspace) -> v1::LaunchNetwork {
    let egress = match workspace.spec.network.as_ref().and_then(|network| network.egress).unwrap_or_default() {
        Egress::Allow => v1::Egress::Allow,
        Egress::Deny => v1::Egress::Deny,
    };
    v1::LaunchNetwork { egress: egress.into() }
}

fn reference(workspace: &Workspace) -> v1::WorkspaceRef {
    v1::WorkspaceRef {
        namespace: workspace.namespace().unwrap_or_default(),
        name: workspace.name_any(),
        uid: workspace.uid().unwrap_or_default(),
        id: workspace.status.as_ref().and_then(|status| status.id).map(|id| id.to_string()).unwrap_or_default(),
    }
}

/// The writable layer with its current grant.
pub fn layer(workspace: &Workspace) -> Option<v1::Object> {
    let status = workspace.status.as_ref()?;
    let layer = status.writable_layer.as_ref()?;
    Some(v1::Object {
        uid: workspace.uid()?,
        pool: layer.pool.to_string(),
        size_bytes: layer.grow_to.unwrap_or(layer.size).0,
        must_exist: layer.created,
        grant: status.right().grant(),
        grows_from_bytes: grows_from(layer.created.then_some(layer.size), layer.grow_to),
    })
}

/// An image that no node has told of may be there all the same, from before a larger one was asked for.
fn grows_from(made: Option<Bytes>, grow_to: Option<Bytes>) -> u64 {
    match (made, grow_to) {
        (Some(made), Some(_)) => made.0,
        (Some(_), None) => 0,
        (None, _) => 1,
    }
}

/// A Volume's bytes with their current grant; `None` while it has no pool.
pub fn volume_object(volume: &Volume) -> Option<v1::Object> {
    let status = volume.status.as_ref()?;
    let pool: &PoolId = status.pool.as_ref()?;
    Some(v1::Object {
        uid: volume.uid()?,
        pool: pool.to_string(),
        size_bytes: status.grow_to.unwrap_or_else(|| volume_size(volume)).0,
        must_exist: status.size.is_some(),
        grant: status.right().grant(),
        grows_from_bytes: grows_from(status.size, status.grow_to),
    })
}

/// The size that the image has, or is made with.
pub fn volume_size(volume: &Volume) -> Bytes {
    let made = volume.status.as_ref().and_then(|status| status.size);
    made.or_else(|| volume.spec.size.amount().ok()).unwrap_or_default()
}

fn mount(workspace: &Workspace, volume: &Volume) -> Option<v1::VolumeMount> {
    let mount_path = workspace.spec.volume.as_ref()?.mount_path.clone();
    Some(v1::VolumeMount { object: Some(volume_object(volume)?), mount_path })
}

fn entrypoint(entrypoint: &Entrypoint) -> v1::Entrypoint {
    let restart = match entrypoint.restart {
        RestartPolicy::Never => v1::RestartPolicy::Never,
        RestartPolicy::OnFailure => v1::RestartPolicy::OnFailure,
        RestartPolicy::Always => v1::RestartPolicy::Always,
    };
    v1::Entrypoint {
        command: entrypoint.command.clone(),
        env: entrypoint.env.clone().into_iter().collect(),
        working_dir: entrypoint.working_dir.clone().unwrap_or_default(),
        restart: restart.into(),
    }
}
