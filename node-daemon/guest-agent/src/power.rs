//! The way down: terminate, kill, let the last words go out, unmount, power off.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::system::{RebootCommand, reboot};

/// The longest grace that a host may ask for.
const MAX_GRACE: Duration = Duration::from_secs(600);
/// A killed process that is still there after this hangs in the kernel.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// How long the host may take to fetch the rest of the log.
const FLUSH_PATIENCE: Duration = Duration::from_secs(2);

/// Where the way down is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Everybody was asked to end.
    Terminating {
        kill_at: Instant,
    },
    /// Everybody was killed.
    Killing {
        give_up_at: Instant,
    },
    /// Nobody is left; the last output goes out.
    Flushing {
        until: Instant,
    },
    PowerOff,
}

/// What is seen of the guest.
#[derive(Clone, Copy, Debug)]
pub struct Observed {
    /// Processes beside the agent are left.
    pub processes: bool,
    /// The host is connected and has not got everything yet.
    pub unsent: bool,
}

/// What goes with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Nothing,
    KillAll,
}

impl Stage {
    pub fn begin(grace: Duration, now: Instant) -> Self {
        Self::Terminating { kill_at: now + grace.min(MAX_GRACE) }
    }

    /// The next step; call again while it changes.
    pub fn step(self, observed: Observed, now: Instant) -> (Self, Act) {
        let flushing = Self::Flushing { until: now + FLUSH_PATIENCE };
        match self {
            Self::Terminating { .. } | Self::Killing { .. } if !observed.processes => (flushing, Act::Nothing),
            Self::Terminating { kill_at } if now >= kill_at => {
                (Self::Killing { give_up_at: now + KILL_PATIENCE }, Act::KillAll)
            }
            Self::Killing { give_up_at } if now >= give_up_at => (flushing, Act::Nothing),
            Self::Flushing { until } if !observed.unsent || now >= until => (Self::PowerOff, Act::Nothing),
            stage => (stage, Act::Nothing),
        }
    }

    pub const fn deadline(self) -> Option<Instant> {
        match self {
            Self::Terminating { kill_at: at } | Self::Killing { give_up_at: at } | Self::Flushing { until: at } => {
                Some(at)
            }
            Self::PowerOff => None,
        }
    }
}

/// Signals every process but the agent itself.
pub fn signal_all(signal: Signal) {
    // The group of PID 1 is "all processes" for kill(2): it is called with -1.
    match kill_process_group(Pid::INIT, signal) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(errno) => eprintln!("kibo-guest-agent: failed to signal all processes: {errno}"),
    }
}

/// Ends the machine. All mounts of the Workspace are gone or written back by now.
pub fn off() -> ! {
    rustix::fs::sync();
    if let Err(errno) = reboot(RebootCommand::PowerOff) {
        eprintln!("kibo-guest-agent: failed to power off: {errno}");
    }
    // The end of PID 1 is the end of the machine too, if not a pretty one.
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(10);

    fn observed(processes: bool, unsent: bool) -> Observed {
        Observed { processes, unsent }
    }

    #[test]
    fn a_guest_without_processes_goes_straight_down() {
        let now = Instant::now();
        let (stage, act) = Stage::begin(GRACE, now).step(observed(false, false), now);
        assert_eq!((stage, act), (Stage::Flushing { until: now + FLUSH_PATIENCE }, Act::Nothing));
        assert_eq!(stage.step(observed(false, false), now), (Stage::PowerOff, Act::Nothing));
    }

    #[test]
    fn a_process_that_ignores_the_request_is_killed_after_the_grace() {
        let now = Instant::now();
        let stage = Stage::begin(GRACE, now);
        assert_eq!(stage.step(observed(true, false), now), (stage, Act::Nothing));
        let late = now + GRACE;
        let (stage, act) = stage.step(observed(true, false), late);
        assert_eq!((stage, act), (Stage::Killing { give_up_at: late + KILL_PATIENCE }, Act::KillAll));
    }

    #[test]
    fn a_process_that_cannot_be_killed_and_a_host_that_does_not_listen_hold_nothing_up() {
        let now = Instant::now();
        let (stage, _) = Stage::Killing { give_up_at: now }.step(observed(true, true), now);
        assert_eq!(stage, Stage::Flushing { until: now + FLUSH_PATIENCE });
        assert_eq!(stage.step(observed(true, true), now + FLUSH_PATIENCE), (Stage::PowerOff, Act::Nothing));
    }
}
