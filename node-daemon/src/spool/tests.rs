use std::{fs::File, os::fd::AsRawFd as _};

use proptest::prelude::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;

const WORKSPACE: &str = "6f9619ff-8b86-d011-b42d-00c04fc964ff";

/// Length and checksum.
const HEADER_OF_A_RECORD: usize = 8;

fn taken() -> Kind {
    Kind::ObjectsTaken(v1::ObjectsTaken::default())
}

fn ended() -> Kind {
    Kind::Ended(v1::Ended { reason: v1::EndReason::Stopped.into(), ..Default::default() })
}

fn exited() -> Kind {
    Kind::EntrypointExited(v1::EntrypointExited { code: Some(1), ..Default::default() })
}

fn seqs(spool: &EventSpool) -> Vec<u64> {
    spool.unacked().iter().map(|event| event.seq).collect()
}

#[test]
fn events_are_numbered_and_found_again_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let instance = InstanceId::generate();
    let spool = EventSpool::open(dir.path()).unwrap();
    assert_eq!(spool.append(instance, WORKSPACE, taken()).unwrap(), 1);
    assert_eq!(spool.append(instance, WORKSPACE, exited()).unwrap(), 2);
    let before = spool.unacked();
    drop(spool);
    let spool = EventSpool::open(dir.path()).unwrap();
    assert_eq!(spool.unacked(), before);
    assert_eq!(spool.append(instance, WORKSPACE, exited()).unwrap(), 3);
}

#[test]
fn what_is_acked_does_not_come_back_and_numbers_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let instance = InstanceId::generate();
    let spool = EventSpool::open(dir.path()).unwrap();
    for _ in 0..3 {
        spool.append(instance, WORKSPACE, exited()).unwrap();
    }
    spool.ack(instance, 2);
    assert_eq!(seqs(&spool), [3]);
    spool.ack(instance, 3);
    drop(spool);
    let spool = EventSpool::open(dir.path()).unwrap();
    assert!(seqs(&spool).is_empty());
    assert_eq!(spool.append(instance, WORKSPACE, ended()).unwrap(), 4);
    assert_eq!(spool.ended(), [(instance, WORKSPACE.to_owned())]);
}

#[test]
fn the_journal_goes_when_the_end_is_acked() {
    let dir = tempfile::tempdir().unwrap();
    let instance = InstanceId::generate();
    let spool = EventSpool::open(dir.path()).unwrap();
    spool.append(instance, WORKSPACE, ended()).unwrap();
    assert!(matches!(spool.append(instance, WORKSPACE, ended()), Err(SpoolError::Ended { .. })));
    assert!(spool.has_ended(instance));
    spool.ack(instance, 1);
    assert!(!spool.has_ended(instance));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn at_the_bound_the_oldest_of_what_a_guest_can_repeat_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let instance = InstanceId::generate();
    let spool = EventSpool::open(dir.path()).unwrap();
    let last = MAX_REPEATED as u64 + 11;
    spool.append(instance, WORKSPACE, taken()).unwrap();
    for _ in 2..last {
        spool.append(instance, WORKSPACE, exited()).unwrap();
    }
    assert_eq!(spool.append(instance, WORKSPACE, ended()).unwrap(), last);
    // What was taken, the newest of the rest, and the end.
    let kept: Vec<u64> = [1].into_iter().chain(11..=last).collect();
    assert_eq!(seqs(&spool), kept);
    drop(spool);
    let spool = EventSpool::open(dir.path()).unwrap();
    assert_eq!(seqs(&spool), kept, "a restart comes to the same");
    spool.ack(instance, last - 1);
    assert_eq!(seqs(&spool), [last]);
}

#[test]
fn a_guest_that_never_rests_does_not_fill_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let instance = InstanceId::generate();
    let path = dir.path().join(format!("{instance}{SUFFIX}"));
    let spool = EventSpool::open(dir.path()).unwrap();
    let blocked = || Kind::Blocked(v1::Blocked { message: "é".repeat(10_000) });
    let mut longest = 0;
    spool.append(instance, WORKSPACE, taken()).unwrap();
    // As if only the last few were not acknowledged: each is long.
    for number in 2..400 {
        let seq = spool.append(instance, WORKSPACE, blocked()).unwrap();
        assert_eq!(seq, number);
        if seq.is_multiple_of(10) {
            spool.ack(instance, seq - 5);
        }
        longest = longest.max(fs::metadata(&path).unwrap().len());
    }
    assert!(longest < 200 << 10, "{longest} bytes");
    let before = spool.unacked();
    drop(spool);
    let spool = EventSpool::open(dir.path()).unwrap();
    assert_eq!(spool.unacked(), before);
    assert_eq!(spool.append(instance, WORKSPACE, ended()).unwrap(), 400);
}

