//! What the kernel tells of the whole host in its /proc. What cannot be read, or is not what it should be, is absent.

use std::{fs, path::PathBuf};

use kibo_crds::{Bytes, Percent};

/// Where the host's /proc is: a container sees it somewhere else.
#[derive(Clone, Debug)]
pub struct Proc {
    root: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// For new processes without swapping: free memory, and cache that can be given up.
    pub available: Bytes,
    pub total: Bytes,
}

/// Ticks of all CPUs since the host's boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTicks {
    idle: u64,
    all: u64,
}

/// Shares of the last 60 s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// At least one task waited.
    pub some: Option<Percent>,
    /// All tasks waited.
    pub full: Option<Percent>,
}

impl Proc {
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    fn read(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.root.join(file)).ok()
    }

    pub fn memory(&self) -> Option<Memory> {
        parse_memory(&self.read("meminfo")?)
    }

    pub fn cpu(&self) -> Option<CpuTicks> {
        parse_cpu(&self.read("stat")?)
    }

    pub fn cpu_pressure(&self) -> Pressure {
        self.read("pressure/cpu").map_or_else(Pressure::default, |text| parse_pressure(&text))
    }

    pub fn memory_pressure(&self) -> Pressure {
        self.read("pressure/memory").map_or_else(Pressure::default, |text| parse_pressure(&text))
    }

    /// The CPU time that a process has used, in ticks, and when it began, which tells it from another one of its number.
    pub fn process_cpu(&self, pid: u32) -> Option<(u64, u64)> {
        parse_process(&self.read(&format!("{pid}/stat"))?)
    }

    /// What a process has in the host's memory that is not a file's: its own pages, and those of shared memory.
    pub fn process_memory(&self, pid: u32) -> Option<Bytes> {
        let status = self.read(&format!("{pid}/status"))?;
        let own = kibibytes(&status, "RssAnon:")?;
        let shared = kibibytes(&status, "RssShmem:")?;
        own.0.checked_add(shared.0).map(Bytes)
    }
}

impl CpuTicks {
    /// The share of the time between two looks in which no CPU had work; `None` when no time went by.
    pub fn idle_since(self, earlier: Self) -> Option<Percent> {
        Percent::of(self.idle.checked_sub(earlier.idle)?, self.all.checked_sub(earlier.all)?)
    }
}

/// A line such as `MemTotal:       16384 kB`.
fn kibibytes(text: &str, name: &str) -> Option<Bytes> {
    let mut words = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let amount: u64 = words.next()?.parse().ok()?;
    (words.next() == Some("kB")).then_some(())?;
    amount.checked_mul(1024).map(Bytes)
}

fn parse_memory(text: &str) -> Option<Memory> {
    let memory = Memory { available: kibibytes(text, "MemAvailable:")?, total: kibibytes(text, "MemTotal:")? };
    (memory.total.0 > 0 && memory.available <= memory.total).then_some(memory)
}

/// The first line of `stat`: user, nice, system, idle, iowait, irq, softirq, steal; guests' time is in the first two.
fn parse_cpu(text: &str) -> Option<CpuTicks> {
    let fields = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = fields.split_whitespace().take(8).map(|field| field.parse().ok()).collect::<Option<_>>()?;
    let all = ticks.iter().try_fold(0_u64, |sum, ticks| sum.checked_add(*ticks))?;
    let [_, _, _, idle, waiting, ..] = ticks[..] else { return None };
    Some(CpuTicks { idle: idle.checked_add(waiting)?, all })
}

fn parse_pressure(text: &str) -> Pressure {
    let share = |kind: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
        line.split_whitespace().find_map(|word| word.strip_prefix("avg60="))?.parse().ok()
    };
    Pressure { some: share("some "), full: share("full ") }
}

/// `stat` of a process; its name, in parentheses, may have anything in it.
fn parse_process(text: &str) -> Option<(u64, u64)> {
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    // Counted from the third of proc(5), the state: utime is 14, stime 15, starttime 22.
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    Some((field(14)?.checked_add(field(15)?)?, field(22)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn memory_is_read_in_whole_and_garbage_is_absent() {
        let text = "MemTotal:       16384000 kB\nMemFree:         100 kB\nMemAvailable:    8192000 kB\n";
        let memory = parse_memory(text).unwrap();
        assert_eq!((memory.available, memory.total), (Bytes(8_192_000 << 10), Bytes(16_384_000 << 10)));
        for bad in [
            "",
            "MemTotal: 5 kB\n",
            "MemTotal: 0 kB\nMemAvailable: 0 kB\n",
            "MemTotal: 5 kB\nMemAvailable: 6 kB\n",
            "MemTotal: 5 kB\nMemAvailable: x kB\n",
            "MemTotal: 5\nMemAvailable: 5\n",
            "MemTotal: 99999999999999999999 kB\nMemAvailable: 5 kB\n",
            "MemTotal: 18446744073709551615 kB\nMemAvailable: 5 kB\n",
        ] {
            assert_eq!(parse_memory(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn idle_is_what_was_idle_between_two_looks() {
        let at = |text: &str| parse_cpu(text);
        let first = at("cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 1 1 1\n").unwrap();
        let second = at("cpu  150 0 150 750 150 0 0 0 60 0\n").unwrap();
        assert_eq!(second.idle_since(first).unwrap().to_string(), "50");
        assert_eq!(second.idle_since(second), None, "no time went by");
        assert_eq!(first.idle_since(second), None, "the counters went back");
        for bad in ["", "cpu", "cpu  1 2 3", "cpu  1 2 3 x 5", "cpu0 1 2 3 4 5"] {
            assert_eq!(at(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn of_pressure_what_is_there_is_told() {
        let text = "some avg10=0.00 avg60=1.25 avg300=0.10 total=123\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
        let shown =
            |pressure: Pressure| (pressure.some.map(|it| it.to_string()), pressure.full.map(|it| it.to_string()));
        assert_eq!(shown(parse_pressure(text)), (Some("1.25".into()), Some("0".into())));
        assert_eq!(shown(parse_pressure("some avg10=0.00 avg60=7.00 avg300=0 total=1\n")), (Some("7".into()), None));
        assert_eq!(shown(parse_pressure("some avg60=-1 \nfull avg60=101.0\n")), (None, None));
    }

    #[test]
    fn a_process_is_told_by_its_beginning_whatever_its_name() {
        let mut fields: Vec<String> = (3..=52).map(|number| number.to_string()).collect();
        fields[0] = "S".into();
        let text = format!("4711 (a) b (c)) {}\n", fields.join(" "));
        assert_eq!(parse_process(&text), Some((14 + 15, 22)));
        assert_eq!(parse_process("4711 (x) S 1 2"), None);
    }

    proptest! {
        #[test]
        fn nothing_in_these_files_makes_the_daemon_fall(text in "(?s).{0,400}") {
            let _ = (parse_memory(&text), parse_cpu(&text), parse_pressure(&text), parse_process(&text));
        }
    }
}
