//! From the order to a running VM: take the objects, open the files, start QEMU. All of it may block.

use std::{fs::File, path::Path};

use kibo_crds::PoolId;
use kibo_guest_protocol::v1 as guest;
use kibo_protocol::v1::{self, EndReason, ObjectState, ObjectUse};

use super::{Deps, find_root_image, machine::Ending, root_image::RootImage};
use crate::{
    launch::{GrantedObject, Launch},
    network::GuestNetwork,
    pool::{OpenImage, TakenObject},
    vmm::{Disk, Machine, SocketDir, Started, Tap},
};

const ROOT_SERIAL: &str = "root";
const LAYER_SERIAL: &str = "layer";

/// Objects that are held for an Instance, with their images open.
pub struct Taken(Vec<TakenObject>);

impl Taken {
    /// As the event tells it.
    pub fn states(&self) -> Vec<ObjectState> {
        let state = |object: &TakenObject| ObjectState {
            uid: object.uid.to_string(),
            epoch: object.epoch.0,
            r#use: ObjectUse::Held.into(),
            size_bytes: Some(object.size.0),
        };
        self.0.iter().map(state).collect()
    }
}

/// Takes all objects. When one cannot be had the Instance ends; what was taken before is released there.
pub fn take(deps: &Deps, launch: &Launch) -> Result<Taken, Ending> {
    let mut taken = Vec::new();
    for granted in launch.objects() {
        taken.push(take_one(deps, launch, granted)?);
    }
    Ok(Taken(taken))
}

fn take_one(deps: &Deps, launch: &Launch, granted: &GrantedObject) -> Result<TakenObject, Ending> {
    let pool = deps
        .pools
        .get(&granted.object.pool)
        .map_err(|error| Ending::new(EndReason::StorageFailed, error.to_string()))?;
    pool.take(granted, &launch.taker).map_err(|error| Ending::new(error.end_reason(), error.to_string()))
}

/// Starts the VM. Needs a tokio runtime.
pub fn start(
    deps: &Deps,
    launch: &Launch,
    taken: Taken,
    tap: Option<Tap>,
    sockets: &SocketDir,
) -> Result<Started, Ending> {
    let machine = Machine { tap, ..machine(&deps.images_dir, launch, taken.0)? };
    deps.vmm.start(machine, sockets).map_err(|error| Ending::new(EndReason::VmmFailed, error.to_string()))
}

/// The VM of a launch, with its disks: the layer first, then the Volumes; without a network. Opens the root image.
pub fn machine(images_dir: &Path, launch: &Launch, taken: Vec<TakenObject>) -> Result<Machine, Ending> {
    let root = root_image(images_dir, launch)?;
    let file = File::open(&root.path).map_err(|error| {
        let message = format!("failed to open the root image {}: {error}", root.path.display());
        Ending::new(EndReason::StorageFailed, message)
    })?;
    let root = Disk { serial: ROOT_SERIAL.to_owned(), file, read_only: true, direct: false, is_locked: false };
    let mut disks = vec![root];
    for (index, object) in taken.into_iter().enumerate() {
        let serial = index.checked_sub(1).map_or_else(|| LAYER_SERIAL.to_owned(), volume_serial);
        let OpenImage { file, is_direct: direct, is_locked } = object.image;
        disks.push(Disk { serial, file, read_only: false, direct, is_locked });
    }
    Ok(Machine {
        name: launch.instance().to_string(),
        cpu: launch.cpu,
        memory: launch.memory,
        memory_limit: launch.allocated_memory,
        disks,
        tap: None,
    })
}

fn root_image(images_dir: &Path, launch: &Launch) -> Result<RootImage, Ending> {
    find_root_image(images_dir, &launch.root_image).ok_or_else(|| {
        let directory = images_dir.display();
        let message = format!("this node has no root image {:?} in {directory}", launch.root_image.as_str());
        Ending::new(EndReason::StorageFailed, message)
    })
}

/// Which pool each writable disk is in, by its serial.
pub fn disk_pools(launch: &Launch) -> Vec<(String, PoolId)> {
    let serial = |index: usize| index.checked_sub(1).map_or_else(|| LAYER_SERIAL.to_owned(), volume_serial);
    launch.objects().enumerate().map(|(index, granted)| (serial(index), granted.object.pool.clone())).collect()
}

fn volume_serial(index: usize) -> String {
    format!("vol{index}")
}

/// What makes the booted guest this Instance's. Time and entropy are filled in when it is sent.
pub fn configuration(
    images_dir: &Path,
    launch: &Launch,
    network: Option<GuestNetwork>,
) -> Result<guest::Configure, Ending> {
    let root = root_image(images_dir, launch)?;
    let volumes = launch.volumes.iter().enumerate().map(|(index, volume)| guest::Volume {
        serial: volume_serial(index),
        mount_path: volume.mount_path.clone(),
        read_only: false,
        name: volume.object.object.uid.to_string(),
    });
    Ok(guest::Configure {
        instance_id: launch.instance().to_string(),
        hostname: launch.hostname.clone(),
        network: network.map(self::network),
        root_image: Some(guest::RootImage { serial: ROOT_SERIAL.to_owned(), fs_type: root.fs_type.to_owned() }),
        writable_layer: Some(guest::WritableLayer { serial: LAYER_SERIAL.to_owned() }),
        volumes: volumes.collect(),
        entrypoint: launch.entrypoint.as_ref().filter(|entrypoint| !entrypoint.command.is_empty()).map(entrypoint),
        ..guest::Configure::default()
    })
}

fn network(network: GuestNetwork) -> guest::Network {
    let GuestNetwork { mac, address, prefix_length, gateway, dns_servers, mtu } = network;
    guest::Network {
        mac: mac.to_string(),
        address: address.to_string(),
        prefix_length: prefix_length.into(),
        gateway: gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
        dns_servers: dns_servers.iter().map(ToString::to_string).collect(),
        dns_search: Vec::new(),
        mtu,
    }
}

fn entrypoint(entrypoint: &v1::Entrypoint) -> guest::Entrypoint {
    let restart_policy = match entrypoint.restart() {
        v1::RestartPolicy::Always => guest::RestartPolicy::Always,
        v1::RestartPolicy::OnFailure => guest::RestartPolicy::OnFailure,
        v1::RestartPolicy::Never | v1::RestartPolicy::Unspecified => guest::RestartPolicy::Never,
    };
    let env = entrypoint.env.iter().map(|(name, value)| guest::EnvVar { name: name.clone(), value: value.clone() });
    guest::Entrypoint {
        process: Some(guest::Process {
            argv: entrypoint.command.clone(),
            env: env.collect(),
            cwd: entrypoint.working_dir.clone(),
            user: String::new(),
        }),
        restart_policy: restart_policy.into(),
        ..guest::Entrypoint::default()
    }
}
