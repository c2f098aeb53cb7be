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

/// Finds the last lines of a log that is read backwards, segment by segment.
#[derive(Debug)]
pub struct LastLines {
    /// Line ends that are still to be passed.
    wanted: u64,
    /// A line end at the very end of the log ends the last line and begins none.
    at_end: bool,
}

impl LastLines {
    pub fn new(lines: u64) -> Self {
        Self { wanted: lines, at_end: true }
    }

    /// Whether nothing before what was taken is wanted.
    pub fn is_complete(&self) -> bool {
        self.wanted == 0
    }

    /// What is wanted of the records before those that were taken already.
    pub fn take(&mut self, mut records: Vec<Record>) -> Vec<Record> {
        if self.is_complete() {
            return Vec::new();
        }
        for index in (0..records.len()).rev() {
            for byte in (0..records[index].data.len()).rev() {
                let at_end = std::mem::replace(&mut self.at_end, false);
                if records[index].data[byte] != b'\n' || at_end {
                    continue;
                }
                self.wanted -= 1;
                if self.is_complete() {
                    let mut kept = records.split_off(index);
                    kept[0].data.drain(..=byte);
                    kept[0].offset += byte as u64 + 1;
                    kept.retain(|record| !record.data.is_empty());
                    return kept;
                }
            }
        }
        records
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(offset: u64, text: &str) -> Record {
        Record { offset, unix_nanos: 7, is_stderr: offset % 2 == 1, data: text.as_bytes().to_vec() }
    }

    #[test]
    fn a_torn_record_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("segment");
        let (first, second) = (record(0, "one\n"), record(5, "two\n"));
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
}
