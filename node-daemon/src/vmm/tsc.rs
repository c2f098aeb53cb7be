//! The frequency of the host's time stamp counter.

use std::{
    thread,
    time::{Duration, Instant},
};

const SAMPLE: Duration = Duration::from_millis(100);

/// Measures it, in kHz; `None` where there is no such counter. Blocks for a tenth of a second.
#[cfg(target_arch = "x86_64")]
pub fn measure_khz() -> Option<u64> {
    let (start, before) = (Instant::now(), read());
    thread::sleep(SAMPLE);
    let (ticks, elapsed) = (read().checked_sub(before)?, start.elapsed());
    let khz = u128::from(ticks) * 1_000_000 / elapsed.as_nanos().max(1);
    u64::try_from(khz).ok().filter(|khz| *khz > 0)
}

#[cfg(not(target_arch = "x86_64"))]
pub fn measure_khz() -> Option<u64> {
    None
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "no safe function of the standard library reads the counter")]
fn read() -> u64 {
    // SAFETY: the instruction takes no memory and every x86-64 processor has it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    #[test]
    fn two_measurements_agree() {
        let (a, b) = (super::measure_khz().unwrap(), super::measure_khz().unwrap());
        assert!(a.abs_diff(b) < a / 50, "{a} and {b} kHz");
    }
}
