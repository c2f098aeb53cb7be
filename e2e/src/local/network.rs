//! What the nodes of a local cluster use of the host's network: a range each, and what is left of it.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use rand::Rng as _;
use serde::{Deserialize, Serialize};

use super::node::LocalNode;

/// The addresses that are kept for tests of networks: nobody's on the way to anywhere. 512 ranges of 254.
const FIRST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
const RANGES: u32 = 512;
const PREFIX: u8 = 24;

/// The network that a node gives to its guests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LocalNetwork {
    pub range: String,
    /// None: the interfaces of the host's default routes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uplinks: Vec<String>,
    /// Absent: the host's servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns_servers: Option<Vec<String>>,
    /// Absent: the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nft: Option<PathBuf>,
}

impl LocalNetwork {
    /// A range that neither the host nor another daemon on it has, nor one of `known`; none when all are taken. Two
    /// clusters that pick at the same moment may pick the same: then the second daemon refuses it and says so.
    pub fn pick<'a>(known: impl Iterator<Item = &'a Self>) -> Option<Self> {
        let known: Vec<&str> = known.map(|network| network.range.as_str()).collect();
        let (tables, routes) = (tables(), routes());
        let begin = rand::rng().random_range(0..RANGES);
        (0..RANGES)
            .map(|step| Ipv4Addr::from(u32::from(FIRST) + (((begin + step) % RANGES) << (32 - PREFIX))))
            .map(|first| (first, Self::of(format!("{first}/{PREFIX}"))))
            .find(|(first, network)| {
                !known.contains(&network.range.as_str())
                    && !tables.iter().any(|table| network.is_range_of(table))
                    && !routes.iter().any(|route| route.shares_an_address(*first, PREFIX))
            })
            .map(|(_, network)| network)
    }

    fn of(range: String) -> Self {
        Self { range, uplinks: Vec::new(), dns_servers: None, nft: None }
    }

    /// The name of a daemon's table ends with its range.
    fn is_range_of(&self, table: &str) -> bool {
        table.ends_with(&format!("_{}", self.range.replace('/', "_")))
    }

    fn first(&self) -> Option<(Ipv4Addr, u8)> {
        let (first, prefix) = self.range.split_once('/')?;
        Some((first.parse().ok()?, prefix.parse().ok()?))
    }
}

/// What is there of the networks that nodes gave to their guests: tables of rules and taps, each with its name.
pub fn networks_of(nodes: &[LocalNode]) -> Vec<String> {
    let (tables, routes) = (tables(), routes());
    let networks = nodes.iter().filter_map(|node| node.network.as_ref());
    networks
        .flat_map(|network| {
            let tables = tables.iter().filter(|table| network.is_range_of(table)).map(|it| format!("nft table {it}"));
            let range = network.first();
            let of_guests = routes.iter().filter(move |route| {
                route.is_to_guest && range.is_some_and(|(first, prefix)| route.shares_an_address(first, prefix))
            });
            tables.chain(of_guests.map(|route| format!("tap {}", route.interface))).collect::<Vec<_>>()
        })
        .collect()
}

/// What is there of the network of one Instance: its tap, and rules that name it.
pub fn network_of(instance: &str) -> Vec<String> {
    // As the daemon names it: the end of the Instance's id, which is its random part.
    let end = &instance[instance.len().saturating_sub(8)..];
    let interfaces = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let taps = interfaces.filter_map(|entry| entry.file_name().into_string().ok());
    let taps = taps.filter(|name| name.starts_with("kt") && name.ends_with(end)).map(|name| format!("tap {name}"));
    let rules = nft(&["list", "ruleset", "inet"]).contains(&format!("{end}\"")).then(|| "rules".to_owned());
    taps.chain(rules).collect()
}

/// The tables of all node-daemons on this host.
fn tables() -> Vec<String> {
    let listed = nft(&["list", "tables", "inet"]);
    let names = listed.lines().filter_map(|line| line.strip_prefix("table inet "));
    names.filter(|name| name.starts_with("kibotos_")).map(|name| name.trim().to_owned()).collect()
}

/// What nft prints; nothing when it cannot be run, and then no daemon has made rules either.
fn nft(arguments: &[&str]) -> String {
    let output = Command::new("/usr/sbin/nft").args(arguments).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
}

struct Route {
    interface: String,
    destination: u32,
    mask: u32,
    is_to_guest: bool,
}

impl Route {
    fn shares_an_address(&self, first: Ipv4Addr, prefix: u8) -> bool {
        // The default route leads everywhere and says nothing.
        let both = self.mask & (u32::MAX << (32 - u32::from(prefix)));
        self.mask != 0 && (self.destination ^ u32::from(first)) & both == 0
    }
}

/// The host's main table.
fn routes() -> Vec<Route> {
    let text = fs::read_to_string(Path::new("/proc/net/route")).unwrap_or_default();
    text.lines().skip(1).filter_map(parse_route).collect()
}

fn parse_route(line: &str) -> Option<Route> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    // The kernel prints the bytes of an address as one number of this machine.
    let number = |text: &str| u32::from_str_radix(text, 16).ok().map(|number| u32::from_be_bytes(number.to_ne_bytes()));
    let interface = (*fields.first()?).to_owned();
    let is_to_guest = interface.starts_with("kt");
    Some(Route { interface, destination: number(fields.get(1)?)?, mask: number(fields.get(7)?)?, is_to_guest })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_read_and_compared() {
        let line = "ktabcde12345678\t050012C6\t00000000\t0001\t0\t0\t0\tFFFFFFFF\t0\t0\t0";
        let route = parse_route(line).unwrap();
        assert!(route.is_to_guest);
        assert!(route.shares_an_address(Ipv4Addr::new(198, 18, 0, 0), 24));
        assert!(!route.shares_an_address(Ipv4Addr::new(198, 18, 1, 0), 24));
        let default = parse_route("eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0").unwrap();
        assert!(!default.shares_an_address(Ipv4Addr::new(198, 18, 0, 0), 24));
    }

    #[test]
    fn a_known_range_is_not_picked_again() {
        let all: Vec<LocalNetwork> = std::iter::successors(LocalNetwork::pick([].iter()), |_| None).collect();
        assert_ne!(LocalNetwork::pick(all.iter()), all.first().cloned());
        let network = LocalNetwork::of("198.18.7.0/24".to_owned());
        assert!(network.is_range_of("kibotos_abcde_198.18.7.0_24"));
        assert!(!network.is_range_of("kibotos_abcde_198.18.77.0_24"));
    }
}
