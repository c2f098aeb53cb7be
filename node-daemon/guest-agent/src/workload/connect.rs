//! TCP connections to servers in the Workspace.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use kibo_guest_protocol::v1::{StartFailure, StartFailureReason};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use super::start_failure;

/// A connection that is being made.
#[derive(Debug)]
pub struct Connecting {
    socket: OwnedFd,
    port: u16,
    /// What to try when this address refuses.
    next: &'static [IpAddr],
    first_error: Option<Errno>,
}

/// Where it is.
#[derive(Debug)]
pub enum Progress {
    Waiting(Connecting),
    Connected(Rc<OwnedFd>),
    Failed(StartFailure),
}

const ADDRESSES: &[IpAddr] = &[IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

impl Connecting {
    pub fn begin(port: u32) -> Result<Progress, StartFailure> {
        match u16::try_from(port) {
            Ok(port) if port > 0 => Ok(attempt(port, ADDRESSES, None)),
            _ => {
                let message = format!("{port} is no port: give one from 1 to 65535");
                Err(start_failure(StartFailureReason::Invalid, message))
            }
        }
    }

    pub fn interest(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The kernel has an answer.
    pub fn go_on(self) -> Progress {
        match sockopt::socket_error(&self.socket) {
            Ok(Ok(())) => connected(self.socket),
            Ok(Err(errno)) | Err(errno) => attempt(self.port, self.next, self.first_error.or(Some(errno))),
        }
    }
}

/// Tries the addresses until one takes its time.
fn attempt(port: u16, addresses: &'static [IpAddr], mut first_error: Option<Errno>) -> Progress {
    for (index, address) in addresses.iter().enumerate() {
        let next = &addresses[index + 1..];
        match open(*address, port) {
            Ok((socket, true)) => return connected(socket),
            Ok((socket, false)) => return Progress::Waiting(Connecting { socket, port, next, first_error }),
            // A kernel without IPv6 is no news; what the first address said is.
            Err(errno) => first_error = first_error.or(Some(errno)),
        }
    }
    Progress::Failed(explain(port, first_error.unwrap_or(Errno::CONNREFUSED)))
}

/// A socket, and whether it is connected already.
fn open(address: IpAddr, port: u16) -> Result<(OwnedFd, bool), Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match connect(&socket, &SocketAddr::new(address, port)) {
        Ok(()) => Ok((socket, true)),
        Err(Errno::INPROGRESS | Errno::INTR) => Ok((socket, false)),
        Err(errno) => Err(errno),
    }
}

fn connected(socket: OwnedFd) -> Progress {
    // What comes was gathered on its way already. A socket that is reset by now says so when it is read.
    let _ = sockopt::set_tcp_nodelay(&socket, true);
    Progress::Connected(Rc::new(socket))
}

fn explain(port: u16, errno: Errno) -> StartFailure {
    if errno == Errno::CONNREFUSED {
        let message = format!(
            "nothing listens on port {port} of the workspace: start the server there, on 127.0.0.1 or on all addresses"
        );
        return start_failure(StartFailureReason::Refused, message);
    }
    start_failure(StartFailureReason::Other, format!("failed to connect to port {port} of the workspace: {errno}"))
}
