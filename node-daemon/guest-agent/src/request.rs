//! What a configure message may say: checked once, so that nothing behind it meets a missing or senseless field.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use kibo_guest_protocol::v1::{self, ConfigureStage, RestartPolicy};
use kibo_guest_protocol::{ENTROPY_LEN, v1::Failure};

const DEFAULT_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The kernel's limit.
const MAX_HOSTNAME: usize = 64;
/// Where the agent mounts things of its own; a Volume there would hide them, or be hidden.
const RESERVED: [&str; 4] = ["/proc", "/sys", "/dev", "/run"];

/// A configure message that makes sense.
pub struct Request {
    pub unix_nanos: u64,
    pub entropy: [u8; ENTROPY_LEN],
    pub hostname: String,
    pub network: Option<Network>,
    pub root_image: RootImage,
    pub layer_serial: String,
    /// A Volume comes after those whose directories it is mounted in.
    pub volumes: Vec<Volume>,
    pub entrypoint: Option<Entrypoint>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Network {
    pub mac: Option<[u8; 6]>,
    pub address: IpAddr,
    pub prefix_length: u8,
    pub gateway: Option<IpAddr>,
    pub dns_servers: Vec<IpAddr>,
    pub dns_search: Vec<String>,
    pub mtu: Option<u32>,
}

#[derive(Debug)]
pub struct RootImage {
    pub serial: String,
    pub fs_type: RootFs,
}

/// The file systems that a root image can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootFs {
    Erofs,
    Squashfs,
}

impl RootFs {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Erofs => "erofs",
            Self::Squashfs => "squashfs",
        }
    }
}

#[derive(Debug)]
pub struct Volume {
    /// For messages to people.
    pub name: String,
    pub serial: String,
    pub mount_path: PathBuf,
    pub read_only: bool,
}

#[derive(Clone, Debug)]
pub struct Entrypoint {
    pub process: v1::Process,
    pub policy: RestartPolicy,
    pub backoff_initial: Duration,
    pub backoff_maximum: Duration,
}

/// A failure of configuring, with its stage.
pub fn failure(stage: ConfigureStage, message: impl Into<String>) -> Failure {
    Failure { stage: stage.into(), message: message.into() }
}

impl Request {
    pub fn parse(message: v1::Configure) -> Result<Self, Failure> {
        parse(message).map_err(|(stage, message)| failure(stage, message))
    }
}

type Refusal = (ConfigureStage, String);

fn refuse<T>(stage: ConfigureStage, message: impl Into<String>) -> Result<T, Refusal> {
    Err((stage, message.into()))
}

fn parse(message: v1::Configure) -> Result<Request, Refusal> {
    if message.instance_id.is_empty() {
        return refuse(ConfigureStage::Request, "instance_id is missing");
    }
    if message.time_unix_nanos == 0 {
        return refuse(ConfigureStage::Clock, "time_unix_nanos is missing");
    }
    let Ok(entropy) = <[u8; ENTROPY_LEN]>::try_from(message.entropy.as_slice()) else {
        let len = message.entropy.len();
        return refuse(ConfigureStage::Entropy, format!("entropy is {len} bytes, not {ENTROPY_LEN}"));
    };
    let root = message.root_image.unwrap_or_default();
    let layer = message.writable_layer.unwrap_or_default();
    Ok(Request {
        unix_nanos: message.time_unix_nanos,
        entropy,
        hostname: hostname(message.hostname)?,
        network: message.network.map(network).transpose()?,
        root_image: root_image(root)?,
        layer_serial: serial(ConfigureStage::WritableLayer, "writable_layer", layer.serial)?,
        volumes: volumes(message.volumes)?,
        entrypoint: message.entrypoint.map(entrypoint).transpose()?,
    })
}

fn hostname(name: String) -> Result<String, Refusal> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    if name.is_empty() || name.len() > MAX_HOSTNAME || !name.bytes().all(legal) {
        let rule = format!("1 to {MAX_HOSTNAME} letters, digits, '-' and '.'");
        return refuse(ConfigureStage::Hostname, format!("hostname {name:?} is not {rule}"));
    }
    Ok(name)
}

fn serial(stage: ConfigureStage, of: &str, serial: String) -> Result<String, Refusal> {
    if serial.is_empty() {
        return refuse(stage, format!("{of} has no disk serial"));
    }
    Ok(serial)
}

