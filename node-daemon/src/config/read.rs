//! From TOML to [`Config`].

use std::{collections::BTreeMap, net::Ipv4Addr, path::PathBuf, time::Duration};

use toml::Table;

use super::{
    Accelerator, Config, ControlConfig, FenceConfig, HostConfig, ImagesConfig, NetworkConfig, NodeConfig, PoolConfig,
    Problems, Resources, VmmConfig, section::Section,
};
use crate::network::is_a_host;

const NOBODY: u32 = 65534;
/// A pool is read every 2 s; less than two looks would freeze what is well.
const LEAST_FREEZE_AFTER: u32 = 5;
/// Every host on the way must take packets of 576 bytes; a length field has 16 bits.
const MTUS: std::ops::RangeInclusive<u32> = 576..=65_535;

pub fn config(text: &str) -> Result<Config, Problems> {
    let mut problems = Problems::default();
    let table: Table = match text.parse() {
        Ok(table) => table,
        Err(error) => {
            problems.add("the file", None, format!("is no TOML: {}", error.to_string().trim_end()));
            return Err(problems);
        }
    };
    let mut root = Section::root(table, &mut problems);
    let state_dir = root.path("state_dir");
    let node = root.section("node", node);
    let resources = root.section("resources", resources);
    let storage_pools = storage_pools(&mut root);
    let fence = root.optional_section("fence", fence).unwrap_or_default();
    let vmm = root.section("vmm", vmm);
    let images = root.section("images", |section| section.path("dir").map(|dir| ImagesConfig { dir }));
    let network = root.optional_section("network", network).flatten();
    let control = root.section("control", control);
    let host = root.optional_section("host", host).unwrap_or_default();
    root.finish();
    match (state_dir, resources, vmm, images, control) {
        (Some(state_dir), Some(resources), Some(vmm), Some(images), Some(control)) if problems.0.is_empty() => {
            Ok(Config { state_dir, node, resources, storage_pools, fence, vmm, images, network, control, host })
        }
        _ => Err(problems),
    }
}

fn node(section: &mut Section<'_>) -> NodeConfig {
    NodeConfig { id: section.optional_text("id"), labels: section.section("labels", labels) }
}

/// Labels of a Node are those of Kubernetes, without the prefixes that Kubernetes and Kibotos keep for themselves.
fn labels(section: &mut Section<'_>) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    for (key, value) in section.rest() {
        if let Some(rule) = label_problem(&key, &value) {
            section.problem(&key, Some(format!("{value:?}")), rule);
        } else {
            labels.insert(key, value);
        }
    }
    labels
}

fn label_problem(key: &str, value: &str) -> Option<&'static str> {
    let is_word = |text: &str| {
        let inner = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        let ends = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = text.as_bytes();
        text.len() <= 63 && bytes.iter().copied().all(inner) && ends(bytes.first()) && ends(bytes.last())
    };
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let is_prefix = |prefix: &str| prefix.len() <= 253 && prefix.split('.').all(is_word);
    let is_reserved = |prefix: &str| {
        ["kubernetes.io", "k8s.io", "kibotos.dev"]
            .iter()
            .any(|domain| prefix == *domain || prefix.ends_with(&format!(".{domain}")))
    };
    if !is_word(name) || prefix.is_some_and(|prefix| !is_prefix(prefix)) {
        return Some(
            "the key must be a Kubernetes label: at most 63 letters, digits, '-', '_' and '.', with an optional DNS prefix and '/'",
        );
    }
    if prefix.is_some_and(is_reserved) {
        return Some("the prefix is reserved: kubernetes.io, k8s.io and kibotos.dev are not for labels of one's own");
    }
    if !value.is_empty() && !is_word(value) {
        return Some("the value must be empty or at most 63 letters, digits, '-', '_' and '.'");
    }
    None
}

fn resources(section: &mut Section<'_>) -> Option<Resources> {
    let cpu = section.quantity("cpu");
    let memory = section.quantity("memory");
    let max_instances = section.optional_number("max_instances", 1);
    Some(Resources { cpu: cpu?, memory: memory?, max_instances })
}

fn fence(section: &mut Section<'_>) -> FenceConfig {
    let freeze_after = section.optional_number("freeze_after_seconds", LEAST_FREEZE_AFTER);
    freeze_after
        .map_or_else(FenceConfig::default, |seconds| FenceConfig { freeze_after: Duration::from_secs(seconds.into()) })
}

