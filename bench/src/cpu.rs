//! What processes have used.

use anyhow::{Context as _, Result};
use procfs::process::{Process, Stat};

/// CPU seconds of a process since it was started; without its children.
pub fn seconds(pid: i32) -> Result<f64> {
    let stat = stat(&Process::new(pid)?)?;
    Ok(as_seconds(stat.utime + stat.stime))
}

/// CPU seconds of this process's children that have ended.
pub fn seconds_of_children() -> Result<f64> {
    let stat = stat(&Process::myself()?)?;
    Ok(as_seconds(u64::try_from(stat.cutime + stat.cstime)?))
}

/// Resident MiB of a process now.
#[allow(clippy::cast_precision_loss, reason = "an amount of memory, rounded for people")]
pub fn resident(pid: i32) -> Result<f64> {
    let status = Process::new(pid)?.status()?;
    let kib = status.vmrss.with_context(|| format!("process {pid} has ended"))?;
    Ok(kib as f64 / 1024.0)
}

fn stat(process: &Process) -> Result<Stat> {
    process.stat().with_context(|| format!("failed to read what process {} used", process.pid))
}

#[allow(clippy::cast_precision_loss, reason = "ticks of some minutes")]
fn as_seconds(ticks: u64) -> f64 {
    ticks as f64 / procfs::ticks_per_second() as f64
}
