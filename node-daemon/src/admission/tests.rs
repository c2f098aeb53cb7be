use proptest::prelude::*;

use super::*;

const GI: u64 = 1 << 30;

fn pool() -> PoolId {
    "local".parse().unwrap()
}

fn demand() -> Demand {
    Demand { cpu: MilliCpu(1000), memory: Bytes(GI), objects: BTreeMap::from([(pool(), Bytes(GI))]) }
}

fn settings() -> Settings {
    Settings {
        revision: 1,
        drain: false,
        slots: None,
        cpu_ratio: Ratio::ONE,
        memory_ratio: Ratio::ONE,
        memory_tight: Thresholds::default(),
    }
}

fn view() -> View {
    View {
        settings: Some(settings()),
        resources: Resources { cpu: MilliCpu(4000), memory: Bytes(4 * GI), max_instances: None },
        allocated: Allocated { cpu: MilliCpu(3000), memory: Bytes(3 * GI), instances: 3 },
        pools: BTreeMap::from([(pool(), PoolSpace { problem: None, free: Some(Bytes(GI)) })]),
        has_root_image: true,
        is_memory_tight: false,
    }
}

fn reason(view: &View, purpose: Purpose) -> Option<v1::RefuseReason> {
    decide(&demand(), view, purpose).err().map(|refusal| refusal.reason)
}

#[test]
fn what_just_fits_is_taken() {
    assert_eq!(decide(&demand(), &view(), Purpose::Offer), Ok(()));
}

#[test]
fn every_reason_against_is_named() {
    use v1::RefuseReason as Reason;
    type Change = fn(&mut View);
    let table: &[(Change, Reason)] = &[
        (|view| view.settings = None, Reason::Stale),
        (|view| view.settings = Some(Settings { drain: true, ..settings() }), Reason::Draining),
        (|view| view.settings = Some(Settings { slots: Some(3), ..settings() }), Reason::NoSlot),
        (|view| view.settings = Some(Settings { slots: Some(0), ..settings() }), Reason::NoSlot),
        (|view| view.resources.max_instances = Some(3), Reason::NoSlot),
        (|view| view.allocated.cpu = MilliCpu(3001), Reason::Cpu),
        (|view| view.allocated.memory = Bytes(3 * GI + 1), Reason::Memory),
        (|view| view.settings = Some(Settings { cpu_ratio: "0.999".parse().unwrap(), ..settings() }), Reason::Cpu),
        (|view| view.settings = Some(Settings { memory_ratio: "0.5".parse().unwrap(), ..settings() }), Reason::Memory),
        (|view| view.allocated.cpu = MilliCpu(u64::MAX), Reason::Cpu),
        (|view| view.pools.clear(), Reason::PoolUnavailable),
        (
            |view| view.pools.values_mut().for_each(|pool| pool.problem = Some("not mounted".into())),
            Reason::PoolUnavailable,
        ),
        (|view| view.pools.values_mut().for_each(|pool| pool.free = Some(Bytes(GI - 1))), Reason::PoolFull),
        (|view| view.has_root_image = false, Reason::RootImageMissing),
        (|view| view.is_memory_tight = true, Reason::MemoryTight),
    ];
    for (change, expected) in table {
        let mut view = view();
        change(&mut view);
        assert_eq!(reason(&view, Purpose::Offer), Some(*expected));
    }
}

#[test]
fn the_smaller_of_both_slot_limits_counts() {
    let mut view = view();
    view.resources.max_instances = Some(10);
    view.settings = Some(Settings { slots: Some(4), ..settings() });
    assert_eq!(reason(&view, Purpose::Offer), None);
    view.allocated.instances = 4;
    assert_eq!(reason(&view, Purpose::Offer), Some(v1::RefuseReason::NoSlot));
}

#[test]
fn a_drain_does_not_undo_what_is_committed() {
    let mut view = view();
    view.settings = Some(Settings { drain: true, ..settings() });
    assert_eq!(reason(&view, Purpose::Committed), None);
}

