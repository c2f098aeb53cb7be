//! Pseudo-terminals. They are made on the Workspace's own devpts, so that a process finds its terminal by name.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use kibo_guest_protocol::v1::{self, StartFailure, StartFailureReason};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt};
use rustix::termios::{LocalModes, SpecialCodeIndex, Winsize, tcgetattr, tcgetpgrp, tcsetwinsize};

use super::start_failure;
use crate::configure::Workspace;

/// The agent's end. Closing the last descriptor of it hangs the terminal up.
#[derive(Clone, Debug)]
pub struct Terminal(Rc<OwnedFd>);

impl Terminal {
    /// A terminal of the asked size, and the process's end of it.
    pub fn open(workspace: &Workspace, asked: &v1::Terminal) -> Result<(Self, OwnedFd), StartFailure> {
        let failed = |errno: Errno| {
            start_failure(StartFailureReason::Other, format!("failed to open a terminal in the workspace: {errno}"))
        };
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let master = openat(&workspace.terminals, "ptmx", flags, Mode::empty()).map_err(failed)?;
        unlockpt(&master).map_err(failed)?;
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let slave = ioctl_tiocgptpeer(&master, flags).map_err(failed)?;
        let terminal = Self(Rc::new(master));
        terminal.resize(asked.columns, asked.rows);
        Ok((terminal, slave))
    }

    /// Tells the foreground processes (SIGWINCH) when it is another size than before.
    pub fn resize(&self, columns: u32, rows: u32) {
        let cells = |count: u32| u16::try_from(count).unwrap_or(u16::MAX);
        let size = Winsize { ws_col: cells(columns), ws_row: cells(rows), ws_xpixel: 0, ws_ypixel: 0 };
        if let Err(errno) = tcsetwinsize(self, size) {
            eprintln!("kibo-guest-agent: failed to resize a terminal: {errno}");
        }
    }

    /// The group of processes that the keyboard's signals go to.
    pub fn foreground(&self) -> Option<Pid> {
        tcgetpgrp(self).ok()
    }

    /// What to type for the end of the input, after `last`; nothing when the terminal does not read lines.
    pub fn end_of_input(&self, last: Option<u8>) -> Vec<u8> {
        let Ok(modes) = tcgetattr(self) else { return Vec::new() };
        if !modes.local_modes.contains(LocalModes::ICANON) {
            return Vec::new();
        }
        // In the middle of a line the first one only hands the line over.
        let times = if last.is_none_or(|byte| byte == b'\n') { 1 } else { 2 };
        vec![modes.special_codes[SpecialCodeIndex::VEOF]; times]
    }
}

impl AsFd for Terminal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
