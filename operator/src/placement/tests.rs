use kibo_crds::{Bytes, MilliCpu, NodeId, PoolId};
use proptest::prelude::*;

use super::{Strategy, *};

fn id(name: &str) -> NodeId {
    name.parse().unwrap()
}

fn pool_id(name: &str) -> PoolId {
    name.parse().unwrap()
}

fn pool(name: &str, default: bool, free_mib: Option<u32>) -> CandidatePool {
    let free = free_mib.map(Bytes::mib);
    CandidatePool { id: pool_id(name), default, access: PoolAccess::Reached, free, unallocated: None }
}

fn node(name: &str, cores: u64, mib: u32) -> CandidateNode {
    CandidateNode {
        id: id(name),
        labels: BTreeMap::new(),
        closed: None,
        schedulable_cpu: Some(MilliCpu(cores * 1000)),
        schedulable_memory: Some(Bytes::mib(mib)),
        slots: None,
        used: Used::default(),
        pools: vec![pool(&format!("local-{name}"), true, None)],
        last_assigned: 0,
    }
}

fn demand(cores: u64, mib: u32) -> Demand {
    Demand {
        cpu: MilliCpu(cores * 1000),
        memory: Bytes::mib(mib),
        disks: vec![Disk::New { pool: None, size: Bytes::mib(64) }],
        node_selector: BTreeMap::new(),
        pin: None,
        refusals: BTreeMap::new(),
    }
}

fn names(answers: &[Result<Assignment, Unplaceable>]) -> Vec<String> {
    answers.iter().map(|a| a.as_ref().map_or_else(ToString::to_string, |a| a.node.to_string())).collect()
}

#[test]
fn spread_goes_around_and_pack_fills_up() {
    let nodes = || vec![node("a", 4, 4096), node("b", 4, 4096)];
    let demands = vec![demand(1, 512); 4];
    assert_eq!(names(&decide(nodes(), &demands, Strategy::Spread)), ["a", "b", "a", "b"]);
    assert_eq!(names(&decide(nodes(), &demands, Strategy::Pack)), ["a", "a", "a", "a"]);
}

#[test]
fn what_is_allocated_in_a_pool_counts_by_size_and_once_for_all_members() {
    let shared = |name: &str| {
        let pool = CandidatePool { unallocated: Some(Bytes::mib(100)), ..pool("shared", true, Some(10_000)) };
        CandidateNode { pools: vec![pool], ..node(name, 8, 8192) }
    };
    let nodes = || vec![shared("a"), shared("b")];
    let full = "no node can take it: of 2 connected, 2 with too little capacity left in storage pool shared (not allocated: 36Mi)";
    assert_eq!(names(&decide(nodes(), &[demand(1, 512), demand(1, 512)], Strategy::Spread)), ["a", full]);
    // What is there already was counted when it was made.
    let made = Disk::In { pool: pool_id("shared"), to_allocate: Bytes::mib(300) };
    let again = Demand { disks: vec![made], ..demand(1, 512) };
    assert_eq!(names(&decide(nodes(), &[again], Strategy::Spread)), ["a"]);
}

#[test]
fn equal_nodes_take_turns_by_the_longest_wait() {
    let mut a = node("a", 4, 4096);
    a.last_assigned = 7;
    assert_eq!(names(&decide(vec![a, node("b", 4, 4096)], &[demand(1, 512)], Strategy::Spread)), ["b"]);
}

#[test]
fn a_pin_is_kept_or_fails() {
    let mut closed = node("a", 4, 4096);
    closed.closed = Some(Exclusion::Draining);
    let nodes = vec![closed, node("b", 4, 4096)];
    let pinned = |name| Demand { pin: Some(id(name)), ..demand(1, 512) };
    assert_eq!(
        names(&decide(nodes, &[pinned("a"), pinned("b"), pinned("c")], Strategy::Spread)),
        ["node a cannot take it: draining", "b", "node c cannot take it: without a control session"]
    );
}

