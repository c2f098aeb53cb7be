//! What the VMs of this host use, of whichever node on it: found by their cgroups, measured by their processes.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::PathBuf,
    time::Duration,
};

use kibo_crds::{Bytes, InstanceId, MilliCpu};

use super::proc::Proc;

/// In what unit the kernel tells CPU time to programs, on every architecture that has KVM.
const TICKS_PER_SECOND: u64 = 100;

/// What one VM uses, or all together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmUsage {
    /// Absent at the first look: it takes two.
    pub cpu: Option<MilliCpu>,
    pub memory: Option<Bytes>,
}

/// What one look has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// All VMs of the host together; absent where none was ever started.
    pub all: Option<VmUsage>,
    /// Those that run, whichever node of this host has them.
    pub each: BTreeMap<InstanceId, VmUsage>,
}

/// Looks again and again.
#[derive(Debug)]
pub struct Vms {
    /// `kibotos` in a hierarchy of cgroups; below it are nodes, and Instances below these.
    cgroups: PathBuf,
    /// CPU time of each process at the last look.
    before: Option<HashMap<Process, u64>>,
    were_seen: bool,
}

/// By its number and its beginning: numbers are used again.
type Process = (u32, u64);

/// In ticks and bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    ticks: u64,
    memory: Option<u64>,
}

impl Sum {
    fn add(&mut self, ticks: u64, memory: Option<Bytes>) {
        self.ticks = self.ticks.saturating_add(ticks);
        if let Some(memory) = memory {
            self.memory = Some(self.memory.unwrap_or_default().saturating_add(memory.0));
        }
    }

    /// `over` so much time, if the time is known in which the ticks were used.
    fn usage(self, over: Option<Duration>) -> VmUsage {
        VmUsage { cpu: over.and_then(|over| milli_cpu(self.ticks, over)), memory: self.memory.map(Bytes) }
    }
}

impl Vms {
    pub fn new(cgroups: PathBuf) -> Self {
        Self { cgroups, before: None, were_seen: false }
    }

    /// What they use, `since` being the time since the last look.
    pub fn look(&mut self, proc: &Proc, since: Option<Duration>) -> Look {
        let mut now = HashMap::new();
        let mut each: BTreeMap<Option<InstanceId>, Sum> = BTreeMap::new();
        for (instance, pid) in self.processes() {
            // One that ends meanwhile uses nothing.
            let Some((ticks, began)) = proc.process_cpu(pid) else { continue };
            let before = self.before.as_ref().and_then(|before| before.get(&(pid, began)).copied());
            now.insert((pid, began), ticks);
            each.entry(instance)
                .or_default()
                .add(ticks.saturating_sub(before.unwrap_or_default()), proc.process_memory(pid));
        }
        self.were_seen |= !now.is_empty();
        let over = since.filter(|_| self.before.is_some());
        self.before = self.were_seen.then_some(now);
        // Where nothing runs nothing is used; what runs and cannot be read is not nothing.
        let mut all = Sum { ticks: 0, memory: each.is_empty().then_some(0) };
        for sum in each.values() {
            all.add(sum.ticks, sum.memory.map(Bytes));
        }
        let named = |(instance, sum): (Option<InstanceId>, Sum)| Some((instance?, sum.usage(over)));
        Look { all: self.were_seen.then(|| all.usage(over)), each: each.into_iter().filter_map(named).collect() }
    }

    /// With the Instance that each belongs to, where its cgroup is named after one.
    fn processes(&self) -> Vec<(Option<InstanceId>, u32)> {
        let below = |path: PathBuf| {
            let entries = fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
            entries.map(|entry| entry.path()).filter(|path| path.is_dir())
        };
        let mut found = Vec::new();
        for cgroup in below(self.cgroups.clone()).flat_map(below) {
            let instance = cgroup.file_name().and_then(|name| name.to_str()?.parse().ok());
            let Ok(listed) = fs::read_to_string(cgroup.join("cgroup.procs")) else { continue };
            found.extend(listed.lines().filter_map(|line| line.parse().ok()).map(|pid| (instance, pid)));
        }
        found
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
    fn vms_are_counted_together_and_each_by_the_time_between() {
        let root = tempfile::tempdir().unwrap();
        let (root, proc) = (root.path(), Proc::new(root.path().to_owned()));
        let mut vms = Vms::new(root.join("kibotos"));
        let ten_seconds = Some(Duration::from_secs(10));
        assert_eq!(vms.look(&proc, ten_seconds), Look::default(), "none was ever started");
        let (a, b) = (InstanceId::generate(), InstanceId::generate());
        vm(root, &a.to_string(), 11, 500, 1023);
        let first = vms.look(&proc, ten_seconds);
        let unknown_cpu = VmUsage { cpu: None, memory: Some(Bytes(1 << 20)) };
        assert_eq!(first, Look { all: Some(unknown_cpu), each: [(a, unknown_cpu)].into() });
        // A second of the first, and all that the second has used since it began.
        vm(root, &a.to_string(), 11, 500 + TICKS_PER_SECOND, 1023);
        vm(root, &b.to_string(), 12, 3 * TICKS_PER_SECOND, 2047);
        // No Instance of ours; it counts for the host.
        vm(root, "by-hand", 13, 0, 1023);
        let second = vms.look(&proc, ten_seconds);
        let used = |milli, mib| VmUsage { cpu: Some(MilliCpu(milli)), memory: Some(Bytes::mib(mib)) };
        assert_eq!(second, Look { all: Some(used(400, 4)), each: [(a, used(100, 1)), (b, used(300, 2))].into() });
        // Another process of the same number has used what it used since it began.
        let stat = fs::read_to_string(root.join("11/stat")).unwrap();
        fs::write(root.join("11/stat"), stat.replace(" 77 ", " 78 ")).unwrap();
        assert_eq!(vms.look(&proc, ten_seconds).each[&a], used(600, 1));
        fs::remove_dir_all(root.join("kibotos")).unwrap();
        let last = vms.look(&proc, ten_seconds);
        assert_eq!(last, Look { all: Some(used(0, 0)), each: BTreeMap::new() }, "they have ended");
    }
}
