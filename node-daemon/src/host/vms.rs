//! What the VMs of this host use, of whichever node on it: found by their cgroups, measured by their processes.

use std::{collections::HashMap, fs, path::PathBuf, time::Duration};

use kibo_crds::{Bytes, MilliCpu};

use super::proc::Proc;

/// In what unit the kernel tells CPU time to programs, on every architecture that has KVM.
const TICKS_PER_SECOND: u64 = 100;

/// All VMs of the host together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmUsage {
    /// Absent at the first look: it takes two.
    pub cpu: Option<MilliCpu>,
    pub memory: Option<Bytes>,
}

/// Looks again and again.
#[derive(Debug)]
pub struct Vms {
    /// `kibotos` in a hierarchy of cgroups; below it are nodes, and Instances below these.
    cgroups: PathBuf,
    /// CPU time of each process at the last look, by its number and beginning.
    before: Option<HashMap<(u32, u64), u64>>,
    were_seen: bool,
}

impl Vms {
    pub fn new(cgroups: PathBuf) -> Self {
        Self { cgroups, before: None, were_seen: false }
    }

    /// What they use, `since` being the time since the last look. `None`: none was ever there.
    pub fn look(&mut self, proc: &Proc, since: Option<Duration>) -> Option<VmUsage> {
        let processes = self.processes();
        // A process that ends meanwhile is not there for either.
        let ticks: HashMap<_, _> = processes
            .iter()
            .filter_map(|pid| proc.process_cpu(*pid).map(|(ticks, began)| ((*pid, began), ticks)))
            .collect();
        self.were_seen |= !ticks.is_empty();
        if !self.were_seen {
            return None;
        }
        let memory = processes.iter().filter_map(|pid| proc.process_memory(*pid)).map(|bytes| bytes.0);
        let memory = memory.fold(0, u64::saturating_add);
        let cpu = match (&self.before, since) {
            (Some(before), Some(since)) => {
                let used = |(process, now): (&(u32, u64), &u64)| {
                    now.saturating_sub(before.get(process).copied().unwrap_or_default())
                };
                milli_cpu(ticks.iter().map(used).fold(0, u64::saturating_add), since)
            }
            _ => None,
        };
        self.before = Some(ticks);
        Some(VmUsage { cpu, memory: Some(Bytes(memory)) })
    }

    fn processes(&self) -> Vec<u32> {
        let below = |path: PathBuf| {
            let entries = fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
            entries.map(|entry| entry.path()).filter(|path| path.is_dir())
        };
        let instances = below(self.cgroups.clone()).flat_map(below);
        let listed = instances.filter_map(|instance| fs::read_to_string(instance.join("cgroup.procs")).ok());
        listed.flat_map(|text| text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<_>>()).collect()
    }
}

fn milli_cpu(ticks: u64, since: Duration) -> Option<MilliCpu> {
    let micros = u128::from(ticks) * 1_000_000 / u128::from(TICKS_PER_SECOND);
    let milli = (micros * 1000).checked_div(since.as_micros())?;
    u64::try_from(milli).ok().map(MilliCpu)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn vm(root: &Path, instance: &str, pid: u32, ticks: u64, kib: u64) {
        let cgroup = root.join("kibotos/node-a").join(instance);
        fs::create_dir_all(&cgroup).unwrap();
        fs::write(cgroup.join("cgroup.procs"), format!("{pid}\n")).unwrap();
        let process = root.join(pid.to_string());
        fs::create_dir_all(&process).unwrap();
        let stat = format!("{pid} (qemu) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 77 0 0\n");
        fs::write(process.join("stat"), stat).unwrap();
        fs::write(process.join("status"), format!("RssAnon:\t{kib} kB\nRssFile:\t9 kB\nRssShmem:\t1 kB\n")).unwrap();
    }

    #[test]
    fn vms_are_counted_together_and_their_cpu_by_the_time_between() {
        let root = tempfile::tempdir().unwrap();
        let (root, proc) = (root.path(), Proc::new(root.path().to_owned()));
        let mut vms = Vms::new(root.join("kibotos"));
        let ten_seconds = Some(Duration::from_secs(10));
        assert_eq!(vms.look(&proc, ten_seconds), None, "none was ever started");
        vm(root, "inst-a", 11, 500, 1023);
        let first = vms.look(&proc, ten_seconds).unwrap();
        assert_eq!((first.cpu, first.memory), (None, Some(Bytes(1 << 20))));
        // A second of the first, and all that the second has used since it began.
        vm(root, "inst-a", 11, 500 + TICKS_PER_SECOND, 1023);
        vm(root, "inst-b", 12, TICKS_PER_SECOND, 1023);
        let second = vms.look(&proc, ten_seconds).unwrap();
        assert_eq!((second.cpu, second.memory), (Some(MilliCpu(200)), Some(Bytes(2 << 20))));
        fs::remove_dir_all(root.join("kibotos")).unwrap();
        let last = vms.look(&proc, ten_seconds).unwrap();
        assert_eq!(last, VmUsage { cpu: Some(MilliCpu(0)), memory: Some(Bytes(0)) }, "they have ended");
    }
}