#[test]
fn a_pool_that_is_being_registered_is_worth_waiting_for() {
    let with = |access| {
        let mut a = node("a", 4, 4096);
        a.pools[0].access = access;
        let pinned = Demand { pin: Some(id("a")), ..demand(1, 512) };
        decide(vec![a], &[pinned], Strategy::Spread).remove(0).unwrap_err()
    };
    let coming = with(PoolAccess::BeingRegistered);
    assert_eq!(coming.to_string(), "node a cannot take it: whose storage pool local-a is being registered");
    assert!(coming.awaits_setup());
    let lost = with(PoolAccess::OutOfReach);
    assert_eq!(lost.to_string(), "node a cannot take it: that cannot reach storage pool local-a");
    assert!(!lost.awaits_setup());
}

#[test]
fn nobody_waits_for_a_node_that_is_not_selected() {
    let coming = |name: &str, zone: &str| {
        let labels = [("zone".to_owned(), zone.to_owned())].into();
        CandidateNode { closed: Some(Exclusion::NotReady), labels, ..node(name, 4, 4096) }
    };
    let wanted = Demand { node_selector: [("zone".to_owned(), "a".to_owned())].into(), ..demand(1, 512) };
    let answer = |nodes| decide(nodes, std::slice::from_ref(&wanted), Strategy::Spread).remove(0).unwrap_err();
    let elsewhere = answer(vec![coming("b", "b")]);
    assert_eq!(elsewhere.to_string(), "no node can take it: of 1 connected, 1 without the labels zone=a");
    assert!(!elsewhere.awaits_setup());
    assert!(answer(vec![coming("a", "a"), coming("b", "b")]).awaits_setup());
    let away = CandidateNode { closed: Some(Exclusion::NoSession), ..coming("a", "b") };
    let pinned = Demand { pin: Some(id("a")), ..wanted.clone() };
    let answer = decide(vec![away], &[pinned], Strategy::Spread).remove(0).unwrap_err();
    assert_eq!(answer.to_string(), "node a cannot take it: without a control session");
}

#[test]
fn what_was_not_measured_is_no_constraint() {
    let mut a = node("a", 0, 0);
    (a.schedulable_cpu, a.schedulable_memory) = (None, None);
    assert_eq!(names(&decide(vec![a], &[demand(1000, 1 << 20)], Strategy::Spread)), ["a"]);
}

#[test]
fn measured_as_zero_takes_nothing() {
    let answer = decide(vec![node("a", 0, 4096)], &[demand(1, 512)], Strategy::Spread).remove(0).unwrap_err();
    assert_eq!(
        answer.to_string(),
        "no node can take it: of 1 connected, 1 with too little CPU (needed: 1, most free: 0)"
    );
}

#[test]
fn the_answer_counts_the_nodes_of_each_reason() {
    let mut draining = node("a", 4, 4096);
    draining.closed = Some(Exclusion::Draining);
    let mut full = node("b", 4, 4096);
    full.used.memory = Bytes::mib(4000);
    let mut fuller = node("c", 4, 4096);
    fuller.used.memory = Bytes::mib(4090);
    let mut refused = demand(1, 512);
    refused.refusals.insert(id("d"), "root image debian-12 is missing".into());
    let answer = decide(vec![draining, full, fuller, node("d", 4, 4096)], &[refused], Strategy::Spread);
    assert_eq!(
        names(&answer),
        [
            "no node can take it: of 4 connected, 1 draining, 2 with too little memory (needed: 512Mi, most free: 96Mi), 1 that refused it (root image debian-12 is missing)"
        ]
    );
    assert_eq!(
        names(&decide(vec![], &[demand(1, 1)], Strategy::Spread)),
        ["no node has a control session: start a node daemon, or look at `kibo node list`"]
    );
}

