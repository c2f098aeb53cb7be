//! The cable of a guest: a tap that lives as long as somebody holds its descriptor, which is QEMU.
//!
//! So it goes with its VM, whatever happened to the daemon, and it outlives the daemon as its VM does.

use std::{
    ffi::c_int,
    fs::{File, OpenOptions},
    io,
    net::Ipv4Addr,
    os::fd::OwnedFd,
};

use futures::TryStreamExt as _;
use rtnetlink::{Handle, LinkUnspec, RouteMessageBuilder, packet_route::route::RouteScope};
use rustix::ioctl::{Setter, ioctl, opcode};

use super::{host, plan::TapName};

const TUN: &str = "/dev/net/tun";
const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;
/// Fail when there is an interface of that name, instead of joining it.
const IFF_TUN_EXCL: u16 = 0x8000;
const NAME_SIZE: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum TapError {
    #[error("failed to make the tap {name} with {TUN}: {source}")]
    Make { name: String, source: io::Error },
    #[error("failed to set up the tap {name}: {source}")]
    Switch { name: String, source: io::Error },
    #[error("failed to {what} of the tap {name}: {source}")]
    Netlink { what: &'static str, name: String, source: rtnetlink::Error },
}

/// The kernel's `struct ifreq`, as far as TUNSETIFF reads and writes it.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; NAME_SIZE],
    flags: u16,
    unused: [u8; 22],
}

/// One guest's cable.
pub struct Shape<'a> {
    pub name: &'a TapName,
    pub guest: Ipv4Addr,
    /// The host's end.
    pub gateway: Ipv4Addr,
    pub mtu: u32,
}

/// Makes a tap, ready for traffic. The rules must stand.
pub async fn make(netlink: &Handle, shape: &Shape<'_>) -> Result<OwnedFd, TapError> {
    let name = shape.name.as_str();
    let file = open(name).map_err(|source| TapError::Make { name: name.to_owned(), source })?;
    host::harden_tap(name).map_err(|source| TapError::Switch { name: name.to_owned(), source })?;
    let failed = |what| move |source| TapError::Netlink { what, name: name.to_owned(), source };
    let index = index(netlink, name).await.map_err(failed("find the interface"))?;
    let address = netlink.address().add(index, shape.gateway.into(), 32);
    address.execute().await.map_err(failed("set the address"))?;
    let up = LinkUnspec::new_with_index(index).mtu(shape.mtu).up().build();
    netlink.link().change(up).execute().await.map_err(failed("set the MTU and state"))?;
    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(shape.guest, 32)
        .output_interface(index)
        .pref_source(shape.gateway)
        .scope(RouteScope::Link)
        .build();
    netlink.route().add(route).execute().await.map_err(failed("add the route"))?;
    Ok(file.into())
}

fn open(name: &str) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(TUN)?;
    let mut request = InterfaceRequest {
        name: [0; NAME_SIZE],
        flags: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | IFF_TUN_EXCL,
        unused: [0; 22],
    };
    let bytes = name.as_bytes();
    // The last byte ends the name.
    let place = request.name[..NAME_SIZE - 1].get_mut(..bytes.len());
    place.ok_or_else(|| io::Error::other("the name is too long"))?.copy_from_slice(bytes);
    set_interface(&file, request)?;
    Ok(file)
}

#[expect(unsafe_code, reason = "an ioctl that no crate has without a whole device stack around it")]
fn set_interface(file: &File, request: InterfaceRequest) -> rustix::io::Result<()> {
    // The kernel's header names the type int for what is a pointer to an ifreq.
    const TUNSETIFF: rustix::ioctl::Opcode = opcode::write::<c_int>(b'T', 202);
    // SAFETY: TUNSETIFF copies one ifreq in and out, 40 bytes on 64-bit machines, and `InterfaceRequest` is as large.
    unsafe { ioctl(file, Setter::<TUNSETIFF, InterfaceRequest>::new(request)) }
}

async fn index(netlink: &Handle, name: &str) -> Result<u32, rtnetlink::Error> {
    let found = netlink.link().get().match_name(name.to_owned()).execute().try_next().await?;
    found.map(|link| link.header.index).ok_or(rtnetlink::Error::RequestFailed)
}
