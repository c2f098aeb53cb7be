//! The network of the guests: an address, a cable and the rules for each.
//!
//! Each Instance has a tap of its own that is routed, not bridged: to a guest there is only the gateway, which is the
//! host's end of its cable, and what the host forwards to the outside. What is allowed is in [`rules`], and stands before
//! the tap does, which is before the guest runs. An address is in the Instance's record before it is used, and free when
//! the Instance's process is reaped; which ones are taken is known by listing alone.

mod host;
mod nft;
mod plan;
mod rules;
mod tap;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::Ipv4Addr,
    os::fd::OwnedFd,
    path::Path,
    sync::Arc,
};

use ipnet::Ipv4Net;
use kibo_crds::{InstanceId, NodeId};
use rtnetlink::Handle;
use tokio::sync::{Mutex, MutexGuard};

use crate::{
    config::{InterfaceName, NetworkConfig},
    launch::Egress,
};
use host::{Host, Kind};
use nft::{Nft, NftError};
use plan::DaemonId;
use rules::{Guest, Rules, Table};
use tap::{Shape, TapError};

pub use plan::{Mac, Range, TAP_PREFIX, TapName, is_a_host};

/// Where neither the configuration nor an uplink says it.
const DEFAULT_MTU: u32 = 1500;

#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error("failed to ask the kernel for the host's network: {0}")]
    Netlink(rtnetlink::Error),
    #[error("failed to open a netlink socket: {0}")]
    Socket(io::Error),
    #[error(transparent)]
    Nft(#[from] NftError),
    #[error(transparent)]
    Tap(#[from] TapError),
    #[error("failed to switch forwarding: {0}")]
    Forwarding(io::Error),
    #[error(
        "network.range = {range}: overlaps {what} {net} of {interface} on this host: choose a range that nobody uses there"
    )]
    HostHasRange { range: Range, what: &'static str, net: Ipv4Net, interface: String },
    #[error(
        "network.range = {range}: another node-daemon on this host has {theirs} (nft table {table}): choose another range, \
         or remove that table if its daemon is gone for good"
    )]
    OtherDaemonHasRange { range: Range, theirs: Ipv4Net, table: String },
    #[error("network.uplinks: this host has no interface {0:?}")]
    NoUplink(String),
    #[error(
        "network.range = {range}: {instance} still has the address {address}, which is no guest's of this range: give the \
         old range back until it has ended"
    )]
    OutsideRange { range: Range, instance: InstanceId, address: Ipv4Addr },
    #[error("all {0} addresses of network.range are taken: give the node a larger range, or fewer max_instances")]
    Exhausted(u32),
    #[error("{0} has no address")]
    Unknown(InstanceId),
    #[error("{0} guests still have a network: stop them first")]
    InUse(usize),
}

/// What a guest is told of its network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestNetwork {
    pub mac: Mac,
    pub address: Ipv4Addr,
    pub prefix_length: u8,
    /// Absent: the guest may not go out.
    pub gateway: Option<Ipv4Addr>,
    pub dns_servers: Vec<Ipv4Addr>,
    pub mtu: u32,
}

/// The network of this node's guests. Cheap to clone.
#[derive(Clone)]
pub struct Network(Arc<Inner>);

struct Inner {
    config: NetworkConfig,
    node: NodeId,
    daemon: DaemonId,
    nft: Nft,
    netlink: Handle,
    state: Mutex<State>,
}

/// Held while the rules are replaced, so that they are always of the newest state.
#[derive(Default)]
struct State {
    guests: BTreeMap<InstanceId, Assigned>,
    /// Tables of an earlier configuration of this daemon; they go with the next replacement.
    stale: Vec<Table>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assigned {
    pub address: Ipv4Addr,
    pub egress: Egress,
}

impl Network {
    /// Looks whether the host has room for the configured range. Changes nothing yet. Needs a tokio runtime.
    pub async fn open(config: NetworkConfig, node: NodeId, state_dir: &Path) -> Result<Self, NetworkError> {
        let network = Self::new(config, node, state_dir)?;
        let inner = &network.0;
        inner.check_tables().await?;
        if let Err(error) = inner.check_host().await {
            // What came to the host while guests have the range is no reason to leave them without their daemon.
            if !inner.own_tables().await?.contains(&Table::of(&inner.daemon, inner.config.range)) {
                return Err(error);
            }
            tracing::error!(%error, "the host has changed; guests that run keep their network as it is");
        }
        Ok(network)
    }

    /// Without a look at the host. Needs a tokio runtime.
    pub fn new(config: NetworkConfig, node: NodeId, state_dir: &Path) -> Result<Self, NetworkError> {
        let (connection, netlink, _) = rtnetlink::new_connection().map_err(NetworkError::Socket)?;
        tokio::spawn(connection);
        let daemon = DaemonId::of(&node, state_dir);
        let nft = Nft::new(config.nft.clone());
        Ok(Self(Arc::new(Inner { config, node, daemon, nft, netlink, state: Mutex::default() })))
    }

