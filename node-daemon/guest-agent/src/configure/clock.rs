//! The wall clock. The guest's own may be off by a second after a boot, and by any amount after a restore.

use rustix::time::{ClockId, Timespec, clock_settime};

#[derive(Debug, thiserror::Error)]
#[error("failed to set the clock to {nanos} ns since 1970: {source}")]
pub struct Error {
    nanos: u64,
    source: rustix::io::Errno,
}

pub fn set(unix_nanos: u64) -> Result<(), Error> {
    const SECOND: u64 = 1_000_000_000;
    let error = |source| Error { nanos: unix_nanos, source };
    let seconds = i64::try_from(unix_nanos / SECOND).map_err(|_| error(rustix::io::Errno::INVAL))?;
    let nanos = i64::try_from(unix_nanos % SECOND).map_err(|_| error(rustix::io::Errno::INVAL))?;
    clock_settime(ClockId::Realtime, Timespec { tv_sec: seconds, tv_nsec: nanos }).map_err(error)
}
