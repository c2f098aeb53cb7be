//! What the host's network is like: interfaces, addresses, routes, resolvers, and the kernel's switches for forwarding.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
};

use futures::TryStreamExt as _;
use ipnet::Ipv4Net;
use rtnetlink::{
    Handle, RouteMessageBuilder,
    packet_route::{
        AddressFamily,
        address::{AddressAttribute, AddressMessage},
        link::LinkAttribute,
        route::{RouteAddress, RouteAttribute, RouteMessage, RouteType},
    },
};

use super::{
    NetworkError,
    plan::{Range, TAP_PREFIX, is_a_host, overlap},
};

const SYSCTL: &str = "/proc/sys/net";
/// The second knows the real servers where systemd-resolved answers on loopback.
const RESOLV_CONF: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];
/// A route this wide is a default route, also where it is written as two halves.
const DEFAULT_ROUTE: u8 = 1;

/// A network that the host has on an interface: by an address of its own, or by a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    pub interface: String,
    pub net: Ipv4Net,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Address,
    Route,
}

/// What the kernel says of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// Interfaces with their MTU.
    pub links: BTreeMap<String, u32>,
    pub known: Vec<Known>,
}

impl Host {
    /// By a socket of its own: the kernel refuses a listing (EBUSY) while another one is under way on the same socket,
    /// be it of somebody else or of a look that was given up.
    pub async fn look() -> Result<Self, NetworkError> {
        let (connection, netlink, _) = rtnetlink::new_connection().map_err(NetworkError::Socket)?;
        // It ends with its handle.
        tokio::spawn(connection);
        Self::list(&netlink).await.map_err(NetworkError::Netlink)
    }

    async fn list(netlink: &Handle) -> Result<Self, rtnetlink::Error> {
        let mut names = BTreeMap::new();
        let mut host = Self::default();
        let mut links = netlink.link().get().execute();
        while let Some(link) = links.try_next().await? {
            let name = link.attributes.iter().find_map(|it| match it {
                LinkAttribute::IfName(name) => Some(name.clone()),
                _ => None,
            });
            let mtu = link.attributes.iter().find_map(|it| match it {
                LinkAttribute::Mtu(mtu) => Some(*mtu),
                _ => None,
            });
            if let (Some(name), Some(mtu)) = (name, mtu) {
                names.insert(link.header.index, name.clone());
                host.links.insert(name, mtu);
            }
        }
        let mut addresses = netlink.address().get().execute();
        while let Some(address) = addresses.try_next().await? {
            host.known.extend(address_of(&address, &names));
        }
        let mut routes = netlink.route().get(RouteMessageBuilder::<Ipv4Addr>::new().build()).execute();
        while let Some(route) = routes.try_next().await? {
            host.known.extend(routes_of(&route, &names));
        }
        Ok(host)
    }

    /// The interfaces of the default routes, without a guest's.
    pub fn uplinks(&self) -> Vec<String> {
        let defaults = self.known.iter().filter(|it| it.kind == Kind::Route && it.net.prefix_len() <= DEFAULT_ROUTE);
        let mut uplinks: Vec<String> =
            defaults.map(|it| it.interface.clone()).filter(|name| !name.starts_with(TAP_PREFIX)).collect();
        uplinks.sort();
        uplinks.dedup();
        uplinks
    }

    /// What stands against giving a range to guests: it would be out of this host's reach, or theirs. `own` begins the
    /// names of the interfaces that the range is for.
    pub fn conflict(&self, range: Range, own: &str) -> Option<&Known> {
        let is_default = |it: &Known| it.kind == Kind::Route && it.net.prefix_len() <= DEFAULT_ROUTE;
        self.known.iter().find(|it| overlap(it.net, range.net()) && !is_default(it) && !it.interface.starts_with(own))
    }

    /// The addresses that are routed to interfaces whose names begin so.
    pub fn guests<'a>(&'a self, own: &'a str) -> impl Iterator<Item = Ipv4Addr> + 'a {
        let routes = self.known.iter().filter(move |it| it.kind == Kind::Route && it.interface.starts_with(own));
        routes.map(|it| it.net.addr())
    }