    pub fn config(&self) -> &NetworkConfig {
        &self.0.config
    }

    /// Takes up what an earlier daemon left, by the records of all Instances: their rules are made anew in the place of
    /// the old ones, and from then on the range is this daemon's.
    pub async fn restore(&self, guests: BTreeMap<InstanceId, Assigned>) -> Result<(), NetworkError> {
        let inner = &self.0;
        let range = inner.config.range;
        if let Some((instance, assigned)) = guests.iter().find(|(_, it)| !range.is_of_a_guest(it.address)) {
            return Err(NetworkError::OutsideRange { range, instance: *instance, address: assigned.address });
        }
        let mut state = inner.state.lock().await;
        state.stale = inner.own_tables().await?;
        let is_new = state.stale.is_empty();
        state.guests = guests;
        inner.replace(&mut state).await?;
        // Of two daemons that looked at the same moment, at least one sees the other's table now.
        let conflict = inner.check_tables().await;
        if conflict.is_err() && is_new {
            inner.remove_own_tables().await?;
        }
        conflict
    }

    /// The same for one Instance whose record could not be read then.
    pub async fn adopt(&self, instance: InstanceId, assigned: Assigned) -> Result<(), NetworkError> {
        let mut state = self.0.state.lock().await;
        if state.guests.insert(instance, assigned) != Some(assigned) {
            self.0.replace(&mut state).await?;
        }
        Ok(())
    }

    /// An address for an Instance, the same when it is asked for again.
    pub async fn assign(&self, instance: InstanceId, egress: Egress) -> Result<Ipv4Addr, NetworkError> {
        let mut state = self.0.state.lock().await;
        if let Some(assigned) = state.guests.get_mut(&instance) {
            assigned.egress = egress;
            return Ok(assigned.address);
        }
        let host = Host::look().await?;
        // Also those of guests whose records could not be read: their taps are there.
        let prefix = self.0.daemon.tap_prefix();
        let taken: BTreeSet<Ipv4Addr> =
            state.guests.values().map(|it| it.address).chain(host.guests(&prefix)).collect();
        let range = self.0.config.range;
        let address = range.allocate(instance, &taken).ok_or(NetworkError::Exhausted(range.capacity()))?;
        state.guests.insert(instance, Assigned { address, egress });
        Ok(address)
    }

    /// Makes rules and cable of an Instance that has an address, in this order. The cable goes when its descriptor is
    /// closed.
    pub async fn attach(&self, instance: InstanceId) -> Result<OwnedFd, NetworkError> {
        let inner = &self.0;
        let (guest, host) = {
            let mut state = inner.state.lock().await;
            let guest = state.guests.get(&instance).copied().ok_or(NetworkError::Unknown(instance))?;
            (guest, inner.replace(&mut state).await?)
        };
        // From here on every replacement has this guest's rules too.
        kibo_failpoint::reach("rules-made").await;
        let name = TapName::of(&inner.daemon, instance);
        let mtu = inner.mtu(&host);
        let shape = Shape { name: &name, guest: guest.address, gateway: inner.config.range.gateway(), mtu };
        Ok(tap::make(&inner.netlink, &shape).await?)
    }

    /// What the guest is to be told.
    pub async fn guest(&self, instance: InstanceId) -> Result<GuestNetwork, NetworkError> {
        let inner = &self.0;
        let guest = inner.state.lock().await.guests.get(&instance).copied().ok_or(NetworkError::Unknown(instance))?;
        let host = Host::look().await?;
        let mtu = inner.mtu(&host);
        let range = inner.config.range;
        let (gateway, dns_servers) = match guest.egress {
            Egress::Deny => (None, Vec::new()),
            Egress::Allow => {
                let configured = inner.config.dns_servers.as_ref();
                (Some(range.gateway()), configured.map_or_else(|| host::resolvers(&host), Clone::clone))
            }
        };
        let (mac, address, prefix_length) = (Mac::of(instance), guest.address, range.prefix_length());
        Ok(GuestNetwork { mac, address, prefix_length, gateway, dns_servers, mtu })
    }

    /// Takes the rules of an Instance away and gives its address back. Its process must be reaped. Idempotent.
    pub async fn detach(&self, instance: InstanceId) -> Result<(), NetworkError> {
        let mut state = self.0.state.lock().await;
        let Some(assigned) = state.guests.remove(&instance) else { return Ok(()) };
        if let Err(error) = self.0.replace(&mut state).await {
            // Until its rules are gone its address is not free.
            state.guests.insert(instance, assigned);
            return Err(error);
        }
        Ok(())
    }

