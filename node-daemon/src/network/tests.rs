use std::{collections::BTreeSet, net::Ipv4Addr, path::Path};

use kibo_crds::InstanceId;
use proptest::prelude::*;

use super::{
    host::Host,
    plan::{DaemonId, Mac, Range, TapName, closed, overlap},
    rules::{Guest, Rules, Table, remove},
};
use crate::launch::Egress;

fn range(text: &str) -> Range {
    text.parse().unwrap()
}

fn daemon(state_dir: &str) -> DaemonId {
    DaemonId::of(&"node-1".parse().unwrap(), Path::new(state_dir))
}

#[test]
fn a_range_that_cannot_be_is_refused_with_its_rule() {
    for (text, rule) in [
        ("10.77.0.0", "must be an IPv4 range"),
        ("fd00::/64", "must be an IPv4 range"),
        ("10.77.0.0/33", "must be an IPv4 range"),
        ("10.77.0.0/31", "between /8 and /30"),
        ("0.0.0.0/0", "between /8 and /30"),
        ("10.77.3.0/16", "must begin with its first address: 10.77.0.0/16"),
        ("127.0.0.0/16", "must not overlap 127.0.0.0/8"),
        ("169.254.0.0/16", "must not overlap 169.254.0.0/16"),
        ("224.0.0.0/8", "must not overlap 224.0.0.0/4"),
    ] {
        let error = text.parse::<Range>().unwrap_err();
        assert!(error.contains(rule), "{text}: {error}");
    }
}

#[test]
fn the_smallest_range_has_one_guest() {
    let range = range("10.77.0.0/30");
    let instance = InstanceId::generate();
    assert_eq!(range.gateway(), Ipv4Addr::new(10, 77, 0, 1));
    assert_eq!((range.capacity(), range.allocate(instance, &BTreeSet::new())), (1, Some(Ipv4Addr::new(10, 77, 0, 2))));
    assert_eq!(range.allocate(instance, &[Ipv4Addr::new(10, 77, 0, 2)].into()), None);
}

#[test]
fn every_address_of_a_range_is_given_once_and_none_beyond() {
    let range = range("10.77.0.0/24");
    let mut taken = BTreeSet::new();
    while let Some(address) = range.allocate(InstanceId::generate(), &taken) {
        assert!(range.is_of_a_guest(address) && address != range.gateway(), "{address}");
        assert!(taken.insert(address), "{address} was given twice");
    }
    assert_eq!(taken.len(), 253);
}

proptest! {
    #[test]
    fn an_address_is_free_and_of_the_range(
        prefix in 8_u8..=30, bits: u32, taken in prop::collection::vec(any::<u32>(), 0..20)
    ) {
        let net = ipnet::Ipv4Net::new(Ipv4Addr::from(bits), prefix).unwrap().trunc();
        let Ok(range) = net.to_string().parse::<Range>() else { return Ok(()) };
        let size = 1_u64 << (32 - prefix);
        let taken: BTreeSet<Ipv4Addr> = taken
            .into_iter()
            .map(|it| Ipv4Addr::from(u32::from(net.network()) + u32::try_from(u64::from(it) % size).unwrap()))
            .collect();
        match range.allocate(InstanceId::generate(), &taken) {
            Some(address) => {
                prop_assert!(range.is_of_a_guest(address) && !taken.contains(&address), "{address}");
                prop_assert!(address != range.gateway() && address != net.network() && address != net.broadcast());
            }
            None => prop_assert!(taken.iter().filter(|it| range.is_of_a_guest(**it)).count() == range.capacity() as usize),
        }
    }

    #[test]
    fn two_ranges_overlap_when_they_share_an_address(a: u32, b: u32, p in 8_u8..=30, q in 8_u8..=30) {
        let net = |bits, prefix| ipnet::Ipv4Net::new(Ipv4Addr::from(bits), prefix).unwrap().trunc();
        let (one, other) = (net(a, p), net(b, q));
        let share = one.network() <= other.broadcast() && other.network() <= one.broadcast();
        prop_assert_eq!(overlap(one, other), share);
    }
}

#[test]
fn names_are_short_and_tell_instances_and_daemons_apart() {
    let (one, other) = (InstanceId::generate(), InstanceId::generate());
    let (mine, theirs) = (daemon("/var/lib/kibotos"), daemon("/tmp/other"));
    let name = TapName::of(&mine, one);
    assert!(name.as_str().len() <= 15 && name.as_str().starts_with(&mine.tap_prefix()), "{name}");
    assert_eq!(name, TapName::of(&daemon("/var/lib/kibotos"), one), "a daemon that restarts finds it");
    for another in [TapName::of(&mine, other), TapName::of(&theirs, one)] {
        assert_ne!(name, another);
    }
}

#[test]
fn a_mac_is_local_and_of_one_host() {
    for _ in 0..100 {
        let mac = Mac::of(InstanceId::generate()).to_string();
        let first = u8::from_str_radix(&mac[..2], 16).unwrap();
        assert_eq!(first & 0b11, 0b10, "{mac}");
        assert_eq!(mac.len(), 17);
    }
}

fn rules() -> Rules {
    let daemon = daemon("/var/lib/kibotos");
    let guest = |instance: &str, last, egress| {
        let instance: InstanceId = instance.parse().unwrap();
        let address = Ipv4Addr::new(10, 77, 0, last);
        Guest { tap: TapName::of(&daemon, instance), mac: Mac::of(instance), address, egress }
    };
    Rules {
        node: "node-1".parse().unwrap(),
        range: range("10.77.0.0/16"),
        uplinks: vec!["eth0".to_owned()],
        guard_uplinks: false,
        guests: vec![
            guest("inst-01hzzzzzzzzzzzzzzzzzzzzzz1", 2, Egress::Allow),
            guest("inst-01hzzzzzzzzzzzzzzzzzzzzzz2", 3, Egress::Deny),
        ],
        daemon,
    }
}