    /// Whether packets to this address end on this host.
    pub fn has_address(&self, address: Ipv4Addr) -> bool {
        self.known.iter().any(|it| it.kind == Kind::Address && it.net.addr() == address)
    }

    /// The most that goes through every one of these interfaces.
    pub fn mtu(&self, uplinks: &[String]) -> Option<u32> {
        uplinks.iter().filter_map(|name| self.links.get(name)).min().copied()
    }
}

fn address_of(message: &AddressMessage, names: &BTreeMap<u32, String>) -> Option<Known> {
    let find = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(wanted);
    // Where there is a peer, `Address` is the peer's.
    let local = find(|it| if let AddressAttribute::Local(address) = it { Some(*address) } else { None });
    let address =
        local.or_else(|| find(|it| if let AddressAttribute::Address(address) = it { Some(*address) } else { None }));
    let Some(IpAddr::V4(address)) = address else { return None };
    let net = Ipv4Net::new(address, message.header.prefix_len).ok()?;
    Some(Known { interface: names.get(&message.header.index)?.clone(), net, kind: Kind::Address })
}

fn routes_of(message: &RouteMessage, names: &BTreeMap<u32, String>) -> Vec<Known> {
    if message.header.address_family != AddressFamily::Inet || message.header.kind != RouteType::Unicast {
        return Vec::new();
    }
    let mut destination = Ipv4Addr::UNSPECIFIED;
    let mut interfaces = Vec::new();
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(address)) => destination = *address,
            RouteAttribute::Oif(index) => interfaces.push(*index),
            RouteAttribute::MultiPath(hops) => interfaces.extend(hops.iter().map(|hop| hop.interface_index)),
            _ => {}
        }
    }
    let Ok(net) = Ipv4Net::new(destination, message.header.destination_prefix_length) else { return Vec::new() };
    let known = |interface: &String| Known { interface: interface.clone(), net, kind: Kind::Route };
    interfaces.iter().filter_map(|index| names.get(index)).map(known).collect()
}

/// The servers that the host itself asks, as far as guests can reach them: not those on the host.
pub fn resolvers(host: &Host) -> Vec<Ipv4Addr> {
    let servers = RESOLV_CONF.iter().filter_map(|path| fs::read_to_string(path).ok()).map(|text| name_servers(&text));
    let reachable = |servers: Vec<Ipv4Addr>| -> Vec<Ipv4Addr> {
        servers.into_iter().filter(|server| is_a_host(*server) && !host.has_address(*server)).collect()
    };
    servers.map(reachable).find(|servers| !servers.is_empty()).unwrap_or_default()
}

fn name_servers(text: &str) -> Vec<Ipv4Addr> {
    // More than three are ignored by the C library.
    const MOST: usize = 3;
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse().ok()).flatten()
    });
    servers.take(MOST).collect()
}

/// Whether the host forwards packets for everybody.
pub fn forwards() -> io::Result<bool> {
    Ok(read(&Path::new(SYSCTL).join("ipv4/ip_forward"))? != "0")
}

/// Lets an interface forward what comes in by it, or no longer. One that is not there forwards nothing.
pub fn set_forwarding(interface: &str, on: bool) -> io::Result<()> {
    let wanted = if on { "1" } else { "0" };
    let path = of_interface("ipv4", interface, "forwarding");
    if !path.exists() {
        return Ok(());
    }
    if read(&path)? == wanted { Ok(()) } else { write(&path, wanted) }
}

/// The host's end of a guest's cable: forwards, answers for nothing but the gateway's address, believes no source that
/// does not live there, and speaks no IPv6.
pub fn harden_tap(tap: &str) -> io::Result<()> {
    let ipv6 = of_interface("ipv6", tap, "disable_ipv6");
    // A kernel without IPv6 has no switch for it.
    if ipv6.exists() {
        write(&ipv6, "1")?;
    }
    for (name, value) in [
        ("arp_ignore", "1"),
        ("rp_filter", "1"),
        ("accept_redirects", "0"),
        ("send_redirects", "0"),
        ("forwarding", "1"),
    ] {
        write(&of_interface("ipv4", tap, name), value)?;
    }
    Ok(())
}

