use std::fs;

use kibo_crds::PoolId;

use super::*;
use crate::pool::fence::{Heart, Life};

fn node() -> NodeId {
    "node-a".parse().unwrap()
}

fn other() -> NodeId {
    "node-b".parse().unwrap()
}

fn pool() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(marker::NODES)).unwrap();
    dir
}

fn beat(heartbeat: u64) -> Beat {
    Beat { format: FORMAT, node: node(), incarnation: Some(Incarnation(3)), heartbeat }
}

fn beat_in(pool: &Path) -> Result<Option<Beat>, FenceError> {
    read(pool, &node()).unwrap().unwrap().beat
}

fn marked(pool: &Path) -> Option<u64> {
    read(pool, &node()).unwrap().unwrap().mark.unwrap().map(|mark| mark.incarnation.0)
}

#[test]
fn others_read_what_the_owner_wrote_and_keep_what_is_theirs() {
    let pool = pool();
    let pool = pool.path();
    assert!(read(pool, &node()).unwrap().is_none(), "no file");
    assert!(write_beat(pool, &beat(1)).is_err(), "a file is never made where there is none");
    sign_in(pool, &node()).unwrap();
    assert_eq!(beat_in(pool).unwrap(), None, "nobody has counted yet");
    write_beat(pool, &beat(1)).unwrap();
    mark(pool, &node(), Incarnation(2), &other()).unwrap();
    write_beat(pool, &beat(2)).unwrap();
    sign_in(pool, &node()).unwrap();
    assert_eq!((beat_in(pool).unwrap(), marked(pool)), (Some(beat(2)), Some(2)));
    let size = fs::metadata(path_of(pool, &node())).unwrap().len();
    assert_eq!(size, LENGTH as u64, "its length never changes");
}

#[test]
fn a_mark_only_goes_up_whoever_makes_it() {
    let pool = pool();
    let pool = pool.path();
    // The victim has never been here.
    for (dead, expected) in [(3, 3), (2, 3), (3, 3), (7, 7), (4, 7), (11, 11)] {
        mark(pool, &node(), Incarnation(dead), &other()).unwrap();
        assert_eq!(marked(pool), Some(expected), "after {dead}");
    }
    sign_in(pool, &node()).unwrap();
    write_beat(pool, &beat(1)).unwrap();
    assert_eq!(marked(pool), Some(11), "its owner comes");
}

/// As when two members mark at once, each after it has read that there is none.
#[test]
fn two_that_mark_at_once_do_not_lose_the_higher_one() {
    let pool = pool();
    let pool = pool.path();
    std::thread::scope(|scope| {
        for dead in [5, 6, 7, 8] {
            scope.spawn(move || mark(pool, &node(), Incarnation(dead), &other()).unwrap());
        }
    });
    assert_eq!(marked(pool), Some(8));
}

#[test]
fn damage_and_a_later_format_are_told_apart() {
    let pool = pool();
    let pool = pool.path();
    let path = path_of(pool, &node());
    sign_in(pool, &node()).unwrap();
    write_beat(pool, &beat(41)).unwrap();
    let whole = fs::read(&path).unwrap();
    let mut bytes = whole.clone();
    let at = bytes.windows(2).position(|two| two == b"41").unwrap();
    bytes[at] = b'9';
    fs::write(&path, &bytes).unwrap();
    assert!(matches!(beat_in(pool), Err(FenceError::Damaged { .. })));
    assert_eq!(marked(pool), None, "what the others wrote can be read");
    fs::write(&path, &bytes[..100]).unwrap();
    assert!(matches!(beat_in(pool), Err(FenceError::Damaged { .. })));
    write_beat(pool, &Beat { format: FORMAT + 1, ..beat(1) }).unwrap();
    assert!(matches!(beat_in(pool), Err(FenceError::LaterFormat { format: 2, .. })));
}

#[test]
fn a_damaged_mark_may_be_one_and_is_mended_by_who_makes_it() {
    let pool = pool();
    let pool = pool.path();
    let path = path_of(pool, &node());
    mark(pool, &node(), Incarnation(1), &other()).unwrap();
    mark(pool, &node(), Incarnation(2), &other()).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes[BLOCK * 3 + 3] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let fence = read(pool, &node()).unwrap().unwrap();
    assert!(matches!(fence.mark, Err(FenceError::DamagedMark { .. })));
    // Another one can be made beside it, and is heard though the damaged one may be higher.
    mark(pool, &node(), Incarnation(3), &other()).unwrap();
    let fence = read(pool, &node()).unwrap().unwrap();
    assert_eq!(fence.highest.map(|mark| mark.incarnation), Some(Incarnation(3)));
    mark(pool, &node(), Incarnation(6), &other()).unwrap();
    assert_eq!(marked(pool), Some(6), "in the block of the damaged one");
}

#[test]
fn a_mark_of_a_later_format_is_not_guessed_at() {
    let pool = pool();
    let pool = pool.path();
    mark(pool, &node(), Incarnation(1), &other()).unwrap();
    let later = Mark { format: FORMAT + 1, incarnation: Incarnation(9), by: other(), unix_millis: 0 };
    let file = OpenOptions::new().write(true).open(path_of(pool, &node())).unwrap();
    file.write_all_at(&block::encode(&later).unwrap(), BLOCK as u64).unwrap();
    let fence = read(pool, &node()).unwrap().unwrap();
    assert!(matches!(fence.mark, Err(FenceError::LaterFormat { format: 2, .. })));
    assert!(mark(pool, &node(), Incarnation(2), &other()).is_err());
}

#[test]
fn a_daemon_goes_on_counting_where_the_one_before_it_stopped() {
    let pool = pool();
    let pool = pool.path();
    sign_in(pool, &node()).unwrap();
    write_beat(pool, &beat(41)).unwrap();
    let life = Life::default();
    life.set(Some(Incarnation(4)));
    let id: PoolId = "p".parse().unwrap();
    let heart = Heart::start(id, pool.to_owned(), node(), life).unwrap();
    let until = std::time::Instant::now() + Duration::from_secs(60);
    let counted = loop {
        let now = beat_in(pool).unwrap().unwrap();
        if now.heartbeat > 41 || std::time::Instant::now() > until {
            break now;
        }
        thread::sleep(Duration::from_millis(5));
    };
    drop(heart);
    assert_eq!((counted.heartbeat, counted.incarnation), (42, Some(Incarnation(4))));
}
