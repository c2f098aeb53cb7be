//! Makes a generic guest the guest of one Instance.
//!
//! Runs on a thread of its own, so that the loop goes on answering while a disk is slow. The thread takes a mount
//! namespace of its own first: what it mounts is the Workspace's and nobody else's, and goes away with the last process
//! and descriptor that is in it.

mod clock;
mod disks;
mod entropy;
mod grow;
mod identity;
mod mounts;
mod network;

use std::fmt::Display;
use std::os::fd::OwnedFd;

use kibo_guest_protocol::v1::{ConfigureStage, Failure};

use crate::modules;
use crate::request::{Request, failure};

/// What a configured guest consists of. All of it must be dropped before the file systems can be unmounted.
pub struct Workspace {
    /// The mount namespace that every process of the Workspace enters.
    pub namespace: OwnedFd,
    /// The Workspace's `/`.
    pub root: OwnedFd,
    /// The Workspace's /dev/pts, whatever becomes of the name.
    pub terminals: OwnedFd,
    /// One descriptor on each file system that can be written, with its name.
    pub writable: Vec<(String, OwnedFd)>,
}

pub fn run(request: &Request) -> Result<Workspace, Failure> {
    clock::set(request.unix_nanos).map_err(at(ConfigureStage::Clock))?;
    entropy::add(&request.entropy).map_err(at(ConfigureStage::Entropy))?;
    identity::set_hostname(&request.hostname).map_err(at(ConfigureStage::Hostname))?;
    modules::load(modules::Moment::Configure).map_err(at(ConfigureStage::Disks))?;
    let disks = disks::Disks::find().map_err(at(ConfigureStage::Disks))?;
    let workspace = mounts::mount_all(request, &disks)?;
    identity::write_files(request).map_err(at(ConfigureStage::Hostname))?;
    network::set_up_loopback().map_err(at(ConfigureStage::Network))?;
    if let Some(network) = &request.network {
        network::set_up(network).map_err(at(ConfigureStage::Network))?;
    }
    Ok(workspace)
}

fn at<E: Display>(stage: ConfigureStage) -> impl Fn(E) -> Failure {
    move |error| failure(stage, error.to_string())
}