/// The lines of a chain, set or map.
fn part(text: &str, kind_and_name: &str) -> Vec<String> {
    let (_, rest) = text.split_once(&format!("\t{kind_and_name} {{\n")).unwrap_or_else(|| panic!("no {kind_and_name}"));
    let (part, _) = rest.split_once("\n\t}").unwrap();
    part.lines().map(|line| line.trim().to_owned()).collect()
}

#[test]
fn a_replacement_is_one_transaction_that_works_with_and_without_an_old_table() {
    let rules = rules();
    let own = rules.table();
    let old = Table::of(&rules.daemon, range("10.88.0.0/16"));
    let text = rules.replace(&[old.clone(), own.clone()]);
    let beginning: Vec<&str> = text.lines().take(4).collect();
    let expected = [
        format!("add table inet {own}"),
        format!("delete table inet {old}"),
        format!("delete table inet {own}"),
        format!("table inet {own} {{"),
    ];
    assert_eq!(beginning, expected);
    assert_eq!(remove(&[]), "");
}

#[test]
fn what_a_guest_sends_is_looked_at_before_anything_else() {
    let rules = rules();
    let text = rules.replace(&[]);
    let own = rules.daemon.tap_prefix();
    let prerouting = part(&text, "chain prerouting");
    assert!(prerouting[0].contains("hook prerouting priority raw"), "before connections, address translation, routing");
    assert_eq!(prerouting[1], format!("iifname \"{own}*\" goto from_guest"));
    let expected = [
        "meta nfproto != ipv4 drop",
        "iifname . ether saddr . ip saddr != @guests drop",
        "ip daddr @closed drop",
        "fib daddr type != unicast drop",
    ];
    assert_eq!(part(&text, "chain from_guest"), expected);
    let guests = part(&text, "set guests");
    for guest in &rules.guests {
        assert!(guests[1].contains(&format!("\"{}\" . {} . {}", guest.tap, guest.mac, guest.address)), "{guests:?}");
    }
    assert_eq!(part(&text, "chain input")[1], format!("iifname \"{own}*\" drop"));
}

#[test]
fn forwarding_ends_in_the_policy_of_the_guest() {
    let rules = rules();
    let text = rules.replace(&[]);
    assert_eq!(
        part(&text, "chain outward"),
        ["oifname \"kt*\" drop", "oifname != @uplinks drop", "iifname vmap @policies", "drop"]
    );
    let policies = part(&text, "map policies");
    let [allowed, denied] = rules.guests.as_slice() else { unreachable!() };
    assert!(policies[1].contains(&format!("\"{}\" : goto egress_allow", allowed.tap)), "{policies:?}");
    assert!(policies[1].contains(&format!("\"{}\" : goto egress_deny", denied.tap)), "{policies:?}");
    assert_eq!(part(&text, "chain egress_deny"), ["drop"]);
    assert_eq!(part(&text, "chain inward").last().unwrap(), "drop");
}

#[test]
fn an_uplink_that_forwards_for_guests_alone_forwards_for_nobody_else() {
    let guard = "iifname @uplinks oifname != \"kt*\" drop";
    let with = |guard_uplinks| Rules { guard_uplinks, ..rules() }.replace(&[]);
    assert_eq!(part(&with(true), "chain forward").last().unwrap(), guard);
    assert!(!with(false).contains(guard));
}

#[test]
fn without_guests_and_uplinks_there_is_no_empty_list() {
    let text = Rules { guests: vec![], uplinks: vec![], ..rules() }.replace(&[]);
    assert!(!text.contains("{  }"), "{text}");
    assert_eq!(part(&text, "set guests"), ["type ifname . ether_addr . ipv4_addr"]);
}

#[test]
fn the_range_itself_and_what_is_no_host_is_closed_to_guests() {
    let closed = closed(range("10.77.0.0/16"));
    for address in
        ["10.77.200.9", "10.77.0.1", "169.254.169.254", "127.0.0.1", "224.0.0.251", "255.255.255.255", "0.0.0.0"]
    {
        let address: Ipv4Addr = address.parse().unwrap();
        assert!(closed.iter().any(|net| net.contains(&address)), "{address}");
    }
    for address in ["10.76.0.1", "192.0.2.1", "8.8.8.8"] {
        let address: Ipv4Addr = address.parse().unwrap();
        assert!(!closed.iter().any(|net| net.contains(&address)), "{address}");
    }
}

#[test]
fn a_table_says_whose_it_is_and_which_range_is_taken() {
    let daemon = daemon("/var/lib/kibotos");
    let table = Table::of(&daemon, range("10.77.0.0/16"));
    assert_eq!(Table::parse(&table.to_string()), Some(table.clone()));
    assert_eq!((table.daemon.as_str(), table.range.to_string().as_str()), (daemon.as_str(), "10.77.0.0/16"));
    for foreign in ["filter", "kube-proxy", "kibotos_", "kibotos_abcde_10.77.0.0", "kibotos_abcde_10.77.0.0_40"] {
        assert_eq!(Table::parse(foreign), None, "{foreign}");
    }
}

#[tokio::test]
async fn many_look_at_the_host_at_once() {
    let looks = futures::future::try_join_all((0..64).map(|_| Host::look())).await.unwrap();
    assert!(looks.iter().all(|host| host.links.contains_key("lo")));
}