    /// Takes the rules off the host; for the end of a daemon that leaves no Instance behind.
    pub async fn close(&self) -> Result<(), NetworkError> {
        let inner = &self.0;
        let state: MutexGuard<'_, State> = inner.state.lock().await;
        let host = Host::look().await?;
        // A tap without rules would be a way to this host.
        let prefix = inner.daemon.tap_prefix();
        let taps = host.links.keys().filter(|name| name.starts_with(&prefix)).count();
        if !state.guests.is_empty() || taps > 0 {
            return Err(NetworkError::InUse(state.guests.len().max(taps)));
        }
        inner.remove_own_tables().await?;
        // Another daemon's guests need the uplinks; and who forwards for everybody has not asked us.
        let others = inner.nft.tables().await?;
        if !others.is_empty() || host::forwards().map_err(NetworkError::Forwarding)? {
            return Ok(());
        }
        for uplink in inner.uplinks(&host) {
            host::set_forwarding(&uplink, false).map_err(NetworkError::Forwarding)?;
        }
        Ok(())
    }
}

impl Inner {
    /// Whether range and uplinks of the configuration fit the host.
    async fn check_host(&self) -> Result<(), NetworkError> {
        let host = Host::look().await?;
        let range = self.config.range;
        if let Some(known) = host.conflict(range, &self.daemon.tap_prefix()) {
            let what = if known.kind == Kind::Address { "the address" } else { "the route" };
            let (net, interface) = (known.net, known.interface.clone());
            return Err(NetworkError::HostHasRange { range, what, net, interface });
        }
        let is_missing = |name: &&InterfaceName| !host.links.contains_key(name.as_str());
        if let Some(missing) = self.config.uplinks.iter().find(is_missing) {
            return Err(NetworkError::NoUplink(missing.to_string()));
        }
        if self.uplinks(&host).is_empty() {
            tracing::warn!("this host has no default route and network.uplinks names none: guests reach nothing");
        }
        if self.config.dns_servers.is_none() && host::resolvers(&host).is_empty() {
            tracing::warn!(
                "no DNS server for guests: those in the host's resolv.conf are on the host, where guests cannot go; \
                 give network.dns_servers"
            );
        }
        Ok(())
    }

    /// Whether another daemon has addresses of this range.
    async fn check_tables(&self) -> Result<(), NetworkError> {
        let range = self.config.range;
        let tables = self.nft.tables().await?;
        let other = tables.into_iter().filter(|table| table.daemon != self.daemon.as_str());
        match other.into_iter().find(|table| plan::overlap(table.range, range.net())) {
            None => Ok(()),
            Some(table) => {
                Err(NetworkError::OtherDaemonHasRange { range, theirs: table.range, table: table.to_string() })
            }
        }
    }

    async fn own_tables(&self) -> Result<Vec<Table>, NetworkError> {
        let tables = self.nft.tables().await?;
        Ok(tables.into_iter().filter(|table| table.daemon == self.daemon.as_str()).collect())
    }

    async fn remove_own_tables(&self) -> Result<(), NetworkError> {
        let own = self.own_tables().await?;
        if own.is_empty() { Ok(()) } else { Ok(self.nft.apply(&rules::remove(&own)).await?) }
    }

    fn uplinks(&self, host: &Host) -> Vec<String> {
        if self.config.uplinks.is_empty() {
            return host.uplinks();
        }
        self.config.uplinks.iter().map(ToString::to_string).collect()
    }

    fn mtu(&self, host: &Host) -> u32 {
        self.config.mtu.or_else(|| host.mtu(&self.uplinks(host))).unwrap_or(DEFAULT_MTU)
    }

    /// Puts the rules of the present state in the place of those that are there, and lets the uplinks forward. The host
    /// is looked at again each time: a default route may have come or gone.
    async fn replace(&self, state: &mut State) -> Result<Host, NetworkError> {
        let host = Host::look().await?;
        let uplinks = self.uplinks(&host);
        let guests = state.guests.iter().map(|(instance, assigned)| Guest {
            tap: TapName::of(&self.daemon, *instance),
            mac: Mac::of(*instance),
            address: assigned.address,
            egress: assigned.egress,
        });
        let rules = Rules {
            node: self.node.clone(),
            daemon: self.daemon.clone(),
            range: self.config.range,
            uplinks: uplinks.clone(),
            guard_uplinks: !host::forwards().map_err(NetworkError::Forwarding)?,
            guests: guests.collect(),
        };
        self.nft.apply(&rules.replace(&state.stale)).await?;
        state.stale.clear();
        for uplink in uplinks {
            host::set_forwarding(&uplink, true).map_err(NetworkError::Forwarding)?;
        }
        Ok(host)
    }
}
