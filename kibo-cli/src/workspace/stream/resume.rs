//! A log that is followed, read in pieces that may break off anywhere: where it was, and how it goes on.
//!
//! Every line comes with the time at which it was printed, and the node gives the same times each time it is asked.
//! So what was printed is known by the time of the last line, how many lines of that time there were, and how much of
//! the last one. Who reads again from that time on skips exactly that.

use jiff::Timestamp;

/// Longest time in front of a line; RFC 3339 with nanoseconds has 30 characters.
const LONGEST_TIME: usize = 40;

/// How far a log was printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    time: Timestamp,
    /// Lines of that time that have begun.
    lines: u64,
    /// Bytes of the last of them, after its time.
    bytes: u64,
    /// Its line feed was printed.
    is_whole: bool,
}

/// Where the reader is in what comes.
#[derive(Debug)]
enum At {
    /// In the time in front of a line.
    Time(Vec<u8>),
    /// In a line that is printed.
    Line,
    /// In a line that was printed before, of which so many bytes are skipped still; all of it without a number.
    Skip(Option<u64>),
}

/// Takes in the log with its times and gives back what is to be printed.
#[derive(Debug)]
pub struct Follower {
    show_times: bool,
    position: Option<Position>,
    at: At,
    /// Since the log was opened again: how many lines of the position's time have come.
    again: Option<u64>,
}

/// The log that was opened again does not have the last line that was printed.
#[derive(Debug, PartialEq, Eq)]
pub struct Gap;

impl Follower {
    pub fn new(show_times: bool) -> Self {
        Self { show_times, position: None, at: At::Time(Vec::new()), again: None }
    }

    /// The log is read anew; from when on.
    pub fn reopen(&mut self) -> Option<Timestamp> {
        self.at = At::Time(Vec::new());
        self.again = self.position.map(|_| 0);
        self.position.map(|position| position.time)
    }

    /// Adds to `out` what of a piece is new.
    pub fn take(&mut self, mut piece: &[u8], out: &mut Vec<u8>) -> Result<(), Gap> {
        let mut gap = Ok(());
        while !piece.is_empty() {
            match &mut self.at {
                At::Time(time) => {
                    let byte = piece[0];
                    time.push(byte);
                    piece = &piece[1..];
                    if byte == b' ' || byte == b'\n' || time.len() > LONGEST_TIME {
                        let time = std::mem::take(time);
                        gap = gap.and(self.begin(&time, out));
                    }
                }
                At::Line => piece = self.print(piece, out),
                At::Skip(left) => {
                    let line = line_end(piece);
                    let wanted = left.map_or(usize::MAX, |left| usize::try_from(left).unwrap_or(usize::MAX));
                    let skipped = line.unwrap_or(piece.len()).min(wanted);
                    let ends = line == Some(skipped) && skipped > 0;
                    piece = &piece[skipped..];
                    if ends {
                        self.at = At::Time(Vec::new());
                    } else if let Some(left) = left {
                        *left -= skipped as u64;
                        if *left == 0 {
                            self.at = At::Line;
                        }
                    }
                }
            }
        }
        gap
    }

    /// A line begins, with its time in front. What has none is printed as it is.
    fn begin(&mut self, text: &[u8], out: &mut Vec<u8>) -> Result<(), Gap> {
        let parsed = std::str::from_utf8(text).ok().and_then(|text| text.trim_end_matches(' ').parse().ok());
        let Some(time): Option<Timestamp> = parsed.filter(|_| text.ends_with(b" ")) else {
            out.extend_from_slice(text);
            self.at = if text.ends_with(b"\n") { At::Time(Vec::new()) } else { At::Line };
            return Ok(());
        };
        let mut gap = Ok(());
        if let (Some(seen), Some(position)) = (&mut self.again, self.position) {
            if time == position.time && *seen < position.lines {
                *seen += 1;
                let is_last = *seen == position.lines;
                self.at = match position {
                    _ if !is_last => At::Skip(None),
                    Position { is_whole: true, .. } => At::Skip(None),
                    Position { bytes: 0, .. } => At::Line,
                    Position { bytes, .. } => At::Skip(Some(bytes)),
                };
                if is_last {
                    self.again = None;
                }
                return Ok(());
            }
            if time < position.time {
                self.at = At::Skip(None);
                return Ok(());
            }
            // A later line: all of before must have come.
            if *seen < position.lines {
                gap = Err(Gap);
                if !position.is_whole {
                    out.push(b'\n');
                }
            }
            self.again = None;
        }
        let lines = self.position.filter(|position| position.time == time).map_or(1, |position| position.lines + 1);
        self.position = Some(Position { time, lines, bytes: 0, is_whole: false });
        if self.show_times {
            out.extend_from_slice(text);
        }
        self.at = At::Line;
        gap
    }