#[test]
fn objects_are_followed_to_their_pools() {
    let mut a = node("a", 4, 4096);
    a.pools.push(pool("shared", false, Some(100)));
    let b = node("b", 8, 8192);
    let with = |disks| Demand { disks, ..demand(1, 512) };
    let existing = Disk::In { pool: pool_id("shared"), to_allocate: Bytes(0) };
    let new = |size| Disk::New { pool: Some(pool_id("shared")), size: Bytes::mib(size) };
    let nodes = vec![a, b];
    let answers = decide(
        nodes,
        &[with(vec![existing.clone()]), with(vec![new(60)]), with(vec![new(60)]), with(vec![existing])],
        Strategy::Spread,
    );
    assert_eq!(names(&answers[..2]), ["a", "a"]);
    assert_eq!(
        answers[2].as_ref().unwrap_err().to_string(),
        "no node can take it: of 2 connected, 1 not attached to storage pool shared, 1 with too little space in storage pool shared (free: 40Mi)"
    );
    assert_eq!(names(&answers[3..]), ["a"], "an image that exists needs no space");
}

#[test]
fn space_in_a_shared_pool_is_promised_once() {
    let shared = |name: &str| CandidateNode { pools: vec![pool("shared", true, Some(100))], ..node(name, 4, 4096) };
    let demands = vec![demand(1, 512); 2];
    let answers = decide(vec![shared("a"), shared("b")], &demands, Strategy::Spread);
    assert_eq!(names(&answers[..1]), ["a"]);
    assert!(answers[1].is_err(), "64Mi of 100Mi were gone");
}

#[test]
fn slots_and_selectors_are_kept() {
    let mut a = node("a", 4, 4096);
    a.slots = Some(1);
    a.labels.insert("zone".into(), "x".into());
    let mut wants = demand(1, 512);
    wants.node_selector.insert("zone".into(), "x".into());
    let answers = decide(vec![a, node("b", 4, 4096)], &[wants.clone(), wants], Strategy::Spread);
    assert_eq!(
        names(&answers),
        ["a", "no node can take it: of 2 connected, 1 without the labels zone=x, 1 without a free slot"]
    );
}

#[test]
fn a_large_batch_is_decided_in_full() {
    let nodes: Vec<_> = (0..1000).map(|n| node(&format!("n{n}"), 4, 4096)).collect();
    let mut demands: Vec<_> = (0..5000u64).map(|n| Demand { memory: Bytes(n), ..demand(1, 0) }).collect();
    demands.sort_by_key(|demand| demand.memory);
    let placed = decide(nodes, &demands, Strategy::Spread).iter().filter(|answer| answer.is_ok()).count();
    assert_eq!(placed, 4000, "1000 nodes of four cores take 4000 Workspaces of one core");
}

prop_compose! {
    fn any_node(index: usize)(
        cpu in prop::option::weighted(0.9, 0u64..8000), memory in prop::option::weighted(0.9, 0u64..8 << 30),
        used_cpu in 0u64..3000, used_memory in 0u64..3 << 30, used_instances in 0u32..3,
        slots in prop::option::of(0u32..6), free in prop::option::of(0u32..4096),
        shared in any::<bool>(), draining in prop::bool::weighted(0.1), last_assigned in 0u64..5,
    ) -> CandidateNode {
        let mut pools = vec![pool(&format!("local-n{index}"), true, free)];
        if shared {
            pools.push(pool("shared", false, Some(2048)));
        }
        CandidateNode {
            id: id(&format!("n{index}")),
            labels: BTreeMap::from([("parity".to_owned(), (index % 2).to_string())]),
            closed: draining.then_some(Exclusion::Draining),
            schedulable_cpu: cpu.map(MilliCpu),
            schedulable_memory: memory.map(Bytes),
            slots,
            used: Used { cpu: MilliCpu(used_cpu), memory: Bytes(used_memory), instances: used_instances },
            pools,
            last_assigned,
        }
    }
}

