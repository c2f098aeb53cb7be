use kibo_crds::InstanceId;
use proptest::prelude::*;

use super::*;
use crate::{
    launch::{By, Grant, Operation, PredecessorEnd},
    pool::records::Record,
};

const UID: &str = "6f9619ff-8b86-d011-b42d-00c04fc964ff";
const LIMIT: Duration = Duration::from_secs(15);

fn at(second: u64) -> BootTime {
    BootTime::from_boot(Duration::from_secs(second))
}

fn pool(name: &str) -> PoolId {
    name.parse().unwrap()
}

fn taker(node: &str) -> Taker {
    Taker { node: node.parse().unwrap(), incarnation: Incarnation(3), by: By::Instance(InstanceId::generate()) }
}

fn uid() -> ObjectUid {
    UID.parse().unwrap()
}

fn grant(epoch: u64, end: PredecessorEnd) -> Grant {
    Grant { epoch: Epoch(epoch), predecessor: Epoch(epoch - 1), predecessor_end: end }
}

/// The records of `mine` in epoch 1, with what `change` makes of them.
fn records(mine: &Taker, change: impl FnOnce(&mut Records)) -> Records {
    let mut records = Records::default();
    let record = Record { taker: Some(mine.clone()), grant: grant(1, PredecessorEnd::None) };
    records.0.entry(Epoch(1)).or_default().taken = Some(record);
    change(&mut records);
    records
}

fn taken(records: &mut Records, epoch: u64, end: PredecessorEnd, by: Option<Taker>) {
    records.0.entry(Epoch(epoch)).or_default().taken = Some(Record { taker: by, grant: grant(epoch, end) });
}

#[test]
fn what_a_look_means() {
    let mine = taker("a");
    let holding = Holding { taker: mine.clone(), objects: vec![(uid(), Epoch(1))] };
    let fence = |incarnation: Option<u64>, problem: Option<&str>| {
        let seen = FenceSeen { dead: incarnation.map(dead), problem: problem.map(str::to_owned) };
        match find_in_fence(&mine, &seen) {
            FenceFinding::Lost(_) => "lost",
            FenceFinding::Undisputed => "undisputed",
            FenceFinding::Unknown(_) => "unknown",
        }
    };
    assert_eq!(fence(None, None), "undisputed");
    assert_eq!(fence(Some(2), None), "undisputed", "an earlier life of this node");
    assert_eq!(fence(Some(3), None), "lost");
    assert_eq!(fence(Some(4), Some("a block is damaged")), "lost");
    assert_eq!(fence(Some(2), Some("a block is damaged")), "unknown", "it may be the one");
    assert_eq!(fence(None, Some("EIO")), "unknown");

    let word = |holding: &Holding, records: Result<Records, String>| match find_in_records(
        holding,
        &BTreeMap::from([(uid(), records)]),
    ) {
        Finding::Lost(_) => "lost",
        Finding::Holds => "holds",
        Finding::Unclear(_) => "unclear",
    };
    let other = || Some(taker("b"));
    let deletes = || Some(Taker { by: By::Operation(Operation::Deletion), ..taker("b") });
    let well = || Ok(records(&mine, |_| ()));
    assert_eq!(word(&holding, well()), "holds");
    assert_eq!(word(&Holding { objects: vec![], ..holding.clone() }, well()), "unclear", "nobody knows what it holds");
    assert_eq!(word(&holding, Err("damaged".to_owned())), "unclear");
    assert_eq!(word(&holding, Ok(Records::default())), "unclear", "the own record is gone");
    let cases: [(&str, Change, &str); 6] = [
        // Whoever was told so finds the open record and refuses.
        ("a false grant", Box::new(move |it| taken(it, 2, PredecessorEnd::Released, other())), "holds"),
        ("taken over", Box::new(move |it| taken(it, 2, PredecessorEnd::Isolated, other())), "lost"),
        ("it is being deleted", Box::new(move |it| taken(it, 2, PredecessorEnd::Isolated, deletes())), "lost"),
        ("somebody else's record", Box::new(move |it| taken(it, 1, PredecessorEnd::None, other())), "lost"),
        (
            "refused by one who was told that this one is dead",
            Box::new(move |it| {
                let record = Record { taker: other(), grant: grant(2, PredecessorEnd::Isolated) };
                it.0.entry(Epoch(2)).or_default().refused = Some(record);
            }),
            "lost",
        ),
        (
            "its release is on record",
            Box::new(|it| {
                let own = it.0.get_mut(&Epoch(1)).unwrap();
                own.released.clone_from(&own.taken);
            }),
            "lost",
        ),
    ];
    for (what, change, expected) in cases {
        assert_eq!(word(&holding, Ok(records(&mine, change))), expected, "{what}");
    }
}

type Change = Box<dyn FnOnce(&mut Records)>;

fn watched(pools: &[&str]) -> Watched {
    Watched::begin(pools.iter().map(|name| pool(name)), at(0), false, LIMIT)
}

