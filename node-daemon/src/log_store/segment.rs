//! One file of a log: records, each with its place in what the Instance printed.
//!
//! A record is: length of the data (4 bytes), offset (8), nanoseconds since 1970 (8), output (1), data; integers little
//! endian. A daemon that is killed in the middle of a write leaves a torn record at the end, which is cut off.

use std::{
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
};

use kibo_crds::InstanceId;

const HEADER: usize = 4 + 8 + 8 + 1;
const STDERR: u8 = 2;

/// Names a file: `<number>.<instance>`. Numbers grow over all Instances of a Workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Segment {
    pub number: u64,
    pub instance: InstanceId,
}

impl Segment {
    pub fn path(self, directory: &Path) -> PathBuf {
        directory.join(format!("{:010}.{}", self.number, self.instance))
    }

    fn parse(name: &str) -> Option<Self> {
        let (number, instance) = name.split_once('.')?;
        Some(Self { number: number.parse().ok()?, instance: instance.parse().ok()? })
    }

    /// All of a directory, oldest first.
    pub fn list(directory: &Path) -> io::Result<Vec<Self>> {
        let entries = match directory.read_dir() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut segments = Vec::new();
        for entry in entries {
            segments.extend(entry?.file_name().to_str().and_then(Self::parse));
        }
        segments.sort_unstable();
        Ok(segments)
    }
}

/// One piece of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Of the first byte, over all that the Instance printed.
    pub offset: u64,
    pub unix_nanos: u64,
    pub is_stderr: bool,
    pub data: Vec<u8>,
}

impl Record {
    pub fn end(&self) -> u64 {
        self.offset + self.data.len() as u64
    }

    pub fn encode(&self) -> Vec<u8> {
        let len = u32::try_from(self.data.len()).expect("a piece of the log is far below 4 GiB");
        let mut bytes = Vec::with_capacity(HEADER + self.data.len());
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&self.offset.to_le_bytes());
        bytes.extend_from_slice(&self.unix_nanos.to_le_bytes());
        bytes.push(if self.is_stderr { STDERR } else { 1 });
        bytes.extend_from_slice(&self.data);
        bytes
    }

    /// Takes one off the front; `None` when what is left is not a whole one.
    fn decode(bytes: &mut &[u8]) -> Option<Self> {
        let (header, rest) = bytes.split_at_checked(HEADER)?;
        let number = |range: std::ops::Range<usize>| header[range].try_into().ok().map(u64::from_le_bytes);
        let len = u32::from_le_bytes(header[..4].try_into().ok()?) as usize;
        let (data, rest) = rest.split_at_checked(len)?;
        *bytes = rest;
        Some(Self {
            offset: number(4..12)?,
            unix_nanos: number(12..20)?,
            is_stderr: header[20] == STDERR,
            data: data.to_vec(),
        })
    }
}

/// The whole records from a place in a file on, and the place after them.
pub fn read_from(path: &Path, position: u64) -> io::Result<(Vec<Record>, u64)> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(position))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let mut rest = bytes.as_slice();
    let mut records = Vec::new();
    while let Some(record) = Record::decode(&mut rest) {
        records.push(record);
    }
    Ok((records, position + (bytes.len() - rest.len()) as u64))
}

/// Finds the last lines of a log that is read backwards, segment by segment. Lines are counted by where they end; each
/// output has its own, so that none is torn where the outputs alternate.
#[derive(Debug)]
pub struct LastLines {
    /// Lines that are still to be found.
    wanted: u64,
    /// Of standard output and of standard error.
    lines: [Line; 2],
}

#[derive(Clone, Copy, Debug, Default)]
struct Line {
    /// Within one that is wanted.
    is_open: bool,
    /// Nothing that comes before is wanted.
    is_cut: bool,
}

impl LastLines {
    pub fn new(lines: u64) -> Self {
        Self { wanted: lines, lines: [Line::default(); 2] }
    }