#[test]
fn a_journal_that_is_written_anew_keeps_the_gaps_between_its_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let instance = InstanceId::generate();
    let path = dir.path().join(format!("{instance}{SUFFIX}"));
    let spool = EventSpool::open(dir.path()).unwrap();
    spool.append(instance, WORKSPACE, taken()).unwrap();
    // So many that they are several times as long as what is kept of them.
    let mut shrunk = false;
    let mut length = 0;
    while !shrunk {
        spool.append(instance, WORKSPACE, exited()).unwrap();
        let now = fs::metadata(&path).unwrap().len();
        shrunk = now < length;
        length = now;
    }
    let (kept, last) = (seqs(&spool), spool.last_seq(instance));
    assert_eq!((kept.len(), kept[0], kept[1]), (MAX_REPEATED + 1, 1, last + 1 - MAX_REPEATED as u64));
    drop(spool);
    let spool = EventSpool::open(dir.path()).unwrap();
    assert_eq!(seqs(&spool), kept);
    assert_eq!(spool.append(instance, WORKSPACE, exited()).unwrap(), last + 1);
}

#[test]
fn a_long_journal_is_written_anew_and_keeps_its_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let instance = InstanceId::generate();
    let spool = EventSpool::open(dir.path()).unwrap();
    let message = "m".repeat(40 << 10);
    for _ in 0..2 {
        let kind = Kind::Available(v1::Available { guest_boot_id: message.clone(), ..v1::Available::default() });
        let seq = spool.append(instance, WORKSPACE, kind).unwrap();
        spool.ack(instance, seq);
    }
    let path = dir.path().join(format!("{instance}{SUFFIX}"));
    assert!(fs::metadata(&path).unwrap().len() < 200);
    assert_eq!(spool.append(instance, WORKSPACE, exited()).unwrap(), 3);
    drop(spool);
    let spool = EventSpool::open(dir.path()).unwrap();
    assert_eq!(seqs(&spool), [3]);
}

/// In a process of its own, whose limit of open files is reached in the middle of a compaction.
#[test]
fn a_compaction_that_fails_half_way_loses_no_later_event() {
    const CHILD: &str = "KIBO_TEST_SPOOL_DIR";
    let instance: InstanceId = "inst-01arz3ndektsv4rrffq69g5fav".parse().unwrap();
    if let Some(dir) = std::env::var_os(CHILD) {
        let spool = EventSpool::open(Path::new(&dir)).unwrap();
        let limit = getrlimit(Resource::Nofile);
        let next = File::open("/dev/null").unwrap().as_raw_fd();
        // One more file may be open: the new journal, and not its directory at the same time.
        let current = Some(u64::try_from(next).unwrap() + 1);
        setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
        spool.ack(instance, spool.last_seq(instance));
        assert!(spool.append(instance, WORKSPACE, exited()).is_err(), "it would not outlive a crash");
        setrlimit(Resource::Nofile, limit).unwrap();
        spool.append(instance, WORKSPACE, ended()).unwrap();
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let spool = EventSpool::open(dir.path()).unwrap();
    // Long enough to be written anew.
    let guest_boot_id = "m".repeat(70 << 10);
    let last = spool
        .append(instance, WORKSPACE, Kind::Available(v1::Available { guest_boot_id, ..v1::Available::default() }))
        .unwrap();
    drop(spool);
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "spool::tests::a_compaction_that_fails_half_way_loses_no_later_event", "--test-threads=1"])
        .env(CHILD, dir.path())
        .status();
    assert!(status.unwrap().success());
    let spool = EventSpool::open(dir.path()).unwrap();
    assert!(spool.has_ended(instance), "the event that was stored after the compaction is there");
    assert_eq!(seqs(&spool), [last + 1]);
}

#[test]
fn a_clock_that_goes_back_keeps_the_order_of_each_instance() {
    let dir = tempfile::tempdir().unwrap();
    let spool = EventSpool::open(dir.path()).unwrap();
    let instances = [InstanceId::generate(), InstanceId::generate()];
    for number in 0..20 {
        for (index, instance) in (0u64..).zip(instances) {
            let seq = spool.append(instance, WORKSPACE, exited()).unwrap();
            let mut journals = spool.lock();
            // Up for one, down for the other, and all over again.
            let time = if index == 0 { number % 7 + 1 } else { 20 - number };
            let at = usize::try_from(seq - 1).unwrap();
            journals.get_mut(&instance).unwrap().pending_mut()[at].unix_nanos = time;
        }
    }
    let events = spool.unacked();
    assert_eq!(events.len(), 40);
    for instance in instances {
        let own = events.iter().filter(|event| event.instance_id == instance.to_string());
        assert_eq!(own.map(|event| event.seq).collect::<Vec<_>>(), (1..=20).collect::<Vec<_>>());
    }
    assert_eq!(events[0].instance_id, instances[0].to_string(), "the one whose first event is the oldest");
}

#[test]
fn acks_wake_whoever_waits() {
    let dir = tempfile::tempdir().unwrap();
    let instance = InstanceId::generate();
    let spool = EventSpool::open(dir.path()).unwrap();
    let changes = spool.changes();
    spool.append(instance, WORKSPACE, taken()).unwrap();
    assert!(changes.has_changed().unwrap());
}