#[test]
fn what_could_not_be_measured_is_no_constraint() {
    let mut view = view();
    view.pools.values_mut().for_each(|pool| pool.free = None);
    assert_eq!(reason(&view, Purpose::Offer), None);
}

fn at(millis: u64) -> BootTime {
    BootTime::from_boot(Duration::from_millis(millis))
}

fn reserved(ledger: &mut Ledger, offer: &str, now: BootTime) -> InstanceId {
    let instance = InstanceId::generate();
    let reservation = Reservation { instance, demand: demand(), until: Some(now.after(RESERVED_FOR)) };
    ledger.reserve(offer.to_owned(), reservation);
    instance
}

#[test]
fn a_go_counts_within_five_seconds() {
    for (go_at, in_time) in [(0, true), (5000, true), (5001, false)] {
        let mut ledger = Ledger::default();
        let instance = reserved(&mut ledger, "o", at(0));
        assert_eq!(ledger.go("o", instance, &demand(), at(go_at)).is_ok(), in_time, "{go_at}");
        // One that went stays counted until it is registered, however long that takes.
        ledger.forget_expired(at(1_000_000));
        assert_eq!(ledger.holds(instance), in_time);
    }
}

#[test]
fn a_go_must_ask_for_what_was_reserved() {
    let mut ledger = Ledger::default();
    let instance = reserved(&mut ledger, "o", at(0));
    let more = Demand { memory: Bytes(2 * GI), ..demand() };
    assert!(ledger.go("o", instance, &more, at(1)).is_err());
    assert!(!ledger.holds(instance));
}

#[test]
fn a_revoke_gives_back_only_before_the_go() {
    let mut ledger = Ledger::default();
    let revoked = reserved(&mut ledger, "a", at(0));
    let gone = reserved(&mut ledger, "b", at(0));
    ledger.go("b", gone, &demand(), at(1)).unwrap();
    ledger.revoke("a");
    ledger.revoke("b");
    assert!(!ledger.holds(revoked) && ledger.holds(gone));
}

#[test]
fn an_instance_in_the_list_is_not_counted_twice() {
    let mut ledger = Ledger::default();
    let instance = reserved(&mut ledger, "a", at(0));
    let listed = Summary {
        id: instance,
        workspace_uid: String::new(),
        state: v1::InstanceState::Starting,
        cpu: MilliCpu(1000),
        allocated_memory: Bytes(GI),
        pools: std::collections::BTreeSet::new(),
    };
    assert_eq!(ledger.totals(&[]).0.instances, 1);
    assert_eq!(ledger.totals(&[listed]), (Allocated::default(), BTreeMap::new()));
}

proptest! {
    /// Whatever is offered in whatever order: what was accepted never exceeds what the node has.
    #[test]
    fn accepted_offers_never_exceed_the_node(
        demands in proptest::collection::vec((1u64..3000, 1u64..3 * GI), 1..40),
        cpu_ratio in 0u32..=16_000,
        memory_ratio in 0u32..=16_000,
    ) {
        let cpu_ratio = Ratio::from_thousandths(cpu_ratio).unwrap();
        let memory_ratio = Ratio::from_thousandths(memory_ratio).unwrap();
        let settings = Settings { cpu_ratio, memory_ratio, ..settings() };
        let mut view = View { settings: Some(settings), allocated: Allocated::default(), ..view() };
        for (cpu, memory) in demands {
            let demand = Demand { cpu: MilliCpu(cpu), memory: Bytes(memory), objects: BTreeMap::new() };
            if decide(&demand, &view, Purpose::Offer).is_ok() {
                view.allocated.add(demand.cpu, demand.memory);
            }
            prop_assert!(view.allocated.cpu <= cpu_ratio.of_cpu(view.resources.cpu));
            prop_assert!(view.allocated.memory <= memory_ratio.of_memory(view.resources.memory));
        }
    }
}
