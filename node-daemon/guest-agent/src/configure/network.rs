//! The guest's one network interface, by netlink.

use std::fs;
use std::io;
use std::net::IpAddr;

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use crate::request::Network;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the guest has no network interface")]
    NoInterface,
    #[error("failed to find the network interface: {0}")]
    Find(io::Error),
    #[error("failed to open a netlink socket: {0}")]
    Socket(io::Error),
    #[error("failed to {what}: {source}")]
    Request { what: String, source: io::Error },
}

/// The loopback interface, which every guest has.
pub fn set_up_loopback() -> Result<(), Error> {
    let loopback = interface_index("lo").map_err(Error::Find)?;
    Netlink::open()?.bring_up(loopback, "lo")
}

pub fn set_up(network: &Network) -> Result<(), Error> {
    let (name, index) = first_interface()?;
    let mut netlink = Netlink::open()?;
    if let Some(mac) = network.mac {
        let attribute = LinkAttribute::Address(mac.to_vec());
        netlink.set_link(index, vec![attribute], LinkFlags::empty(), format!("set the MAC address of {name}"))?;
    }
    if let Some(mtu) = network.mtu {
        let attribute = LinkAttribute::Mtu(mtu);
        netlink.set_link(index, vec![attribute], LinkFlags::empty(), format!("set the MTU of {name} to {mtu}"))?;
    }
    netlink.bring_up(index, &name)?;
    netlink.add_address(index, network.address, network.prefix_length)?;
    network.gateway.map_or(Ok(()), |gateway| netlink.add_default_route(index, gateway))
}

fn first_interface() -> Result<(String, u32), Error> {
    let mut names: Vec<String> = fs::read_dir("/sys/class/net")
        .map_err(Error::Find)?
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name != "lo")
        .collect();
    names.sort();
    let name = names.into_iter().next().ok_or(Error::NoInterface)?;
    let index = interface_index(&name).map_err(Error::Find)?;
    Ok((name, index))
}

fn interface_index(name: &str) -> io::Result<u32> {
    let text = fs::read_to_string(format!("/sys/class/net/{name}/ifindex"))?;
    text.trim().parse().map_err(|_| io::Error::other(format!("{text:?} is no interface index")))
}

struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    fn open() -> Result<Self, Error> {
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(Error::Socket)?;
        socket.bind_auto().map_err(Error::Socket)?;
        socket.connect(&SocketAddr::new(0, 0)).map_err(Error::Socket)?;
        Ok(Self { socket, sequence: 0 })
    }

    fn bring_up(&mut self, index: u32, name: &str) -> Result<(), Error> {
        self.set_link(index, Vec::new(), LinkFlags::Up, format!("bring {name} up"))
    }

    fn set_link(
        &mut self,
        index: u32,
        attributes: Vec<LinkAttribute>,
        flags: LinkFlags,
        what: String,
    ) -> Result<(), Error> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = flags;
        message.header.change_mask = flags;
        message.attributes = attributes;
        self.request(RouteNetlinkMessage::SetLink(message), 0, what)
    }

    fn add_address(&mut self, index: u32, address: IpAddr, prefix_length: u8) -> Result<(), Error> {
        let mut message = AddressMessage::default();
        message.header.family = family(address);
        message.header.prefix_len = prefix_length;
        message.header.index = index;
        message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
        let what = format!("add the address {address}/{prefix_length}");
        self.request(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_REPLACE, what)
    }

    fn add_default_route(&mut self, index: u32, gateway: IpAddr) -> Result<(), Error> {
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: family(gateway),
            table: RouteHeader::RT_TABLE_MAIN,
            protocol: RouteProtocol::Boot,
            scope: RouteScope::Universe,
            kind: RouteType::Unicast,
            ..RouteHeader::default()
        };
        message.attributes = vec![RouteAttribute::Gateway(RouteAddress::from(gateway)), RouteAttribute::Oif(index)];
        let what = format!("add the default route by {gateway}");
        self.request(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_REPLACE, what)
    }

    /// Sends a request and waits for the kernel's word on it, which comes at once.
    fn request(&mut self, message: RouteNetlinkMessage, flags: u16, what: String) -> Result<(), Error> {
        self.sequence += 1;
        let mut packet = NetlinkMessage::from(message);
        packet.header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        packet.header.sequence_number = self.sequence;
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        self.exchange(&bytes).map_err(|source| Error::Request { what, source })
    }

    fn exchange(&self, request: &[u8]) -> io::Result<()> {
        self.socket.send(request, 0)?;
        let (reply, _) = self.socket.recv_from_full()?;
        let reply = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&reply).map_err(io::Error::other)?;
        match reply.payload {
            NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
            NetlinkPayload::Error(_) => Ok(()),
            other => Err(io::Error::other(format!("the kernel answered {other:?}"))),
        }
    }
}

const fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}
