//! Who goes first where there is one CPU.
//!
//! The agent passes on what others make or take, and each change from one process to another costs an emulated CPU as much
//! as copying many kilobytes. If every byte in a pipe or a page at the port interrupted the workload for the agent, most of
//! the time would go into that. So the agent waits for its turn: it comes when nobody else can go on, and by the clock.

use std::io;

/// How a process is scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// As everybody: who wakes up may interrupt another.
    Ordinary,
    /// Never interrupts another when it wakes up; it has its share all the same.
    Patient,
}

impl Turn {
    /// For this thread and what it starts from here on. No more than a system call, so it may be used after a fork.
    pub fn take(self) -> io::Result<()> {
        let policy = match self {
            Self::Ordinary => libc::SCHED_OTHER,
            Self::Patient => libc::SCHED_BATCH,
        };
        // All that the kernel's structure has.
        let priority: libc::c_int = 0;
        #[allow(unsafe_code, reason = "the library has no safe form of it, and musl's does nothing")]
        // SAFETY: the kernel reads one integer at the address, which is valid for the call.
        let result = unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const priority) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
