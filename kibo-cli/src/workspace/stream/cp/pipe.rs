//! Between the tar code, which reads and writes as files are read and written, and the connection, which waits.
//!
//! A few pieces lie in between, whatever the size of what is copied.

use std::io::{self, Read, Write};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use tokio::sync::mpsc;

use crate::workspace::stream::channels::{Channel, PIECE};

/// Pieces on their way.
const PIECES: usize = 4;

/// What is written comes out as messages that begin with their channel.
pub fn writer() -> (Writer, mpsc::Receiver<Bytes>) {
    let (pieces, messages) = mpsc::channel(PIECES);
    (Writer { pieces, piece: BytesMut::new() }, messages)
}

pub struct Writer {
    pieces: mpsc::Sender<Bytes>,
    piece: BytesMut,
}

impl Write for Writer {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.piece.is_empty() {
            self.piece.reserve(PIECE);
            self.piece.put_u8(Channel::Stdin as u8);
        }
        let length = data.len().min(PIECE - self.piece.len());
        self.piece.extend_from_slice(&data[..length]);
        if self.piece.len() == PIECE {
            self.flush()?;
        }
        Ok(length)
    }

    /// Hands on what there is.
    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = self.piece.split().freeze();
        self.pieces.blocking_send(piece).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// What is sent can be read; that nothing more is sent is its end, unless it was not said that this is the end.
pub fn reader() -> (mpsc::Sender<Piece>, Reader) {
    let (pieces, received) = mpsc::channel(PIECES);
    (pieces, Reader { pieces: received, piece: Bytes::new(), is_whole: false })
}

#[derive(Debug)]
pub enum Piece {
    Data(Bytes),
    End,
}

pub struct Reader {
    pieces: mpsc::Receiver<Piece>,
    piece: Bytes,
    is_whole: bool,
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.pieces.blocking_recv() {
                Some(Piece::Data(data)) => self.piece = data,
                Some(Piece::End) => self.is_whole = true,
                None if self.is_whole => return Ok(0),
                None => return Err(broken_off()),
            }
        }
        let length = buffer.len().min(self.piece.len());
        self.piece.copy_to_slice(&mut buffer[..length]);
        Ok(length)
    }
}

fn broken_off() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "the stream broke off")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_comes_in_whole_messages() {
        let (mut writer, mut messages) = writer();
        let sent: Vec<u8> = (0..PIECE * 2).map(|at| at.to_le_bytes()[0]).collect();
        let copy = sent.clone();
        let writing = std::thread::spawn(move || {
            writer.write_all(&copy).unwrap();
            writer.flush().unwrap();
        });
        let mut received = Vec::new();
        while let Some(message) = messages.blocking_recv() {
            assert!(message[0] == 0 && message.len() <= PIECE);
            received.extend_from_slice(&message[1..]);
        }
        writing.join().unwrap();
        assert_eq!(received, sent);
    }

    #[test]
    fn nobody_who_takes_it_is_a_broken_pipe() {
        let (mut writer, messages) = writer();
        drop(messages);
        let error = writer.write_all(&vec![0; PIECE]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn an_end_that_nobody_announced_is_an_error() {
        for (is_whole, expected) in [(true, Ok(())), (false, Err(io::ErrorKind::ConnectionAborted))] {
            let (pieces, mut reader) = reader();
            pieces.blocking_send(Piece::Data(Bytes::from_static(b"abc"))).unwrap();
            if is_whole {
                pieces.blocking_send(Piece::End).unwrap();
            }
            drop(pieces);
            let mut all = Vec::new();
            let outcome = reader.read_to_end(&mut all);
            assert_eq!((outcome.map(drop).map_err(|error| error.kind()), &all[..]), (expected, &b"abc"[..]));
        }
    }
}