fn root_image(image: v1::RootImage) -> Result<RootImage, Refusal> {
    let stage = ConfigureStage::RootImage;
    let fs_type = match image.fs_type.as_str() {
        "erofs" => RootFs::Erofs,
        "squashfs" => RootFs::Squashfs,
        other => {
            return refuse(stage, format!("the root image's file system is {other:?}, not erofs or squashfs"));
        }
    };
    Ok(RootImage { serial: serial(stage, "root_image", image.serial)?, fs_type })
}

fn volumes(messages: Vec<v1::Volume>) -> Result<Vec<Volume>, Refusal> {
    let stage = ConfigureStage::Volume;
    let mut paths = HashSet::new();
    let mut volumes = Vec::with_capacity(messages.len());
    for message in messages {
        let name = if message.name.is_empty() { message.serial.clone() } else { message.name };
        let Some(mount_path) = mount_path(&message.mount_path) else {
            let path = message.mount_path;
            return refuse(
                stage,
                format!(
                    "volume {name}: {path:?} is no place to mount it: choose an absolute path without '..', not / and not in {}",
                    RESERVED.join(", ")
                ),
            );
        };
        if !paths.insert(mount_path.clone()) {
            return refuse(
                stage,
                format!("volume {name}: another volume is mounted at {} already", mount_path.display()),
            );
        }
        let serial = serial(stage, &format!("volume {name}"), message.serial)?;
        volumes.push(Volume { name, serial, mount_path, read_only: message.read_only });
    }
    volumes.sort_by_key(|volume| volume.mount_path.components().count());
    Ok(volumes)
}

fn mount_path(path: &str) -> Option<PathBuf> {
    let path = Path::new(path);
    let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    let normal: PathBuf = path.components().collect();
    let free = RESERVED.iter().all(|reserved| !normal.starts_with(reserved));
    (path.is_absolute()
        && plain
        && free
        && normal.parent().is_some()
        && !path.as_os_str().as_encoded_bytes().contains(&0))
    .then_some(normal)
}

fn network(message: v1::Network) -> Result<Network, Refusal> {
    let stage = ConfigureStage::Network;
    let address = ip("address", &message.address)?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let prefix_length = match u8::try_from(message.prefix_length) {
        Ok(length) if length <= longest => length,
        _ => {
            return refuse(stage, format!("the prefix length {} is more than {longest}", message.prefix_length));
        }
    };
    let gateway = (!message.gateway.is_empty()).then(|| ip("gateway", &message.gateway)).transpose()?;
    if gateway.is_some_and(|gateway| gateway.is_ipv4() != address.is_ipv4()) {
        return refuse(
            stage,
            format!("the gateway {} and the address {address} are of different families", message.gateway),
        );
    }
    let mac = (!message.mac.is_empty()).then(|| mac(&message.mac)).transpose()?;
    let dns_servers = message.dns_servers.iter().map(|server| ip("DNS server", server)).collect::<Result<_, _>>()?;
    let mtu = (message.mtu != 0).then_some(message.mtu);
    Ok(Network { mac, address, prefix_length, gateway, dns_servers, dns_search: message.dns_search, mtu })
}

fn ip(what: &str, text: &str) -> Result<IpAddr, Refusal> {
    text.parse().or_else(|_| refuse(ConfigureStage::Network, format!("the {what} {text:?} is no IP address")))
}

fn mac(text: &str) -> Result<[u8; 6], Refusal> {
    let bytes: Option<Vec<u8>> =
        text.split(':').map(|part| u8::from_str_radix(part, 16).ok().filter(|_| part.len() == 2)).collect();
    bytes
        .and_then(|bytes| bytes.try_into().ok())
        .map_or_else(|| refuse(ConfigureStage::Network, format!("{text:?} is no MAC address")), Ok)
}

fn entrypoint(message: v1::Entrypoint) -> Result<Entrypoint, Refusal> {
    let stage = ConfigureStage::Entrypoint;
    let policy = match message.restart_policy() {
        RestartPolicy::Unspecified => {
            return refuse(stage, "the entrypoint's restart policy is missing or unknown");
        }
        policy => policy,
    };
    let Some(process) = message.process.filter(|process| !process.argv.is_empty()) else {
        return refuse(stage, "the entrypoint has no command");
    };
    let millis = |value: u32, default| {
        if value == 0 { default } else { Duration::from_millis(value.into()) }
    };
    let backoff_initial = millis(message.backoff_initial_millis, DEFAULT_BACKOFF.0);
    let backoff_maximum = millis(message.backoff_maximum_millis, DEFAULT_BACKOFF.1).max(backoff_initial);
    Ok(Entrypoint { process, policy, backoff_initial, backoff_maximum })
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
