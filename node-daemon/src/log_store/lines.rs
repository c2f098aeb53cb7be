//! What of a log somebody wants: whole lines, from some time on, with their times, up to so many bytes.

use bytes::Bytes;
use jiff::Timestamp;
use kibo_crds::InstanceId;

use super::segment::Record;
use crate::instance::LogChunk;

/// What is wanted of a log; everything by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Lines from the end.
    pub tail: Option<u64>,
    /// Of these, the lines that began then or later.
    pub since_unix_nanos: Option<u64>,
    /// Each line begins with its time.
    pub timestamps: bool,
    /// Bytes, in all.
    pub limit: Option<u64>,
}

/// Makes of records what is wanted of them, in their order.
#[derive(Debug)]
pub struct Lines {
    since: u64,
    timestamps: bool,
    left: u64,
    /// Of standard output and of standard error.
    outputs: [Line; 2],
    instance: Option<InstanceId>,
}

/// Where an output is in its line.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    is_begun: bool,
    is_wanted: bool,
}

impl Lines {
    pub fn new(wanted: Wanted) -> Self {
        Self {
            since: wanted.since_unix_nanos.unwrap_or_default(),
            timestamps: wanted.timestamps,
            left: wanted.limit.unwrap_or(u64::MAX),
            outputs: [Line::default(); 2],
            instance: None,
        }
    }

    /// Nothing more is wanted.
    pub const fn is_over(&self) -> bool {
        self.left == 0
    }

    /// What is wanted of one record.
    pub fn take(&mut self, instance: InstanceId, record: &Record) -> Option<LogChunk> {
        let mut data = Vec::with_capacity(record.data.len());
        if self.instance.replace(instance).is_some_and(|before| before != instance) {
            self.end_lines(&mut data);
        }
        // With times in it, text of the one output in the middle of a line of the other could not be told apart.
        if self.timestamps && self.outputs[usize::from(!record.is_stderr)].is_begun {
            self.end_lines(&mut data);
        }
        let line = &mut self.outputs[usize::from(record.is_stderr)];
        for piece in record.data.split_inclusive(|byte| *byte == b'\n') {
            if !std::mem::replace(&mut line.is_begun, true) {
                line.is_wanted = record.unix_nanos >= self.since;
                if line.is_wanted && self.timestamps {
                    data.extend_from_slice(time(record.unix_nanos).as_bytes());
                }
            }
            if line.is_wanted {
                data.extend_from_slice(piece);
            }
            line.is_begun = !piece.ends_with(b"\n");
        }
        data.truncate(usize::try_from(self.left).unwrap_or(usize::MAX));
        self.left -= data.len() as u64;
        (!data.is_empty()).then(|| LogChunk { is_stderr: record.is_stderr, data: Bytes::from(data) })
    }

    /// An Instance that ended in the middle of a line does not begin the next one's.
    fn end_lines(&mut self, data: &mut Vec<u8>) {
        let lines = std::mem::take(&mut self.outputs);
        if lines.iter().any(|line| line.is_begun && line.is_wanted) {
            data.push(b'\n');
        }
    }
}

/// As Kubernetes writes it, with the space behind.
fn time(unix_nanos: u64) -> String {
    let time = Timestamp::from_nanosecond(unix_nanos.into()).unwrap_or(Timestamp::MAX);
    time.strftime("%Y-%m-%dT%H:%M:%S%.9fZ ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(seconds: u64, is_stderr: bool, text: &str) -> Record {
        Record { offset: 0, unix_nanos: seconds * 1_000_000_000, is_stderr, data: text.as_bytes().to_vec() }
    }

    fn text(wanted: Wanted, records: &[(InstanceId, Record)]) -> String {
        let mut lines = Lines::new(wanted);
        let mut text = String::new();
        for (instance, record) in records {
            if lines.is_over() {
                break;
            }
            let chunk = lines.take(*instance, record);
            text += &chunk.map(|chunk| String::from_utf8(chunk.data.to_vec()).unwrap()).unwrap_or_default();
        }
        text
    }

    #[test]
    fn a_line_belongs_to_the_time_when_it_began_and_is_never_torn() {
        let instance = InstanceId::generate();
        let records = [
            (instance, record(1, false, "old\nbegun ")),
            (instance, record(2, true, "error\n")),
            (instance, record(3, false, "ended\nnew\n")),
        ];
        let since = |seconds: u64| Wanted { since_unix_nanos: Some(seconds * 1_000_000_000), ..Wanted::default() };
        assert_eq!(text(since(0), &records), "old\nbegun error\nended\nnew\n");
        assert_eq!(text(since(2), &records), "error\nnew\n");
        assert_eq!(text(since(3), &records), "new\n");
        assert_eq!(text(since(4), &records), "");
        let timed = Wanted { timestamps: true, ..since(2) };
        let expected = "1970-01-01T00:00:02.000000000Z error\n1970-01-01T00:00:03.000000000Z ended\n\
                        1970-01-01T00:00:03.000000000Z new\n";
        assert_eq!(text(timed, &records), expected);
        let timed = Wanted { timestamps: true, ..since(0) };
        let expected = "1970-01-01T00:00:01.000000000Z old\n1970-01-01T00:00:01.000000000Z begun \n\
                        1970-01-01T00:00:02.000000000Z error\n1970-01-01T00:00:03.000000000Z ended\n\
                        1970-01-01T00:00:03.000000000Z new\n";
        assert_eq!(text(timed, &records), expected, "a time is never in the middle of a line");
        assert_eq!(text(Wanted { limit: Some(6), ..since(2) }, &records), "error\n");
        assert_eq!(text(Wanted { limit: Some(8), ..since(2) }, &records), "error\nne");
    }

    #[test]
    fn another_instance_begins_its_own_line() {
        let (first, second) = (InstanceId::generate(), InstanceId::generate());
        let records = [(first, record(1, false, "cut off")), (second, record(2, false, "anew\n"))];
        assert_eq!(text(Wanted::default(), &records), "cut off\nanew\n");
        let records = [(first, record(1, true, "cut off")), (second, record(2, false, "anew\n"))];
        assert_eq!(text(Wanted::default(), &records), "cut off\nanew\n");
    }
}
