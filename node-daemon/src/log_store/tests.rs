use futures::{FutureExt as _, StreamExt as _};

use super::*;

const WORKSPACE: &str = "11111111-2222-3333-4444-555555555555";

struct Fixture {
    _directory: tempfile::TempDir,
    store: LogStore,
    workspace: ObjectUid,
}

fn fixture(bounds: LogBounds) -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let store = LogStore::open(directory.path().join("logs"), bounds).unwrap();
    Fixture { _directory: directory, store, workspace: WORKSPACE.parse().unwrap() }
}

impl Fixture {
    fn writer(&self, instance: InstanceId) -> LogWriter {
        self.store.writer(&self.workspace, instance)
    }

    async fn text(&self, tail: Option<u64>) -> String {
        self.read(Wanted { tail, ..Wanted::default() }).await
    }

    async fn read(&self, wanted: Wanted) -> String {
        let chunks: Vec<LogChunk> = self.store.read(&self.workspace, wanted, false).unwrap().collect().await;
        chunks.iter().map(|chunk| String::from_utf8_lossy(&chunk.data).into_owned()).collect()
    }
}

fn piece(offset: u64, text: &str) -> v1::LogData {
    v1::LogData { offset, time_unix_nanos: 1, output: v1::Output::Stdout.into(), data: text.as_bytes().to_vec() }
}

#[tokio::test]
async fn what_comes_twice_is_stored_once() {
    let fixture = fixture(LogBounds::default());
    let instance = InstanceId::generate();
    let mut writer = fixture.writer(instance);
    writer.store(&piece(0, "hello "));
    writer.store(&piece(0, "hello "));
    writer.store(&piece(3, "lo world\n"));
    assert_eq!(writer.offset(), 12);
    assert_eq!(fixture.text(None).await, "hello world\n");
}

#[tokio::test]
async fn a_new_daemon_goes_on_where_the_old_one_was() {
    let fixture = fixture(LogBounds::default());
    let (first, second) = (InstanceId::generate(), InstanceId::generate());
    let mut writer = fixture.writer(first);
    writer.store(&piece(0, "a\n"));
    drop(writer);
    let mut writer = fixture.writer(first);
    assert_eq!(writer.offset(), 2);
    writer.store(&piece(2, "b\n"));
    let mut writer = fixture.writer(second);
    assert_eq!(writer.offset(), 0, "another Instance counts from its own start");
    writer.store(&piece(0, "c\n"));
    assert_eq!(fixture.text(None).await, "a\nb\nc\n");
    assert_eq!(fixture.text(Some(2)).await, "b\nc\n");
}

#[tokio::test]
async fn the_oldest_part_goes_when_there_is_too_much() {
    let fixture = fixture(LogBounds { segment_bytes: 40, segments: 2, ..LogBounds::default() });
    let mut writer = fixture.writer(InstanceId::generate());
    for number in 0..10 {
        writer.store(&piece(number * 10, "123456789\n"));
    }
    assert_eq!(fixture.text(None).await.lines().count(), 4, "two segments of two records");
    assert_eq!(Segment::list(&fixture.store.directory(&fixture.workspace)).unwrap().len(), 2);
}

#[tokio::test]
async fn a_follower_gets_what_comes_until_the_writer_is_gone() {
    let fixture = fixture(LogBounds { segment_bytes: 30, segments: 8, ..LogBounds::default() });
    let mut writer = fixture.writer(InstanceId::generate());
    writer.store(&piece(0, "old\nnew\n"));
    let mut follower =
        Box::pin(fixture.store.read(&fixture.workspace, Wanted { tail: Some(1), ..Wanted::default() }, true).unwrap());
    assert_eq!(follower.next().await.unwrap().data, "new\n");
    assert!(follower.next().now_or_never().is_none(), "nothing more yet");
    writer.store(&piece(8, "one\n"));
    writer.store(&piece(12, "two\n"));
    drop(writer);
    let rest: Vec<LogChunk> = follower.collect().await;
    let rest: Vec<&[u8]> = rest.iter().map(|chunk| chunk.data.as_ref()).collect();
    assert_eq!(rest, [b"one\n", b"two\n"]);
}

#[tokio::test]
async fn lines_have_their_times_over_restarts_of_daemon_and_guest() {
    let fixture = fixture(LogBounds { segment_bytes: 40, segments: 8, ..LogBounds::default() });
    let (first, second) = (InstanceId::generate(), InstanceId::generate());
    let at = |seconds: u64, offset: u64, text: &str| v1::LogData {
        time_unix_nanos: seconds * 1_000_000_000,
        ..piece(offset, text)
    };
    let mut writer = fixture.writer(first);
    writer.store(&at(10, 0, "one\ntwo, in "));
    drop(writer);
    let mut writer = fixture.writer(first);
    writer.store(&at(20, 12, "two parts\n"));
    writer.store(&at(30, 22, "cut off"));
    let mut writer = fixture.writer(second);
    writer.store(&at(40, 0, "three\n"));
    let since = |seconds: u64| Wanted { since_unix_nanos: Some(seconds * 1_000_000_000), ..Wanted::default() };
    assert_eq!(fixture.read(since(10)).await, "one\ntwo, in two parts\ncut off\nthree\n");
    assert_eq!(fixture.read(since(20)).await, "cut off\nthree\n");
    let timed = fixture.read(Wanted { timestamps: true, tail: Some(2), ..Wanted::default() }).await;
    assert_eq!(timed, "1970-01-01T00:00:30.000000000Z cut off\n1970-01-01T00:00:40.000000000Z three\n");
    assert_eq!(fixture.read(Wanted { limit: Some(5), ..Wanted::default() }).await, "one\nt");
    let mut follower = Box::pin(fixture.store.read(&fixture.workspace, since(50), true).unwrap());
    assert!(follower.next().now_or_never().is_none(), "nothing of that time yet");
    writer.store(&at(49, 6, "four\n"));
    writer.store(&at(51, 11, "five\n"));
    assert_eq!(follower.next().await.unwrap().data, "five\n");
}

#[tokio::test]
async fn a_workspace_without_a_log_has_an_empty_one() {
    let fixture = fixture(LogBounds::default());
    assert_eq!(fixture.text(None).await, "");
    assert_eq!(fixture.text(Some(3)).await, "");
    fixture.store.remove(&fixture.workspace).unwrap();
}

#[tokio::test]
async fn times_do_not_go_back_with_the_clock_of_a_guest() {
    let fixture = fixture(LogBounds::default());
    let at =
        |offset, seconds: u64, text| v1::LogData { time_unix_nanos: seconds * 1_000_000_000, ..piece(offset, text) };
    let instance = InstanceId::generate();
    let mut writer = fixture.writer(instance);
    writer.store(&at(0, 5, "a\n"));
    writer.store(&at(2, 3, "b\n"));
    drop(writer);
    fixture.writer(instance).store(&at(4, 4, "c\n"));
    let mut next = fixture.writer(InstanceId::generate());
    next.store(&at(0, 2, "d\n"));
    next.store(&at(2, 6, "e\n"));
    let since = Wanted { since_unix_nanos: Some(5_000_000_000), timestamps: true, ..Wanted::default() };
    let line = |seconds: u64, text: &str| format!("1970-01-01T00:00:0{seconds}.000000000Z {text}\n");
    let expected = [line(5, "a"), line(5, "b"), line(5, "c"), line(5, "d"), line(6, "e")].concat();
    assert_eq!(fixture.read(since).await, expected);
}