    /// Whether nothing before what was taken is wanted.
    pub fn is_complete(&self) -> bool {
        self.wanted == 0 && self.lines.iter().all(|line| line.is_cut || !line.is_open)
    }

    /// What follows (before it in time) is of another Instance, and so are its lines.
    pub fn begin_instance(&mut self) {
        for line in &mut self.lines {
            line.is_open = false;
        }
    }

    /// What is wanted of the records before those that were taken already.
    pub fn take(&mut self, records: Vec<Record>) -> Vec<Record> {
        let mut kept: Vec<Record> = records.into_iter().rev().filter_map(|record| self.cut(record)).collect();
        kept.reverse();
        kept
    }

    fn cut(&mut self, mut record: Record) -> Option<Record> {
        let line = &mut self.lines[usize::from(record.is_stderr)];
        let mut start = record.data.len();
        while start > 0 && !line.is_cut {
            let ends_line = record.data[start - 1] == b'\n' || !line.is_open;
            if ends_line && self.wanted == 0 {
                line.is_cut = true;
                break;
            }
            if ends_line {
                self.wanted -= 1;
                line.is_open = true;
            }
            start -= 1;
        }
        record.data.drain(..start);
        record.offset += start as u64;
        (!record.data.is_empty()).then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(offset: u64, text: &str) -> Record {
        Record { offset, unix_nanos: 7, is_stderr: false, data: text.as_bytes().to_vec() }
    }

    fn error(offset: u64, text: &str) -> Record {
        Record { is_stderr: true, ..record(offset, text) }
    }

    #[test]
    fn a_torn_record_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("segment");
        let (first, second) = (record(0, "one\n"), error(5, "two\n"));
        let mut bytes = first.encode();
        let whole = bytes.len() as u64;
        bytes.extend(second.encode());
        for cut in whole..bytes.len() as u64 {
            std::fs::write(&path, &bytes[..usize::try_from(cut).unwrap()]).unwrap();
            assert_eq!(read_from(&path, 0).unwrap(), (vec![first.clone()], whole), "cut at {cut}");
        }
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read_from(&path, whole).unwrap(), (vec![second], bytes.len() as u64));
    }

    #[test]
    fn the_last_lines_are_counted_over_records_and_segments() {
        let text = |records: &[Record]| {
            records.iter().map(|record| String::from_utf8_lossy(&record.data).into_owned()).collect::<String>()
        };
        for (lines, expected, complete) in [
            (0, "", true),
            (1, "e", true),
            (2, "d\ne", true),
            (3, "bc\nd\ne", true),
            (4, "a\nbc\nd\ne", false),
            (9, "a\nbc\nd\ne", false),
        ] {
            let records = [record(0, "a\nb"), record(3, "c\nd\n"), record(7, "e")];
            for older in 0..=records.len() {
                let (before, after) = records.split_at(older);
                let mut last = LastLines::new(lines);
                let after = last.take(after.to_vec());
                let before = last.take(before.to_vec());
                let found = text(&before) + &text(&after);
                assert_eq!((found.as_str(), last.is_complete()), (expected, complete), "{lines} lines, cut at {older}");
            }
        }
        assert_eq!(text(&LastLines::new(1).take(vec![record(0, "a\nb\n")])), "b\n");
    }

    #[test]
    fn the_last_lines_of_outputs_that_alternate_are_whole() {
        for (lines, expected) in [
            (1, "two parts\n"),
            (2, "two error\nparts\n"),
            (3, "one\ntwo error\nparts\n"),
            (9, "one\ntwo error\nparts\n"),
        ] {
            let records = vec![record(0, "one\ntwo "), error(8, "error\n"), record(14, "parts\n")];
            let kept = LastLines::new(lines).take(records);
            let found: String = kept.iter().map(|record| String::from_utf8_lossy(&record.data).into_owned()).collect();
            assert_eq!(found, expected, "{lines} lines");
        }
    }
}
