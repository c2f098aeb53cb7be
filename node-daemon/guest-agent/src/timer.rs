//! Whether the kernel has a timer.
//!
//! On a host that is very busy an emulated CPU may stand still for a tenth of a second just when its kernel measures the
//! CPU's timer. Then the kernel takes it for too slow, and goes on without any: all works, but nothing that waits for a time
//! ever ends, neither a sleep nor a sync. Such a guest is of no use to anybody, and the next boot mends it.

use std::fs;
use std::io;

use kibo_guest_protocol::NO_TIMER;
use rustix::system::{RebootCommand, reboot};

/// By what has interrupted the CPU since the boot began: a kernel with a timer ticks from its beginning on.
pub fn is_there() -> bool {
    let interrupts = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    ticks(&interrupts) != Some(0)
}

/// How often any timer has ticked; `None`: there is no line of a timer.
fn ticks(interrupts: &str) -> Option<u64> {
    let timers = interrupts.lines().filter(|line| line.contains("timer") || line.contains("hpet"));
    let counts =
        timers.map(|line| line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum::<u64>());
    counts.reduce(|all, count| all + count)
}

/// Ends this boot at once, for nothing is in use yet. The host begins another one.
pub fn boot_anew() -> io::Error {
    eprintln!("kibo-guest-agent: {NO_TIMER}, since the host is too busy: booting anew");
    // An orderly way down may wait for a time.
    let _ = fs::write("/proc/sysrq-trigger", "b");
    reboot(RebootCommand::Restart).err().map_or_else(|| io::Error::other("the guest goes on"), io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_known_by_its_ticks() {
        let of = |local: u64| {
            format!(
                "           CPU0       CPU1\n 48:   0   0   IO-APIC   9-edge      ACPI:Ged\n 56:  7  1  IO-APIC  8-edge  rtc0\n\
                 NMI:   0   0   Non-maskable interrupts\nLOC:          {local}   0   Local timer interrupts\nERR:          0\n"
            )
        };
        assert_eq!(ticks(&of(0)), Some(0));
        assert_eq!(ticks(&of(300)), Some(300));
        assert_eq!(ticks(&format!("  0:  12  3  IO-APIC  2-edge  timer\n{}", of(0))), Some(15));
        assert_eq!(ticks(""), None);
    }
}