fn dead(incarnation: u64) -> Dead {
    Dead { incarnation: Incarnation(incarnation), unix_millis: 0 }
}

fn loss() -> Loss {
    Loss::Isolated(dead(3))
}

#[expect(clippy::needless_pass_by_value, reason = "of what was just learnt")]
fn word(order: Option<Order>) -> &'static str {
    match order {
        None => "",
        Some(Order::Freeze { .. }) => "freeze",
        Some(Order::Thaw) => "thaw",
        Some(Order::Kill { .. }) => "kill",
    }
}

fn unknown() -> FenceFinding {
    FenceFinding::Unknown("EIO".into())
}

fn unclear() -> Finding {
    Finding::Unclear("damaged".into())
}

/// A whole look that found nothing against it.
fn well(it: &mut Watched, name: &str, second: u64) -> &'static str {
    let first = it.learn_of_fence(&pool(name), at(second), FenceFinding::Undisputed);
    assert_eq!(first, None);
    word(it.learn_of_records(&pool(name), at(second), Finding::Holds))
}

#[test]
fn a_pool_that_says_nothing_freezes_and_only_a_later_proof_thaws() {
    let mut it = watched(&["p", "q"]);
    assert_eq!(word(it.tick(at(15))), "");
    assert_eq!(well(&mut it, "q", 14), "");
    assert_eq!(word(it.tick(at(16))), "freeze", "nothing of p");
    assert_eq!(word(it.tick(at(99))), "");
    assert_eq!(well(&mut it, "p", 15), "", "begun before");
    assert_eq!(well(&mut it, "p", 20), "", "q may have been lost meanwhile");
    assert_eq!(word(it.learn_of_fence(&pool("q"), at(21), FenceFinding::Undisputed)), "", "the fence file alone");
    assert_eq!(word(it.learn_of_records(&pool("q"), at(21), unclear())), "", "no proof");
    assert_eq!(word(it.learn_of_fence(&pool("p"), at(24), unknown())), "freeze", "told anew");
    assert_eq!(word(it.learn_of_fence(&pool("p"), at(26), unknown())), "");
    assert_eq!(well(&mut it, "p", 28), "");
    assert_eq!(well(&mut it, "q", 29), "thaw");
    assert_eq!((word(it.tick(at(43))), word(it.tick(at(44)))), ("", "freeze"));
}

#[test]
fn a_loss_kills_also_what_stands_still_and_nothing_brings_it_back() {
    for frozen in [false, true] {
        let mut it = Watched::begin([pool("p")], at(0), frozen, LIMIT);
        assert_eq!(word(it.learn_of_fence(&pool("p"), at(1), FenceFinding::Lost(loss()))), "kill");
        assert_eq!(word(it.learn_of_records(&pool("p"), at(2), Finding::Lost(loss()))), "");
        assert_eq!(well(&mut it, "p", 3), "");
        assert_eq!(word(it.tick(at(99))), "");
        assert_eq!(it.pulse(), &Pulse::Killed);
    }
}

#[test]
fn records_that_cannot_be_read_stop_no_guest_that_runs() {
    let mut it = watched(&["p"]);
    for second in 1..100 {
        assert_eq!(word(it.learn_of_fence(&pool("p"), at(second), FenceFinding::Undisputed)), "");
        assert_eq!(word(it.learn_of_records(&pool("p"), at(second), unclear())), "");
        assert_eq!(word(it.tick(at(second))), "");
    }
}

proptest! {
    /// Whatever is seen and whenever: a guest runs only where every pool was undisputed within the limit, as of the last
    /// tick, and never after a loss.
    #[test]
    fn what_runs_was_proven_lately(steps in proptest::collection::vec((0u8..6, 0u8..2), 1..60)) {
        let names = ["p", "q"];
        let mut it = watched(&names);
        let mut undisputed = [0, 0];
        let mut is_lost = false;
        let mut now = 0;
        for (what, which) in steps {
            let index = usize::from(which);
            let id = pool(names[index]);
            match what {
                0 => { let _ = well(&mut it, names[index], now); undisputed[index] = now; }
                1 => { let _ = it.learn_of_fence(&id, at(now), unknown()); }
                2 => {
                    let _ = it.learn_of_fence(&id, at(now), FenceFinding::Undisputed);
                    let _ = it.learn_of_records(&id, at(now), unclear());
                    undisputed[index] = now;
                }
                3 if which == 1 && now % 7 == 0 => {
                    let _ = it.learn_of_fence(&id, at(now), FenceFinding::Lost(loss()));
                    is_lost = true;
                }
                _ => { now += 4; let _ = it.tick(at(now)); }
            }
            if it.pulse() == &Pulse::Runs {
                prop_assert!(!is_lost);
                prop_assert!(undisputed.iter().all(|second| now - second <= 15), "{undisputed:?} at {now}");
            }
        }
    }
}