fn storage_pools(root: &mut Section<'_>) -> Vec<PoolConfig> {
    let pools = root.sections("storage_pools", |section| {
        let id = section.text("id");
        let path = section.path("path");
        let default = section.flag("default");
        Some(PoolConfig { id: id?, path: path?, default })
    });
    let complete = pools.iter().all(Option::is_some);
    let mut pools: Vec<PoolConfig> = pools.into_iter().flatten().collect();
    for (index, pool) in pools.iter().enumerate() {
        let earlier = &pools[..index];
        if earlier.iter().any(|other| other.id == pool.id) {
            root.problem(
                &format!("storage_pools[{index}].id"),
                Some(format!("{:?}", pool.id.as_str())),
                "names a pool a second time",
            );
        }
        if earlier.iter().any(|other| other.path == pool.path) {
            root.problem(
                &format!("storage_pools[{index}].path"),
                Some(format!("{:?}", pool.path.display().to_string())),
                "is the path of another pool already",
            );
        }
    }
    // The only pool is the default without saying so.
    if let [only] = pools.as_mut_slice()
        && complete
    {
        only.default = true;
    }
    let defaults = pools.iter().filter(|pool| pool.default).count();
    if complete && !pools.is_empty() && defaults != 1 {
        root.problem("storage_pools", None, format!("exactly one must have default = true, not {defaults}"));
    }
    pools
}

fn accelerator(section: &mut Section<'_>) -> Option<Accelerator> {
    let text: String = section.text("accelerator")?;
    match text.as_str() {
        "kvm" => Some(Accelerator::Kvm),
        "tcg" => Some(Accelerator::Tcg),
        _ => {
            section.problem("accelerator", Some(format!("{text:?}")), "must be \"kvm\" or \"tcg\"");
            None
        }
    }
}

fn vmm(section: &mut Section<'_>) -> Option<VmmConfig> {
    let accelerator = accelerator(section);
    let disk_io = section.optional_text("disk_io").unwrap_or_default();
    let qemu = section.path("qemu");
    let kernel = section.path("kernel");
    let initrd = section.path("initrd");
    let uid = section.optional_number("uid", 1);
    let gid = section.optional_number("gid", 1);
    let cgroup_root = section.optional_path("cgroup_root");
    Some(VmmConfig {
        accelerator: accelerator?,
        disk_io,
        qemu: qemu?,
        kernel: kernel?,
        initrd: initrd?,
        uid: uid.unwrap_or(NOBODY),
        gid: gid.unwrap_or(NOBODY),
        cgroup_root: cgroup_root.unwrap_or_else(|| PathBuf::from("/sys/fs/cgroup")),
    })
}

/// A server that guests can ask.
struct DnsServer(Ipv4Addr);

impl std::str::FromStr for DnsServer {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let address = text.parse().map_err(|_| "must be an IPv4 address")?;
        is_a_host(address)
            .then_some(Self(address))
            .ok_or("must be the address of another host: guests do not reach this one")
    }
}

fn network(section: &mut Section<'_>) -> Option<NetworkConfig> {
    let range = section.text("range");
    let uplinks = section.optional_texts("uplinks").unwrap_or_default();
    let dns_servers: Option<Vec<DnsServer>> = section.optional_texts("dns_servers");
    let mtu = section.optional_number("mtu", *MTUS.start()).filter(|mtu| {
        let fits = MTUS.contains(mtu);
        if !fits {
            section.problem("mtu", Some(mtu.to_string()), format!("must be at most {}", MTUS.end()));
        }
        fits
    });
    let nft = section.optional_path("nft");
    Some(NetworkConfig {
        range: range?,
        uplinks,
        dns_servers: dns_servers.map(|servers| servers.into_iter().map(|server| server.0).collect()),
        mtu,
        nft: nft.unwrap_or_else(|| PathBuf::from("/usr/sbin/nft")),
    })
}

fn host(section: &mut Section<'_>) -> HostConfig {
    section.optional_path("proc").map_or_else(HostConfig::default, |proc| HostConfig { proc })
}

fn control(section: &mut Section<'_>) -> Option<ControlConfig> {
    let endpoints = section.texts("endpoints");
    let ca_file = section.path("ca_file");
    let token_file = section.optional_path("token_file");
    let service_account_token_file = section.optional_path("service_account_token_file");
    Some(ControlConfig { endpoints, ca_file: ca_file?, token_file, service_account_token_file })
}
