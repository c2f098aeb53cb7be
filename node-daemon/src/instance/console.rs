//! What a guest's kernel prints: the end of it, for messages, and a bounded file beside it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use tokio::io::AsyncReadExt as _;

use crate::vmm::{CONSOLE_SOCKET, SocketDir};

const FILE: &str = "console.log";
const OLDER_FILE: &str = "console.old.log";
/// Two files of this size are kept at most: a guest can print without end.
const FILE_LIMIT: u64 = 128 * 1024;
/// Goes into the message of an end.
const TAIL: usize = 600;
/// A kernel prints much after the line that says why it panicked.
const KEPT: usize = 8 * 1024;
const PANIC: &str = "Kernel panic - not syncing: ";
/// What a kernel says when PID 1, which is the agent, has died.
const INIT_DIED: &str = "Attempted to kill init!";

/// The last words of a guest.
#[derive(Clone, Debug, Default)]
pub struct ConsoleTail(Arc<Mutex<Vec<u8>>>);

impl ConsoleTail {
    pub(super) fn push(&self, data: &[u8]) {
        let mut tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tail.extend_from_slice(data);
        let excess = tail.len().saturating_sub(KEPT);
        tail.drain(..excess);
    }

    /// As text, whole lines, without what a terminal would swallow.
    pub fn text(&self) -> String {
        let tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = tail.len().saturating_sub(TAIL);
        let text = printable(&tail[last..]);
        let text = if last == 0 { text.as_str() } else { text.split_once('\n').map_or("", |(_, rest)| rest) };
        text.trim().to_owned()
    }

    /// Why the kernel panicked, in its words; and whether that was the end of the agent.
    pub fn panic(&self) -> Option<(String, bool)> {
        let tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text = printable(&tail);
        let (_, why) = text.split_once(PANIC)?;
        let why = why.lines().next().unwrap_or_default().trim().to_owned();
        let is_of_agent = why.starts_with(INIT_DIED);
        Some((why, is_of_agent))
    }
}

fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().filter(|c| *c == '\n' || !c.is_control()).collect()
}

/// Reads the console until the VM is gone. While nobody reads, QEMU drops what is printed.
pub async fn follow(sockets: SocketDir, directory: PathBuf, tail: ConsoleTail) {
    let followed: io::Result<()> = async {
        let mut stream = sockets.connect(CONSOLE_SOCKET).await?;
        let mut file = BoundedFile::open(&directory)?;
        let mut buffer = vec![0; 4096];
        loop {
            let len = stream.read(&mut buffer).await?;
            if len == 0 {
                return Ok(());
            }
            tail.push(&buffer[..len]);
            file.write(&buffer[..len])?;
        }
    }
    .await;
    if let Err(error) = followed {
        tracing::debug!(directory = %directory.display(), %error, "the console is not followed any more");
    }
}

struct BoundedFile {
    directory: PathBuf,
    file: File,
    size: u64,
}

impl BoundedFile {
    fn open(directory: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(directory.join(FILE))?;
        let size = file.metadata()?.len();
        Ok(Self { directory: directory.to_owned(), file, size })
    }

    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        if self.size + data.len() as u64 > FILE_LIMIT {
            std::fs::rename(self.directory.join(FILE), self.directory.join(OLDER_FILE))?;
            *self = Self::open(&self.directory)?;
        }
        self.file.write_all(data)?;
        self.size += data.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_prints_without_end_fills_no_disk() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = BoundedFile::open(directory.path()).unwrap();
        for _ in 0..200 {
            file.write(&[b'x'; 4096]).unwrap();
        }
        let size: u64 =
            directory.path().read_dir().unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
        assert!(size <= 2 * FILE_LIMIT, "{size}");
    }

    #[test]
    fn the_end_of_the_agent_is_told_from_another_panic() {
        let said = |text: &str| {
            let tail = ConsoleTail::default();
            tail.push(text.as_bytes());
            tail.push("[    2.3] Call Trace:\r\n".repeat(50).as_bytes());
            tail.panic()
        };
        assert_eq!(said("[    2.1] all is well\r\n"), None);
        let died = "[    2.1] Kernel panic - not syncing: Attempted to kill init! exitcode=0x0000000b\r\n";
        assert_eq!(said(died), Some(("Attempted to kill init! exitcode=0x0000000b".to_owned(), true)));
        let other = "[    2.1] Kernel panic - not syncing: sysrq triggered crash\r\n";
        assert_eq!(said(other), Some(("sysrq triggered crash".to_owned(), false)));
    }

    #[test]
    fn the_tail_has_whole_lines() {
        let tail = ConsoleTail::default();
        tail.push(b"\x1b[0mshort\r\n");
        assert_eq!(tail.text(), "[0mshort");
        for number in 0..200 {
            tail.push(format!("line {number}\n").as_bytes());
        }
        let text = tail.text();
        assert!(text.starts_with("line ") && text.ends_with("line 199"), "{text}");
    }
}
