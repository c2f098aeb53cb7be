//! Who gets which address and name. Pure: everything follows from the daemon's range and identity, the Instance's id and
//! the addresses that are taken.

use std::{collections::BTreeSet, fmt, net::Ipv4Addr, path::Path, str::FromStr};

use ipnet::Ipv4Net;
use kibo_crds::{InstanceId, NodeId};
use sha2::{Digest as _, Sha256};

/// Taps of every daemon begin so, in the names of the host's interfaces.
pub const TAP_PREFIX: &str = "kt";
/// Offset of the gateway in the range; offset 0 names the range, the last address is its broadcast.
const GATEWAY: u32 = 1;
const FIRST_GUEST: u32 = 2;
/// A smaller range has no room for a guest, a larger one is a typing error.
const PREFIX_LENGTHS: std::ops::RangeInclusive<u8> = 8..=30;

/// Addresses that mean something else than one host somewhere.
const NO_HOSTS: [Ipv4Net; 5] = [
    net(Ipv4Addr::UNSPECIFIED, 8),
    net(Ipv4Addr::new(127, 0, 0, 0), 8),
    net(Ipv4Addr::new(169, 254, 0, 0), 16),
    net(Ipv4Addr::new(224, 0, 0, 0), 4),
    net(Ipv4Addr::new(240, 0, 0, 0), 4),
];

const fn net(address: Ipv4Addr, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(address, prefix)
}

/// What no guest may send to, wherever it leads on this host.
pub fn closed(range: Range) -> Vec<Ipv4Net> {
    let mut closed = Ipv4Net::aggregate(&[NO_HOSTS.as_slice(), &[range.0]].concat());
    closed.sort_unstable();
    closed
}

/// Whether a guest could reach a server there, were it not for this host's own addresses.
pub fn is_a_host(address: Ipv4Addr) -> bool {
    !NO_HOSTS.iter().any(|net| net.contains(&address))
}

/// The addresses of one node's guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range(Ipv4Net);

impl Range {
    pub fn net(self) -> Ipv4Net {
        self.0
    }

    pub fn prefix_length(self) -> u8 {
        self.0.prefix_len()
    }

    /// The host's end of every tap.
    pub fn gateway(self) -> Ipv4Addr {
        self.at(GATEWAY)
    }

    /// How many guests can have an address at once.
    pub fn capacity(self) -> u32 {
        self.size() - FIRST_GUEST - 1
    }

    /// Whether a guest may have this address.
    pub fn is_of_a_guest(self, address: Ipv4Addr) -> bool {
        self.0.contains(&address)
            && (FIRST_GUEST..self.size() - 1).contains(&(u32::from(address) - u32::from(self.0.network())))
    }

    /// An address that is not taken; none when all are. Where the search begins follows from the Instance, so that an
    /// address is not given again soon after it became free: what is still sent to its last guest would reach the next.
    pub fn allocate(self, instance: InstanceId, taken: &BTreeSet<Ipv4Addr>) -> Option<Ipv4Addr> {
        let capacity = self.capacity();
        let begin = u32::from_be_bytes(first(&digest(&instance.to_string()))) % capacity;
        (0..capacity)
            .map(|step| self.at(FIRST_GUEST + (begin + step) % capacity))
            .find(|address| !taken.contains(address))
    }

    fn size(self) -> u32 {
        1 << (32 - self.0.prefix_len())
    }

    fn at(self, offset: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.0.network()) + offset)
    }
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let net: Ipv4Net = text.parse().map_err(|_| "must be an IPv4 range like 10.77.0.0/16".to_owned())?;
        if !PREFIX_LENGTHS.contains(&net.prefix_len()) {
            let (least, most) = (PREFIX_LENGTHS.start(), PREFIX_LENGTHS.end());
            return Err(format!("its prefix must be between /{least} and /{most}"));
        }
        if net.addr() != net.network() {
            return Err(format!("must begin with its first address: {}", net.trunc()));
        }
        if let Some(other) = NO_HOSTS.iter().find(|other| overlap(**other, net)) {
            return Err(format!("must not overlap {other}, which is not for hosts"));
        }
        Ok(Self(net))
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Two ranges share an address exactly when one contains the other.
pub fn overlap(one: Ipv4Net, other: Ipv4Net) -> bool {
    one.contains(&other) || other.contains(&one)
}

/// Tells the interfaces and rules of this daemon from those of any other on the host: 25 bits, 5 characters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DaemonId(String);

impl DaemonId {
    pub const LEN: usize = 5;

    /// The same for every daemon of this node and state directory: one that starts finds what the last one made.
    pub fn of(node: &NodeId, state_dir: &Path) -> Self {
        const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
        let digest = digest(&format!("{node}\0{}", state_dir.display()));
        Self(digest[..Self::LEN].iter().map(|byte| char::from(ALPHABET[usize::from(byte % 32)])).collect())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// How the names of this daemon's taps begin.
    pub fn tap_prefix(&self) -> String {
        format!("{TAP_PREFIX}{}", self.0)
    }
}

/// Name of the interface of one Instance on the host: at most the kernel's 15 bytes, with the end of the Instance's id,
/// which is its random part.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TapName(String);

impl TapName {
    pub fn of(daemon: &DaemonId, instance: InstanceId) -> Self {
        const FROM_INSTANCE: usize = 8;
        let instance = instance.to_string();
        Self(format!("{}{}", daemon.tap_prefix(), &instance[instance.len() - FROM_INSTANCE..]))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TapName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Address of a guest's network card: of one host, locally administered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac([u8; 6]);

impl Mac {
    /// Must never change: a daemon of a later version finds guests that have it.
    pub fn of(instance: InstanceId) -> Self {
        let mut mac: [u8; 6] = first(&digest(&format!("{instance}\0mac")));
        mac[0] = mac[0] & 0b1111_1100 | 0b10;
        Self(mac)
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.map(|byte| format!("{byte:02x}"));
        f.pad(&bytes.join(":"))
    }
}

fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text).into()
}

fn first<const N: usize>(digest: &[u8; 32]) -> [u8; N] {
    std::array::from_fn(|index| digest[index])
}
