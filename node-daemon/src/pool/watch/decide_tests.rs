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
    let word = |fence: FenceSeen, records: Result<Records, String>| {
        let of_object = BTreeMap::from([(uid(), records)]);
        match find(&holding, &fence, &of_object) {
            Finding::Lost(Loss::Isolated(_)) => "isolated",
            Finding::Lost(Loss::Object { .. }) => "lost",
            Finding::Holds => "holds",
            Finding::Undisputed(_) => "undisputed",
            Finding::Unknown(_) => "unknown",
        }
    };
    let marked = |incarnation| Ok(Some(dead(incarnation)));
    let unreadable = || Err("EIO".to_owned());
    let well = || Ok(records(&mine, |_| ()));
    let other = || Some(taker("b"));
    let deletes = || Some(Taker { by: By::Operation(Operation::Deletion), ..taker("b") });
    let with = |change: &dyn Fn(&mut Records)| Ok(records(&mine, change));
    let voided = || with(&|it| taken(it, 2, PredecessorEnd::Isolated, other()));
    assert_eq!(word(Ok(None), well()), "holds");
    assert_eq!(word(marked(2), well()), "holds", "an earlier life of this node");
    assert_eq!(word(marked(3), well()), "isolated");
    assert_eq!(word(marked(4), Err("EIO".to_owned())), "isolated");
    assert_eq!(word(Ok(None), voided()), "lost", "the mark was lost");
    assert_eq!(word(unreadable(), voided()), "lost");
    assert_eq!(word(unreadable(), well()), "unknown");
    assert_eq!(word(Ok(None), Err("damaged".to_owned())), "undisputed");
    assert_eq!(word(Ok(None), Ok(Records::default())), "undisputed", "the own record is gone");
    for (what, change, expected) in [
        // Whoever was told so finds the open record and refuses.
        (
            "a false grant is tried",
            Box::new(|it: &mut Records| taken(it, 2, PredecessorEnd::Released, other())) as Box<dyn Fn(&mut Records)>,
            "holds",
        ),
        ("it is being deleted", Box::new(|it: &mut Records| taken(it, 2, PredecessorEnd::Isolated, deletes())), "lost"),
        ("somebody else's record", Box::new(|it: &mut Records| taken(it, 1, PredecessorEnd::None, other())), "lost"),
        (
            "refused by one who was told that this one is dead",
            Box::new(|it: &mut Records| {
                let record = Record { taker: other(), grant: grant(2, PredecessorEnd::Isolated) };
                it.0.entry(Epoch(2)).or_default().refused = Some(record);
            }),
            "lost",
        ),
        (
            "its release is on record",
            Box::new(|it: &mut Records| {
                let own = it.0.get_mut(&Epoch(1)).unwrap();
                own.released.clone_from(&own.taken);
            }),
            "lost",
        ),
    ] {
        assert_eq!(word(Ok(None), with(&*change)), expected, "{what}");
    }
}

fn watched(pools: &[&str]) -> Watched {
    Watched::begin(pools.iter().map(|name| pool(name)), at(0), false, LIMIT)
}

fn dead(incarnation: u64) -> Dead {
    Dead { incarnation: Incarnation(incarnation), unix_millis: 0 }
}

fn loss() -> Loss {
    Loss::Isolated(dead(3))
}

fn word(order: Option<Order>) -> &'static str {
    match order {
        None => "",
        Some(Order::Freeze { .. }) => "freeze",
        Some(Order::Thaw) => "thaw",
        Some(Order::Kill { .. }) => "kill",
    }
}

#[test]
fn a_pool_that_says_nothing_freezes_and_only_a_later_proof_thaws() {
    let mut it = watched(&["p", "q"]);
    let learn = |it: &mut Watched, name, second, finding| word(it.learn(&pool(name), at(second), finding));
    assert_eq!(word(it.tick(at(15))), "");
    assert_eq!(learn(&mut it, "q", 14, Finding::Holds), "");
    assert_eq!(word(it.tick(at(16))), "freeze", "nothing of p");
    assert_eq!(word(it.tick(at(99))), "");
    assert_eq!(learn(&mut it, "p", 15, Finding::Holds), "", "begun before");
    assert_eq!(learn(&mut it, "p", 20, Finding::Holds), "", "q may have been lost meanwhile");
    assert_eq!(learn(&mut it, "q", 21, Finding::Undisputed("damaged".into())), "", "no proof");
    assert_eq!(learn(&mut it, "q", 23, Finding::Unknown("EIO".into())), "");
    assert_eq!(learn(&mut it, "p", 24, Finding::Unknown("EIO".into())), "freeze", "told anew");
    assert_eq!(learn(&mut it, "p", 26, Finding::Unknown("EIO".into())), "");
    assert_eq!(learn(&mut it, "p", 28, Finding::Holds), "");
    assert_eq!(learn(&mut it, "q", 29, Finding::Holds), "thaw");
    assert_eq!((word(it.tick(at(43))), word(it.tick(at(44)))), ("", "freeze"));
}

#[test]
fn a_loss_kills_also_what_stands_still_and_nothing_brings_it_back() {
    for frozen in [false, true] {
        let mut it = Watched::begin([pool("p")], at(0), frozen, LIMIT);
        assert_eq!(word(it.learn(&pool("p"), at(1), Finding::Lost(loss()))), "kill");
        assert_eq!(word(it.learn(&pool("p"), at(2), Finding::Holds)), "");
        assert_eq!(word(it.tick(at(99))), "");
        assert_eq!(it.pulse(), &Pulse::Killed);
    }
}

#[test]
fn records_that_cannot_be_read_stop_no_guest_that_runs() {
    let mut it = watched(&["p"]);
    for second in 1..100 {
        assert_eq!(word(it.learn(&pool("p"), at(second), Finding::Undisputed("damaged".into()))), "");
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
                0 => { let _ = it.learn(&id, at(now), Finding::Holds); undisputed[index] = now; }
                1 => { let _ = it.learn(&id, at(now), Finding::Unknown("EIO".into())); }
                2 => { let _ = it.learn(&id, at(now), Finding::Undisputed("gone".into())); undisputed[index] = now; }
                3 if which == 1 && now % 7 == 0 => { let _ = it.learn(&id, at(now), Finding::Lost(loss())); is_lost = true; }
                _ => { now += 4; let _ = it.tick(at(now)); }
            }
            if it.pulse() == &Pulse::Runs {
                prop_assert!(!is_lost);
                prop_assert!(undisputed.iter().all(|second| now - second <= 15), "{undisputed:?} at {now}");
            }
        }
    }
}
