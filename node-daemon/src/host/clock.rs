//! What the host's clock says, and what its kernel says of the clock.

use kibo_protocol::v1;

use crate::clock::unix_nanos;

/// Answers a probe. There is nothing between the two times but the question to the kernel.
pub fn read(probe: u64) -> v1::ClockReading {
    let received_unix_nanos = unix_nanos();
    let kernel_synchronized = kernel_synchronized();
    v1::ClockReading { probe, received_unix_nanos, sent_unix_nanos: unix_nanos(), kernel_synchronized }
}

/// Whether the kernel takes its clock for synchronized; absent when it cannot be asked (a sandbox may forbid it).
#[expect(unsafe_code, reason = "no crate that is here wraps adjtimex")]
pub fn kernel_synchronized() -> Option<bool> {
    // SAFETY: timex is plain numbers, for which zero is a value.
    let mut asked: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: with `modes` 0 the kernel changes nothing; it fills in the structure, which is valid and ours alone.
    let state = unsafe { libc::adjtimex(&raw mut asked) };
    let is_synchronized = state != libc::TIME_ERROR && asked.status & libc::STA_UNSYNC == 0;
    (state >= 0).then_some(is_synchronized)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_is_of_now_and_names_its_probe() {
        let before = unix_nanos();
        let reading = read(7);
        assert_eq!(reading.probe, 7);
        assert!(before <= reading.received_unix_nanos && reading.received_unix_nanos <= reading.sent_unix_nanos);
    }
}