prop_compose! {
    fn any_demand()(
        cpu in prop_oneof![9 => 1u64..4000, 1 => Just(u64::MAX)], memory in prop_oneof![9 => 1u64..2 << 30, 1 => Just(u64::MAX)],
        size in 1u32..1024, place in 0u8..3, pin in prop::option::weighted(0.2, 0usize..7),
        parity in prop::option::weighted(0.3, 0usize..2), refused in prop::option::weighted(0.2, 0usize..6),
    ) -> Demand {
        let shared = pool_id("shared");
        Demand {
            cpu: MilliCpu(cpu),
            memory: Bytes(memory),
            disks: vec![match place {
                0 => Disk::New { pool: None, size: Bytes::mib(size) },
                1 => Disk::New { pool: Some(shared), size: Bytes::mib(size) },
                _ => Disk::In { pool: shared, to_allocate: Bytes(0) },
            }],
            node_selector: parity.map(|p| ("parity".to_owned(), p.to_string())).into_iter().collect(),
            pin: pin.map(|n| id(&format!("n{n}"))),
            refusals: refused.map(|n| (id(&format!("n{n}")), "no".to_owned())).into_iter().collect(),
        }
    }
}

fn any_nodes() -> impl proptest::strategy::Strategy<Value = Vec<CandidateNode>> {
    (0..6).map(any_node).collect::<Vec<_>>()
}

proptest! {
    #[test]
    fn nothing_is_ever_promised_twice(
        nodes in any_nodes(), demands in prop::collection::vec(any_demand(), 0..40), pack in any::<bool>()
    ) {
        let strategy = if pack { Strategy::Pack } else { Strategy::Spread };
        let answers = decide(nodes.clone(), &demands, strategy);
        prop_assert_eq!(&answers, &decide(nodes.clone(), &demands, strategy), "the same input gives the same answers");
        let mut shared = 0u128;
        for node in &nodes {
            let taken: Vec<_> = demands.iter().zip(&answers)
                .filter_map(|(d, a)| a.as_ref().ok().filter(|a| a.node == node.id).map(|a| (d, a))).collect();
            if taken.is_empty() {
                continue;
            }
            prop_assert!(node.closed.is_none());
            let cpu: u128 = taken.iter().map(|(d, _)| u128::from(d.cpu.0)).sum::<u128>() + u128::from(node.used.cpu.0);
            let memory: u128 = taken.iter().map(|(d, _)| u128::from(d.memory.0)).sum::<u128>() + u128::from(node.used.memory.0);
            prop_assert!(node.schedulable_cpu.is_none_or(|limit| cpu <= u128::from(limit.0)));
            prop_assert!(node.schedulable_memory.is_none_or(|limit| memory <= u128::from(limit.0)));
            prop_assert!(node.slots.is_none_or(|slots| node.used.instances as usize + taken.len() <= slots as usize));
            let mut local = 0u128;
            for (demand, assignment) in &taken {
                prop_assert!(demand.pin.as_ref().is_none_or(|pin| *pin == node.id), "a pin is kept");
                prop_assert!(!demand.refusals.contains_key(&node.id), "who refused is not asked again");
                prop_assert!(demand.node_selector.iter().all(|(key, value)| node.labels.get(key) == Some(value)));
                for (disk, chosen) in demand.disks.iter().zip(&assignment.pools) {
                    prop_assert!(node.pools.iter().any(|pool| pool.id == *chosen));
                    let size = u128::from(disk.to_allocate().0);
                    if chosen.as_str() == "shared" { shared += size } else { local += size }
                }
            }
            prop_assert!(node.pools[0].free.is_none_or(|free| local <= u128::from(free.0)));
        }
        prop_assert!(shared <= 2048 << 20, "the space of a shared pool is promised once over all of its members");
    }

    #[test]
    fn who_fits_somewhere_alone_is_placed(nodes in any_nodes(), demand in any_demand()) {
        let fits = nodes.iter().any(|node| node.admits(&demand, &super::node::Promised::default()).is_ok() && demand.pin.as_ref().is_none_or(|pin| *pin == node.id));
        prop_assert_eq!(decide(nodes, std::slice::from_ref(&demand), Strategy::Spread)[0].is_ok(), fits);
    }
}