/// The journal with one byte changed, and what is read of it then.
fn damaged_at(dir: &Path, instance: InstanceId, at: usize) -> EventSpool {
    let path = dir.join(format!("{instance}{SUFFIX}"));
    let mut bytes = fs::read(&path).unwrap();
    bytes[at] ^= 0x40;
    fs::write(&path, &bytes).unwrap();
    let spool = EventSpool::open(dir).unwrap();
    assert_eq!(fs::read(path.with_extension("events.damaged")).unwrap(), bytes, "it is put aside as it was");
    spool
}

#[test]
fn a_damaged_journal_stops_nobody_and_gives_no_number_twice() {
    let dir = tempfile::tempdir().unwrap();
    let instance = InstanceId::generate();
    let spool = EventSpool::open(dir.path()).unwrap();
    let path = dir.path().join(format!("{instance}{SUFFIX}"));
    let mut begins = Vec::new();
    for kind in [taken(), exited(), exited(), exited()] {
        begins.push(usize::try_from(fs::metadata(&path).map_or(0, |it| it.len())).unwrap());
        spool.append(instance, WORKSPACE, kind).unwrap();
    }
    spool.ack(instance, 1);
    drop(spool);
    // In the middle: the others are told.
    let spool = damaged_at(dir.path(), instance, begins[1] + HEADER_OF_A_RECORD);
    assert_eq!(seqs(&spool), [3, 4]);
    let next = spool.append(instance, WORKSPACE, exited()).unwrap();
    assert!(next > 1 << 32);
    drop(spool);
    let spool = EventSpool::open(dir.path()).unwrap();
    assert_eq!((seqs(&spool), spool.last_seq(instance)), (vec![3, 4, next], next), "and a restart comes to the same");
    spool.ack(instance, next);
    drop(spool);
    // The last record may have been told as well, whatever it was.
    let last = usize::try_from(fs::metadata(&path).unwrap().len()).unwrap() - 1;
    let spool = damaged_at(dir.path(), instance, last);
    let ended = spool.append(instance, WORKSPACE, ended()).unwrap();
    assert!(ended > next);
    spool.ack(instance, ended);
    assert!(!path.exists(), "its end takes it away");
}

#[test]
fn of_a_journal_that_is_nothing_but_rubbish_the_end_can_still_be_told() {
    let dir = tempfile::tempdir().unwrap();
    let instance = InstanceId::generate();
    EventSpool::open(dir.path()).unwrap().append(instance, WORKSPACE, taken()).unwrap();
    let spool = damaged_at(dir.path(), instance, HEADER_OF_A_RECORD);
    assert!(seqs(&spool).is_empty() && spool.ended().is_empty());
    let seq = spool.append(instance, WORKSPACE, ended()).unwrap();
    assert_eq!((spool.unacked().len(), spool.ended()), (1, vec![(instance, WORKSPACE.to_owned())]));
    assert!(seq > 1 << 32);
}

proptest! {
    /// Killed at any byte of a write: every event that was reported as written is there, in order.
    #[test]
    fn a_torn_tail_loses_only_what_was_not_reported(events in 1usize..6, cut in 0usize..400) {
        let dir = tempfile::tempdir().unwrap();
        let instance = InstanceId::generate();
        let path = dir.path().join(format!("{instance}{SUFFIX}"));
        let spool = EventSpool::open(dir.path()).unwrap();
        let mut lengths = vec![0];
        for _ in 0..events {
            spool.append(instance, WORKSPACE, exited()).unwrap();
            lengths.push(usize::try_from(fs::metadata(&path).unwrap().len()).unwrap());
        }
        drop(spool);
        let bytes = fs::read(&path).unwrap();
        let cut = cut.min(bytes.len());
        fs::write(&path, &bytes[..cut]).unwrap();
        let whole = lengths.iter().filter(|length| **length <= cut).count() - 1;
        let spool = EventSpool::open(dir.path()).unwrap();
        prop_assert_eq!(seqs(&spool), (1..=whole as u64).collect::<Vec<_>>());
        prop_assert_eq!(spool.append(instance, WORKSPACE, exited()).unwrap(), whole as u64 + 1);
    }

    /// Rubbish behind the last record, as a lost write of a file system leaves it, is cut off.
    #[test]
    fn rubbish_at_the_end_is_cut_off(rubbish in proptest::collection::vec(any::<u8>(), 1..64)) {
        let dir = tempfile::tempdir().unwrap();
        let instance = InstanceId::generate();
        let path = dir.path().join(format!("{instance}{SUFFIX}"));
        EventSpool::open(dir.path()).unwrap().append(instance, WORKSPACE, taken()).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes.extend(rubbish);
        fs::write(&path, bytes).unwrap();
        let spool = EventSpool::open(dir.path()).unwrap();
        prop_assert_eq!(seqs(&spool), [1]);
        // Rubbish that looks like a record may have been one: its number is not given again.
        let next = spool.append(instance, WORKSPACE, exited()).unwrap();
        prop_assert!(next > 1);
        drop(spool);
        prop_assert_eq!(seqs(&EventSpool::open(dir.path()).unwrap()), [1, next]);
    }
}
