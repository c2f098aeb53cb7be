//! The packet filter's rules as one text for `nft`, which takes it whole or not at all. Pure.
//!
//! A table is made for each daemon and replaced as a whole whenever an Instance comes or goes, in one transaction: there
//! is no moment without rules, and nothing of an older table can be left in it. What the rules promise is in
//! `docs/network.md`.

use std::fmt::Write as _;

use ipnet::Ipv4Net;
use kibo_crds::NodeId;

use super::plan::{DaemonId, Mac, Range, TAP_PREFIX, TapName, closed};
use crate::launch::Egress;

const TABLE_PREFIX: &str = "kibotos_";

/// A guest as the rules see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    pub tap: TapName,
    pub mac: Mac,
    pub address: std::net::Ipv4Addr,
    pub egress: Egress,
}

/// Everything that one daemon's table says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    pub node: NodeId,
    pub daemon: DaemonId,
    pub range: Range,
    /// Interfaces that lead out of this host.
    pub uplinks: Vec<String>,
    /// The host forwards nothing by itself: what comes in by an uplink then leads to guests only, though the uplinks
    /// forward for their sake.
    pub guard_uplinks: bool,
    pub guests: Vec<Guest>,
}

impl Rules {
    pub fn table(&self) -> Table {
        Table::of(&self.daemon, self.range)
    }

    /// The transaction that puts these rules in the place of `old` tables of this daemon.
    pub fn replace(&self, old: &[Table]) -> String {
        let own = self.table();
        let others: Vec<Table> = old.iter().filter(|table| **table != own).cloned().collect();
        // Deleting a table that is not there would fail; adding one that is there does not.
        format!("add table inet {own}\n{}{}{}", remove(&others), remove(std::slice::from_ref(&own)), self.render())
    }

    fn render(&self) -> String {
        let Self { node, range, .. } = self;
        let table = self.table();
        let own = format!("{}*", self.daemon.tap_prefix());
        let guests: Vec<String> =
            self.guests.iter().map(|it| format!("{:?} . {} . {}", it.tap.as_str(), it.mac, it.address)).collect();
        let policies: Vec<String> =
            self.guests.iter().map(|it| format!("{:?} : goto {}", it.tap.as_str(), chain(it.egress))).collect();
        let uplinks: Vec<String> = self.uplinks.iter().map(|name| format!("{name:?}")).collect();
        let closed: Vec<String> = closed(*range).iter().map(Ipv4Net::to_string).collect();
        let guests = elements(&guests);
        let policies = elements(&policies);
        let uplinks = elements(&uplinks);
        let closed = elements(&closed);
        let guard = if self.guard_uplinks {
            format!("\n\t\tiifname @uplinks oifname != \"{TAP_PREFIX}*\" drop")
        } else {
            String::new()
        };
        format!(
            r#"table inet {table} {{
	comment "guests of node {node}"
	set guests {{
		type ifname . ether_addr . ipv4_addr{guests}
	}}
	set uplinks {{
		type ifname{uplinks}
	}}
	set closed {{
		type ipv4_addr
		flags interval{closed}
	}}
	chain egress_allow {{
		accept
	}}
	chain egress_deny {{
		drop
	}}
	map policies {{
		type ifname : verdict{policies}
	}}
	chain prerouting {{
		type filter hook prerouting priority raw; policy accept;
		iifname "{own}" goto from_guest
	}}
	chain from_guest {{
		meta nfproto != ipv4 drop
		iifname . ether saddr . ip saddr != @guests drop
		ip daddr @closed drop
		fib daddr type != unicast drop
	}}
	chain input {{
		type filter hook input priority filter; policy accept;
		iifname "{own}" drop
	}}
	chain output {{
		type filter hook output priority filter; policy accept;
		oifname "{own}" ct state != {{ established, related }} drop
	}}
	chain forward {{
		type filter hook forward priority filter; policy accept;
		iifname "{own}" goto outward
		oifname "{own}" goto inward{guard}
	}}
	chain outward {{
		oifname "{TAP_PREFIX}*" drop
		oifname != @uplinks drop
		iifname vmap @policies
		drop
	}}
	chain inward {{
		iifname @uplinks ct state {{ established, related }} accept
		drop
	}}
	chain postrouting {{
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr {range} oifname @uplinks masquerade
	}}
}}
"#
        )
    }
}

/// A transaction that removes tables, which must exist.
pub fn remove(tables: &[Table]) -> String {
    tables.iter().fold(String::new(), |mut text, table| {
        let _ = writeln!(text, "delete table inet {table}");
        text
    })
}

/// The place of the policies: a chain for each, in which what a guest sends out ends.
fn chain(egress: Egress) -> &'static str {
    match egress {
        Egress::Allow => "egress_allow",
        Egress::Deny => "egress_deny",
    }
}

/// nft knows no empty list.
fn elements(all: &[String]) -> String {
    if all.is_empty() { String::new() } else { format!("\n\t\telements = {{ {} }}", all.join(", ")) }
}

/// The name of a daemon's table, which says to all others whose it is and which range is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    name: String,
    pub daemon: String,
    pub range: Ipv4Net,
}

impl Table {
    pub fn of(daemon: &DaemonId, range: Range) -> Self {
        let net = range.net();
        let name = format!("{TABLE_PREFIX}{}_{}_{}", daemon.as_str(), net.network(), net.prefix_len());
        Self { name, daemon: daemon.as_str().to_owned(), range: net }
    }

    /// The table of some daemon, by its name; `None` for all other tables.
    pub fn parse(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix(TABLE_PREFIX)?.split('_');
        let (daemon, address, prefix) = (parts.next()?, parts.next()?, parts.next()?);
        let range = Ipv4Net::new(address.parse().ok()?, prefix.parse().ok()?).ok()?;
        (daemon.len() == DaemonId::LEN && parts.next().is_none()).then(|| Self {
            name: name.to_owned(),
            daemon: daemon.to_owned(),
            range,
        })
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.name)
    }
}