    /// Prints to the end of the line or of the piece; gives back what is left.
    fn print<'a>(&mut self, piece: &'a [u8], out: &mut Vec<u8>) -> &'a [u8] {
        let line = line_end(piece);
        let (text, rest) = piece.split_at(line.unwrap_or(piece.len()));
        out.extend_from_slice(text);
        if let Some(position) = &mut self.position {
            position.bytes += text.len() as u64;
            position.is_whole = line.is_some();
        }
        if line.is_some() {
            self.at = At::Time(Vec::new());
        }
        rest
    }
}

/// The place after the first line feed.
fn line_end(piece: &[u8]) -> Option<usize> {
    piece.iter().position(|byte| *byte == b'\n').map(|at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
2026-01-01T00:00:01.000000001Z one
2026-01-01T00:00:02.000000001Z two
2026-01-01T00:00:02.000000001Z two
2026-01-01T00:00:02.000000001Z 
2026-01-01T00:00:03.000000001Z three with words
2026-01-01T00:00:04.000000001Z four
";
    const PRINTED: &str = "one\ntwo\ntwo\n\nthree with words\nfour\n";

    fn since(time: Option<Timestamp>) -> &'static str {
        let lines = LOG.split_inclusive('\n');
        let earlier = lines.take_while(|line| {
            let begun: Timestamp = line.split(' ').next().unwrap().parse().unwrap();
            time.is_some_and(|time| begun < time)
        });
        &LOG[earlier.map(str::len).sum()..]
    }

    #[test]
    fn a_log_that_breaks_anywhere_goes_on_there() {
        for first in 0..LOG.len() {
            for second in 0..LOG.len() - first {
                let mut follower = Follower::new(false);
                let mut out = Vec::new();
                follower.take(&LOG.as_bytes()[..first], &mut out).unwrap();
                let rest = since(follower.reopen()).as_bytes();
                follower.take(&rest[..second.min(rest.len())], &mut out).unwrap();
                let rest = since(follower.reopen()).as_bytes();
                follower.take(rest, &mut out).unwrap();
                assert_eq!(String::from_utf8_lossy(&out), PRINTED, "broken after {first} and {second}");
            }
        }
    }

    #[test]
    fn pieces_of_any_size_are_the_same_log() {
        for size in 1..LOG.len() {
            let mut follower = Follower::new(true);
            let mut out = Vec::new();
            for piece in LOG.as_bytes().chunks(size) {
                follower.take(piece, &mut out).unwrap();
            }
            assert_eq!(String::from_utf8_lossy(&out), LOG);
        }
    }

    #[test]
    fn a_last_line_that_is_gone_is_a_gap() {
        let mut follower = Follower::new(false);
        let mut out = Vec::new();
        follower.take(b"2026-01-01T00:00:01Z one\n2026-01-01T00:00:02Z tw", &mut out).unwrap();
        follower.reopen();
        assert_eq!(follower.take(b"2026-01-01T00:00:09Z nine\n", &mut out), Err(Gap));
        assert_eq!(out, b"one\ntw\nnine\n");
        assert_eq!(follower.take(b"2026-01-01T00:00:09Z ten\n", &mut out), Ok(()), "it is said once");
    }

    #[test]
    fn what_has_no_time_is_printed() {
        let mut follower = Follower::new(false);
        let mut out = Vec::new();
        follower.take(b"\nplain words\nx\n", &mut out).unwrap();
        assert_eq!(out, b"\nplain words\nx\n");
    }
}
