//! The entrypoint's output, kept until the host has it.
//!
//! At most [`CAPACITY`] bytes; while it is full nothing is read from the entrypoint, which then waits like for any other
//! slow reader. Offsets count the bytes of both outputs since the boot.

use std::collections::VecDeque;

use kibo_guest_protocol::MAX_CHUNK;
use kibo_guest_protocol::v1::{LogData, Output};

const CAPACITY: usize = 1024 * 1024;
/// How far sending runs ahead of what the host acknowledged.
const WINDOW: u64 = 256 * 1024;
/// What a piece costs beside its bytes: many short lines shall not take more than their share.
const OVERHEAD: usize = 64;

#[derive(Debug, Default)]
pub struct Log {
    pieces: VecDeque<LogData>,
    cost: usize,
    /// The first byte that is kept.
    start: u64,
    /// One beyond the last byte.
    end: u64,
    /// The next byte to send on this connection.
    next: u64,
}

impl Log {
    pub const fn start(&self) -> u64 {
        self.start
    }

    pub const fn end(&self) -> u64 {
        self.end
    }

    /// How many bytes can be taken now.
    pub fn room(&self) -> usize {
        CAPACITY.saturating_sub(self.cost).saturating_sub(OVERHEAD).min(MAX_CHUNK)
    }

    /// Takes bytes, no more than there is [`Self::room`] for.
    pub fn push(&mut self, output: Output, data: Vec<u8>, unix_nanos: u64) {
        if data.is_empty() {
            return;
        }
        self.cost += data.len() + OVERHEAD;
        let offset = self.end;
        self.end += data.len() as u64;
        self.pieces.push_back(LogData { offset, time_unix_nanos: unix_nanos, output: output.into(), data });
    }

    /// The host has everything before `offset`.
    pub fn acknowledge(&mut self, offset: u64) {
        let offset = offset.min(self.end);
        while let Some(piece) = self.pieces.front_mut() {
            let len = piece.data.len() as u64;
            if piece.offset + len <= offset {
                self.cost -= piece.data.len() + OVERHEAD;
                self.pieces.pop_front();
            } else if piece.offset < offset {
                let cut = usize::try_from(offset - piece.offset).unwrap_or(usize::MAX);
                piece.data.drain(..cut);
                piece.offset = offset;
                self.cost -= cut;
                break;
            } else {
                break;
            }
        }
        self.start = self.start.max(offset);
        self.next = self.next.max(self.start);
    }

    /// A new connection: what it has not acknowledged is sent again.
    pub fn rewind(&mut self, host_has: u64) {
        self.acknowledge(host_has);
        self.next = self.start;
    }

    /// The next piece for the host, if it has acknowledged enough of what it got.
    pub fn next_to_send(&mut self) -> Option<LogData> {
        if self.next >= self.end || self.next >= self.start + WINDOW {
            return None;
        }
        let at = self.pieces.partition_point(|piece| piece.offset + piece.data.len() as u64 <= self.next);
        let piece = self.pieces.get(at)?.clone();
        self.next = piece.offset + piece.data.len() as u64;
        Some(piece)
    }

    /// Whether the host lacks nothing.
    pub const fn is_acknowledged(&self) -> bool {
        self.start == self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> Log {
        let mut log = Log::default();
        log.push(Output::Stdout, b"hello ".to_vec(), 1);
        log.push(Output::Stderr, b"world".to_vec(), 2);
        log
    }

    fn sent(log: &mut Log) -> Vec<(u64, Vec<u8>)> {
        std::iter::from_fn(|| log.next_to_send()).map(|piece| (piece.offset, piece.data)).collect()
    }

    #[test]
    fn pieces_are_sent_once_for_each_connection_until_they_are_acknowledged() {
        let mut log = filled();
        assert_eq!(sent(&mut log), [(0, b"hello ".to_vec()), (6, b"world".to_vec())]);
        assert_eq!(sent(&mut log), []);
        log.rewind(0);
        assert_eq!(sent(&mut log).len(), 2);
        log.acknowledge(6);
        log.rewind(0);
        assert_eq!(sent(&mut log), [(6, b"world".to_vec())]);
        log.acknowledge(11);
        assert!(log.is_acknowledged());
    }

    #[test]
    fn a_host_that_has_half_a_piece_gets_the_other_half() {
        let mut log = filled();
        log.rewind(8);
        assert_eq!(sent(&mut log), [(8, b"rld".to_vec())]);
        assert_eq!(log.start(), 8);
    }

    #[test]
    fn an_acknowledgement_beyond_the_end_is_cut_to_it() {
        let mut log = filled();
        log.acknowledge(u64::MAX);
        assert_eq!((log.start(), log.end(), log.cost), (11, 11, 0));
    }

    #[test]
    fn a_full_log_takes_no_more_and_sends_no_more_than_the_window() {
        let mut log = Log::default();
        while log.room() > 0 {
            let room = log.room();
            log.push(Output::Stdout, vec![b'x'; room.min(1000)], 0);
        }
        assert!(log.cost <= CAPACITY);
        let ahead: usize = sent(&mut log).iter().map(|(_, data)| data.len()).sum();
        assert!((256 * 1024..257 * 1024).contains(&ahead), "{ahead}");
        log.acknowledge(100_000);
        assert!(log.room() > 0);
        assert!(!sent(&mut log).is_empty());
    }
}