fn of_interface(family: &str, interface: &str, name: &str) -> PathBuf {
    // One component of a path, also with a dot in it.
    Path::new(SYSCTL).join(family).join("conf").join(interface).join(name)
}

fn read(path: &Path) -> io::Result<String> {
    let text = fs::read_to_string(path).map_err(|error| said(&error, path))?;
    Ok(text.trim().to_owned())
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::write(path, value).map_err(|error| said(&error, path))
}

fn said(error: &io::Error, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(interface: &str, net: &str, kind: Kind) -> Known {
        Known { interface: interface.to_owned(), net: net.parse().unwrap(), kind }
    }

    fn host() -> Host {
        Host {
            links: [("lo", 65536), ("eth0", 1500), ("wg0", 1420)].map(|(name, mtu)| (name.to_owned(), mtu)).into(),
            known: vec![
                known("lo", "127.0.0.1/8", Kind::Address),
                known("eth0", "192.0.2.2/24", Kind::Address),
                known("eth0", "0.0.0.0/0", Kind::Route),
                known("eth0", "192.0.2.0/24", Kind::Route),
                known("wg0", "10.8.0.0/16", Kind::Route),
                known("ktabcde00000001", "10.77.0.1/32", Kind::Address),
                known("ktabcde00000001", "10.77.0.9/32", Kind::Route),
            ],
        }
    }

    #[test]
    fn a_range_that_the_host_knows_is_not_for_guests() {
        let conflict = |range: &str| host().conflict(range.parse().unwrap(), "ktabcde").cloned();
        assert_eq!(conflict("10.77.0.0/16"), None, "its own taps do not count, nor the default route");
        let guests: Vec<Ipv4Addr> = host().guests("ktabcde").collect();
        assert_eq!(guests, [Ipv4Addr::new(10, 77, 0, 9)]);
        assert_eq!(conflict("10.8.4.0/24"), Some(known("wg0", "10.8.0.0/16", Kind::Route)));
        assert_eq!(conflict("192.0.2.0/28").unwrap().interface, "eth0");
        assert_eq!(conflict("192.0.0.0/16").unwrap().interface, "eth0");
        let other = host().conflict("10.77.0.0/16".parse().unwrap(), "ktother").cloned();
        assert_eq!(other.unwrap().interface, "ktabcde00000001", "another daemon's taps count");
    }

    #[test]
    fn a_vpn_that_takes_everything_in_two_halves_is_an_uplink_and_no_conflict() {
        let mut host = host();
        host.known.extend([known("wg0", "0.0.0.0/1", Kind::Route), known("wg0", "128.0.0.0/1", Kind::Route)]);
        assert_eq!(host.uplinks(), ["eth0", "wg0"]);
        assert_eq!(host.conflict("10.77.0.0/16".parse().unwrap(), "ktabcde"), None);
        assert_eq!(host.mtu(&host.uplinks()), Some(1420));
    }

    #[test]
    fn a_resolver_on_the_host_is_none_for_guests() {
        let text = "# generated\nnameserver 127.0.0.53\nnameserver 192.0.2.2\nnameserver fe80::1\nnameserver 192.0.2.53\n\
                    search example.org\noptions edns0\n";
        let servers = name_servers(text);
        assert_eq!(servers.len(), 3, "{servers:?}");
        let host = host();
        let reachable = |server: &Ipv4Addr| is_a_host(*server) && !host.has_address(*server);
        let reachable: Vec<_> = servers.into_iter().filter(reachable).collect();
        assert_eq!(reachable, ["192.0.2.53".parse::<Ipv4Addr>().unwrap()]);
    }
}
